"""Every interleaving of the loads and stores by which calls are completed or withdrawn (`engine/withdrawal.py`).

One call, three ranks, each load and each store a step of its own; who waits may run out of patience at any moment. A
rank is `(place, position, seen)`: what it does next, at which peer, and what it has found so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

PUBLISH, READ, RECHECK_HEADER, RECHECK_MARK, DECIDE, THROUGH, GIVE_UP, TAKE_BACK = range(8)
LOOK_FIRST, LOOK_SECOND, FAILED, DONE = range(8, 12)
NUM_RANKS = 3
OPEN, SOMEBODY_COMPLETES, HEADER_IS_THERE, MARK_IS_SET = 1, 2, 4, 8  # bits of `seen`
GAVE_UP, COMPLETES = 1, 2  # values of a mark

Rank = tuple[int, int, int]
Shared = tuple[tuple[int, ...], tuple[int, ...]]  # header, mark


@dataclass(frozen=True)
class Protocol:
    """What may be left out, or done in another order, to see that it matters."""

    rechecks: bool = True
    consults: bool = True
    header_first: bool = True


def put(shared: Shared, field: int, rank: int, value: int) -> Shared:
    row = list(shared[field])
    row[rank] = value
    return (tuple(row), shared[1]) if field == 0 else (shared[0], tuple(row))


def after_look(rank: Rank, header: int, mark: int) -> Rank:
    """What a rank that has withdrawn does when it has seen a peer's header and mark."""
    _, position, seen = rank
    seen &= OPEN | SOMEBODY_COMPLETES
    if mark != GAVE_UP:
        if not header:
            return (FAILED, 0, 0)
        seen |= SOMEBODY_COMPLETES if mark == COMPLETES else OPEN
    if position < NUM_RANKS - 2:
        return (LOOK_FIRST, position + 1, seen)
    if seen & SOMEBODY_COMPLETES:
        return (DONE, 0, 0)
    return (LOOK_FIRST, 0, 0) if seen & OPEN else (FAILED, 0, 0)


def step(me: int, rank: Rank, shared: Shared, protocol: Protocol) -> tuple[Rank, Shared] | None:
    """Return what happens next to one rank; None when it has ended."""
    place, position, seen = rank
    if place in (FAILED, DONE):
        return None
    stores = {
        PUBLISH: ((READ, 0, 0), 0, 1),
        DECIDE: ((THROUGH, 0, 0), 1, COMPLETES),
        GIVE_UP: ((TAKE_BACK, 0, 0), 1, GAVE_UP),
        TAKE_BACK: ((LOOK_FIRST if protocol.consults else FAILED, 0, 0), 0, 0),
    }
    if place in stores:
        then, field, value = stores[place]
        return then, put(shared, field, me, value)
    if place == THROUGH:
        return (DONE, 0, 0), shared
    peer = [other for other in range(NUM_RANKS) if other != me][position]
    header, mark = shared[0][peer], shared[1][peer]
    is_last = position == NUM_RANKS - 2
    if place == READ:
        if not header:
            return (GIVE_UP, 0, 0), shared  # its time has passed, or the peer gave up; else it reads again
        end = (RECHECK_HEADER if protocol.rechecks else DECIDE, 0, 0)
        return (end if is_last else (READ, position + 1, 0)), shared
    if place == RECHECK_HEADER:
        return (RECHECK_MARK, position, HEADER_IS_THERE * header), shared
    if place == RECHECK_MARK:
        if mark == GAVE_UP and not seen:
            return (GIVE_UP, 0, 0), shared
        return ((DECIDE, 0, 0) if is_last else (RECHECK_HEADER, position + 1, 0)), shared
    if place == LOOK_FIRST:
        found = HEADER_IS_THERE * header if protocol.header_first else MARK_IS_SET * mark
        return (LOOK_SECOND, position, seen | found), shared
    if protocol.header_first:
        return after_look(rank, seen & HEADER_IS_THERE, mark), shared
    return after_look(rank, header, seen // MARK_IS_SET), shared


def endings(protocol: Protocol) -> tuple[set[tuple[bool, ...]], int]:
    """Return which ranks can have completed when all have ended, and how many states there are."""
    start = (tuple((PUBLISH, 0, 0) for _ in range(NUM_RANKS)), ((0,) * NUM_RANKS,) * 2)
    found, todo, ended = {start}, [start], set()
    while todo:
        ranks, shared = todo.pop()
        if all(place in (FAILED, DONE) for place, _, _ in ranks):
            ended.add(tuple(place == DONE for place, _, _ in ranks))
        for me in range(NUM_RANKS):
            after = step(me, ranks[me], shared, protocol)
            if after is not None:
                following = ((*ranks[:me], after[0], *ranks[me + 1 :]), after[1])
                if following not in found:
                    found.add(following)
                    todo.append(following)
    return ended, len(found)


def test_all_ranks_complete_a_call_or_none_does() -> None:
    ended, num_states = endings(Protocol())
    assert ended == {(True,) * NUM_RANKS, (False,) * NUM_RANKS}
    assert num_states > 1000


@pytest.mark.parametrize("fault", ["rechecks", "consults", "header_first"])
def test_each_look_and_its_order_are_needed(fault: str) -> None:
    ended, _ = endings(Protocol(**{fault: False}))
    assert any(len(set(outcome)) == 2 for outcome in ended)
