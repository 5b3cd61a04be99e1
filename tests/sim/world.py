"""One run: processes, a control network, faults, virtual time. One thread, one heap of events, one random generator.

A process is a real `Agent` beside a miniature engine (`lane.py`) and a program that issues the same calls everywhere.
What the agent tells its engine (decide, freeze, thaw) reaches it in order, a little later, as in a real process. Boards
are written at once or not at all and stay readable. The network delays, loses, repeats and reorders messages; a
stopped process finds them all when it wakes up.

The world also counts votes when a decision is first learned (V-2), because only it can see all boards.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Set
from itertools import combinations
from random import Random
from typing import Any, ClassVar

from epee.view.protocol.agent import BLANK_BOARD, Agent
from epee.view.protocol.decision import has_quorum, parts_of
from epee.view.protocol.events import (
    Accused,
    BoardRead,
    Decide,
    Died,
    Effect,
    Evicted,
    Freeze,
    Frozen,
    JoinPending,
    MessageReceived,
    NoQuorum,
    ReadBoard,
    Refused,
    Send,
    Thaw,
    Tick,
    WriteBoard,
)
from epee.view.protocol.messages import (
    LEFT,
    MAY_LIVE,
    STALLED,
    UNREACHABLE,
    BoardState,
    Commit,
    Decision,
    Member,
    Message,
    Want,
)
from epee.view.protocol.outcome import MAX_WITNESSED_HOSTS, holder_of, loss_of

from .faults import crash, inject, interrupt
from .gates import Turns
from .history import DONE, EVICTED, NO_QUORUM, VIEW, History, Record, Violation, check
from .hosts import RemoteMirror, Settlement, Watch
from .kinds import expected_result, is_pull
from .lane import Engine
from .plan import AFTER_SEND, ROOT_SEEDS, Plan
from .words import LANE, Mirror, Outbox, Shared

PATIENCE_S = 12.0  # after the last fault every call must have ended by then
TICK = Tick()
NEVER = float("inf")


class Process:
    """One process of the run and what the world knows about it."""

    def __init__(self, me: Member, agent: Agent) -> None:
        self.me = me
        self.agent = agent
        self.engine: Engine | None = None
        self.board: BoardState = BLANK_BOARD
        self.records: list[Record] = []
        self.dead = self.stopped = self.ended = False
        self.frozen = False
        self.tick_at = float("inf")
        self.step_at = float("inf")
        self.clock_offset = 0.0
        self.hold_until = 0.0
        self.crash_after = -1
        self.nap_s = 0.0
        self.issue_at = 0.0
        self.accuse_at = 0.0
        self.waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def name(self) -> str:
        return f"{self.me.slot}.{self.me.nonce[1]}"


def _is_met(want: Want, out: Set[int], back: Set[int], then: Set[int], there: Set[int], now: Set[int]) -> bool:
    """Return whether a group changed as was wanted: `then`, `now`: those in it, `there`: those in the job since."""
    members = set(want.members)
    exactly = out == set(want.out) & then and back == members & there - then
    fewer = out >= set(want.out) & then and out <= (set(want.out) | members) & then and back <= members & there - then
    return (exactly or (want.least > 0 and fewer)) and len(members & then & now) >= want.least


class World:
    """A run of one plan. `run()` returns what is wrong."""

    agent_type: type[Agent] = Agent
    engine_type: type[Engine] = Engine
    shared_type: type[Shared] = Shared
    freezes = True

    def __init__(self, plan: Plan, trace: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.trace = trace
        self.calm = plan.is_calm()
        self.has_accused = False  # somebody has, with or without a reason
        self.unseen: set[tuple[int, int]] = set()  # accused while in calls that a newcomer does not see, or that one
        self.rng = Random(plan.seed ^ 0x5EED)
        self.random = self.rng.random
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0
        self.shared = self.shared_type(plan.seed, self.rng, plan.raises, plan.max_lag_s)
        self.shared.shows = plan.seed >= ROOT_SEEDS and plan.window == 1
        self.processes: dict[bytes, Process] = {}
        self.in_lane: dict[tuple[int, int], Process] = {}  # by slot, and since when it takes part
        self.lane_is_over = False  # nobody is left of those who knew how far it was; others may begin anew
        self.wanted: dict[int, list[Want]] = {}  # per epoch in which somebody wanted it
        self.all: list[Process] = []
        self.decisions: dict[int, Decision] = {}
        self.violations: list[Violation] = []
        self.cuts: list[tuple[int, float]] = []  # mask of directions, and since when
        self.joiners = 0
        self.faults_left = len(plan.faults)
        self.last_fault = 0.0
        first = Decision(1, tuple(self.member(slot, 1, 0) for slot in range(plan.num_members)))
        self.decisions[1] = first
        self.settlement = Settlement(self)
        if plan.hosts:
            self.shared.hosts = dict(enumerate(plan.hosts))
            self.shared.copy_of, self.shared.settle = self._copy_of, self.settlement.settle
            self.shared.heir = self.settlement.heir
            if self.shared.is_gated:
                turns = Turns(self)
                self.shared.turns, self.shared.told = turns.tell, turns.told
            Watch(self)
        for member in first.members:
            self.spawn(member, first)
        for fault in plan.faults:
            self.at(fault.time_s, inject, self, fault)

    def member(self, slot: int, incarnation: int, number: int) -> Member:
        return Member(slot, incarnation, bytes((slot, number, 0, 0)), b"", str(self.host_of(slot)))

    def host_of(self, slot: int) -> int:
        """Return the host on which processes of a slot run."""
        return self.plan.hosts[slot] if self.plan.hosts else 0

    def cut(self, mask: int) -> None:
        """Let nothing get through in some directions."""
        self.cuts.append((mask, self.now))

    def heal(self, mask: int) -> None:
        """End the oldest cut of these directions."""
        self.cuts.remove(next(cut for cut in self.cuts if cut[0] == mask))

    def cut_since(self, sender: int, to: int) -> float:
        """Return since when nothing gets from one slot to another; `NEVER` where it does."""
        if not self.cuts:
            return NEVER
        bit = sender * 12 + to if sender < 12 and to < 12 else 999
        return min((since for mask, since in self.cuts if mask >> bit & 1), default=NEVER)

    def _copy_of(self, peer_regions: Outbox, lag: float, writer: int, since: int, reader: int) -> Mirror:
        if self.host_of(writer) == self.host_of(reader):
            return Mirror(peer_regions, lag)
        return RemoteMirror(peer_regions, lag, self, writer, since, reader)

    def spawn(self, me: Member, first: Decision | None) -> Process:
        process = Process(me, self.agent_type(me, self.plan.settings, first))
        self.processes[me.nonce] = process
        self.all.append(process)
        if first is not None:
            self._begin(process, 1, first, False)
            self._view(process, first)
        self.agent(process, TICK)
        if first is not None:
            self.wake(process, self.plan.think_s * self.random())
        return process

    def _begin(self, process: Process, since: int, view: Decision, joined: bool) -> None:
        """Let a process take part in the group_id."""
        engine = self.engine_type(self.shared, process.me.slot, since, view, joined)
        engine.records, engine.now = process.records, self.now
        process.engine = engine
        self.in_lane[process.me.slot, since] = process

    # ---- time

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        """Call `what(*args)` at a time."""
        self.count += 1
        heapq.heappush(self.heap, (when, self.count, what, args))

    def run(self) -> list[Violation]:
        """Run until nothing is left to do or the time is over; return what is wrong."""
        heap = self.heap
        while heap:
            when, _, what, args = heapq.heappop(heap)
            if when > self.now:
                self.now = when
            if not self.faults_left and self.now > self.last_fault + PATIENCE_S:
                break
            what(*args)
            if (
                self.lane_is_over
                or self.violations
                or (not self.faults_left and self.count % 16 == 0 and self._is_over())
            ):
                break
        self._check()
        return self.violations

    def _is_over(self) -> bool:
        return not any(self._is_busy(process) for process in self.all)

    def _is_busy(self, process: Process) -> bool:
        """Return whether a process has calls to end, or something to learn."""
        if process.dead or process.ended:
            return False
        if process.engine is None or process.stopped:
            return True
        if process.engine.is_out:
            return False
        return process.engine.ended < self.plan.num_calls  # who was voted out learns it on its next call

    # ---- agents

    def agent(self, process: Process, event: Any) -> None:
        """Give an event to the agent of a process and carry out the effects."""
        if process.dead or process.ended:
            return
        if process.stopped:
            process.waiting.append((self.agent, (process, event)))
            return
        if self.trace is not None:
            self.trace(f"{self.now:.6f} {process.name()} <- {event}")
        agent = process.agent
        for effect in agent.step(event, self.now + process.clock_offset):
            if process.crash_after >= 0:
                if process.crash_after in (0, AFTER_SEND):
                    crash(self, process)
                    return
                if process.crash_after < AFTER_SEND or isinstance(effect, Send):
                    process.crash_after -= 1
            if self.trace is not None:
                self.trace(f"{self.now:.6f} {process.name()}    -> {effect}")
            self._effects[type(effect)](self, process, effect)
            if process.dead:
                return
        due = agent.next_tick - process.clock_offset
        if due < process.tick_at and not agent.ended:
            process.tick_at = max(due, self.now)
            self.at(process.tick_at, self._tick, process, process.tick_at)

    def _tick(self, process: Process, when: float) -> None:
        if process.tick_at == when:
            process.tick_at = float("inf")
            self.agent(process, TICK)

    def _send(self, process: Process, effect: Send) -> None:
        sender, to, message = process.me, effect.to, effect.message
        if isinstance(message, Commit) and self._is_buried(to, message):
            return  # before chance comes in: seeds stay what they are
        if self.cut_since(sender.slot, to.slot) < NEVER:
            return
        if self.plan.loss and self.random() < self.plan.loss:
            return
        self._deliver_later(sender.nonce, to.nonce, message)
        if self.plan.dup and self.random() < self.plan.dup:
            self._deliver_later(sender.nonce, to.nonce, message)

    def _is_buried(self, to: Member, message: Commit) -> bool:
        """Return whether a process is dead or has left, and is told of the decision that says so."""
        owner = self.processes.get(to.nonce)
        removed = {r[:2] for decision in message.decisions for r in decision.removed if r.cause not in MAY_LIVE}
        return owner is not None and (owner.dead or owner.ended) and to[:2] in removed

    def _deliver_later(self, sender: bytes, to: bytes, message: Message) -> None:
        delay = 0.00005 + self.random() * self.plan.max_delay_s
        if self.plan.slow_share and self.random() < self.plan.slow_share:
            delay += self.random() * 0.06
        if to in self.processes:
            self.at(self.now + delay, self.agent, self.processes[to], MessageReceived(sender, message))

    def _write_board(self, process: Process, effect: WriteBoard) -> None:
        process.board = effect.state

    def _read_board(self, process: Process, effect: ReadBoard) -> None:
        owner = self.processes[effect.member.nonce]
        if owner.me.host != process.me.host:
            self.violations.append(Violation("proof", f"{process.name()} reads a board of another host"))
        if not (owner.dead or owner.ended):
            self.violations.append(Violation("proof", f"{process.name()} reads the board of a live {owner.name()}"))
        self.at(self.now, self.agent, process, BoardRead(effect.member.nonce, owner.board))

    def _to_engine(self, process: Process, effect: Effect) -> None:
        """What the engine is told arrives in order, after a moment (later when a program holds it up)."""
        moment = 0.0 if self.random() < 0.5 else self.random() * 0.002
        when = max(self.now + moment, process.hold_until)
        process.hold_until = when
        self.at(when, self._engine_told, process, effect)

    def _engine_told(self, process: Process, effect: Effect) -> None:
        if process.dead:
            return
        if process.stopped:
            process.waiting.append((self._engine_told, (process, effect)))
            return
        if isinstance(effect, Freeze):
            engine = process.engine
            process.frozen = self.freezes
            self.agent(process, Frozen(effect.epoch, engine.state() if engine else ()))
            return
        if isinstance(effect, Decide):
            self._lane_told(process, effect.decision)
        else:
            process.frozen = False
        self.wake(process, 0.0)

    def _lane_told(self, process: Process, decision: Decision) -> None:
        """Let a decision do to the group of a process what it says."""
        engine, since = process.engine, parts_of(decision, LANE).get(process.me.slot)
        if engine is not None and not engine.is_out and engine.incarnation == since:
            engine.decide(decision, self.now)
            return
        if engine is not None and not engine.is_out:
            engine.put_out(self.now)
        if since is not None and (engine is None or engine.incarnation != since):
            self._begin(process, since, decision, True)

    def _decide(self, process: Process, effect: Decide) -> None:
        decision = effect.decision
        known = self.decisions.get(decision.epoch)
        if known is None:
            self.decisions[decision.epoch] = decision
            self._count_votes(decision)
            before = self.decisions.get(decision.epoch - 1, decision)
            self.settlement.note(decision, parts_of(before, LANE), parts_of(decision, LANE))
            self._look_who_wanted(decision)
            self._look_who_holds(decision)
        process.me = process.agent.me
        self._view(process, decision)
        for member in decision.members:  # the watch for who is new begins now
            other = self.processes[member.nonce]
            if (other.dead or other.ended) and member.host == process.me.host:
                self.at(self.now + self.random() * 0.01, self.agent, process, Died(member.nonce))
        self._to_engine(process, effect)

    def _view(self, process: Process, decision: Decision) -> None:
        mask = sum(1 << member.slot for member in decision.members)
        digest = 1 if decision == self.decisions[decision.epoch] else 2
        since = parts_of(decision, LANE).get(process.me.slot, 0)
        for incarnation in sorted({process.me.incarnation, since or process.me.incarnation}):
            process.records.append(
                Record(self.now, process.me.slot, incarnation, VIEW, 0, 0, 0, decision.epoch, mask, digest)
            )

    def note(self, process: Process, kind: int, epoch: int = 0) -> None:
        """Record the end of a process: as a member of the job, and as what it was in the group, where that differs."""
        me, engine = process.me, process.engine
        for incarnation in sorted({me.incarnation, me.incarnation if engine is None else engine.incarnation}):
            process.records.append(Record(self.now, me.slot, incarnation, kind, 0, 0, 0, epoch))

    def _look_who_wanted(self, decision: Decision) -> None:
        """L-1: nobody goes or comes back in a group unless a member wanted that in the epoch before.

        Who does not answer may go or stay away as well, where the want names how many are enough.
        """
        before = self.decisions.get(decision.epoch - 1, decision)
        then, now = parts_of(before, LANE), parts_of(decision, LANE)
        self.lane_is_over = not then.items() & now.items()
        there = {member.slot for member in decision.members if member.incarnation <= before.epoch}
        out, back = (then.keys() - now.keys()) & there, (now.keys() - then.keys()) & there
        wants = self.wanted.get(before.epoch, [])
        met = LANE in decision.met and any(_is_met(w, out, back, then.keys() & there, there, now.keys()) for w in wants)
        if (out or back or decision.met) and not met:
            self.violations.append(Violation("L-1", f"out {out} and back {back}, but {wants} was wanted: {decision}"))

    def _look_who_holds(self, decision: Decision) -> None:
        """L-2: who is named as the holder of a cut is in the group, and has completed the call of the cut."""
        holder = holder_of(decision, LANE)
        cut = next((cut.seq for cut in decision.cuts if cut.group_id == LANE), 0)
        process = self.in_lane.get((holder, parts_of(decision, LANE).get(holder, 0)))
        if holder >= 0 and (process is None or process.engine is None or process.engine.state()[0].completed < cut):
            self.violations.append(Violation("L-2", f"slot {holder} has not completed call {cut}: {decision}"))

    def _count_votes(self, decision: Decision) -> None:
        """V-2: those who have accepted a decision that somebody knows must be a quorum of those not dead."""
        before = self.decisions.get(decision.epoch - 1)
        if before is None:
            self.violations.append(Violation("V-2", f"a decision without the one before it: {decision}"))
            return
        owners = {member.slot: self.processes[member.nonce] for member in before.members}
        dead = {slot for slot, owner in owners.items() if owner.dead or owner.ended}
        yes = set()
        for slot, owner in owners.items():
            board = owner.board
            if board.accepted == decision or board.decided == decision or board.decided.epoch > decision.epoch:
                yes.add(slot)
        # which of these deaths the coordinator knew of when it counted is its own affair
        counted = (set(some) for size in range(len(dead) + 1) for some in combinations(sorted(dead), size))
        if not any(has_quorum(owners.keys(), some, yes) for some in counted):
            self.violations.append(Violation("V-2", f"accepted by {yes} of {set(owners)}, dead {dead}: {decision}"))

    def _evicted(self, process: Process, effect: Evicted) -> None:
        self.note(process, EVICTED, effect.epoch)
        self.finish(process)

    def _no_quorum(self, process: Process, effect: NoQuorum) -> None:
        me = process.me
        process.records.append(Record(self.now, me.slot, me.incarnation, NO_QUORUM, 0, 0, 0, effect.epoch))
        if not self.plan.is_patient:
            crash(self, process)  # the program of this process ends with the error
            return
        interrupt(self, process)  # it gets the error and repeats the call, for a while
        self.at(self.now + PATIENCE_S / 4, self._lose_patience, process, effect.epoch)

    def _lose_patience(self, process: Process, epoch: int) -> None:
        if process.agent.epoch == epoch and not (process.stopped or process.ended):
            crash(self, process)

    def _refused(self, process: Process, effect: Refused) -> None:
        crash(self, process)

    def _ignored(self, process: Process, effect: Effect) -> None:
        pass

    def finish(self, process: Process) -> None:
        """A process that was voted out: what is pending ends with an error."""
        process.ended = True
        if process.engine is not None:
            process.engine.put_out(self.now)

    _effects: ClassVar[dict[type, Callable[..., None]]] = {
        Send: _send,
        WriteBoard: _write_board,
        ReadBoard: _read_board,
        Freeze: _to_engine,
        Thaw: _to_engine,
        Decide: _decide,
        Evicted: _evicted,
        NoQuorum: _no_quorum,
        Refused: _refused,
        JoinPending: _ignored,
    }

    # ---- engines and programs

    def wake(self, process: Process, after: float) -> None:
        """Let the engine of a process move after a while, unless it will sooner."""
        when = max(self.now + after, process.hold_until)
        if when < process.step_at:
            process.step_at = when
            self.at(when, self._engine_step, process, when)

    def _engine_step(self, process: Process, when: float) -> None:
        if process.step_at != when:
            return
        process.step_at = float("inf")
        engine = process.engine
        if process.dead or process.ended or process.frozen or engine is None or engine.is_out:
            return
        if process.stopped:
            process.waiting.append((self.wake, (process, 0.0)))
            return
        if self.now < process.hold_until:
            self.wake(process, 0.0)
            return
        random = self.random
        plan = self.plan
        if engine.news:
            engine.now = self.now
            engine.take_news()
        has_room = engine.issued < plan.num_calls and len(engine.calls) < plan.window
        if has_room and self.now >= process.issue_at and engine.may_issue():
            engine.issue(self.now)
            process.issue_at = self.now + random() * plan.think_s
        budget = int(random() * 24) if random() < 0.5 else 1000
        moved = engine.step(self.now, 1 + budget)
        if moved:
            process.nap_s = 0.0002
        else:
            process.nap_s = min(process.nap_s * 1.7 + 0.0002, 0.03)
            self._look_for_trouble(process, engine)
        if engine.calls:
            self.wake(process, process.nap_s * (0.5 + random()))
        elif engine.issued < plan.num_calls:
            self.wake(process, max(process.issue_at - self.now, 0.0001))
        elif engine.is_gated:  # its program comes round now and then
            self.wake(process, process.nap_s * (0.5 + random()))

    def _look_for_trouble(self, process: Process, engine: Engine) -> None:
        if not engine.calls:
            return
        call = engine.calls[0]
        if self.now - call.moved_at < self.plan.op_timeout_s or self.now < process.accuse_at:
            return
        process.accuse_at = self.now + self.plan.settings.wait_limit_s / 2
        behind = engine.behind(call)
        epoch = engine.epoch if engine.unheard or engine.is_gated else call.place.epoch
        for slot in behind:
            self.has_accused = True
            if self._is_unseen(engine, slot, engine.incarnations[epoch, slot]):
                self.unseen |= {(slot, engine.incarnations[epoch, slot]), (engine.slot, engine.incarnation)}
            self.at(self.now, self.agent, process, self._accusation(engine, slot, epoch, call.seq))
        if self.plan.settings.policy == "error":
            engine.give_up(call)

    def _is_unseen(self, engine: Engine, slot: int, incarnation: int) -> bool:
        """Return whether one has moved, within the time-out, in calls before its accuser's first."""
        process, first = self.in_lane.get((slot, incarnation)), engine.course.first_seq
        accused = None if process is None else process.engine
        if accused is None or accused.course.first_seq >= first:
            return False
        ended = max((r.time_s for r in accused.records if r.kind == DONE and r.seq < first), default=0.0)
        moved = accused.calls[0].moved_at if accused.through() < first - 1 and accused.calls else ended
        return moved > self.now - self.plan.op_timeout_s

    def _accusation(self, engine: Engine, slot: int, epoch: int, seq: int) -> Accused:
        return Accused(slot, engine.incarnations[epoch, slot], LANE, seq, engine.heard)

    # ---- the end

    def _check(self) -> None:
        for process in self.all:
            if self._is_busy(process) and not (self.violations or self.lane_is_over):
                text = f"{process.name()} has not come to an end {PATIENCE_S} s after the last fault"
                self.violations.append(Violation("C-1", text))
        members = {epoch: parts_of(decision, LANE) for epoch, decision in self.decisions.items()}
        stalled = {(r.slot, r.incarnation) for d in self.decisions.values() for r in d.removed if r.cause in MAY_LIVE}
        lost = {(r.slot, r.incarnation) for d in self.decisions.values() for r in d.removed if r.cause == UNREACHABLE}
        known = {(m.nonce, m.slot, m.incarnation) for d in self.decisions.values() for m in d.members}
        # by decisions: one that died as it came in may never have heard which incarnation it is
        ended = {who[1:] for who in known if self.processes[who[0]].dead or self.processes[who[0]].ended}
        # a newcomer waits for calls that it does not see, and these take time; of those who disagree either may go
        baseless = stalled - (lost & ended) - self.unseen
        if self.calm and baseless:
            self.violations.append(Violation("V-7", f"voted out without a cause: {baseless}"))
        slow = {(r.slot, r.incarnation) for d in self.decisions.values() for r in d.removed if r.cause == STALLED}
        slow -= {who[1:] for who in known if self.processes[who[0]].dead}
        if slow and not self.has_accused and self.plan.has_answers_in_time():
            self.violations.append(Violation("V-7", f"slow, and voted out though nobody had accused it: {slow}"))
        seed = self.plan.seed

        def expected(group_id: int, seq: int, slot: int, contributors: dict[int, int]) -> int:
            root = self.shared.roots.get((slot, contributors.get(slot, 0), seq), -1)
            return expected_result(seed, seq, slot, contributors, root)

        def may_shrink(group_id: int, seq: int) -> bool:
            return is_pull(seed, seq)

        cut = stalled | self._put_out() | self._unwitnessed() | self.settlement.untold
        self.violations += check(History(self.records(), members), expected, cut, may_shrink, self._mixed_from())

    def _mixed_from(self) -> float:
        """Return the first call that processes have made with different roots while others were open; else infinity."""
        roots: dict[int, set[int]] = {}
        for (_, _, seq), root in self.shared.roots.items():
            roots.setdefault(seq, set()).add(root)
        mixed = (seq for seq, found in roots.items() if len(found) > 1 and self.plan.window > 1)
        return min(mixed, default=NEVER)

    def _unwitnessed(self) -> set[tuple[int, int]]:
        """Return who has gone with no witness that counts: what it alone had completed is lost with it.

        So it is where the last witness goes before it has told (`Settlement.untold`).
        """
        found: set[tuple[int, int]] = set()
        for epoch, decision in self.decisions.items():
            before, now = parts_of(self.decisions.get(epoch - 1, decision), LANE), parts_of(decision, LANE)
            gone = {(slot, since) for slot, since in before.items() if now.get(slot) != since}
            num_hosts = len({self.host_of(slot) for slot in before})
            stay = [(self.host_of(slot), since) for slot, since in now.items() if before.get(slot) == since]
            for slot, since in gone:
                has_witness = any(host == self.host_of(slot) and came <= since for host, came in stay)
                is_told = num_hosts == 1 or (has_witness and num_hosts <= MAX_WITNESSED_HOSTS)
                if loss_of(decision, slot) != LEFT and not is_told:
                    found.add((slot, since))
        return found

    def _put_out(self) -> set[tuple[int, int]]:
        """Return who was put out of the group and stayed in the job, as slot and since when it had taken part."""
        found = set()
        for epoch, decision in self.decisions.items():
            before, now = self.decisions.get(epoch - 1, decision), parts_of(decision, LANE)
            there = {member.slot for member in decision.members if member in before.members}
            found |= {(slot, since) for slot, since in parts_of(before, LANE).items() if slot in there - now.keys()}
        return found

    def records(self) -> list[Record]:
        """Return all records, each process's in its own order."""
        found: list[Record] = []
        for process in self.all:
            found += process.records
        return found
