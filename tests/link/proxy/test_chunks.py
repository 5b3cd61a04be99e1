"""Streams of chunks between proxies, simulated: nothing is lost, doubled or read too early, and all of it ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epee.errors import ProtocolError
from epee.link.proxy.chunks import ChunkReceiver, ChunkSender
from epee.link.proxy.words import SIZE_BITS, chunk_word

from .world import SLOT_BYTES, World

ISLANDS = [((0,), (1,)), ((0, 1), (2, 3)), ((0,), (1, 2, 3)), ((0, 2), (1, 3)), ((0,), (1,), (2,))]


@pytest.mark.parametrize("islands", ISLANDS, ids=str)
def test_every_reader_finds_every_chunk_once_and_in_order(islands: tuple[tuple[int, ...], ...]) -> None:
    for seed in range(6):
        World(seed, islands, num_chunks=24, has_ones=seed % 2 == 1).run()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_few_slots_carry_a_thousand_chunks(num_slots: int) -> None:
    World(num_slots, num_slots=num_slots, num_chunks=1000).run(400_000)


@pytest.mark.parametrize(("num_slots", "num_processes"), [(2, 2), (4, 2), (8, 4), (3, 3)])
@pytest.mark.parametrize("first", [0, 5, (1 << 32) - 3])
def test_processes_share_a_stream_from_any_first_number(num_slots: int, num_processes: int, first: int) -> None:
    for seed in range(3):
        World(seed, num_slots=num_slots, num_processes=num_processes, first=first, has_ones=True).run()


def test_a_dead_reader_does_not_hold_up_the_others() -> None:
    for seed in range(4):
        World(seed, ((0,), (1, 2, 3)), num_slots=2, num_chunks=30, dead=3).run()


@pytest.mark.parametrize("islands", ISLANDS[:3], ids=str)
def test_a_process_may_die_between_any_two_words(islands: tuple[tuple[int, ...], ...]) -> None:
    """Nobody reads a wrong byte before the next epoch, nor in it, in the same memory."""
    for accesses in range(1, 120, 7):
        world = World(accesses, islands, num_slots=4, num_processes=2, num_chunks=16)
        world.crash(accesses % len(islands), accesses // 7 % 2, accesses, 3000)
        world.begin(100)
        world.run()
        world.crash(0, 0, accesses, 1500)
        world.begin(200)
        world.run()


# ---- one end alone


def _sender(num_slots: int = 4, step: int = 1, first: int = 0) -> tuple[ChunkSender, list[int], list[int]]:
    posted, freed = [0] * num_slots, [0] * num_slots
    return ChunkSender(posted, freed, SLOT_BYTES, first, step), posted, freed


def _receiver(num_slots: int = 4, step: int = 1, first: int = 0) -> tuple[ChunkReceiver, list[int], list[int]]:
    arrived, taken = [0] * num_slots, [0] * num_slots * 2
    return ChunkReceiver(arrived, taken, SLOT_BYTES, first, step, (0, 1), 0), arrived, taken


def test_posted_chunks_go_together_up_to_the_end_of_the_slots() -> None:
    sender, posted, freed = _sender()
    for chunk in range(4):
        posted[chunk] = chunk_word(chunk, 160 if chunk < 3 else 320)
    run = sender.next_run()
    assert run is not None
    assert (run.chunk, run.slot, run.num_chunks, run.nbytes) == (0, 0, 3, 160)
    assert run.words() == posted[:3]
    run = sender.next_run()
    assert run is not None
    assert (run.chunk, run.num_chunks, run.nbytes) == (3, 1, 320), "chunks of another size go apart"
    assert sender.next_run() is None
    sender.finish(2)
    assert freed == [1, 2, 0, 0]


def test_a_sender_waits_for_the_credit_of_a_slot() -> None:
    sender, posted, _ = _sender(2)
    for slot in range(2):
        posted[slot] = chunk_word(slot, 16)
    assert sender.next_run().num_chunks == 2  # type: ignore[union-attr]
    posted[0] = chunk_word(2, 16)
    assert sender.next_run() is None
    assert sender.room == 0
    sender.hear_credit(1)
    assert sender.next_run().chunk == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("credit", [-1, 3, 1 << 63])
def test_credit_for_what_was_not_sent_is_refused(credit: int) -> None:
    sender, posted, _ = _sender()
    posted[:2] = [chunk_word(0, 16), chunk_word(1, 16)]
    sender.next_run()
    with pytest.raises(ProtocolError, match=r"reports chunks below .* as taken; 0 \.\.\. 2"):
        sender.hear_credit(credit)


def test_credit_that_goes_back_or_is_no_chunk_of_the_process_is_refused() -> None:
    sender, posted, _ = _sender(4, step=2, first=1)
    for chunk in (1, 3):
        posted[chunk] = chunk_word(chunk, 16)
        assert sender.next_run().num_chunks == 1  # type: ignore[union-attr]
    with pytest.raises(ProtocolError, match="as taken"):
        sender.hear_credit(2)
    sender.hear_credit(3)
    with pytest.raises(ProtocolError, match="as taken"):
        sender.hear_credit(1)


@pytest.mark.parametrize("word", [chunk_word(1, 16), chunk_word(0, SLOT_BYTES + 16), chunk_word(0, 16) | 10])
def test_nonsense_of_a_kernel_is_an_error(word: int) -> None:
    sender, posted, _ = _sender()
    posted[0] = word
    with pytest.raises(ProtocolError):
        sender.next_run()


def test_words_of_an_earlier_epoch_are_no_chunks() -> None:
    sender, posted, _ = _sender(first=8)
    posted[:] = [chunk_word(chunk, 16) for chunk in (4, 5, 6, 7)]
    assert sender.next_run() is None
    receiver, _, taken = _receiver(first=8)
    receiver.arrive(chunk_word(8, 16), 16)
    taken[:] = [5, 5, 6, 6, 7, 7, 8, 8]
    assert receiver.credit() is None


@pytest.mark.parametrize(
    ("word", "nbytes"), [(chunk_word(1, 16), 16), (chunk_word(0, 16), 32), (chunk_word(0, SLOT_BYTES + 16), 16), (0, 0)]
)
def test_an_announcement_that_does_not_fit_is_refused(word: int, nbytes: int) -> None:
    receiver, arrived, _ = _receiver()
    with pytest.raises(ProtocolError):
        receiver.arrive(word, nbytes)
    assert arrived == [0] * 4


@pytest.mark.parametrize(("slot", "end"), [(1, 16), (0, SLOT_BYTES + 1), (-1, 0), (1 << 60, 1)])
def test_only_the_next_slot_may_be_written_and_within_its_bounds(slot: int, end: int) -> None:
    receiver, _, _ = _receiver()
    with pytest.raises(ProtocolError, match=r"slot 0 is next"):
        receiver.admit(slot, end)
    receiver.admit(0, SLOT_BYTES)


def test_a_slot_with_readers_may_not_be_written() -> None:
    receiver, _, taken = _receiver(2)
    for chunk in range(2):
        receiver.arrive(chunk_word(chunk, 16), 16)
    for _ in range(2):
        with pytest.raises(ProtocolError, match=r"only those below 0 are taken"):
            receiver.admit(0, 16)
        taken[:2] = [1, 1]  # taken, but not reported
    assert receiver.credit() == 1
    receiver.admit(0, 16)


def test_one_reader_is_enough_for_a_chunk_that_is_for_one() -> None:
    receiver, _, taken = _receiver(2)
    receiver.arrive(chunk_word(0, 16, is_for_one=True), 16)
    receiver.arrive(chunk_word(1, 16), 16)
    taken[0], taken[2] = 1, 2  # of the owner
    assert receiver.credit() == 1
    assert receiver.credit() is None
    receiver.drop_reader(1)
    assert receiver.credit() == 2


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.integers(0, (1 << 64) - 1), min_size=4, max_size=4),
    credit=st.integers(0, (1 << 64) - 1),
    first=st.integers(0, 1 << 38),
)
def test_no_word_makes_a_machine_leave_its_slots(words: list[int], credit: int, first: int) -> None:
    sender, posted, freed = _sender(first=first)
    receiver, arrived, taken = _receiver(first=first)
    posted[:], taken[:4] = words, words
    try:
        run = sender.next_run()
        if run is not None:
            assert run.slot + run.num_chunks <= 4
            assert run.nbytes <= SLOT_BYTES
            assert run.word >> SIZE_BITS == first + 1
    except ProtocolError:
        assert sender.next == first
    try:
        sender.hear_credit(credit)
    except ProtocolError:
        assert sender.taken == first
    assert first <= sender.taken <= sender.next <= sender.taken + 4
    try:
        receiver.arrive(words[0], words[0] % (1 << SIZE_BITS))
    except ProtocolError:
        assert arrived == [0] * 4
    receiver.credit()
    assert first <= receiver.granted <= receiver.taken <= receiver.next <= receiver.granted + 4
    assert freed == [0] * 4
