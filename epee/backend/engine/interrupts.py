"""What an exception that comes out of a call leaves of it, and how the books get in order again.

Python runs signal handlers in the main thread between any two instructions of ours, and a wait may end by a lack of
quorum or a shortage. Whatever comes out of a call passes `broken_off` before the lock is given back. It reads the truth
from this rank's own outbox (which words were published) and from the mailroom's open entry, so it does not matter
between which two lines the exception came:

- a collective whose results were being written is finished: its sources stay in the outboxes until this rank says that
  it is through. The caller gets the exception all the same, with the results complete;
- a message that has been delivered is kept: what was received for the next receive that wants it, and a send so that
  the same one again completes at once (`p2p/channel.py`);
- any other call that the caller can no longer reach is given up: if it was published it is withdrawn, so that it fails
  on all ranks or, where one has completed it, on none; if not, the peers find a refusal in its place. Its tensor is as
  before;
- a call that has completed although its caller got the exception, or may still, is *unclaimed*: its results go to
  private copies. The next call is taken for its repetition if it is of the same kind: it continues the number and gets
  the results (`claim`). So the ranks stay in step;
- a request that the caller still holds (an interrupted `wait`) stays open.
"""

from __future__ import annotations

import time

from ...errors import InvalidArgument, InvalidState
from ..collectives.plan import Make, Plan, refused
from ..engine_face import EngineFace
from ..p2p.message import Message
from .entry import ENDED
from .operation import Driven, Operation

MAX_INTERRUPTS = 100  # in a row, put off while the books are brought in order


def broken_off(engine: EngineFace, exc: BaseException, op: Driven | None = None) -> None:
    """Bring the books in order when `exc` comes out of a call; give `op` up unless its results are written.

    The call holds the lock or has just given it back; here it is taken if need be, and given back in the end. Further
    interrupts are put off until that is done; `exc` is the one that the caller sees.
    """
    for _ in range(MAX_INTERRUPTS):
        try:
            engine.entry.hold()
            engine.waits.widen()
            _give_up(engine, exc, op)
            engine.entry.leave_wholly()
            return
        except Exception:
            engine.entry.leave_wholly()
            raise
        except BaseException:  # noqa: BLE001 - put off, see above
            continue


def _give_up(engine: EngineFace, exc: BaseException, op: Driven | None) -> None:
    if engine.flags & ENDED:  # whoever closes the group ends what is open
        if op is not None:
            op.fail(exc)
        return
    settle(engine, op)
    if isinstance(op, Message):
        engine.mail.break_off(op, exc)
    elif op is not None and op.seq <= engine.seq:  # else it was not counted yet: it has not begun
        disown(engine, op, exc)
    engine.retire_heads()


def tell(engine: EngineFace, exc: BaseException, message: Message) -> None:
    """Note at `exc`, which comes out of the call of `message`, what the caller cannot see from it."""
    state = engine.mail.state_of(message)
    if state and hasattr(exc, "add_note"):  # Python 3.11 and later
        exc.add_note(f"epee: {message.describe(engine.box)}: {state}")


def settle(engine: EngineFace, op: Driven | None = None) -> None:
    """Finish what was half done: an entry of the mailroom, a number without a call, results half written.

    Args:
        engine: its lock is held.
        op: the call that was interrupted, when the caller knows it.
    """
    engine.mail.settle()
    queue, box = engine.queue, engine.box
    last = queue[-1].seq if queue else engine.num_retired
    if engine.seq > last:  # counted, but neither in the queue nor through
        if not isinstance(op, Operation) or op.seq != engine.seq:
            error = InvalidState("the call was interrupted")
            op = Operation(refused("call", error), engine.seq, box, 0.0)
            op.fail(error)
        queue.append(op)
    for open_op in queue:
        open_op.resync(open_op.box)
    head = queue[0] if queue else None
    if head is not None and head.writing and not head.done:
        try:
            head.finish(head.box)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it belongs to that call
            head.fail(exc)


def disown(engine: EngineFace, op: Operation, exc: BaseException) -> None:
    """End a call whose caller gets `exc` instead, or leave it unclaimed."""
    try:
        op.disown(exc)
    except MemoryError:  # for the private copies: its results cannot be kept
        op.fail(exc)
    if op.told is not None and op not in engine.unclaimed:
        engine.unclaimed.append(op)


def claim(engine: EngineFace, make: Make) -> Operation | None:
    """Return the unclaimed call that `make` repeats, its results in the places of the repetition; None: a new call.

    The end of that call must be known first. A call of another kind repeats none of them: its caller goes on without
    their results, as the other ranks do that have them.

    Raises:
        CommTimeoutError: the end is still open; nothing was issued, the call may be repeated.
    """
    for op in engine.unclaimed[:]:
        plan = _repetition(op, make)
        if plan is None:
            continue
        if not op.done:
            engine.drive(op, time.monotonic() + engine.timeout_s)
        if op.error is None:
            plan.deliver(op.plan.sinks())
            engine.contributors = op.box.members
            del engine.unclaimed[: engine.unclaimed.index(op) + 1]
            return op
        engine.unclaimed.remove(op)
    engine.unclaimed.clear()
    return None


def _repetition(op: Operation, make: Make) -> Plan | None:
    """Return the plan of an unclaimed call for the places of the call that `make` plans, if it repeats it."""
    try:
        plan = make(op.box)
    except InvalidArgument:  # it does not fit that call's members
        return None
    return plan if plan.is_like(op.plan) else None
