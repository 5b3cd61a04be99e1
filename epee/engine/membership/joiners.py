"""The intake of processes into a group: in the rank of a lost process, or beyond the end of the group.

A view with a joiner states the call with which it begins, and all ranks read its outbox from then on. The other members
map nothing else anew: outboxes have room for all ranks that may ever join (decision 42).

The consequences of a decision belong to calls: the ranks that take part in call s, and the number of ranks that the
group counts in it. They take effect with the joiner's first call, on all ranks after the same call, whenever they
received the decision.

No call is published before a joiner and the other members can read each other's outboxes. Else a joiner that dies early
would have a part in the call for ranks that had mapped its outbox and none for the others. A joiner that has mapped all
other outboxes is ready (LIFE). A member that has mapped a joiner's outbox announces that in its count of freed message
slots (`Receiver.renew`).

Over several hosts a joiner of another host has a blank outbox here until its mirror is complete
(`replication/loss_resolution.py`), and the gateways of its own host request everything anew; it is ready when it reads
all other ranks' mirrors.

Decisions come from the agent thread and are applied under the engine's lock; all other state is this process's own. A
joiner that dies on the way is lost like any other rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import RankFailedError, ResourceError
from ...view.protocol.messages import Decision
from ...view.protocol.outcome import first_seq
from ..bootstrap.group_note import OutboxEndpoint
from ..operation import Operation
from ..outbox import LIFE, LIFE_BORN, PeerRegions
from ..p2p.channel import first_number
from .epoch_regions import EpochRegions
from .members import attach_outbox, make_blank, replace
from .rank_table import RankTable

if TYPE_CHECKING:
    from ..engine import Engine


class Joiners:
    """Takes the joiners of one group in.

    Attributes:
        join_epoch: of the newest view that took a process in; 0 when none did.
        first_call: rank -> call with which the process that last took it begins.
    """

    def __init__(self, engine: Engine, rank_table: RankTable, epoch_regions: EpochRegions, host: str) -> None:
        self._host = host
        self._engine = engine
        self._rank_table = rank_table
        self._epoch_regions = epoch_regions
        self.join_epoch = 0
        self.first_call: dict[int, int] = {}

    def begin(self, epoch: int, first_call: int) -> None:
        """Note that this process has itself been taken in, by the view of `epoch`."""
        self.join_epoch = epoch
        self.first_call[self._epoch_regions.full.rank] = first_call

    def adopt(self, decision: Decision) -> None:
        """Read the outboxes of processes that have come into this group by `decision`.

        May be repeated from any line on (an interrupt, a shortage): that a process was taken in is noted last of all.

        Raises:
            ResourceError: no memory or descriptor is left; nothing of the rest has begun for that process.
        """
        for one in self._rank_table.newcomers(decision):
            start, rank, part = first_seq(decision, self._rank_table.lane), one.rank, one.part
            self._adopt(rank, part, decision.epoch)
            self.join_epoch = decision.epoch
            self.first_call[rank] = start
            self._epoch_regions.sizes.grow(start, rank + 1 if part is None else part.num_ranks)
            self._rank_table.take_in(one)

    def _adopt(self, rank: int, part: OutboxEndpoint | None, epoch: int) -> None:
        """Read the outbox of a process that has taken `rank`: the steps that may fail come first.

        None: it has left already.
        """
        engine, nbytes = self._engine, self._epoch_regions.full.payload_bytes
        is_here = part is not None and (not self._epoch_regions.full.host_of or part.host == self._host)
        try:
            region = (is_here and part and attach_outbox(part, nbytes)) or make_blank(nbytes)
            if is_here and part is not None:
                engine.watch.watch(rank, part.pid, part.start_time)
            else:
                engine.watch.forget(rank)  # the previous owner may have been of this host
        except ResourceError as exc:
            raise ResourceError(
                f"rank {rank} (process {part.pid if part else 'gone'}) has joined in epoch {epoch}, but cannot be "
                f"taken in here yet (the next call tries again): {exc}"
            ) from exc
        for message in engine.mail.involving(rank):  # out of the state last: then no path comes back to it
            message.fail(RankFailedError(f"{message.name}: rank {rank} was replaced by another process", [rank]))
            engine.retire(message)
            engine.mail.cancel(message)
        replace(self._epoch_regions.full, rank, region)
        engine.waits.count_ranks(self._epoch_regions.full.num_ranks)
        engine.mail.renew(rank, first_number(epoch))


class Arrival:
    """The readiness of one process in its group.

    Args:
        full: peer regions of all ranks.
        joined_in: the epoch that took this process in; 0 for initial members.
    """

    def __init__(self, full: PeerRegions, joined_in: int) -> None:
        self._full = full
        self._joined_in = joined_in
        self._is_adopted = not joined_in
        for peer in full.peers if joined_in else ():  # for ranks that joined in the same epoch
            # Sent, not only stored: other hosts may have received everything else in this outbox a moment before.
            full.exports.publish(full, full.verdict_base[peer], first_number(joined_in) - 1)

    def may_publish(self, op: Operation) -> bool:
        """Return whether all ranks that take part in `op` can read each other's outboxes."""
        if unready(op.peer_regions):
            return False
        if self._is_adopted:
            return True
        index, wanted = self._full.verdict_base[self._full.rank], first_number(self._joined_in) - 1
        self._is_adopted = all(words[index] >= wanted for words in op.peer_regions.peer_words)
        return self._is_adopted

    def is_over(self, peer_regions: PeerRegions) -> bool:
        """Return whether calls with `peer_regions` need not ask any more."""
        return self._is_adopted and not unready(peer_regions)


def unready(peer_regions: PeerRegions) -> list[int]:
    """Return the joiners among the members of `peer_regions` that have not mapped all others' outboxes yet."""
    return [peer_regions.members[peer] for peer in peer_regions.peers if peer_regions.words[peer][LIFE] == LIFE_BORN]
