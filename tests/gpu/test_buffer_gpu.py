"""`epee.Buffer` on real GPUs: the CPU buffer's cases bit for bit, streams, graphs, failures.

A process with a CUDA context takes seconds to start, so each test runs many checks in one group of ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
import epee.compat.deep_ep as deep_ep
from tests.ep import gpu_buffer_cases, test_buffer_capacity, test_combine_order
from tests.ep.buffer_cases import ROUTINGS, Call, Setup, check_setups, same_bits
from tests.ep.gpu_buffer_cases import make, times_sent, tokens
from tests.harness import RankFailure, run_ranks
from tests.harness.meeting import meet

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(200)]


def on_gpu(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run a rank's function with its GPU as `epee.Buffer`'s device."""
    torch.cuda.set_device(rank)
    plain = epee.Buffer

    class GpuBuffer(plain):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{"device": "cuda", **options})

    epee.Buffer = GpuBuffer  # type: ignore[misc]
    return function(rank, num_ranks, *args)


def num_gpus() -> int:
    """Ranks of these tests."""
    return min(4, torch.cuda.device_count())


def _setups(num_ranks: int) -> list[Setup]:
    counts = tuple((300 + 211 * rank) % 512 for rank in range(num_ranks))
    few = tuple((3 * rank) % 4 for rank in range(num_ranks))
    every = [
        Call(
            seed, few if seed == 2 else counts, routing, layout, 16 if seed % 2 else 1, num_bias=seed % 3,
            in_place=seed % 2 == 0, with_out=seed % 3 == 1, with_weights=routing != "mask" and seed != 3,
            with_again=routing != "mask" and seed % 2 == 1, with_weights_back=seed != 2,
        )
        for layout in ("rank", "expert")
        for seed, routing in enumerate(ROUTINGS)
        if layout == "rank" or routing != "mask"
    ]  # fmt: skip
    fp8 = [
        Call(7, counts, payload=kind, layout=layout) for kind in ("fp8", "fp8 strided") for layout in ("rank", "expert")
    ]
    odd = [Call(8, counts, num_bias=1, layout=layout) for layout in ("rank", "expert")]
    capped = [
        replace(call, capacity=capacity)
        for call in (*every[: len(ROUTINGS)], replace(every[0], num_tokens=tuple(2 * count for count in counts)))
        for capacity in (1, 333, 100_000)
    ]
    wide = [Call(9, few, payload=kind, layout="expert", num_bias=2) for kind in ("float32", "float16", "bfloat16")]
    return [
        Setup(num_ranks, 8, 2048, 4, "bfloat16", 2, tuple(every)),
        Setup(num_ranks, 16, 7168, 8, "bfloat16", 1, tuple(fp8)),
        Setup(num_ranks, 3, 7176, 9, "bfloat16", 1, tuple(odd)),
        Setup(num_ranks, 2, 128, 3, "float32", 1, tuple(wide)),
        Setup(num_ranks, 8, 512, 4, "bfloat16", 2, tuple(capped)),
    ]


def test_agrees_with_the_reference() -> None:
    check_setups(num_gpus(), _setups(num_gpus()), timeout_s=120, around=on_gpu)


@pytest.mark.gpu(1)
def test_one_rank_agrees_with_the_reference() -> None:
    check_setups(1, _setups(1)[:1], timeout_s=60, around=on_gpu)


def _all_cases(rank: int, num_ranks: int) -> dict[str, Any]:
    found = {}
    for layout in ("rank", "expert"):
        gpu_buffer_cases.full_capacity(rank, num_ranks, layout)
        gpu_buffer_cases.two_places(rank, num_ranks, layout)
    gpu_buffer_cases.events(rank, num_ranks)
    found["late"] = gpu_buffer_cases.late_errors(rank, num_ranks)
    found["misplaced"] = gpu_buffer_cases.misplaced(rank, num_ranks)
    found["memory"] = gpu_buffer_cases.graph_words(rank, num_ranks)
    _side_stream(num_ranks)
    _two_buffers(num_ranks)
    for layout in ("rank", "expert"):
        _graphs(num_ranks, layout)
    test_buffer_capacity._facts_in_turn(rank, num_ranks)
    _graph_with_capacity(num_ranks)
    meet("all are through", rank, num_ranks)  # who ends first is dead to those who still look
    return found


