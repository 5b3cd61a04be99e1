"""Programs that cut the worst-case results of a dispatch without CPU sync to the rows that came, and combine these."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import epee.compat.deep_ep as deep_ep
import epee.compat.mooncake.elastic_buffer as mooncake
from epee.errors import InvalidArgument, MismatchError
from tests.compat.deep_ep_cases import world

HIDDEN, NUM_TOPK, NUM_MAX, LOCAL = 16, 2, 6, 3
NAMES: dict[str, Callable[[], Any]] = {
    "deep_ep": lambda: deep_ep.ElasticBuffer(world(), num_max_tokens_per_rank=NUM_MAX, num_cpu_timeout_secs=60),
    "deep_ep 2.5": lambda: deep_ep.EPBuffer(world(), num_max_tokens_per_rank=NUM_MAX, num_cpu_timeout_secs=60),
    "mooncake": lambda: mooncake.ElasticBuffer(world(), num_max_tokens_per_rank=NUM_MAX, num_cpu_timeout_secs=60),
}


def tokens(rank: int, num_ranks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, routing and weights of a rank."""
    generator = torch.Generator().manual_seed(17 * seed + rank)
    count = (3 * rank + seed) % (NUM_MAX + 1)
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    idx = torch.rand(count, LOCAL * num_ranks, generator=generator).topk(NUM_TOPK, dim=1)[1]
    idx[torch.rand(count, NUM_TOPK, generator=generator) < 0.2] = -1
    return x, idx, torch.rand(count, NUM_TOPK, generator=generator)


def num_came(handle: Any) -> int:
    """The rows that came, as programs read their number."""
    ends = handle.psum_num_recv_tokens_per_expert if handle.do_expand else handle.psum_num_recv_tokens_per_scaleup_rank
    return int(ends[-1])


def cut_results(rank: int, num_ranks: int, name: str) -> None:
    """Rows and weights cut to the number that came give what uncut ones give; so do all numbers between the two."""
    buffer = NAMES[name]()
    ways = itertools.product((False, True), (1, 4), (False, True), (False, True), range(3))
    for do_expand, alignment, has_weights, is_fresh, seed in ways:
        if name == "mooncake" and seed:
            continue
        x, idx, weights = tokens(rank, num_ranks, seed)
        options = {"num_experts": LOCAL * num_ranks, "expert_alignment": alignment, "do_expand": do_expand}
        rows, _, got_weights, handle, _ = buffer.dispatch(x, idx, weights, do_cpu_sync=False, **options)
        came, whole = num_came(handle), rows.clone()
        rows[came:] = 0
        want, want_weights, _ = buffer.combine(rows, handle, got_weights if has_weights else None)
        assert came <= len(whole)
        for count in sorted({came, (came + len(whole)) // 2, len(whole)}):
            given = rows[:count].contiguous()
            if is_fresh:  # in memory of the program's own
                given = whole[:count].clone()
            cut = got_weights[:count] if has_weights else None
            back, back_weights, _ = buffer.combine(given, handle, cut)
            assert torch.equal(back, want), (do_expand, alignment, count, came)
            assert back_weights is None or torch.equal(back_weights, want_weights)


def _combine_and_meet(buffer: Any, x: torch.Tensor, handle: Any) -> None:
    """Combine, and make the next call, which on GPUs raises what a peer has refused."""
    buffer.combine(x, handle)
    buffer.barrier(with_cpu_sync=True)


def too_few(rank: int, num_ranks: int, name: str) -> list[str]:
    """One row less than came is an error on all ranks, and the buffer works afterwards."""
    buffer, found = NAMES[name](), []
    x = torch.ones(NUM_MAX, HIDDEN, dtype=torch.bfloat16)
    idx = torch.arange(NUM_MAX)[:, None] % (LOCAL * num_ranks)
    for is_short in (True, False, True, False):
        rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=LOCAL * num_ranks, do_cpu_sync=False)
        came = num_came(handle)
        assert came > 0
        if is_short:
            given = rows[: came - (rank == 0)].contiguous()
            with pytest.raises((InvalidArgument, MismatchError)) as caught:
                _combine_and_meet(buffer, given, handle)
            found.append(type(caught.value).__name__ + ": " + str(caught.value))
        else:
            assert torch.equal(buffer.combine(rows[:came].contiguous(), handle)[0], x)
    return found


def cut_by_v1(rank: int, num_ranks: int) -> None:
    """The same for V1's names with `num_worst_tokens`."""
    buffer = deep_ep.Buffer(world())
    for seed in range(4):
        x, idx, weights = tokens(rank, num_ranks, seed)
        per_rank, _, per_expert, is_in, _ = buffer.get_dispatch_layout(idx, LOCAL * num_ranks)
        layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": is_in}
        routing = {"topk_idx": idx, "topk_weights": weights}
        rows, _, got_weights, _, handle, _ = buffer.dispatch(x, num_worst_tokens=40, **layout, **routing)
        came = int(handle[0][-1, rank])
        want, want_weights, _ = buffer.combine(rows, handle, got_weights)
        for count in (came, came + 1):
            back, back_weights, _ = buffer.combine(rows[:count].contiguous(), handle, got_weights[:count])
            assert torch.equal(back, want)
            assert torch.equal(back_weights, want_weights)
