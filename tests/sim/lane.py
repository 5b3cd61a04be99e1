"""A group_id in miniature: an engine that obeys `protocol/outcome.py` over outboxes that readers see late (`words.py`).

The protocol is that of `engine/operation.py` over `engine/outbox.py`: payload, header words, tag; FILLED,
MERGED, DRAINED per round; CONSUMED before a cell is used again; a new set of outboxes per epoch. Calls are generators
that yield after every store and every load, so a crash, a stop or another process's step can fall between any two.

In runs of odd seeds a process has one outbox for all epochs, as in the backend; in the others a new one for each. With
one outbox a call that moves to another epoch is written again in the same cell: its tag is cleared before, and who
reads looks at the tags once more before it takes the result for good. So a process that was stopped while it read,
and voted out, finds no tag that it waits for.

A call that is given up (a time-out, an exception that comes out of it) is withdrawn as in
`engine/withdrawal.py`: GAVE, then TAG cleared behind a fence, which every reader sees before this process loads
anything more. What it loads then is at least what any other reader has seen, as on x86-64, where a store that one core
sees is seen by all. How the call ends is said by the product's rule (`protocol/withdrawal.py`). A call that was not
published is refused. Where its end stays open it is unclaimed: the program issues nothing more before it is known.

A call that ended here without a result may still be open at another process, which asks about it when a member dies.
So this one asks about it, too, and completes nothing after it that this member has not settled it for (`backend/
unresolved.py`).

Calls are of several kinds (`kinds.py`).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Generator, Iterator
from functools import partial

from epee.engine.replication.loss_resolution import Gate
from epee.memory.signals import SEQ_BITS
from epee.view.protocol.decision import parts_of
from epee.view.protocol.messages import DEAD, FOREVER, LEFT, Decision, GroupState
from epee.view.protocol.outcome import CallState, Course, is_whole, loss_of
from epee.view.protocol.withdrawal import End, Stance, end_of

from .gates import gate_of
from .history import DONE, FAILED, GAVE_UP, GONE, ISSUED, LOST, OK, ROOTLESS, SHOWN, TIMEOUT, Record
from .kinds import PRIME, PUTS, TAKES, Kind, kind_of, root_of, value
from .words import (
    BLOCKED,
    CELL_WORDS,
    COMPLETES,
    CONSUMED,
    DRAINED,
    FILLED,
    GAVE,
    HALF_WORDS,
    LANE,
    LOOKED,
    MAX_SLOTS,
    MERGED,
    MOVED,
    NUM_CELLS,
    PAYLOAD,
    REFUSAL,
    ROOT,
    SEQ_MASK,
    SHARES,
    TAG,
    VIEW,
    Mirror,
    Outbox,
    Shared,
)


class Call:
    """A call that was issued and has not ended.

    Attributes:
        given_up: the status that it ends with if it fails; 0 while nobody has given it up here.
        is_completing: it was withdrawn here, but a peer has completed it.
        is_decided: this process has said that it completes it.
        is_told: its program got an error before its end was known.
        is_refused: it was given up before it was published: it has ended, but for a header.
        members: the slots that take part in it in the epoch in which it runs.
        root: the slot of its root, of a kind that has one; else -1.
        undecided: who may still complete it, at the last look of one that has withdrawn it.
    """

    __slots__ = (
        "given_up",
        "is_completing",
        "is_decided",
        "is_published",
        "is_refused",
        "is_told",
        "kind",
        "members",
        "moved_at",
        "need",
        "place",
        "root",
        "seq",
        "steps",
        "undecided",
    )

    def __init__(self, seq: int, kind: Kind, now: float, place: CallState, members: tuple[int, ...], root: int) -> None:
        self.given_up, self.root = 0, root
        self.undecided: list[int] = []
        self.is_completing = self.is_decided = self.is_told = self.is_refused = False
        self.seq = seq
        self.kind = kind
        self.place, self.members = place, members
        self.steps: Iterator[int] | None = None
        self.is_published = False
        self.need = (TAG, 0)
        self.moved_at = now


class Engine:
    """The calls of one process in the group, as long as it takes part; who comes back has a new one.

    Attributes:
        incarnation: since when the process takes part in the group (`decision.parts_of`).
        is_out: it takes part no more.
        completed: the last call that ended with a result; `issued` the last that was issued.
        ended: the last call that ended, in whatever way.
        unheard: who was removed, and may have said more than is here; no call is judged or moves before it is told.
        gate: of views with newcomers, in runs that have it.
        turned: up to which view it needs nothing more of those who were lost.
        placed: the view in whose placement it is, the newest with newcomers that it has taken over.
        joined_in: the epoch in which it came; 0 for founders.
    """

    course_type: type[Course] = Course
    gate_type: type[Gate] = Gate

    def __init__(self, shared: Shared, slot: int, incarnation: int, view: Decision, joined: bool) -> None:
        self.shared = shared
        self.slot = slot
        self.incarnation = incarnation
        self.is_out = False
        self.records: list[Record] = []
        self.course = self.course_type(LANE, view, shared.raises, None, joined, shared.hosts)
        self.incarnations = {(view.epoch, slot): since for slot, since in parts_of(view, LANE).items()}
        self.epoch = view.epoch
        self.completed = self.issued = self.ended = self.course.first_seq - 1
        self.calls: list[Call] = []
        self.unsettled: deque[Call] = deque(maxlen=NUM_CELLS)  # ended without a result since the last one
        self.mirrors: dict[tuple[int, int], Mirror] = {}
        self.dead: set[tuple[int, int]] = set()
        self.removed: set[tuple[int, int]] = set()
        self.unheard: set[tuple[int, int]] = set()
        self.must_judge = self.is_changing = joined
        self.news: deque[Decision] = deque()
        self.raise_after = -1  # steps of taking a decision over before an exception comes out of it; below 0: none
        self.now = 0.0
        self.own(view.epoch).store(0.0, VIEW, view.epoch)
        self.turned = self.placed = view.epoch
        self.joined_in = view.epoch if joined else 0
        tell = partial(shared.turns, self)
        self.gate = gate_of(self.gate_type, self, LANE, MAX_SLOTS, tell) if shared.is_gated else None
        if joined:
            self.own(view.epoch).store(0.0, CONSUMED, self.issued)

    # ---- memory

    def own(self, epoch: int) -> Outbox:
        """Return this process's outbox of an epoch."""
        return self.shared.peer_regions(self.slot, self.incarnation, epoch)

    def look(self, slot: int, epoch: int) -> list[int]:
        """Return the words of another outbox as this process sees them now."""
        return self.mirror(slot, epoch).sync(self.now)

    def mirror(self, slot: int, epoch: int) -> Mirror:
        """Return this process's copy of another outbox."""
        mirror = self.mirrors.get((slot, epoch))
        if mirror is None:
            incarnation = self.incarnations[epoch, slot]
            lag = self.shared.rng.random() * self.shared.max_lag
            peer_regions = self.shared.peer_regions(slot, incarnation, epoch)
            mirror = self.mirrors[slot, epoch] = self.shared.copy_of(peer_regions, lag, slot, incarnation, self.slot)
            if (slot, incarnation) in self.dead:
                mirror.see_all()
        return mirror

    def tag(self, seq: int, epoch: int) -> int:
        """Return the tag of a call in an epoch."""
        return epoch << SEQ_BITS | seq

    def cell(self, seq: int) -> int:
        """Return the first word of a call's cell."""
        return seq % NUM_CELLS * CELL_WORDS

    def whole(self, slot: int, epoch: int, seq: int) -> bool:
        """Return whether a slot's contribution is all there, or its word that there will be none (more)."""
        words, cell, kind = self.look(slot, epoch), self.cell(seq), kind_of(self.shared.seed, seq)
        wanted = self.tag(seq, epoch)
        if words[CONSUMED] >= seq or words[cell + GAVE] == wanted:
            return True
        if words[cell + TAG] == wanted and words[cell + REFUSAL]:
            return True
        return is_whole(
            words[cell + TAG], wanted, words[cell + FILLED], words[cell + MERGED], kind.rounds, kind.is_two_phase
        )

    # ---- what the user and the agent do

    def issue(self, now: float) -> None:
        """Issue the next call."""
        self.now = now
        kind, root = kind_of(self.shared.seed, self.issued + 1), -1
        planned_in, slots = self.shown()
        if kind.root:
            root = root_of(self.shared.seed, self.issued + 1, slots)
            self.shared.roots[self.slot, self.incarnation, self.issued + 1] = root
        self.issued += 1
        call = Call(self.issued, kind, now, CallState(planned_in, False), slots, root)
        call.steps = self._steps(call)
        self.records.append(Record(now, self.slot, self.incarnation, ISSUED, 0, LANE, call.seq, self.epoch))
        self.calls.append(call)
        self.must_judge |= self.is_changing

    def shown(self) -> tuple[int, tuple[int, ...]]:
        """Return the epoch and the slots with which the next call is planned, as in `EpochRegions._next_regions`.

        They are the active ranks that a program is shown before that call.
        """
        epoch = max(self.course.planned_in(self.through() + 1), self.joined_in)
        return epoch, self.course.contributors(self.issued + 1, epoch)

    def state(self) -> tuple[GroupState, ...]:
        """Return what a promise says of the group; decisions that were not taken over yet speak for calls as well."""
        is_decided = bool(self.calls) and self.calls[0].is_decided
        completed = self.calls[0].seq if is_decided else self.completed
        course = copy.deepcopy(self.course) if self.news else self.course
        for decision in self.news:
            if decision.epoch > self.epoch:
                course.add(decision)
        last = self.calls[-1] if self.calls else None
        is_open = (
            last is not None
            and last.kind.is_pull
            and last.is_published
            and completed < self.issued
            and not (self.news or self.unsettled)
        )
        is_pull = is_open and not self.shared.raises
        return (GroupState(LANE, completed, course.claimed(self.issued), is_pull),)

    def decide(self, decision: Decision, now: float) -> None:
        """Hear of a decision and take it over; an exception may come between any two steps of that."""
        self.now = now
        self.news.append(decision)
        self.take_news()

    def take_news(self) -> None:
        """Take over what was decided, in order; every step may run again after an exception."""
        while self.news and self._may_take(self.news[0]):
            for _ in self._take_over(self.news[0]):
                if self.raise_after == 0:
                    self.raise_after = -1
                    self.interrupt()
                    return
                self.raise_after -= self.raise_after > 0
            self.news.popleft()

    @property
    def is_gated(self) -> bool:
        """True while a view waits for the gate: nothing is judged, begun or completed."""
        return self.gate is not None and self.gate.epoch > 0

    @property
    def heard(self) -> int:
        """The newest view that this engine has heard of while it drives the group_id."""
        return max(self.epoch, 0 if self.gate is None else self.gate.newest)

    def _may_take(self, decision: Decision) -> bool:
        """Return whether a view may be taken over, as in `GroupMembership._may_take`."""
        gate = self.gate
        if gate is None or decision.epoch <= self.epoch or not self._brings_in(decision):
            return True
        if gate.begin(decision.epoch):
            self._note_removed(decision)
            gate.begun(decision)
        for later in list(self.news)[1:]:
            gate.hear(later)
        return gate.is_open(lambda: self.shared.told(self))

    def _before(self) -> dict[int, int]:
        return {slot: since for (epoch, slot), since in self.incarnations.items() if epoch == self.epoch}

    def _brings_in(self, decision: Decision) -> bool:
        before = self._before()
        return any(before.get(slot) != since for slot, since in parts_of(decision, LANE).items())

    def _note_removed(self, decision: Decision) -> None:
        """Have all told that those have said whom a decision removes."""
        parts = parts_of(decision, LANE)
        for slot, since in self._before().items():
            if parts.get(slot) != since:
                self.removed.add((slot, since))
                if loss_of(decision, slot) in (DEAD, LEFT):
                    self._is_dead(slot, since)
                if not self.shared.settle(self, slot, since):
                    self.unheard.add((slot, since))

    def _take_over(self, decision: Decision) -> Iterator[None]:
        """Apply a decision: find out for every pending call where it stands now."""
        if decision.epoch <= self.epoch:
            return
        yield
        parts = parts_of(decision, LANE)
        self.incarnations.update(((decision.epoch, slot), since) for slot, since in parts.items())
        yield
        self._note_removed(decision)
        yield
        self.own(decision.epoch)
        for peer_regions in self.shared.boxes_of(self.slot, self.incarnation):
            peer_regions.store(self.now, VIEW, decision.epoch)
        if self.course.add(decision):
            self.must_judge = self.is_changing = True
        if self.gate is not None and self._brings_in(decision):
            self.placed = decision.epoch
            self.gate.end()
        self.epoch = decision.epoch
        self._say_through()

    def heed(self) -> None:
        """Find out where the oldest call stands, if there is news of that and all is here that was said before.

        As `heed` in `engine/membership/call_outcome.py`: of the others it is asked when they are the oldest.
        """
        while self.must_judge and not (self.unheard or self.is_gated):
            self.must_judge = False
            self._ask_again()
            if self.calls:
                self._settle(self.calls[0])  # where it ends, the next one is to be judged

    def _ask_again(self) -> None:
        """Ask about calls that have ended here, before any later one."""
        for past in list(self.unsettled):
            past.place = self._place(past)
            if past.place.rootless:
                self.course.ended_on_the_way(past.seq, past.place.rootless)
            if past.place.rootless or past.place.failed:
                self.unsettled.remove(past)

    def put_out(self, now: float) -> None:
        """Take no part any more: what is pending ends with an error."""
        self.now, self.is_out = now, True
        for call in self.calls:
            self.ended = call.seq
            where = (LANE, call.seq, self.epoch)
            self.records.append(Record(now, self.slot, self.incarnation, DONE, GONE, *where))
        self.calls = []
        self.news.clear()

    def _is_dead(self, dead: int, incarnation: int) -> None:
        """Who knows that a writer is dead sees all that it has stored."""
        self.dead.add((dead, incarnation))
        for (slot, epoch), mirror in self.mirrors.items():
            if slot == dead and self.incarnations[epoch, slot] == incarnation:
                mirror.see_all()

    def _place(self, call: Call) -> CallState:
        def has_root(epoch: int) -> bool:
            is_before = epoch < call.place.epoch
            return call.root < 0 or is_before or call.root in self.course.contributors(call.seq, epoch)

        ran_in = call.place.epoch if max(call.place.epoch, self.course.base) > self.joined_in else None
        return self.course.place(call.seq, self.whole, ran_in, has_root)

    def parties(self, call: Call) -> tuple[int, ...]:
        """Return the slots with a part in a call where it stands, ascending."""
        return tuple(slot for slot in call.members if slot not in call.place.without)

    def _settle(self, call: Call) -> None:
        if call.is_decided or call.is_refused:
            return
        place = self._place(call)
        if place.rootless:
            self._clear(call)
            call.is_told = False  # for all it has ended, so nobody asks about it any more
            self.course.ended_on_the_way(call.seq, place.rootless)
            self._end(call, ROOTLESS, place.rootless, 1 << call.root)
        elif call.is_told and place.via:  # nobody waits for it any more
            self._clear(call)
            self._end(call, call.given_up, call.place.epoch)
        elif place.failed:
            self._clear(call)
            self._end(call, FAILED, place.epoch)
        elif place.epoch != call.place.epoch:
            self._renew(call, place)
        elif place.without != call.place.without:  # it goes on among those who remain
            call.place, call.undecided, call.moved_at = place, [], self.now
            call.steps = self._go_on(call, self.own(place.epoch))
        if call in self.calls and self._is_lost_here(call):
            self._lose(call)

    def _renew(self, call: Call, place: CallState) -> None:
        """Run a call again in a later epoch."""
        call.place, call.members = place, self.course.contributors(call.seq, place.epoch)
        call.undecided = []
        call.is_published = call.is_completing = False
        call.given_up = 0
        call.steps = self._steps(call)
        call.moved_at = self.now

    def _is_lost_here(self, call: Call) -> bool:
        """Return whether a part of a call that counts, because somebody has completed it, has not come to this host."""
        epoch, where = call.place.epoch, self.shared.hosts
        return any(
            (slot, self.incarnations[epoch, slot]) in self.removed
            and where.get(slot) != where.get(self.slot)
            and not self.whole(slot, epoch, call.seq)
            for slot in self.parties(call)
        )

    def _lose(self, call: Call) -> None:
        """End a call that others may complete: what this process has put into it stays for them."""
        if call.is_published:
            self.own(call.place.epoch).store(self.now, self.cell(call.seq) + GAVE, COMPLETES)
        self._end(call, LOST, call.place.epoch)

    def _clear(self, call: Call) -> None:
        """A call that a change of the view has ended: who has not heard of that must not complete it."""
        if call.is_published:
            peer_regions, cell = self.own(call.place.epoch), self.cell(call.seq)
            peer_regions.store(self.now, cell + GAVE, -self.tag(call.seq, call.place.epoch))
            peer_regions.store(self.now, cell + TAG, 0)

    def _end(self, call: Call, status: int, epoch: int, contributors: int = 0, digest: int = 0) -> None:
        self.calls.remove(call)
        self.ended = max(self.ended, call.seq)
        if status == OK:
            self.completed = call.seq
            self.unsettled = deque((past for past in self.unsettled if past.seq > call.seq), NUM_CELLS)
        elif call.is_told or status not in (FAILED, LOST, ROOTLESS):
            self.unsettled.append(call)
        self._say_through()
        record = Record(
            self.now, self.slot, self.incarnation, DONE, status, LANE, call.seq, epoch, contributors, digest
        )
        self.records.append(record)
        through = self.through()  # of what is unsettled later decisions are still asked
        epoch = min((call.place.epoch for call in (*self.unsettled, *self.calls)), default=FOREVER)
        self.course.forget(min(through, self.unsettled[0].seq - 1) if self.unsettled else through, epoch)
        self.is_changing = self._is_changing()
        self.must_judge |= self.is_changing
        if self.shared.shows and status in (OK, ROOTLESS) and not self.calls:
            shown_in, slots = self.shown()
            mask, where = sum(1 << slot for slot in slots), (LANE, call.seq, shown_in)
            self.records.append(Record(self.now, self.slot, self.incarnation, SHOWN, 0, *where, mask))

    def _say_through(self) -> None:
        """Say in all outboxes of this process up to which call it is through."""
        through = self.through()
        for peer_regions in self.shared.boxes_of(self.slot, self.incarnation):
            if through > peer_regions.words[CONSUMED]:
                peer_regions.store(self.now, CONSUMED, through)

    def _is_changing(self) -> bool:
        """Return whether a change of the view is known to come for a call: then calls are begun one by one.

        As CHANGING in `engine/membership/group_membership.py`.
        """
        epoch, course = self.course.base, self.course
        is_over = not (course.turns or self.news or self.unheard) and max(course.starts(epoch)) <= self.through() + 1
        return not is_over or any(call.place.epoch != epoch for call in self.calls)

    def through(self) -> int:
        """Return the last call that this process is through with, and with all before it."""
        return self.calls[0].seq - 1 if self.calls else self.ended

    # ---- moving

    def step(self, now: float, budget: int) -> bool:
        """Do up to `budget` stores and loads; False when everything waits for somebody else."""
        self.now = now
        moved = False
        position = 0
        if self.unheard or self.is_gated:
            return False
        self.heed()
        while budget > 0 and position < len(self.calls):
            call = self.calls[position]
            assert call.steps is not None
            outcome = next(call.steps, None)
            if outcome is None:
                moved = True  # the call has ended
                self.heed()
                continue
            if outcome == BLOCKED:
                if not (call.is_published or call.is_refused) or not self._may_begin_more():
                    break
                position += 1
                continue
            if outcome == MOVED:
                moved = True
                call.moved_at = now
            budget -= 1
        return moved

    def give_up(self, call: Call, status: int = TIMEOUT) -> None:
        """Withdraw a call, or refuse one that was not published; its steps find out how it ends."""
        if call.given_up or call.is_decided:
            return
        call.given_up = status
        if call.is_published:
            peer_regions, cell = self.own(call.place.epoch), self.cell(call.seq)
            peer_regions.store(self.now, cell + GAVE, self.tag(call.seq, call.place.epoch))
            peer_regions.store(self.now, cell + TAG, 0)
            peer_regions.fence()
        else:
            call.is_refused = True
            call.steps = self._refuse(call)  # what was half published gets no tag

    def interrupt(self) -> None:
        """An exception comes out of the youngest call: its program cannot reach it any more, and may repeat it."""
        if self.calls and not self.calls[-1].is_told:
            call = self.calls[-1]
            self.give_up(call, GAVE_UP)
            call.is_told = not call.is_refused

    def may_issue(self) -> bool:
        """Return whether the program can issue a call: the end of an unclaimed one must be known first."""
        return not any(call.is_told for call in self.calls)

    def behind(self, call: Call) -> list[int]:
        """Return the members for which a blocked call waits."""
        if self.unheard or self.is_gated:
            heirs = {self.shared.heir(*lost, self.heard) for lost in self.unheard}
            heirs.update(() if self.gate is None else self.gate.late)
            return sorted(slot for slot in heirs - {self.slot} if (self.epoch, slot) in self.incarnations)
        if call.undecided:
            return call.undecided
        word, least = call.need
        epoch, cell = call.place.epoch, self.cell(call.seq)
        tag = self.tag(call.seq, epoch)
        slots = []
        for slot in self.parties(call):
            if slot == self.slot:
                continue
            words = self.look(slot, epoch)
            if word == CONSUMED:
                late = words[CONSUMED] < least
            else:
                late = words[cell + TAG] != tag or (word != TAG and words[cell + word] < least)
            if late:
                slots.append(slot)
        return slots or self._unsettled_at(call)

    def _steps(self, call: Call) -> Iterator[int]:
        """Run a call in the epoch that it stands in; every `yield` is a point where anything may happen."""
        seq, peer_regions = call.seq, self.own(call.place.epoch)
        while not self._has_room(call, peer_regions):
            yield BLOCKED
        if not peer_regions.first_seq:
            peer_regions.first_seq = seq
        yield from self._publish(call, peer_regions)
        yield from self._go_on(call, peer_regions)

    def _go_on(self, call: Call, peer_regions: Outbox) -> Iterator[int]:
        """Run a call whose own part is published."""
        seq, epoch, kind = call.seq, call.place.epoch, call.kind
        cell, tag = self.cell(seq), self.tag(seq, epoch)
        while self.calls[0] is not call:
            yield BLOCKED
        slots = self.parties(call)
        peers = [self.mirror(slot, epoch) for slot in slots if slot != self.slot]
        call.need = (TAG, tag)
        for peer in peers:
            while not self._has_come(peer, cell, tag, call):
                if peer.words[cell + GAVE] == tag:
                    self.give_up(call, GAVE_UP)
                elif self._ended_without(call):
                    peer_regions.store(self.now, cell + GAVE, tag)
                    self._end(call, GAVE_UP, epoch)
                    return
                if not (yield from self._blocked(call)):
                    return
        if any(peer.words[cell + REFUSAL] for peer in peers if peer.words[cell + TAG] == tag):
            self._end(call, call.given_up or GAVE_UP, epoch)
            return
        if kind.root and self._roots_differ(call, peers):
            peer_regions.store(self.now, cell + GAVE, tag)
            self._end(call, call.given_up or GAVE_UP, epoch)
            return
        total = 1
        for k in range(kind.rounds):
            if k > 1 and not (yield from self._wait(call, peers, DRAINED, k - 1)):  # two halves
                return
            if k:
                yield from self._put(call, peer_regions, k)
                peer_regions.store(self.now, cell + FILLED, k + 1)
            if not (yield from self._wait(call, peers, FILLED, k + 1)):
                return
            if kind.is_two_phase:
                share = yield from self._sum(call, slots, peer_regions, k)
                peer_regions.store(self.now, cell + SHARES + k % 2, share * (self.slot + 3))
                yield MOVED
                peer_regions.store(self.now, cell + MERGED, k + 1)
                if not (yield from self._wait(call, peers, MERGED, k + 1)):
                    return
                for slot in self._sources(call, slots):
                    words = peer_regions.words if slot == self.slot else self.look(slot, epoch)
                    total += words[cell + SHARES + k % 2]
                    yield MOVED
            elif kind.has_payload:
                total += yield from self._sum(call, self._sources(call, slots), peer_regions, k)
            if kind.rounds > 1:
                peer_regions.store(self.now, cell + DRAINED, k + 1)
        if not (yield from self._decide(call, peers)):
            return
        while not self._still_there(peers, cell, tag):
            yield BLOCKED
        mask = sum(1 << slot for slot in slots)
        self._end(call, OK, epoch, mask, total % PRIME or 1)

    def _roots_differ(self, call: Call, peers: list[Mirror]) -> bool:
        """Return whether somebody has called with another root; everybody finds that in the same headers."""
        return any(peer.words[self.cell(call.seq) + ROOT] != call.root for peer in peers)

    def _sources(self, call: Call, slots: tuple[int, ...]) -> tuple[int, ...]:
        """Return the slots whose data this process reads."""
        if call.kind.root == PUTS:
            return (call.root,)
        return slots if call.kind.root != TAKES or call.root == self.slot else ()

    def _has_come(self, peer: Mirror, cell: int, tag: int, call: Call) -> bool:
        words = peer.sync(self.now)
        return words[cell + TAG] == tag or (call.is_completing and words[cell + GAVE] == tag)

    def _blocked(self, call: Call) -> Generator[int, None, bool]:
        """Wait for a peer, or, once the call is withdrawn, for its end; returns False when it has failed."""
        if call.given_up and not call.is_completing:
            return (yield from self._verdict(call))
        yield BLOCKED
        return True

    def _decide(self, call: Call, peers: list[Mirror]) -> Generator[int, None, bool]:
        """Everything has arrived: complete the call unless somebody has withdrawn it; returns False when it failed."""
        cell, tag = self.cell(call.seq), self.tag(call.seq, call.place.epoch)
        while self.unsettled and not call.is_completing and self._unsettled_at(call):
            if not (yield from self._blocked(call)):
                return False
        for peer in peers:
            is_gone = peer.sync(self.now)[cell + TAG] != tag
            yield MOVED
            if is_gone and peer.sync(self.now)[cell + GAVE] == tag and not call.is_completing:
                self.give_up(call, GAVE_UP)
        while call.given_up and not call.is_completing:
            if not (yield from self._verdict(call)):
                return False
        call.is_decided = True
        if not call.is_completing:
            self.own(call.place.epoch).store(self.now, cell + GAVE, COMPLETES)
            yield MOVED
        return True

    def _unsettled_at(self, call: Call) -> list[int]:
        """Return the members of a call that have not settled what ended here before it without a result."""
        epoch, incarnations = call.place.epoch, self.incarnations
        slots = [slot for slot in self.parties(call) if slot != self.slot]
        return [
            slot
            for past in self.unsettled
            for slot in slots
            if past.seq < call.seq
            and incarnations.get((past.place.epoch, slot)) == incarnations[epoch, slot]
            and (slot, incarnations[epoch, slot]) not in self.removed  # what it has left counts for both, or for none
            and not self.whole(slot, past.place.epoch, past.seq)
        ]

    def _verdict(self, call: Call) -> Generator[int, None, bool]:
        """See once how a withdrawn call ends; returns False when it has failed."""
        seq, epoch = call.seq, call.place.epoch
        cell, tag = self.cell(seq), self.tag(seq, epoch)
        stances: dict[int, Stance] = {}
        # before the looks: what the dead have said counts, and all of it is seen from now on (seed 3263017)
        removed = [slot for slot in self.parties(call) if (slot, self.incarnations[epoch, slot]) in self.removed]
        for slot in self.parties(call):
            if slot == self.slot:
                continue
            peer = self.mirror(slot, epoch)
            is_through = peer.coherent(self.now)[CONSUMED] >= seq
            yield LOOKED
            header = peer.coherent(self.now)[cell + TAG]
            yield LOOKED
            mark = peer.coherent(self.now)[cell + GAVE]
            stances[slot] = self._stance(header, mark, tag, is_through, peer.words[cell + REFUSAL] > 0)
            if stances[slot] is Stance.MISSING:
                break  # nobody completes it, so nothing that the others say changes its end
        look = end_of(stances, removed)
        call.undecided = list(look.ranks) if look.end is End.OPEN else []
        if look.end is End.COMPLETES:
            call.is_completing = True
            return True
        if look.end is not End.OPEN:
            self._end(call, call.given_up, epoch)
            return False
        yield BLOCKED
        return True

    @classmethod
    def _stance(cls, header: int, mark: int, tag: int, is_through: bool, is_refused: bool) -> Stance:
        """Return what a cell's words say, as `_stance_of` in `engine/withdrawal.py`.

        Two things differ: no word is ever damaged here, and a cell that has not held the call is used again early.
        """
        if mark == tag:
            return Stance.GAVE_UP
        if mark == -tag:
            return Stance.OPEN
        if cls._never_held(header, tag):
            return Stance.MISSING
        if header != tag:
            return Stance.OPEN
        if mark == COMPLETES:
            return Stance.COMPLETES
        if is_refused:
            return Stance.FAILED
        return Stance.GAVE_UP if is_through else Stance.OPEN

    @staticmethod
    def _never_held(header: int, tag: int) -> bool:
        """Return whether a cell with this TAG has not held the call: only then is it used again so early."""
        return header < tag or header & SEQ_MASK > tag & SEQ_MASK

    def _ended_without(self, call: Call) -> bool:
        """Return whether a peer is through with the call and has put nothing into it, nor ever will."""
        epoch, cell, tag = call.place.epoch, self.cell(call.seq), self.tag(call.seq, call.place.epoch)
        for slot in self.parties(call):
            if slot == self.slot:
                continue
            words = self.look(slot, epoch)
            is_without = words[CONSUMED] >= call.seq and self._never_held(words[cell + TAG], tag)
            is_without &= words[cell + GAVE] != tag
            if is_without and words[VIEW] <= self.epoch:
                return not self.news
        return False

    def _refuse(self, call: Call) -> Iterator[int]:
        """Tell the peers, in its turn, that nothing will come of a call; it ends here.

        Who is lost makes no room: then the peers see that this process is through and has put nothing into it.
        """
        cell, peer_regions = self.cell(call.seq), self.own(call.place.epoch)
        while self.calls[0] is not call or not (self._has_lost_one_of(call) or self._has_room(call, peer_regions)):
            yield BLOCKED
        if not self._has_room(call, peer_regions):
            self._end(call, call.given_up, call.place.epoch)
            return
        peer_regions.first_seq = peer_regions.first_seq or call.seq
        peer_regions.store(self.now, cell + TAG, 0)
        yield MOVED
        for word, what in ((FILLED, 1), (MERGED, 0), (DRAINED, 0), (GAVE, 0), (REFUSAL, 1)):
            peer_regions.store(self.now, cell + word, what)
        peer_regions.store(self.now, cell + TAG, self.tag(call.seq, call.place.epoch))
        self._end(call, call.given_up, call.place.epoch)

    def _still_there(self, peers: list[Mirror], cell: int, tag: int) -> bool:
        """Return whether what was read belonged to the call: nobody writes a cell anew without clearing its tag."""
        return all(tag in (words[cell + TAG], words[cell + GAVE]) for words in (peer.sync(self.now) for peer in peers))

    def _may_begin_more(self) -> bool:
        """Return whether calls behind the oldest one may be published: they run as they were planned."""
        return not self.is_changing

    def _has_lost_one_of(self, call: Call) -> bool:
        epoch = call.place.epoch
        return any((slot, self.incarnations[epoch, slot]) in self.removed for slot in call.members)

    def _has_room(self, call: Call, peer_regions: Outbox) -> bool:
        """Return whether everybody has read what the call's cell held before."""
        past = call.seq - NUM_CELLS
        if not peer_regions.first_seq or past < peer_regions.first_seq:
            return True
        call.need = (CONSUMED, past)
        epoch = call.place.epoch
        if peer_regions.words[CONSUMED] < past:
            return False
        return all(slot == self.slot or self.look(slot, epoch)[CONSUMED] >= past for slot in call.members)

    def _publish(self, call: Call, peer_regions: Outbox) -> Iterator[int]:
        cell = self.cell(call.seq)
        peer_regions.store(self.now, cell + TAG, 0)
        yield from self._put(call, peer_regions, 0)
        for word, what in ((FILLED, 1), (MERGED, 0), (DRAINED, 0), (GAVE, 0), (REFUSAL, 0)):
            peer_regions.store(self.now, cell + word, what)
        if call.kind.root:
            peer_regions.store(self.now, cell + ROOT, call.root)
        yield MOVED
        peer_regions.store(self.now, cell + TAG, self.tag(call.seq, call.place.epoch))
        # as `publish_word` does: who withdraws the call must not miss the header of one that completes it
        peer_regions.fence()
        call.is_published = True

    def _put(self, call: Call, peer_regions: Outbox, k: int) -> Iterator[int]:
        if not call.kind.has_payload or (call.kind.root == PUTS and call.root != self.slot):
            return
        base = self.cell(call.seq) + PAYLOAD + k % 2 * HALF_WORDS
        targets = call.members if call.kind.is_pairwise else (0,)
        for dst in targets:
            what = value(self.slot, self.incarnation, call.seq, k, dst)
            peer_regions.store(self.now, base + 2 * dst, what)
            yield MOVED
            peer_regions.store(self.now, base + 2 * dst + 1, what + 1)

    def _wait(self, call: Call, peers: list[Mirror], word: int, least: int) -> Generator[int, None, bool]:
        """Wait until a counter of all peers is there; returns False when the call has failed meanwhile."""
        cell, epoch = self.cell(call.seq), call.place.epoch
        tag = self.tag(call.seq, epoch)
        call.need = (word, least)
        for peer in peers:
            while True:
                words = peer.sync(self.now)
                if words[cell + word] >= least:
                    break
                if words[cell + GAVE] == tag and words[cell + TAG] != tag:
                    self.give_up(call, GAVE_UP)
                if not (yield from self._blocked(call)):
                    return False
        return True

    def _sum(self, call: Call, slots: tuple[int, ...], peer_regions: Outbox, k: int) -> Generator[int, None, int]:
        """Read everybody's contribution to round `k`, word by word."""
        kind, epoch = call.kind, call.place.epoch
        base = self.cell(call.seq) + PAYLOAD + k % 2 * HALF_WORDS + (2 * self.slot if kind.is_pairwise else 0)
        total = 0
        for slot in slots:
            factor = slot + 3 if kind.is_pairwise else 1
            if slot == self.slot:
                total += (peer_regions.words[base] + peer_regions.words[base + 1]) * factor
                continue
            mirror = self.mirror(slot, epoch)
            for word in (base, base + 1):
                total += mirror.sync(self.now)[word] * factor
                yield MOVED
        return total
