"""The view in which a group begins, as its membership learns it: it is shown a moment before it is delivered."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from epee.engine.membership.group_membership import GroupMembership
from epee.errors import CommTimeoutError, RankFailedError
from epee.view.protocol.messages import Decision, Member

MEMBERS = tuple(Member(slot, 1, bytes([slot]) * 16, b"") for slot in range(3))
FIRST = Decision(1, MEMBERS)


class Late:
    """An agent that shows a decision at once, and delivers it to the group when it is asked once more."""

    def __init__(self, decision: Decision) -> None:
        self.decisions: deque[Decision] = deque()
        self._decision = decision
        self.num_asked = 0

    def await_decision(self, after_epoch: int, timeout_s: float) -> Decision:
        """Return it; it is among `decisions` from the second time on."""
        self.num_asked += 1
        if self.num_asked == 2:
            self.decisions.append(self._decision)
        return self._decision


def membership_of(agent: Late, known: Decision = FIRST) -> tuple[GroupMembership, Any]:
    """Return the membership of a group that knows a view."""
    found = object.__new__(GroupMembership)
    table = SimpleNamespace(known=known)
    parts = {"runtime": agent, "hooks": agent, "_rank_table": table, "_slots": [0, 1, 2]}
    found.__dict__.update(parts)
    return found, table


def test_a_view_that_is_shown_before_it_is_delivered_is_awaited() -> None:
    agent = Late(Decision(2, MEMBERS))
    found, table = membership_of(agent)
    found.begin(2, timeout_s=30.0)
    assert table.known == Decision(2, MEMBERS)
    assert agent.num_asked == 2


def test_a_view_without_a_rank_of_the_group_is_no_begin() -> None:
    found, _ = membership_of(Late(Decision(2, MEMBERS[:2])))
    with pytest.raises(RankFailedError, match="rank 2 has left or died") as caught:
        found.begin(2, timeout_s=30.0)
    assert caught.value.ranks == (2,)


@pytest.mark.parametrize("later", [MEMBERS, MEMBERS[:2]])
def test_a_rank_that_knows_a_later_view_begins_with_it(later: tuple[Member, ...]) -> None:
    found, table = membership_of(Late(Decision(1, MEMBERS)), Decision(2, later))
    if later == MEMBERS:
        found.begin(1, timeout_s=30.0)
        assert table.known.epoch == 2
    else:
        with pytest.raises(RankFailedError) as caught:
            found.begin(1, timeout_s=30.0)
        assert caught.value.ranks == (2,)


def test_a_view_that_does_not_come_is_a_timeout() -> None:
    found, table = membership_of(Late(Decision(3, MEMBERS)))
    with pytest.raises(CommTimeoutError, match="epoch 2 of the view did not come"):
        found.begin(2, timeout_s=0.05)
    assert table.known.epoch == 1
