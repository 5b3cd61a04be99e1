"""When a view that takes somebody in may be taken over, in a group over several hosts.

A newcomer may get the rank of a lost one, on any host: rows and mirrors of that rank, and the roles of all (who keeps,
who tells), are others from then on. So nobody begins the new placement while somebody may still need a word of those
who were lost by then. A rank that knows of such a view

    settles    what was lost by it, as after any loss (`settling.py`); nothing is judged, begun or completed meanwhile
    turns      it tells so beside the lane's row on its board (`Offer.turned`), which the agents bring to other hosts:
               no mirror has a part in it, so it matters to nobody whose mirrors are being made anew
    goes on    when all who were there before and stay have turned

Who stays is a question of all decisions that are known, also those behind the view that waits: who is lost meanwhile is
not waited for. Who has turned needs nothing of the lost ones, so whoever goes on takes nothing away from anybody. A
rank that makes no calls does not turn; the others' time-outs name it.

Who writes: each rank its own row. Who reads: all, under their engine's lock. A crash of a rank is a later decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...view.protocol.decision import parts_of
from ...view.protocol.messages import Decision
from ..bootstrap.home import Offer
from ..membership.occupants import Occupants
from .settling import Settling


class Gate:
    """What a view with newcomers waits for at one rank.

    Args:
        tell: tells the others that this rank has turned.

    Attributes:
        epoch: of the view that waits; 0: none does.
        newest: of the newest view that was heard of while it waits; 0: none does.
        late: the ranks that have not turned.
    """

    def __init__(self, occupants: Occupants, settling: Settling, tell: Callable[[int], None]) -> None:
        self.epoch = self.newest = 0
        self.late: tuple[int, ...] = ()
        self._occupants, self._settling, self._tell = occupants, settling, tell
        self._staying: dict[int, int] = {}  # slot -> since when
        self._has_turned = False

    def begin(self, epoch: int) -> bool:
        """Wait with the view of an epoch from now on; True: it is new, or what follows from it was broken off."""
        if self.epoch == epoch:
            return False
        self._staying, self._has_turned, self.newest = dict(self._occupants.since), False, epoch
        return True

    def begun(self, decision: Decision) -> None:
        """Note that the losses of the view that waits are being settled."""
        self._leave(decision)
        self.epoch = decision.epoch

    def _leave(self, decision: Decision) -> list[int]:
        """Wait no more for those whom a decision removes; return their slots."""
        parts = parts_of(decision, self._occupants.lane)
        gone = [slot for slot, when in self._staying.items() if parts.get(slot) != when]
        self._staying = {slot: when for slot, when in self._staying.items() if slot not in gone}
        return gone

    def hear(self, decision: Decision) -> None:
        """Take note of a decision behind the one that waits."""
        if decision.epoch <= self.newest:
            return
        gone = self._leave(decision)
        self._settling.hear(decision.epoch, [self._occupants.rank_of[slot] for slot in gone])
        self.newest = decision.epoch

    def is_open(self, offers: Callable[[], Mapping[int, Offer]]) -> bool:
        """Return whether the view may be taken over. `offers`: what members of the lane tell."""
        if self._settling.unsettled:
            return False
        if not self._has_turned:
            self._tell(self.epoch)
            self._has_turned = True
        rank_of, told = self._occupants.rank_of, offers()
        own = self._settling.roles.topology.rank
        late = [
            rank_of[s] for s in self._staying if rank_of[s] != own and (s not in told or told[s].turned < self.epoch)
        ]
        self.late = tuple(sorted(late))
        return not late

    def end(self) -> None:
        """Wait with no view any more."""
        self.epoch = self.newest = 0
        self.late = ()
