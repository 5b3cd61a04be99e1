"""Composition of a decision when the coordinator is free to choose: removals, joins, and their effect on the groups.

Pure functions of the answers that the coordinator received. The numbers in a decision come from promises of agents that
are frozen, so they cannot change until the decision is known:

    cuts    for removed slots that may still live (`MAY_LIVE`): per group the last call that a member of the new view
            has completed, and that member. Slots that write no more need none (see `outcome.cut_of`), unless no
            member on their host is left in the group: then other hosts' copies of their words may differ. In a job
            over several hosts every removal therefore has cuts, and needs the promises of all remaining members.
    starts  per group 1 + the last call that a member of the new view had issued, or that a want which is met names.
            Joiners take part from there, and a call before it that cannot complete fails in mode "raise". Where all
            remaining members have promised, and all that reported the group have begun one and the same call that
            does not need the removed slots, the start says so (`among`).

The incarnation of a joiner is the epoch that it joins in: higher than any before it in its slot, without a record of
earlier occupants.

A member takes part in each of its groups since it joined the job, unless a decision has put it out of one, or brought
it back: `parts` records this, from decision to decision, as long as the process is a member and the group is used,
together with the locator of its part, where a want has given one. A member that comes back is a joiner of the group: it
takes part since that epoch, from the group's `start`. A member that is put out counts up to the group's cut, like an
evicted one. The reports of slots that leave or are out make neither cut nor start.

The counting rules of `PROTOCOL.md` for a quorum (`has_quorum`) stand here as well, as pure functions over slots.
Members that are dead count neither for nor against a quorum, but only those whose boards were read after their death
(`witnessed`): the board shows whether the dead member had promised or accepted anything, so the reader knows as much as
if it had asked that member.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from .messages import (
    MAX_PARTS,
    MAY_LIVE,
    NO_BALLOT,
    STALLED,
    Ballot,
    BoardState,
    Cut,
    Decision,
    GroupState,
    Member,
    Part,
    Removal,
    Start,
    Want,
)

BLANK = Decision(0, ())


def compose(
    current: Decision,
    groups: Mapping[int, Sequence[GroupState]],
    gone: Mapping[int, str],
    evicted: Mapping[int, str] | None = None,
    joiners: Sequence[Member] = (),
    wants: Sequence[Want] = (),
) -> Decision:
    """Return the decision after `current`.

    Args:
        groups: slot that promised -> the states of its groups.
        gone: slots that are dead or have left, with the cause.
        evicted: slots to remove that may still live, with the cause.
        joiners: the processes that join; of several for one slot the first does, for a slot that stays occupied none.
        wants: the members of single groups, one per group; none is met that would make too many parts.
    """
    causes = {**(evicted or {}), **gone}
    staying = {member.slot: member for member in current.members if member.slot not in causes}
    removed = [Removal(*m[:2], causes[m.slot], m.host) for m in current.members if m.slot in causes]
    has_all = staying.keys() <= groups.keys()
    used = {state.group_id for states in groups.values() for state in states} if has_all else None
    parts, met = _parts(current, staying, wants, used)
    told = _told((*current.parts, *parts), staying, groups)
    asked = [GroupState(want.group_id, 0, want.seq) for want in wants if want.group_id in met]
    spans = spans_hosts(current)
    is_cut = any(r.cause in MAY_LIVE for r in removed) or any(p.since == -current.epoch - 1 for p in parts)
    is_cut |= spans and has_all and bool(removed)
    for joiner in joiners:
        if joiner.slot not in staying:
            staying[joiner.slot] = joiner.as_incarnation(current.epoch + 1)
    return Decision(
        current.epoch + 1,
        tuple(staying[slot] for slot in sorted(staying)),
        tuple(sorted(removed)),
        _cuts(told, spans) if is_cut else (),
        _starts([*(state for _, state in told), *asked], has_all),
        parts,
        met,
    )


def _told(
    parts: Iterable[Part], staying: Mapping[int, Member], groups: Mapping[int, Sequence[GroupState]]
) -> list[tuple[int, GroupState]]:
    """Return the reported states of the groups that the slots are in before and after the decision.

    `parts`: those before and after it, also of former members.
    """
    out = {(part.group_id, *part[1:3]) for part in parts if part.since < 0}
    return [
        (slot, state)
        for slot, states in groups.items()
        if slot in staying
        for state in states
        if (state.group_id, *staying[slot][:2]) not in out
    ]


def _parts(
    current: Decision, staying: Mapping[int, Member], wants: Sequence[Want], used: set[int] | None
) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """Return the parts after `current`, and the groups whose wants they meet.

    Args:
        used: the groups that any member has, None where not all members have answered.
    """
    met: set[int] = set()
    members = {member[:2] for member in current.members}
    known = {part[:3]: part for part in current.parts if part[1:3] in members}
    for want in wants:
        now, before, locators = parts_of(current, want.group_id), dict(known), dict(want.locators)
        for slot, member in staying.items():
            key = (want.group_id, slot, member.incarnation)
            if slot in want.out and slot in now:
                known[key] = Part(*key, -current.epoch - 1)
            elif slot in want.members and slot not in now:
                known[key] = Part(*key, current.epoch + 1, locators.get(slot, b""))
            elif slot in now and slot in locators:
                known[key] = Part(*key, now[slot], locators[slot])
        if len(known) > MAX_PARTS or len(met) == MAX_PARTS:
            known = before
        else:
            met.add(want.group_id)
    parts = (part for _, part in sorted(known.items()) if used is None or part.group_id in used)
    return tuple(parts), tuple(sorted(met))


def parts_of(decision: Decision, group_id: int) -> dict[int, int]:
    """Return slot -> the epoch since which it takes part in a group, for the members of the job that are not out of it.

    Whether a member belongs to the group at all is not checked.
    """
    since = {part[1:3]: part.since for part in decision.parts if part.group_id == group_id}
    parts = {member.slot: since.get(member[:2], member.incarnation) for member in decision.members}
    return {slot: when for slot, when in parts.items() if when > 0}


def without(want: Want, silent: Container[int], gone: Container[int], current: Decision) -> Want | None:
    """Return the rest of a want when the `silent` do not answer and the `gone` are removed; None: it cannot be met."""
    members = tuple(slot for slot in want.members if slot not in silent)
    if len(members) < len(want.members) and not want.least:
        return None
    now = parts_of(current, want.group_id)
    if sum(slot in now and slot not in gone for slot in members) < want.least:
        return None
    out = tuple(sorted({*want.out, *want.members} - {*members}))
    return want._replace(members=members, out=out)


def _cuts(told: Iterable[tuple[int, GroupState]], spans: bool) -> tuple[Cut, ...]:
    """Return the cuts; with their holders where the job `spans` hosts."""
    furthest: dict[int, tuple[int, int]] = {}
    for slot, state in told:
        furthest[state.group_id] = max(furthest.get(state.group_id, (-1, 0)), (state.completed, -slot))
    return tuple(Cut(group_id, seq, -slot if spans else -1) for group_id, (seq, slot) in sorted(furthest.items()))


def _starts(told: Iterable[GroupState], has_all: bool) -> tuple[Start, ...]:
    states: dict[int, set[tuple[int, bool]]] = {}
    for state in told:
        states.setdefault(state.group_id, set()).add((state.issued, state.is_pull))
    return tuple(
        Start(group_id, max(found)[0] + 1, has_all and len(found) == 1 and min(found)[1])
        for group_id, found in sorted(states.items())
    )


def choose_evicted(
    live: Collection[int], accusers: Mapping[int, Collection[int]], answered: Collection[int]
) -> set[int]:
    """Return the accused members to remove: those that have not answered, then the worst connected first, until no
    accusation is left.

    An accusation counts against both sides: a member that accuses all others is more likely the one that is cut off.
    When a member is removed, its accusations are dropped, and so are those against its accusers (they were waiting
    themselves). The accusers of a member that has not answered may have waited for others only because these waited for
    it, with accusations that are still to come: their accusations against members that have answered are dropped as
    well, and are made again if they were right. Of several that are equally bad the accused is removed before the
    accuser, then the highest slot.

    Args:
        live: members that are not dead; others neither accuse nor are accused.
        accusers: accused slot -> the slots that accuse it.
        answered: slots that have promised.
    """
    edges = {(by, slot) for slot, those in accusers.items() for by in those if by != slot and {by, slot} <= set(live)}
    removed: set[int] = set()
    while edges:
        ends = [slot for edge in edges for slot in edge]
        accused = [slot for _, slot in edges]
        silent = {*accused}.difference(answered)
        worst = max(set(ends), key=lambda slot: (slot in silent, ends.count(slot), accused.count(slot), slot))
        removed.add(worst)
        waiting = {by for by, slot in edges if slot == worst}
        excused = waiting.union(answered if worst in silent else ())
        edges = {
            (by, slot)
            for by, slot in edges
            if worst not in (by, slot) and slot not in (excused if by in waiting else waiting)
        }
    return removed


def spans_hosts(decision: Decision) -> bool:
    """Return whether the members run on several hosts."""
    return len({member.host for member in decision.members}) > 1


def choose_lost(
    hosts: Mapping[int, str], accusers: Mapping[str, Collection[int]], answered: Collection[int]
) -> set[str]:
    """Return the hosts to remove among those that others cannot reach: the worst connected first, as a whole.

    If one host cannot reach another, the reverse holds as well, so one host of each such pair is removed, whichever
    side reported it. First the hosts of which no member has answered this coordinator; then those in most pairs; of
    equal ones the smaller.

    Args:
        hosts: host of each member that is not dead.
        accusers: host -> the slots that cannot reach it.
        answered: slots that have promised.
    """
    present, near = set(hosts.values()), {hosts[slot] for slot in answered if slot in hosts}
    named = {(hosts[by], host) for host, those in accusers.items() for by in those if by in hosts and host in present}
    pairs = {(min(pair), max(pair)) for pair in named if pair[0] != pair[1]}
    removed: set[str] = set()
    while pairs:
        ends = [host for pair in pairs for host in pair]
        slots = {host: [slot for slot, there in hosts.items() if there == host] for host in ends}
        worst = max(slots, key=lambda h: (h not in near, ends.count(h), -len(slots[h]), min(slots[h])))
        removed.add(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return removed


def is_null(decision: Decision, current: Decision) -> bool:
    """Return whether `decision` changes nothing but the epoch (it ends a ballot that had frozen the groups)."""
    return decision.members == current.members and not decision.met


def cause_of(decision: Decision, slot: int, incarnation: int) -> str:
    """Return the cause for which a process is not in `decision`; STALLED when an earlier decision removed it."""
    for removal in decision.removed:
        if (removal.slot, removal.incarnation) == (slot, incarnation):
            return removal.cause
    return STALLED


def has_quorum(members: Collection[int], witnessed: Collection[int], acks: Collection[int]) -> bool:
    """Return whether `acks` are more than half of the members that are not witnessed dead, or half with the lowest.

    Args:
        members: slots of the epoch.
        witnessed: slots that are dead or have left and whose boards were read.
        acks: slots that answered; those outside `members` or inside `witnessed` do not count.
    """
    voters = [slot for slot in members if slot not in witnessed]
    if not voters:
        return False
    num_acks = sum(slot in acks for slot in voters)
    if 2 * num_acks == len(voters):
        return min(voters) in acks
    return 2 * num_acks > len(voters)


def highest_promise(boards: Mapping[int, BoardState], epoch: int) -> Ballot:
    """Return the highest ballot that the dead members had promised for the epoch after `epoch`."""
    return max((b.promised for b in boards.values() if b.decided.epoch == epoch), default=NO_BALLOT)


def highest_accepted(boards: Mapping[int, BoardState], epoch: int) -> tuple[Ballot, Decision | None]:
    """Return the decision that the dead members had accepted for the epoch after `epoch`, in the highest ballot."""
    best: tuple[Ballot, Decision | None] = (NO_BALLOT, None)
    for board in boards.values():
        if board.decided.epoch == epoch and board.accepted is not None and board.accepted_ballot > best[0]:
            best = (board.accepted_ballot, board.accepted)
    return best
