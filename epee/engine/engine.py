"""The calls of one group: their order, the threads that drive them, the end of a wait.

Every collective call gets the next sequence number and is published at once when the outbox has room. Unfinished calls
are in a queue and complete in order. A waiting thread drives the head of the queue: the caller's thread in `run` and
`wait`; a background thread (`progress.py`) only for calls that no thread waits for.

One lock guards the state (`entry.py`); `waiting.py` waits for a word. Only a wait that has slept checks for failures: a
dead peer (pidfd), one that has left, the deadline.

A call has one outcome. Every exception that leaves a call passes `interrupts.py`: an exception from a signal handler,
which may raise between any two lines, a lack of quorum, a shortage. It makes the state consistent before the lock is
released: a call whose results were being written is finished, another one of the caller's own is aborted
(`withdrawal.py`), so that it ends alike on all ranks. A call that has completed all the same, or whose outcome is not
known yet, is left for its repetition. So the ranks stay in step, and a tensor is either unchanged or complete. A wait
for a request that the caller holds leaves the request open. If the recovery is interrupted too, the next call repairs
the state (`Entry.recover`). A handler that closes the group leaves the rest of the closing to the call that it
interrupted, which raises `AbortedError`.

Interfaces for failure handling, and their guarantees:

- `flags` is zero without failures. A bit set in it, from any thread or handler, is seen by every call before it takes
  the lock, by every wait within one sleep (5 ms) and by a call before it writes results; it then passes
  `await_flags` (entering) or `_wait_ended` (inside). Nothing else on the fast path checks the health of the group.
- `await_flags` runs without the lock, `_wait_ended` with it; both raise if the call cannot continue.
- `examine` runs with the lock, in the waiting thread, after each sleep in which no word arrived. It may `fail`
  any call of the queue and retires the calls that it ended; it must not block.
- A call ends once: `fail` after `done` has no effect. Calls retire in order, each with a header of its number in the
  outbox (the call's own or a refusal) before CONSUMED passes it, or with a mark that it was aborted (GAVE_UP).

The short path of a call runs from its first store to its last load without a break, when no wait is needed.

The protocol is that of `operation.py` and `withdrawal.py`, in the same order of stores and loads, without the waits,
the queue and the unusual cases. If a word is missing or unexpected the call continues from there on the long path
(`Engine.drive`), which reads the call's progress from its fields and words. The short path serves calls of one round
only, reduced in one step or in two.

In two steps the abort of a single peer may be overlooked (it is not checked again after MERGED): that peer then
waits for this rank's decision, which is to complete the call, and completes it too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Any

from ..errors import AbortedError, InvalidArgument, InvalidState, PeerError, expected, is_own
from ..memory.signals import futex_wake
from ..view.process.detector import DeathWatch
from .call import NOTHING, Tensors
from .entry import ABORTED, CHANGING, CLOSED, ENDED, FORKED, FROZEN, NEWS, TROUBLED, Entry
from .interrupts import Recovery
from .membership.call_outcome import UnresolvedCalls
from .membership.group_membership import GroupMembership
from .membership.sizes import Mask
from .operation import NO_ROOM, Block, Driven, Operation
from .outbox import (
    BELL,
    CELL_PAYLOAD_BYTES,
    CELL_WORDS,
    COMPLETES,
    CONSUMED,
    CONSUMED_TOO,
    COUNTED_0,
    COUNTED_1,
    DETAIL,
    DRAINED,
    FILLED,
    GAVE_UP,
    LIFE,
    LIFE_ABORTED,
    LIFE_BROKEN,
    LIFE_EXITED,
    LIFE_LEFT,
    MERGED,
    NUM_CELLS,
    OFFSET,
    PREAMBLE,
    SEAL_PRIME,
    SIGNATURE,
    PeerRegions,
    consumed_of,
    failed_by_view,
)
from .overlap import CallOrder, read_again
from .p2p.channel import Mailroom
from .p2p.message import Absence, Message
from .plan import Make, RefusedPlan, refused
from .progress import Helper
from .waiting import NAP_ROUNDS, Waiting, examine, raise_if_open, raise_if_overdue
from .withdrawal import withdrawn


def _met(op: Operation, waits: Waiting, sealed: int, check: int) -> bool:
    """Note the offsets of the peers' parts, if all have called the same.

    False: a part is missing, or a word is unexpected.

    Args:
        op: the call.
        waits: polls for a word that is not there yet.
        sealed: this rank's OFFSET word, which peers' mostly equal.
        check: the value with which every OFFSET word of the call is sealed.
    """
    peer_regions, plan, cell, tag, base = op.peer_regions, op.plan, op.cell, op.tag, op.base
    signature, detail = plan.signature, plan.detail
    limit = peer_regions.payload_bytes - plan.read_bytes
    for peer in peer_regions.peers:
        words = peer_regions.words[peer]
        if words[cell] != tag and not waits.poll(words, cell, tag):
            return False
        offset = base
        word = words[cell + OFFSET]
        if word != sealed:  # it may lie at another offset than ours
            place = word & 0xFFFFFFFF
            offset = place << 6
            if word != (check ^ place) << 32 | place or offset > limit:
                return False
        if words[cell + SIGNATURE] != signature or words[cell + DETAIL] != detail:
            return False
        op.offsets[peer] = offset
    return base <= limit


def _merge(op: Operation, waits: Waiting) -> bool:
    """Reduce this rank's share, and wait until the others have reduced theirs; False when that takes them a while."""
    peer_regions, index = op.peer_regions, op.cell + MERGED
    if any(words[op.cell + FILLED] != COUNTED_1 for words in peer_regions.peer_words):
        return False
    op.merge(peer_regions)
    for words in peer_regions.peer_words:
        if words[index] != COUNTED_1 and not waits.poll(words, index, COUNTED_1):
            return False
    return True


