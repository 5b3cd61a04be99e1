"""A handful of agents in one thread, for tests: messages go through lists, time is a number."""

from __future__ import annotations

from epee.view.protocol.agent import Agent
from epee.view.protocol.events import (
    AgentSettings,
    BoardRead,
    Decide,
    Died,
    Effect,
    Event,
    Evicted,
    Freeze,
    Frozen,
    MessageReceived,
    NoQuorum,
    ReadBoard,
    Refused,
    Send,
    Tick,
    WriteBoard,
)
from epee.view.protocol.messages import BoardState, Decision, GroupState, Member, Message


def member(slot: int, incarnation: int = 1, tag: int = 0) -> Member:
    return Member(slot, incarnation, bytes([slot, tag]) * 8, b"end")


def first(num_members: int) -> Decision:
    return Decision(1, tuple(member(slot) for slot in range(num_members)))


class Group:
    """Agents by nonce. `post` takes a step; `run` delivers until nothing moves; `late` lets time pass."""

    def __init__(self, num_members: int, settings: AgentSettings | None = None) -> None:
        self.now = 100.0
        self.settings = settings or AgentSettings(policy="evict")
        self.agents: dict[bytes, Agent] = {}
        self.boards: dict[bytes, BoardState] = {}
        self.groups: dict[bytes, tuple[GroupState, ...]] = {}
        self.dead: set[bytes] = set()
        self.stopped: set[bytes] = set()
        self.holding: set[bytes] = set()  # engines that do not freeze
        self.wire: list[tuple[bytes, Member, Message]] = []
        self.told: dict[bytes, list[Effect]] = {}
        for one in first(num_members).members:
            self.add(one, first(num_members))
            self.post(one, Tick())

    def add(self, one: Member, decision: Decision | None = None) -> Agent:
        self.agents[one.nonce] = Agent(one, self.settings, decision)
        self.told[one.nonce] = []
        return self.agents[one.nonce]

    def post(self, one: Member, event: Event) -> list[Effect]:
        effects = self.agents[one.nonce].step(event, self.now)
        for effect in effects:
            self._carry_out(one, effect)
        return effects

    def _carry_out(self, one: Member, effect: Effect) -> None:
        if isinstance(effect, WriteBoard):
            self.boards[one.nonce] = effect.state
        elif isinstance(effect, Send):
            self.wire.append((one.nonce, effect.to, effect.message))
        elif isinstance(effect, ReadBoard):
            assert effect.member.nonce in self.dead
            self.post(one, BoardRead(effect.member.nonce, self.boards.get(effect.member.nonce)))
        elif isinstance(effect, Freeze):
            if one.nonce not in self.holding:
                self.post(one, Frozen(effect.epoch, self.groups.get(one.nonce, ())))
        elif isinstance(effect, Decide | Evicted | NoQuorum | Refused):
            self.told[one.nonce].append(effect)

    def run(self) -> None:
        while self.wire:
            sender, to, message = self.wire.pop(0)
            if to.nonce in self.agents and to.nonce not in self.dead | self.stopped:
                self.post(to, MessageReceived(sender, message))

    def kill(self, *victims: Member) -> None:
        self.dead |= {victim.nonce for victim in victims}
        for victim in victims:
            for nonce, agent in self.agents.items():
                if nonce not in self.dead | self.stopped:
                    self.post(agent.me, Died(victim.nonce))

    def late(self, seconds: float) -> None:
        """Let time pass in small steps, with the ticks that are due."""
        until = self.now + seconds
        while self.now < until:
            self.now += self.settings.answer_s / 8
            for nonce, agent in list(self.agents.items()):
                if nonce not in self.dead | self.stopped and agent.next_tick <= self.now:
                    self.post(agent.me, Tick())
            self.run()

    def live(self) -> list[Agent]:
        return [a for nonce, a in self.agents.items() if nonce not in self.dead | self.stopped and not a.ended]

    def views(self) -> set[tuple[int, tuple[tuple[int, int], ...]]]:
        return {(a.epoch, tuple((m.slot, m.incarnation) for m in a.decided.members)) for a in self.live()}

    def decisions(self, one: Member) -> list[Decision]:
        return [effect.decision for effect in self.told[one.nonce] if isinstance(effect, Decide)]
