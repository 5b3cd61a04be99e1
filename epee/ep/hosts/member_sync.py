"""The agreement on the members of a buffer that has an engine, in `sync`: ranks that arrive stay, others are excluded.

For buffers of one host. `assembly.py` is the meeting over several hosts, where no living rank is excluded.

Each rank has a **line** of words in its outbox (`PeerRegions.extra`), which the others read: the engine call that it is
about to make in a `sync`, the ranks that it counts on, whether its timeout has expired, whether it will return. A
`sync` consists of rounds of three steps, which a rank makes in order:

    arrive    It writes its line, the number of the call last, and reads those of the members until all of them have
              arrived. A member whose header of that call is in its outbox is in another call, and has arrived as well:
              the call raises on all.
    exclude   If members are missing, those that have arrived request a view without them: when the timeout of one that
              has arrived has expired, or after a short grace period if no arrived rank counts on the missing ones; and
              only if more than half of the ranks of the last agreement have arrived (half including the lowest is
              enough). The lowest rank requests it at once, the others one after another. Its decision ends the part of
              the missing ranks in the group of the engine; their processes stay in the job.
    call      All members make one call of the engine, with their data and the ranks that each knows to be in the group
              or to request admission. Those that complete it have the same rows and the same members: that is the
              agreement. If a row names a rank that was not in the call, the ranks admit it (`Admission.take_in`), and
              the next round follows; so all ranks make the same number of rounds.

A call of the engine that fails alike on all (a rank has stopped after it had arrived) is followed by another round,
under the next number, in which that rank has not arrived.

**Return.** A rank that was excluded finds that in its engine (`EvictedError`). In its next `sync` it closes that engine
and requests admission with a new one (`come_back`); it first writes into its old line that it will return, since its
outbox says that it has left from then on. The others await it if one of them counts on it, and admit it.

Each rank writes its own line. Lines decide only whom a view is to exclude, and when; a line that is read too late
delays a round, or excludes a rank that has just arrived, which then returns as above. A crash leaves a line that no
rank awaits, since the view excludes the dead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ...engine import Engine, Place, come_in
from ...engine.outbox import CELL_WORDS, NUM_CELLS, STATE_WORDS, consumed_of, has_left
from ...errors import CommTimeoutError, EvictedError, MismatchError, NoQuorumError, PeerError, context, expected
from ...memory.signals import SEQ_BITS
from ...view.protocol.decision import has_quorum

GRACE_S = 0.05  # how long to wait for a rank that no rank counts on
WANT_PAUSE_S = 0.1  # between two identical requests to the agent
TURN_S = 0.3  # delay of each rank's request after that of the rank before it
SLICE_S = 0.2  # of the wait for a view with a rank that requests admission
_POLL_S = 0.001
_LINE_WORDS = 8
LINE_BYTES = 8 * _LINE_WORDS
_NUMBER, _COUNTED, _LATE, _RETURNS = range(4)
_SEQ = (1 << SEQ_BITS) - 1


class SyncRow(NamedTuple):
    """The part of a row that the meeting reads.

    Attributes:
        there: bits of the ranks in the group, or requesting admission.
        late: 1: past the deadline; 2: twice the timeout has passed, and no rank is awaited any more.
    """

    there: int
    late: int


class Arrivals(NamedTuple):
    """The ranks that have arrived at a round, as one rank sees it.

    Attributes:
        arrived: members of the group.
        missing: members that have not arrived, or have closed their engines.
        awaited: ranks that are not here although an arrived rank counts on them, members or not.
        is_late: the timeout of an arrived member has expired.
        has_begun: a member has published the call of this round.
    """

    arrived: frozenset[int]
    missing: frozenset[int]
    awaited: frozenset[int]
    is_late: bool
    has_begun: bool


class MemberSync:
    """The agreements of one rank.

    Args:
        engine: of the buffer, with `LINE_BYTES` extra bytes.
        num_ranks: of the buffer.
        gather: makes one call of the engine: gives every rank the row and the bytes of all, by rank; until a
            `time.monotonic()` value. Also returns the members of the call.
        may_return: returns the ranks outside of the engine's group whose process may request admission.
        check: called while waiting, with the awaited ranks; raises what ends the wait.
    """

    def __init__(
        self,
        engine: Engine,
        num_ranks: int,
        gather: Callable[[SyncRow, bytes, float], tuple[dict[int, SyncRow], dict[int, bytes]]],
        may_return: Callable[[], Collection[int]],
        check: Callable[[list[int]], None],
    ) -> None:
        self._num_ranks, self._gather, self._may_return, self._check = num_ranks, gather, may_return, check
        self._met: dict[int, int] = {}  # the ranks of the last agreement, and since when they take part
        self.use(engine)

    def use(self, engine: Engine) -> None:
        """Go on with another engine: the rank has returned with it."""
        self._engine = engine
        self._rank = engine.peer_regions.rank

    def begin(self, ranks: Collection[int]) -> None:
        """Record the ranks of an agreement: of these more than half must arrive at the next one."""
        since = self._engine.membership.admission.since()
        self._met = {rank: since.get(rank, 0) for rank in ranks}

    def words_of(self, rank: int) -> memoryview:
        """Return the line of a rank."""
        peer_regions = self._engine.peer_regions
        return peer_regions.regions[rank].words(peer_regions.extra, _LINE_WORDS)

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has closed its engine."""
        with self._engine.peer_regions.regions[rank].words(0, STATE_WORDS) as words:
            return has_left(words)

    def has_closed(self, rank: int) -> bool:
        """Return whether a rank has closed the buffer, and not only its engine in order to return."""
        return self.has_left(rank) and not self.words_of(rank)[_RETURNS]

    def returns(self) -> None:
        """Write that this rank will return, though it closes its engine. Idempotent."""
        if self._engine.peer_regions.regions:
            self.words_of(self._rank)[_RETURNS] = 1

    def meet(self, data: bytes, counted: int, deadline: float) -> dict[int, bytes]:
        """Agree with the other ranks on the members; return the `data` of each of them, ranks ascending.

        Args:
            data: equally long on all ranks.
            counted: bits of the ranks that this one counts on; all count on processes that have replaced lost ranks.
            deadline: until when to wait for ranks that have not arrived, a `time.monotonic()` value.

        Raises:
            NoQuorumError: too few ranks arrived to decide.
            EvictedError: the others have excluded this rank, or its process.
            MismatchError: a rank makes another call.
        """
        self._started = now = time.monotonic()
        wait_s = max(1.0, deadline - now)
        settings = self._engine.membership.runtime.settings
        last = max(deadline, now) + settings.no_quorum_s + settings.patience_s  # enough for the agents
        try:
            while True:
                self._await_arrivals(counted, deadline, last)
                now = time.monotonic()
                row = SyncRow(_bits(self._there()), (now > deadline) + (now > deadline + wait_s))
                try:
                    rows, found = self._gather(row, data, now + wait_s)
                except expected(EvictedError, NoQuorumError, MismatchError):
                    raise
                except expected(CommTimeoutError, PeerError):
                    if now > last:
                        raise
                    continue
                if self.is_over(rows):
                    self.begin(rows)
                    return found
                until = min(now + SLICE_S, max(deadline, now + 1e-3))
                self._engine.membership.admission.take_in(_named(rows) - rows.keys(), until)
        finally:
            if self._engine.peer_regions.regions:
                self.words_of(self._rank)[_NUMBER] = 0

    def is_over(self, rows: Mapping[int, SyncRow]) -> bool:
        """Return whether the rows of a round are the agreement; else another round follows, on all ranks."""
        return _named(rows) <= rows.keys() or max(row.late for row in rows.values()) > 1

    def _there(self) -> set[int]:
        """Return the ranks in the group, or requesting admission."""
        admission = self._engine.membership.admission
        asking = set(admission.waiting())  # before the view, see `Loop._decide`
        present = {rank for rank in admission.present() if rank < self._num_ranks}
        num_regions = len(self._engine.peer_regions.regions)
        return asking | {rank for rank in present if rank >= num_regions or not self.has_left(rank)}

    # ---- who has arrived

    def _await_arrivals(self, counted: int, deadline: float, last: float) -> None:
        """Write this rank's line, and wait until all members have arrived; has those excluded that do not."""
        admission, asked_at, ready = self._engine.membership.admission, 0.0, (-1, 0.0)
        while True:
            now = time.monotonic()
            if self._engine.flags:
                admission.apply_view(now)
            outside = set(self._may_return()) - admission.present().keys()
            self._write(counted | _bits(self._new(outside)), now > deadline)
            seen = self._read(outside)
            if seen.has_begun or not (seen.missing or seen.awaited):
                return
            voters = self._voters()
            is_enough = has_quorum(voters, (), seen.arrived)
            if now > deadline and seen.missing and not is_enough:
                raise self._no_quorum(voters, seen)
            if now > last:
                raise self._no_quorum(voters, seen, "the agents of the ranks do not agree")
            may_come = seen.missing - self._ended(seen.missing)
            is_alone = not seen.awaited and (not may_come or now > self._started + GRACE_S)
            if seen.is_late or is_alone:
                if not seen.missing:
                    return  # no rank waits longer for those that have not returned
                if is_enough and self._rank in voters:
                    epoch = self._engine.membership.runtime.view().epoch
                    ready = ready if ready[0] == epoch else (epoch, now)
                    position = sorted(seen.arrived.intersection(voters)).index(self._rank)
                    if now >= ready[1] + position * TURN_S and now >= asked_at + WANT_PAUSE_S:
                        asked_at = now
                        admission.request_exclusion(seen.missing, seen.arrived, self._least(voters, seen))
            self._check(sorted(seen.missing | seen.awaited))
            if now < self._started + _POLL_S:
                os.sched_yield()
            else:
                time.sleep(_POLL_S)

    def _new(self, outside: set[int]) -> set[int]:
        """Return the ranks whose process was not in the last agreement: all count on them."""
        admission = self._engine.membership.admission
        joined = {rank for rank, since in admission.since().items() if self._met.get(rank) != since}
        return joined | (outside & admission.strangers())

    def _write(self, counted: int, is_late: bool) -> None:
        words, number = self.words_of(self._rank), self._engine.seq + 1
        words[_COUNTED], words[_LATE] = counted | 1 << self._rank, is_late
        words[_NUMBER] = number  # last: no reader may see it with an outdated `counted`

    def _read(self, outside: set[int]) -> Arrivals:
        engine, admission = self._engine, self._engine.membership.admission
        peer_regions, number = engine.peer_regions, engine.seq + 1
        asking = set(admission.waiting())
        members = [rank for rank in admission.present() if rank < len(peer_regions.regions)]
        cell = peer_regions.first_cell + number % NUM_CELLS * CELL_WORDS
        arrived, bits, is_late, has_begun = set(), 0, False, False
        for rank in members:
            line, words = self.words_of(rank), peer_regions.words[rank]
            is_past = words[cell] & _SEQ == number or consumed_of(words) >= number
            if line[_NUMBER] >= number or is_past:
                bits |= line[_COUNTED] if line[_NUMBER] else 0
                is_late = is_late or bool(line[_NUMBER] and line[_LATE])
                has_begun = has_begun or is_past
                arrived.add(rank)
        missing = frozenset(rank for rank in members if rank not in arrived or self.has_left(rank))
        away = {*(missing - self._ended(missing)), *(outside - asking)}
        awaited = frozenset(rank for rank in away if bits >> rank & 1)
        return Arrivals(frozenset(arrived - missing), missing, awaited, is_late, has_begun)

    def _ended(self, ranks: Collection[int]) -> frozenset[int]:
        """Return which of some members have closed their engines."""
        return frozenset(rank for rank in ranks if self.has_left(rank))

    def _voters(self) -> list[int]:
        """Return the ranks of which more than half must arrive."""
        since = self._engine.membership.admission.since()
        return [rank for rank, when in self._met.items() if since.get(rank) == when and not self.has_left(rank)]

    def _least(self, voters: list[int], seen: Arrivals) -> int:
        """Return how many voters must remain if others stop now: as many as could continue without them."""
        if self._rank == min(voters):
            return (len(voters) + 1) // 2  # half, including the lowest
        return min(sum(rank in seen.arrived for rank in voters), len(voters) // 2 + 1)

    def _no_quorum(self, voters: list[int], seen: Arrivals, what: str = "") -> NoQuorumError:
        if not what and self._rank in voters:
            came = sorted(seen.arrived.intersection(voters))
            what = f"only ranks {came} of {sorted(voters)} came, too few to decide"
        return no_quorum(self._rank, self._started, seen.missing, what or "the others did not sync")

    # ---- return

    def come_back(self, address: Place, mode: str, deadline: float) -> Engine:
        """Return with a new engine, as a rank that was excluded; the old one is closed.

        Args:
            address: of this rank in the engine's group.
            mode: of the engine.
            deadline: until when the others must have admitted it.

        Raises:
            NoQuorumError: they have not.
        """
        started = time.monotonic()
        self.returns()
        try:
            wait_s = max(1e-3, deadline - started)
            engine = come_in(address, self._num_ranks, wait_s, mode, self._engine, LINE_BYTES)
        except expected(CommTimeoutError) as error:
            raise no_quorum(self._rank, started, (), "the others did not sync") from error
        self.use(engine)
        self._met = {}
        return engine


def no_quorum(rank: int, started: float, missing: Collection[int], what: str) -> NoQuorumError:
    """Return the error of a `sync` that could not agree."""
    where = context("sync", rank=rank, elapsed=time.monotonic() - started)
    return NoQuorumError(f"{where}: {what}; call sync again when they do", sorted(missing), "sync")


def _bits(ranks: Collection[int]) -> int:
    return sum(1 << rank for rank in ranks)


def _named(rows: Mapping[int, SyncRow]) -> set[int]:
    """Return the ranks that rows name."""
    union = 0
    for row in rows.values():
        union |= row.there
    return {rank for rank in range(union.bit_length()) if union >> rank & 1}