def _call_listeners(op: Driven) -> None:
    """Call the listeners of a call that has ended; after an interrupt inside it this function is run once more."""
    listeners, op.on_done = op.on_done, None
    try:
        for listener in listeners or ():
            listener(op)
    except BaseException:
        op.on_done = listeners
        raise


class Latest:
    """The call that an engine has returned last, until its caller notes that it has the result.

    A buffer makes one call at a time, and finds a call whose caller got an exception from whichever thread calls next.
    """

    op: Operation | None = None


class LatestOfThread(Latest, threading.local):
    """The same for each thread by itself, of a group: an exception in one thread is not about the call of another."""


FROZEN_LOOK_S = 0.005
SETTLING_LOOK_S = 0.001


class Engine:
    """State of one group in one process. It never refers to the process group object, so that can be collected.

    Its parts: `entry` has the lock, `waits` waits for words, `mail` has the messages, `helper` the background thread,
    `order` holds calls back, `recovery` repairs the state after an exception.

    Attributes:
        timeout_s: how long a call waits when it names no timeout, for the lock as well.
        p2p_timeout_s: how long a message waits; 0: as long as a call.
        flags: 0, or why no call can run (ENDED) or which state must be handled first. Tested by every call.
        seq: the number of the last call that has begun here; only calls raise it, and `begin_at` sets it.
        members: the peer regions of the ranks that take part in the next call, which is planned with them (`plan_with`
            changes them); `peer_regions` has all ranks.
        contributors: the ranks that are in the result of the last call that ended here; none when it failed.
        unclaimed: the list of `recovery`, checked by every call.
        unsettled: calls that ended here without a result, and may still be open at others; with the loss that none of
            them could report.
        has_failed: it was closed because the process ends.
        reports_losses: a call that a loss ends raises nothing, its `Work` reports the loss.
        latest: the call that `run` (or `start`, if asked) has returned, until its caller notes that (`disown_latest`).
        ended_by: why all calls fail, where that is not because the program has ended the group.
    """

    def __init__(
        self,
        peer_regions: PeerRegions,
        watch: DeathWatch,
        timeout_s: float,
        membership: GroupMembership,
        first_number: int = 1,
    ) -> None:
        self.peer_regions = peer_regions
        self.watch = watch
        self.timeout_s = timeout_s
        self.p2p_timeout_s = 0.0
        self.flags = 0
        self._flags_lock = threading.Lock()
        self.entry = Entry(self)
        self.waits = Waiting(self, self.entry)
        self.seq: int = 0
        self.queue: deque[Operation] = deque()
        self.mail = Mailroom(peer_regions, first_number)
        self.messages = self.mail.unfinished
        self.helper = Helper(self)
        self.order = CallOrder(peer_regions, self.queue, self.mail)
        self.recovery = Recovery(self)
        self.members: PeerRegions = peer_regions
        self.contributors: tuple[int, ...] = ()
        self.membership = membership
        self.has_failed = False
        self.unclaimed = self.recovery.unclaimed
        self.reports_losses = False
        self.unsettled = UnresolvedCalls()
        self.latest = Latest()  # of a group one for each thread
        self.ended_by = ""
        self.mask = Mask(peer_regions.num_ranks, peer_regions.members)  # the group may put in the user's own
        membership.attach(self)

    # ---- membership

    def begin_at(self, first_seq: int) -> None:
        """Begin with call `first_seq`, in a running group that takes this rank in; before its first call."""
        self.seq = first_seq - 1
        own = self.peer_regions.own
        own[CONSUMED] = own[CONSUMED_TOO] = self.seq

    def plan_with(self, peer_regions: PeerRegions) -> None:
        """Plan calls with these peer regions from the next one on. The lock is held, or no call has begun."""
        self.members = peer_regions

    # ---- collectives

    @property
    def num_retired(self) -> int:
        """Calls up to this number have ended on this rank."""
        return consumed_of(self.peer_regions.own)

    def run(self, make: Make, opts: Any = None, tensors: Tensors = NOTHING) -> Operation:
        """Plan a collective and run it to its end in the caller's thread. Raises the call's error.

        Args:
            make: plans it.
            opts: torch's options of the call.
            tensors: the tensors that the call writes and reads.
        """
        seen = self.order.progress() if self.queue or self.messages else None
        peer_regions = self.members
        plan = make(peer_regions)
        self.entry.enter()
        op = None
        try:
            if self.unsettled.loss is not None or (self.unsettled.calls and self.flags & CHANGING):
                self._report_loss()
            op = self.recovery.claim(make, opts) if self.unclaimed else None
            if op is None:
                if peer_regions is not self.members or (seen and self.order.has_advanced(seen)):  # planned too early
                    peer_regions = self.members
                    plan = make(peer_regions)
                op = Operation(plan, self.seq + 1, peer_regions, self.timeout_s, opts)
                op.make = make
                self.seq = op.seq  # from here on the number is used up, whatever happens
                op.tensors = tensors
                is_next = True
                if self.queue or self.messages:
                    self.order.add(op)
                    is_next = not (self.queue or op.before)
                if self.flags or self.unsettled.calls or not (is_next and self._run_short(op)):
                    self.queue.append(op)
                    self._publish_waiting()
                    self.drive(op)
            self.entry.leave()
            if op.error is None:
                self.latest.op = op
                return op
        except BaseException as exc:
            self.latest.op = None
            self.recovery.broken = exc, op  # first: a further exception from a handler may come before the next line
            self.recovery.broken_off(exc, op)
            raise
        error = op.error
        del op  # else the error, this frame and the call would keep each other, and lost ranks' outboxes, alive
        try:
            raise error
        finally:
            del error

    def _run_short(self, op: Operation) -> bool:
        """Run a call of one round from end to end when nothing is in its way; False leaves the rest to `drive`.

        This is `Operation.publish` and `step` without their waits. The lock is held.
        """
        peer_regions, plan, cell, seq = op.peer_regions, op.plan, op.cell, op.seq
        preamble = plan.preamble
        used = 0 if preamble is None else (8 * len(preamble) + 63) & -64
        if plan.rounds > 1 or seq > peer_regions.cells_free_until:
            return False
        own, tag, base = peer_regions.own, op.tag, 0
        if plan.put_bytes:
            base = 8 * (cell + PREAMBLE) + used
            if used + plan.put_bytes > CELL_PAYLOAD_BYTES:
                base = peer_regions.ring.take(seq, plan.put_bytes, peer_regions.least_consumed())
                if base < 0:
                    return False
            plan.put(peer_regions, 0, base)
        op.base = base
        signature, detail = plan.signature, plan.detail
        own[cell + SIGNATURE] = signature
        own[cell + DETAIL] = detail
        check, place = (tag ^ signature ^ detail) % SEAL_PRIME, base >> 6  # see `seal`
        own[cell + OFFSET] = sealed = (check ^ place) << 32 | place
        own[cell + GAVE_UP] = 0
        if preamble is not None or plan.merge_bytes:
            if preamble is not None:
                own[cell + PREAMBLE : cell + PREAMBLE + len(preamble)] = memoryview(preamble)
            own[cell + FILLED] = COUNTED_1  # a peer may need rounds, and then this rank does too
            own[cell + MERGED] = own[cell + DRAINED] = COUNTED_0
            op.filled = 1
        op.offsets[peer_regions.rank] = base
        peer_regions.exports.publish_call(peer_regions, cell, tag, plan, base)
        op.published = True
        if not _met(op, self.waits, sealed, check):
            return False
        if preamble is not None:
            plan.agree(peer_regions, op.offsets, cell, op)
            op.agreed = True
            if plan.rounds > 1:
                return False
        if plan.merge_bytes and not _merge(op, self.waits):
            return False
        if self.flags:
            return False
        if peer_regions.num_ranks > 2 and withdrawn(cell, tag, peer_regions):  # a single peer was checked above
            return False
        own[cell + GAVE_UP] = COMPLETES
        op.writing = True
        plan.take(peer_regions, 0, op.round_offsets(0) if plan.merge_bytes else op.offsets)
        for words in peer_regions.peer_words:
            if words[cell] != tag:
                op.look_again(peer_regions)
        plan.commit()
        op.done = True
        own[CONSUMED] = own[CONSUMED_TOO] = seq
        self.contributors = peer_regions.members
        return True

    def start(
        self, make: Make, opts: Any = None, tensors: Tensors = NOTHING, may_claim: bool = True, is_noted: bool = False
    ) -> Operation:
        """Plan and issue a collective and return; its first contribution is published when the outbox has room.

        Args:
            make, opts, tensors: as of `run`.
            may_claim: it may be the repetition of an unclaimed call, and may report a loss.
            is_noted: it is `latest` until the caller notes that it has the call.
        """
        seen = self.order.progress() if self.queue or self.messages else None
        peer_regions = self.members
        plan = make(peer_regions)
        self.entry.enter()
        op = None
        try:
            if may_claim and (self.unsettled.loss is not None or (self.unsettled.calls and self.flags & CHANGING)):
                self._report_loss()
            op = self.recovery.claim(make, opts) if self.unclaimed and may_claim else None
            if op is None:
                if peer_regions is not self.members or (seen and self.order.has_advanced(seen)):
                    peer_regions = self.members
                    plan = make(peer_regions)
                op = Operation(plan, self.seq + 1, peer_regions, self.timeout_s, opts)
                op.make = make
                op.tensors = tensors
                self.order.add(op)
                op.start_clock()
                self.seq = op.seq
                self.queue.append(op)
                self._publish_waiting()
                self.helper.kick()
            self.entry.leave()
            if is_noted:
                self.latest.op = op
            return op
        except BaseException as exc:
            if is_noted:
                self.latest.op = None
            self.recovery.broken = exc, op
            self.recovery.broken_off(exc, op)
            raise

    def _report_loss(self) -> None:
        """Raise a loss that no call could report, once all data is here that decides whether it is one.

        The lock is held.

        Raises:
            CommTimeoutError: this host did not receive in time what lost ranks had sent to others; no number was used
            up.
        """
        membership, until = self.membership, time.monotonic() + self.timeout_s
        while not membership.settle():
            if time.monotonic() > until and not membership.insist_on_tellers(until):
                raise membership.not_told(self.timeout_s)
            self.entry.leave()
            time.sleep(SETTLING_LOOK_S)
            self.entry.enter()  # decisions meanwhile are applied there
        membership.raise_loss()

    def look(self, step: Callable[[], None]) -> None:
        """Run `step` with the lock held, when all decisions are applied and the group is not frozen."""
        self.entry.enter()
        try:
            step()
            self.entry.leave()
        except BaseException as exc:
            self.recovery.broken = exc, None
            self.recovery.broken_off(exc)
            raise

    def disown_latest(self, exc: BaseException) -> None:
        """Abort an issued call, or leave its results to its repetition: its caller gets `exc`, of a signal handler."""
        op, self.latest.op = self.latest.op, None
        if op is not None:
            self.recovery.broken_off(exc, op)

    def refuse(self, name: str, exc: Exception) -> None:
        """Report to the peers that this rank's next collective is refused, and use up its sequence number."""
        if self.flags & ENDED:
            return
        plan = refused(name, exc)
        op = self.start(lambda peer_regions: plan, None, may_claim=False)
        op.on_done = None

    def _publish_waiting(self) -> None:
        if self.flags & CHANGING and self.queue:
            self.membership.heed(self.queue[0])
            if not self.membership.may_publish(self.queue[0]):
                return
        for op in self.queue:
            if not op.published and not op.done:
                try:
                    if not op.publish(op.peer_regions):
                        return  # in order: later calls must not take the room
                except BaseException as exc:
                    if self.is_interrupt(exc):
                        raise
                    op.fail(exc)
            if self.flags & CHANGING:
                return  # later calls may have to begin again: they wait for their turn

    # ---- point to point

    def post(self, message: Message) -> None:
        """Issue a send or a receive; it moves as far as it can at once."""
        self.entry.enter()
        try:
            if self.mail.out:
                error = self.mail.absence(message)
                if error is not None:
                    raise error
            if self.queue or self.messages or message.is_early:
                self.order.add_message(message)
            if message.before:
                self.mail.held.append(message)
            else:
                self.mail.ends[message.is_send].post(message)
            if not message.done:
                self.messages[message] = None
                message.started = time.monotonic()
                message.deadline = message.started + (self.p2p_timeout_s or self.timeout_s)
                self.helper.kick()
            self.entry.leave()
        except BaseException as exc:  # it goes to the caller: the message must not stay posted and take a later one
            self.recovery.broken = exc, message
            self.recovery.broken_off(exc, message)
            self.recovery.add_note(exc, message)
            raise

    def take_back(self, op: Driven, exc: BaseException) -> None:
        """Abort a message whose blocking call `exc` leaves: no thread can wait for it again."""
        if self.flags & ENDED or self.entry.num_calls_below() > 1:
            return
        self.recovery.broken_off(AbortedError("the blocking call of this message was interrupted"), op)
        if isinstance(op, Message):
            self.recovery.add_note(exc, op)

    def leave_out(self, rank: int, absence: Absence, is_told: bool) -> None:
        """End the messages of `rank`, without which a view has begun. Data sent before its death counts.

        The lock is held.
        """
        self.end_with_others()  # a rank that had ended the group may end its process afterwards
        if absence.is_final and rank not in self.mail.out:
            for message in self.mail.pending():
                if not message.before:
                    self.advance(message)
        self.mail.lose(rank, absence, is_told)
        for message in list(self.messages):
            if message.done:  # also one that an interrupt left failed and unreported: then all is run again
                self.retire(message)
                self.messages.pop(message, None)

    def post_free(self) -> None:
        """Post the messages that nothing is in the way of any more. The lock is held."""
        mail = self.mail
        for message in list(mail.held):
            try:
                if not message.done and not message.is_free(self.peer_regions):
                    continue
                read_again(message)
                mail.let_go(message)
            except BaseException as exc:
                if self.is_interrupt(exc):
                    raise
                self._end_message(message, exc)
        while mail.finished:
            self.retire(mail.finished.pop())

    def _end_message(self, message: Message, exc: BaseException) -> None:
        """End a message with its own error."""
        message.fail(exc)
        self.mail.cancel(message)
        self.retire(message)
        self.messages.pop(message, None)

    # ---- waiting

    def wait(self, op: Driven, timeout_s: float | None) -> None:
        """Drive until `op` is done; raise its error.

        Raises:
            CommTimeoutError: `timeout_s` passed first; the call goes on and may be waited for again.
        """
        if not op.done:
            try:
                self.entry.enter(while_frozen=True)
            except expected(AbortedError, InvalidState):
                if op.error is not None:  # an abort has ended the call in the meantime
                    raise op.error from None
                raise
            try:
                until = time.monotonic() + timeout_s if timeout_s is not None else None
                self.drive(op, until)
                self.entry.leave()
            except BaseException as exc:
                self.recovery.broken = exc, None
                self.recovery.broken_off(exc)
                raise
        if op.error is not None:
            raise op.error.with_traceback(None)

    def drive(self, op: Driven, until: float | None = None) -> None:
        """Step `op` and what is before it until it is done. Called and returns with the lock held."""
        op.num_waiters += 1
        is_message = isinstance(op, Message)
        try:
            while not op.done:
                if self.flags & ~CHANGING:
                    self._wait_ended(op)
                    raise_if_overdue(self, op, until, op.start_clock())
                    continue  # the lock was given back: another thread may have ended the call
                if self.mail.held:
                    self.post_free()
                is_alone = is_message and not op.before and not self.mail.held
                head = op if is_alone else self.order.foremost(op)
                block = self.advance(head)
                if block is not None and not op.done and (head is op or self.order.foremost(op) is head):
                    if not is_alone:
                        raise_if_open(head, op, until)
                    self._wait(block, head, op, until)
            if not is_message:
                self.retire_heads()
            elif isinstance(op, Message):
                self.messages.pop(op, None)  # one that has failed
            if self.mail.held:
                self.post_free()
        finally:
            op.num_waiters -= 1
            if self.queue or not op.done:  # no thread waits for these now
                self.helper.go_on(soon=bool(self.queue and self.queue[0].on_done))

    def advance(self, op: Driven) -> Block | None:
        """Move `op` (or the head of the queue it stands in) one step; None when something ended."""
        if isinstance(op, Message):
            if self.flags & CHANGING:
                self.membership.settle()
            try:
                block = None if op.done else self.mail.ends[op.is_send].step(op)
            except BaseException as exc:
                if self.is_interrupt(exc):
                    raise
                self._end_message(op, exc)  # a peer's impossible word, for example: it belongs to that message
                block = None
            while self.mail.finished:
                self.retire(self.mail.finished.pop())
            return block
        head = self.queue[0]
        if self.flags & CHANGING:
            self.membership.heed(head)
            if not head.done and not self.membership.may_publish(head):
                return NO_ROOM
        try:
            block = NO_ROOM if self.unsettled.calls and self._is_held_up(head) else head.step(head.peer_regions)
        except BaseException as exc:
            if self.is_interrupt(exc):
                raise
            self.recovery.end_by(head, exc)
            block = None
        if block is None:
            self.retire_heads()
            if self.queue and self.queue[0] is head:  # no outcome yet, or no room to publish it
                return NO_ROOM
        return block

    def is_interrupt(self, exc: BaseException) -> bool:
        """Return whether an exception interrupts this thread, and is not the outcome of the call that it advances.

        The outcome of a call is an `EpeeError` that the protocol or the plan raises. Threads of epee's own run no
        signal handlers and have stack to spare, so there every exception of a call belongs to that call.
        """
        if is_own(exc) or self.helper.is_current():
            return False
        repair = self.recovery.repair
        return repair is None or not repair.is_current()

    def _is_held_up(self, head: Operation) -> bool:
        """Publish the head; True when an earlier call without a result is still open at a rank (`call_outcome.py`)."""
        if head.withdrawal is not None or head.done:
            return False
        if not head.published and not head.publish(head.peer_regions):
            return True
        return bool(self.unsettled.behind(head.peer_regions, head.lost))

    def retire_heads(self) -> None:
        """Take finished calls off the queue, in order, and publish that this rank has ended them."""
        queue, own = self.queue, self.peer_regions.own
        retired = False
        while queue and queue[0].done:
            op = queue[0]
            if op.error is not None and op.published:
                stays = op.is_counted and own[op.cell] == op.tag
                gave_up = COMPLETES if stays else failed_by_view(op.tag) if op.by_view else op.tag
                self.peer_regions.exports.publish(self.peer_regions, op.cell + GAVE_UP, gave_up)
                if op.by_view and not stays:  # a rank that was voted out and does not know it yet must not complete it
                    own[op.cell] = 0
            elif op.error is not None and not op.by_view and not self._publish_failed(op):
                break  # its number stays open until there is room for a header
            own[CONSUMED] = own[CONSUMED_TOO] = op.seq
            self.peer_regions.exports.consumed(op.seq)
            self.contributors = op.peer_regions.members if op.error is None else ()
            self.unsettled.note(op)
            retired = True
            self.retire(op)
            queue.popleft()  # last: all of this may be run again after an interrupt
        if self.flags & CHANGING:
            self.membership.retired(self.num_retired)
        if retired and queue:
            self._publish_waiting()

    def _publish_failed(self, op: Operation) -> bool:
        """Publish a header for a call that failed before it was published: its peers need one. False: no room yet.

        A lost member makes no room any more: then there is none, and others see that this rank has ended the call
        (`GroupMembership.ended_without`).
        """
        told = f"{type(op.error).__name__}: {op.error}"
        plan = op.plan if isinstance(op.plan, RefusedPlan) else refused(op.plan.name, InvalidArgument(told))
        has_room = Operation(plan, op.seq, op.peer_regions, 0.0).publish(op.peer_regions)
        return has_room or self.membership.has_lost_one_of(op.peer_regions)

    def settle(self) -> None:
        """Make the state consistent after an interrupt; the lock is held."""
        self.recovery.recover()

    def _wait(self, block: Block, head: Driven, op: Driven, until: float | None) -> None:
        """Wait until the block's word is there or something else happened; the caller steps again."""
        if block.rank < 0 or block.word == BELL:
            head.start_clock()
            head.wait_rounds = min(head.wait_rounds + 1, NAP_ROUNDS)
            if block.word == BELL and head.wait_rounds == NAP_ROUNDS:
                self.waits.sleep_on(block)
            else:
                self.waits.nap(head.wait_rounds)
            if self.flags & ~CHANGING:
                self._wait_ended(op)
            if head.wait_rounds == NAP_ROUNDS:
                examine(self, None, head, op, until)
            return
        if head.wait_rounds == 0 and (self.waits.spin(block) or self.waits.yield_until(block, head.start_clock())):
            return
        head.wait_rounds = 1
        self.waits.sleep_on(block)
        if self.flags & ~CHANGING:
            self._wait_ended(op)
        if self.peer_regions.words[block.rank][block.word] < block.value:
            examine(self, block, head, op, until)
        else:
            head.wait_rounds = 0

    def _wait_ended(self, op: Driven) -> None:
        """Check `flags` inside a call. The lock is held, and released while the group is frozen."""
        if op.error is not None:
            raise op.error
        if self.flags & FORKED or self.ended_by:
            self.entry.raise_ended()
        if self.flags & ENDED:
            raise AbortedError("the call was ended: another thread destroyed or aborted the process group")
        membership = self.membership
        if self.flags & NEWS:
            membership.take_news()
            if op.done:
                return  # this process was excluded, but not from this call
        if self.flags & TROUBLED:
            membership.hooks.raise_trouble()
        if self.flags & FROZEN:
            self.entry.let_go()
            try:
                membership.hooks.await_thaw(FROZEN_LOOK_S)
            finally:
                self.entry.take_back()

    # ---- flags

    def raise_flag(self, bit: int) -> None:
        """Set a bit of `flags`, from any thread."""
        with self._flags_lock:
            self.flags |= bit

    def lower_flag(self, bit: int, unless: Sized = ()) -> None:
        """Clear a bit of `flags`, from any thread; not where something is in `unless`, which was put there before."""
        with self._flags_lock:
            if not unless:
                self.flags &= ~bit

    def may_go_on(self, while_frozen: bool = False) -> bool:
        """Check `flags` with the lock held; False when a call must not run now."""
        if self.flags & NEWS:
            self.membership.take_news()
        eviction = self.membership.hooks.eviction
        if self.flags & TROUBLED and eviction is not None:
            for op in self.queue:
                op.fail(eviction)  # no thread may be waiting, only a future
            self.retire_heads()
        return not self.flags & (ENDED | TROUBLED | (0 if while_frozen else FROZEN))

    def await_flags(self) -> None:
        """Wait a moment, without the lock, for the state in `flags` to pass.

        Raise the error that it implies for a call.
        """
        membership = self.membership
        if self.flags & ENDED:
            self.entry.raise_ended()
            return
        if self.flags & TROUBLED:
            membership.hooks.await_quorum()
            membership.hooks.raise_trouble()
        if self.flags & FROZEN:
            membership.hooks.await_thaw(FROZEN_LOOK_S)

    # ---- the end

    def retire(self, op: Driven) -> None:
        """Schedule the listeners of an ended call for when the lock is free."""
        self.membership.hide()
        if op.on_done:
            self.entry.after.append(partial(_call_listeners, op))

    def listen(self, op: Driven, listener: Callable[[Driven], None]) -> None:
        """Call `listener(op)` when the call has ended, at once when it has already; never with the lock held."""
        if not op.done:
            self.helper.expect_callbacks()
        if not self.entry.stop_calls(0.0):  # a signal handler may be here inside a call: it has the lock already
            self.entry.queue_up()
        try:
            done = op.done
            if not done:
                op.on_done = [*(op.on_done or ()), listener]
                self.helper.kick(soon=True)
        finally:
            self.entry.let_calls()
        if done:
            listener(op)

    def close(self, aborted: bool = False, failed: bool = False) -> None:
        """End every pending call with `AbortedError`, notify the peers, stop the thread, drop the memory; idempotent.

        The peers are notified first (the LIFE word, and a wake-up for ranks that sleep on the word of the next call),
        then the calls that are pending here end, then the thread stops, this rank leaves the control plane and the
        memory is dropped, in this order. For the peers, a crash between two steps is any other death of this rank.

        With `failed` the program has not asked for it (the process ends): for the peers the rank has failed, not left.
        From a signal handler or a callback inside a call of this group it returns at once: that call does the rest.
        """
        if self.flags & (CLOSED | FORKED):
            return
        self.raise_flag(CLOSED | (ABORTED if aborted else 0))
        self.has_failed = failed
        peer_regions = self.peer_regions
        peer_regions.exports.tell_ends(self.seq)
        if not self.ended_by:
            peer_regions.exports.publish(
                peer_regions, LIFE, LIFE_EXITED if failed else LIFE_ABORTED if aborted else LIFE_LEFT
            )
        peer_regions.exports.say_goodbye()
        self._wake_peers()
        if self.entry.is_marked_inside():
            if self.entry.num_calls_below() or self.helper.is_current():
                self.entry.after.append(self._end)
                return
            self.entry.recover()
        self._end()

    def _end(self) -> None:
        """Do the part of `close` that must not run inside a call."""
        peer_regions, entry = self.peer_regions, self.entry
        got = entry.stop_calls(5.0)
        error = AbortedError(
            f"the process group of rank {peer_regions.rank} was {'aborted' if self.flags & ABORTED else 'destroyed'}"
        )
        pending: list[Driven] = [*self.queue, *self.mail.pending()]
        for op in pending:
            if got and isinstance(op, Message):
                self.mail.take_back(op)  # else it could still be delivered: the peers keep the memory
            op.fail(error)
            self.retire(op)
        self._forget_calls()
        if got:
            entry.let_calls()
        entry.do_rest()
        self.helper.stop()
        self.watch.close()
        self.membership.close(self.has_failed)
        deadline = time.monotonic() + 1.0
        while entry.asleep and time.monotonic() < deadline:
            time.sleep(0.001)
        if got and not entry.asleep:
            self.mail.close()
            peer_regions.exports.end(peer_regions)

    def break_down(self, cause: str, error: BaseException | None = None, ranks: Sequence[int] = ()) -> None:
        """End the group on all ranks, because a call does not have the same outcome on all. May be repeated.

        If a rank cannot finish a call that others have completed, no later result would be right. It stores
        LIFE_BROKEN; each rank that reads this during a wait, or when the view continues without that rank, ends its own
        part (`end_with_others`). The memory stays until the program destroys the group. The lock is held.

        Args:
            cause: the event, in words.
            error: the error that it led to.
            ranks: the ranks that have ended the group; none: this rank does.
        """
        peer_regions = self.peer_regions
        told = f"{cause}{f': {error!r}' if error is not None else ''}"
        self.ended_by = f"the process group was ended on all ranks, as {told}; destroy it and initialise again"
        self.raise_flag(ABORTED)
        peer_regions.exports.publish(peer_regions, LIFE, LIFE_BROKEN)
        self._wake_peers()
        pending: list[Driven] = [*self.queue, *self.mail.pending()]
        for op in pending:
            text = f"{op.describe(peer_regions)}: {self.ended_by}"
            op.fail(PeerError(text, ranks, op.name, op.seq, peer_regions.epoch, cause) if ranks else AbortedError(text))
            self.retire(op)
        self._forget_calls()

    def _forget_calls(self) -> None:
        self.queue.clear()
        self.unclaimed.clear()
        self.messages.clear()

    def end_with_others(self) -> None:
        """End the group here, if another rank has ended it for all. The lock is held."""
        peer_regions = self.peer_regions
        ranks = [peer for peer in peer_regions.peers if peer_regions.words[peer][LIFE] == LIFE_BROKEN]
        if ranks and not self.flags & ENDED:
            names = ", ".join(map(str, ranks))
            self.break_down(f"rank(s) {names} could not finish a call that others may have completed", None, ranks)

    def _wake_peers(self) -> None:
        """Wake the peers that sleep on the word of the call they wait for, so that they see that this rank has left."""
        peer_regions = self.peer_regions
        for seq in range(self.seq, self.seq + 2):
            futex_wake(peer_regions.own_address + 8 * (peer_regions.first_cell + seq % NUM_CELLS * CELL_WORDS))

    def forked(self) -> None:
        """Mark the engine in a forked child: nothing here may be used, touched or closed there."""
        self.flags |= FORKED


Entry.calls = frozenset(
    function.__code__
    for function in (
        Engine.run,
        Engine.start,
        Engine.look,
        Engine.post,
        Engine.wait,
        Engine.take_back,
        Engine.listen,
    )
)
