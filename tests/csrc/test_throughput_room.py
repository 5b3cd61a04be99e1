"""Calls of several shapes out of memory that was lent once, over the emulated GPU; see `room_cases.py`."""

from __future__ import annotations

from typing import Any

import pytest

from epee.ep.throughput.gpu.place import Told
from epee.errors import ProtocolError
from tests.csrc import room_cases, survival_buffer_cases, throughput_rejoin
from tests.csrc.emulated import has_compiler
from tests.csrc.emulated_buffer import emulated
from tests.ep.buffer_cases import check_call
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


def run(num_ranks: int, name: str, *args: Any) -> list[Any]:
    """Run a function of `room_cases` on ranks with emulated GPUs."""
    return run_ranks(emulated, num_ranks, getattr(room_cases, name), *args, timeout_s=200)


def check(
    num_ranks: int, by_rank: list[Any], order: tuple[int, ...], turns: tuple[int, ...], many: bool = False
) -> None:
    """Compare the calls of shapes, `order` says which, in `turns` with the reference."""
    setups = room_cases.many_setups(num_ranks) if many else room_cases.setups_of(num_ranks)
    for at, turn in enumerate(turns):
        for place, which in enumerate(order):
            check_call(setups[which], setups[which].calls[turn], [found[at][place] for found in by_rank])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("expert_bytes", [room_cases.EXPERT_ROOM, 0])
def test_results_of_shapes_live_side_by_side_and_agree_with_the_reference(num_ranks: int, expert_bytes: int) -> None:
    check(num_ranks, run(num_ranks, "by_turns", expert_bytes), (0, 1, 2), (0, 1, 2, 3))


def test_calls_of_shapes_in_turn_agree_with_the_reference_again_and_again() -> None:
    check(2, run(2, "again_and_again"), (0, 1, 2), (0, 1, 0, 1, 0, 2, 3))


def test_calls_with_many_tokens_agree_with_the_reference() -> None:
    check(2, run(2, "many"), (0, 1), (0, 1), many=True)


def test_a_buffer_for_one_shape_serves_others_that_fit() -> None:
    check(2, run(2, "plain"), (1, 0, 1), (0, 1))


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_ranks_in_different_shapes_are_told_alike_and_the_room_works_on(layout: str) -> None:
    here, there = run(2, "disagree", layout)
    for name, (kind, text) in here.items():
        assert kind == there[name][0] == "MismatchError", (name, text, there[name])
        is_shape = name not in ("one with a handle", "both with handles", "combines")
        assert ("the shape" if is_shape else "handle") in text, (name, text)
        if is_shape:
            assert text == there[name][1], name


def test_what_does_not_fit_and_handles_of_other_shapes_are_refused() -> None:
    run(2, "refusals")


def test_rooms_that_differ_or_hold_nothing_are_refused() -> None:
    for found in run(2, "rooms_differ"):
        says = ("room_bytes", "room_expert_bytes", "too small", "bytes", "at least 1", "room_bytes")
        assert [kind for kind, _ in found[:2]] == ["MismatchError"] * 2
        assert all(kind in ("InvalidArgument", "DoesNotFit", "MismatchError") for kind, _ in found[2:])
        assert all(words in text for words, (_, text) in zip(says, found, strict=True)), found


def test_weights_do_not_touch_a_result_of_another_shape() -> None:
    assert run(2, "weights_beside_rows_of_another") == [True, True]


def test_cpu_buffers_serve_one_shape() -> None:
    run_ranks(room_cases.on_cpus, 2)


def in_room(slot: int, num_processes: int, folder: str, name: str, *args: Any) -> Any:
    """Run a function of `throughput_rejoin` on the emulated GPU and in a room."""
    survival_buffer_cases.make = room_cases.make_shaped  # type: ignore[assignment]
    return emulated(slot, num_processes, getattr(throughput_rejoin, name), folder, *args)


def test_a_death_before_the_first_call_is_told_and_survivors_go_on_in_two_shapes() -> None:
    results = run_ranks(emulated, 3, room_cases.dies_first, dead={2}, timeout_s=200)
    assert results[:2] == ["ok", "ok"]


def test_a_newcomer_takes_part_in_a_room() -> None:
    throughput_rejoin.check_replaced(in_room, (2, 1), timeout_s=200)


def test_a_rank_that_tells_of_impossible_memory_is_not_believed() -> None:
    good = Told(b"d" * 32, b"o" * 32, 1 << 20, 1, 1)
    assert Told.parse(good.pack()) == good
    for slot_bytes in (0, (1 << 48) + 1):
        with pytest.raises(ProtocolError, match=f"{slot_bytes} bytes"):
            Told.parse(good._replace(slot_bytes=slot_bytes).pack())
    with pytest.raises(ProtocolError, match="bytes"):
        Told.parse(good.pack()[:-1])
