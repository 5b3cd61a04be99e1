"""The agreement on the members of a buffer that has an engine, in `sync`: ranks that arrive stay, others are excluded.

For buffers of one host (`MembersOfEngine`: `direct.py`, `epoch_members.py`). `assembly.py` is the meeting
over several hosts, where no living rank is excluded.

Each rank has a **line** of words in its outbox (`PeerRegions.extra`), which the others read: the engine call that it is
about to make in a `sync`, the ranks that it counts on, whether its timeout has expired, whether it will return. A
`sync` consists of rounds of three steps, which a rank makes in order:

    arrive    It writes its line, the number of the call last, and reads those of the members until all of them have
              arrived. A member whose header of that call is in its outbox, and that has not arrived by its line, is in
              another call. If a rank counts on it, the `sync` is refused, and with it that call; else it is missing. A
              call that a member has aborted it has behind it: the rank makes it, it fails, and a round follows.
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
under the next number, in which that rank has not arrived. One out of which an exception of a handler has come may have
ended well on the others: the next `sync`, or call, of the rank finds that out first (`settle`).

**Return.** A rank that was excluded finds that in its engine (`EvictedError`). In its next `sync` it closes that engine
and requests admission with a new one (`come_back`); it first writes into its old line that it will return, since its
outbox says that it has left from then on. The others await it if one of them counts on it, and admit it.

Each rank writes its own line. Lines decide only whom a view is to exclude, and when; a line that is read too late
delays a round, or excludes a rank that has just arrived, which then returns as above. A crash leaves a line that no
rank awaits, since the view excludes the dead.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from ...engine import Engine, come_in, place_of
from ...engine.operation import Operation
from ...engine.outbox import CELL_WORDS, GAVE_UP, NUM_CELLS, SIGNATURE, STATE_WORDS, PeerRegions, consumed_of, has_left
from ...engine.plan import Make
from ...engine.signature import REFUSED
from ...errors import (
    CommTimeoutError,
    EpeeError,
    EvictedError,
    MismatchError,
    NoQuorumError,
    PeerError,
    ProtocolError,
    context,
    expected,
    ignored,
    is_own,
)
from ...memory.signals import SEQ_BITS
from ...view.group import GroupInView
from ...view.protocol.decision import has_quorum
from ...view.protocol.messages import EXITED, LEFT, PUT_OUT
from ..config import BufferConfig
from .header import OP_SYNC, REASON_BYTES, Header
from .membership import Agreed, Membership
from .notices import BufferNotice, present_ranks
from .rows import CallTimeouts, OwnRow, RowExchange, RowsPlan

GRACE_S = 0.05  # how long to wait for a rank that no rank counts on
WANT_PAUSE_S = 0.1  # between two identical requests to the agent
TURN_S = 0.3  # delay of each rank's request after that of the rank before it
SLICE_S = 0.2  # of the wait for a view with a rank that requests admission
ROUND_S = 1.0  # after a round that a timeout has ended: how long to wait for others whose timeout ends it later
_POLL_S = 0.001
_LINE_WORDS = 8
LINE_BYTES = 8 * _LINE_WORDS
BLOB_WORDS = 64  # of GPU buffers, behind the line: length of the blob by which their memory is mapped, and the blob
NUM_REASONS, REASON_WORDS = 8, 1 + REASON_BYTES // 8  # behind that: why this rank has refused calls on the GPU
_NUMBER, _COUNTED, _LATE, _RETURNS, PREPARED = range(5)  # PREPARED: of GPU buffers, the last epoch prepared for
_SEQ = (1 << SEQ_BITS) - 1
_ROW = struct.Struct("<QQ")  # `SyncRow`


def extra_bytes(config: BufferConfig) -> int:
    """Return the extra bytes of the outboxes of a buffer of one host."""
    return LINE_BYTES + 8 * (BLOB_WORDS + NUM_REASONS * REASON_WORDS) * config.is_cuda


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
        elsewhere: those of them that are in another call.
        is_late: the timeout of an arrived member has expired.
        has_begun: a member has published the call of this round.
    """

    arrived: frozenset[int]
    missing: frozenset[int]
    awaited: frozenset[int]
    elsewhere: frozenset[int]
    is_late: bool
    has_begun: bool


