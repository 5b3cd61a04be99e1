"""When a newcomer and those who meet it can read each other's outboxes: no call is published before.

Else one that dies early would have a part in the eyes of those who had mapped its outbox and none in those of the
others. A newcomer that has mapped all others' is ready (LIFE). Who has mapped a newcomer's says so where it counts the
message slots that it has freed (`Receiver.renew`).
"""

from __future__ import annotations

from ..engine.operation import Operation
from ..outbox import LIFE, LIFE_BORN, Outboxes
from ..p2p.channel import first_number


class Arrival:
    """Whether one process has arrived in its group.

    Args:
        full: outboxes of all ranks.
        joined_in: the epoch that took this process in; 0 for founders.
    """

    def __init__(self, full: Outboxes, joined_in: int) -> None:
        self._full = full
        self._joined_in = joined_in
        self._is_adopted = not joined_in
        for peer in full.peers if joined_in else ():  # for those who joined in the same epoch
            full.own[full.verdict_base[peer]] = first_number(joined_in) - 1

    def may_publish(self, op: Operation) -> bool:
        """Return whether all who take part in `op` can read each other's outboxes."""
        if unready(op.box):
            return False
        if self._is_adopted:
            return True
        index, wanted = self._full.verdict_base[self._full.rank], first_number(self._joined_in) - 1
        self._is_adopted = all(words[index] >= wanted for words in op.box.peer_words)
        return self._is_adopted

    def is_over(self, box: Outboxes) -> bool:
        """Return whether calls with `box` need not ask any more."""
        return self._is_adopted and not unready(box)


def unready(box: Outboxes) -> list[int]:
    """Return the newcomers among the members of `box` that have not mapped all others' outboxes yet."""
    return [box.members[peer] for peer in box.peers if box.words[peer][LIFE] == LIFE_BORN]
