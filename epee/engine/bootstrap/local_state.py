"""The state of a group's ranks as one process knows it, without a call: members, and ranks for which a process waits.

Mooncake's `get_peer_state` and `get_num_synced_ranks` ask here; one rank may ask alone. A rank takes part if it is in
the newest view and there is no proof of its death. A waiting rank counts when all members' agents know of it.

Programs also ask in a loop with calls in it, on all ranks, and leave the loop by the answer. So that they leave it
between the same two calls, each rank publishes beside its row on the board which waiting ranks it knows, and which of
its calls comes next (`Mark`). A call completes only when all members have begun it. So when call n has ended, every
rank sees which ranks all members knew before they began call n, and that is the answer until call n + 1 has ended. If
no member makes calls there is nothing to agree on: after `ALONE_S` without one a rank that all members know counts.

A rank that was taken in may leave and ask again, while marks still have it from its first request: nobody writes marks
while nobody asks. So each request has a number above those on the boards (`Offer.request`), a mark has the highest
number that its process knew, and a mark with a lower one does not count for a request.

A rank that a member takes in asks no more, and its board may say so before this process's agent has the view with it.
So when a known rank asks no more and is no member here, the other members are asked for their newest view first.

The agent thread when it learns of a waiting rank, and the thread that asks, write this process's mark, with the
engine's lock, so that no call begins meanwhile; all members read. A mark is read twice, as a reader may meet a writer.
Between hosts marks come a moment later, and ranks of several hosts may then leave their loops one call apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...errors import EpeeError, expected
from ...memory.claim import has_ended
from ...memory.signals import SEQ_BITS
from ...view.process.detector import is_torn_down
from ...view.protocol.messages import Decision, Member
from ...view.runtime import Runtime
from ...view.transport.wire import parse_endpoint
from ..membership.admission import CATCH_UP_S, Admission
from ..membership.rank_table import RankTable
from ..outbox import CELL_WORDS, NUM_CELLS, has_left

if TYPE_CHECKING:
    from ..engine import Engine

ALONE_S = 1.5  # how long a waiting rank is known, and no call ends, before it counts without calls
LOCK_S = 0.5  # how long to wait for a call in progress, as the agent thread must go on
_SEQ_MASK = (1 << SEQ_BITS) - 1


class Mark(NamedTuple):
    """The waiting ranks that a process knows, as bits.

    Attributes:
        request: the highest number of their requests, and of those before them.
        next_seq: the call that came next here when it learned of the last of them.
        heard: all of them.
        before: those that it knew before it began the call before `next_seq`.
    """

    request: int = 0
    next_seq: int = 0
    heard: int = 0
    before: int = 0

    def moved(self, heard: int, again: int, request: int, next_seq: int) -> Mark:
        """Return the mark of a process that knows these now; `again`: those among them that have another request."""
        before = (self.before if next_seq == self.next_seq else self.heard) & ~again
        return Mark(max(self.request, request), next_seq, heard, before)

    def has(self, rank: int, request: int = 0) -> bool:
        """Return whether the process knows a rank, by its request of this number."""
        return bool(self.heard >> rank & 1) and self.request >= request

    def has_before(self, rank: int, seq: int) -> bool:
        """Return whether it knew a rank before it began call `seq`."""
        return bool((self.heard if self.next_seq <= seq else self.before) >> rank & 1)


class LocalState:
    """The state of the ranks of one group, as this process knows it.

    Args:
        read_marks: returns the marks of the members that have one, by slot, this process's among them.
        publish: writes this process's mark.
    """

    def __init__(
        self,
        runtime: Runtime,
        engine: Engine,
        rank_table: RankTable,
        admission: Admission,
        read_marks: Callable[[], Mapping[int, Mark]],
        publish: Callable[[Mark], None],
    ) -> None:
        self._runtime = runtime
        self._engine = engine
        self._rank_table = rank_table
        self._admission = admission
        self._read_marks = read_marks
        self._publish = publish
        self._mark = Mark()
        self._joined_at: dict[int, int] = {}  # rank that asks no more, in the mark still -> the last call begun then
        self._heard_at: dict[tuple[int, int], float] = {}  # by rank and request
        self._last_end = -1, 0.0  # the last call that has ended here, and when it was seen to have

    def states(self, ranks: Sequence[int]) -> list[bool]:
        """Return for each rank whether it takes part, or a process waits for it that all members know."""
        asking = self.note()
        alive = self.alive(self._runtime.view())
        if any(self._mark.has(rank) and rank not in asking and rank not in alive for rank in ranks):
            self._runtime.catch_up(CATCH_UP_S)
            alive = self.alive(self._runtime.view())
        wanted = {rank for rank in ranks if rank in asking and rank not in alive}
        heard = self._heard({rank: asking[rank] for rank in wanted}, alive) if wanted else set()
        return [rank in alive or rank in heard for rank in ranks]

    def alive(self, view: Decision) -> dict[int, int]:
        """Return the members of a view that have not left the group and are not known to be dead: rank -> slot."""
        members = {member.slot: member for member in view.members}
        present, left = self._rank_table.present(view), self._left(view)
        return {rank: slot for rank, slot in present.items() if rank not in left and self._is_alive(members[slot])}

    def must_be_taken_in(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` without which the next call here would run, or that are dead."""
        alive, peer_regions = self.alive(self._runtime.view()), self._engine.members
        since = self._admission.since()
        return [
            rank
            for rank in ranks
            if rank not in alive
            or not self._engine.mask[rank]
            or rank not in peer_regions.members
            or since.get(rank, 0) > peer_regions.epoch
        ]

    def note(self) -> dict[int, int]:
        """Publish for which ranks processes wait, as far as known here; return them and their requests. Any thread."""
        asking = self._admission.requests()
        now, heard_at = time.monotonic(), self._heard_at
        self._heard_at = {one: heard_at.get(one, now) for one in asking.items()}
        if asking and self._last_end[0] != self._engine.num_retired:
            self._last_end = self._engine.num_retired, now
        if _bits(asking) != self._mark.heard or max(asking.values(), default=0) > self._mark.request:
            has_lock = self._engine.entry.stop_calls(LOCK_S)
            try:
                asking = self._admission.requests()  # another thread may have been here with less, or with more
                mark = self._mark
                again = {rank for rank, request in asking.items() if rank in self._joined_at or request > mark.request}
                heard = _bits(asking) | _bits(self._joined_just_now(asking))
                if heard != mark.heard or again:
                    # A thread that keeps the lock for so long is inside a call, and may begin another one.
                    next_seq = self._engine.seq + (1 if has_lock else 2)
                    self._mark = mark.moved(heard, _bits(again), max(asking.values(), default=0), next_seq)
                    self._publish(self._mark)
            finally:
                if has_lock:
                    self._engine.entry.let_calls()
        return asking

    def _joined_just_now(self, asking: Collection[int]) -> set[int]:
        """Return the ranks that ask no more since the last call that ended here: others may ask about them."""
        engine = self._engine
        silent = [rank for rank in range(self._mark.heard.bit_length()) if self._mark.has(rank) and rank not in asking]
        self._joined_at = {rank: self._joined_at.get(rank, engine.seq) for rank in silent}
        return {rank for rank, seq in self._joined_at.items() if engine.num_retired <= seq}

    def _left(self, view: Decision) -> set[int]:
        """Return the ranks that have left the group, of those whose outboxes calls have been planned with."""
        peer_regions, since = self._engine.members, self._rank_table.since_in(view)
        pairs = zip(peer_regions.members, peer_regions.words, strict=True)
        return {rank for rank, words in pairs if since.get(rank, 0) <= peer_regions.epoch and has_left(words)}

    def _is_alive(self, member: Member) -> bool:
        if member.nonce == self._runtime.member.nonce:
            return True
        if self._runtime.is_dead(member):
            return False
        if member.host != self._runtime.member.host:
            return True
        try:
            endpoint = parse_endpoint(member.endpoint)
        except expected(EpeeError):
            return False
        process = endpoint.pid, endpoint.start_time
        if is_torn_down(*process) or has_ended(*process):
            self._runtime.look_at(member.slot)  # the agent has not turned since
            return False
        return True

    def _heard(self, requests: Mapping[int, int], alive: Mapping[int, int]) -> set[int]:
        """Return those of the waiting ranks that count; `requests`: the number of each one's request."""
        marks = self._read_marks()
        marks = {slot: mark for slot, mark in self._read_marks().items() if marks.get(slot) == mark}
        members = [marks.get(slot) for slot in alive.values()]
        return {rank for rank, request in requests.items() if self._counts(rank, request, members)}

    def _counts(self, rank: int, request: int, marks: Sequence[Mark | None]) -> bool:
        has_heard = [mark for mark in marks if mark is not None and mark.has(rank, request)]
        ended, ended_at = self._last_end
        long_ago = time.monotonic() - ALONE_S
        is_known, is_recent = len(has_heard) == len(marks), self._heard_at.get((rank, request), 0.0) > long_ago
        if not is_known and (is_recent or self._admission.is_joiner(rank)):
            return False  # a process in the job shows its request to all at once, and to no agent
        if all(mark.has_before(rank, ended) for mark in has_heard):
            return True
        # A member may begin its next call yet, because of the answer that it got after the last one.
        return not is_recent and ended_at <= long_ago and not self._is_called(ended + 1)

    def _is_called(self, seq: int) -> bool:
        """Return whether a peer has begun call `seq`."""
        peer_regions = self._engine.members
        cell = peer_regions.first_cell + seq % NUM_CELLS * CELL_WORDS
        return any(words[cell] & _SEQ_MASK == seq & _SEQ_MASK for words in peer_regions.peer_words)


def _bits(ranks: Iterable[int]) -> int:
    return sum(1 << rank for rank in ranks)