class SyncExchange(RowExchange):
    """An exchange of rows whose engine makes the calls of `sync` as well.

    The engine has `extra_bytes` extra bytes.

    Attributes:
        membership: set before the first call.
        num_agreed: the agreement with which the epoch has begun; they are numbered, alike on all members.
        tell: publishes a notice of the buffer to processes that join; returns the function that removes it.
    """

    membership: MembersOfEngine
    num_agreed = 0
    tell: Callable[[], Callable[[], None]]

    def announce(self) -> None:
        """Publish that this rank has the buffer."""
        self.take_back = self.tell()

    def use(self, engine: Engine) -> None:
        """Run the next call with an engine: the first one, or that with which this rank has returned."""
        raise NotImplementedError

    def run(self, make: Make, timeouts: CallTimeouts) -> Operation:
        """Run a call of the engine to its end."""
        raise NotImplementedError

    def sync_row(self, text: bytes) -> OwnRow:
        """Return this rank's row of a `sync`, which has a rule of its own for silent ranks."""
        row = self._row(Header(OP_SYNC, 0, 0, 1, rank=self.rank), None, text)
        row.heeds_stalls = False
        return row

    def texts_of(self, row: OwnRow, op: Operation) -> dict[int, bytes]:
        """Return the free bytes of the rows of a call, by rank."""
        rows = self._read(row, op).rows
        return {rank: rows.texts[rank] for rank in rows.parties}


class MemberSync:
    """The agreements of one rank.

    Args:
        exchange: of the buffer; has its engine.
        may_return: returns the ranks outside of the engine's group whose process may request admission.
        check: called while waiting, with the awaited ranks; raises what ends the wait.

    Attributes:
        met: the outboxes with which the last call has run.
        open_row: the row of the last call and the length of its data, until its result is known: an exception of a
            handler may have come out of it.
    """

    met: PeerRegions

    def __init__(
        self,
        exchange: SyncExchange,
        may_return: Callable[[], Collection[int]],
        check: Callable[[list[int]], None],
    ) -> None:
        self._exchange, self._may_return, self._check = exchange, may_return, check
        self._num_ranks, self._rank = exchange.config.num_ranks, exchange.rank
        self._met: dict[int, int] = {}  # the ranks of the last agreement, and since when they take part
        self.open_row: tuple[OwnRow, int] | None = None

    @property
    def _engine(self) -> Engine:
        return self._exchange.engine

    # ---- the call

    def gather(self, row: SyncRow, data: bytes, deadline: float) -> tuple[dict[int, SyncRow], dict[int, bytes]]:
        """Exchange the rows and the data of all members of the engine in one call, and return them by rank."""
        own = self._exchange.sync_row(_ROW.pack(*row) + data)
        self.open_row = own, len(data)
        try:
            found = self._found(self._exchange.run(own.plan, CallTimeouts.until(deadline)))
        except BaseException as error:
            if is_own(error):
                self.open_row = None  # it has failed on all
            raise
        self.open_row = None
        self._exchange.close_call()
        return found

    def _found(self, op: Operation) -> tuple[dict[int, SyncRow], dict[int, bytes]]:
        """Return what the ranks have given in the last call."""
        assert self.open_row is not None
        own, length = self.open_row
        texts = self._exchange.texts_of(own, op)
        for rank, text in sorted(texts.items()):
            if len(text) < _ROW.size + length:
                where = self._exchange.where("sync")
                rule = f"must have at least {_ROW.size + length} bytes, has {len(text)}"
                raise ProtocolError(f"{where}: the row of rank {rank} {rule}")
        self.met = op.peer_regions
        found = {rank: SyncRow(*_ROW.unpack_from(text)) for rank, text in texts.items()}
        return found, {rank: text[_ROW.size : _ROW.size + length] for rank, text in texts.items()}

    def settle(self, deadline: float) -> dict[int, bytes] | None:
        """Find out how that call has ended; return the data of the ranks if it was the agreement.

        Raises:
            CommTimeoutError: its end is still open.
        """
        if self.open_row is None:
            return None
        (own, _), engine, found = self.open_row, self._engine, None
        latest = engine.latest.op
        for op in [op for op in (*engine.unclaimed, latest) if op is not None and _is_of(op, own)]:
            with ignored(EpeeError):
                self._exchange.await_end(op, deadline)
            if not op.done:
                where = self._exchange.where("sync")
                raise CommTimeoutError(f"{where}: the end of an interrupted sync is still open; repeat it")
            if op.error is None:
                found = self._found(op if op is latest else self._exchange.run(own.plan, CallTimeouts.until(deadline)))
        self.open_row = None
        if found is None or not self.is_over(found[0]):
            return None
        self.begin(found[1])
        return found[1]

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
        agents_s = settings.no_quorum_s + settings.wait_limit_s  # enough for the agents
        last, num_more = max(deadline, now) + agents_s, self._num_ranks
        try:
            while True:
                self._await_arrivals(counted, deadline, last)
                now = time.monotonic()
                row = SyncRow(_bits(self._there()), (now > deadline) + (now > deadline + wait_s))
                try:
                    rows, found = self.gather(row, data, now + wait_s)
                except expected(EvictedError, NoQuorumError):
                    raise
                except expected(CommTimeoutError, PeerError, MismatchError) as error:
                    if now > last and isinstance(error, MismatchError):
                        raise
                    if now > last:
                        raise no_quorum(self._rank, self._started, (), "the others did not sync") from error
                    late_s = min(wait_s, ROUND_S) if isinstance(error, CommTimeoutError) else wait_s
                    deadline = max(deadline, time.monotonic() + late_s)  # the others may find out a moment later
                    if num_more:  # each of these rounds is one that a rank has stopped in
                        num_more -= 1
                        last = max(last, deadline + agents_s)
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
            if seen.elsewhere:
                where = context("sync", rank=self._rank, peer=min(seen.elsewhere))
                raise MismatchError(f"{where}: it makes another call; all ranks must call sync with a mask")
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
        arrived, elsewhere, bits, is_late, has_begun = set(), set(), 0, False, False
        for rank in members:
            words = peer_regions.words[rank]
            has_header, line = words[cell] & _SEQ == number, self.words_of(rank)  # the line was written before it
            is_past = consumed_of(words) >= number or (has_header and _is_over(words, cell))
            if line[_NUMBER] >= number:
                bits |= line[_COUNTED]
                is_late = is_late or bool(line[_LATE])
                is_past = is_past or has_header
            elif has_header and not is_past:
                elsewhere.add(rank)
            if is_past or line[_NUMBER] >= number:
                has_begun = has_begun or is_past
                arrived.add(rank)
        missing = frozenset(rank for rank in members if rank not in arrived or self.has_left(rank))
        away = {*(missing - self._ended(missing)), *(outside - asking)}
        awaited = frozenset(rank for rank in away if bits >> rank & 1)
        return Arrivals(frozenset(arrived - missing), missing, awaited, awaited & elsewhere, is_late, has_begun)

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


