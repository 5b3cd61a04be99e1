"""The slots of a receive region: which one is handed out, and when one may hold rows for peers to pull."""

from __future__ import annotations

from epee.ep.throughput_slots import SlotPool
from tests.csrc.emulated import EmulatedPlatform

STREAM = 0


def make_pool(num_slots: int) -> tuple[SlotPool, list[int]]:
    exchanged = [0]
    return SlotPool(EmulatedPlatform(), num_slots, exchanged), exchanged


def test_granted_slot_is_not_filled_before_a_later_call_was_joined() -> None:
    pool, exchanged = make_pool(1)
    slot = pool.take(STREAM, call=5)
    assert slot is not None
    pool.give_back(slot, [STREAM])
    assert pool.take(STREAM, call=None) is None
    exchanged[0] = 5  # call 5 itself: a peer may still be in it
    assert pool.take(STREAM, call=None) is None
    exchanged[0] = 6
    assert pool.take(STREAM, call=None) == slot


def test_granted_slot_may_be_granted_again_at_once() -> None:
    pool, _ = make_pool(1)
    slot = pool.take(STREAM, call=5)
    assert slot is not None
    pool.give_back(slot, [STREAM])
    assert pool.take(STREAM, call=6) == slot


def test_dispatches_and_combine_inputs_keep_to_their_slots() -> None:
    pool, _ = make_pool(2)
    places = set()
    for call in range(1, 9):  # the host runs ahead: no call is known to have been joined
        granted, filled = pool.take(STREAM, call=call), pool.take(STREAM, call=None)
        assert granted is not None
        assert filled is not None
        places.add((granted, filled))
        pool.give_back(filled, [STREAM])
        pool.give_back(granted, [STREAM])
    assert len(places) == 1


def test_want_of_a_slot_is_counted() -> None:
    pool, _ = make_pool(1)
    assert pool.take(STREAM, call=1) is not None
    assert pool.take(STREAM, call=2) is None
    assert pool.num_copies == 1
