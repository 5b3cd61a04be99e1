"""What decisions mean for the calls of one lane: in which epoch each runs, or that it fails. No words, no clocks.

A lane is a sequence of calls, the same at all its members. Each call runs in one epoch at a time: it is published in
that epoch's outboxes, and those who are members then contribute. A decision that removes members divides the calls:

    up to L   every removed slot has contributed as a whole: they go on where they run, as if nothing had happened
    from L+1  they move to the new epoch and run again without the removed (mode "mask"), or fail at the decision
              (mode "raise": calls up to the last that anybody had issued, at least L+1, so that no failure passes
              unnoticed; later ones run in the new epoch)

While a change of the view is known to come for its calls, a process publishes the oldest one alone. So whoever has
contributed to a call that a newcomer takes part in has contributed to all calls before the newcomer's first, and L
means the same to those who have not seen these calls.

A slot that died has contributed to what its outbox shows as whole; that memory no longer changes, so everybody who
looks sees the same. A slot that was voted out alive counts up to its cut, whatever its memory shows now. L never lies
below a call that a survivor has completed, because completing needs the same words; and it never lies above the last
call that was issued when the lanes were frozen, so who joins need not know about the past.

**AMONG.** In mode "mask" a call that can do without the removed (a combine: what the others hold is theirs) stays where
it runs, among those who remain, if all of these had begun it when they were frozen: the decision says so.

A slot that is put out of the lane, and stays in the job, is like one that was voted out; one that comes back is like
one that joins (`decision.parts_of`). So a member is, for a lane, its slot and the epoch since which it takes part. A
lane of which no member is left is over: nobody knows any more how far it was.

In a lane over several hosts a rank's memory is there for those of its own host; others have what was told them. A dead
slot is *witnessed* if a member that was there before and stays runs on its host: that one tells the other host all that
there is, so it is as above. A member that has come after the dead one may not have seen its memory, so it is none.
Where all members run on one host they all read that memory, and nobody is told: it is as on one host, and the decision
may have no cuts. Where nobody tells, what the others have of it may differ, so it counts up to the cut, like one that
was voted out. So does each dead slot of a lane over three hosts and more: its witness may be lost, too, when it has
told one of the others and not yet another. A slot that has left in order has told all before.

*Settled up to.* No call is completed on a host that has not been told all of a lost slot. So the last call completed,
which each promise tells, says how far a rank had settled whoever was lost before, too, and the next decision needs no
other word: its cut, the highest of these, is what all count the next lost ones up to. With three hosts and more what
counts is so a function of decisions alone, however many witnesses go after each other; what a host may still lack is a
part of a call at or below all cuts. Others have that part, but only as much of it as calls read on their hosts, so it
cannot be had from them: the call ends there with an error of its own (LOST in the simulator), what this rank has put
into it stays, and the next call runs on all. With two hosts, all who are left read one and the same memory.

All of this is a function of decisions and of words that no longer change. Whoever asks later, because it was slow or
has not issued the call yet, finds the same: survivors agree without another message. Calls are asked about in order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

from .decision import parts_of
from .messages import BY_ITSELF, FOREVER, MAY_LIVE, PUT_OUT, Decision, Removal, Start

MAX_WITNESSED_HOSTS = 2  # of those in a lane in which what the dead have left counts
Whole = Callable[[int, int, int], bool]  # (slot, epoch, seq): is the contribution of a slot all there?


class CallState(NamedTuple):
    """The state of a call. `failed`: it ended at the decision of `epoch`; else it runs in `epoch`.

    `via` are the epochs to which it moves, in order. Whoever hears of several decisions at once goes through all of
    them, because a call may find its end on the way, and then it ends there for everybody. `rootless`: the epoch in
    which that is so because its root takes no part; 0: there is none. `without`: slots of its epoch that have no part
    in it (AMONG).
    """

    epoch: int
    failed: bool
    lost: tuple[int, ...] = ()
    via: tuple[int, ...] = ()
    without: tuple[int, ...] = ()
    rootless: int = 0


class EpochChange:
    """A decision that concerns the lane.

    Attributes:
        epoch: the epoch that it began.
        removed: who left the lane: slot, since when it had taken part, and the last seq that counts.
        limit: the last seq that anybody had issued; None when nobody told.
        cap: calls above it are hit whatever the words say: `limit`, or what a later join settles where that is None.
        last: calls up to here fail in mode "raise" when they are hit, beside the first that is. Who came in recently
            does not know whether an older call was the first, so this includes the first call that a newcomer can
            ask about: its first one, or the one after those that fail because of `past`, the `last` before this.
        hit: the first call that moved or failed, once it is known: L + 1.
        among: a call that those who remain had all begun, and that goes on among them if it is hit; 0 for none.
    """

    def __init__(
        self,
        decision: Decision,
        lane: int,
        removed: tuple[Removal, ...],
        starts: list[int],
        past: int,
        unwitnessed: Container[int] = (),
    ) -> None:
        self.epoch = decision.epoch
        self.removed = tuple(
            (r.slot, r.incarnation, cut_of(decision, lane, r, r.slot not in unwitnessed)) for r in removed
        )
        self.limit = issued_before(decision, lane)
        self.cap = self.limit
        newest = max(starts, default=1)
        self.last = max(self.limit or 0, newest, past + 1 if newest > 1 else 0)
        self.hit: int | None = None
        start = start_of(decision, lane)
        self.among = start.seq - 1 if start is not None and start.among else 0

    def limit_to(self, slot: int, cut: int) -> None:
        """Let a removed slot count up to a cut at most: nobody has learned all that it had done."""
        self.removed = tuple((who, since, min(old, cut) if who == slot else old) for who, since, old in self.removed)

    def fails(self, seq: int) -> bool:
        """Return whether call `seq`, which this turn hits, fails in mode "raise"."""
        return bool(self.removed) and (seq == self.hit or seq <= self.last)

    def spoken_for(self, issued: int) -> int:
        """Return the last call that may fail because of this turn."""
        if not self.removed:
            return 0
        if self.limit is not None:
            return max(self.limit + 1, self.last)
        return max(issued + (self.hit is None), self.last)


class Course:
    """The history of one lane as one process needs it.

    Args:
        lane: id of the lane.
        view: the view in which this process begins in the lane: the first one, or the one that took it in.
        raises: mode "raise"; else "mask".
        slots: the slots that belong to the lane, which may become more; None for all.
        joined: this process came in with `view`.
        hosts: slot -> its host, in a lane over several, of members that do not say theirs; None: it is on one host.
    """

    def __init__(
        self,
        lane: int,
        view: Decision,
        raises: bool,
        slots: Container[int] | None = None,
        joined: bool = False,
        hosts: Mapping[int, object] | None = None,
    ) -> None:
        self.lane = lane
        self._hosts = hosts or None
        self._host_of: dict[tuple[int, int], object] = {}  # of (slot, since)
        self.raises = raises
        self.slots = slots
        self.base = view.epoch
        self.turns: list[EpochChange] = []
        self._latest = view.epoch
        self._last = 0
        self._on_the_way = (0, 0)  # the last call that ended on its way, and the epoch: see `ended_on_the_way`
        self.first_seq = first_seq(view, lane) if joined else 1
        self._members = {
            view.epoch: {
                slot: (since, self.first_seq if since == view.epoch else 1)
                for slot, since in parts_of(view, lane).items()
                if self._ours(slot)
            }
        }
        self._note_hosts(view)
        if joined:
            turn = EpochChange(view, lane, self._gone_at(view), [self.first_seq], 0)
            turn.hit = self.first_seq
            self.note(turn)
            self.base = view.epoch - 1

    def _ours(self, slot: int) -> bool:
        return self.slots is None or slot in self.slots

    def add(self, decision: Decision) -> bool:
        """Note the next decision; True when it concerns the lane, so pending calls must be asked about again."""
        turn = self.turn_of(decision)
        if turn is not None:
            self.note(turn)
        return turn is not None

    def turn_of(self, decision: Decision) -> EpochChange | None:
        """Return what the next decision means for the lane, for `note`; None when it does not concern it.

        `contributors` and `starts` can be asked about its epoch from now on; `place` knows of it only after `note`.
        Both may be repeated from any line on.
        """
        if self.turns and self.turns[-1].epoch == decision.epoch:
            return self.turns[-1]
        before = self._members[self._latest]
        start = first_seq(decision, self.lane)
        after: dict[int, tuple[int, int]] = {}
        for slot, since in parts_of(decision, self.lane).items():
            if self._ours(slot):
                old = before.get(slot)
                after[slot] = old if old is not None and old[0] == since else (since, start)
        if after == before:
            return None
        self._note_hosts(decision)
        gone = [(slot, since) for slot, (since, _) in sorted(before.items()) if after.get(slot, (0, 0))[0] != since]
        removed = tuple(Removal(slot, since, loss_of(decision, slot)) for slot, since in gone)
        joins = any(before.get(slot, (0, 0))[0] != incarnation for slot, (incarnation, _) in after.items())
        stay = {slot for slot in after if before.get(slot, (0, 0))[0] == after[slot][0]}
        alone = [removal.slot for removal in removed if not self._is_witnessed(removal.slot, before, stay)]
        turn = EpochChange(decision, self.lane, removed, [start for _, start in after.values()], self._last, alone)
        if joins:
            turn.cap = turn.limit or 0  # everybody was asked: where nobody told of the lane, nobody had issued anything
            for earlier in self.turns:
                if earlier.cap is None:
                    earlier.cap = turn.cap - 1  # see `claimed`: nobody had issued this call
        self._members[decision.epoch] = after
        return turn

    def _note_hosts(self, view: Decision) -> None:
        """Note where the members of a view run."""
        since = parts_of(view, self.lane)
        for member in view.members if self._hosts is not None else ():
            if member.slot in since:
                self._host_of[member.slot, since[member.slot]] = member.host or (self._hosts or {}).get(member.slot)

    def _is_witnessed(self, slot: int, before: Mapping[int, tuple[int, int]], stay: Container[int]) -> bool:
        """Return whether one of those who stay runs on a slot's host, and so has what the slot has left."""
        if self._hosts is None:
            return True
        host_of = {other: self._host_of.get((other, since)) for other, (since, _) in before.items()}
        hosts = {*host_of.values()}
        if len(hosts) == 1:
            return True  # of all that are left: they read its memory, as in a lane that was never elsewhere
        if len(hosts) > MAX_WITNESSED_HOSTS:
            return False
        came = before[slot][0]
        return any(
            where == host_of[slot] and other in stay and before[other][0] <= came for other, where in host_of.items()
        )

    def _gone_at(self, view: Decision) -> tuple[Removal, ...]:
        """Return who left the lane by `view`, as a process sees it that knows no earlier one."""
        since = {part[1:3]: part.since for part in view.parts if part.lane == self.lane}
        gone = [r for r in view.removed if since.get(r[:2], r.incarnation) > 0]
        gone += [Removal(slot, 0, PUT_OUT) for (slot, _), when in since.items() if when == -view.epoch]
        return tuple(sorted(r for r in gone if self._ours(r.slot)))

    def note(self, turn: EpochChange) -> None:
        """Let calls fall behind a turn from now on."""
        if not self.turns or self.turns[-1] is not turn:
            self.turns.append(turn)
        if turn.removed:
            self._last = turn.last
        self._latest = turn.epoch

    def place(
        self, seq: int, whole: Whole, epoch: int | None = None, has_root: Callable[[int], bool] = lambda epoch: True
    ) -> CallState:
        """Return where call `seq` stands. Ask in order of seq; again after `add`, with the `epoch` it ran in so far.

        `has_root`: whether the root of the call takes part in an epoch. Where the call moves to one without it, it ends
        there, so no later turn hits it: it hits the first call after it, as for those who hear of it later.
        """
        epoch = self.base if epoch is None else max(epoch, self.base)
        via: tuple[int, ...] = ()
        without: tuple[int, ...] = ()
        for turn in self.turns:
            if turn.epoch <= epoch:
                continue
            if turn.hit is None and not self._goes_on(seq, epoch, turn, whole):
                turn.hit = seq
            if turn.hit is not None and seq >= turn.hit:
                if self.raises and turn.fails(seq):
                    return CallState(turn.epoch, True, tuple(slot for slot, _, _ in turn.removed), via)
                if seq == turn.hit == turn.among:
                    without += self._missing(seq, epoch, turn, whole)
                    continue
                epoch = turn.epoch
                via, without = (*via, epoch), ()
                if not has_root(epoch):
                    return CallState(epoch, False, (), via, (), epoch)
        return CallState(epoch, False, (), via, without)

    def _goes_on(self, seq: int, epoch: int, turn: EpochChange, whole: Whole) -> bool:
        """Return whether a call that runs in `epoch` needs nothing more from those whom `turn` removed."""
        if turn.cap is not None and seq > turn.cap:
            return False
        return not self._missing(seq, epoch, turn, whole)

    def _missing(self, seq: int, epoch: int, turn: EpochChange, whole: Whole) -> tuple[int, ...]:
        """Return those whom `turn` removed that have not contributed to a call which runs in `epoch`."""
        members, missing = self._members.get(epoch, {}), []
        for slot, incarnation, cut in turn.removed:
            member, start = members.get(slot, (0, 0))
            if member != incarnation or seq < start:
                continue  # it had no part in this call
            if seq > cut or (cut == FOREVER and not whole(slot, epoch, seq)):
                missing.append(slot)
        return tuple(missing)

    def ended_on_the_way(self, seq: int, epoch: int) -> None:
        """Note that call `seq` has ended in `epoch` for everybody (`CallState.rootless`).

        The next call is planned there, also where a later turn has hit an earlier call, given up and still asked about:
        who has not heard of that turn cannot plan it elsewhere. It moves on when it is asked about itself.
        """
        self._on_the_way = (seq, epoch)

    def claimed(self, issued: int) -> int:
        """Return what to tell as the last call issued, where `issued` is the truth.

        In mode "raise" a failure that no call has reported yet fails the next one. That call is spoken for: who joins
        begins after it.
        """
        if not self.raises:
            return issued
        return max([issued, *(turn.spoken_for(issued) for turn in self.turns)])

    def contributors(self, seq: int, epoch: int) -> tuple[int, ...]:
        """Return the slots that take part in call `seq` when it runs in `epoch`, ascending."""
        return tuple(sorted(slot for slot, (_, start) in self._members[epoch].items() if start <= seq))

    def starts(self, epoch: int) -> set[int]:
        """Return the first calls of those who take part in `epoch`; a founder's is 1."""
        return {start for _, start in self._members[epoch].values()}

    def present(self) -> tuple[int, ...]:
        """Return the slots in the newest view, ascending."""
        return tuple(sorted(self._members[self._latest]))

    def passes(self, seq: int, epoch: int) -> bool:
        """Return whether call `seq` runs in `epoch` or later and has not failed on the way, whatever the words say.

        It is so when every turn up to `epoch` hits it for what is known of the calls issued, and none fails it; in mode
        "mask" also where it is beyond the cut of somebody who had a part in it.
        """
        before = self.base
        for turn in self.turns:
            if turn.epoch > epoch:
                return True
            if turn.cap is None or seq <= turn.cap:
                if self.raises or seq == turn.among or not self._is_cut(seq, before, turn):
                    return False
            elif self.raises and turn.removed and seq <= max(turn.last, turn.cap + 1):
                return False
            before = turn.epoch
        return True

    def _is_cut(self, seq: int, epoch: int, turn: EpochChange) -> bool:
        """Return whether somebody who takes part in a call of `epoch` is removed by `turn` with a cut below it."""
        members = self._members.get(epoch, {})
        parts = ((members.get(slot, (0, 0)), incarnation, cut) for slot, incarnation, cut in turn.removed)
        return any(part[0] == incarnation and part[1] <= seq and cut < seq for part, incarnation, cut in parts)

    def forget(self, done: int, epoch: int = FOREVER) -> None:
        """Drop what no call after `done` can need: no decision will be asked about those up to `done`.

        Those that are known already run in `epoch` or later; they have yet to go through what has come after that.
        """
        num_passed = self._num_passed(done + 1, epoch)
        if num_passed:
            self.base = self.turns[num_passed - 1].epoch
            del self.turns[:num_passed]
        kept = {self.base, self._latest, *(turn.epoch for turn in self.turns)}
        self._members = {epoch: members for epoch, members in self._members.items() if epoch in kept}
        known = {(slot, since) for members in self._members.values() for slot, (since, _) in members.items()}
        self._host_of = {who: host for who, host in self._host_of.items() if who in known}

    def planned_in(self, seq: int) -> int:
        """Return the epoch with whose members call `seq` is planned where all before it have ended, as far as is known.

        It is later than `base` while an earlier call is still asked about (`forget`).
        """
        num_passed = self._num_passed(seq)
        return self.turns[num_passed - 1].epoch if num_passed else self.base

    def _num_passed(self, seq: int, epoch: int = FOREVER) -> int:
        """Return of how many turns up to `epoch` it is known that `seq` and all calls after it just move on."""
        passed = [turn.epoch <= epoch and self._is_passed(turn, seq) for turn in self.turns]
        ends = (i + 1 for i in reversed(range(len(passed))) if passed[i] and (not self.raises or all(passed[:i])))
        return next(ends, 0)

    def _is_passed(self, turn: EpochChange, seq: int) -> bool:
        """Return whether `seq` and all calls after it just move on to the epoch of `turn`."""
        if turn.hit is None or (self.raises and turn.fails(seq)):
            return False
        ended, epoch = self._on_the_way  # behind it nobody plans in a later epoch before the next call has ended
        if turn.epoch > epoch and turn.hit <= ended and seq <= ended + 1:
            return False
        return turn.hit < seq or turn.hit == seq != turn.among


