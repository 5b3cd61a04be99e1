"""What a coordinator proposes when it is free to choose: who goes, who comes, and what that means for the lanes.

Pure functions of what the coordinator was told. The numbers in a decision come from promises of agents that are frozen,
so they cannot move until the decision is known:

    cuts    for removed slots that may still live (`MAY_LIVE`), per lane the last call that a member of the new view
            has completed, and who has. Slots that write no more need none (see `outcome.cut_of`), unless nobody of
            their host is left in the lane: then what others have seen of their words may differ. So in a job over
            several hosts every removal has cuts, and needs the promises of all who stay.
    starts  per lane 1 + the last call that a member of the new view had issued, or that a want speaks of which is met.
            Those who join take part from there, and a call before it that cannot complete fails in mode "raise". Where
            all who stay have promised, and all who told of the lane have begun one and the same call that can do
            without the removed, it says so (`among`).

The incarnation of a joiner is the epoch that it joins in: higher than any before it in its slot, and nobody has to
remember who was there.

A member takes part in each lane that it belongs to since it joined the job, unless a decision has put it out of one, or
taken it back: that is what `parts` keeps, from decision to decision, as long as the process is a member and the lane is
used, with what it told of its part, where a want has said that. Who comes back is a newcomer to the lane: it takes part
since that epoch, from the lane's `start`. Who is put out counts up to the lane's cut, as one that is voted out. What
those tell who go or are out makes neither cut nor start.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from .messages import MAX_PARTS, MAY_LIVE, STALLED, Cut, Decision, LaneState, Member, Part, Removal, Start, Want

BLANK = Decision(0, ())


def compose(
    current: Decision,
    lanes: Mapping[int, Sequence[LaneState]],
    gone: Mapping[int, str],
    evicted: Mapping[int, str] | None = None,
    joiners: Sequence[Member] = (),
    wants: Sequence[Want] = (),
) -> Decision:
    """Return the decision after `current`.

    Args:
        lanes: per slot that promised, where its lanes are.
        gone: slots that are dead or have left, with the cause.
        evicted: slots to remove that may still live, with the cause.
        joiners: who comes in; of several for one slot the first does, of one whose slot stays occupied none.
        wants: who takes part in single lanes, one per lane; none is met that would make too many parts.
    """
    causes = {**(evicted or {}), **gone}
    staying = {member.slot: member for member in current.members if member.slot not in causes}
    removed = [Removal(*m[:2], causes[m.slot], m.host) for m in current.members if m.slot in causes]
    has_all = staying.keys() <= lanes.keys()
    used = {state.lane for states in lanes.values() for state in states} if has_all else None
    parts, met = _parts(current, staying, wants, used)
    told = _told((*current.parts, *parts), staying, lanes)
    asked = [LaneState(want.lane, 0, want.seq) for want in wants if want.lane in met]
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
    parts: Iterable[Part], staying: Mapping[int, Member], lanes: Mapping[int, Sequence[LaneState]]
) -> list[tuple[int, LaneState]]:
    """Return what slots tell of lanes that they are in before and after; `parts`: of both, be it of former members."""
    out = {(part.lane, *part[1:3]) for part in parts if part.since < 0}
    return [
        (slot, state)
        for slot, states in lanes.items()
        if slot in staying
        for state in states
        if (state.lane, *staying[slot][:2]) not in out
    ]


def _parts(
    current: Decision, staying: Mapping[int, Member], wants: Sequence[Want], used: set[int] | None
) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """Return the parts after `current`, and the lanes whose wants they meet.

    Args:
        used: the lanes that anybody has, None where not everybody has answered.
    """
    met: set[int] = set()
    members = {member[:2] for member in current.members}
    known = {part[:3]: part for part in current.parts if part[1:3] in members}
    for want in wants:
        now, before, locators = parts_of(current, want.lane), dict(known), dict(want.locators)
        for slot, member in staying.items():
            key = (want.lane, slot, member.incarnation)
            if slot in want.out and slot in now:
                known[key] = Part(*key, -current.epoch - 1)
            elif slot in want.members and slot not in now:
                known[key] = Part(*key, current.epoch + 1, locators.get(slot, b""))
            elif slot in now and slot in locators:
                known[key] = Part(*key, now[slot], locators[slot])
        if len(known) > MAX_PARTS or len(met) == MAX_PARTS:
            known = before
        else:
            met.add(want.lane)
    parts = (part for _, part in sorted(known.items()) if used is None or part.lane in used)
    return tuple(parts), tuple(sorted(met))


def parts_of(decision: Decision, lane: int) -> dict[int, int]:
    """Return who takes part in a lane, as far as it belongs to it: slot -> the epoch since which it does."""
    since = {part[1:3]: part.since for part in decision.parts if part.lane == lane}
    parts = {member.slot: since.get(member[:2], member.incarnation) for member in decision.members}
    return {slot: when for slot, when in parts.items() if when > 0}


def without(want: Want, silent: Container[int], gone: Container[int], current: Decision) -> Want | None:
    """Return what is left of a want when the `silent` do not answer and the `gone` go; None: it cannot be met."""
    members = tuple(slot for slot in want.members if slot not in silent)
    if len(members) < len(want.members) and not want.least:
        return None
    now = parts_of(current, want.lane)
    if sum(slot in now and slot not in gone for slot in members) < want.least:
        return None
    out = tuple(sorted({*want.out, *want.members} - {*members}))
    return want._replace(members=members, out=out)


def _cuts(told: Iterable[tuple[int, LaneState]], spans: bool) -> tuple[Cut, ...]:
    """Return the cuts; with their holders where the job `spans` hosts."""
    furthest: dict[int, tuple[int, int]] = {}
    for slot, state in told:
        furthest[state.lane] = max(furthest.get(state.lane, (-1, 0)), (state.completed, -slot))
    return tuple(Cut(lane, seq, -slot if spans else -1) for lane, (seq, slot) in sorted(furthest.items()))


def _starts(told: Iterable[LaneState], has_all: bool) -> tuple[Start, ...]:
    states: dict[int, set[tuple[int, bool]]] = {}
    for state in told:
        states.setdefault(state.lane, set()).add((state.issued, state.is_pull))
    return tuple(
        Start(lane, max(found)[0] + 1, has_all and len(found) == 1 and min(found)[1])
        for lane, found in sorted(states.items())
    )


def choose_evicted(live: Collection[int], accusers: Mapping[int, Collection[int]]) -> set[int]:
    """Return which of the accused to remove: the worst connected first, until no accusation is left.

    An accusation speaks against both: who accuses everybody is more likely the one that is cut off. When one is
    removed its accusations go with it, and so do those against whoever accused it (it was waiting itself). Of several
    that are equally bad the accused goes before the accuser, then the highest slot.

    Args:
        live: members that are not dead; others neither accuse nor stand accused.
        accusers: per accused slot who accuses it.
    """
    edges = {(by, slot) for slot, those in accusers.items() for by in those if by != slot and {by, slot} <= set(live)}
    removed: set[int] = set()
    while edges:
        ends = [slot for edge in edges for slot in edge]
        accused = [slot for _, slot in edges]
        worst = max(set(ends), key=lambda slot: (ends.count(slot), accused.count(slot), slot))
        removed.add(worst)
        waiting = {by for by, slot in edges if slot == worst}
        edges = {(by, slot) for by, slot in edges if worst not in (by, slot) and slot not in waiting}
    return removed


def spans_hosts(decision: Decision) -> bool:
    """Return whether the members run on several hosts."""
    return len({member.host for member in decision.members}) > 1


def choose_lost(
    hosts: Mapping[int, str], accusers: Mapping[str, Collection[int]], answered: Collection[int]
) -> set[str]:
    """Return which hosts to remove of those that others cannot reach: the worst connected first, as a whole.

    A host that cannot be reached cannot reach the other one either, so of each such pair one goes, whoever says it.
    First those of whom nobody has answered whoever decides now; then who is in most pairs; of equal ones the smaller.

    Args:
        hosts: of each member that is not dead.
        accusers: per host who cannot reach it.
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
    """Return whether `decision` changes nothing but the epoch (it ends a ballot that had frozen the lanes)."""
    return decision.members == current.members and not decision.met


def cause_of(decision: Decision, slot: int, incarnation: int) -> str:
    """Return why a process is not in `decision`; STALLED when it was removed earlier than this decision."""
    for removal in decision.removed:
        if (removal.slot, removal.incarnation) == (slot, incarnation):
            return removal.cause
    return STALLED
