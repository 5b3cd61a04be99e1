"""Protocols with one mistake each. The simulator must find every one, or it would not have found ours.

Each is a change of a few lines to an agent, a campaign, a course or an engine. Some were mistakes of our own that the
simulator found; the seeds that found them are kept in tests/sim/seeds.json.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Generator, Iterator, Mapping
from typing import Any

from epee.engine.bootstrap.group_note import Offer
from epee.engine.replication.loss_resolution import Gate
from epee.memory.signals import SEQ_BITS
from epee.view.protocol.agent import BLANK_BOARD, Agent
from epee.view.protocol.decision import has_quorum, parts_of
from epee.view.protocol.events import BoardRead, Effect, Event, HostLost, MessageReceived, Send, Wanted
from epee.view.protocol.messages import (
    DEAD,
    FOREVER,
    NO_BALLOT,
    UNREACHABLE,
    Accept,
    Accepted,
    BoardState,
    Cut,
    Decision,
    GroupState,
    Nack,
    Obituary,
    Prepare,
    Promise,
)
from epee.view.protocol.outcome import CallState, Course, EpochChange, Whole
from epee.view.protocol.proposer import Campaign, Findings, obituary_of

from .history import TIMEOUT
from .lane import Call, Engine
from .plan import Plan
from .words import COMPLETES, FILLED, GAVE, LANE, MOVED, TAG, Mirror, Outbox, Shared
from .world import Process, World

Acks = set[int] | dict[int, tuple[GroupState, ...]]


# ---- the agreement


class _DeathsWithoutBoards(Campaign):
    def _quorum(self, acks: Acks, findings: Findings) -> bool:
        return has_quorum(self.slots, findings.gone, acks)

    def lost_to(self, findings: Findings) -> None:
        return None

    def choose(self, findings: Findings, answer_s: float, wait_limit_s: float) -> Decision | None:
        return self._compose(findings, answer_s, wait_limit_s) if self._quorum(self.promises, findings) else None


class DeathsWithoutBoards(Agent):
    """Counts proofs of death without reading the boards of the dead."""

    campaign_type = _DeathsWithoutBoards

    def _board_read(self, event: BoardRead) -> None:
        pass


class _NoQuorum(Campaign):
    def _quorum(self, acks: Acks, findings: Findings) -> bool:
        return 3 * len(acks) >= len(self.slots)


class CommitWithoutQuorum(Agent):
    """Takes a third for a quorum."""

    campaign_type = _NoQuorum


class _AnyHalf(Campaign):
    def _quorum(self, acks: Acks, findings: Findings) -> bool:
        voters = self.slots - findings.boards.keys()
        return 2 * sum(slot in acks for slot in voters) >= len(voters)


class AnyHalf(Agent):
    """Takes any half for a quorum, not only the one with the lowest slot."""

    campaign_type = _AnyHalf


class _ForgetsAccepted(Campaign):
    def choose(self, findings: Findings, answer_s: float, wait_limit_s: float) -> Decision | None:
        return self._compose(findings, answer_s, wait_limit_s) if self._quorum(self.promises, findings) else None


class ForgetsAccepted(Agent):
    """Proposes its own decision where another was accepted before."""

    campaign_type = _ForgetsAccepted


class AckBeforeWrite(Agent):
    """Answers first and writes its board afterwards."""

    def step(self, event: Event, now: float) -> list[Effect]:
        effects = super().step(event, now)
        return sorted(effects, key=lambda effect: not isinstance(effect, Send))


class NoEpochCheck(Agent):
    """Takes messages about any epoch for messages about its own."""

    def _received(self, event: MessageReceived) -> None:
        message = event.message
        if isinstance(message, Prepare | Promise | Nack | Accept | Accepted) and self.epoch:
            message = message._replace(epoch=self.epoch)
        super()._received(MessageReceived(event.sender, message))


class LateBoardsWitness(Agent):
    """Takes the board of a member that died in a later epoch for a witness of this one (a mistake of ours)."""

    def _board_read(self, event: BoardRead) -> None:
        slot = self.slot_of.get(event.nonce)
        if slot is not None and slot in self.gone and event.state is not None:
            self.boards[slot] = event.state
        super()._board_read(event)


class JoinerBeginsLate(Agent):
    """Begins, as a joiner, with whatever decision it hears of first (a mistake of ours)."""

    def _begin_with(self, sender: bytes, decision: Decision) -> None:
        if self._is_in(decision):
            self._learn(decision)


class JoinerCompleted(Agent):
    """Counts, for a joiner, the calls before its first one as completed (a mistake of ours)."""

    def _told(self, groups: tuple[GroupState, ...]) -> tuple[GroupState, ...]:
        return groups


class _ForgetsParts(Campaign):
    def _compose(self, findings: Findings, answer_s: float, wait_limit_s: float) -> Decision | None:
        decision = super()._compose(findings, answer_s, wait_limit_s)
        if decision is None:
            return None
        return decision._replace(parts=tuple(part for part in decision.parts if abs(part.since) == decision.epoch))


class ForgetsParts(Agent):
    """Keeps who is out of a group for one epoch only."""

    campaign_type = _ForgetsParts


class _AsksNobody(Campaign):
    def _compose(self, findings: Findings, answer_s: float, wait_limit_s: float) -> Decision | None:
        anybody = tuple(want._replace(members=()) if want.out else want for want in findings.wants)
        return super()._compose(findings._replace(wants=anybody), answer_s, wait_limit_s)


class _LeavesTooFew(Campaign):
    def _compose(self, findings: Findings, answer_s: float, wait_limit_s: float) -> Decision | None:
        fewest = tuple(want._replace(least=min(want.least, 1)) for want in findings.wants)
        return super()._compose(findings._replace(wants=fewest), answer_s, wait_limit_s)


class LeavesTooFew(Agent):
    """Puts silent members out of a group however few are left in it."""

    campaign_type = _LeavesTooFew


class AsksNobody(Agent):
    """Puts out of a group without knowing how far those are who stay in it."""

    campaign_type = _AsksNobody


class _AmongWhoeverPromised(Campaign):
    def _compose(self, findings: Findings, answer_s: float, wait_limit_s: float) -> Decision | None:
        decision = super()._compose(findings, answer_s, wait_limit_s)
        if decision is None:
            return None
        pulls = {state.group_id for states in self.promises.values() for state in states if state.is_pull}
        return decision._replace(starts=tuple(s._replace(among=s.group_id in pulls) for s in decision.starts))


class AmongWhoeverPromised(Agent):
    """Lets a call go on among those who stay though not all of them have begun it."""

    campaign_type = _AmongWhoeverPromised


class KeepsWants(Agent):
    """Meets what was wanted in an epoch that is over."""

    def _fresh_epoch(self) -> None:
        wants = getattr(self, "_wants", {})
        super()._fresh_epoch()
        self._wants = wants

    def _wanted(self, event: Wanted) -> None:
        self._note_want(event.want)


class BackCompleted(Agent):
    """Counts, for who comes back into a group, the calls that it missed as completed."""

    def _first_seq(self, group_id: int) -> int:
        return 0


# ---- several hosts


class DeathsByHearsay(Agent):
    """Takes the word that a member on another host has died for all that its board could say."""

    def _obituary(self, sender: bytes, message: Obituary) -> None:
        super()._obituary(sender, message._replace(board=BLANK_BOARD))


class LostIsDead(Agent):
    """Takes a host that cannot be reached for dead, and its members for ones that have promised nothing."""

    def _host_lost(self, event: HostLost) -> None:
        for member in list(self.members.values()):
            if member.host == event.host:
                self._wills[member.nonce] = BLANK_BOARD
                self._proof(member.nonce, DEAD)


class LastWordTooEarly(Agent):
    """Tells of a member's end what its board showed when the epoch began."""

    def _enter(self, decision: Decision) -> None:
        super()._enter(decision)
        self._early = BoardState(decision, NO_BALLOT, NO_BALLOT, None)

    def _obituaries(self) -> list[Obituary]:
        return [obituary_of(self.members[slot], self.gone[slot], self._early) for slot in self._read & self.gone.keys()]