def test_streams_graphs_capacity_and_refusals() -> None:
    results = run_ranks(on_gpu, num_gpus(), _all_cases, timeout_s=120)
    assert [len(found["late"]) for found in results] == [1] * len(results)
    assert f"got {1 << 40} at token 4, k 2" in results[0]["late"][0]
    assert all("rank 0 refused the call" in found["late"][0] for found in results[1:])
    assert len({len(found["misplaced"]) for found in results}) == 1
    assert all(text.startswith("InvalidArgument") for text in results[1]["misplaced"])
    assert all("rank 1 refused its call" in text for text in results[0]["misplaced"])
    assert [found["memory"] for found in results] == [(True, 2, 3)] * len(results)


@pytest.mark.gpu(2)
def test_a_call_that_fails_on_one_rank_alone_pairs_no_later_ones() -> None:
    gpu_buffer_cases.check_one_sided(run_ranks(on_gpu, 2, gpu_buffer_cases.one_sided, timeout_s=60))


@pytest.mark.gpu(2)
def test_steps_that_are_made_again_after_a_time_out_end_right() -> None:
    gpu_buffer_cases.check_same_layers(run_ranks(on_gpu, 2, gpu_buffer_cases.same_layers, timeout_s=60))


def _side_stream(num_ranks: int) -> None:
    """A result that a slow side stream still reads when its tensor has died is not written over."""
    with make(num_ranks, num_slots=1, max_tokens_per_rank=512, max_recv_rows=None) as buffer:
        side = torch.cuda.Stream()
        for seed in range(6):
            x, idx, _ = tokens(buffer, 512, seed)
            d = buffer.dispatch(x, idx)
            want = d.x.clone()  # type: ignore[union-attr]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                late = d.x.clone()  # type: ignore[union-attr]
            d.record_stream(side)
            del d
            after = buffer.dispatch(x + 1, idx, async_op=True)  # takes the slot
            after.event.wait()
            del after
            torch.cuda.synchronize()
            same_bits(late, want, f"side stream, {seed}")
        assert buffer.num_copied_results == 0


def _two_buffers(num_ranks: int) -> None:
    """Two buffers, each with calls on its own stream, in flight at once."""
    with make(num_ranks) as first, make(num_ranks) as second:
        x, idx, _ = tokens(first, 16)
        results = []
        for _ in range(20):
            for buffer in (first, second):
                d = buffer.dispatch(x, idx, sync=False, async_op=True, num_sms=8)
                assert isinstance(d.x, torch.Tensor)
                c = buffer.combine(d.x, d.handle, async_op=True, previous_event=d.event, num_sms=8)
                results.append(c)
        for c in results:
            c.event.wait()
            same_bits(c.x, x * times_sent(idx, num_ranks) + 0.0, "two buffers")


def _graphs(num_ranks: int, layout: str) -> None:
    """A graph of dispatch and combine replays with new routing; eager calls go on between replays."""
    with make(num_ranks, num_slots=3) as buffer:
        x, idx, _ = tokens(buffer, 16)
        d = buffer.dispatch(x, idx, layout=layout)
        buffer.combine(d.x, d.handle)  # type: ignore[arg-type] # the expert layout's place is made by an eager combine
        del d
        with pytest.raises(epee.errors.InvalidState, match="sync=False"):
            _capture(lambda: buffer.dispatch(x, idx, layout=layout))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            d = buffer.dispatch(x, idx, layout=layout, sync=False)
            y = buffer.combine_input(d.handle)
            y.copy_(d.x)  # type: ignore[arg-type]
            c = buffer.combine(y, d.handle)
        for seed in range(10):
            new_x, new_idx, _ = tokens(buffer, 16, seed)
            x.copy_(new_x)
            idx.copy_(new_idx)
            graph.replay()
            there = times_sent(idx, num_ranks) if layout == "rank" else (idx >= 0).sum(1)[:, None]
            same_bits(c.x + 0.0, x * there + 0.0, f"replay {seed}")
            eager = buffer.dispatch(x, idx, layout=layout)
            assert int(d.handle.recv_counts[0]) == eager.handle.num_recv
            assert isinstance(eager.x, torch.Tensor)
            same_bits(buffer.combine(eager.x, eager.handle).x + 0.0, x * there + 0.0, "between replays")
            del eager
        buffer.check()


