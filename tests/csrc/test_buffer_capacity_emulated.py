"""`capacity` of a `Buffer` on GPUs, without one: both ways to dispatch, against the oracle and the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from epee.ep.throughput.gpu import dispatch as throughput_dispatch
from epee.gpu.shapes import FEW_TOKENS
from tests.csrc.emulated import has_compiler
from tests.csrc.emulated_buffer import emulated
from tests.ep import test_buffer_capacity as cases
from tests.ep.buffer_cases import Call, Setup, check_setups
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


def without_few(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """As `emulated`, and no dispatch is made by the kernel for few tokens."""
    throughput_dispatch.FEW_TOKENS = -1
    return emulated(rank, num_ranks, function, *args)


WAYS = pytest.mark.parametrize("around", [emulated, without_few])


@WAYS
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_agrees_with_the_reference(num_ranks: int, around: Callable[..., Any]) -> None:
    check_setups(num_ranks, cases.setups(num_ranks), timeout_s=200, around=around)


def test_many_tokens_and_few_in_one_call_agree_with_the_reference() -> None:
    counts = (FEW_TOKENS + 9, 30)
    calls = [
        Call(1, counts, capacity=capacity, in_place=capacity == 400, with_weights_back=True)
        for capacity in (400, FEW_TOKENS + 20)
    ]
    check_setups(2, [Setup(2, 2, 16, 2, "bfloat16", 2, tuple(calls))], timeout_s=200, around=emulated)


@WAYS
@pytest.mark.parametrize("capacity", [1, 6, 100])
def test_handles_say_what_those_of_the_cpu_say(capacity: int, around: Callable[..., Any]) -> None:
    def run(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        return run_ranks(around, num_ranks, function, *args, timeout_s=200)

    cases.check_exact(run, 3, capacity)


@WAYS
def test_what_is_kept_must_have_room(around: Callable[..., Any]) -> None:
    cases.check_room(lambda function, num_ranks: run_ranks(around, num_ranks, function, timeout_s=200))


@WAYS
def test_calls_that_differ_in_capacity_alone_are_not_taken_for_each_other(around: Callable[..., Any]) -> None:
    run_ranks(around, 2, cases._facts_in_turn, timeout_s=200)
