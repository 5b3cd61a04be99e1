"""The effect of decisions on the calls of one group: the epoch in which each call runs, or its failure.

Pure functions and state: no shared memory, no clocks.

The calls of a group form one sequence, which is the same at all its members. A call runs in one epoch at a time: it is
published in the peer regions of that epoch, and the members of that epoch contribute. A decision that removes members
divides the calls:

    up to L   every removed slot has contributed completely: these calls continue in their epoch without any change
    from L+1  these calls move to the new epoch and run again without the removed slots (mode "mask"), or fail at the
              decision (mode "raise": calls up to the last one that any member had issued, at least L+1, so that every
              failure is reported by some call; later calls run in the new epoch)

While a process knows of a pending epoch change for its calls, it publishes only the oldest one. A rank that has
contributed to a call in which a joiner takes part has therefore contributed to all calls before the joiner's first one,
and L is the same for ranks that have not seen these calls.

A dead slot has contributed what its region shows as complete; that memory no longer changes, so every reader sees the
same. A slot that was evicted alive counts up to its cut, whatever its memory shows now. L is never below a call that a
survivor has completed, because completion requires the same words; and it is never above the last call that was issued
when the groups were frozen, so a joiner needs no knowledge of earlier calls.

**AMONG.** In mode "mask" a call that does not need the removed slots (a combine: the other ranks hold the data) stays
in its epoch and continues among the remaining ranks, if all of these had begun it when they were frozen; the decision
says so.

A slot that is put out of the group and stays in the job is handled like an evicted slot; a slot that comes back is
handled like a joiner (`decision.parts_of`). For a group, a member is therefore its slot and the epoch since which it
takes part. A group without any member left has ended: no process knows its progress any more.

In a group over several hosts, the memory of a rank is readable on its own host only; other hosts have copies of what
was sent to them. A dead slot is *witnessed* if a member that took part before it died, and stays, runs on its host:
that member sends everything that the dead slot left to the other host, so the rules above hold. A member that joined
after the death may not have seen the memory, so it is no witness. Where all members run on one host they all read that
memory and nothing is sent: the rules of one host hold, and the decision may have no cuts. Where no witness exists the
copies on other hosts may differ, so the dead slot counts up to the cut, like an evicted one. The same holds for each
dead slot of a group over three hosts and more: its witness may be lost as well, after it has sent the data to one of
the other hosts and before it has sent it to another. A slot that has left in order has sent everything before.

*Settled up to.* No call is completed on a host that has not received all data of a lost slot. The last completed call,
which each promise reports, therefore also says up to which call a rank has settled the earlier losses, and the next
decision needs no other information: its cut, the highest of these, is the limit up to which all ranks count the next
lost slots. With three hosts and more the result is thus a function of decisions alone, however many witnesses fail
after each other; a host may lack a part of a call at or below all cuts only. Other hosts have that part, but only as
much of it as their calls read, so it cannot be fetched from them: the call ends on this host with an error of its own
(LOST in the simulator), the contribution of this rank to it stays, and the next call runs on all hosts. With two hosts,
all remaining ranks read one and the same memory.

All of this is a function of decisions and of words that no longer change. A rank that asks later, because it was slow
or has not issued the call yet, finds the same result: survivors agree without another message. Calls are asked about in
order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

from .decision import parts_of
from .messages import BY_ITSELF, FOREVER, MAY_LIVE, PUT_OUT, Decision, Removal, Start

MAX_WITNESSED_HOSTS = 2  # hosts of a group in which the contributions left by dead slots count
Whole = Callable[[int, int, int], bool]  # (slot, epoch, seq): whether the contribution of a slot is complete


class CallState(NamedTuple):
    """The state of a call. `failed`: it ended at the decision of `epoch`; else it runs in `epoch`.

    `via` are the epochs to which it moves, in order. A rank that learns several decisions at once applies all of them
    in order, because a call may end at an intermediate one, and then it ends there on all ranks. `rootless`: the epoch
    in which the call ends so because its root takes no part; 0: there is none. `without`: slots of its epoch that have
    no part in it (AMONG).
    """

    epoch: int
    failed: bool
    lost: tuple[int, ...] = ()
    via: tuple[int, ...] = ()
    without: tuple[int, ...] = ()
    rootless: int = 0


class EpochChange:
    """A decision that concerns the group.

    Attributes:
        epoch: the epoch that it began.
        removed: the slots that left the group: slot, epoch since which it had taken part, and the last seq that counts.
        limit: the last seq that any member had issued; None when no member reported one.
        cap: calls above it are hit whatever the words say: `limit`, or what a later join settles where that is None.
        last: calls up to here fail in mode "raise" when they are hit, beside the first that is hit. A recent joiner
        does not know whether an older call was the first, so this includes the first call that a joiner can ask about:
        its own first one, or the one after those that fail because of `past`, the `last` before this.
        hit: the first call that moved or failed, once it is known: L + 1.
        among: a call that all remaining ranks had begun, and that continues among them if it is hit; 0 for none.
    """

    def __init__(
        self,
        decision: Decision,
        group_id: int,
        removed: tuple[Removal, ...],
        starts: list[int],
        past: int,
        unwitnessed: Container[int] = (),
    ) -> None:
        self.epoch = decision.epoch
        self.removed = tuple(
            (r.slot, r.incarnation, cut_of(decision, group_id, r, r.slot not in unwitnessed)) for r in removed
        )
        self.limit = issued_before(decision, group_id)
        self.cap = self.limit
        newest = max(starts, default=1)
        self.last = max(self.limit or 0, newest, past + 1 if newest > 1 else 0)
        self.hit: int | None = None
        start = start_of(decision, group_id)
        self.among = start.seq - 1 if start is not None and start.among else 0

    def limit_to(self, slot: int, cut: int) -> None:
        """Limit the contributions of a removed slot to calls up to `cut`: no member knows all that it had done."""
        self.removed = tuple((who, since, min(old, cut) if who == slot else old) for who, since, old in self.removed)

    def fails(self, seq: int) -> bool:
        """Return whether call `seq`, which this epoch change hits, fails in mode "raise"."""
        return bool(self.removed) and (seq == self.hit or seq <= self.last)

    def spoken_for(self, issued: int) -> int:
        """Return the last call that may fail because of this epoch change."""
        if not self.removed:
            return 0
        if self.limit is not None:
            return max(self.limit + 1, self.last)
        return max(issued + (self.hit is None), self.last)


class Course:
    """The sequence of epoch changes of one group, as one process needs it.

    Args:
        group_id: id of the group.
        view: the first view of this process in the group: the initial one, or the one that added the process.
        raises: mode "raise"; else "mask".
        slots: the slots that belong to the group, which may become more; None for all.
        joined: this process joined with `view`.
        hosts: slot -> its host, in a group over several hosts, of members that do not name theirs; None: one host.
    """

    def __init__(
        self,
        group_id: int,
        view: Decision,
        raises: bool,
        slots: Container[int] | None = None,
        joined: bool = False,
        hosts: Mapping[int, object] | None = None,
    ) -> None:
        self.group_id = group_id
        self._hosts = hosts or None
        self._host_of: dict[tuple[int, int], object] = {}  # of (slot, since)
        self.raises = raises
        self.slots = slots
        self.base = view.epoch
        self.turns: list[EpochChange] = []
        self._latest = view.epoch
        self._last = 0
        # the last call that ended at an intermediate epoch, and that epoch: see `ended_on_the_way`
        self._on_the_way = (0, 0)
        self.first_seq = first_seq(view, group_id) if joined else 1
        self._members = {
            view.epoch: {
                slot: (since, self.first_seq if since == view.epoch else 1)
                for slot, since in parts_of(view, group_id).items()
                if self._ours(slot)
            }
        }
        self._note_hosts(view)
        if joined:
            turn = EpochChange(view, group_id, self._gone_at(view), [self.first_seq], 0)
            turn.hit = self.first_seq
            self.note(turn)
            self.base = view.epoch - 1

    def _ours(self, slot: int) -> bool:
        return self.slots is None or slot in self.slots

    def add(self, decision: Decision) -> bool:
        """Record the next decision; True when it concerns the group, so the state of pending calls must be asked for
        again."""
        turn = self.turn_of(decision)
        if turn is not None:
            self.note(turn)
        return turn is not None

    def turn_of(self, decision: Decision) -> EpochChange | None:
        """Return the effect of the next decision on the group, for `note`; None when it does not concern it.

        `contributors` and `starts` can be asked about its epoch from now on; `place` uses it only after `note`. Both
        may be repeated from any line on.
        """
        if self.turns and self.turns[-1].epoch == decision.epoch:
            return self.turns[-1]
        before = self._members[self._latest]
        start = first_seq(decision, self.group_id)
        after: dict[int, tuple[int, int]] = {}
        for slot, since in parts_of(decision, self.group_id).items():
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
        turn = EpochChange(decision, self.group_id, removed, [start for _, start in after.values()], self._last, alone)
        if joins:
            turn.cap = turn.limit or 0  # all members were asked: a group that none of them reported has no issued calls
            for earlier in self.turns:
                if earlier.cap is None:
                    earlier.cap = turn.cap - 1  # see `claimed`: no member had issued this call
        self._members[decision.epoch] = after
        return turn

    def _note_hosts(self, view: Decision) -> None:
        """Record the hosts on which the members of a view run."""
        since = parts_of(view, self.group_id)
        for member in view.members if self._hosts is not None else ():
            if member.slot in since:
                self._host_of[member.slot, since[member.slot]] = member.host or (self._hosts or {}).get(member.slot)

    def _is_witnessed(self, slot: int, before: Mapping[int, tuple[int, int]], stay: Container[int]) -> bool:
        """Return whether a remaining member runs on a slot's host, and so has what the slot has left."""
        if self._hosts is None:
            return True
        host_of = {other: self._host_of.get((other, since)) for other, (since, _) in before.items()}
        hosts = {*host_of.values()}
        if len(hosts) == 1:
            # all remaining members are on one host: they read its memory, as in a group that never spanned hosts
            return True
        if len(hosts) > MAX_WITNESSED_HOSTS:
            return False
        came = before[slot][0]
        return any(
            where == host_of[slot] and other in stay and before[other][0] <= came for other, where in host_of.items()
        )

    def _gone_at(self, view: Decision) -> tuple[Removal, ...]:
        """Return the slots that left the group by `view`, for a process that knows no earlier view."""
        since = {part[1:3]: part.since for part in view.parts if part.group_id == self.group_id}
        gone = [r for r in view.removed if since.get(r[:2], r.incarnation) > 0]
        gone += [Removal(slot, 0, PUT_OUT) for (slot, _), when in since.items() if when == -view.epoch]
        return tuple(sorted(r for r in gone if self._ours(r.slot)))

    def note(self, turn: EpochChange) -> None:
        """Apply an epoch change to the calls from now on."""
        if not self.turns or self.turns[-1] is not turn:
            self.turns.append(turn)
        if turn.removed:
            self._last = turn.last
        self._latest = turn.epoch

    def place(
        self, seq: int, whole: Whole, epoch: int | None = None, has_root: Callable[[int], bool] = lambda epoch: True
    ) -> CallState:
        """Return the state of call `seq`. Ask in order of seq; repeat after `add`, with the `epoch` it ran in so far.

        `has_root`: whether the root of the call takes part in an epoch. A call that moves to an epoch without its root
        ends there, so no later epoch change hits it: that change hits the first call after it, as for ranks that learn
        of it later.
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
        """Return whether a call that runs in `epoch` needs nothing more from the slots that `turn` removed."""
        if turn.cap is not None and seq > turn.cap:
            return False
        return not self._missing(seq, epoch, turn, whole)

    def _missing(self, seq: int, epoch: int, turn: EpochChange, whole: Whole) -> tuple[int, ...]:
        """Return the slots that `turn` removed and that have not contributed to a call which runs in `epoch`."""
        members, missing = self._members.get(epoch, {}), []
        for slot, incarnation, cut in turn.removed:
            member, start = members.get(slot, (0, 0))
            if member != incarnation or seq < start:
                continue  # it had no part in this call
            if seq > cut or (cut == FOREVER and not whole(slot, epoch, seq)):
                missing.append(slot)
        return tuple(missing)

    def ended_on_the_way(self, seq: int, epoch: int) -> None:
        """Record that call `seq` has ended in `epoch` on all ranks (`CallState.rootless`).

        The next call is planned there, also where a later epoch change has hit an earlier call that is aborted and
        still asked about: a rank that has not learned of that change cannot plan it elsewhere. It moves on when its own
        state is asked for.
        """
        self._on_the_way = (seq, epoch)

    def claimed(self, issued: int) -> int:
        """Return the seq to report as the last call issued, where `issued` is the last one really issued.

        In mode "raise" a failure that no call has reported yet fails the next call. That call counts as issued: a
        joiner begins after it.
        """
        if not self.raises:
            return issued
        return max([issued, *(turn.spoken_for(issued) for turn in self.turns)])

    def contributors(self, seq: int, epoch: int) -> tuple[int, ...]:
        """Return the slots that take part in call `seq` when it runs in `epoch`, ascending."""
        return tuple(sorted(slot for slot, (_, start) in self._members[epoch].items() if start <= seq))

    def starts(self, epoch: int) -> set[int]:
        """Return the first calls of the members that take part in `epoch`; that of an initial member is 1."""
        return {start for _, start in self._members[epoch].values()}

    def present(self) -> tuple[int, ...]:
        """Return the slots in the newest view, ascending."""
        return tuple(sorted(self._members[self._latest]))

    def passes(self, seq: int, epoch: int) -> bool:
        """Return whether call `seq` runs in `epoch` or later and has not failed before, whatever the words say.

        It is so when every epoch change up to `epoch` hits it by what is known of the issued calls, and none fails it;
        in mode "mask" also where it is beyond the cut of a removed slot that had a part in it.
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
        """Return whether a slot that takes part in a call of `epoch` is removed by `turn` with a cut below the call."""
        members = self._members.get(epoch, {})
        parts = ((members.get(slot, (0, 0)), incarnation, cut) for slot, incarnation, cut in turn.removed)
        return any(part[0] == incarnation and part[1] <= seq and cut < seq for part, incarnation, cut in parts)

    def forget(self, done: int, epoch: int = FOREVER) -> None:
        """Drop what no call after `done` can need: no decision will be asked about calls up to `done`.

        Calls that are known already run in `epoch` or later; the epoch changes after that still have to be applied to
        them.
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
        """Return the epoch with whose members call `seq` is planned when all calls before it have ended, as far as is
        known.

        It is later than `base` while an earlier call is still asked about (`forget`).
        """
        num_passed = self._num_passed(seq)
        return self.turns[num_passed - 1].epoch if num_passed else self.base

    def _num_passed(self, seq: int, epoch: int = FOREVER) -> int:
        """Return the number of epoch changes up to `epoch` that certainly only move `seq` and all calls after it."""
        passed = [turn.epoch <= epoch and self._is_passed(turn, seq) for turn in self.turns]
        ends = (i + 1 for i in reversed(range(len(passed))) if passed[i] and (not self.raises or all(passed[:i])))
        return next(ends, 0)

    def _is_passed(self, turn: EpochChange, seq: int) -> bool:
        """Return whether `seq` and all calls after it simply move on to the epoch of `turn`."""
        if turn.hit is None or (self.raises and turn.fails(seq)):
            return False
        ended, epoch = self._on_the_way  # no rank plans in a later epoch behind it before the next call has ended
        if turn.epoch > epoch and turn.hit <= ended and seq <= ended + 1:
            return False
        return turn.hit < seq or turn.hit == seq != turn.among


def cut_of(decision: Decision, group_id: int, removal: Removal, is_witnessed: bool = True) -> int:
    """Return the last seq to which a removed slot's contribution counts; `FOREVER`: everything it left complete."""
    if removal.cause in BY_ITSELF or (removal.cause not in (*MAY_LIVE, PUT_OUT) and is_witnessed):
        return FOREVER
    for cut in decision.cuts:
        if cut.group_id == group_id:
            return cut.seq
    return 0


