"""Every interleaving of the loads and stores by which calls are completed or withdrawn (`engine/withdrawal.py`).

One call, three ranks, each load and each store a step of its own; who waits may run out of timeouts at any moment. A
rank is `(place, position, seen, stances)`: what it does next, at which peer, what it has loaded there first, and what
it has found of the peers before. What the words mean is said by the product's own mapping and rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from epee.engine.outbox import (
    CELL_WORDS,
    COMPLETES,
    CONSUMED,
    CONSUMED_TOO,
    LIFE,
    LIFE_LEFT,
    LIFE_READY,
    SIGNATURE,
    STATE_WORDS,
    TAG,
    failed_by_view,
)
from epee.engine.outbox import GAVE_UP as MARK
from epee.engine.signature import REFUSED
from epee.engine.withdrawal import CallWords, _stance_of
from epee.view.protocol.withdrawal import End, Stance, end_of

PUBLISH, READ, RECHECK_HEADER, RECHECK_MARK, DECIDE, THROUGH, GIVE_UP, TAKE_BACK = range(8)
LOOK_FIRST, LOOK_SECOND, FAILED, DONE = range(8, 12)
NUM_RANKS = 3
SEQ = CALL_TAG = 1  # of the call

Rank = tuple[int, int, int, tuple[Stance, ...]]
Shared = tuple[tuple[int, ...], tuple[int, ...]]  # header, mark


@dataclass(frozen=True)
class Protocol:
    """What may be left out, or done in another order, to see that it matters."""

    rechecks: bool = True
    consults: bool = True
    header_first: bool = True
    awaits_open: bool = True


def put(shared: Shared, field: int, rank: int, value: int) -> Shared:
    row = list(shared[field])
    row[rank] = value
    return (tuple(row), shared[1]) if field == 0 else (shared[0], tuple(row))


def stance_of(words_of_cell: dict[int, int], consumed: int = 0, life: int = LIFE_READY) -> Stance:
    """What the product reads from a peer's words; its call is no refusal where nothing else is said."""
    words = [0] * (CELL_WORDS + STATE_WORDS)
    words[CONSUMED] = words[CONSUMED_TOO] = consumed
    words[LIFE] = life
    for word, value in ({SIGNATURE: REFUSED + 1} | words_of_cell).items():
        words[STATE_WORDS + word] = value
    return _stance_of(dict(enumerate(words)), CallWords(STATE_WORDS, CALL_TAG, SEQ))


@cache
def stance(header: int, mark: int) -> Stance:
    """The same from a header and a mark alone."""
    return stance_of({TAG: header, MARK: mark})


def after_look(rank: Rank, header: int, mark: int, protocol: Protocol) -> Rank:
    """What a rank that has withdrawn does when it has seen a peer's header and mark."""
    found = stance(header, mark)
    if found is Stance.OPEN and not protocol.awaits_open:
        found = Stance.GAVE_UP
    stances = (*rank[3], found)
    if len(stances) < NUM_RANKS - 1:
        return (LOOK_FIRST, len(stances), 0, stances)
    place = {End.COMPLETES: DONE, End.FAILED: FAILED, End.OPEN: LOOK_FIRST}
    return (place[end_of(dict(enumerate(stances))).end], 0, 0, ())


