"""`epee.Buffer` on real GPUs of ranks that stand for ranks of several hosts (`EPEE_HOST_KEY`); they may share a GPU.

Processes that share a GPU take turns on it, so a wait for another rank takes some turns: time-outs are long here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epee
from tests.ep import gpu_buffer_cases, gpu_hosts_cases
from tests.ep.buffer_cases import Call, Setup, check_setups
from tests.hosts import run_on_loopbacks

TIMEOUT_S = 240.0
pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]


def on_gpu(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run a rank's function with its GPU, or that of others too, as `epee.Buffer`'s device."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    plain = epee.Buffer

    class GpuBuffer(plain):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "device": "cuda", "timeout": 90.0})

    epee.Buffer = GpuBuffer  # type: ignore[misc]
    return function(rank, num_ranks, *args)


def check(placement: tuple[int, ...], *setups: Setup) -> None:
    """Compare what calls return with the reference."""

    def run_ranks(around: Callable[..., Any], num_ranks: int, function: Any, given: Any, timeout_s: float) -> list[Any]:
        return run_on_loopbacks(around, placement, function, given, timeout_s=timeout_s)

    check_setups(len(placement), list(setups), timeout_s=TIMEOUT_S, around=on_gpu, run=run_ranks)


def test_two_hosts_agree_with_the_reference() -> None:
    placement, counts = (0, 1), (500, 1000)
    calls = [
        Call(0, counts, num_bias=1, in_place=True),
        Call(1, counts, "one expert", with_again=True, with_out=True),
        Call(2, (3, 0), num_bias=2),
        Call(3, (0, 0)),
        Call(4, counts, "nowhere"),
    ]
    fp8 = [Call(7, counts, payload=kind) for kind in ("fp8", "fp8 strided")]
    check(
        placement,
        Setup(2, 8, 2048, 4, "bfloat16", 2, tuple(calls), host_of=placement),
        Setup(2, 16, 7168, 8, "bfloat16", 1, (calls[0], *fp8), host_of=placement),
        Setup(2, 3, 7176, 9, "bfloat16", 1, (calls[1],), host_of=placement),
    )


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 1, 0)], ids=str)
def test_hosts_of_two_ranks_agree_with_the_reference(placement: tuple[int, ...]) -> None:
    calls = [Call(0, (200, 0, 300, 70), num_bias=1, in_place=True), Call(1, (64, 1, 3, 500), "one rank")]
    check(placement, Setup(4, 4, 1024, 4, "bfloat16", 2, tuple(calls), host_of=placement))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (gpu_buffer_cases.full_capacity, ("rank",)),
        (gpu_buffer_cases.two_places, ("rank",)),
        (gpu_hosts_cases.refusals, ()),
        (gpu_hosts_cases.too_many_rows, ()),
        (gpu_hosts_cases.refused_combine, ()),
        (gpu_hosts_cases.closed, ()),
        (gpu_hosts_cases.closed_in_call, ()),
        (gpu_hosts_cases.unlike_slots, ()),
        (gpu_hosts_cases.streams, ()),
        (gpu_hosts_cases.graphs, ()),
    ],
)
def test_what_a_buffer_of_one_host_does(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    run_on_loopbacks(on_gpu, (0, 1), function, *args, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("function", [gpu_hosts_cases.loss, gpu_hosts_cases.loss_in_call])
@pytest.mark.parametrize("kills_proxy", [False, True])
def test_a_loss_ends_the_calls_of_all_and_is_named(kills_proxy: bool, function: Callable[..., Any]) -> None:
    dead = () if kills_proxy else (1,)
    args = 1, kills_proxy
    run_on_loopbacks(on_gpu, (0, 1), function, *args, timeout_s=TIMEOUT_S, backend="gloo", dead=dead)
