"""`epee.Buffer` on GPUs of several hosts, without one: the kernels built by g++, real ranks and proxies over TCP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.csrc.emulated import has_compiler
from tests.csrc.emulated_buffer import emulated
from tests.ep import gpu_buffer_cases, gpu_hosts_cases
from tests.ep.buffer_cases import Call, Setup, check_setups
from tests.hosts import run_on_loopbacks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


def run(placement: tuple[int, ...], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a rank function with `epee.Buffer` on the emulated GPU, rank r on host `placement[r]`."""
    return run_on_loopbacks(emulated, placement, function, *args, timeout_s=200)


def check(placement: tuple[int, ...], *setups: Setup) -> None:
    """Compare what calls return with the reference."""

    def run_ranks(around: Callable[..., Any], num_ranks: int, function: Any, given: Any, timeout_s: float) -> list[Any]:
        return run_on_loopbacks(around, placement, function, given, timeout_s=timeout_s)

    check_setups(len(placement), list(setups), timeout_s=200, around=emulated, run=run_ranks)


def setup_of(placement: tuple[int, ...], *calls: Call, **changes: Any) -> Setup:
    """A small buffer for the calls."""
    return replace(Setup(len(placement), 2, 16, 2, "bfloat16", 2, calls, host_of=placement), **changes)


@pytest.mark.parametrize("placement", [(0, 1), (0, 0, 1, 1), (0, 1, 0, 1)], ids=str)
def test_results_have_the_bits_of_the_reference(placement: tuple[int, ...]) -> None:
    counts = tuple((7 + 5 * rank) % 12 for rank in range(len(placement)))
    calls = [
        Call(
            seed, counts, routing, expert_alignment=1 + 3 * (seed % 2), num_bias=seed % 3, in_place=seed % 2 == 0,
            with_out=seed % 3 == 1, with_weights=seed != 3, with_again=seed % 2 == 1 and seed != 3,
        )
        for seed, routing in enumerate(("random", "repeats", "nowhere", "one rank", "one expert"))
    ]  # fmt: skip
    check(placement, setup_of(placement, *calls, num_slots=1), setup_of(placement, *calls, num_topk=5))


@pytest.mark.parametrize("placement", [(0, 1, 1, 1), (0, 1, 2)], ids=str)
def test_hosts_of_unlike_sizes_and_three_of_them(placement: tuple[int, ...]) -> None:
    counts = tuple((9 + 4 * rank) % 14 for rank in range(len(placement)))
    calls = [Call(seed, counts, num_bias=seed) for seed in range(2)]
    check(placement, setup_of(placement, *calls, num_topk=3))


@pytest.mark.parametrize("payload", ["fp8", "fp8 strided", "fp8 packed", "fp8 most"])
def test_fp8_pairs_agree_with_the_reference(payload: str) -> None:
    placement = (0, 0, 1)
    check(placement, setup_of(placement, Call(3, (9, 0, 14), payload=payload), hidden=512, num_topk=3))


def test_no_tokens_and_all_of_them_to_one_host() -> None:
    placement = (0, 1, 1)
    calls = [Call(0, (0, 0, 0)), Call(1, (12, 0, 7), "one rank"), Call(2, (0, 40, 0)), Call(3, (5, 6, 7), "nowhere")]
    check(placement, setup_of(placement, *calls))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (gpu_buffer_cases.full_capacity, ("rank",)),
        (gpu_buffer_cases.two_places, ("rank",)),
        (gpu_buffer_cases.events, ()),
        (gpu_hosts_cases.refusals, ()),
        (gpu_hosts_cases.too_many_rows, ()),
        (gpu_hosts_cases.refused_combine, ()),
        (gpu_hosts_cases.closed, ()),
        (gpu_hosts_cases.closed_in_call, ()),
        (gpu_hosts_cases.unlike_slots, ()),
        (gpu_hosts_cases.failed_construction, ()),
        (gpu_hosts_cases.nothing_is_kept, ()),
        (gpu_hosts_cases.last_combine, ()),
    ],
)
def test_what_a_buffer_of_one_host_does(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    run((0, 0, 1), function, *args)


@pytest.mark.parametrize("function", [gpu_hosts_cases.loss, gpu_hosts_cases.loss_in_call])
@pytest.mark.parametrize("kills_proxy", [False, True])
@pytest.mark.parametrize(("placement", "victim"), [((0, 1), 1), ((0, 0, 1, 1), 0)])
def test_a_loss_ends_the_calls_of_all_and_is_named(
    placement: tuple[int, ...], victim: int, kills_proxy: bool, function: Callable[..., Any]
) -> None:
    dead = () if kills_proxy else (victim,)
    args = victim, kills_proxy
    run_on_loopbacks(emulated, placement, function, *args, timeout_s=100, backend="gloo", dead=dead)
