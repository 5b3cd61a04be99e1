"""The gate that delays a view with joiners until it may be applied, in a group over several hosts.

A joiner may get the rank of a lost one, on any host: rows and mirrors of that rank, and the roles of all (gateways and
answering ranks), change from then on. So no rank begins the new placement while another may still need a word of the
ranks that were lost by then. A rank that knows of such a view

    settles    the ranks lost by it, as after any loss (`loss_resolution.py`); nothing is decided, begun or completed
               meanwhile
    turns      it reports so beside the group's row on its board (`Offer.turned`), which the agents bring to other
               hosts: no mirror has a part in it, so it does not matter whose mirrors are being made anew
    goes on    when all ranks that were there before and stay have turned

The staying ranks follow from all known decisions, also those behind the waiting view: a rank that is lost meanwhile is
not waited for. A rank that has turned needs nothing of the lost ones, so a rank that goes on takes nothing away from
any other. A rank that makes no calls does not turn; the others' timeouts name it.

Each rank writes its own row; all read, under their engine's lock. A crash of a rank is a later decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...view.protocol.decision import parts_of
from ...view.protocol.messages import Decision
from ..bootstrap.group_note import Offer
from ..membership.rank_table import RankTable
from .loss_resolution import LossResolution


class NoGate:
    """`Gate` of a group on one host, where every view may be applied."""

    epoch = newest = 0
    late: tuple[int, ...] = ()

    def begin(self, epoch: int) -> bool:
        """Return that nothing follows."""
        return False

    def begun(self, decision: Decision) -> None:
        """Do nothing."""

    def hear(self, decision: Decision) -> None:
        """Do nothing."""

    def is_open(self, offers: Callable[[], Mapping[int, Offer]]) -> bool:
        """Return that the view may be applied."""
        return True

    def end(self) -> None:
        """Do nothing."""


class Gate:
    """The condition that a view with joiners waits for at one rank.

    Args:
        tell: reports to the others that this rank has turned.

    Attributes:
        epoch: of the view that waits; 0: none does.
        newest: of the newest view received while it waits; 0: none does.
        late: the ranks that have not turned.
    """

    def __init__(self, rank_table: RankTable, resolution: LossResolution, tell: Callable[[int], None]) -> None:
        self.epoch = self.newest = 0
        self.late: tuple[int, ...] = ()
        self._rank_table, self._loss_resolution, self._tell = rank_table, resolution, tell
        self._staying: dict[int, int] = {}  # slot -> since when
        self._has_turned = False

    def begin(self, epoch: int) -> bool:
        """Wait with the view of an epoch from now on; True: it is new, or its consequences were interrupted."""
        if self.epoch == epoch:
            return False
        self._staying, self._has_turned, self.newest = dict(self._rank_table.since), False, epoch
        return True

    def begun(self, decision: Decision) -> None:
        """Note that the losses of the view that waits are being settled."""
        self._leave(decision)
        self.epoch = decision.epoch

    def _leave(self, decision: Decision) -> list[int]:
        """Stop waiting for the ranks that a decision removes; return their slots."""
        parts = parts_of(decision, self._rank_table.lane)
        gone = [slot for slot, when in self._staying.items() if parts.get(slot) != when]
        self._staying = {slot: when for slot, when in self._staying.items() if slot not in gone}
        return gone

    def hear(self, decision: Decision) -> None:
        """Note a decision behind the one that waits."""
        if decision.epoch <= self.newest:
            return
        gone = self._leave(decision)
        self._loss_resolution.hear(decision.epoch, [self._rank_table.rank_of[slot] for slot in gone])
        self.newest = decision.epoch

    def is_open(self, offers: Callable[[], Mapping[int, Offer]]) -> bool:
        """Return whether the view may be applied. `offers`: returns the offers of the members."""
        if self._loss_resolution.unsettled:
            return False
        if not self._has_turned:
            self._tell(self.epoch)
            self._has_turned = True
        rank_of, told = self._rank_table.rank_of, offers()
        own = self._loss_resolution.roles.topology.rank
        late = [
            rank_of[s] for s in self._staying if rank_of[s] != own and (s not in told or told[s].turned < self.epoch)
        ]
        self.late = tuple(sorted(late))
        return not late

    def end(self) -> None:
        """Stop waiting with any view."""
        self.epoch = self.newest = 0
        self.late = ()