def step(me: int, rank: Rank, shared: Shared, protocol: Protocol) -> tuple[Rank, Shared] | None:
    """Return what happens next to one rank; None when it has ended."""
    place, position, seen, stances = rank
    if place in (FAILED, DONE):
        return None
    stores = {
        PUBLISH: (READ, 0, CALL_TAG),
        DECIDE: (THROUGH, 1, COMPLETES),
        GIVE_UP: (TAKE_BACK, 1, CALL_TAG),
        TAKE_BACK: (LOOK_FIRST if protocol.consults else FAILED, 0, 0),
    }
    if place in stores:
        then, field, value = stores[place]
        return (then, 0, 0, ()), put(shared, field, me, value)
    if place == THROUGH:
        return (DONE, 0, 0, ()), shared
    peer = [other for other in range(NUM_RANKS) if other != me][position]
    header, mark = shared[0][peer], shared[1][peer]
    is_last = position == NUM_RANKS - 2
    if place == READ:
        if not header:
            return (GIVE_UP, 0, 0, ()), shared  # its time has passed, or the peer gave up; else it reads again
        end = (RECHECK_HEADER if protocol.rechecks else DECIDE, 0, 0, ())
        return (end if is_last else (READ, position + 1, 0, ())), shared
    if place == RECHECK_HEADER:
        return (RECHECK_MARK, position, header, ()), shared
    if place == RECHECK_MARK:
        if mark == CALL_TAG and not seen:
            return (GIVE_UP, 0, 0, ()), shared
        return ((DECIDE, 0, 0, ()) if is_last else (RECHECK_HEADER, position + 1, 0, ())), shared
    if place == LOOK_FIRST:
        return (LOOK_SECOND, position, header if protocol.header_first else mark, stances), shared
    if protocol.header_first:
        return after_look(rank, seen, mark, protocol), shared
    return after_look(rank, header, seen, protocol), shared


def endings(protocol: Protocol) -> tuple[set[tuple[bool, ...]], int]:
    """Return which ranks can have completed when all have ended, and how many states there are."""
    start = (tuple((PUBLISH, 0, 0, ()) for _ in range(NUM_RANKS)), ((0,) * NUM_RANKS,) * 2)
    found, todo, ended = {start}, [start], set()
    while todo:
        ranks, shared = todo.pop()
        if all(place in (FAILED, DONE) for place, _, _, _ in ranks):
            ended.add(tuple(place == DONE for place, _, _, _ in ranks))
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


@pytest.mark.parametrize("fault", ["rechecks", "consults", "header_first", "awaits_open"])
def test_each_look_and_its_order_are_needed(fault: str) -> None:
    ended, _ = endings(Protocol(**{fault: False}))
    assert any(len(set(outcome)) == 2 for outcome in ended)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({}, Stance.MISSING),
        ({TAG: CALL_TAG}, Stance.OPEN),
        ({TAG: CALL_TAG, SIGNATURE: REFUSED}, Stance.FAILED),
        ({TAG: CALL_TAG, SIGNATURE: REFUSED, MARK: CALL_TAG}, Stance.GAVE_UP),
        ({TAG: CALL_TAG, MARK: failed_by_view(CALL_TAG)}, Stance.OPEN),
        ({MARK: failed_by_view(CALL_TAG)}, Stance.OPEN),
        ({TAG: CALL_TAG + 1}, Stance.OPEN),
        ({TAG: CALL_TAG + 1, SIGNATURE: REFUSED}, Stance.OPEN),
    ],
)
def test_words_of_a_peer_that_is_in_the_call_or_before_it(words: dict[int, int], what: Stance) -> None:
    assert stance_of(words) is what


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({}, Stance.MISSING),
        ({TAG: CALL_TAG}, Stance.GAVE_UP),
        ({TAG: CALL_TAG, MARK: COMPLETES}, Stance.COMPLETES),
        ({TAG: CALL_TAG + 1, MARK: COMPLETES}, Stance.UNREADABLE),
        ({TAG: CALL_TAG + 1, SIGNATURE: REFUSED}, Stance.UNREADABLE),
    ],
)
def test_words_of_a_peer_that_is_through_with_the_call(words: dict[int, int], what: Stance) -> None:
    assert stance_of(words, consumed=SEQ) is what


def test_who_has_left_completes_no_more() -> None:
    for words in ({TAG: CALL_TAG}, {TAG: CALL_TAG + 1}):
        assert stance_of(words, consumed=SEQ - 1, life=LIFE_LEFT) is Stance.GAVE_UP
