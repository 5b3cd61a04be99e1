"""DeepEP's low-latency calls and Mooncake's `ep.Buffer` on real GPUs: values, hooks, zero-copy, statistics, masks.

Ranks share a GPU where there are fewer GPUs than ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee.compat.deep_ep as deep_ep
from epee.compat.mooncake import ep
from epee.reference import latency as oracle
from tests.compat.test_deep_ep_low_latency import check_rows
from tests.ep.latency_cases import PLAIN, Shape, bits, expert_outputs, inputs, quantisation
from tests.harness import run_ranks

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(120)]

SHAPE = Shape(num_experts=8, hidden=512, num_topk=3, max_tokens=40)
NUM_TOKENS = (40, 3)  # rows with flags, and packets


def own_gpu(rank: int) -> torch.device:
    """Choose this rank's GPU."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def on_cpu(x: Any) -> Any:
    """A result, or a pair of them, on the CPU, with its strides."""
    if isinstance(x, tuple):
        return tuple(on_cpu(each) for each in x)
    strided = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    return strided.copy_(x)


def _deep_ep(rank: int, num_ranks: int) -> None:
    device = own_gpu(rank)
    buffer: Any = deep_ep.Buffer(
        dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, explicitly_destroy=True, enable_shrink=True
    )
    stats = torch.zeros(SHAPE.num_experts // num_ranks, dtype=torch.int32, device=device)
    costs = [torch.zeros(num_ranks, dtype=torch.int64, device=device) for _ in range(2)]
    total = torch.zeros_like(stats, device="cpu")
    for seed, payload in enumerate(PLAIN * 2):
        ends: dict[str, bool] = {"return_recv_hook": seed >= 4, "async_finish": seed % 4 == 1}
        ends["async_finish"] &= not ends["return_recv_hook"]
        given, how = inputs(SHAPE, NUM_TOKENS, seed), quantisation(payload)
        packed = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens, **how)
        assert given[rank].topk_weights is not None
        x, idx, weights = (part.to(device) for part in (given[rank].x, given[rank].topk_idx, given[rank].topk_weights))
        recv_x, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, idx, SHAPE.max_tokens, SHAPE.num_experts, stats, costs[0], **how, **ends
        )
        _end(event, hook)
        total += packed[rank].num_tokens_per_expert
        assert torch.equal(stats.cpu(), total)
        check_rows(on_cpu(recv_x), counts.cpu(), packed[rank])
        outputs = expert_outputs(packed, seed)
        y = outputs[rank].to(device)
        if zero_copy := seed % 2 == 1:
            buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = y
            y = torch.full_like(y, float("nan"))
        combined, event, hook = buffer.low_latency_combine(
            y, idx, weights, handle, zero_copy=zero_copy, combine_wait_recv_cost_stats=costs[1], **ends
        )
        _end(event, hook)
        assert torch.equal(bits(combined.cpu()), bits(oracle.combine(given, packed, outputs)[rank]))
    for cost in costs:
        assert bool(((cost >= 0) & (cost < 10**9)).all())
    buffer.destroy()


def _end(event: Any, hook: Any) -> None:
    if hook is not None:
        hook()
    if event.event is not None:
        event.current_stream_wait()


def test_deep_eps_low_latency_calls() -> None:
    run_ranks(_deep_ep, 2, timeout_s=100)


def _mooncake(rank: int, num_ranks: int) -> list[int]:
    device = own_gpu(rank)
    buffer: Any = ep.Buffer(dist.group.WORLD)
    active = torch.ones(num_ranks + 3, dtype=torch.int32, device=device)  # may be longer
    for seed in range(6):
        is_away = seed >= 4  # rank 1 makes no more calls: after a time-out it is left out
        if is_away and rank == 1:
            break
        got = [[True, not is_away]] * num_ranks
        given = inputs(SHAPE, NUM_TOKENS, seed)
        packed = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens, use_fp8=seed % 2 == 1, got=got)
        assert given[rank].topk_weights is not None
        x, idx, weights = (part.to(device) for part in (given[rank].x, given[rank].topk_idx, given[rank].topk_weights))
        timeout_us = 300_000 if is_away else -1
        recv_x, counts, handle, event, hook = buffer.dispatch(
            x, idx, active, SHAPE.max_tokens, SHAPE.num_experts, timeout_us, seed % 2 == 1, return_recv_hook=seed == 2
        )
        _end(event, hook)
        check_rows(on_cpu(recv_x), counts.cpu(), packed[rank])
        outputs = expert_outputs(packed, seed)
        combined, event, hook = buffer.combine(
            outputs[rank].to(device), idx, weights, active, timeout_us, handle, return_recv_hook=seed == 2
        )
        _end(event, hook)
        assert torch.equal(bits(combined.cpu()), bits(oracle.combine(given, packed, outputs, got=got)[rank]))
    dist.barrier()
    return active.tolist()


def test_mooncakes_buffer_and_a_rank_that_stays_away() -> None:
    assert run_ranks(_mooncake, 2, timeout_s=100) == [[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