def cut_of(decision: Decision, lane: int, removal: Removal, is_witnessed: bool = True) -> int:
    """Return the last seq to which the contribution of a removed slot counts; `FOREVER`: what it has left whole."""
    if removal.cause in BY_ITSELF or (removal.cause not in (*MAY_LIVE, PUT_OUT) and is_witnessed):
        return FOREVER
    for cut in decision.cuts:
        if cut.lane == lane:
            return cut.seq
    return 0


def holder_of(decision: Decision, lane: int) -> int:
    """Return the slot that has all of the removed that counts in a lane, up to its cut; -1 where nobody need ask."""
    return next((cut.holder for cut in decision.cuts if cut.lane == lane), -1)


def loss_of(decision: Decision, slot: int) -> str:
    """Return why a slot, which had a part in a lane, has none since `decision`."""
    for removal in decision.removed:
        if removal.slot == slot:
            return removal.cause
    return PUT_OUT


def start_of(decision: Decision, lane: int) -> Start | None:
    """Return what a decision says of those who join a lane; None when nobody told of it."""
    return next((start for start in decision.starts if start.lane == lane), None)


def issued_before(decision: Decision, lane: int) -> int | None:
    """Return the last seq that a member had issued when the lanes were frozen; None when nobody told of the lane."""
    start = start_of(decision, lane)
    return None if start is None else start.seq - 1


def first_seq(decision: Decision, lane: int) -> int:
    """Return the first call of a lane in which those whom `decision` takes in take part."""
    issued = issued_before(decision, lane)
    return 1 if issued is None else issued + 1


def is_whole(tag: int, wanted: int, filled: int, merged: int, rounds: int, is_two_phase: bool) -> bool:
    """Return whether the words of a cell show a complete contribution.

    Args:
        tag: the cell's tag; `wanted` is that of the call in the epoch it runs in.
        filled, merged: the cell's counters.
        rounds: how many rounds the call has; `is_two_phase`: its reduced shares are fetched as well.
    """
    return tag == wanted and filled >= rounds and (not is_two_phase or merged >= rounds)