def holder_of(decision: Decision, group_id: int) -> int:
    """Return the slot that has all data of the removed slots that counts in a group, up to its cut; -1: not needed."""
    return next((cut.holder for cut in decision.cuts if cut.group_id == group_id), -1)


def loss_of(decision: Decision, slot: int) -> str:
    """Return the cause for which a slot that took part in a group takes no part since `decision`."""
    for removal in decision.removed:
        if removal.slot == slot:
            return removal.cause
    return PUT_OUT


def start_of(decision: Decision, group_id: int) -> Start | None:
    """Return the start that a decision gives to the joiners of a group; None when no member reported the group."""
    return next((start for start in decision.starts if start.group_id == group_id), None)


def issued_before(decision: Decision, group_id: int) -> int | None:
    """Return the last seq that any member had issued at the freeze; None when no member reported the group."""
    start = start_of(decision, group_id)
    return None if start is None else start.seq - 1


def first_seq(decision: Decision, group_id: int) -> int:
    """Return the first call of a group in which the joiners of `decision` take part."""
    issued = issued_before(decision, group_id)
    return 1 if issued is None else issued + 1


def is_whole(tag: int, wanted: int, filled: int, merged: int, rounds: int, is_two_phase: bool) -> bool:
    """Return whether the words of a cell show a complete contribution.

    Args:
        tag: the cell's tag; `wanted` is that of the call in the epoch it runs in.
        filled, merged: the cell's counters.
        rounds: how many rounds the call has; `is_two_phase`: its reduced shares are fetched as well.
    """
    return tag == wanted and filled >= rounds and (not is_two_phase or merged >= rounds)
