"""The words of a proxy: where they lie, what they hold, and which ranks have streams with each other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from epee.errors import InvalidArgument, ProtocolError
from epee.link.proxy.words import (
    ABORT,
    ASLEEP,
    KINDS,
    LINE_WORDS,
    MAX_CHUNK_BYTES,
    ProxyShape,
    chunk_word,
    island_topology,
    parse_chunk_word,
)

SHAPES = [
    ProxyShape(*numbers) for numbers in itertools.product((0, 1, 3), (1, 2, 8), (1, 4, 16), (1_851_392,), (1408,), (1,))
] + [ProxyShape(2, 3, 12, 16, 16, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_two_words_or_slots_share_memory(shape: ProxyShape) -> None:
    spans = [(ABORT, ABORT + 1)]
    for process in range(shape.num_processes):
        first = shape.process_words(process)
        spans.append((first, first + ASLEEP + 1))
    for partner, kind in itertools.product(range(shape.num_partners), KINDS):
        *columns, taken = shape.stream_words(partner, kind)
        count = shape.slots(kind)
        spans += [(first, first + count) for first in columns]
        spans.append((taken, taken + count * shape.num_readers))
    assert all(first % LINE_WORDS == 0 for first, _ in spans), "words of different writers share no cache line"
    spans.sort()
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= shape.num_words

    slots = sorted(
        (area(partner) + shape.base(kind) + slot * shape.size(kind), shape.size(kind))
        for area in (shape.out_offset, shape.in_offset)
        for partner, kind in itertools.product(range(shape.num_partners), KINDS)
        for slot in range(shape.slots(kind))
    )
    assert all(first + nbytes == after for (first, nbytes), (after, _) in itertools.pairwise(slots))
    assert shape.staging_bytes == (sum(slots[-1]) if slots else 0)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"num_slots": 0}, "num_slots must be a number from 1 to 64, got 0"),
        ({"num_slots": 65}, "num_slots must be"),
        ({"num_readers": 17}, "num_readers must be"),
        ({"num_partners": -1}, "num_partners must be"),
        ({"num_partners": True}, "num_partners must be"),
        ({"slot_bytes": MAX_CHUNK_BYTES + 16}, "slot_bytes must be"),
        ({"slot_bytes": 100}, "multiples of 16, got 100 and 32; round up"),
        ({"row_bytes": 8}, "row_bytes must be"),
        ({"num_processes": 3}, "num_slots must be a multiple of num_processes, got 4 and 3"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], rule: str) -> None:
    good = {"num_partners": 1, "num_readers": 1, "num_slots": 4, "slot_bytes": 160, "row_bytes": 32, "num_processes": 2}
    ProxyShape(**good)
    with pytest.raises(InvalidArgument, match=rule):
        ProxyShape(**(good | changes))


def test_a_chunk_word_says_what_it_was_made_of() -> None:
    for chunk, nbytes, is_for_one in itertools.product((0, 7, (1 << 40) - 2), (0, 16, MAX_CHUNK_BYTES), (False, True)):
        word = chunk_word(chunk, nbytes, is_for_one)
        assert 0 < word < 1 << 64
        assert parse_chunk_word(word, MAX_CHUNK_BYTES) == (chunk, nbytes, is_for_one)


@pytest.mark.parametrize("word", [chunk_word(3, 176), chunk_word(3, 160) | 10, chunk_word(3, 160) | 8])
def test_a_word_that_cannot_be_is_refused(word: int) -> None:
    with pytest.raises(ProtocolError, match="a slot has 160"):
        parse_chunk_word(word, 160)


def test_fresh_memory_announces_nothing() -> None:
    assert parse_chunk_word(0, 160).chunk == -1


def test_a_token_crosses_once_to_the_rank_of_equal_position() -> None:
    for rank, partners in enumerate([(2,), (3,), (0,), (1,)]):
        assert island_topology(rank, ((0, 1), (2, 3))).partners() == partners


def test_islands_of_unequal_size_share_their_gateways() -> None:
    partners = [island_topology(rank, ((0,), (1, 2, 3))).partners() for rank in range(4)]
    assert partners == [(1, 2, 3), (0,), (0,), (0,)]


def test_islands_need_not_be_runs_of_ranks() -> None:
    topology = island_topology(2, ((0, 2), (1, 3)))
    assert topology.here == (0, 2)
    assert topology.gateways() == {1: 3}


@pytest.mark.parametrize(
    "islands", [((0, 1), (1, 2)), ((0,), (2,)), ((1, 0),), ((0,), ()), ((0,), (1, 1)), (), ((1, 2),)]
)
def test_islands_that_are_no_partition_are_refused(islands: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InvalidArgument, match="islands must hold each rank once"):
        island_topology(0, islands)