class MembersOfEngine(Membership):
    """The membership of a buffer of one host that has an engine, which changes in `sync`.

    Args:
        exchange: of the buffer.
        mode: of the engine.
        job_handle: job handle of the group; of one in no view `NO_VIEW`.
        timeout_s: of the buffer's calls.
        interrupt: called while waiting; raises to end the wait.
    """

    def __init__(
        self,
        exchange: SyncExchange,
        mode: str,
        job_handle: GroupInView,
        timeout_s: float,
        interrupt: Callable[[], None],
    ) -> None:
        self._exchange, self._config, self._rank = exchange, exchange.config, exchange.rank
        self._mode, self._job_handle = mode, job_handle
        self._timeout_s, self._interrupt = timeout_s, interrupt
        self._next: Any = None  # an agreement whose epoch is to be entered
        self._last = Agreed(0, ())  # the agreement with which the epoch has begun
        self._returned = 0  # the last agreement that a `sync` has returned, or whose epoch a call has entered
        self._is_out = False  # the engine is closed, and the next `sync` makes another one
        self._view: object = None  # the view of which `_is_inside` says whether this rank takes part
        self._is_inside = True
        self._sync = MemberSync(exchange, self._may_return, self._check)
        self._job: Any = None
        self._label = ""

    def begin_first(self, deadline: float) -> None:
        """Begin with the engine that all ranks have made together (`begin_with`). Collective."""
        raise NotImplementedError

    def join_running(self, group: dist.ProcessGroup, running: BufferNotice) -> None:
        """Join a running buffer of this process's group, at once or in the first call."""
        raise NotImplementedError

    def begin_with(self, engine: Engine) -> None:
        """Use the first engine."""
        self._use(engine)
        self._address = place_of(engine, self._mode)
        self._job = engine.membership.job
        self._job.retain()  # an excluded rank has no engine for a while

    def close(self) -> None:
        """Release the job; the engine ends with the exchange. Idempotent.

        If that takes the process out of the job, its rank has left, or failed if the buffer was not closed.
        """
        job, self._job = self._job, None
        if job is not None:
            job.release(EXITED if self._exchange.is_dropped else LEFT)

    @property
    def takes_replacements(self) -> bool:  # type: ignore[override]
        """Whether a process that replaces a lost rank is admitted."""
        return self._job_handle.is_open

    @property
    def _engine(self) -> Engine:
        return self._exchange.engine

    def returns(self) -> None:
        """Write for the others that this rank will return, though it closes its engine."""
        self._sync.returns()

    def _is_excluded(self) -> bool:
        """Return whether the others have agreed without this rank, and it may return."""
        if self._is_out:
            return True
        membership = self._engine.membership
        view = membership.runtime.view()
        if view is not self._view:  # asked in every call: computed once for each view
            self._is_inside = self._rank in membership.admission.present()
            self._view = view
        return not self._is_inside and self._job_error() is None

    def _job_error(self) -> PeerError | None:
        """Return why this process has no part in the job any more, or cannot reach it."""
        return self._engine.membership.runtime.error

    def require_place(self, is_masked: bool) -> None:
        """Raise `EvictedError` if the job has continued without this process, or, without a mask, the buffer has."""
        error = self._job_error()
        if isinstance(error, EvictedError):
            raise EvictedError(str(error), error.ranks, error.op, error.seq, error.epoch, error.cause)
        if not is_masked and self._is_excluded():
            when, epoch = self._excluded_when()
            raise EvictedError(
                f"rank {self._rank} was put out of this buffer {when} epoch {epoch}: it did not come to sync; call "
                "buffer.sync(active_ranks) together with the others to come back",
                [self._rank],
                epoch=epoch,
                cause=PUT_OUT,
            )

    def _excluded_when(self) -> tuple[str, int]:
        """Return the epoch that the others have entered without this rank, or the one before, and a preposition."""
        raise NotImplementedError

    def call_it(self, text: str) -> None:
        """Show the buffer's name in hang reports."""
        self._label = text
        if self._exchange.has_engine:
            self._engine.membership.call_it(text)

    def show(self, op: str, seq: int, ranks: list[int]) -> None:
        """Publish in hang reports that a call waits for ranks."""
        self.has_shown = True
        self._engine.membership.show_wait(op, seq, ranks)

    def hide(self) -> None:
        """Publish that no call waits."""
        if not self._is_out and self._job is not None:
            self._engine.membership.hide()
        self.has_shown = False

    # ---- sync

    @property
    def _has_missed(self) -> bool:
        """Whether the others may be in an epoch that this rank has not entered."""
        return self._next is not None or self._sync.open_row is not None

    @property
    def must_turn(self) -> bool:  # type: ignore[override]
        """Whether an error has come out of a `sync` that has agreed, or may have: its epoch is to be entered."""
        return self._has_missed or self._returned < self._exchange.num_agreed

    def turn(self, op: str, deadline: float) -> None:
        """Enter the epoch that the last `sync` has agreed on, if it has."""
        self._settle(deadline)
        if self._next is not None:
            self._enter(deadline)
        self._returned = self._exchange.num_agreed

    def _data(self) -> bytes:
        """Return this rank's data for an agreement."""
        raise NotImplementedError

    def _note(self, found: Mapping[int, bytes]) -> None:
        """Record what the ranks have agreed on, as `_next`; from here on the epoch is to be entered."""
        raise NotImplementedError

    def _enter(self, deadline: float) -> Agreed:
        """Enter the epoch of `_next`, and return it as `_last`. May be repeated; `deadline` is for waits."""
        raise NotImplementedError

    def _settle(self, deadline: float) -> None:
        """Find out what an interrupted `sync` has agreed on."""
        found = self._sync.settle(deadline)
        if found is not None:
            self._note(found)

    def sync(self, counted: int, used: int, deadline: float) -> Agreed:
        """Agree with the others on the members, and enter; `note_agreed` follows.

        Raises:
            NoQuorumError: too few ranks arrived to decide, or the others agreed without this one.
            EvictedError: the job has continued without this process.
            MismatchError: a rank that is counted on makes another call.
            ResourceError: no memory or descriptor is left here; the next call enters the epoch.
        """
        self._settle(deadline)
        if self._next is not None:  # an error has interrupted a sync here
            return self._enter(deadline)
        if self._returned < self._exchange.num_agreed:
            return self._last
        try:
            found = self._meet(counted, deadline)
        finally:
            self.hide()
        self._note(found)
        return self._enter(deadline)

    def note_agreed(self) -> None:
        """Record that the caller of `sync` has its result, and that the next one is another."""
        self._returned = self._exchange.num_agreed

    def _meet(self, counted: int, deadline: float) -> dict[int, bytes]:
        """Agree on the members, after a return if this rank was excluded; return the data of each of them."""
        started = time.monotonic()
        if not self._is_excluded():
            self._exchange.settle_calls(deadline)
        while True:
            try:
                if self._is_excluded():
                    self._come_back(deadline)
                return self._sync.meet(self._data(), counted, deadline)
            except expected(EvictedError) as error:
                if not self._is_excluded():
                    raise
                if time.monotonic() > deadline:
                    raise no_quorum(self._rank, started, (), "the others agreed without it") from error

    def _come_back(self, deadline: float) -> None:
        """Return with a new engine; the old one is closed.

        Raises:
            NoQuorumError: the others have not admitted this rank.
        """
        self._is_out = True
        started = time.monotonic()
        self._sync.returns()
        try:
            wait_s = max(1e-3, deadline - started)
            num_ranks, sizes = self._config.num_ranks, (extra_bytes(self._config), False)
            engine = come_in(self._address, num_ranks, wait_s, self._mode, self._engine, *sizes)
        except expected(CommTimeoutError) as error:
            raise no_quorum(self._rank, started, (), "the others did not sync") from error
        engine.timeout_s = self._timeout_s
        self._use(engine)
        self._sync.begin(())
        self._is_out, self._view = False, None

    def _use(self, engine: Engine) -> None:
        """Go on with an engine: the first one, or that with which this rank has returned."""
        self._exchange.use(engine)
        if self._label:
            engine.membership.call_it(self._label)

    def _may_return(self) -> Collection[int]:
        """Return the ranks outside of the engine's group whose process may request admission."""
        membership = self._engine.membership
        admission, num_ranks = membership.admission, self._config.num_ranks
        view, strangers = membership.runtime.view(), admission.strangers()
        if self._job_handle.is_open:
            alive = set(self._in_group())
        else:
            here = {member.slot for member in view.members}
            slots = membership.in_view(num_ranks).slots
            alive = {rank for rank, slot in enumerate(slots) if slot in here} - strangers
        away = alive.difference(admission.present())
        return {rank for rank in away if rank in strangers or not self._sync.has_closed(rank)}

    def _in_group(self) -> Sequence[int]:
        """Return the ranks that take part in the group of the buffer on this host, if processes can join it."""
        if not self._job_handle.is_open:
            return ()
        runtime = self._engine.membership.runtime
        view, own = runtime.view(), runtime.member.host
        here = {member.slot for member in view.members if member.host == own}
        return [rank for rank in present_ranks(self._job_handle, view) if self._job_handle.slots[rank] in here]

    def _check(self, ranks: list[int], op: str = "sync") -> None:
        """Check for changes while `op` waits for ranks; raises what ends the wait."""
        self._interrupt()
        self._engine.membership.hooks.raise_trouble()
        self.show(op, self._exchange.seq + 1, ranks)


def _is_over(words: memoryview, cell: int) -> bool:
    """Return whether a rank has aborted or refused the call of a cell."""
    return bool(words[cell + GAVE_UP]) or words[cell + SIGNATURE] & 63 == REFUSED


def _is_of(op: Operation, own: OwnRow) -> bool:
    return isinstance(op.plan, RowsPlan) and op.plan.own.data == own.data


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
