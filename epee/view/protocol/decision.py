"""What a coordinator proposes when it is free to choose: who goes, who comes, and what that means for the lanes.

Pure functions of what the coordinator was told. The numbers in a decision come from promises of agents that are frozen,
so they cannot move until the decision is known:

    cuts    for removed slots that may still live (STALLED), per lane the last call that a member of the new view has
            completed. Slots that write no more need none (see `outcome.cut_of`).
    starts  per lane 1 + the last call that a member of the new view had issued. Those who join take part from there,
            and a call before it that cannot complete fails in mode "raise".

The incarnation of a joiner is the epoch that it joins in: higher than any before it in its slot, and nobody has to
remember who was there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from .messages import STALLED, Cut, Decision, LaneState, Member, Removal, Start

BLANK = Decision(0, ())


def compose(
    current: Decision,
    lanes: Mapping[int, Sequence[LaneState]],
    gone: Mapping[int, str],
    evicted: Collection[int] = (),
    joiners: Sequence[Member] = (),
) -> Decision:
    """Return the decision after `current`.

    Args:
        lanes: per slot that promised, where its lanes are.
        gone: slots that are dead or have left, with the cause.
        evicted: slots to remove that may still live.
        joiners: who comes in; of several for one slot the first does, of one whose slot stays occupied none.
    """
    removed = []
    staying: dict[int, Member] = {}
    for member in current.members:
        cause = gone.get(member.slot) or (STALLED if member.slot in evicted else None)
        if cause is None:
            staying[member.slot] = member
        else:
            removed.append(Removal(member.slot, member.incarnation, cause))
    told = {slot: states for slot, states in lanes.items() if slot in staying}
    for joiner in joiners:
        if joiner.slot not in staying:
            staying[joiner.slot] = joiner._replace(incarnation=current.epoch + 1)
    stalled = any(removal.cause == STALLED for removal in removed)
    return Decision(
        current.epoch + 1,
        tuple(staying[slot] for slot in sorted(staying)),
        tuple(sorted(removed)),
        _cuts(told.values()) if stalled else (),
        _starts(told.values()),
    )


def _cuts(told: Iterable[Sequence[LaneState]]) -> tuple[Cut, ...]:
    completed: dict[int, int] = {}
    for states in told:
        for state in states:
            completed[state.lane] = max(completed.get(state.lane, 0), state.completed)
    return tuple(Cut(lane, completed[lane]) for lane in sorted(completed))


def _starts(told: Iterable[Sequence[LaneState]]) -> tuple[Start, ...]:
    issued: dict[int, int] = {}
    for states in told:
        for state in states:
            issued[state.lane] = max(issued.get(state.lane, 0), state.issued)
    return tuple(Start(lane, issued[lane] + 1) for lane in sorted(issued))


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


def is_null(decision: Decision, current: Decision) -> bool:
    """Return whether `decision` changes nothing but the epoch (it ends a ballot that had frozen the lanes)."""
    return decision.members == current.members


def cause_of(decision: Decision, slot: int, incarnation: int) -> str:
    """Return why a process is not in `decision`; STALLED when it was removed earlier than this decision."""
    for removal in decision.removed:
        if (removal.slot, removal.incarnation) == (slot, incarnation):
            return removal.cause
    return STALLED
