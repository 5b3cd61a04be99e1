"""An engine of processes that already share a job, and exchange the blobs of their outboxes by themselves.

Without a store, which may have ended with a rank of the group that is lost by now. The caller carries the blob of each
rank's outbox, and an epoch, to the others (`ep/hosts/birth.py`: through the group of a buffer).

    1. Each member takes part in the control plane under the group's id; so it receives every later decision. It makes
       its outbox (`EngineMeeting`), and gives the others its blob and the newest epoch that it knows.
    2. They begin with the members of the newest of these epochs (`meet`). Each maps the others' outboxes (`attach`),
       makes the engine (`begin`), and publishes that it can read them all.
    3. It makes no call before all members have published that (`awaited`, or by another exchange of the caller): else a
       rank that dies early would have a part in a call for the ranks that had mapped its outbox, and none for the
       others.

A member that cannot map the others says so in its outbox (`fail`) where nobody will make a call, as in the construction
of a buffer: then the others do not wait for it. A member that has left the view since is never ready. A blank outbox
stands for it, which no process writes, and a later decision removes it, as any rank that is lost. A rank of the group
that is no member of the epoch has a blank outbox as well, and takes no part, whichever process has its slot, until the
members admit one that asks for it (`joining.come_in`): then the group is as one that has lost that rank later.

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
from ..outbox import LIFE, LIFE_BORN, LIFE_FAILED, LIFE_READY, OutboxOwner, PeerRegions, open_outbox, outbox_layout
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
        self._nbytes = outbox_layout(MAX_RANKS, MIN_STAGING_BYTES, extra_bytes).nbytes
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

    def members_at(self, epoch: int, ranks: Collection[int], timeout_s: float) -> dict[int, Member]:
        """Return those of some ranks that are members in an epoch which one of them knew when it began to take part.

        Raises:
            CommTimeoutError: its decision does not come. EvictedError, NoQuorumError: as the agent reports.
        """
        slots = {self._slots[rank]: rank for rank in ranks}
        view = self._membership.view_at(epoch, timeout_s)
        return {slots[member.slot]: member for member in view.members if member.slot in slots}

    def meet(self, epoch: int, members: Mapping[int, Member]) -> None:
        """Begin with these members of an epoch, by rank, this one included; all of them begin so."""
        self.members = dict(members)
        self._membership.begin_with(Decision(epoch, tuple(sorted(members.values(), key=lambda one: one.slot))))

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
        """Return the engine, and publish that this rank reads the others; `awaited` comes before its first call.

        Args:
            regions: the others' outboxes, which belong to the engine then; a rank without one has left the view.
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
            peer_regions = PeerRegions(self._rank, outboxes, MIN_STAGING_BYTES, 1, MAX_RANKS, self._extra_bytes)
            peer_regions.blanks.update(without)
            engine = Engine(peer_regions, watch, timeout_s, self._membership)
            undo.pop_all()
        self._undo.pop_all()
        keep(engine)
        peer_regions.exports.publish(peer_regions, LIFE, LIFE_READY)
        return engine

    def fail(self) -> None:
        """Publish that this rank will not come: the others need not wait for it. Before there is an engine."""
        words = self.region.words(0, LIFE + 1)
        words[LIFE] = LIFE_FAILED
        words.release()

    def close(self) -> None:
        """Give up before there is an engine; idempotent, and without effect once there is one."""
        self._undo.close()


def awaited(engine: Engine) -> list[int]:
    """Return the members that have not mapped all outboxes yet, those included that have died on the way."""
    peer_regions = engine.members
    return [
        peer_regions.members[peer]
        for peer, words in zip(peer_regions.peers, peer_regions.peer_words, strict=True)
        if words[LIFE] == LIFE_BORN
    ]
