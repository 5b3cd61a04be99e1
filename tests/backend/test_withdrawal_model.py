"""Every interleaving of the loads and stores by which calls are completed or withdrawn (`epee/backend/withdrawal.py`).

One call, three ranks, each load and each store a step of its own; who waits may run out of patience at any moment. A
rank is `(place, peer, seen)`: what it does next, at which peer, and what it has found in this pass.
"""

from __future__ import annotations

import pytest

NOTHING, HEADER, TAKEN_BACK = 0, 1, 2  # what a reader finds of a cell
PUBLISH, READ, RECHECK, THROUGH, GIVE_UP, TAKE_BACK, LOOK_THROUGH, LOOK_CELL, FAILED, DONE = range(10)
NUM_RANKS = 3

Rank = tuple[int, int, int]
Shared = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # header, gave up, through
UNDECIDED, PEER_IS_THROUGH = 1, 2  # bits of `seen` while it consults


def peers(rank: int) -> list[int]:
    return [peer for peer in range(NUM_RANKS) if peer != rank]


def put(shared: Shared, field: int, rank: int, value: int) -> Shared:
    row = list(shared[field])
    row[rank] = value
    return (*shared[:field], tuple(row), *shared[field + 1 :])  # type: ignore[return-value]


def steps(rank: int, state: Rank, shared: Shared, rechecks: bool, consults: bool) -> list[tuple[Rank, Shared]]:
    """Return what may happen next to one rank; nothing when it has ended."""
    place, position, seen = state
    others = peers(rank)
    if place in (FAILED, DONE):
        return []
    if place == PUBLISH:
        return [((READ, 0, 0), put(shared, 0, rank, 1))]
    if place == GIVE_UP:
        return [((TAKE_BACK, 0, 0), put(shared, 1, rank, 1))]
    if place == TAKE_BACK:
        return [((LOOK_THROUGH if consults else FAILED, 0, 0), put(shared, 0, rank, 0))]
    if place == THROUGH:
        return [((DONE, 0, 0), put(shared, 2, rank, 1))]
    peer = others[position]
    header, gave_up = shared[0][peer], shared[1][peer]
    is_last = position == len(others) - 1
    if place == READ:
        if header:
            end = (RECHECK, 0, 0) if rechecks else (THROUGH, 0, 0)
            return [(end if is_last else (READ, position + 1, 0), shared)]
        give_up: tuple[Rank, Shared] = ((GIVE_UP, 0, 0), shared)  # its time has passed, or the peer gave up
        return [give_up]  # else it reads again: the same state
    if place == RECHECK:
        if gave_up and not header:
            return [((GIVE_UP, 0, 0), shared)]
        return [((THROUGH, 0, 0) if is_last else (RECHECK, position + 1, 0), shared)]
    if place == LOOK_THROUGH:
        return [((LOOK_CELL, position, seen & UNDECIDED | PEER_IS_THROUGH * shared[2][peer]), shared)]
    assert place == LOOK_CELL
    if not gave_up and not header:
        return [((FAILED, 0, 0), shared)]
    if not gave_up and seen & PEER_IS_THROUGH:
        return [((DONE, 0, 0), put(shared, 2, rank, 1))]
    undecided = seen & UNDECIDED or (UNDECIDED if not gave_up else 0)
    if not is_last:
        return [((LOOK_THROUGH, position + 1, undecided), shared)]
    return [((LOOK_THROUGH, 0, 0) if undecided else (FAILED, 0, 0), shared)]


def endings(rechecks: bool = True, consults: bool = True) -> tuple[set[tuple[bool, ...]], int]:
    """Return which ranks can have completed when all have ended, and how many states there are."""
    start = (tuple((PUBLISH, 0, 0) for _ in range(NUM_RANKS)), ((0,) * NUM_RANKS,) * 3)
    found, todo, ended = {start}, [start], set()
    while todo:
        ranks, shared = todo.pop()
        if all(place in (FAILED, DONE) for place, _, _ in ranks):
            ended.add(tuple(place == DONE for place, _, _ in ranks))
        for rank in range(NUM_RANKS):
            for state, after in steps(rank, ranks[rank], shared, rechecks, consults):
                following = ((*ranks[:rank], state, *ranks[rank + 1 :]), after)
                if following not in found:
                    found.add(following)
                    todo.append(following)
    return ended, len(found)


def test_all_ranks_complete_a_call_or_none_does() -> None:
    ended, num_states = endings()
    assert ended == {(True,) * NUM_RANKS, (False,) * NUM_RANKS}
    assert num_states > 1000


@pytest.mark.parametrize(("rechecks", "consults"), [(False, True), (True, False)])
def test_neither_look_can_be_left_out(rechecks: bool, consults: bool) -> None:
    ended, _ = endings(rechecks, consults)
    assert any(len(set(outcome)) == 2 for outcome in ended)
