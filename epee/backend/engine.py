"""The calls of one group: in what order they run, who drives them, how a wait ends.

Every collective call gets the next sequence number and is published at once when the outbox has room. Unfinished calls
stand in a queue and complete in order. Whoever waits drives the head of the queue: the caller's thread in `run` and
`wait`; a background thread (`helper.py`) only for calls that nobody waits for.

One lock guards the state; `waiting.py` has it, and the ways to wait for a word. Only a wait that has slept looks for
trouble: a dead peer (pidfd), one that has left, the deadline. The fast path pays one test for all of this: `flags`,
zero while all is well. Failure handling proper hooks in at `_anomaly` and in `trouble.py`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import AbortedError, InvalidArgument, InvalidState
from ..memory.signals import futex_wake
from ..view.detector import DeathWatch
from . import trouble
from .helper import Helper
from .message import Message
from .operation import Block, Operation, Plan, RefusedPlan, refused
from .outbox import (
    CELL_PAYLOAD_BYTES,
    CELL_WORDS,
    CONSUMED,
    DETAIL,
    DRAINED,
    FILLED,
    GAVE_UP,
    LIFE,
    LIFE_ABORTED,
    LIFE_LEFT,
    MERGED,
    NUM_CELLS,
    OFFSET,
    PREAMBLE,
    SIGNATURE,
    Outboxes,
)
from .p2p import Mailroom
from .waiting import ABORTED, CLOSED, FORKED, NAP_ROUNDS, Waiting
from .wake import publish_word

Driven = Operation | Message


class Engine(Waiting):
    """State of one group in one process. It never refers to the process group object, so that can be collected.

    Attributes:
        timeout_s: how long a call waits when it names no time-out.
    """

    def __init__(self, box: Outboxes, watch: DeathWatch, timeout_s: float) -> None:
        super().__init__(box)
        self.watch = watch
        self.timeout_s = timeout_s
        self.seq = 0
        self.queue: deque[Operation] = deque()
        self.mail = Mailroom(box)
        self._finished: list[Driven] = []
        self._helper = Helper(self)

    def leave(self) -> None:
        """Give the lock back, then tell futures about calls that ended."""
        self._owner = 0
        if not self._finished:
            self._lock.release()
            return
        finished, self._finished = self._finished, []
        self._lock.release()
        for op in finished:
            listeners, op.on_done = op.on_done, None
            for listener in listeners or ():
                listener(op)

    # ---- collectives

    def run(self, plan: Plan, opts: Any = None) -> None:
        """Run a collective to its end in the caller's thread. Raises what the call ends with."""
        self.enter()
        op = None
        try:
            self.seq = seq = self.seq + 1
            op = Operation(plan, seq, self.box, self.timeout_s, opts)
            queue = self.queue
            if not queue and self._express(op):
                return
            queue.append(op)
            self._publish_waiting()
            self.drive(op)
        except BaseException as exc:  # an interrupt as well must not leave a half-finished call behind
            if op is not None:
                self._give_up(op, exc)
            raise
        finally:
            self.leave()
        if op.error is not None:
            raise op.error

    def _express(self, op: Operation) -> bool:
        """Run a small call from end to end when nothing is in its way; False leaves the rest to `drive`.

        This is `Operation.publish` and `step` for a payload inside the cell, which lies at the same place on all ranks.
        """
        box, plan, cell, seq = self.box, op.plan, op.cell, op.seq
        preamble = plan.preamble
        used = 0 if preamble is None else (8 * len(preamble) + 63) & -64
        if plan.rounds > 1 or plan.merge_bytes:
            return False
        if used + plan.put_bytes > CELL_PAYLOAD_BYTES or seq > box.cells_free_until:
            return False
        own, tag = box.own, op.tag
        inline = 8 * (cell + PREAMBLE) + used
        op.base = base = inline if plan.put_bytes else 0
        if base:
            plan.put(box, 0, base)
        own[cell + SIGNATURE] = signature = plan.signature
        own[cell + DETAIL] = detail = plan.detail
        own[cell + OFFSET] = base
        own[cell + GAVE_UP] = 0
        if preamble is not None:
            own[cell + PREAMBLE : cell + PREAMBLE + len(preamble)] = memoryview(preamble)
            own[cell + FILLED] = op.filled = 1  # a peer may need rounds, and then so do we
            own[cell + MERGED] = own[cell + DRAINED] = 0
        op.offsets[box.rank] = base
        op.published = True
        publish_word(box, cell, tag)
        for words, peer in zip(box.peer_words, box.peers, strict=True):
            if words[cell] != tag:
                for _ in range(self._num_loads):
                    if words[cell] == tag:
                        break
                else:
                    return False
            offset = words[cell + OFFSET]
            if words[cell + SIGNATURE] != signature or words[cell + DETAIL] != detail or offset not in (0, inline):
                return False
            op.offsets[peer] = offset
        if preamble is not None:
            plan.agree(box, op.offsets, op)
            if plan.rounds > 1:
                return False
        plan.take(box, 0, op.offsets)
        plan.commit()
        op.done = True
        own[CONSUMED] = seq
        return True

    def start(self, plan: Plan, opts: Any = None) -> Operation:
        """Issue a collective and return; its first contribution is published when the outbox has room."""
        self.enter()
        try:
            self.seq += 1
            op = Operation(plan, self.seq, self.box, self.timeout_s, opts)
            op.start_clock()
            self.queue.append(op)
            self._publish_waiting()
            self._helper.kick()
        finally:
            self.leave()
        return op

    def refuse(self, name: str, exc: Exception) -> None:
        """Tell the peers that this rank's next collective is refused, and use up its sequence number."""
        if self.flags:
            return
        op = self.start(refused(name, exc), None)
        op.on_done = None

    def _publish_waiting(self) -> None:
        for op in self.queue:
            if not op.published and not op.done:
                try:
                    if not op.publish(self.box):
                        return  # in order: what follows must not take the room
                except Exception as exc:  # noqa: BLE001 - whatever it is, it belongs to that call
                    op.fail(exc)

    # ---- point to point

    def post(self, message: Message) -> None:
        """Issue a send or a receive; it moves as far as it can at once."""
        self.enter()
        try:
            message.started = time.monotonic()
            message.deadline = message.started + self.timeout_s
            self.mail.post(message)
            if not message.done:
                self._helper.kick()
        except Exception as exc:
            # its error goes to the caller: it must not stay posted and take a later message
            message.fail(exc)
            self.mail.cancel(message)
            raise
        finally:
            self.leave()

    # ---- waiting

    def wait(self, op: Driven, timeout_s: float | None) -> None:
        """Drive until `op` is done; raise its error.

        Raises:
            CommTimeoutError: `timeout_s` passed first; the call goes on and may be waited for again.
        """
        if not op.done:
            self.enter_to_wait(op)
            try:
                until = time.monotonic() + timeout_s if timeout_s is not None else None
                self.drive(op, until)
            finally:
                self.leave()
        if op.error is not None:
            raise op.error.with_traceback(None)

    def enter_to_wait(self, op: Driven) -> None:
        """Like `enter`; a call that an abort ended in the meantime reports that instead."""
        try:
            self.enter()
        except (AbortedError, InvalidState):
            if op.error is not None:
                raise op.error from None
            raise

    def drive(self, op: Driven, until: float | None = None) -> None:
        """Step `op` and what is before it until it is done. Called and returns with the lock held."""
        op.num_waiters += 1
        try:
            while not op.done:
                block = self.advance(op)
                if block is None:
                    continue
                head = op if isinstance(op, Message) else self.queue[0]
                self._wait(block, head, op, until)
            if not isinstance(op, Message):
                self.retire_heads()
        finally:
            op.num_waiters -= 1
            if self.queue or not op.done:  # nobody waits for these now
                self._helper.go_on(soon=bool(self.queue and self.queue[0].on_done))

    def advance(self, op: Driven) -> Block | None:
        """Move `op` (or the head of the queue it stands in) one step; None when something ended."""
        if isinstance(op, Message):
            try:
                block = self.mail.step(op)
            except Exception as exc:  # noqa: BLE001 - a peer's impossible word, say: it belongs to that message
                op.fail(exc)
                self.mail.cancel(op)
                self.retire(op)
                block = None
            if self.mail.finished:
                self._finished += self.mail.finished
                self.mail.finished.clear()
            return block
        head = self.queue[0]
        try:
            block = head.step(self.box)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it belongs to that call
            head.fail(exc)
            block = None
        if block is None:
            self.retire_heads()
        return block

    def retire_heads(self) -> None:
        """Take finished calls off the queue, in order, and say that this rank is through with them."""
        queue = self.queue
        retired = False
        while queue and queue[0].done:
            op = queue.popleft()
            if op.error is not None and op.published:
                self.box.own[op.cell + GAVE_UP] = 1
            elif op.error is not None:
                self._publish_failed(op)
            self.box.own[CONSUMED] = op.seq
            retired = True
            self.retire(op)
        if retired and queue:
            self._publish_waiting()

    def _publish_failed(self, op: Operation) -> None:
        """A call that failed before it was published: its peers must still find a header."""
        plan = op.plan if isinstance(op.plan, RefusedPlan) else refused(op.plan.name, InvalidArgument(str(op.error)))
        stand_in = Operation(plan, op.seq, self.box, 0.0)
        stand_in.publish(self.box)

    def retire(self, op: Driven) -> None:
        if op.on_done:
            self._finished.append(op)

    def _give_up(self, op: Operation, exc: BaseException) -> None:
        op.fail(exc)
        if self.queue and self.queue[0].done and not self.flags:
            self.retire_heads()

    def _wait(self, block: Block, head: Driven, op: Driven, until: float | None) -> None:
        """Wait until the block's word is there or something else happened; the caller steps again."""
        if block.rank < 0:
            head.start_clock()
            head.patience = min(head.patience + 1, NAP_ROUNDS)
            self._nap(head.patience)
            if self.flags:
                self._wait_ended(op)
            if head.patience == NAP_ROUNDS:
                trouble.examine(self, None, head, op, until)
            return
        if head.patience == 0 and (self._spin(block) or self._yield_until(block, head.start_clock())):
            return
        head.patience = 1
        self.sleep_on(block)
        if self.flags:
            self._wait_ended(op)
        if self.box.words[block.rank][block.word] < block.value:
            trouble.examine(self, block, head, op, until)
        else:
            head.patience = 0

    def _wait_ended(self, op: Driven) -> None:
        if op.error is not None:
            raise op.error
        if self.flags & FORKED:
            self._anomaly()
        raise AbortedError("the call was ended: another thread destroyed or aborted the process group")

    # ---- ends

    def listen(self, op: Driven, listener: Callable[[Driven], None]) -> None:
        """Call `listener(op)` when the call has ended, at once when it has already; never with the lock held."""
        self._lock.acquire()
        done = op.done and (op.on_done is None)
        if not done:
            op.on_done = [*(op.on_done or ()), listener]
            if op.done:
                self._finished.append(op)
            else:
                self._helper.kick(soon=True)
        self._lock.release()
        if done:
            listener(op)

    def unattended_s(self) -> float:
        """Return for how long the oldest call that nobody waits for has been pending; below 0: there is none.

        Infinite when a future of it is to be completed: its owner may be blocked where nothing drives the call.
        Whoever waits for one call of the queue drives those before it, and wakes the background thread for the rest.
        """
        open_ops: list[Driven] = []
        if self.queue and not any(op.num_waiters for op in self.queue):
            open_ops.append(self.queue[0])
        open_ops += [message for message in self.mail.pending() if not message.num_waiters]
        if not open_ops:
            return -1.0
        if any(op.on_done for op in open_ops):
            return math.inf
        return time.monotonic() - min(op.started for op in open_ops)

    def background_step(self) -> Block | None:
        """Drive everything that is pending without waiting; the block to sleep on, or None when idle."""
        block: Block | None = None
        while self.queue:
            block = self.advance(self.queue[0])
            if block is not None:
                self._background_trouble(block, self.queue[0])
                break
        for message in self.mail.pending():
            waits = self.advance(message)
            if waits is not None:
                self._background_trouble(waits, message)
                block = block or waits
        return block

    def _background_trouble(self, block: Block, head: Driven) -> None:
        now = head.start_clock()
        if head.patience or now > head.deadline:
            trouble.examine(self, block if block.rank >= 0 else None, head, head, None)
        head.patience = 1

    def close(self, aborted: bool = False) -> None:
        """End every pending call with `AbortedError`, tell the peers, stop the thread, drop the memory; idempotent."""
        if self.flags & (CLOSED | FORKED):
            return
        self.flags |= ABORTED if aborted else 0
        self.flags |= CLOSED
        box = self.box
        publish_word(box, LIFE, LIFE_ABORTED if aborted else LIFE_LEFT)
        self._wake_peers_of_head()
        got = self._lock.acquire(timeout=5.0)
        error = AbortedError(f"the process group of rank {box.rank} was {'aborted' if aborted else 'destroyed'}")
        ended: list[Driven] = [*self.queue, *self.mail.pending()]
        for op in ended:
            op.fail(error)
        self.queue.clear()
        finished, self._finished = [*self._finished, *(op for op in ended if op.on_done)], []
        if got:
            self._lock.release()
        for op in finished:
            listeners, op.on_done = op.on_done, None
            for listener in listeners or ():
                listener(op)
        self._helper.stop()
        self.watch.close()
        deadline = time.monotonic() + 1.0
        while self._num_sleepers and time.monotonic() < deadline:
            time.sleep(0.001)
        if got and not self._num_sleepers:
            self.mail.close()
            box.close()

    def _wake_peers_of_head(self) -> None:
        """Peers sleep on the word of the call they wait for; wake them so they see that this rank has left."""
        box = self.box
        for seq in range(self.seq, self.seq + 2):
            futex_wake(box.own_address + 8 * (box.first_cell + seq % NUM_CELLS * CELL_WORDS))

    def lost(self) -> list[int]:
        """Return the peers that are dead or have left."""
        dead = self.watch.dead()
        return [p for p in self.box.peers if p in dead or self.box.words[p][LIFE] >= LIFE_LEFT]

    def forked(self) -> None:
        """Called in a forked child: nothing here may be used, touched or closed."""
        self.flags |= FORKED
