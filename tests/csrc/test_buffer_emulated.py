"""`epee.Buffer` on GPUs, without one: the cases of the CPU buffer, the kernels built by g++, real rank processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.csrc.emulated import has_compiler
from tests.csrc.emulated_buffer import emulated
from tests.ep import gpu_buffer_cases, test_buffer_failures, test_buffer_refusals, test_combine_order
from tests.ep.buffer_cases import ROUTINGS, Call, Setup, check_setups, same_bits
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


def _check(num_ranks: int, *setups: Setup) -> None:
    check_setups(num_ranks, list(setups), timeout_s=200, around=emulated)


def setup_of(num_ranks: int, *calls: Call, **changes: Any) -> Setup:
    """A small buffer for the calls."""
    return replace(Setup(num_ranks, 2, 16, 2, "bfloat16", 2, calls), **changes)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_every_routing_agrees_with_the_reference(num_ranks: int, layout: str) -> None:
    counts = tuple((7 + 5 * rank) % 12 for rank in range(num_ranks))
    calls = [
        Call(
            seed, counts, routing, layout, alignment, num_bias=seed % 3, in_place=seed % 2 == 0, with_out=seed % 3 == 1,
            with_weights=seed != 3, with_again=seed % 2 == 1, with_weights_back=seed != 2,
        )
        for seed, (routing, alignment) in enumerate(zip(ROUTINGS, (1, 4, 1, 3, 8, 1), strict=True))
        if layout == "rank" or routing != "mask"
    ]  # fmt: skip
    calls = [replace(call, with_weights=call.with_weights and call.routing != "mask") for call in calls]
    calls = [replace(call, with_again=call.with_again and call.routing != "mask") for call in calls]
    _check(num_ranks, setup_of(num_ranks, *calls, num_slots=1), setup_of(num_ranks, *calls, num_topk=5))


@pytest.mark.parametrize("payload", ["float16", "float32", "fp8", "fp8 strided", "fp8 packed", "fp8 mx", "fp8 most"])
def test_every_payload_agrees_with_the_reference(payload: str) -> None:
    dtype = "float32" if payload == "float32" else "bfloat16"
    calls = [
        Call(seed, (9, 0, 4), payload=payload, layout=layout, expert_alignment=1 + 3 * seed, num_bias=seed)
        for seed, layout in enumerate(("rank", "expert"))
    ]
    _check(3, setup_of(3, *calls, hidden=512, dtype=dtype, num_topk=3))


@pytest.mark.parametrize("hidden", [16, 48, 1040])
def test_scales_of_any_block_size_travel_beside_any_row_of_whole_pieces(hidden: int) -> None:
    calls = [
        Call(1, (9, 4), payload=payload, layout=layout, expert_alignment=4)
        for payload in ("fp8 mx", "fp8 most")
        for layout in ("rank", "expert")
    ]
    _check(2, setup_of(2, *calls, hidden=hidden, num_topk=3))


def run(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a rank function with `epee.Buffer` on the emulated GPU."""
    return run_ranks(emulated, num_ranks, function, *args, timeout_s=200)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_results_without_cpu_sync_are_of_full_capacity(layout: str) -> None:
    run(3, gpu_buffer_cases.full_capacity, layout)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_two_combine_inputs_do_not_share_memory(layout: str) -> None:
    run(2, gpu_buffer_cases.two_places, layout)


def test_events_and_streams_have_their_meaning_without_a_gpu() -> None:
    run(2, gpu_buffer_cases.events)


def test_a_bad_expert_without_cpu_sync_is_told_at_the_next_look() -> None:
    here, peer = run(2, gpu_buffer_cases.late_errors)
    assert len(here) == len(peer) == 1
    assert f"got {1 << 40} at token 4, k 2" in here[0]
    assert here[0].startswith("InvalidArgument")
    assert "rank 0 refused the call, topk_idx holds a bad expert id" in peer[0]


def test_rows_in_odd_places_are_refused_with_the_remedy() -> None:
    peer, here = run(2, gpu_buffer_cases.misplaced)
    words = (
        ("x must", ".clone()"), ("x must", ".contiguous()"), ("y must", ".contiguous()"), ("out must", ".clone()"),
        ("num_sms must", "got 0"), ("num_sms must", "100000"), ("previous_event must", "str"), ("sync must", "got 1"),
    )  # fmt: skip
    assert len(peer) == len(here) == len(words)
    for seen, told, said in zip(here, peer, words, strict=True):
        assert seen.startswith("InvalidArgument")
        assert all(word in seen for word in said), seen
        assert told.startswith("MismatchError")
        assert "rank 1 refused its call" in told
        assert seen[:100] in told


