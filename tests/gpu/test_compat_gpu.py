"""DeepEP's low-latency calls and Mooncake's `ep.Buffer` on real GPUs: values, hooks, zero-copy, statistics, masks; the
sums of a V2 handle, V2's barrier, and the names that a profiler shows.

Ranks share a GPU where there are fewer GPUs than ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee.compat.deep_ep as deep_ep
from epee.compat.mooncake import ep
from epee.reference import Routed, dispatch
from epee.reference import latency as oracle
from tests.compat import hybrid_cases
from tests.compat.deep_ep_cases import v1_handle
from tests.compat.test_deep_ep_buffer import _tokens as v1_tokens
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


@pytest.mark.smoke("deep_ep.low_latency")
def test_deep_eps_low_latency_calls() -> None:
    run_ranks(_deep_ep, 2, timeout_s=100)


def _hybrid(rank: int, num_ranks: int) -> int:
    own_gpu(rank)
    made = hybrid_cases.given

    def given_here(*args: Any) -> hybrid_cases.Given:
        with torch.device("cpu"):
            return hybrid_cases.Given(*(part.cuda() for part in made(*args)))

    with pytest.MonkeyPatch.context() as settings, torch.device("cuda"):
        settings.setattr(hybrid_cases, "given", given_here)
        return hybrid_cases.run_growth(rank, num_ranks)


def test_hybrid_asks_the_ranks_only_when_a_call_needs_more() -> None:
    assert run_ranks(_hybrid, 2, timeout_s=100) == [6, 6]


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


@pytest.mark.smoke("mooncake.ep")
def test_mooncakes_buffer_and_a_rank_that_stays_away() -> None:
    assert run_ranks(_mooncake, 2, timeout_s=100) == [[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]]


def _handles_read_late(rank: int, num_ranks: int) -> None:
    """V1's handles of calls on the communication stream, and of others, are read behind calls that take their slots."""
    device = own_gpu(rank)
    buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
    given = [v1_tokens(src, 400 + 100 * src, 256, 4) for src in range(num_ranks)]
    mine = {name: value if value is None else value.to(device) for name, value in given[rank].items()}
    routed = [Routed(each["x"], each["topk_idx"]) for each in given]
    members = [each["is_token_in_rank"] for each in given]
    want = v1_handle(members, dispatch(routed, 4)[rank], rank, deep_ep.Buffer.num_sms // 2)
    for is_async in (False, True):
        found: list[Any] = []
        for num_worst in (0, 2048) * 4:
            *_, handle, event = buffer.dispatch(**mine, num_worst_tokens=num_worst, async_finish=is_async)
            assert isinstance(handle, tuple)
            if is_async:
                event.current_stream_wait()
            found.append((num_worst, handle))
        for num_worst, handle in found:
            for at in (3, 0, 1, 4, 5) if num_worst else (3, 2, 0, 1, 4, 5):  # blind, 2 takes ranks to be alike
                part = handle[at]
                assert torch.equal(part.cpu()[: len(want[at])], want[at]), (is_async, num_worst, at)
                assert len(part) == (num_worst if num_worst and at == 3 else len(want[at]))
            back, _, _ = buffer.combine(mine["x"].new_zeros(len(handle[3]), 256), list(handle))  # type: ignore[arg-type]
            assert not bool(back.any())
    buffer.destroy()


def test_v1s_handles_are_worked_out_when_they_are_read() -> None:
    run_ranks(_handles_read_late, 2, timeout_s=100)


EXPERTS_OF_RANK, ELASTIC_TOPK, ALIGNMENT = 5, 4, 8
SUMS = (
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
)


def routing_of(rank: int, num_ranks: int, seed: int, num_tokens: int) -> torch.Tensor:
    """What a rank sends where; every other routing leaves the first rank out."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    scores = torch.rand(num_tokens, EXPERTS_OF_RANK * num_ranks, generator=generator)
    if seed % 2 and num_ranks > 1:
        scores[:, :EXPERTS_OF_RANK] -= 1
    idx = scores.topk(ELASTIC_TOPK, dim=1)[1]
    return idx.masked_fill(torch.rand(idx.shape, generator=generator) < 0.2, -1)


def sums_by_counting(rank: int, routings: list[torch.Tensor], do_expand: bool) -> list[list[int]]:
    """`SUMS` of a rank, one token at a time."""
    slots, tokens = [0] * EXPERTS_OF_RANK, [0] * len(routings)
    for src, routing in enumerate(routings):
        for experts in routing.tolist():
            here = [expert % EXPERTS_OF_RANK for expert in experts if expert // EXPERTS_OF_RANK == rank]
            tokens[src] += bool(here)
            for expert in here:
                slots[expert] += 1
    padded = [-(-count // ALIGNMENT) * ALIGNMENT for count in slots]
    starts = [0, *accumulate(padded)][:-1]
    ends = [start + (slots if do_expand else padded)[i] for i, start in enumerate(starts)]
    return [list(accumulate(tokens)), ends, slots]


def elastic(num_ranks: int, device: torch.device, num_tokens: int) -> tuple[Any, torch.Tensor, Callable[..., Any]]:
    """A V2 buffer, its routing, and a call without CPU sync that returns its handle."""
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=num_tokens, explicitly_destroy=True)
    x = torch.ones(num_tokens, 256, dtype=torch.bfloat16, device=device)
    idx = torch.empty(num_tokens, ELASTIC_TOPK, dtype=torch.int64, device=device)

    def call(do_expand: bool) -> Any:
        return buffer.dispatch(
            x,
            idx,
            num_experts=EXPERTS_OF_RANK * num_ranks,
            expert_alignment=ALIGNMENT,
            do_cpu_sync=False,
            do_expand=do_expand,
        )[3]

    return buffer, idx, call


def eager_sums(rank: int, num_ranks: int, device: torch.device, num_tokens: int) -> None:
    """Compare the sums of a few calls, read without CPU sync."""
    buffer, idx, call = elastic(num_ranks, device, num_tokens)
    for seed in range(4):
        routings = [routing_of(src, num_ranks, seed, num_tokens) for src in range(num_ranks)]
        idx.copy_(routings[rank])
        for do_expand in (False, True):
            handle = call(do_expand)
            got = [getattr(handle, name).tolist() for name in SUMS]
            assert got == sums_by_counting(rank, routings, do_expand), (seed, do_expand)
    buffer.barrier(with_cpu_sync=True)
    buffer.destroy()


def _sums(rank: int, num_ranks: int, num_tokens: int) -> None:
    device = own_gpu(rank)
    eager_sums(rank, num_ranks, device, num_tokens)
    buffer, idx, call = elastic(num_ranks, device, num_tokens)
    idx.copy_(routing_of(rank, num_ranks, 0, num_tokens))
    graphs = []
    for do_expand in (False, True):
        call(do_expand)
        buffer.barrier()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            handle = call(do_expand)
            sums = [getattr(handle, name) for name in SUMS]
            copies = [part + 0 for part in sums]  # work of the graph that goes by them
            buffer.barrier()
        graphs.append((do_expand, graph, sums, copies))
    for seed in range(10):
        routings = [routing_of(src, num_ranks, seed, num_tokens) for src in range(num_ranks)]
        idx.copy_(routings[rank])
        for do_expand, graph, sums, copies in graphs:
            graph.replay()
            want = sums_by_counting(rank, routings, do_expand)
            assert [part.tolist() for part in sums] == want, (seed, do_expand)
            assert [part.tolist() for part in copies] == want, (seed, do_expand)
    buffer.barrier(with_cpu_sync=True)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("num_tokens", [33, 700])  # one kernel, and two
def test_v2_sums_are_right_eager_and_in_graphs_with_new_routing(num_tokens: int) -> None:
    run_ranks(_sums, 2, num_tokens, timeout_s=100)


def _names(rank: int, num_ranks: int) -> dict[str, list[str]]:
    device = own_gpu(rank)
    latency = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True)
    x = torch.ones(16, 512, dtype=torch.bfloat16, device=device)
    idx = torch.arange(48, device=device).view(16, 3) % SHAPE.num_experts
    weights = torch.ones(16, 3, device=device)

    def pair(with_hooks: bool) -> None:
        recv_x, _, handle, _, hook = latency.low_latency_dispatch(
            x, idx, SHAPE.max_tokens, SHAPE.num_experts, use_fp8=False, return_recv_hook=with_hooks
        )
        if with_hooks:
            hook()
        hook = latency.low_latency_combine(recv_x, idx, weights, handle, return_recv_hook=with_hooks)[2]
        if with_hooks:
            hook()

    buffer, elastic_idx, call = elastic(num_ranks, device, 700)
    elastic_idx.copy_(routing_of(rank, num_ranks, 0, 700))

    def round_trip() -> None:
        handle = call(False)
        buffer.combine(torch.ones(num_ranks * 700, 256, dtype=torch.bfloat16, device=device), handle)
        buffer.barrier()

    return {
        "pair": kernels_of(lambda: pair(False)),
        "halves": kernels_of(lambda: pair(True)),
        "round trip": kernels_of(round_trip),
        "barrier": kernels_of(buffer.barrier),
    }


def kernels_of(call: Callable[[], object]) -> list[str]:
    """The kernels of epee that the profiler sees in a call, in the order of their starts."""
    call()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    dist.barrier()
    kernels = sorted(profile.events(), key=lambda event: event.time_range.start)
    lines = profile.key_averages().table(sort_by="cuda_time_total", max_name_column_width=100).splitlines()
    names = [event.name for event in kernels if "epee" in event.name]
    for name in names:  # how DeepEP's benchmarks find a kernel: by the one line of the table that has a word in it
        if sum(name in other for other in names) == 1:
            word = name.removeprefix("epee::").split("_")[0]
            assert sum(word in line for line in lines) == sum(word in other for other in set(names)), lines
    return names


@pytest.mark.gpu(2)
def test_a_profiler_shows_what_each_kernel_does() -> None:
    for names in run_ranks(_names, 2, timeout_s=100):
        assert [name.split("(")[0] for name in names["pair"]] == [
            "epee::dispatch_latency_bf16",
            "epee::combine_latency_bf16",
        ]
        # DeepEP's test of halves: as many `::dispatch` as `::combine`, two each
        assert ["::dispatch" in name for name in names["halves"]] == [True, True, False, False]
        assert ["::combine" in name for name in names["halves"]] == [False, False, True, True]
        words = ["::layout", "::dispatch", "::combine", "::barrier"]
        counts = [sum(word in name for name in names["round trip"]) for word in words]
        assert counts[0] == counts[1] == counts[3] == 1, names
        assert counts[2] >= 1, names
        assert [name.split("(")[0] for name in names["barrier"]] == ["epee::barrier"]