class _NobodyHeard(Campaign):
    def _has_cuts(self, findings: Findings) -> bool:
        return False


class NobodyHeard(Agent):
    """Removes the dead in a job over several hosts with a quorum alone, so cuts can still move."""

    campaign_type = _NobodyHeard


class _PutsOutTheSlow(Campaign):
    def _compose(self, findings: Findings, answer_s: float, wait_limit_s: float) -> Decision | None:
        return super()._compose(findings._replace(mute=self.slots), answer_s, wait_limit_s)


class PutsOutTheSlow(Agent):
    """Removes with a lost host who lives on another one and is slow to answer (a mistake of ours)."""

    campaign_type = _PutsOutTheSlow


class _OwnCut(Campaign):
    def _compose(self, findings: Findings, answer_s: float, wait_limit_s: float) -> Decision | None:
        decision = super()._compose(findings, answer_s, wait_limit_s)
        if decision is None:
            return None
        own = {state.group_id: state.completed for state in self.promises.get(self.ballot.slot, ())}
        cuts = (Cut(c.group_id, own.get(c.group_id, 0), self.ballot.slot) for c in decision.cuts)
        return decision._replace(cuts=tuple(cuts))


class OwnCut(Agent):
    """Takes its own last completed call for that of all."""

    campaign_type = _OwnCut


