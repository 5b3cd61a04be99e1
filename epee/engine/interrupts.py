"""Recovery after an exception leaves a call: the state of the call and of the group are made consistent.

Python runs signal handlers in the main thread between any two instructions, and a wait may end by a lack of quorum or
by a shortage. The class of an exception does not identify its origin: a handler may raise any, and Python itself raises
`MemoryError` and `RecursionError`. Only an `EpeeError` that the protocol or the plan of a call raises is the outcome of
that call (`errors.is_own`, `Engine.is_interrupt`); all others interrupt the thread that advances it.

Every exception that leaves a call passes `broken_off` before the lock is released. It reads the actual state from this
rank's own outbox (which words were published) and from the open entry of the message state, so it does not matter
between which two lines the exception occurred:

- a collective whose results were being written is finished: its sources stay in the outboxes until this rank reports
  that it has ended the call. The caller gets the exception all the same, with the results complete;
- a delivered message is kept: a received one for the next receive that matches it, a sent one so that its repetition
  completes at once (`p2p/channel.py`);
- any other call that the caller can no longer reach is aborted. If it was published, it fails on all ranks or, if one
  rank has completed it, on none; if it was not, the peers find a refusal in its cell. Its tensor is unchanged;
- a call that has completed although its caller got the exception, or may still complete, is *unclaimed*: its results go
  to private copies. The next call is taken for its repetition if it is of the same kind: it continues the number and
  gets the results (`claim`). So the ranks stay in step;
- a request that the caller still holds (an interrupted `wait`) stays open.

A collective that has ended, or was issued, before the exception leaves the group's method is treated so as well
(`Engine.disown_latest`): its caller has no work. In torch's own lines behind that, up to the return of
`dist.all_reduce` to the program, the call is made, and a repetition is a further call. No code of epee's runs where
such an exception passes, and the next call cannot tell it from one raised by the program's own next line: both leave a
finished call. A mark that the work's `wait` takes away would not do: CPython runs handlers behind that as well (in 3.11
after torch's outermost wrapper), and by the next call the program may have changed the tensors that hold the only copy
of the results.

A recovery step that is interrupted as well runs in a thread of its own (`Apart`), where no handler runs and the stack
is empty; so does the writing of results. If they cannot be written there either, or cannot be kept for a repetition,
the ranks are not in step any more, and the group ends on all of them (`Engine.break_down`).
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import AbortedError, InvalidArgument, InvalidState, expected, is_of_handler, is_own
from .entry import ENDED
from .operation import Driven, Operation, timeout_of
from .p2p.message import Message
from .plan import Make, Plan, refused

if TYPE_CHECKING:
    from .engine import Engine

MAX_INTERRUPTS = 100  # in a row, deferred while the state is being repaired
APART_S = 60.0  # longer than the largest results take to be written


class Apart:
    """A repair step in a thread of its own. The lock stays with the thread that waits for it.

    Attributes:
        error: the exception that the step has raised.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._step = step
        self._ident = 0
        self._is_over = self._is_dropped = False
        self._gate = _thread.allocate_lock()
        self._gate.acquire()

    def start(self) -> None:
        """Start the thread; not by `threading.Thread`, whose `start` needs stack, and waits without a timeout."""
        _thread.start_new_thread(self._run, ())

    def is_current(self) -> bool:
        """Return whether this is the thread of the step."""
        return self._ident == threading.get_ident() and not self._is_over

    def _run(self) -> None:
        self._ident = threading.get_ident()
        try:
            if not self._is_dropped:
                self._step()
        except BaseException as exc:  # noqa: BLE001 - for the thread that waits
            self.error = exc
        self._is_over = True
        self._gate.release()

    def wait(self) -> bool:
        """Wait until the step is over; False: not in time. Interrupts during the wait are deferred."""
        until = time.monotonic() + APART_S
        while not self._is_over and time.monotonic() < until:
            try:
                self._gate.acquire(timeout=1.0)
            except BaseException:  # noqa: BLE001 - put off, see `_mend`
                continue
        return self._is_over

    def drop(self) -> bool:
        """Let the thread do nothing, or wait for its step if that has begun; False: it does not end."""
        self._is_dropped = True  # before the check: the thread sets `_ident`, and reads this then
        return self._ident == 0 or self.wait()


