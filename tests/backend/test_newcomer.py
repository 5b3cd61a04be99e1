"""What a newcomer learns of the decisions after the one that took it in, while the agent goes on."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from epee.engine.membership.group_membership import GroupMembership
from epee.view.job import JobHandle
from epee.view.process.board import GroupRow
from epee.view.protocol.messages import DEAD, Decision, Member, Removal

LANE = 7
MEMBERS = tuple(Member(slot, 1, bytes([slot]) * 16, b"") for slot in range(4))
ADMITTED = Decision(2, MEMBERS)
HISTORY = (Decision(3, MEMBERS[:3], (Removal(3, 1, DEAD),)),)
NEWS = Decision(4, MEMBERS[:2], (Removal(2, 1, DEAD),))


class BusyAgent:
    """The control plane as a group sees it; before its thread answers, it freezes the group and tells of a decision."""

    def __init__(self) -> None:
        self.hooks: Any = ()
        self.thread: threading.Thread | None = None
        self.was_free = False

    def register(self, group_id: int, *hooks: Any) -> GroupRow:
        self.hooks = hooks
        return GroupRow(memoryview(bytearray(64)), group_id)

    def since(self, epoch: int) -> tuple[Decision, ...]:
        if threading.current_thread() is not self.thread:
            self.thread = threading.Thread(target=self._go_on, daemon=True)
            self.thread.start()
            self.thread.join(20.0)
            self.was_free = not self.thread.is_alive()
        return tuple(decision for decision in HISTORY if decision.epoch > epoch)

    def _go_on(self) -> None:
        freeze, thaw, decided, *_ = self.hooks
        freeze()
        decided(NEWS)
        thaw()


def test_a_decision_while_a_newcomer_asks_what_it_missed_does_not_block_the_agent() -> None:
    agent = BusyAgent()
    job: Any = SimpleNamespace(runtime=agent, release=lambda cause: None)
    membership = GroupMembership(JobHandle(job, [0, 1, 2, 3], LANE, True, True), "mask/error", ADMITTED)
    membership.join(ADMITTED)
    assert agent.was_free, "the hooks waited for a lock that the newcomer held while it asked the agent"
    assert list(membership.hooks.decisions) == [*HISTORY, NEWS]
