"""`LatencyBuffer` on real GPUs: the same bits as the reference, rounds at random, graphs, masks, failures, deaths.

Ranks share a GPU where there are fewer GPUs than ranks: their processes take turns there, some milliseconds each.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import epee
from tests.csrc.latency_cases import (
    Plan,
    Round,
    check_received,
    expected,
    expected_sums,
    expert_output,
    inputs_of,
    make_core,
    options_of,
    random_rounds,
    run_plan,
    same,
    send,
)
from tests.csrc.latency_failures import CHECKS
from tests.harness import run_ranks

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]
STALL_ONE_IN = 24


def _model(seed: int, hidden: int, num_topk: int, num_experts: int, **sizes: int) -> Plan:
    return Plan(
        random_rounds(seed, 12, 4, 40, hidden), num_local_experts=num_experts // 4, num_topk=num_topk, hidden=hidden,
        max_tokens=40, packet_tokens=sizes.get("packet_tokens", 32),
    )  # fmt: skip


PLANS = {
    "one rank": Plan(random_rounds(1, 12, 1, 64, 2048), num_local_experts=32, hidden=2048, max_tokens=64, num_topk=8),
    "two ranks": Plan(random_rounds(2, 20, 2, 128, 512), num_local_experts=8, hidden=512, max_tokens=128, num_topk=6),
    "two ranks, experts anywhere": Plan(
        random_rounds(10, 12, 2, 128, 512),
        num_local_experts=32,
        hidden=512,
        max_tokens=128,
        num_topk=8,
        is_permuted=True,
    ),
    "four ranks, odd rows": Plan(random_rounds(3, 12, 4, 33, 1032), hidden=1032, max_tokens=33, num_topk=11),
    "four ranks, 2048, top-6 of 64": _model(4, 2048, 6, 64),
    "four ranks, 4096, top-1 of 8": _model(5, 4096, 1, 8),
    "four ranks, 7168, top-8 of 288": _model(6, 7168, 8, 288),
    "four ranks, 7168, no packets": _model(7, 7168, 8, 64, packet_tokens=0),
    "four ranks, 8192, top-11 of 64": _model(8, 8192, 11, 64),
    "four ranks, many tokens": Plan(random_rounds(9, 6, 4, 300, 256), num_local_experts=2, num_topk=4, max_tokens=300),
}


SMOKE = "two ranks"
_SMOKE_MARK = pytest.mark.smoke("latency/dispatch", "latency/combine")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[_SMOKE_MARK] if name == SMOKE else []) for name in PLANS])
def test_same_bits_as_reference(name: str) -> None:
    run_ranks(run_plan, PLANS[name].num_ranks, PLANS[name], "cuda", timeout_s=280)


@pytest.mark.parametrize("stall_one_in", [0, STALL_ONE_IN])
def test_random_rounds(stall_one_in: int) -> None:
    plan = Plan(random_rounds(50 + stall_one_in, 400, 4, 16, 256), stall_one_in=stall_one_in)
    run_ranks(run_plan, 4, plan, "cuda", timeout_s=280)


@pytest.mark.parametrize("name", CHECKS)
def test_failure_is_told_and_survived(name: str) -> None:
    CHECKS[name]("cuda")


GRAPH = Plan((Round((0, 0, 0)),), hidden=2048, num_topk=4, num_local_experts=8, max_tokens=24, packet_tokens=8)


def _graph(rank: int, num_ranks: int) -> None:
    """A recorded pair with new rows and routing at each replay; then without the last rank."""
    core = make_core(GRAPH, rank, "cuda")
    mask = torch.ones(num_ranks, dtype=torch.int32, device="cuda")
    for size in (24, 5):
        plan = Plan((Round((size,) * num_ranks, use_fp8=True),), **_sizes())
        this = plan.rounds[0]
        mask.fill_(1)
        x = torch.zeros(size, plan.hidden, device="cuda", dtype=torch.bfloat16)
        idx = torch.full((size, plan.num_topk), -1, device="cuda")
        weights = torch.zeros(size, plan.num_topk, device="cuda")
        y = torch.zeros(plan.num_local_experts, num_ranks * plan.max_tokens, plan.hidden, device="cuda")
        y = y.to(torch.bfloat16)
        out = torch.empty_like(x)
        options = options_of(this)
        dispatch, combine = core.plans.dispatch(len(x), x.stride(0) * 2, options), core.plans.combine(len(x), options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            d = core.dispatch(dispatch, x, idx, weights, mask)
            c = core.combine(combine, y, d.handle, None, out, mask)
        last = num_ranks - 1
        for seed in range(12):
            now = Round(this.num_tokens, use_fp8=True, seed=seed)
            is_evicted = seed >= 8
            if is_evicted and rank == last:
                break
            if is_evicted:
                mask[last] = 0
            got = [[src != last or not is_evicted for src in range(num_ranks)] for _ in range(num_ranks)]
            inputs, packed = expected(plan, now, got)
            x.copy_(inputs[rank].x)
            idx.copy_(inputs[rank].topk_idx)
            weights.copy_(inputs[rank].topk_weights)  # type: ignore[arg-type]
            y.copy_(expert_output(plan, packed[rank], rank))
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            check_received(d, packed[rank], f"replay {seed}")
            same(out.cpu(), expected_sums(plan, now, inputs, packed, got)[rank], f"replay {seed}: combine")
            same(c.got.cpu(), torch.tensor(got[rank]), f"replay {seed}: got")
            core.check()
        torch.distributed.barrier()
        core.set_view([True] * num_ranks, 1000 * size)
        core.memory.open_view()
        torch.distributed.barrier()


def _sizes() -> dict[str, Any]:
    names = ("hidden", "num_topk", "num_local_experts", "max_tokens", "packet_tokens")
    return {name: getattr(GRAPH, name) for name in names}


def test_graph_replays_see_todays_view() -> None:
    run_ranks(_graph, 3, timeout_s=200)


def _late(rank: int, num_ranks: int) -> float:
    """How long the wait for a silent rank takes, in seconds."""
    core = make_core(DEATH, rank, "cuda")
    if rank == 1:
        time.sleep(2.5)
        return 0.0
    this = DEATH.rounds[0]
    given = inputs_of(DEATH, this, rank)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    mask = torch.ones(num_ranks, dtype=torch.int32, device="cuda")
    start.record()
    send(core, this, given, options_of(this, 1.0), active_ranks=mask)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


DEATH = Plan((Round((9, 5, 7), use_fp8=True),), max_tokens=12, hidden=2048)


def test_time_out_is_true_within_ten_percent() -> None:
    for spent in run_ranks(_late, 3, timeout_s=60)[::2]:
        assert 0.95 < spent < 1.1, spent


BUFFER = Plan((Round((0, 0)),), hidden=512, max_tokens=20, num_local_experts=5, num_topk=4)


def _buffer(rank: int, num_ranks: int) -> None:
    """`epee.LatencyBuffer` on GPUs: hooks, its own stream, zero-copy, packed scales, agreement."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with epee.LatencyBuffer(
        num_experts=num_ranks * BUFFER.num_local_experts, hidden=BUFFER.hidden, num_topk=BUFFER.num_topk,
        max_tokens_per_rank=BUFFER.max_tokens, device="cuda", timeout=20.0,
    ) as buffer:  # fmt: skip
        for seed in range(12):
            use_fp8 = seed % 3 > 0
            this = Round((3, 20) if seed % 4 else (20, 1), use_fp8, use_fp8, seed % 3 == 2, seed=seed)
            plan = replace(BUFFER, rounds=(this,))
            inputs, packed = expected(plan, this)
            given = [part.cuda() for part in (inputs[rank].x, inputs[rank].topk_idx, inputs[rank].topk_weights)]  # type: ignore[union-attr]
            way = {"return_hook": seed % 2 == 0, "async_op": seed % 2 == 1}
            d: Any = buffer.dispatch(*given, use_fp8=use_fp8, round_scale=use_fp8, use_ue8m0=this.use_ue8m0, **way)
            _end(d)
            want = packed[rank]
            same(d.got.cpu(), want.got, "got")
            same(d.num_tokens_per_expert.cpu(), want.num_tokens_per_expert, "counts")
            same(d.handle.layout_range.cpu(), want.layout_range, "layout_range")
            parts = zip(*(x if isinstance(x, tuple) else (x,) for x in (d.x, want.x)), strict=True)
            for mine, theirs in parts:
                for expert, count in enumerate(want.num_tokens_per_expert.tolist()):
                    same(mine.cpu()[expert, :count], theirs[expert, :count], f"rows of expert {expert}")
            y = buffer.combine_input(d.handle).copy_(expert_output(plan, want, rank))
            c: Any = buffer.combine(y, d.handle, **way)
            _end(c)
            same(c.x.cpu(), expected_sums(plan, this, inputs, packed)[rank], "combine")
            assert not c.lost_weight.any()
            buffer.check()
            if seed == 6:
                assert buffer.sync().tolist() == [1] * num_ranks


def _end(result: Any) -> None:
    if result.hook is not None:
        result.hook()
    result.event.wait()


def test_buffer_in_latency_mode() -> None:
    run_ranks(_buffer, 2, timeout_s=100)
