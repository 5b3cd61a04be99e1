"""The kernel that counts a layout, built by g++ and by NVRTC, beside the torch form: equal bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epee.errors import InvalidArgument, InvalidState
from epee.gpu import layout
from epee.gpu.layout import COUNT_KERNELS, LayoutCounter, count_head, count_layout, count_with_torch
from epee.jit.params import kernel_symbol
from epee.jit.source import flatten
from epee.memory.fresh import Allocate
from tests.csrc.compiled import compile_once, resources
from tests.csrc.emulated import EmulatedPlatform, has_compiler
from tests.csrc.throughput_cases import permutation, renamed

with_compiler = [
    pytest.mark.compiler,
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
emulated = pytest.param("emulated", marks=with_compiler)


def _poisoned(make: Allocate) -> Allocate:
    """Results are what nobody has written yet."""

    def poison() -> torch.Tensor:
        made = make()
        made.view(torch.uint8).fill_(0xA5)
        return made

    return poison


def counter_on_cpu(num_threads: int) -> LayoutCounter:
    """A counter whose results start poisoned."""
    counter = LayoutCounter(EmulatedPlatform(), num_threads)
    allocators_of = counter._allocators_of
    counter._allocators_of = lambda *sizes: tuple(map(_poisoned, allocators_of(*sizes)))  # type: ignore
    return counter


def routing(num_tokens: int, num_topk: int, num_experts: int, seed: int = 0) -> torch.Tensor:
    """Ids with repeats, of which some are none and some do not exist."""
    gen = torch.Generator().manual_seed(seed)
    idx = torch.randint(0, num_experts, (num_tokens, num_topk), generator=gen)
    odd = torch.tensor([-1, -7, num_experts, num_experts + 5, 1 << 40, -(1 << 62), (1 << 32) + 1])
    chosen = odd[torch.randint(0, len(odd), idx.shape, generator=gen)]
    return torch.where(torch.rand(idx.shape, generator=gen) < 0.2, chosen, idx)


def check(counter: Any, idx: torch.Tensor, num_ranks: int, num_experts: int) -> None:
    """Compare with plain torch, and that with plain Python."""
    found, wanted = counter(idx, num_ranks, num_experts), count_with_torch(idx, num_ranks, num_experts)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))  # a bool is 0 or 1 and nothing else
    rows = [[i for i in row if 0 <= i < num_experts] for row in idx.tolist()]
    per_rank = [[i * num_ranks // num_experts for i in row] for row in rows]
    assert wanted.num_tokens_per_expert.tolist() == [sum(row.count(e) for row in rows) for e in range(num_experts)]
    assert wanted.num_tokens_per_rank.tolist() == [sum(r in row for row in per_rank) for r in range(num_ranks)]
    assert wanted.is_token_in_rank.tolist() == [[r in row for r in range(num_ranks)] for row in per_rank]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("how", ["torch", emulated])
@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "num_ranks", "num_experts"),
    [
        (0, 8, 8, 64),
        (1, 8, 8, 64),
        (1, 1, 1, 1),
        (333, 8, 8, 256),
        (4096, 8, 8, 256),
        (1000, 3, 2, 1024),
        (517, 32, 4, 64),
        (130, 1, 8, 8),
        (65, 0, 8, 8),
        (70, 6, 1, 7),
        (97, 2, 32, 96),
        (5000, 9, 8, 160),
    ],
)
def test_counts_are_those_of_plain_torch(
    num_tokens: int, num_topk: int, num_ranks: int, num_experts: int, how: str, dtype: torch.dtype
) -> None:
    idx = routing(num_tokens, num_topk, num_experts)
    if dtype == torch.int32:
        idx = idx.clamp(-(1 << 31), (1 << 31) - 1).to(dtype)
    check(count_layout if how == "torch" else counter_on_cpu(64), idx, num_ranks, num_experts)


@pytest.mark.compiler
@pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with")
def test_one_counter_serves_calls_of_all_sizes() -> None:
    counter = counter_on_cpu(32)
    for seed, (num_tokens, num_topk, num_ranks, num_experts) in enumerate(
        [(40, 8, 8, 64), (40, 8, 4, 64), (41, 2, 4, 8), (9, 4, 2, 8192), (40, 8, 8, 64)]
    ):
        check(counter, routing(num_tokens, num_topk, num_experts, seed), num_ranks, num_experts)
        strided = routing(num_topk, num_tokens, num_experts, seed).t()
        check(counter, strided, num_ranks, num_experts)


@pytest.mark.compiler
@pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with")
@pytest.mark.parametrize("num_experts", [64, 8192])
def test_tokens_are_counted_for_the_ranks_that_the_table_gives_their_experts(num_experts: int) -> None:
    counter, table = counter_on_cpu(32), permutation(num_experts)
    counter.experts[:num_experts] = table.to(torch.int16)
    idx = routing(77, 6, num_experts)
    idx = idx.masked_fill(idx >= num_experts, -1)
    found = counter(idx, 4, num_experts)
    contiguous = count_with_torch(renamed(idx, table), 4, num_experts)
    assert torch.equal(found.num_tokens_per_rank, contiguous.num_tokens_per_rank)
    assert torch.equal(found.is_token_in_rank, contiguous.is_token_in_rank)
    assert torch.equal(found.num_tokens_per_expert, count_with_torch(idx, 4, num_experts).num_tokens_per_expert)


@pytest.mark.parametrize(
    ("idx", "num_experts", "words"),
    [
        (torch.zeros(4, dtype=torch.int64), 8, "topk_idx must be int64"),
        (torch.zeros(4, 2), 8, "got torch.float32"),
        ([[1, 2]], 8, "got list"),
        (torch.zeros(4, 2, dtype=torch.int64), 9, "multiple of 4 ranks, at most .*, got 9"),
        (torch.zeros(4, 2, dtype=torch.int64), 0, "multiple of 4 ranks, at most .*, got 0"),
        (torch.zeros(4, 2, dtype=torch.int64), 1 << 31, "at most 1048576, got 2147483648"),
    ],
)
def test_what_cannot_be_counted_is_refused(idx: Any, num_experts: int, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        count_layout(idx, 4, num_experts)


def test_nothing_is_loaded_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InvalidState, match="count once before"):
        layout._counter.__wrapped__(0)


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_the_kernel_compiles_without_spills(architecture: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings and NVRTC here to compile kernels with")
    ((path, params),) = COUNT_KERNELS.items()
    compiled = compile_once(flatten(path, count_head()), architecture, path)
    found = resources(compiled.log)
    assert set(found) == {kernel_symbol(name, struct) for name, struct in params.items()}
    for name, needs in found.items():
        assert needs.spill_bytes == needs.stack_bytes == 0, name
        assert needs.registers * layout.NUM_THREADS <= 65536, name
    assert "warning" not in compiled.log
