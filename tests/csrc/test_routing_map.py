"""The kernels of routing maps, built by g++ and by NVRTC, beside the torch form: equal bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epee.ep import dense_weights, most_experts, num_left_out, topk_of_map
from epee.errors import InvalidState
from epee.gpu import routing_map
from epee.gpu.routing_map import MAP_KERNELS, MapKernels, map_head
from epee.jit.params import kernel_symbol
from epee.jit.source import flatten
from tests.csrc.compiled import compile_once, resources
from tests.csrc.emulated import EmulatedPlatform, has_compiler

SIZES = [(0, 8, 4), (1, 1, 1), (5, 8, 2), (37, 256, 8), (70, 33, 40), (129, 1000, 9), (64, 96, 32), (9, 31, 3)]


def given(num_tokens: int, num_experts: int, num_topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A map whose tokens have up to `num_topk + 2` experts, and probs everywhere."""
    gen = torch.Generator().manual_seed(num_tokens + num_experts)
    order = torch.rand(num_tokens, num_experts, generator=gen).argsort(1).argsort(1)
    most = torch.randint(0, num_topk + 3, (num_tokens, 1), generator=gen)
    return order < most, torch.rand(num_tokens, num_experts, generator=gen)


def check(kernels: Any, num_tokens: int, num_experts: int, num_topk: int, device: str = "cpu") -> None:
    """Compare a map's ids, weights and counts, and the weights back in a map, with plain torch's."""
    chosen, probs = given(num_tokens, num_experts, num_topk)
    for weighed in (probs, None):
        want = topk_of_map(chosen, weighed, num_topk)
        got = kernels.topk(chosen.to(device), None if weighed is None else weighed.to(device), num_topk)
        for found, wanted in zip(got[:2], want[:2], strict=True):
            assert (found is None) == (wanted is None)
            assert found is None or (found.dtype == wanted.dtype and torch.equal(found.cpu(), wanted))
        assert most_experts(got[2]) == most_experts(want[2])
        assert int(num_left_out(got[2])) == int(num_left_out(want[2]))
    idx, weights, _ = topk_of_map(chosen, probs, num_topk)
    assert weights is not None
    dense = kernels.dense(idx.to(device), weights.to(device), num_experts)
    assert torch.equal(dense.cpu(), dense_weights(idx, weights, num_experts))
    halves = torch.cat([idx, idx], 1)[:, :num_topk]  # strided
    assert torch.equal(kernels.dense(halves.to(device), weights.to(device), num_experts).cpu(), dense.cpu())


@pytest.mark.compiler
@pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with")
@pytest.mark.parametrize(("num_blocks", "num_threads"), [(1, 32), (3, 64)])
def test_results_are_those_of_plain_torch(num_blocks: int, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: empty(*size, **how).fill_(77))  # nobody has written it yet
    kernels = MapKernels(EmulatedPlatform(), num_blocks, num_threads)
    for sizes in SIZES:
        check(kernels, *sizes)


def test_nothing_is_loaded_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_map, "is_capturing", lambda: True)
    with pytest.raises(InvalidState, match="make one call before"):
        routing_map.map_kernels.__wrapped__(0)


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_the_kernels_compile_without_spills(architecture: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings and NVRTC here to compile kernels with")
    ((path, params),) = MAP_KERNELS.items()
    compiled = compile_once(flatten(path, map_head()), architecture, path)
    found = resources(compiled.log)
    assert set(found) == {kernel_symbol(name, struct) for name, struct in params.items()}
    for name, needs in found.items():
        assert needs.spill_bytes == needs.stack_bytes == 0, name
    assert "warning" not in compiled.log