class _AnyHolder(Campaign):
    def _compose(self, findings: Findings, answer_s: float, wait_limit_s: float) -> Decision | None:
        decision = super()._compose(findings, answer_s, wait_limit_s)
        if decision is None or not decision.members:
            return decision
        last = decision.members[-1].slot
        return decision._replace(cuts=tuple(cut._replace(holder=last) for cut in decision.cuts))


class AnyHolder(Agent):
    """Names as the holder of a cut somebody who may not have completed that call."""

    campaign_type = _AnyHolder


class _LostAreWhole(Course):
    def turn_of(self, decision: Decision) -> EpochChange | None:
        turn = super().turn_of(decision)
        if turn is not None:
            causes = {removal.slot: removal.cause for removal in decision.removed}
            turn.removed = tuple(
                (slot, since, FOREVER if causes.get(slot) == UNREACHABLE else cut) for slot, since, cut in turn.removed
            )
        return turn


class LostAreWhole(Engine):
    """Judges who was lost with its host by what it has seen of it."""

    course_type = _LostAreWhole


class _WitnessedAnyway(Course):
    def _is_witnessed(self, slot: int, before: Collection[int], stay: Container[int]) -> bool:
        stayed = {self._hosts.get(other) for other in before if other in stay}
        return not self._hosts or self._hosts.get(slot) in stayed


class WitnessedAnyway(Engine):
    """Counts, of three hosts, all that a witness could tell, who may be lost when it has told one and not the other."""

    course_type = _WitnessedAnyway


class JudgesUntold(Engine):
    """Judges calls before its host has been told all that lost ranks of others had said."""

    def step(self, now: float, budget: int) -> bool:
        self.unheard.clear()
        return super().step(now, budget)


class TakesLostBack(Engine):
    """Takes back what it has put into a call that others complete, where a part has not come here (our mistake)."""

    def _lose(self, call: Call) -> None:
        self._clear(call)
        super()._lose(call)


# ---- newcomers over hosts


class _OpensEarly(Gate):
    def is_open(self, offers: Callable[[], Mapping[int, Offer]]) -> bool:
        super().is_open(offers)
        return not self._loss_resolution.unsettled


class OpensEarly(Engine):
    """Takes a view with newcomers over when it needs nothing of the lost itself, though others may."""

    gate_type = _OpensEarly


class _TurnsEarly(Gate):
    def is_open(self, offers: Callable[[], Mapping[int, Offer]]) -> bool:
        if not self._has_turned:
            self._tell(self.epoch)
            self._has_turned = True
        return super().is_open(offers)


