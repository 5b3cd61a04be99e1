"""The slots of a receive region: which one is handed out, and when one may hold rows for peers to pull."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from epee.ep.throughput.gpu.slots import FIRST_GHOST, ReceiveSlotPool
from epee.errors import ResourceError
from tests.csrc.emulated import EmulatedPlatform

STREAM = 0


def make_pool(num_slots: int) -> tuple[ReceiveSlotPool, list[int]]:
    exchanged = [0]
    return ReceiveSlotPool(EmulatedPlatform(), num_slots, exchanged), exchanged


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


def test_a_result_may_be_collected_while_the_pool_is_at_work() -> None:
    """A garbage collection may run in the thread that holds the pool's lock."""

    class Result:
        """In a cycle with itself, so that a collection finds it."""

        def __init__(self, pool: ReceiveSlotPool, slot: int) -> None:
            self.own = self
            weakref.finalize(self, pool.give_back, slot, [STREAM])

    class Collecting(list[int]):
        """Ranks; to read them takes a collection."""

        def __iter__(self) -> Iterator[int]:
            gc.collect()
            return super().__iter__()

    pool, _ = make_pool(2)
    slots = [pool.take(STREAM, call=5), pool.take(STREAM, call=5)]
    for slot in slots:
        assert slot is not None
        Result(pool, slot)
    worker = threading.Thread(target=pool.haunt, args=(Collecting([1]),), daemon=True)
    worker.start()
    worker.join(20)
    assert not worker.is_alive(), "it waits for the lock that it holds"
    pool.release([1])
    assert {pool.take(STREAM, call=6), pool.take(STREAM, call=6)} == {0, 1}


def test_want_of_a_slot_is_counted() -> None:
    pool, _ = make_pool(1)
    assert pool.take(STREAM, call=1) is not None
    assert pool.take(STREAM, call=2) is None
    assert pool.num_copies == 1


def test_haunted_slots_are_not_lent_until_the_zombie_is_gone() -> None:
    pool, exchanged = make_pool(2)
    slot = pool.take(STREAM, call=5)
    assert slot is not None
    exchanged[0] = 5  # the zombie may be in call 5 still
    pool.give_back(slot, [STREAM])
    pool.haunt([3])
    exchanged[0] = 100
    assert pool.haunted == {slot}
    other = pool.take(STREAM, call=101)
    assert other not in (None, slot)
    assert pool.take(STREAM, call=102) is None
    assert pool.take(STREAM, call=None) is None
    pool.release([2])
    assert pool.haunted == {slot}
    pool.release([3])
    assert pool.take(STREAM, call=None) == slot


def test_all_slots_that_a_zombie_may_write_are_haunted() -> None:
    pool, exchanged = make_pool(3)
    slots = {pool.take(STREAM, call=5), pool.take(STREAM, call=6)}
    exchanged[0] = 5
    pool.haunt(frozenset({3}))
    assert pool.haunted == slots
    pool.pass_on(3, {FIRST_GHOST}, is_member=False)
    pool.release([3])  # who has the rank now
    assert pool.haunted == slots
    pool.release([FIRST_GHOST])
    assert not pool.haunted


def test_another_slot_takes_the_place_of_a_haunted_landing_slot() -> None:
    pool, exchanged = make_pool(2)
    first = pool.grant_landing(7, for_graph=False)
    exchanged[0] = 7
    pool.haunt([1])
    assert pool.landing != first
    taken = pool.take(STREAM, call=8)
    assert taken not in (None, first, pool.landing)
    assert pool.take(STREAM, call=8) is None
    pool.release([1])
    assert pool.take(STREAM, call=9) == first  # the old landing slot is one like others now
    assert pool.landing != first


def test_graphs_slots_are_haunted_whatever_they_were_granted_last() -> None:
    pool, exchanged = make_pool(2)
    slot = pool.take(STREAM, call=3, for_graph=True)
    exchanged[0] = 50
    pool.haunt([1])
    assert pool.haunted == {slot}


def test_no_clean_slot_is_an_error_that_names_the_zombie() -> None:
    pool, exchanged = make_pool(1)
    slot = pool.take(STREAM, call=5)
    pool.grant_landing(6, for_graph=False)
    exchanged[0] = 5
    pool.haunt([2])
    assert pool.haunted == {slot, 1}
    with pytest.raises(ResourceError, match="may still be written by rank 2"):
        pool.grant_landing(7, for_graph=False)


def test_a_zombie_goes_on_haunting_when_another_process_has_its_rank() -> None:
    pool, exchanged = make_pool(2)
    slot = pool.take(STREAM, call=5)
    assert slot is not None
    exchanged[0] = 5
    pool.give_back(slot, [STREAM])
    pool.haunt([1])
    pool.pass_on(1, [FIRST_GHOST], is_member=False)
    pool.release([0, 1, 2])  # the members of the new view: rank 1 is one of them
    assert pool.haunted == {slot}
    pool.release([FIRST_GHOST])
    assert not pool.haunted


def test_a_zombie_that_was_never_left_out_haunts_what_it_was_granted_last() -> None:
    pool, exchanged = make_pool(1)
    slot = pool.take(STREAM, call=5)
    pool.grant_landing(6, for_graph=False)
    exchanged[0] = 5
    pool.pass_on(1, [FIRST_GHOST], is_member=True)
    pool.release([0, 1])
    assert pool.haunted == {slot, 1}
    with pytest.raises(ResourceError, match="written by the process that had the place of a replaced rank, which"):
        pool.grant_landing(7, for_graph=False)


def test_who_was_replaced_and_has_ended_haunts_nothing() -> None:
    pool, exchanged = make_pool(1)
    assert pool.take(STREAM, call=5) is not None
    exchanged[0] = 5
    pool.haunt([1])
    pool.pass_on(1, [], is_member=True)
    assert not pool.haunted
