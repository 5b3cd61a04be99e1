"""The outcome of the calls of a group under the known decisions: the epoch in which each runs, or its failure.

When a member dies, the calls of a group are divided by the first one to which it has not contributed completely
(`view/protocol/outcome.py`): every rank asks about its calls in order and must find the same one. Only the oldest
unfinished call is decided. A call behind a change is planned again for the peer regions of the remaining ranks, or
fails (mode "raise"); the words of lost ranks are read as they left them and never waited for again.

A call that a rank has aborted (`withdrawal.py`) or refused has ended there, while it may still be open at others, which
ask about it. So it is remembered (`UnresolvedCalls`) until a later call has a result, and is

    asked about     before the calls that are open, whenever a decision has come. Its answer about the dead rank comes
                    from words that no longer change, so all ranks that ask find the same.
    waited for      a later call is completed only when every member has settled the earlier one: its contribution is
                    complete, or it has aborted the call, or it has ended it. So a result implies for all its members
                    that all calls before are settled, and a rank that asks about one of them after a death finds it
                    complete.

The words are those of `operation.py`, each rank's own; words of other ranks are only read. The calls of this process
are changed under the engine's lock. No rank waits for ever: one that has put a part of the later call into its outbox
has the earlier one before it, finds it aborted or refused when it gets there, and ends it. The later call's timeout
names a rank that stalls on the way.

A rank has ended a call before its cell is used again, so older calls than there are cells are settled by the one
that has the cell now, and NUM_CELLS of them are enough.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...errors import InvalidArgument, MismatchError, PeerError, RankFailedError, context
from ...memory.signals import tag
from ...view.protocol.outcome import CallState, Course, is_whole
from ..operation import Operation
from ..outbox import (
    FILLED,
    GAVE_UP,
    MERGED,
    NUM_CELLS,
    SIGNATURE,
    PeerRegions,
    consumed_of,
    count_of,
    failed_by_view,
)
from ..plan import RefusedPlan
from ..signature import REFUSED, unpack
from .members import EpochRegions
from .rank_table import RankTable

if TYPE_CHECKING:
    from ..engine import Engine


class Past(NamedTuple):
    """A call that ended without a result, or an open one, with the words of its members that would settle it.

    Attributes:
        seq: its number; its words begin at `cell`.
        peer_regions: the outboxes with which it ran.
        rounds: how many it has; 0: not known here (refused, or ended before all headers had come).
        is_merged: its reduced shares are fetched as well.
        root: the rank that is its root, as far as it is known here; -1: none. Where that is lost, it ends for all.
    """

    seq: int
    cell: int
    peer_regions: PeerRegions
    rounds: int
    is_merged: bool
    root: int = -1

    def has_ended(self, words: memoryview) -> bool:
        """Return whether the rank of these words contributes nothing more: it has ended or aborted the call."""
        wanted = tag(self.peer_regions.epoch, self.seq)
        if consumed_of(words) >= self.seq or words[self.cell + GAVE_UP] in (wanted, failed_by_view(wanted)):
            return True
        return words[self.cell] == wanted and words[self.cell + SIGNATURE] & 63 == REFUSED

    def is_settled(self, words: memoryview) -> bool:
        """Return whether the rank has contributed all that the call needs of it, for sure, or never will."""
        return self.has_ended(words) or (self.rounds > 0 and self._is_whole(words))

    def counts_as_settled(self, words: memoryview) -> bool:
        """Return the same for a dead rank; where the rounds are not known, one of them is enough."""
        return self.has_ended(words) or self._is_whole(words)

    def _is_whole(self, words: memoryview) -> bool:
        has_counts = self.rounds > 1 or self.is_merged  # else the counters are not written
        filled = count_of(words[self.cell + FILLED]) if has_counts else 1
        merged = count_of(words[self.cell + MERGED]) if has_counts else 1
        wanted = tag(self.peer_regions.epoch, self.seq)
        return is_whole(words[self.cell], wanted, filled, merged, self.rounds, self.is_merged)

    def moved(self, peer_regions: PeerRegions) -> Past:
        """Return the call as it would run with other peer regions, for which it has not been planned here."""
        return (
            self
            if peer_regions is self.peer_regions
            else self._replace(peer_regions=peer_regions, rounds=0, is_merged=False)
        )


def past_of(op: Operation) -> Past:
    """Return the conditions to check in the words of the members of a call."""
    plan, is_refused = op.plan, isinstance(op.plan, RefusedPlan)
    is_known = op.rounds_known and not is_refused
    root = -1 if is_refused else unpack(plan.signature).root
    return Past(op.seq, op.cell, op.peer_regions, plan.rounds * is_known, is_known and plan.merge_bytes > 0, root)


class UnresolvedCalls:
    """The calls of one rank that ended without a result since the last one that has one, in order.

    Attributes:
        calls: what their members' words must show.
        loss: a loss that no call could report, because the call that it would fail had ended before; the next one does.
    """

    def __init__(self) -> None:
        self.calls: deque[Past] = deque(maxlen=NUM_CELLS)
        self.loss: PeerError | None = None

    def note(self, op: Operation) -> None:
        """Take note of a call that has just ended here; may run again after an interrupt."""
        if op.error is None:
            self.calls.clear()
        elif (op.told is not None or not op.by_view) and (not self.calls or self.calls[-1].seq < op.seq):
            self.calls.append(past_of(op))

    def keep(self, calls: Iterable[Past]) -> None:
        """Replace the record of these calls."""
        self.calls = deque(calls, NUM_CELLS)

    def note_loss(self, loss: PeerError) -> None:
        """Have the next call report a loss."""
        self.loss = loss

    def has_reported(self, epoch: int) -> None:
        """Note that an open call reports the losses with which an epoch begins."""
        if self.loss is not None and self.loss.epoch == epoch:
            self.loss = None

    def raise_loss(self) -> None:
        """Raise the loss that no call could report, once."""
        loss, self.loss = self.loss, None
        if loss is not None:
            raise loss

    def behind(self, peer_regions: PeerRegions, lost: Collection[int] = ()) -> list[int]:
        """Return the ranks of `peer_regions`, with which a later call runs, that have not settled all of these calls.

        Ranks in `lost` settle nothing any more: these calls have been asked about since, and need nothing of them.
        """
        return sorted({rank for past in self.calls for rank in _behind(past, peer_regions) if rank not in lost})


def _behind(past: Past, peer_regions: PeerRegions) -> Iterator[int]:
    for position in past.peer_regions.peers:
        rank, words = past.peer_regions.members[position], past.peer_regions.words[position]
        if (
            rank in peer_regions.members
            and peer_regions.words[peer_regions.members.index(rank)] is words
            and not past.is_settled(words)
        ):
            yield rank


LOSS = "view"  # instead of an operation's name: the error of a loss that fails no call


class CallOutcome:
    """Decides the outcome of the calls of one group."""

    def __init__(self, engine: Engine, rank_table: RankTable, course: Course, epoch_regions: EpochRegions) -> None:
        self._engine = engine
        self._rank_table = rank_table
        self._course = course
        self._epoch_regions = epoch_regions

    def heed(self, op: Operation) -> None:
        """Decide the oldest unfinished call by the known decisions. The engine's lock is held."""
        if op.done or op.writing:
            return
        self._engine.unsettled.keep(self._ask_again(tuple(self._engine.unsettled.calls)))
        place = self._place(past_of(op))
        for epoch in place.via if place.failed else (*place.via, place.epoch):
            peer_regions = self._epoch_regions.regions_for(epoch, op.seq)
            if (
                op.peer_regions is peer_regions or op.peer_regions.epoch > epoch
            ):  # planned in a later one: see `EpochRegions.show`
                continue
            if op.told is not None:
                self._leave(op, op.told, place)
            else:
                self._move(op, peer_regions, place.rootless == epoch)
            if op.done:
                return
        if place.failed:
            op.fail(self._failure(op, place))
            op.by_view = True
            self._engine.unsettled.has_reported(place.epoch)
            return
        self._mark_lost(op)
        if op.peer_regions.host_of and not op.done and op.lost:
            self._end_if_unheard(op)

    def _end_if_unheard(self, op: Operation) -> None:
        """Fail a call that others have completed with a rank whose host is lost, and whose part has not come here.

        On the host of the ranks that completed it all of it had come; no living rank can send it to this one. The part
        that this rank has put into it stays: others that have the rest wait for nothing else.
        """
        past = past_of(op)
        unheard = [
            rank
            for rank, words in zip(op.peer_regions.members, op.peer_regions.words, strict=True)
            if rank in op.lost and rank not in op.peer_regions.here and not past.counts_as_settled(words)
        ]
        if not unheard:
            return
        told = op.describe(self._epoch_regions.full, peer=_names(unheard))
        op.fail(
            RankFailedError(
                f"{told}: lost with its host while its part was on the way; ranks of other hosts may have completed "
                "the call; results are untouched; the next call runs without it",
                unheard,
                op.name,
                op.seq,
                self._rank_table.epoch,
                "lost with its host",
            )
        )
        op.by_view = op.is_counted = True

    def _ask_again(self, calls: Iterable[Past]) -> Iterator[Past]:
        """Decide calls that have ended here, before any later one, and return where they would run now."""
        for past in calls:
            place = self._place(past)
            if place.rootless:  # it has ended there for all ranks, so no rank asks about it any more
                self._course.ended_on_the_way(past.seq, place.rootless)
            elif place.failed:
                self._engine.unsettled.note_loss(self._lost_by(past, place))
            else:
                peer_regions = (
                    past.peer_regions
                    if place.epoch <= past.peer_regions.epoch
                    else self._epoch_regions.regions_for(place.epoch, past.seq)
                )
                yield past.moved(peer_regions)

    def raise_loss(self) -> None:
        """Raise the loss that would fail a call which has ended here already, with another error. Mode "raise".

        To be called before a call takes its number: where that call is still open, it is what fails, and the numbers
        after it are the same everywhere.
        """
        engine = self._engine
        engine.unsettled.keep(self._ask_again(tuple(engine.unsettled.calls)))
        if all(op.done for op in engine.queue):  # else an open call may fail for the same reason
            engine.unsettled.raise_loss()

    def _place(self, past: Past) -> CallState:
        ran_in: int | None = past.peer_regions.epoch
        if max(past.peer_regions.epoch, self._course.base) <= max(
            self._epoch_regions.joined_in, self._epoch_regions.shown_epoch
        ):
            ran_in = None  # it was planned in a change that no call has been asked about: ask from before that

        def is_whole(slot: int, epoch: int, seq: int) -> bool:
            return self._is_whole(past, slot, epoch)

        def has_root(epoch: int) -> bool:
            is_before = epoch < past.peer_regions.epoch  # it was planned later, with the members there
            return past.root < 0 or is_before or past.root in self._epoch_regions.regions_for(epoch, past.seq).members

        return self._course.place(past.seq, is_whole, ran_in, has_root)

    def _mark_lost(self, op: Operation) -> None:
        """Record in a call which of its members read nothing any more."""
        op.lost = self._rank_table.removed_after(op.peer_regions.epoch)

    def _is_whole(self, past: Past, slot: int, epoch: int) -> bool:
        """Return whether a dead slot has contributed all that the call needs of it, as far as its words and ours show.

        The outboxes of the epoch in question have the memory of the process that died, whichever process has its rank
        now.
        """
        peer_regions = (
            past.peer_regions if epoch == past.peer_regions.epoch else self._epoch_regions.regions_for(epoch, past.seq)
        )
        rank = self._rank_table.rank_at(slot, epoch)
        return (
            rank is None
            or rank not in peer_regions.members
            or past.moved(peer_regions).counts_as_settled(peer_regions.words[peer_regions.members.index(rank)])
        )

    def _move(self, op: Operation, peer_regions: PeerRegions, is_rootless: bool) -> None:
        """Run a call again with the members of a later epoch; if its root is none of them it ends, for all ranks."""
        gone = [rank for rank in op.peer_regions.members if rank not in peer_regions.members]
        op.lost_here = (*op.lost_here, *(rank for rank in gone if not self._rank_table.was_put_out(rank)))
        try:
            plan = op.plan if op.make is None else op.make(peer_regions)
        except BaseException as exc:
            if self._engine.is_interrupt(exc):
                raise
            if is_rootless:
                op.fail(exc)
                op.by_view = True
                self._course.ended_on_the_way(op.seq, peer_regions.epoch)
            else:  # here only, so the others must find a header
                op.renew(peer_regions, op.plan)
                op.fail(_misfit(op, peer_regions, exc) if isinstance(exc, InvalidArgument) else exc)
        else:
            op.renew(peer_regions, plan)

    def _leave(self, op: Operation, told: BaseException, place: CallState) -> None:
        """End a call that would move, whose caller has another error: no thread waits for it, its tensors are free.

        Others continue with it, lack this rank's part, and end it without a result: it is unsettled for all
        (`unsettled`), so all keep asking about it, and losses recorded for later epochs are kept. But if it ends on its
        way for all ranks, as its root is lost, no rank asks about it any more, so this rank must not either: else it
        would find another first call that a later epoch change hits, and in mode "raise" report that loss once more
        than others.
        """
        op.fail(told)
        op.by_view = True
        if place.rootless:
            op.told = None
            self._course.ended_on_the_way(op.seq, place.rootless)

    def _failure(self, op: Operation, place: CallState) -> PeerError:
        elapsed = time.monotonic() - op.started if op.started else 0.0
        told = op.describe(self._epoch_regions.full, peer=_names(self._lost_ranks(place)), elapsed=elapsed)
        return self._loss(place, f"{told}: {{}}; results are untouched", op.name, op.seq)

    def _lost_by(self, past: Past, place: CallState) -> PeerError:
        ranks = self._lost_ranks(place)
        told = context(LOSS, rank=self._epoch_regions.full.rank, peer=_names(ranks), epoch=place.epoch)
        return self._loss(place, f"{told}: {{}}; call {past.seq} had failed here before; nothing was called", LOSS, 0)

    def _lost_ranks(self, place: CallState) -> list[int]:
        ranks = (self._rank_table.rank_at(slot, place.epoch - 1) for slot in place.lost)
        return [rank for rank in ranks if rank is not None]

    def _loss(self, place: CallState, told: str, name: str, seq: int) -> PeerError:
        ranks = self._lost_ranks(place)
        kind, cause = self._rank_table.kind_of_loss(ranks)
        text = f"{told.format(cause)}; the next call runs in epoch {place.epoch} without them"
        return kind(text, ranks, name, seq, place.epoch, cause)


def _misfit(op: Operation, peer_regions: PeerRegions, exc: InvalidArgument) -> MismatchError:
    return MismatchError(
        f"{op.describe(peer_regions)}: the group has grown with this call, in epoch "
        f"{peer_regions.epoch}, and counts {peer_regions.group_size} "
        f"ranks (group.num_slots): {exc}"
    )


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
