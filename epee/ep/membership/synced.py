"""The membership of a latency buffer, or of a buffer of GPUs: epochs that begin with `sync` alone.

A latency call ends by itself on each rank: a rank that does not send is recorded in the call's mask. Calls between
kernels cannot be stopped or aborted: a call of a `Buffer` during which a rank dies is lost. So no call has to stop for
a new view. An **epoch** begins when the buffer is made, and with each `sync` (`agreement.py`), which ends with a
decision of the job. Each epoch has an inbox of its own (`control/inbox.py`), made by its members for its members,
followed by the memory that the path lends; handles of earlier epochs are stale. The rest depends on the path
(`Memory`):

    latency, CPU        the region of `latency/region.py`, new in each epoch; calls are numbered from 1, tags name the
                        epoch. So nothing that an excluded rank stores reaches memory that any rank reads.
    latency, GPU        memory on the GPU stays, because recorded graphs contain its addresses: the inbox is followed by
                        the blob by which that memory is mapped. Calls continue above all numbers that any rank has
                        used, the words that other ranks have stored are cleared, and a joiner's memory replaces that of
                        the rank before it; kernels access the other ranks only after this rank has entered.
    throughput, GPU     as above, but kernels hold the addresses themselves: a joiner's memory is mapped at the address
                        of the previous process's memory. No rank can be replaced where memory is lent by cudaIpc.

**Entering.** The number of the first epoch is agreed when the buffer is made; that of a later one is the number of the
decision. A rank that has received the decision prepares its own memory (`prepare`), lends it and maps what the others
lend (`inboxes.py`): so no call reaches a rank that is not ready. A rank that has died since, or publishes nothing until
the timeout (an error ended its `sync`, or it has no memory), is not in this rank's memory: in a `LatencyBuffer` it is
lost in all calls until the next `sync`; in a `Buffer`, which needs all ranks, that wait is an error, and starts again
with the next call; the same holds where a joiner's memory cannot be mapped. Others may have mapped the lost rank's
memory, so no exchange of rows completes without it. So nothing that follows a decision can make the ranks disagree
about it. A rank whose `sync` was ended by an error and that is in the decision all the same enters with its next call.

    a rank has          until the next sync its calls find                after a sync
    died, been voted    it is lost at once (`gone`); waits of kernels     its rank is empty, or its replacement's
        out, or closed  end if it has died
        the buffer
    not come to sync    all others have left its epoch; calls with a      it is a member when it comes to sync
                        mask mark them, others raise                      (`EvictedError` in its calls without a
                                                                          mask until then)
    taken a lost        nothing: it is not there yet; its constructor     it is a member
        rank            waits in `sync` with the others

Called on the thread of a call; `close` also on any thread that drops the buffer, at any moment: so it waits for no
rank, and what it cannot do there is done by `retire`, between two calls of any buffer.

Each rank writes its own line and memory, and its sections of the others'. A crash between two steps: before the
decision, the rank is not in it; after it, the rank is lost as above.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from ...errors import (
    CommTimeoutError,
    EvictedError,
    InvalidState,
    NoQuorumError,
    PeerError,
    RankFailedError,
    context,
    expected,
)
from ...memory.shared import SharedRegion
from ...view.awaited import kind_of_loss
from ...view.process.detector import DeathWatch
from ...view.protocol.messages import Member
from ..control.ending import Turned
from ..control.inbox import Exchange
from ..control.membership import Agreed, Membership
from ..job import process_of
from ..losses import silent
from ..making import death_in_birth
from .agreement import Sync
from .birth import Begun
from .inboxes import Absent, Inboxes, Met, Wait
from .memory import Memory, Outrun
from .registry import CLOSED, DROPPED, INBOX_VIEW, NUMBER, SYNC, Line

logger = logging.getLogger("epee")


class SyncedLane(Membership):
    """The group of a latency buffer or a buffer of GPUs.

    Args:
        begun: the buffer's part in its group.
        exchange: of the buffer.
        timeout_s: of the buffer's calls.
        interrupt: called while waiting; raises to end the wait.
        watch: of the calls: knows which of the epoch's processes have ended.
        nbytes: of the memory that a rank lends for an epoch.

    Attributes:
        regions: the memory of the epoch by rank, this one's included; without an entry for a rank that is not in it.
        memory: of the path, once the path is made.
        processes: pid and start time of the others' processes; for an excluded rank, of its last one.
    """

    memory: Memory

    def __init__(
        self,
        begun: Begun,
        exchange: Exchange,
        timeout_s: float,
        interrupt: Callable[[], None],
        watch: DeathWatch,
        nbytes: int,
    ) -> None:
        config, rank = exchange.config, exchange.rank
        self.roster = begun.roster
        self.raises = begun.roster.job_handle.raises
        self._config = config
        self._rank = rank
        self._begun = begun
        self.number = begun.number
        self._line = begun.line
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._interrupt = interrupt
        self._entered: dict[int, int] = {}  # ranks of this rank's epoch, and since when they take part
        look = self._look_between_calls
        self._inboxes = Inboxes(config, rank, begun.number, begun.roster, begun.line, look, nbytes)
        self._inboxes.fill = lambda region: self.memory.fill(region)
        self._op = ""  # of the call under way, for hang reports
        self.has_shown = False
        # agreements up to this epoch have been returned, or did not concern this rank
        self._agreed = begun.roster.view.epoch
        self._is_closed = False
        self._pid = os.getpid()
        self.regions: Mapping[int, SharedRegion] = {}
        self.memory = Memory()
        self.processes: dict[int, tuple[int, int]] = {}
        self._lines: Mapping[int, Line] = {}  # of the ranks in the memory of the epoch
        self._whole: object = None  # the view in which all ranks were last found to be in the epoch
        self._watch = watch
        self._fresh: set[int] = set()  # ranks whose process is not that of the previous epoch
        self._prepared = 0  # the last epoch that `memory` is prepared for
        self._entering = 0  # the epoch that this rank enters, or has entered last
        self._first = begun.first
        self._needs_all = exchange.config.is_cuda and not exchange.config.is_latency
        self._waits_for_all = False
        self._calm: object = None  # the membership's state when calls last found no change

    @property
    def takes_replacements(self) -> bool:  # type: ignore[override]
        """Whether a process that replaces a lost rank is admitted."""
        return self.roster.job_handle.is_open and self._config.takes_replacements

    @property
    def identity(self) -> tuple[int, int]:
        """Number of the buffer among those of its group, and its group id in the view; the same on all its ranks."""
        return self.number, self.roster.lane

    @property
    def first(self) -> int:
        """If all ranks have made it together: an epoch that they all know of, the same on all; else 0."""
        return self._begun.first

    def is_told(self, take_back: Callable[[], None]) -> None:
        """Record that a notice of the buffer is published to the group; `close` calls `take_back`."""
        self._begun.take_back = take_back

    @property
    def inbox_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the memory that this rank lends."""
        return 0 if self._inboxes.own is None else self._inboxes.own.mapped_bytes

    def close(self) -> None:
        """Release all memory and leave the registry; idempotent. `retire` follows."""
        if self._is_closed or os.getpid() != self._pid:
            return  # in a forked child all of it is the parent's
        self._is_closed = True
        begun = self._begun
        begun.line.mark_closed(self._exchange.is_dropped)  # first: a joiner must not take the buffer for open
        begun.retire_later()
        self._inboxes.close()
        del self._begun, self._line  # a closed buffer that is still referenced maps nothing
        if not self._exchange.epoch:
            begun.registry.forget(begun.number)  # a replacement that was not admitted may try again
        self.regions, self._lines, self._whole = {}, {}, None
        self.memory = Memory()

    # ---- during waits

    def _check(self) -> None:
        """Raise why this rank's calls cannot succeed."""
        self.roster.check()
        self.roster.require_part(self._rank)

    def show(self, op: str, seq: int, ranks: list[int]) -> None:
        """Show in hang reports for which ranks a call waits."""
        self.roster.show(op, seq, ranks)
        self.has_shown = True

    def call_it(self, text: str) -> None:
        """Show the buffer's name in hang reports."""
        self.roster.call_it(text)

    def hide(self) -> None:
        """Publish that no call waits; costs nothing if none has."""
        if self.has_shown:
            self.has_shown = False
            self.roster.hide()

    # ---- the first epoch

    def offer(self) -> None:
        """Lend this rank's memory for the first epoch. Local."""
        self._inboxes.offer(self._first)

    def come_in(self, deadline: float) -> None:
        """Enter the first epoch while the buffer is made: all living ranks must enter.

        Raises:
            RankFailedError, PeerError: a rank has died or left too early for a buffer of GPUs: other ranks may have
                mapped its memory, so the loss must be reported on all.
            ResourceError: no memory or descriptor is left here.
            CommTimeoutError: a member does not enter.
            EvictedError, NoQuorumError: this process cannot continue.
        """
        self._op, self._waits_for_all = "Buffer", True
        try:
            self.roster.check()
            self._enter(Agreed(self._first, tuple(range(self._config.num_ranks))), deadline)
            missing = sorted(self._begun.makers - self.regions.keys())
            if missing and self._config.is_cuda:
                raise self.death_in_birth() or self._loss(missing[0], "Buffer", 0)
        finally:
            self._waits_for_all = False
            self.hide()

    def join(self, deadline: float) -> None:
        """Wait, as a replacement, until the others' `sync` admits this rank, and enter.

        Raises:
            CommTimeoutError: they do not admit it.
            Otherwise as `sync`.
        """
        started = time.monotonic()
        try:
            agreed = self.sync((1 << self._config.num_ranks) - 1, 0, deadline)
        except expected(NoQuorumError) as error:
            where = context("Buffer", rank=self._rank, elapsed=time.monotonic() - started)
            raise CommTimeoutError(
                f"{where}: the members of the running buffer have not admitted this process; all of them must call "
                "buffer.sync() while this one makes its buffer",
                error.ranks,
                has_job=True,
            ) from error
        self.note_agreed(agreed)

    def leave(self) -> None:
        """Announce that this rank no longer lends anything: its buffer could not be made. `close` follows."""
        self._line.mark_closed()

    def death_in_birth(self) -> PeerError | None:
        """Return the error to raise if a rank has died since the construction of the buffer began."""
        dead = self._begun.deaths()
        return death_in_birth(dead) if dead else None

    @property
    def is_in(self) -> bool:
        """Whether this rank has entered an epoch; a replacement has not before its first `sync`."""
        return self._exchange.epoch > 0

    # ---- in a call

    def is_calm(self) -> bool:
        """Return whether nothing has changed that `has_turned`, `require_place` and `require_members` check since all
        of them passed (`note_calm`).
        """
        is_same = self.roster.state is self._calm and self.roster.job_handle.runtime.error is None
        return is_same and self._is_whole()

    def state(self) -> object:
        """Return an object that is replaced when the view changes; read it before the checks that `note_calm` is
        for.
        """
        return self.roster.state

    def note_calm(self, state: object) -> None:
        """Record that these checks found nothing at `state`."""
        self._calm = state

    @property
    def has_turned(self) -> bool:  # type: ignore[override]
        """Whether a `sync` has begun an epoch with this rank that it has not entered, because of an error."""
        agreed = self.roster.view.agreed
        return agreed.epoch > self._exchange.epoch and self._rank in agreed.ranks

    must_turn = has_turned

    @property
    def is_in_place(self) -> bool:
        """Whether this rank's next call is the one after its last, in the same epoch, as far as is known."""
        return not self.must_turn

    def turn(self, op: str, deadline: float) -> None:
        """Enter the newest epoch.

        Raises:
            As `come_in`, but for timeouts.
        """
        if not self.has_turned:
            return
        self._op = op
        agreed = self.roster.view.agreed
        self.enter(agreed, deadline)
        self.note_agreed(agreed)

    def require_place(self, is_masked: bool) -> None:
        """Raise `EvictedError` if the job has continued without this process, or, without a mask, the buffer has."""
        error = self.roster.job_handle.runtime.error
        if isinstance(error, EvictedError):
            raise EvictedError(str(error), error.ranks, error.op, error.seq, error.epoch, error.cause)
        if not is_masked:
            self.roster.require_part(self._rank)

    def dead(self) -> Collection[int]:
        """Return the ranks whose processes have ended."""
        return self._watch.dead()

    def gone(self) -> Collection[int]:
        """Return the ranks that this epoch of the buffer has lost, or never had: nothing more of theirs will arrive."""
        dead, ranks = self._watch.dead(), range(self._config.num_ranks)
        if self.roster.view.agreed.epoch > self._exchange.epoch:  # the others are in the newer epoch
            return [rank for rank in ranks if rank != self._rank]
        return [rank for rank in ranks if rank in dead or self._has_left(rank)]

    def _has_left(self, rank: int) -> bool:
        """Return whether a rank is not in the epoch, has left the view, or has closed the buffer.

        Its process may have made the buffer again: then it lends nothing for this epoch.
        """
        line = self._lines.get(rank)
        if line is None or line.number != self.number or line.words[INBOX_VIEW] < self._exchange.epoch:
            return True
        return self.roster.is_gone(rank, self._entered[rank])

    def why_gone(self, rank: int) -> tuple[type[PeerError], str]:
        """Return why a rank is lost: the type of the error to raise, and the reason as text."""
        if rank in self._entered and self.roster.is_gone(rank, self._entered[rank]):
            return kind_of_loss([self.roster.cause(rank, self._entered[rank])])
        if rank in self._lines and self._lines[rank].words[NUMBER] == self.number | CLOSED | DROPPED:
            return RankFailedError, "its process has ended, or it has dropped the buffer without closing it"
        if rank in self._lines and self._lines[rank].number != self.number:
            return PeerError, "it has closed the buffer"
        return PeerError, "it is not in this epoch of the buffer; whoever lives comes back by buffer.sync()"

    def require_members(self, op: str, seq: int) -> None:
        """Raise that a rank of the epoch is lost, for which a call of this rank would wait in vain.

        This includes a rank that has not entered the epoch: kernels follow what was agreed.
        """
        if not self._is_whole():
            self._require(self._entered, op, seq)

    def require_all(self, op: str, seq: int) -> None:
        """Raise if a rank of the buffer is not in the epoch, or has left it."""
        if not self._is_whole():
            self._require(range(self._config.num_ranks), op, seq)

    def _is_whole(self) -> bool:
        """Return whether all ranks of the buffer are in the epoch. Called in every call; reads two words a rank while
        true.
        """
        view = self.roster.state[1]
        if view is not self._whole:
            if any(self._has_left(rank) for rank in range(self._config.num_ranks) if rank != self._rank):
                return False
            self._whole = view
            return True
        number, epoch = self.number, self._exchange.epoch
        for line in self._lines.values():  # a generator would cost more than the check
            words = line.words
            if words[NUMBER] != number or words[INBOX_VIEW] < epoch:
                return False
        return True

    def _require(self, ranks: Iterable[int], op: str, seq: int) -> None:
        for rank in ranks:
            if rank != self._rank and self._has_left(rank):
                raise self._loss(rank, op, seq)

    def check(self, src: int) -> None:
        """Check for changes while a CPU-side call waits for `src`.

        Raises:
            Turned: the others are in a newer epoch, and this rank may follow.
            RankFailedError, PeerError: `src` has left this epoch.
            EvictedError, NoQuorumError: this process cannot continue.
        """
        self._check()
        if self.has_turned:
            raise Turned
        if src not in self._watch.dead() and self._has_left(src):
            raise self._loss(src, self._exchange.op, self._exchange.seq)

    def _loss(self, rank: int, op: str, seq: int) -> PeerError:
        epoch = self._exchange.epoch
        kind, why = self.why_gone(rank)
        where = context(op, rank=self._rank, peer=rank, seq=seq, epoch=epoch)
        told = f"{where}: rank {rank}: {why}; call buffer.sync(), then calls run without it"
        return kind(told, [rank], op, seq, epoch, why)

    def patience(self, deadline: float) -> float:
        """Return until when to wait for ranks that have just agreed: missing ranks may have used up the timeout."""
        return max(deadline, time.monotonic() + self._timeout_s)

    # ---- between two calls

    def enter(self, agreed: Agreed, deadline: float) -> None:
        """Enter an epoch that includes this rank, with every other rank that publishes its memory for it.

        Raises:
            ResourceError: no memory or descriptor is left here, or another rank's memory cannot be mapped; the next
                call tries again.
            EvictedError, NoQuorumError: this process cannot continue.
        """
        try:
            self._enter(agreed, self.patience(deadline))
        finally:
            self.hide()

    def _enter(self, agreed: Agreed, deadline: float) -> None:
        members = {
            rank: member
            for rank, member in self.roster.view.members.items()
            if rank in agreed.ranks and member.incarnation <= agreed.epoch
        }
        if self._rank not in members:
            self._check()
            raise InvalidState(f"Buffer: this rank is not in epoch {agreed.epoch}; make the buffer again")
        self._entering = agreed.epoch
        is_void = lambda: self.roster.view.agreed.epoch > agreed.epoch  # noqa: E731 - they entered a newer epoch
        self._watch_those(members)
        if self._prepared != agreed.epoch:
            try:
                self.memory.prepare(agreed, self._fresh)
            except Outrun:  # this rank cannot enter; its next sync agrees anew
                self.note_agreed(agreed)
                raise
            self._prepared = agreed.epoch
        met = self._inboxes.meet_those(members, Wait(agreed.epoch, is_void, time.monotonic(), deadline))
        try:
            self.memory.move(met.regions)
        except BaseException:
            self._inboxes.give_back(met)  # what is mapped on the GPU stays: the next attempt finds it
            raise
        self._begin(agreed, members, met)
        self._inboxes.use(met)
        self._fresh.clear()

    def _may_lend(self, rank: int, member: Member) -> bool:
        """Return whether a member lends its memory for the epoch being entered, or may yet do so.

        Every agreed member has published a line: one without a line has closed the buffer. A rank that has arrived at a
        later sync will not enter this epoch any more: its constructor has failed, and it makes the buffer again.
        """
        line = self._inboxes.line_of(rank, member)
        if line is None:
            return False
        return line.words[INBOX_VIEW] == self._entering or line.words[SYNC] >> 1 < self._entering

    def lends(self, rank: int) -> bool:
        """Return whether a rank lends its memory for the epoch being entered."""
        member = self.roster.view.members.get(rank)
        line = None if member is None else self._inboxes.line_of(rank, member)
        return line is not None and line.words[INBOX_VIEW] == self._entering

    def _watch_those(self, members: Mapping[int, Member]) -> None:
        """Watch the members' processes; for a rank that is no member, its last process."""
        for rank, member in members.items():
            process = process_of(member)
            if rank != self._rank and self.processes.get(rank) != process:
                self._fresh.add(rank)
                self.memory.follow(rank, process)  # while the watch still reports on the previous process
                self._watch.watch(rank, *process)
                self.processes[rank] = process

    # ---- sync

    def agree(self, counted: int, deadline: float, used: int = 0) -> Agreed:
        """Agree with the others on the members (`Sync`); call `note_agreed` once the caller has the result."""

        def look(silent: list[int]) -> None:
            """Check for changes while `silent` are awaited: raises what ends the wait, publishes the awaited ranks."""
            self._interrupt()
            self.roster.check()
            self.show("sync", self._exchange.seq + 1, silent)

        def is_elsewhere(rank: int) -> bool:
            """Return whether a member waits in its next call, so that it does not come to this one."""
            in_epoch = self.is_in_place and rank in self._exchange.members
            return in_epoch and self._exchange.waits_in_next(rank)

        sync = Sync(self._rank, self.roster, self._line, self._inboxes, self._entered, is_elsewhere, look)
        try:
            return sync.agree(counted, used, max(self._agreed, self._exchange.epoch), deadline)
        finally:
            self.hide()

    def note_agreed(self, agreed: Agreed) -> None:
        """Record that the caller of `agree` has its result, and that the next sync is another one."""
        self._agreed = agreed.epoch

    def sync(self, counted: int, used: int, deadline: float) -> Agreed:
        """Agree with the others on the members, and enter; raises as `agree` and `enter`. `note_agreed` follows."""
        agreed = self.agree(counted, deadline, used)
        if self.has_turned:
            try:
                self.enter(agreed, deadline)
            except expected(
                CommTimeoutError
            ):  # a `Buffer`: the next sync agrees anew, without the ranks that do not enter
                self.note_agreed(agreed)
                raise
        return agreed

    def _begin(self, agreed: Agreed, members: Mapping[int, Member], met: Met) -> None:
        """Make the mapped inboxes those of the calls; the epoch is stored last, and all before it can be repeated."""
        self._entered = {rank: member.incarnation for rank, member in members.items()}
        self.regions = met.regions
        self._whole = None
        self._lines = {rank: peer.line for rank, peer in met.peers.items() if rank in met.regions}
        exchange = self._exchange
        exchange.end.close()
        exchange.end.lost = ""
        # a buffer is not made without one of its makers; the others have been lost before
        lost = () if self._waits_for_all else [rank for rank in agreed.ranks if rank not in met.regions]
        exchange.begin(agreed.epoch, met.regions, lost)

    def _look_between_calls(self, rank: int, what: str, started: float, deadline: float) -> None:
        self._interrupt()
        self.roster.check()
        self.show(self._op or "sync", self._exchange.seq + 1, [rank])
        member = self.roster.view.members.get(rank)
        if rank in self._watch.dead() or member is None or not self._may_lend(rank, member):
            raise Absent
        if time.monotonic() <= deadline:
            return
        if self._waits_for_all or self._needs_all:
            raise silent(what, rank)
        raise Absent