class TurnsEarly(Engine):
    """Says that it has taken note of a view with newcomers before it has all that those lost by it had said."""

    gate_type = _TurnsEarly


class _WaitsForTheLost(Gate):
    def hear(self, decision: Decision) -> None:
        self.newest = max(self.newest, decision.epoch)


class WaitsForTheLost(Engine):
    """Waits at the gate for those, too, whom a later view has removed."""

    gate_type = _WaitsForTheLost


class ReadsNewcomersEarly(Engine):
    """Reads a newcomer in the place of a lost one before the gate opens, so judges the lost one by its words."""

    def _may_take(self, decision: Decision) -> bool:
        may_take = super()._may_take(decision)
        if not may_take and self.is_gated:
            before = self._before()
            for slot, since in parts_of(decision, LANE).items():
                if before.get(slot, since) != since:
                    self._read_instead(slot, before[slot], since)
        return may_take

    def _read_instead(self, slot: int, old: int, new: int) -> None:
        for (epoch, known), since in self.incarnations.items():
            if (known, since) == (slot, old):
                peer_regions = self.shared.peer_regions(slot, new, epoch)
                self.mirrors[slot, epoch] = self.shared.copy_of(peer_regions, 0.0, slot, new, self.slot)


# ---- the groups


class _ByWords(Course):
    def _goes_on(self, seq: int, epoch: int, turn: EpochChange, whole: Whole) -> bool:
        members = self._members.get(epoch, {})
        involved = [slot for slot, incarnation, _ in turn.removed if members.get(slot, (0, 0))[0] == incarnation]
        return super()._goes_on(seq, epoch, turn, whole) or all(whole(slot, epoch, seq) for slot in involved)


class _HitsOnTheWay(Course):
    def place(
        self, seq: int, whole: Whole, epoch: int | None = None, has_root: Callable[[int], bool] = bool
    ) -> CallState:
        place = super().place(seq, whole, epoch)
        rootless = next((view for view in place.via if not has_root(view)), 0)
        return place._replace(rootless=rootless, failed=place.failed and not rootless)

    def ended_on_the_way(self, seq: int, epoch: int) -> None:
        pass


class HitsOnTheWay(Engine):
    """Takes a call that a first loss has ended, as its root was lost, for what a second one has hit (our mistake)."""

    course_type = _HitsOnTheWay


class MovesOnWithoutRoot(Engine):
    """Runs a call whose root is lost in the newest view that it knows, and ends it there."""

    def _place(self, call: Call) -> CallState:
        place = super()._place(call)
        return place._replace(rootless=self.course.turns[-1].epoch) if place.rootless else place


class ShowsTheForgotten(Engine):
    """Shows a program the view below which no call is asked about any more (a mistake of ours)."""

    def shown(self) -> tuple[int, tuple[int, ...]]:
        epoch = max(self.course.base, self.joined_in)
        return epoch, self.course.contributors(self.issued + 1, epoch)


class _MissesTheFirst(Course):
    def forget(self, done: int, epoch: int = FOREVER) -> None:
        super().forget(done)


class MissesTheFirst(Engine):
    """Asks about a call from the newest view that calls before it have reached, and so misses its end (our mistake)."""

    course_type = _MissesTheFirst

    def _place(self, call: Call) -> CallState:
        place = super()._place(call)
        is_there = call.root < 0 or place.failed or call.root in self.course.contributors(call.seq, place.epoch)
        return place if is_there or place.rootless else place._replace(rootless=place.epoch)


class WaitsForTheGone(Engine):
    """Waits for room for the header of a call that was given up, also where a dead process keeps it (our mistake)."""

    def _has_lost_one_of(self, call: Call) -> bool:
        return False


class MixesRoots(Engine):
    """Completes a call though others have called with another root."""

    def _roots_differ(self, call: Call, peers: list[Mirror]) -> bool:
        return False


class CutIgnored(Engine):
    """Judges who was voted out alive by what its outbox shows."""

    course_type = _ByWords