def test_memory_and_copies_are_counted() -> None:
    assert run(2, gpu_buffer_cases.graph_words) == [(True, 2, 3)] * 2


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, tuple[str, str, bool]]]:
    """What both ranks saw, per refusal of the CPU buffer's list."""
    return run(2, test_buffer_refusals._run_refusals)


@pytest.mark.parametrize("name", test_buffer_refusals.REFUSALS)
def test_what_the_cpu_refuses_is_refused_alike(refusals: list[dict[str, tuple[str, str, bool]]], name: str) -> None:
    refusal, bad = test_buffer_refusals.REFUSALS[name], test_buffer_refusals.BAD_RANK
    kind, message, works = refusals[bad][name]
    assert kind == refusal.raises, message
    assert all(words in message for words in refusal.says), message
    told, text, works_there = refusals[1 - bad][name]
    assert told == "MismatchError", text
    assert f"rank {bad} refused" in text
    # kernels find bad expert ids, and carry no text
    assert ("bad expert id" if "expert that" in name or "an expert " in name else message[:100]) in text
    assert refusal.op in text
    assert works
    assert works_there


@pytest.fixture(scope="module")
def disagreements() -> list[dict[str, tuple[str, str, bool]]]:
    """What both ranks saw, per disagreement of the CPU buffer's list."""
    return run(2, test_buffer_refusals._run_disagreements)


@pytest.mark.parametrize("name", test_buffer_refusals.DISAGREEMENTS)
def test_what_differs_is_named_alike(disagreements: list[dict[str, tuple[str, str, bool]]], name: str) -> None:
    words = test_buffer_refusals.DISAGREEMENTS[name][1]
    for kind, message, works in (results[name] for results in disagreements):
        assert kind == "MismatchError", message
        # these handles differ in routing as well: a thread for each of the two words, the first says what it found
        has_words = all(word in message for word in words) or (name == "which handle" and "topk" in message)
        has_words |= name.startswith("capacity") and "the shape or the capacity (a number" in message  # a hash of both
        assert has_words, message
        assert works
    if name != "which handle":
        assert disagreements[0][name][1] == disagreements[1][name][1], "the same text on all ranks"


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_overflow_is_the_same_error_on_every_rank(layout: str) -> None:
    results = run(3, test_buffer_refusals._overflow, layout)
    for kind, message, works in results:
        assert kind == "InvalidArgument", message
        assert all(word in message for word in ("rank 1", "15" if layout == "rank" else "30", "9", "max_recv_rows"))
        assert works
    assert len({message for _, message, _ in results}) == 1


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_silent_peer_is_named_and_the_buffer_works_on(op: str) -> None:
    late_s = 0.5  # a kernel of dispatch waits that long for those who have given up, several times
    results = run(3, test_buffer_failures._silent_peer, op, late_s)
    for rank in (0, 2):
        assert results[rank]["kind"] == "CommTimeoutError"
        assert tuple(results[rank]["ranks"]) == (1,)
        for words in (op, f"rank={rank}", "peer=1", "seq=2", "rank 1 was silent", "expected call 2"):
            assert words in results[rank]["message"], results[rank]["message"]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_call_that_fails_on_one_rank_alone_pairs_no_later_ones(num_ranks: int) -> None:
    gpu_buffer_cases.check_one_sided(run(num_ranks, gpu_buffer_cases.one_sided))


def test_steps_that_are_made_again_after_a_time_out_end_right() -> None:
    gpu_buffer_cases.check_same_layers(run(2, gpu_buffer_cases.same_layers))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_order_agrees_with_the_oracle(num_ranks: int) -> None:
    test_combine_order.check_orders(test_combine_order.gpu_setup(num_ranks), emulated, timeout_s=200)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_gradients_are_those_of_the_cpu_bit_for_bit(layout: str) -> None:
    wanted = run_ranks(gpu_buffer_cases.gradients, 2, layout)
    for rank, (got, want) in enumerate(zip(run(2, gpu_buffer_cases.gradients, layout), wanted, strict=True)):
        assert len(got) == len(want) == 4
        for name, value, expected in zip(("out", "x", "weights", "bias"), got, want, strict=True):
            same_bits(value, expected, f"{name} of rank {rank}")
