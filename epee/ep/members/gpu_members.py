"""The membership of a buffer of GPUs: of a `Buffer`, and of a `LatencyBuffer`.

Calls between kernels cannot be stopped or aborted, and graphs have recorded addresses. So an epoch begins with `sync`
alone (`epoch_members.py`), memory on the GPU stays as long as the buffer lives, and calls continue above all numbers
that any rank has used. What a rank lends is named by a **blob**, which it writes into its outbox before it makes the
call of a `sync`; the others read it there.

    construction   The ranks make the engine and are in the first epoch. Then the path exchanges what its kernels need,
                   by calls of the engine. A replacement makes its memory first, and joins the engine with `sync`.
    sync           The call with which they agree on the members (`member_sync.py`) carries the number of the last
                   agreement, of the last epoch that the rank has entered, and the last number that its calls have used.
                   The epoch is numbered above all of the first. Each rank then prepares its own memory (`Memory`), and
                   all make a second call, in which each says whether it is **ready**. Who completes that maps what the
                   ready ranks lend, and enters. So no kernel reaches a rank that is not ready.

The second call ends alike on all ranks:

    it completes         A rank without a part in it, which has died, and one that is not ready (`Outrun`) are lost in
                         the epoch.
    it fails             A rank has closed the buffer, or is silent. A `LatencyBuffer` enters without such a rank. So
                         does a `Buffer` if the rank has closed; its calls raise until the next `sync`. Where it is
                         silent, `sync` raises that; the next call of each rank makes the second call again, the next
                         `sync` agrees anew. Others are ready if their lines say so.
    a rank has left it   An exception of a handler has come out of it, or has come before it: the next call of that rank
                         finds out how it has ended, and makes it again, as the others do meanwhile in their `sync`.

A rank whose preparation or mapping raises has not entered; its next call tries again (`turn`), and the others wait for
it in the second call meanwhile, if it has not made that.

    a rank has          until the next sync its calls find                after a sync
    died, been voted    it is lost at once; waits of kernels end if it    its rank is empty, or its replacement's
        out, or closed  has died
        the buffer
    not come to sync    all others have left its epoch; calls with a      it is a member when it comes to sync
                        mask mark them, others raise `EvictedError`
    taken a lost        nothing: it is not there yet; its constructor     it is a member
        rank            waits in `sync` with the others

Each rank writes its own outbox: its line (`member_sync.py`), its blob, and behind that why it has refused calls of the
GPU: the kernels carry only the refusal, and the reason is written before the kernel is launched. All of it is checked
by who reads it. A crash before the call of a `sync` leaves a rank that is not in it; later, a rank that is lost.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import torch.distributed as dist

from ...engine.entry import NEWS
from ...engine.outbox import LIFE, LIFE_READY, PeerRegions
from ...errors import (
    CommTimeoutError,
    EpeeError,
    EvictedError,
    MismatchError,
    NoQuorumError,
    PeerError,
    ProtocolError,
    expected,
    ignored,
)
from ...view.group import GroupInView
from ...view.process.detector import DeathWatch
from ...view.protocol.messages import DEAD, EXITED, FOREVER
from ..epoch_memory import Outrun
from ..losses import silent
from ..making import death_in_birth, ended_of
from .birth import announcement, come_into
from .epoch_members import EpochMembersOfEngine, MemberExchange
from .header import REASON_BYTES
from .member_sync import BLOB_WORDS, LINE_BYTES, NUM_REASONS, PREPARED, REASON_WORDS, ROUND_S, SyncRow
from .membership import Agreed
from .notices import BufferNotice

_DATA = struct.Struct("<QQQ")  # last agreement, last epoch entered, last number that calls have used
_READY, _NOT_READY = b"\1", b"\0"
_REASONS_AT = LINE_BYTES + 8 * BLOB_WORDS
_DEATHS = (DEAD, EXITED)
_NEVER = -1, None  # no state of an engine
Process = tuple[int, int]  # number, start time


class GpuEpoch(NamedTuple):
    """An epoch that a `sync` has agreed on.

    Attributes:
        agreed: its number and members.
        since: since when each of them takes part.
        processes: of the members.
        ready: the ranks whose memory is used in it; None: not known yet.
    """

    agreed: Agreed
    since: Mapping[int, int]
    processes: Mapping[int, Process]
    ready: frozenset[int] | None = None


class GpuMembers(EpochMembersOfEngine):
    """The membership of a buffer of GPUs.

    Args:
        watch: of the calls: knows which of the epoch's processes have ended.
        Others as of `EpochMembersOfEngine`.

    Attributes:
        processes: of the others; of a rank that is no member its last one.
    """

    _next: GpuEpoch | None

    def __init__(
        self,
        exchange: MemberExchange,
        mode: str,
        job_handle: GroupInView,
        timeout_s: float,
        interrupt: Callable[[], None],
        watch: DeathWatch,
    ) -> None:
        super().__init__(exchange, mode, job_handle, timeout_s, interrupt)
        self._watch = watch
        self._needs_all = not exchange.config.is_latency
        self.processes: dict[int, Process] = {}
        self._makers: frozenset[int] = frozenset()
        self._joins_to: tuple[dist.ProcessGroup, BufferNotice] | None = None  # a running buffer
        self._used = 0  # as of `sync`
        self._num_agreed = 0  # number of the last agreement, entered or not
        self._prepared = 0  # the last epoch that `memory` is prepared for
        self._fresh: set[int] = set()  # ranks whose process is not that of the previous epoch
        self._ready: frozenset[int] = frozenset()  # ranks whose memory is used in the epoch
        self._is_agreed_now = False  # the `sync` that has agreed on `_next` has not ended
        self._is_given_up = False  # a `sync` has raised that not all come into `_next`
        self._whole: object = None  # the view in which all ranks were last found to be in the epoch
        self._calm: tuple[int, PeerRegions | None] = _NEVER  # state of the engine when calls last found nothing to do
        self._words: list[memoryview] = []  # of the others' outboxes then

    @property
    def lent_bytes(self) -> int:  # type: ignore[override]
        """Bytes of this rank's outbox; pages never touched cost nothing."""
        regions = self._engine.peer_regions.regions if self._exchange.has_engine else ()
        return regions[self._rank].mapped_bytes if regions else 0

    def close(self) -> None:
        """As `MembersOfEngine.close`."""
        self._words, self._calm, self._whole = [], _NEVER, None
        super().close()

    # ---- the first epoch

    def begin_first(self, deadline: float) -> None:
        """As `MembersOfEngine.begin_first`; this rank is in the first epoch. Local."""
        peer_regions = self._engine.members
        since = self._engine.membership.admission.since()
        self._makers = frozenset(peer_regions.members)
        self._sync.begin(self._makers)
        agreed = Agreed(1, tuple(sorted(self._makers)))
        processes = _processes(peer_regions)
        self._watch_those(processes)
        self._fresh.clear()
        self._num_agreed = self._prepared = self._returned = agreed.epoch
        self._begin(GpuEpoch(agreed, {rank: since.get(rank, 0) for rank in self._makers}, processes, self._makers))
        self._exchange.announce()

    def death_in_birth(self) -> PeerError | None:
        """Return the error to raise if a rank has died since the ranks began to make the buffer."""
        dead = ended_of({rank: self.processes[rank] for rank in self._makers - {self._rank}}, self._reported_dead)
        return death_in_birth(dead) if dead else None

    def _reported_dead(self) -> Collection[int]:
        """Return the makers that are dead as the view says."""
        with ignored(EpeeError):
            losses = self._engine.membership.admission.losses(0)
            return [rank for rank, _, cause in losses if cause in _DEATHS and rank in self._makers]
        return ()

    def join_running(self, group: dist.ProcessGroup, running: BufferNotice) -> None:
        """Have `join` join a running buffer: the path makes its memory first, while the members work."""
        self._joins_to, self.number = (group, running), running.number

    def join(self, deadline: float) -> None:
        """Join the running buffer, and enter in the members' `sync`; raises as `come_into` and `sync`."""
        assert self._joins_to is not None
        group, running = self._joins_to
        deadline = max(deadline, time.monotonic() + self._timeout_s)  # it may have built its kernels meanwhile
        wait_s = deadline - time.monotonic()
        engine = come_into(self._job_handle, self._rank, self._config, running, wait_s)
        engine.timeout_s = self._timeout_s
        self.begin_with(engine)
        self._exchange.tell = announcement(group, engine, self._config, running)
        super().join(deadline)

    def leave(self) -> None:
        """Report that this rank lends nothing more: its buffer could not be made. `close` follows."""
        self._exchange.release()

    # ---- in a call

    def state(self) -> tuple[int, PeerRegions]:
        """Return what changes with the view; read it before the checks that `note_calm` is for."""
        engine = self._engine
        if engine.flags & NEWS and not self._is_out:
            with ignored(PeerError):  # raised by the checks
                engine.look(_nothing)
        return engine.flags, engine.members

    def note_calm(self, state: tuple[int, PeerRegions]) -> None:
        """Record that these checks found nothing at `state`."""
        if state[0] & NEWS:
            return  # further ones would not be seen
        words, self._calm = self._engine.peer_regions.words, state
        self._words = [words[rank] for rank in self.entered if rank != self._rank]

    def is_calm(self) -> bool:
        """Return whether nothing has changed that `must_turn`, `require_place` and `require_members` check since all
        of them passed (`note_calm`).
        """
        engine, (flags, members) = self._exchange.engine, self._calm
        if engine.flags != flags or engine.members is not members:
            return False
        for words in self._words:  # noqa: SIM110 - a generator would cost more than the check
            if words[LIFE] != LIFE_READY:
                return False
        return True

    def require_members(self, op: str, seq: int) -> None:
        """Raise that a rank of the epoch is lost, for which a call of this rank would wait in vain.

        This includes a rank that has not entered the epoch: kernels follow what was agreed.
        """
        self._require(self.entered, op, seq)

    def require_all(self, op: str, seq: int) -> None:
        """Raise if a rank of the buffer is not in the epoch, or has left it."""
        self._require(range(self._config.num_ranks), op, seq)

    def _require(self, ranks: Iterable[int], op: str, seq: int) -> None:
        if self._is_whole():
            return
        others = [rank for rank in ranks if rank != self._rank]
        if others and self._num_agreed > self._exchange.epoch:
            raise self.loss(others[0], op, seq)  # the others are in a later epoch
        since = self._engine.membership.admission.since()
        for rank in others:
            if self._has_left(rank, since):
                raise self.loss(rank, op, seq)

    def _is_whole(self) -> bool:
        """Return whether all ranks of the buffer are in the epoch."""
        view = self._engine.membership.runtime.view()
        others = [rank for rank in range(self._config.num_ranks) if rank != self._rank]
        if self._num_agreed > self._exchange.epoch or not self._engine.peer_regions.regions:
            return False
        if view is not self._whole:
            since = self._engine.membership.admission.since()
            if any(self._has_left(rank, since) for rank in others):
                return False
            self._whole = view
            return True
        return not any(self._sync.has_left(rank) for rank in others)

    def _has_lent(self, rank: int) -> bool:
        return rank in self._ready

    def lost(self, parties: Collection[int]) -> Collection[int]:
        """As `EpochMembersOfEngine.lost`: also members that were not ready; all, if they are in a later epoch."""
        if self._num_agreed > self._exchange.epoch:
            return self.entered.keys() - {self._rank}
        return self.entered.keys() - (self._ready & frozenset(parties))

    def lends(self, rank: int) -> bool:
        """Return whether a rank lends its memory for the epoch being entered."""
        return not self._sync.has_left(rank)

    # ---- epochs

    def sync(self, counted: int, used: int, deadline: float) -> Agreed:
        """As `MembersOfEngine.sync`.

        Raises:
            CommTimeoutError: `Buffer`: a member does not come into the epoch. The next call tries again, the next
                `sync` agrees anew.
        """
        self._used, self._calm = used, _NEVER
        if self._is_given_up:
            self._drop()
        is_old = self._next is not None or self._sync.open_row is not None
        try:
            try:
                return super().sync(counted, used, deadline)
            except expected(CommTimeoutError):
                if not self._is_given_up or not is_old or time.monotonic() > deadline:
                    raise
            self._drop()  # that of an earlier sync, which the others have given up
            return super().sync(counted, used, deadline)
        finally:
            self._is_agreed_now = False

    def _drop(self) -> None:
        """Give up an epoch that was not entered."""
        self._next, self._is_given_up = None, False

    @property
    def must_turn(self) -> bool:  # type: ignore[override]
        """As `MembersOfEngine.must_turn`, asked in every call."""
        is_missed = self._next is not None or self._sync.open_row is not None
        return is_missed or self._returned < self._exchange.num_agreed

    def turn(self, op: str, deadline: float) -> None:
        """As `MembersOfEngine.turn`."""
        if self.must_turn:
            self._calm = _NEVER
            super().turn(op, deadline)

    def _settle(self, deadline: float) -> None:
        following = self._next
        if following is None:
            super()._settle(deadline)
        elif self._sync.open_row is not None:  # the second call
            found = self._sync.settle(deadline)
            if found is not None:
                self._next = following._replace(ready=_ready_of(found))

    def _data(self) -> bytes:
        self._write_blob()
        return _DATA.pack(self._num_agreed, self._exchange.epoch, self._used)

    def _note(self, found: Mapping[int, bytes]) -> None:
        rows = {rank: _DATA.unpack(data) for rank, data in found.items()}
        for rank, numbers in sorted(rows.items()):
            if max(numbers) >= FOREVER:
                where = self._exchange.where("sync")
                raise ProtocolError(
                    f"{where}: rank {rank} says that its last agreement, epoch and call are numbers {numbers}; less "
                    f"than {FOREVER} can be"
                )
        number = 1 + max(agreed for agreed, _, _ in rows.values())
        is_fresh = len({entered for _, entered, _ in rows.values()}) > 1
        agreed = Agreed(number, tuple(sorted(rows)), max(used for _, _, used in rows.values()), is_fresh)
        since = self._engine.membership.admission.since()
        processes = _processes(self._sync.met)
        self._num_agreed, self._is_agreed_now = number, True
        self._next = GpuEpoch(agreed, {rank: since.get(rank, 0) for rank in rows}, processes)

    def _enter(self, deadline: float) -> Agreed:
        """Prepare this rank's memory, and map what the ready ranks lend. May be repeated.

        Raises:
            CommTimeoutError: `Buffer`: a member does not come into the epoch.
            Outrun: this rank cannot enter it; its next sync agrees anew.
            EpeeError: as of `Memory`; the next call tries again.
        """
        following = self._next
        assert following is not None
        agreed = following.agreed
        self._watch_those(following.processes)
        self._prepare(agreed)
        if following.ready is None:
            ready = self._second_call(agreed, max(deadline, time.monotonic() + self._timeout_s))
            following = self._next = following._replace(ready=ready)
        assert following.ready is not None
        self.memory.move({rank: self._blob_of(rank) for rank in sorted(following.ready - {self._rank})})
        self._begin(following)
        return agreed

    def _begin(self, following: GpuEpoch) -> None:
        """Make an epoch that of the calls."""
        assert following.ready is not None
        exchange, ready = self._exchange, following.ready
        self._whole, self._calm = None, _NEVER
        self.entered, self._ready = dict(following.since), ready
        exchange.reduced_members = None if len(ready) == self._config.num_ranks else tuple(sorted(ready))
        self._last = following.agreed
        exchange.epoch = exchange.num_agreed = following.agreed.epoch
        exchange.forget_results()
        state = self.state()
        self._fresh.clear()
        self._drop()  # last: up to here all may be repeated
        if self._is_whole() and not self._is_excluded() and self._job_error() is None:
            self.note_calm(state)

    def _watch_those(self, processes: Mapping[int, Process]) -> None:
        """Watch the members' processes."""
        for rank, process in processes.items():
            if rank != self._rank and self.processes.get(rank) != process:
                self._fresh.add(rank)
                self.memory.follow(rank, process)  # while the watch still reports on the previous process
                self._watch.watch(rank, *process)
                self.processes[rank] = process

    def _prepare(self, agreed: Agreed) -> None:
        if self._prepared == agreed.epoch:
            return
        try:
            self.memory.prepare(agreed, self._fresh)
        except expected(Outrun):
            with ignored(EpeeError):
                self._sync.gather(SyncRow(0, 0), _NOT_READY, time.monotonic() + self._timeout_s)
            self._drop()
            raise
        self._sync.words_of(self._rank)[PREPARED] = self._prepared = agreed.epoch

    def _second_call(self, agreed: Agreed, deadline: float) -> frozenset[int]:
        """Report that this rank is ready, and return the ranks that are.

        If a rank aborts the call long before the deadline, the others make it again, while they are in their `sync`.
        """
        while True:
            try:
                _, found = self._sync.gather(SyncRow(0, 0), _READY, deadline)
                return _ready_of(found)
            except expected(EvictedError):
                self._drop()
                raise
            except expected(NoQuorumError):
                raise
            except expected(CommTimeoutError, PeerError, MismatchError) as error:
                is_silence = isinstance(error, CommTimeoutError)
                if is_silence and self._is_agreed_now and time.monotonic() < deadline - ROUND_S:
                    continue
                ranks: Collection[int] = getattr(error, "ranks", ())
                others = set(agreed.ranks) - {self._rank}
                missing = {rank for rank in others if rank in ranks or self._sync.has_left(rank)} or others
                if self._needs_all and is_silence:
                    self._is_given_up = True
                    rank = min(missing)
                    raise silent(f"{error}; rank {rank} does not come into epoch {agreed.epoch}", rank) from error
                # it was made by some alone: what a rank has prepared for, its line says
                return frozenset(
                    rank for rank in agreed.ranks if self._sync.words_of(rank)[PREPARED] == agreed.epoch
                ).difference(missing)

    # ---- what a rank shows in its outbox

    def _write_blob(self) -> None:
        """Write the blob of this rank's memory; the calls of the engine order it before what others read."""
        words, blob = self._shown(self._rank, LINE_BYTES, BLOB_WORDS), self.memory.blob
        words[1:] = memoryview(blob.ljust(8 * (BLOB_WORDS - 1), b"\0")).cast("Q")
        words[0] = len(blob)

    def _blob_of(self, rank: int) -> bytes:
        words = self._shown(rank, LINE_BYTES, BLOB_WORDS)
        return bytes(words[1:])[: words[0]]

    def post_reason(self, call: int, reason: bytes) -> None:
        """Publish why this rank refuses GPU call number `call` (above 0); at most `REASON_BYTES` bytes."""
        words = self._reason(self._rank, call)
        words[0] = 0
        words[1:] = memoryview(reason.ljust(REASON_BYTES, b"\0")).cast("Q")
        words[0] = call

    def reason_of(self, src: int, call: int) -> str:
        """Return why a rank refused GPU call number `call`; "" if it has published no reason, or has overwritten it."""
        if not self._engine.peer_regions.regions:
            return ""
        words = self._reason(src, call)
        if words[0] != call:
            return ""
        text = bytes(words[1:])
        return text.rstrip(b"\0").decode("utf-8", "replace") if words[0] == call else ""

    def _reason(self, rank: int, call: int) -> memoryview:
        return self._shown(rank, _REASONS_AT + 8 * REASON_WORDS * (call % NUM_REASONS), REASON_WORDS)

    def _shown(self, rank: int, at: int, num_words: int) -> memoryview:
        """Return words of a rank's outbox that belong to the buffer."""
        peer_regions = self._engine.peer_regions
        return peer_regions.regions[rank].words(peer_regions.extra + at, num_words)


def _ready_of(found: Mapping[int, bytes]) -> frozenset[int]:
    return frozenset(rank for rank, data in found.items() if data == _READY)


def _processes(peer_regions: PeerRegions) -> dict[int, Process]:
    """Return the processes of the members of a call."""
    regions = zip(peer_regions.members, peer_regions.regions, strict=True)
    return {rank: (region.owner_pid, region.owner_start_time) for rank, region in regions}


def _nothing() -> None:
    """Do nothing but apply the decisions."""
