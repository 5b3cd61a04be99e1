"""The steps of every `LatencyBuffer` call: begin, wait for room, wait for the peers' messages, mark the lost ranks.

`PendingCalls` takes a `PendingCall` (`call.py`) from its first step to its last over a `Wire`.
Whatever ends a call, its slot is freed: a failed call leaves nothing behind that could delay or mix with a later one.

An exception from a signal handler can come between any two lines, so a call is recorded before it takes its slot, and
is aborted by `abandon` when it raises. A call without an owner all the same, whose caller has no hook to receive it, is
aborted by the next call or by `sync` (`reclaim`).

A call without a mask ends in the same way on all ranks (`latency/call.py`): a rank that does not get all messages in
time, or is interrupted in its wait, aborts the call for all, unless a peer has got all of its own: then it completes
the call too. With a mask each rank ends the call by itself: a missing rank is recorded in the mask.

A rank is lost if it is dead or has left the epoch, has not sent its message (or not freed its slot) at the timeout, or
excludes this rank itself. A message it had stored whole before it died counts. A lost rank is lost for the whole call.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from ...arrays import writing
from ...errors import (
    CommTimeoutError,
    EpeeError,
    InvalidState,
    MismatchError,
    PeerError,
    RankFailedError,
    context,
    is_own,
)
from ...view.protocol.withdrawal import GRACE_S
from ..members.header import reason_bytes
from .call import PendingCall
from .checks import check_hook
from .types import LatencyCombined, LatencyDispatched, LatencyOptions
from .wire import NUM_AGREED, OP_NAMES, SectionHeader, Timeouts, Wire

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result", LatencyDispatched, LatencyCombined)
_LABELS = {
    "op": "the call",
    "kind": "the type of the rows",
    "handle": "the handle in use (number of the call that made it)",
    "with_weights": "topk_weights given to combine (1) or not (0)",
    "sizes": "num_experts, hidden, num_topk and max_tokens_per_rank (a code of them)",
}
_KINDS = (
    "bfloat16",
    "FP8",
    "FP8 with rounded scales",
    "FP8 with packed scales",
    "bfloat16 partials",
    "float32 partials",
)


def _shown(name: str, value: int) -> str:
    return {"op": OP_NAMES, "kind": _KINDS}[name][value] if name in ("op", "kind") else str(value)


class NoFreeSlot(InvalidState):
    """The call cannot even be refused: no slot is free by which to notify the peers. An `InvalidState` for callers."""


class PendingCalls:
    """Takes calls through their steps.

    Args:
        wire: of the buffer.
        epoch: returns the epoch.
        dead: returns the ranks whose processes have ended.
        why_gone: returns the error, and why, of a rank that has left the epoch without being dead.
        hide: called at the end of a phase that may have waited.
    """

    def __init__(
        self,
        wire: Wire,
        epoch: Callable[[], int],
        dead: Callable[[], Collection[int]],
        why_gone: Callable[[int], tuple[type[PeerError], str]],
        hide: Callable[[], None],
    ) -> None:
        self.wire = wire
        self._epoch = epoch
        self._dead = dead
        self._why_gone = why_gone
        self._hide = hide
        self._begun: dict[int, PendingCall] = {}  # by number: calls that have a slot, or are about to take it
        self._hooks: dict[int, Callable[[], bool]] = {}  # by number: whether a caller can still receive
        self._unknown: list[PendingCall] = []  # calls that this rank aborted and that may have succeeded on others
        self._lost = ""  # why the buffer cannot continue

    def require_slot(self) -> None:
        """Raise `NoFreeSlot` if as many calls as there are slots wait for their hooks."""
        self.reclaim()
        if not self.wire.is_free():
            self.reclaim(is_thorough=True)
        if not self.wire.is_free():
            raise NoFreeSlot(
                f"{self.wire.num_open} calls have been sent and not received, among them the one "
                f"num_slots={self.wire.config.num_slots} calls ago, whose slot this call needs; call its hook first"
            )

    def check(self) -> None:
        """Raise if the ranks' next calls differ, or may differ.

        Raises:
            InvalidState: an earlier call has ended otherwise here than on the other ranks.
            CommTimeoutError: the end of a call is still open.
        """
        self.reclaim()
        for pending_call in self._unknown[:]:
            pending_call.settle()
            self._lost = self._lost or pending_call.diverged
            self._unknown.remove(pending_call)
        if self._lost:
            raise InvalidState(self._lost)

    def restart(self) -> None:
        """Begin an epoch, with call 1 on all ranks: open calls are forgotten."""
        self._begun.clear()
        self._hooks.clear()
        self._unknown.clear()
        self._lost = ""

    def begin(self, head: SectionHeader, options: LatencyOptions) -> PendingCall:
        """Start the next call."""
        pending_call = PendingCall(self.wire.seq + 1, head, options, self.wire, self._epoch())
        self.wire.op = pending_call.op
        if pending_call.is_alike:
            self.wire.say_begun(pending_call.seq)
        self.read_mask(pending_call)
        self.wire.set_cut(pending_call.active, pending_call.seq)
        self._begun[pending_call.seq] = pending_call
        self.wire.begin()  # last: from here on the call has a slot, which must be freed
        return pending_call

    def _free(self, pending_call: PendingCall) -> None:
        """Free the slot of a call."""
        self.wire.free(pending_call.seq)
        self._hooks.pop(pending_call.seq, None)
        self._begun.pop(pending_call.seq, None)

    def abandon(self, last_seq: int, error: BaseException) -> None:
        """Abort the calls after `last_seq`, whose caller gets `error` and no hook."""
        for seq in [seq for seq in self._begun if seq > last_seq]:
            self._end(seq, error)

    def reclaim(self, is_thorough: bool = False) -> None:
        """Abort the calls that can no longer be received: an interrupt has lost them, or their hook.

        Between two calls only.

        Args:
            is_thorough: also find hooks that are held by a reference cycle only.
        """
        if not self._begun:
            return
        if is_thorough:
            gc.collect()
        for seq in list(self._begun):
            can_receive = self._hooks.get(seq)
            if can_receive is None or not can_receive():
                self._end(seq, InvalidState("the call was interrupted, and its hook was lost"))

    def _end(self, seq: int, error: BaseException) -> None:
        pending_call = self._begun[seq]
        try:
            if seq <= self.wire.seq:  # otherwise it was not counted: it has not begun
                self.abort(pending_call, error)
        finally:
            self._hooks.pop(seq, None)
            self._begun.pop(seq, None)

    def read_mask(self, pending_call: PendingCall) -> None:
        """Exclude the ranks marked inactive; this rank always counts on itself."""
        if pending_call.options.active_ranks is not None:
            marks = pending_call.options.active_ranks[: self.wire.config.num_ranks].tolist()
            for rank, mark in enumerate(marks):
                pending_call.active[rank] = pending_call.active[rank] and (mark != 0 or rank == self.wire.rank)

    def reachable(self, pending_call: PendingCall) -> list[int]:
        """Return the ranks to write to, the next rank first and this one last; waits until they have room."""
        num_ranks = self.wire.config.num_ranks
        order = [(self.wire.rank + step) % num_ranks for step in range(1, num_ranks + 1)]
        for dst in order:
            if dst in pending_call.peers() and not self.wire.has_room(dst, pending_call.seq, pending_call.timeouts):
                self.lose(pending_call, dst)
        return [dst for dst in order if dst in pending_call.peers()]

    def has_come(self, pending_call: PendingCall, src: int, field_name: str = "head") -> bool:
        """Wait for the message of a peer, or its weights (`early`); return False if it is lost."""
        if self.wire.has_come(src, pending_call.seq, pending_call.timeouts, field_name):
            if field_name == "head":
                return True
            if self.wire.is_early(src, pending_call.seq):
                return True
            self.head(pending_call, src)  # it has continued without sending weights
        self.lose(pending_call, src)
        return False

    def lose(self, pending_call: PendingCall, peer: int) -> None:
        """Record that a peer is lost for this call, and why."""
        if peer in self._dead():
            pending_call.lost[peer] = "dead"
        elif peer in self.wire.ended():
            pending_call.lost[peer] = "gone"
        elif self.wire.is_cut_by(peer, pending_call.seq):
            pending_call.lost[peer] = "cut"
        else:
            pending_call.lost[peer] = "silent"

    def heads(self, pending_call: PendingCall) -> dict[int, SectionHeader]:
        """Wait for all ranks that count; return the headers of those that sent their message, ranks ascending."""
        heads = self._heads(pending_call)
        if not pending_call.is_alike:
            return heads
        if not pending_call.lost and not pending_call.words.aborted_by(pending_call.mark):
            pending_call.words.has_gathered(pending_call.mark)
        else:
            error = self._loss(pending_call)
            pending_call.abort(error)
            heads = self._follow(pending_call, heads, error)
        pending_call.has_gathered = True
        return heads

    def _heads(self, pending_call: PendingCall) -> dict[int, SectionHeader]:
        heads = {}
        for src in pending_call.peers():
            before = time.monotonic_ns()
            has_come = self.has_come(pending_call, src)
            pending_call.wait_us[src] = (time.monotonic_ns() - before) // 1000
            head = self.head(pending_call, src) if has_come else None
            if head is not None:
                heads[src] = head
        return heads

    def head(self, pending_call: PendingCall, src: int) -> SectionHeader | None:
        """Return the header of an arrived message; None if it can no longer be read, and its rank is then lost.

        Raises:
            MismatchError: it is of another call, or refuses this one.
        """
        head, reason = self.wire.head_of(src, pending_call.seq)
        self.agree(pending_call, src, head, reason)
        return head

    def _follow(
        self, pending_call: PendingCall, heads: dict[int, SectionHeader], error: EpeeError | None
    ) -> dict[int, SectionHeader]:
        """Wait for the messages that this rank lacks: a peer has all of its own, so these are on their way, too."""
        timeouts = Timeouts(time.monotonic() + GRACE_S, 0.0)
        for src in sorted(pending_call.lost):
            if not self.wire.has_come(src, pending_call.seq, timeouts):
                raise error or pending_call.aborted()
            del pending_call.lost[src]
            head = self.head(pending_call, src)
            if head is None:
                raise error or pending_call.aborted()
            heads[src] = head
        return dict(sorted(heads.items()))

    def leave(self, pending_call: PendingCall, error: BaseException) -> None:
        """Determine how a call without a mask ends whose caller gets `error`, at the latest in the next call."""
        if not pending_call.is_alike:
            return
        if isinstance(error, MismatchError) and is_own(error) and not pending_call.has_gathered:
            # no rank can have matching messages: each of them sees the mismatch, or that the call has failed
            pending_call.fail()
            return
        pending_call.is_open = True
        self._unknown.append(pending_call)
        if not pending_call.words.is_gathered(pending_call.mark):
            try:
                pending_call.abort(error)
            except BaseException as raised:  # noqa: BLE001 - `error`, or that its end is open; the caller has `error`
                _log.debug("a call that was left: %s", raised)
            if not pending_call.is_open:
                self._unknown.remove(pending_call)

    def agree(self, pending_call: PendingCall, src: int, head: SectionHeader, reason: str) -> None:
        """Raise `MismatchError` unless a peer makes the same call."""
        where = context(OP_NAMES[pending_call.head.op], rank=self.wire.rank, peer=src, seq=pending_call.seq)
        if head.refused:
            raise MismatchError(f"{where}: rank {src} refused its call: {reason}")
        for name, mine, theirs in zip(SectionHeader._fields[:NUM_AGREED], pending_call.head, head, strict=False):
            if mine != theirs:
                raise MismatchError(
                    f"{where}: ranks disagree about {_LABELS[name]}: this rank has {_shown(name, mine)}, rank {src} "
                    f"has {_shown(name, theirs)}; all ranks must make the same calls in the same order"
                )

    @contextlib.contextmanager
    def sending(self, pending_call: PendingCall) -> Iterator[None]:
        """Run the send phase inside; if it fails the peers are notified."""
        try:
            if pending_call.is_alike:
                self.reachable(pending_call)
                self.require_all(pending_call)  # before anything is sent: a call that lacks a rank must not start
            yield
        except GeneratorExit:  # an interrupt in contextlib's own lines: noticed when this is dropped, maybe calls later
            raise
        except BaseException as error:
            self.abort(pending_call, error)
            raise
        self.mark(pending_call)

    def abort(self, pending_call: PendingCall, error: BaseException) -> None:
        """End a call that this rank cannot make, and notify the peers that have not got its message.

        A call that lacks a rank is not refused, but aborted for all: peers may have found the loss, or have aborted it.
        """
        if pending_call.is_alike and isinstance(error, (CommTimeoutError, PeerError)):
            try:
                self.leave(pending_call, error)
            finally:
                self._free(pending_call)
            return
        is_sent = any(self.wire.is_posted(dst, pending_call.seq) for dst in pending_call.others())
        try:
            for dst in self.reachable(pending_call):
                if dst != self.wire.rank and not self.wire.is_posted(dst, pending_call.seq):
                    self.wire.post(dst, pending_call.seq, pending_call.head._replace(refused=1), reason_bytes(error))
        finally:
            if is_sent:
                self.leave(pending_call, error)
            elif pending_call.is_alike:
                pending_call.fail()  # no rank has anything from this rank
            self._free(pending_call)

    def finish(self, pending_call: PendingCall, result: _Result, receive: Callable[[], None]) -> _Result:
        """Receive now, or return a hook that does."""
        result.wait_us = pending_call.wait_us
        if not pending_call.options.return_hook:
            self.receive(pending_call, receive)
            return result
        hooks = [receive]

        def hook() -> None:
            """Receive once; a second time, or in another epoch, is an error."""
            if not hooks:
                raise InvalidState("this hook has been called already; a call is received once")
            check_hook(pending_call.epoch, self._epoch())
            pending_call.start()
            self.read_mask(pending_call)
            pending_call.is_received = True
            self.receive(pending_call, hooks.pop())

        owner = weakref.ref(hook)  # and not what it receives: that refers to the hook
        self._hooks[pending_call.seq] = lambda: owner() is not None and not pending_call.is_received
        result.hook = hook
        return result

    def receive(self, pending_call: PendingCall, receive: Callable[[], None]) -> None:
        """Run the receive phase; the slot is freed whatever happens."""
        self.wire.op = pending_call.op
        try:
            receive()
            self.require_all(pending_call)
        except BaseException as error:
            self.leave(pending_call, error)
            raise
        finally:
            self._free(pending_call)
            self.mark(pending_call)
            self._hide()

    def mark(self, pending_call: PendingCall) -> None:
        """Write the lost ranks into the mask, and cut them off."""
        mask = pending_call.options.active_ranks
        if mask is None or not pending_call.lost:
            return
        with writing(mask):
            for peer in pending_call.lost:
                mask[peer] = 0
        counted = pending_call.peers()
        self.wire.set_cut([peer in counted for peer in range(self.wire.config.num_ranks)], pending_call.seq)

    def require_all(self, pending_call: PendingCall) -> None:
        """Raise for a lost rank in a call without a mask."""
        error = self._loss(pending_call) if pending_call.is_alike else None
        if error is not None:
            raise error

    def _may_be_refused(self, pending_call: PendingCall) -> bool:
        """Whether a peer may know of a refusal that this rank has not received."""
        return pending_call.words.is_failed_by_peer(pending_call.mark)

    def _await_refusal(self, pending_call: PendingCall) -> None:
        """Wait a moment for missing messages, one of which may say why a call has failed.

        A rank that refuses its call, or makes another one, notifies one peer after the other; a notified peer fails the
        call for all, and that may be seen here first.

        Raises:
            MismatchError: a message says why.
        """
        until = min(time.monotonic() + GRACE_S, pending_call.timeouts.deadline)
        dead = self._dead()
        missing = [rank for rank in pending_call.others() if rank not in dead]
        while missing:
            for rank in [rank for rank in missing if self.wire.is_here(rank, pending_call.seq)]:
                missing.remove(rank)
                self.head(pending_call, rank)
            if time.monotonic() > until:
                return
            self.wire.nap(0.0005)

    def _loss(self, pending_call: PendingCall) -> EpeeError | None:
        """Return the error that names the lost ranks; raises `MismatchError` if one of them says why.

        Those of which the view says that they have failed count as dead, as they are to the ranks of their hosts. Also
        lost are the ranks for whose loss a peer has aborted the call, though this rank may have all that they sent.
        """
        words, mark = pending_call.words, pending_call.mark
        reported = [] if words.is_gathered(mark) else words.lost_by_peers(mark)
        for rank in reported:
            pending_call.lost[rank] = "dead" if rank in self._dead() else "gone"
        if not pending_call.lost:
            return None
        dead, gone = (
            sorted(rank for rank, why in pending_call.lost.items() if why == kind) for kind in ("dead", "gone")
        )
        ends = {rank: self._why_gone(rank) for rank in gone}
        failed = {rank: why for rank, (kind, why) in ends.items() if issubclass(kind, RankFailedError)}
        failed |= {rank: "another rank has found that it failed" for rank in reported if rank in ends.keys() - failed}
        lost = sorted([*dead, *failed]) or gone or sorted(pending_call.lost)
        if not (dead or gone) and self._may_be_refused(pending_call):
            self._await_refusal(pending_call)
        if not (dead or gone) and words.aborted_by(mark):
            return pending_call.aborted()
        where, names = pending_call.where(lost[0], pending_call.started), ", ".join(map(str, lost))
        if dead or failed:
            words.lost = sum(1 << rank for rank in lost)
            reasons = [f"rank {', '.join(map(str, dead))} is dead (its process ended)"] if dead else []
            reasons += [f"rank {rank}: {why}" for rank, why in failed.items()]
            return RankFailedError(
                f"{where}: {'; '.join(reasons)}; pass active_ranks to continue without it",
                lost,
                pending_call.op,
                pending_call.seq,
                self._epoch(),
                "process ended" if dead else next(iter(failed.values())),
            )
        if gone:
            kind, why = ends[gone[0]]
            text = f"{where}: rank {names}: {why}; pass active_ranks to continue without it"
            return kind(text, gone, pending_call.op, pending_call.seq, self._epoch(), why)
        return CommTimeoutError(
            f"{where}: rank {names} did not send its part; the call is aborted; repeat the step, or pass "
            "active_ranks to continue without silent ranks",
            lost,
        )