class Recovery:
    """The recovery of one group after exceptions that left its calls.

    Attributes:
        broken: the exception that has left a call, and the call, until the state is consistent again.
        repair: the repair step that runs in a thread of its own, or ran there last.
        unclaimed: calls whose callers got an error before the outcome was known; the next call may be a repetition.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.broken: tuple[BaseException, Driven | None] | None = None
        self.repair: Apart | None = None
        self.unclaimed: list[Operation] = []

    def _run_apart(self, step: Callable[[], object]) -> BaseException | None:
        """Run a repair step in a thread of its own, and return what it raises; in this thread if no other is left.

        Only an exception that interrupts this thread is raised.
        """
        if self.repair is not None and self.repair.is_current():
            return _error_of(step)
        if self.repair is not None and not self.repair.drop():  # an interrupt has left it
            return TimeoutError(f"an earlier repair has not ended within {APART_S:.0f} s")
        self.repair = apart = Apart(step)
        try:
            apart.start()
        except expected(RuntimeError):
            self.repair = None
            error = _error_of(step)
            if error is not None and (is_of_handler(error) or not isinstance(error, Exception)):
                raise error from None
            return error
        error = apart.error if apart.wait() else TimeoutError(f"not done within {APART_S:.0f} s")
        self.repair = None
        return error

    def broken_off(self, exc: BaseException, op: Driven | None = None) -> None:
        """Make the group's state consistent when `exc` leaves a call; abort `op` unless its results are written.

        The call holds the lock or has just released it; this function takes it if needed, and releases it in the end.
        Further interrupts are deferred until then; the caller sees `exc`.

        Raises:
            AbortedError: that was not possible; the group has ended, on all ranks.
        """
        engine = self._engine
        was_ended = engine.flags & ENDED
        self._mend(partial(self._abort, exc, op))
        if not was_ended and engine.ended_by:
            raise AbortedError(engine.ended_by) from exc

    def recover(self) -> None:
        """Make the group's state consistent when a call finds the lock still held by an earlier call of its thread."""
        exc, op = self.broken or (InvalidState("the call was interrupted"), None)
        if not self._mend(partial(self._abort, exc, op)):
            raise InvalidState("an interrupted call of this group could not be brought to an end yet; try again")

    def _mend(self, step: Callable[[], None]) -> bool:
        """Run a repair in this thread and, if it does not complete, in a thread of its own.

        If there is not even the stack for that, or exceptions never cease, the lock stays held and `broken` records the
        remaining work: the next call of this thread repairs (`recover`), and nothing advances before. Then return
        False.
        """
        engine = self._engine
        for attempt in range(MAX_INTERRUPTS):
            try:
                engine.peer_regions.exports.let_go()  # first: who has the engine's lock may wait for that of the links
                engine.entry.hold()
                engine.waits.widen()
                if attempt == 0:
                    step()
                else:
                    error = self._run_apart(partial(self._insist, step))
                    if error is not None:
                        raise error
                self.broken = None
                engine.entry.leave_wholly()
                return True
            except BaseException as error:
                if is_own(error):
                    self.broken = None
                    engine.entry.leave_wholly()
                    raise
        return False

    def _insist(self, step: Callable[[], None]) -> None:
        """Run a repair in a thread where nothing interrupts it; if that is not possible, end the group."""
        try:
            step()
        except BaseException as error:
            if is_own(error):
                raise
            told = f"rank {self._engine.peer_regions.rank} could not bring an interrupted call to an end"
            self._engine.break_down(told, error)

    def _abort(self, exc: BaseException, op: Driven | None) -> None:
        engine = self._engine
        if engine.flags & ENDED:  # the call that closes the group ends what is open
            if op is not None:
                op.fail(exc)
            return
        self._settle(op)
        if engine.flags & ENDED:
            return
        if isinstance(op, Message):
            engine.mail.break_off(op, exc)
        elif op is not None and op.seq <= engine.seq:  # else it was not counted yet: it has not begun
            op.disown(exc)
            if op.told is not None and op not in self.unclaimed:
                self.unclaimed.append(op)
        engine.retire_heads()

    def add_note(self, exc: BaseException, message: Message) -> None:
        """Add a note to `exc`, which leaves the call of `message`, about state that the caller cannot see from it."""
        state = self._engine.mail.state_of(message)
        if state and hasattr(exc, "add_note"):  # Python 3.11 and later
            exc.add_note(f"epee: {message.describe(self._engine.peer_regions)}: {state}")

    def _settle(self, op: Driven | None = None) -> None:
        """Finish incomplete steps: an entry of the message state, a number without a call, partly written results.

        `op`: the call that was interrupted, when the caller knows it. The lock is held.
        """
        engine = self._engine
        engine.mail.settle()
        queue, peer_regions = engine.queue, engine.peer_regions
        last = queue[-1].seq if queue else engine.num_retired
        if engine.seq > last:  # counted, but neither in the queue nor ended
            if not isinstance(op, Operation) or op.seq != engine.seq:
                error = InvalidState("the call was interrupted")
                op = Operation(refused("call", error), engine.seq, peer_regions, 0.0)
                op.fail(error)
            queue.append(op)
        for open_op in queue:
            open_op.resync(open_op.peer_regions)
        head = queue[0] if queue else None
        if head is not None and head.writing and not head.done:
            self._complete(head, partial(head.finish, head.peer_regions))

    def end_by(self, head: Operation, exc: BaseException) -> None:
        """End the head of the queue with its own error `exc`; complete it if others may have completed it."""
        head.resync(head.peer_regions)
        if not (head.writing or head.completing):
            head.give_up(exc)
        elif is_own(exc):
            head.fail(exc)
        else:
            self._complete(head, partial(head.step, head.peer_regions))

    def _complete(self, head: Operation, step: Callable[[], object]) -> None:
        """Continue a call that must be completed and was interrupted once; if that fails once more, the group ends."""
        error = self._run_apart(step)
        if error is None:
            return
        if is_own(error):
            head.fail(error)
        else:
            told = f"rank {self._engine.peer_regions.rank} could not finish a call that others may have completed"
            self._engine.break_down(
                f"{told}: {head.describe(head.peer_regions)} has failed twice in writing its results", error
            )

    def claim(self, make: Make, opts: Any = None) -> Operation | None:
        """Return the unclaimed call that `make` repeats, with its results in the tensors of the repetition.

        None: a new call. The outcome of that call must be known first: the repetition waits for it for its own timeout.
        A call of another kind repeats none of them: its caller continues without their results, as do the other ranks
        that have them.

        Raises:
            CommTimeoutError: the outcome is still open; nothing was issued, the call may be repeated.
        """
        engine = self._engine
        for op in self.unclaimed[:]:
            plan = _repetition(op, make)
            if plan is None:
                continue
            if not op.done:
                engine.drive(op, time.monotonic() + timeout_of(opts, engine.timeout_s))
            if op.error is None:
                plan.deliver(op.plan.sinks())
                engine.contributors = op.peer_regions.members
                del self.unclaimed[: self.unclaimed.index(op) + 1]
                return op
            self.unclaimed.remove(op)
        self.unclaimed.clear()
        return None


def _error_of(step: Callable[[], object]) -> BaseException | None:
    try:
        step()
    except BaseException as exc:  # noqa: BLE001 - returned
        return exc
    return None


def _repetition(op: Operation, make: Make) -> Plan | None:
    """Return the plan of an unclaimed call for the tensors of the call that `make` plans, if it repeats it."""
    try:
        plan = make(op.peer_regions)
    except expected(InvalidArgument):  # it does not fit that call's members
        return None
    return plan if plan.is_like(op.plan) else None