def _graph_with_capacity(num_ranks: int) -> None:
    """Replays say how many rows they have dropped, and what these weigh, as eager calls do."""
    with make(num_ranks, num_slots=3) as buffer:
        x, idx, weights = tokens(buffer, 16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            d = buffer.dispatch(x, idx, weights, capacity=20, sync=False)
            c = buffer.combine(d.x, d.handle)  # type: ignore[arg-type]
            lost, counts = c.lost_weight, d.handle.recv_counts
        assert len(d.x) == 20
        for seed in range(10):
            for value, new in zip((x, idx, weights), tokens(buffer, 16, seed), strict=True):
                value.copy_(new)
            graph.replay()
            eager = buffer.dispatch(x, idx, weights, capacity=20)
            back = buffer.combine(eager.x, eager.handle)  # type: ignore[arg-type]
            same_bits(c.x, back.x, f"replay {seed}")
            same_bits(lost, back.lost_weight, f"lost_weight of replay {seed}")
            same_bits(d.num_dropped, eager.num_dropped, f"num_dropped of replay {seed}")
            assert counts.tolist() == [len(eager.x), *eager.num_tokens_per_expert]
            del eager, back
        buffer.check()


def _capture(call: Callable[[], Any]) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        call()


def test_every_order_agrees_with_the_oracle() -> None:
    test_combine_order.check_orders(test_combine_order.gpu_setup(num_gpus()), on_gpu, timeout_s=90)


def _deep_ep(rank: int, num_ranks: int) -> None:
    """DeepEP's two buffers on CUDA tensors: with events, without CPU sync, in graphs with new routing."""
    v1 = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
    v2 = deep_ep.ElasticBuffer(dist.group.WORLD)
    num_experts, num_tokens, hidden = 4 * num_ranks, 64, 256
    x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device="cuda")
    idx = torch.empty(num_tokens, 3, dtype=torch.int64, device="cuda")
    weights = torch.ones(num_tokens, 3, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(rank)

    def new_routing() -> torch.Tensor:
        x.copy_(torch.randint(-8, 9, x.shape, device="cuda", generator=generator))
        idx.copy_(torch.rand(num_tokens, num_experts, device="cuda", generator=generator).topk(3)[1])
        there = torch.stack([(idx // 4 == dst).any(1) for dst in range(num_ranks)]).sum(0)
        return x * there[:, None]

    def run_v1(num_worst_tokens: int, is_async: bool) -> torch.Tensor:
        per_rank, _, per_expert, member, event = v1.get_dispatch_layout(idx, num_experts, async_finish=is_async)
        recv_x, _, recv_weights, _, handle, event = v1.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=member, num_tokens_per_expert=per_expert, topk_idx=idx,
            topk_weights=weights, num_worst_tokens=num_worst_tokens, previous_event=event if is_async else None,
            async_finish=is_async, allocate_on_comm_stream=is_async,
        )  # fmt: skip
        assert handle is not None
        if num_worst_tokens:
            assert len(recv_x) == num_worst_tokens
        previous = event if is_async else None
        out, _, event = v1.combine(
            recv_x, handle, topk_weights=recv_weights, previous_event=previous, async_finish=is_async
        )
        if is_async:
            event.current_stream_wait()
        return out

    def run_v2(do_expand: bool, do_cpu_sync: bool | None, is_async: bool) -> torch.Tensor:
        recv_x, _, _, handle, event = v2.dispatch(
            x, idx, weights, None, num_experts, num_tokens, do_expand=do_expand, do_cpu_sync=do_cpu_sync,
            async_with_compute_stream=is_async,
        )  # fmt: skip
        out, _, event = v2.combine(
            recv_x, handle, previous_event=event if is_async else None, async_with_compute_stream=is_async
        )
        if is_async:
            event.current_stream_wait()
        return out

    worst = num_tokens * num_ranks
    first: dict[str, Callable[[], torch.Tensor]] = {
        "v1": lambda: run_v1(0, False),
        "v1 async": lambda: run_v1(0, True),
        "v1 worst async": lambda: run_v1(worst, True),
        "v1 worst": lambda: run_v1(worst, False),
    }
    second: dict[str, Callable[[], torch.Tensor]] = {
        "v2": lambda: run_v2(False, None, False),
        "v2 async": lambda: run_v2(False, None, True),
        "v2 no sync": lambda: run_v2(False, False, False),
        "v2 expand": lambda: run_v2(True, None, False) / 3,
        "v2 expand no sync": lambda: run_v2(True, False, True) / 3,
    }
    for calls, recorded in ((first, ("v1 worst",)), (second, ("v2 no sync", "v2 expand no sync"))):
        for name, call in calls.items():
            for _ in range(3):
                want = new_routing()
                same_bits(call() + 0.0, (x if "expand" in name else want) + 0.0, name)
        for name in recorded:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = calls[name]()
            for replay in range(5):
                want = new_routing()
                graph.replay()
                same_bits(out + 0.0, (x if "expand" in name else want) + 0.0, f"{name}, replay {replay}")
        torch.cuda.synchronize()
        if calls is first:
            v1.destroy()


@pytest.mark.smoke("deep_ep.Buffer", "deep_ep.ElasticBuffer", "throughput/order", "graph")
def test_deep_eps_buffers_on_cuda_tensors() -> None:
    run_ranks(on_gpu, num_gpus(), _deep_ep, timeout_s=90)


def _absent(rank: int, num_ranks: int) -> dict[str, Any]:
    """Rank 1 stays away from a dispatch, then from a combine; the others' contexts and buffers stay healthy."""
    found = {}
    with make(num_ranks) as buffer:
        x, idx, _ = tokens(buffer, 16)
        d = buffer.dispatch(x, idx)
        calls = {
            "dispatch": lambda: buffer.dispatch(x, idx, timeout=0.3),
            "no sync": lambda: buffer.dispatch(x, idx, timeout=0.3, sync=False),
            "combine": lambda: buffer.combine(d.x, d.handle, timeout=0.3),
        }
        for name, call in calls.items():
            if rank == 1:
                dist.barrier()
            found[name] = _error_of(buffer, call)
            if rank != 1:
                dist.barrier()
            dist.barrier()
        assert int(torch.ones(4, device="cuda").sum()) == 4
        for _ in range(3):
            d = buffer.dispatch(x, idx)
            same_bits(buffer.combine(d.x, d.handle).x, x * times_sent(idx, num_ranks) + 0.0, "afterwards")
            torch.cuda.synchronize()
            buffer.check()
        meet("all are through", rank, num_ranks)  # who ends first is dead to those who still look
    return found


def _error_of(buffer: epee.Buffer, call: Callable[[], Any]) -> tuple[str, str, float]:
    started = time.monotonic()
    try:
        call()
        torch.cuda.synchronize()
        buffer.check()
    except epee.EpeeError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "none", "", time.monotonic() - started


def test_an_absent_peer_is_named_and_everything_works_afterwards() -> None:
    results = run_ranks(on_gpu, num_gpus(), _absent, timeout_s=90)
    for rank, found in enumerate(results):
        for name, (kind, text, seconds) in found.items():
            if rank == 1:
                assert kind in ("MismatchError", "CommTimeoutError"), (name, text)
                continue
            assert kind == "CommTimeoutError", (name, text)
            op = "combine" if name == "combine" else "dispatch"
            for words in (op, f"rank={rank}", "peer=1", "expected call", "got"):
                assert words in text, text
            assert seconds < 30


def _death(rank: int, num_ranks: int) -> None:
    buffer = make(num_ranks, timeout=60.0)
    x, idx, _ = tokens(buffer, 16)
    d = buffer.dispatch(x, idx)
    torch.cuda.synchronize()
    meet("the first call is over", rank, num_ranks)
    if rank == 1:
        os._exit(0)
    seen = []
    for call in (lambda: buffer.dispatch(x, idx), lambda: buffer.combine(d.x, d.handle)):
        try:
            call()
            torch.cuda.synchronize()
        except epee.RankFailedError as error:
            seen.append(error.ranks)
    assert int(torch.ones(4, device="cuda").sum()) == 4
    buffer.close()
    raise AssertionError(f"saw {seen}")  # the only way past the harness, which reports the rank that left


@pytest.mark.smoke("death")
def test_a_dead_rank_is_found_long_before_the_time_out() -> None:
    with pytest.raises(RankFailure, match=r"saw \[\(1,\), \(1,\)\]"):
        run_ranks(on_gpu, 2, _death, timeout_s=50)


def _elsewhere(rank: int, num_ranks: int) -> None:
    """The current GPU is another one, and this process has not used any yet."""
    with make(num_ranks, device=f"cuda:{rank}") as buffer:
        x, idx, _ = tokens(buffer, 16)
        for options in ({}, {"async_op": True}, {"sync": False}):
            d = buffer.dispatch(x, idx, **options)
            assert isinstance(d.x, torch.Tensor)
            c = buffer.combine(d.x, d.handle, previous_event=d.event)
            same_bits(c.x, x * times_sent(idx, num_ranks) + 0.0, f"{options}")
            place = buffer.combine_input(d.handle)
            assert place.device == d.x.device == torch.device("cuda", rank)
        assert torch.cuda.current_device() == 0


def test_a_buffer_may_be_on_another_gpu_than_the_current_one() -> None:
    run_ranks(_elsewhere, 2, timeout_s=60)