class _Intersection(Course):
    def _goes_on(self, seq: int, epoch: int, turn: EpochChange, whole: Whole) -> bool:
        return not turn.removed and super()._goes_on(seq, epoch, turn, whole)


class Intersection(Engine):
    """Lets a contribution count only where it was already used: a call that is not completed here runs again."""

    course_type = _Intersection


class _NothingClaimed(Course):
    def claimed(self, issued: int) -> int:
        return issued


class BegunSomewhere(Engine):
    """Says that it has begun a call, which it has only begun in an epoch that is over (a mistake of ours)."""

    def state(self) -> tuple[GroupState, ...]:
        (state,) = super().state()
        last = self.calls[-1] if self.calls else None
        is_pull = last is not None and last.kind.is_pull and state.completed < self.issued and not self.shared.raises
        return (state._replace(is_pull=is_pull),)


class LooksAtTheAbsent(Engine):
    """Takes the missing header of one without a part in the call for the end of it."""

    is_looking = False

    def parties(self, call: Call) -> tuple[int, ...]:
        slots = super().parties(call)
        return (*call.place.without, *slots) if self.is_looking else slots

    def _verdict(self, call: Call) -> Generator[int, None, bool]:
        self.is_looking = True
        try:
            return (yield from super()._verdict(call))
        finally:
            self.is_looking = False


class NothingClaimed(Engine):
    """Lets a joiner begin with a call that is bound to fail elsewhere (a mistake of ours)."""

    course_type = _NothingClaimed


class _OutIsDead(Course):
    def turn_of(self, decision: Decision) -> EpochChange | None:
        turn = super().turn_of(decision)
        if turn is not None:
            there = {member.slot for member in decision.members}
            turn.removed = tuple((slot, since, FOREVER if slot in there else cut) for slot, since, cut in turn.removed)
        return turn


class OutIsDead(Engine):
    """Judges who was put out of the group by what its outbox shows, as if it wrote no more."""

    course_type = _OutIsDead


class BackFromTheStart(World):
    """Lets who comes back into the group begin with its first call."""

    def _begin(self, process: Process, since: int, view: Decision, joined: bool) -> None:
        super()._begin(process, since, view, joined and process.engine is None)


class BareFlag(Engine):
    """Signals with a flag instead of a tag."""

    def tag(self, seq: int, epoch: int) -> int:
        return 1


class ResetSeq(Engine):
    """Counts the calls of each epoch from its own first call in it."""

    def tag(self, seq: int, epoch: int) -> int:
        first = self.own(epoch).first_seq or seq
        return epoch << SEQ_BITS | (seq - first + 1)


class TagFirst(Engine):
    """Publishes the tag before the payload."""

    def _publish(self, call: Call, peer_regions: Outbox) -> Iterator[int]:
        cell = self.cell(call.seq)
        peer_regions.store(self.now, cell + FILLED, 1)
        peer_regions.store(self.now, cell + TAG, self.tag(call.seq, call.place.epoch))
        yield MOVED
        yield from super()._publish(call, peer_regions)


class EarlyReuse(Engine):
    """Writes a cell again without waiting for its readers."""

    def _has_room(self, call: Call, peer_regions: Outbox) -> bool:
        return True


class TagsOnce(Engine):
    """Looks at tags before it reads only (a mistake of ours, with one outbox for all epochs)."""

    def _still_there(self, peers: list[Mirror], cell: int, tag: int) -> bool:
        return True


class ArrivedOnly(Engine):
    """Judges the dead by the stores that have arrived so far."""

    def _is_dead(self, dead: int, incarnation: int) -> None:
        pass


class StartsAtCompleted(Engine):
    """Tells how many calls are completed where the number issued is asked for."""

    def state(self) -> tuple[GroupState, ...]:
        return (GroupState(LANE, self.completed, self.completed),)


class PublishesEarly(Engine):
    """Publishes for newcomers before what they do not see has ended (a mistake of ours)."""

    def _may_begin_more(self) -> bool:
        return len({call.place.epoch for call in self.calls}) == 1


