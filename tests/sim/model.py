"""The agreement of a few agents, explored to the end: every order of messages, losses, deaths and time-outs.

The agents are the real ones. A state is what they are, who is dead, and every message that was ever sent: it may arrive
at any time, any number of times, or never. From each state every step is tried: deliver a message, kill a member
(between two effects of a step as well, at most `max_deaths`), let somebody see a death, let an agent's timeouts run out
(at most `max_late` times). States that contain the same are one, so the search ends; the property is that no two
agents ever decide differently for an epoch.
"""

from __future__ import annotations

import copy
from typing import Any

from epee.view.protocol.agent import Agent
from epee.view.protocol.events import (
    AgentSettings,
    BoardRead,
    Decide,
    Died,
    Effect,
    Evicted,
    Freeze,
    Frozen,
    MessageReceived,
    ReadBoard,
    Send,
    Tick,
    WriteBoard,
)
from epee.view.protocol.messages import (
    Accept,
    Accepted,
    BoardState,
    Commit,
    Decision,
    Member,
    Nack,
    Prepare,
    Promise,
)
from tests.view.agents import first

SETTINGS = AgentSettings(policy="error", answer_s=1.0, wait_limit_s=1.0, no_quorum_s=1e9)
KEPT = (Prepare, Promise, Accept, Accepted, Commit, Nack)  # reports and questions change no promise


class State:
    """Agents, boards, messages under way; `copy` makes a successor."""

    def __init__(self, agent_type: type[Agent], num_members: int) -> None:
        self.members = first(num_members).members
        self.agents = [agent_type(member, SETTINGS, first(num_members)) for member in self.members]
        self.boards: list[BoardState | None] = [None] * num_members
        self.wire: tuple[tuple[int, int, Any], ...] = ()
        self.dead: frozenset[int] = frozenset()
        self.seen: frozenset[tuple[int, int]] = frozenset()
        self.late = 0
        self.decided: dict[int, Decision] = {}
        self.split = False
        for slot in range(num_members):
            self.post(slot, Tick())

    def copy(self) -> State:
        """Return a state that can be changed without changing this one."""
        twin = copy.copy(self)
        twin.agents = [clone(agent) for agent in self.agents]
        twin.boards = list(self.boards)
        twin.decided = dict(self.decided)
        return twin

    def key(self) -> Any:
        """Return what tells states apart: everything that can make a difference later."""
        parts = [(agent_key(agent), board) for agent, board in zip(self.agents, self.boards, strict=True)]
        return tuple(parts), frozenset(self.wire), self.dead, self.seen, self.late

    def post(self, slot: int, event: Any, limit: int = 99) -> None:
        """Give an event to an agent; carry out up to `limit` of the effects (it dies after them)."""
        queue: list[Effect] = list(self.agents[slot].step(event, 0.0))
        while queue and limit > 0:
            limit -= 1
            effect = queue.pop(0)
            if isinstance(effect, Send):
                message = (slot, effect.to.slot, effect.message)
                if isinstance(effect.message, KEPT) and effect.to.slot not in self.dead and message not in self.wire:
                    self.wire = (*self.wire, message)
            elif isinstance(effect, WriteBoard):
                self.boards[slot] = effect.state
            elif isinstance(effect, ReadBoard):
                queue = self._more(slot, BoardRead(effect.member.nonce, self.boards[effect.member.slot]), queue)
            elif isinstance(effect, Freeze):
                queue = self._more(slot, Frozen(effect.epoch, ()), queue)
            elif isinstance(effect, Decide):
                known = self.decided.setdefault(effect.decision.epoch, effect.decision)
                self.split |= known != effect.decision
            assert not isinstance(effect, Evicted), "nobody is voted out alive here"

    def _more(self, slot: int, event: Any, queue: list[Effect]) -> list[Effect]:
        return queue + self.agents[slot].step(event, 0.0)

    def successors(self, max_deaths: int, max_late: int) -> list[State]:
        """Return every state that one step leads to."""
        found = []
        for sender, to, message in self.wire:
            event = MessageReceived(self.members[sender].nonce, message)
            found.append(self._after(to, event))
            if len(self.dead) < max_deaths:
                found += [self._after(to, event, effects) for effects in range(4)]
        for slot in range(len(self.agents)):
            if slot in self.dead:
                continue
            if len(self.dead) < max_deaths:
                found.append(self._after(slot, Tick(), 0))
            for other in self.dead:
                if (slot, other) not in self.seen:
                    state = self._after(slot, Died(self.members[other].nonce))
                    state.seen |= {(slot, other)}
                    found.append(state)
            agent = self.agents[slot]
            if self.late < max_late and agent.gone and agent.campaign is None:
                state = self.copy()
                state.late += 1
                impatient = state.agents[slot]
                impatient._start_at = impatient._t
                state.post(slot, Tick())
                found.append(state)
        return found

    def _after(self, to: int, event: Any, effects: int = -1) -> State:
        """Return the state after an event; with `effects` >= 0 its receiver dies after so many effects."""
        state = self.copy()
        state.post(to, event, 99 if effects < 0 else effects)
        if effects >= 0:
            state.dead |= {to}
            state.wire = tuple(m for m in state.wire if m[1] != to)
        return state


def clone(agent: Agent) -> Agent:
    """Return a copy of an agent that shares only values."""
    twin = type(agent)(agent.me, agent.settings)
    twin.__dict__.update(
        {
            name: copy.copy(value) if isinstance(value, dict | set | list) else value
            for name, value in agent.__dict__.items()
            if name not in ("_handlers", "_messages")
        }
    )
    twin.history = agent.history.copy()
    if agent.campaign is not None:
        campaign = copy.copy(agent.campaign)
        campaign.promises, campaign.acks = dict(campaign.promises), set(campaign.acks)
        twin.campaign = campaign
    return twin


def agent_key(agent: Agent) -> Any:
    """Return what an agent knows that matters."""
    campaign = agent.campaign
    ballot = None
    if campaign is not None:
        adopted = campaign._adopted
        ballot = (campaign.ballot, frozenset(campaign.promises), frozenset(campaign.acks), campaign.proposal, adopted)
    promise = (agent.promised, agent.accepted_ballot, agent.accepted, agent._highest, agent._pending)
    return agent.ended, agent.decided, promise, frozenset(agent.gone), frozenset(agent.boards), ballot


def explore(
    agent_type: type[Agent], num_members: int, max_deaths: int, max_late: int, max_states: int
) -> tuple[int, State | None]:
    """Search all states from `num_members` live ones; return how many there are, and one with two decisions, if any."""
    start = State(agent_type, num_members)
    seen = {start.key()}
    todo = [start]
    while todo and len(seen) < max_states:
        for state in todo.pop().successors(max_deaths, max_late):
            if state.split:
                return len(seen), state
            key = state.key()
            if key not in seen:
                seen.add(key)
                todo.append(state)
    return len(seen), None


__all__ = ["Member", "State", "explore"]
