"""One memory for calls of several sizes on the emulated GPU: the cases of the CPU, kernels built by g++."""

from __future__ import annotations

import pytest
import torch

from epee.ep.latency.gpu.params import HEAD_TOKEN_BITS
from epee.ep.latency.gpu.shapes import LatencyConfig
from epee.errors import InvalidArgument
from tests.csrc.emulated import has_compiler
from tests.csrc.test_latency_buffer_emulated import emulated
from tests.ep import test_latency_room as cpu_tests
from tests.ep.latency_cases import dispatch, inputs
from tests.harness import DEAD, run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_calls_of_all_sizes_share_one_memory(num_ranks: int) -> None:
    run_ranks(emulated, num_ranks, cpu_tests._sizes, timeout_s=200)


def test_what_does_not_fit_or_differs_is_refused() -> None:
    run_ranks(emulated, 2, cpu_tests._refused, timeout_s=200)


def test_who_dies_before_the_first_call_is_masked() -> None:
    alive = ([True, False, True, True], [1, 0, 1, 1])
    assert run_ranks(emulated, 4, cpu_tests._dead_before_all, dead={1}, timeout_s=200) == [alive, DEAD, alive, alive]


def _strided_mask(rank: int, num_ranks: int) -> None:
    """Kernels read and write a mask in one piece: one with gaps is refused, before and behind a call that is known."""
    buffer = cpu_tests.of_shape(cpu_tests.make_room(cpu_tests.bytes_for(num_ranks)), cpu_tests.SHAPES[0])
    given = inputs(cpu_tests.SHAPES[0], (6,) * num_ranks, 1)[rank]
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="active_ranks must be contiguous"):
            dispatch(buffer, given, active_ranks=torch.ones(8, dtype=torch.int32)[::2])
        mask = torch.ones(num_ranks, dtype=torch.int32)
        assert dispatch(buffer, given, active_ranks=mask).got.all()


def test_a_mask_lies_in_one_piece() -> None:
    run_ranks(emulated, 2, _strided_mask, timeout_s=100)


def test_the_code_of_usual_sizes_rarely_repeats() -> None:
    configs = [
        LatencyConfig(0, 8, experts, hidden, topk, tokens)
        for experts in (64, 128, 256)
        for hidden in (2048, 4096, 5120, 7168)
        for topk in (4, 6, 8)
        for tokens in (16, 32, 64, 128, 256)
    ]
    assert len({config.kind_of(0) for config in configs}) >= len(configs) - 2
    assert all(config.kind_of(7) < 1 << 32 - HEAD_TOKEN_BITS - 2 for config in configs)