class KeepsItsHeader(Engine):
    """Ends a call with an error and leaves its header valid, and who comes later completes it (a mistake of ours)."""

    def give_up(self, call: Call, status: int = TIMEOUT) -> None:
        if call.is_published and not call.is_decided:
            epoch = call.place.epoch
            self.own(epoch).store(self.now, self.cell(call.seq) + GAVE, self.tag(call.seq, epoch))
            self._end(call, status, epoch)
        else:
            super().give_up(call, status)


class CompletesUnasked(Engine):
    """Completes a call when everything has arrived, without a last look for withdrawals."""

    def _decide(self, call: Call, peers: list[Mirror]) -> Generator[int, None, bool]:
        call.is_decided = True
        self.own(call.place.epoch).store(self.now, self.cell(call.seq) + GAVE, COMPLETES)
        yield MOVED
        return True


class NewsTakenFirst(Engine):
    """Takes a decision off the list before it is taken over, so that an exception loses it (a mistake of ours)."""

    def take_news(self) -> None:
        while self.news:
            decision = self.news.popleft()
            for _ in self._take_over(decision):
                if self.raise_after == 0:
                    self.raise_after = -1
                    self.interrupt()
                    return
                self.raise_after -= self.raise_after > 0


class ForgetsGivenUp(Engine):
    """Knows nothing more of a call that has ended here without a result (a mistake of ours)."""

    def _end(self, call: Call, status: int, epoch: int, contributors: int = 0, digest: int = 0) -> None:
        super()._end(call, status, epoch, contributors, digest)
        self.unsettled.clear()


class OneArena(Shared):
    """Uses the same memory in every epoch and for every incarnation."""

    def key(self, slot: int, incarnation: int, epoch: int) -> tuple[int, int, int]:
        return (slot, 0, 0)


class NoFreeze(World):
    """Lets the groups go on after a promise."""

    freezes = False


MUTANTS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        DeathsWithoutBoards,
        CommitWithoutQuorum,
        AnyHalf,
        ForgetsAccepted,
        AckBeforeWrite,
        NoEpochCheck,
        LateBoardsWitness,
        JoinerBeginsLate,
        ForgetsParts,
        AsksNobody,
        KeepsWants,
        LeavesTooFew,
        BackCompleted,
        OutIsDead,
        BackFromTheStart,
        DeathsByHearsay,
        LostIsDead,
        LastWordTooEarly,
        NobodyHeard,
        PutsOutTheSlow,
        OwnCut,
        AnyHolder,
        LostAreWhole,
        WitnessedAnyway,
        JudgesUntold,
        TakesLostBack,
        OpensEarly,
        TurnsEarly,
        WaitsForTheLost,
        ReadsNewcomersEarly,
        HitsOnTheWay,
        MovesOnWithoutRoot,
        ShowsTheForgotten,
        MixesRoots,
        MissesTheFirst,
        WaitsForTheGone,
        CutIgnored,
        Intersection,
        AmongWhoeverPromised,
        BegunSomewhere,
        LooksAtTheAbsent,
        NothingClaimed,
        BareFlag,
        ResetSeq,
        TagFirst,
        EarlyReuse,
        TagsOnce,
        ArrivedOnly,
        StartsAtCompleted,
        JoinerCompleted,
        PublishesEarly,
        KeepsItsHeader,
        CompletesUnasked,
        NewsTakenFirst,
        ForgetsGivenUp,
        OneArena,
        NoFreeze,
    )
}


def make_world(plan: Plan, mutant: str = "", trace: Any = None) -> World:
    """Return a world of `plan`, with the mistake named `mutant` (a key of `MUTANTS`), or with none."""
    kind = MUTANTS[mutant] if mutant else World
    if issubclass(kind, World):
        return kind(plan, trace)

    class Mutated(World):
        agent_type = kind if issubclass(kind, Agent) else World.agent_type
        engine_type = kind if issubclass(kind, Engine) else World.engine_type
        shared_type = kind if issubclass(kind, Shared) else World.shared_type

    return Mutated(plan, trace)
