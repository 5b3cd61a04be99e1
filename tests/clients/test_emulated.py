"""The clients' dispatchers over the GPU's kernels, without a GPU: kernels built by g++, the files that run on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epee.ep.pool import latency as latency_rooms
from tests.clients import fetch, test_sglang, test_training
from tests.compat.test_deep_ep_emulated import _emulated
from tests.csrc.emulated import has_compiler
from tests.csrc.test_latency_buffer_emulated import EmulatedLatencyBuffer
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


def _run(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> None:
    latency_rooms.LatencyBuffer = EmulatedLatencyBuffer  # type: ignore[misc]
    _emulated(rank, num_ranks, function, *args)


def run(function: Callable[..., Any], *args: Any) -> None:
    """Run a case of the CPU with two ranks, its rooms on the emulated GPU."""
    run_ranks(_run, 2, function, *args, timeout_s=200)


def test_megatrons_dispatchers() -> None:
    folder = fetch.files_of(fetch.MEGATRON)
    run(test_training._megatron_v1, folder, "default")
    run(test_training._megatron_hybrid, folder)


def test_deepspeeds_exchange() -> None:
    run(test_training._deepspeed, fetch.files_of(fetch.DEEPSPEED))


def test_torchtitans_dispatchers() -> None:
    folder = fetch.files_of(fetch.TORCHTITAN)
    run(test_training._titan_v2, folder)
    run(test_training._titan_hybrid, folder)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (test_sglang._normal, ("fp8",)),
        (test_sglang._low_latency, ("fp8", True)),
        (test_sglang._mooncake, (False,)),
        (test_sglang._elastic, (True,)),
    ],
)
def test_sglangs_dispatchers(function: Callable[..., Any], args: tuple[Path | bool, ...]) -> None:
    run(function, fetch.files_of(fetch.SGLANG), *args)
