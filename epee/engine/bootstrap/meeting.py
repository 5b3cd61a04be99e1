"""An engine, for collective calls only, of processes that share a job and exchange the blobs of their outboxes.

Without a store, which may have ended with a rank of the group that is lost by now. The caller carries the blob of each
rank's outbox, and an epoch, to the others (`ep/members/birth.py`: through the group of a buffer).

    1. Each member takes part in the control plane under the group's id; so it receives every later decision. It makes
       its outbox (`EngineMeeting`), and gives the others its blob and the newest epoch that it knows.
    2. They begin with the members of the newest of these epochs (`meet`). Each maps the others' outboxes (`attach`),
       makes the engine (`begin`), and publishes that it can read them all.
    3. It makes no call before it knows from the caller, by another exchange, that all members have come so far: else a
       rank that dies early would have a part in a call for the ranks that had mapped its outbox, and none for the
       others.

A rank of the group that is no member of the epoch has a blank outbox, which no process writes. It takes no part,
whichever process has its slot, until the members admit one that asks for it (`joining.come_in`): then the group is as
one that has lost that rank later.

Each rank writes its own outbox. A crash before step 3 is over leaves a rank that is lost in a later epoch; the others
have made no call yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence

from ...errors import ProtocolError
from ...memory.shared import SharedRegion
from ...view.job import Job, JobHandle
from ...view.process.detector import DeathWatch
from ...view.protocol.messages import Decision, Member
from ...view.transport.wire import parse_endpoint
from ..engine import Engine
from ..limits import MAX_RANKS, MIN_STAGING_BYTES
from ..membership.group_membership import GroupMembership
from ..membership.members import make_blank
from ..outbox import LIFE, LIFE_READY, OutboxOwner, PeerRegions, open_outbox, outbox_layout
from .creation import keep


class EngineMeeting:
    """One rank's part in an engine before it has the engine.

    Args:
        job: of all members; held until the engine, or this, is closed.
        slots: in the job, of each rank of the group.
        group_id: of the engine's group; unused before.
        rank: this one.
        mode: the outcome of calls that lose a rank, one of `limits.MODES`.
        extra_bytes: as of `EngineOptions`.

    Attributes:
        region: this rank's outbox.
        members: of the epoch by rank, once `meet` has been called.

    Raises:
        ResourceError: no memory or descriptor is left.
        InvalidArgument: this process has too many groups and buffers.
    """

    members: Mapping[int, Member]

    def __init__(
        self, job: Job, slots: Sequence[int], group_id: int, rank: int, mode: str, extra_bytes: int = 0
    ) -> None:
        self._slots, self._group_id, self._rank, self._extra_bytes = list(slots), group_id, rank, extra_bytes
        self._nbytes = outbox_layout(MAX_RANKS, MIN_STAGING_BYTES, extra_bytes, has_messages=False).nbytes
        job.retain()
        release: Callable[[], object] = job.release
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: release())
            self._membership = GroupMembership(JobHandle(job, self._slots, group_id, False, False), mode)
            release = self._membership.close
            self.region = region = SharedRegion.create(self._nbytes, f"outbox{rank}", only_owner_writes=True)
            undo.callback(region.close)
            OutboxOwner(job.runtime.member.nonce, group_id, job.slot).sign(region)
            self._undo = undo.pop_all()

    @property
    def epoch(self) -> int:
        """The newest epoch that this rank knew when it began to take part; it receives all later decisions."""
        return self._membership.epoch

    def meet(self, epoch: int, ranks: Collection[int], timeout_s: float) -> None:
        """Begin with those of some ranks that are members in an epoch which one of them knew when it began to do so.

        Raises:
            CommTimeoutError: its decision does not come. EvictedError, NoQuorumError: as the agent reports.
        """
        slots = {self._slots[rank]: rank for rank in ranks}
        found = [member for member in self._membership.view_at(epoch, timeout_s).members if member.slot in slots]
        self.members = {slots[member.slot]: member for member in found}
        self._membership.begin_with(Decision(epoch, tuple(found)))

    def attach(self, rank: int, blob: bytes) -> SharedRegion:
        """Map the outbox of another member.

        Raises:
            ProtocolError: it is not that rank's, or too small.
            AuthError, ResourceError: as `SharedRegion.attach`.
        """
        member = self.members[rank]
        region = open_outbox(blob, OutboxOwner(member.nonce, self._group_id, member.slot))
        if region.owner_pid == parse_endpoint(member.endpoint).pid and region.nbytes >= self._nbytes:
            return region
        region.close()
        raise ProtocolError(f"rank {rank} names an outbox that is not its own, or too small")

    def begin(self, regions: Mapping[int, SharedRegion], timeout_s: float) -> Engine:
        """Return the engine, and publish that this rank reads the others; no call may be made yet.

        Args:
            regions: the others' outboxes, which belong to the engine then; a blank one stands for a member that has
                ended before its outbox was mapped, until the view has removed it.
            timeout_s: of calls.

        Raises:
            ResourceError: no memory or descriptor is left; nothing has begun.
        """
        with contextlib.ExitStack() as undo:
            found = {**regions, self._rank: self.region}
            without = [rank for rank in range(len(self._slots)) if rank not in found]
            if without:
                blank = make_blank(self._nbytes)
                undo.callback(blank.close)
                found.update(dict.fromkeys(without, blank))
            watch = DeathWatch()
            undo.callback(watch.close)
            for rank, member in self.members.items():
                if rank != self._rank:
                    process = parse_endpoint(member.endpoint)
                    watch.watch(rank, process.pid, process.start_time)
            outboxes = [found[rank] for rank in sorted(found)]
            peer_regions = PeerRegions(self._rank, outboxes, MIN_STAGING_BYTES, 1, MAX_RANKS, self._extra_bytes, False)
            peer_regions.blanks.update(without)
            engine = Engine(peer_regions, watch, timeout_s, self._membership)
            undo.pop_all()
        self._undo.pop_all()
        keep(engine)
        peer_regions.exports.publish(peer_regions, LIFE, LIFE_READY)
        return engine

    def close(self) -> None:
        """Give up before there is an engine; idempotent, and without effect once there is one."""
        self._undo.close()
