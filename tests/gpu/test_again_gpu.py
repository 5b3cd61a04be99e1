"""Calls on real GPUs that are like earlier ones: weights, the expert layout, hooks, events; eager and in graphs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
import epee.compat.deep_ep as deep_ep
from epee.ep.latency import gpu_path
from tests.ep.buffer_cases import same_bits
from tests.ep.gpu_buffer_cases import HIDDEN, NUM_TOPK, make, tokens
from tests.gpu.test_buffer_gpu import on_gpu
from tests.harness import run_ranks

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(120)]

NUM_EXPERTS, LONG_SLEEP = 4, 20_000_000


def _plain(num_ranks: int, **options: Any) -> epee.Buffer:
    """A buffer that is not poisoned: with poison no call is as one before."""
    buffer = make(num_ranks, **options)
    assert buffer._gpu is not None
    buffer._gpu.set_poison(False)
    return buffer


def _check_weighted(buffer: epee.Buffer, layout: str, seen: list[bool]) -> None:
    """Combine with weights, from ordinary memory and in place, several routings."""
    for seed in range(5):
        x, idx, weights = tokens(buffer, 16, seed)
        wanted = torch.where(idx >= 0, weights, 0)
        got = buffer.dispatch(x, idx, weights, layout=layout)
        assert isinstance(got.x, torch.Tensor)
        assert got.topk_weights is not None
        there = buffer.combine_input(got.handle).copy_(got.x)
        plain = buffer.combine(got.x.clone(), got.handle)
        for factor, y in ((1, got.x.clone()), (2, got.x), (4, there)):
            sent = factor * got.topk_weights
            back = buffer.combine(y, got.handle, topk_weights=sent)
            sent.fill_(-1)  # behind the call: it has read them
            same_bits(back.x, plain.x, f"rows, {seed}")
            same_bits(back.topk_weights, factor * wanted, f"weights, {seed}")
        del got, there, y
    assert sum(seen) > 12, "no plan was found"


def _weighted(rank: int, num_ranks: int, layout: str) -> None:
    with _plain(num_ranks, num_slots=3) as buffer:
        seen: list[bool] = []
        again = buffer.again
        assert again is not None
        combine = again.combine

        def spy(*args: Any) -> Any:
            """Note whether a combine was as one before."""
            got = combine(*args)
            seen.append(got is not None)
            return got

        again.combine = spy
        _check_weighted(buffer, layout, seen)
        x, idx, weights = tokens(buffer, 16)
        given = tokens(buffer, 16, 9)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            d = buffer.dispatch(x, idx, weights, layout=layout, sync=False)
            back = buffer.combine(d.x, d.handle, topk_weights=d.topk_weights)  # type: ignore[arg-type]
        for seed in range(6):
            given = tokens(buffer, 16, seed)
            for value, new in zip((x, idx, weights), given, strict=True):
                value.copy_(new)
            graph.replay()
            same_bits(back.topk_weights, torch.where(idx >= 0, weights, 0), f"replay {seed}")
            eager = buffer.dispatch(x, idx, weights, layout=layout)
            other = buffer.combine(eager.x, eager.handle, topk_weights=eager.topk_weights)  # type: ignore[arg-type]
            same_bits(back.x, other.x, f"replay {seed}")
            del eager, other
        buffer.check()


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_combines_with_weights_eager_and_in_graphs(layout: str) -> None:
    run_ranks(on_gpu, 2, _weighted, layout, timeout_s=100)


def _events(rank: int, num_ranks: int) -> None:
    """Calls with events wait for the work before, and the work after waits for them, also when they are repeated."""
    torch.cuda.set_device(rank)
    os.environ.pop("EPEE_POISON", None)
    buffer: Any = deep_ep.Buffer(dist.group.WORLD, 1 << 22)
    generator = torch.Generator().manual_seed(rank)
    x, out = (torch.zeros(16, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    idx = torch.zeros(16, NUM_TOPK, dtype=torch.int64, device="cuda")
    weights = torch.zeros(16, NUM_TOPK, device="cuda")
    for step in range(8):
        new = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:NUM_TOPK] for _ in range(16)])
        torch.cuda._sleep(LONG_SLEEP)  # what the calls read is written late
        x.fill_(step + 1)
        idx.copy_(new)
        weights.fill_(step + 2)
        event = buffer.capture() if step % 2 else None
        run: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": step % 2 == 1}
        per_rank, _, per_expert, is_in, event = buffer.get_dispatch_layout(
            idx, NUM_EXPERTS, previous_event=event, **run
        )
        recv_x, recv_idx, recv_weights, listed, handle, event = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=is_in,
            num_tokens_per_expert=per_expert, previous_event=event, **run,
        )  # fmt: skip
        event.current_stream_wait()
        assert sum(listed) == int((recv_idx >= 0).sum())
        y = recv_x.clone()
        torch.cuda._sleep(LONG_SLEEP)
        y.mul_(2)
        sent = recv_weights * 3
        event = buffer.capture() if step % 2 else None
        combined, back, event = buffer.combine(y, handle, topk_weights=sent, previous_event=event, **run)
        again = buffer.dispatch(x, handle=handle, previous_event=event, **run)
        event.current_stream_wait()
        out.copy_(combined)
        there = torch.stack([(new // (NUM_EXPERTS // num_ranks) == r).any(1) for r in range(num_ranks)]).sum(0)
        wanted = ((step + 1) * 2 * there)[:, None].expand(16, HIDDEN)
        assert torch.equal(out.float().cpu(), wanted.float()), step
        assert torch.equal(back.cpu(), torch.full((16, NUM_TOPK), 3.0 * (step + 2))), step
        again[5].current_stream_wait()
        assert torch.equal(again[0], recv_x), step
        del recv_x, again, combined, y
    torch.cuda.synchronize()
    dist.barrier()


def test_v1s_calls_with_events() -> None:
    run_ranks(_events, 2, timeout_s=100)


def _hooks(rank: int, num_ranks: int) -> None:
    """Pairs with hooks give the bits of pairs without, repeated, two in flight, and in graphs."""
    torch.cuda.set_device(rank)
    os.environ.pop("EPEE_POISON", None)
    most, hidden = 32, 512
    nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, hidden, num_ranks, 8)
    buffer: Any = deep_ep.Buffer(dist.group.WORLD, 0, nbytes, low_latency_mode=True)
    generator = torch.Generator().manual_seed(rank)
    stats = torch.zeros(8 // num_ranks, dtype=torch.int32, device="cuda")

    def given(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, routing, weights."""
        idx = torch.stack([torch.randperm(8, generator=generator)[:4] for _ in range(num_tokens)])
        x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
        return x.cuda(), idx.cuda(), torch.rand(num_tokens, 4, generator=generator).cuda()

    def outputs(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Expert outputs: zeros behind the rows that came."""
        is_there = torch.arange(rows.shape[1], device="cuda")[None] < counts[:, None]
        return torch.where(is_there[..., None], rows, 0)

    def plain(call: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """A pair without hooks."""
        x, idx, weights = call
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(x, idx, most, 8, use_fp8=False)
        assert hook is None
        return buffer.low_latency_combine(outputs(rows, counts), idx, weights, handle)[0]

    def sent(call: tuple[torch.Tensor, ...], **options: Any) -> Any:
        """The send half of a dispatch."""
        return buffer.low_latency_dispatch(call[0], call[1], most, 8, use_fp8=False, return_recv_hook=True, **options)

    def received(call: tuple[torch.Tensor, ...], got: Any) -> torch.Tensor:
        """The rest of a pair, with hooks."""
        rows, counts, handle, _, hook = got
        hook()
        out, _, hook = buffer.low_latency_combine(
            outputs(rows, counts), call[1], call[2], handle, return_recv_hook=True
        )
        hook()
        with pytest.raises(epee.errors.InvalidState, match="called already"):
            hook()
        return out

    total = 0
    for num_tokens in (32, 5, 32, 5, 32):
        call, other = given(num_tokens), given(num_tokens)
        want, want_other = plain(call), plain(other)
        got = sent(call, cumulative_local_expert_recv_stats=stats)
        same_bits(received(call, got), want, "with hooks")
        total += int(got[1].sum())
        first, second = sent(call), sent(other)
        same_bits(received(other, second), want_other, "the second of two")
        same_bits(received(call, first), want, "the first of two")
    assert int(stats.sum()) == total
    call = given(16)
    want = plain(call)
    received(call, sent(call))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, counts, handle, _, hook = sent(call)
        hook()
        out, _, hook = buffer.low_latency_combine(
            outputs(rows, counts), call[1], call[2], handle, return_recv_hook=True
        )
        hook()
    for _ in range(4):
        out.fill_(float("nan"))
        graph.replay()
        same_bits(out, want, "replay")
        same_bits(received(call, sent(call)), want, "between replays")
    torch.cuda.synchronize()
    dist.barrier()


def test_low_latency_calls_with_hooks() -> None:
    run_ranks(_hooks, 2, timeout_s=100)


def _spied(made: Any, name: str, seen: list[str]) -> Any:
    """A call that notes its name if it is made as one before."""

    def spy(*args: Any) -> Any:
        got = made(*args)
        if got is not None:
            seen.append(name)
        return got

    return spy


def _in_turn(buffer: Any, cases: list[tuple[torch.Tensor, ...]]) -> None:
    """Calls on the own stream wait for what the caller's writes late; what they read may be dropped at once."""
    given = [torch.zeros_like(part) for part in cases[0]]
    wanted = []
    for case in cases:
        got = buffer.dispatch(*case)
        wanted.append(buffer.combine(got.x.clone(), got.handle).x)
        del got
    seen: list[str] = []
    for name in ("dispatch_async", "combine_async"):
        setattr(buffer.again, name, _spied(getattr(buffer.again, name), name, seen))
    for step, case in enumerate(cases):
        torch.cuda._sleep(LONG_SLEEP)
        for place, part in zip(given, case, strict=True):
            place.copy_(part)
        x, event = given[0].clone(), None
        if step % 2:
            event = torch.cuda.Event()
            event.record()
        got = buffer.dispatch(x, given[1], given[2], async_op=True, previous_event=event)
        del x
        filler = torch.full_like(given[0], torch.nan)  # in the memory of what was dropped, if that is free
        got.event.wait()
        y = got.x.clone()
        torch.cuda._sleep(LONG_SLEEP)
        y.mul_(1)
        back = buffer.combine(y, got.handle, async_op=True)
        del y, got
        filler = torch.full_like(filler.new_empty(wanted[step].shape), torch.nan)
        back.event.wait()
        same_bits(back.x, wanted[step], f"sums, {step}")
        del back, filler
    assert min(seen.count("dispatch_async"), seen.count("combine_async")) >= len(cases) - 2


def _own_stream(rank: int, num_ranks: int) -> None:
    with _plain(num_ranks) as buffer:
        _in_turn(buffer, [tokens(buffer, 16, seed) for seed in range(8)])
        with pytest.raises(epee.errors.InvalidArgument, match="previous_event must be"):
            buffer.dispatch(*tokens(buffer, 16, 1), async_op=True, previous_event=7)


def _own_stream_of_few(rank: int, num_ranks: int) -> None:
    gpu_path.LOOK_S = 600.0
    os.environ.pop("EPEE_POISON", None)
    sizes: dict[str, Any] = {"num_experts": 8, "hidden": 512, "num_topk": 4, "max_tokens_per_rank": 32}
    with epee.LatencyBuffer(**sizes, device="cuda", timeout=20) as buffer:
        generator = torch.Generator().manual_seed(rank)
        cases = []
        for _ in range(8):
            idx = torch.stack([torch.randperm(8, generator=generator)[:4] for _ in range(32)])
            x = torch.randn(32, 512, generator=generator).bfloat16()
            cases.append((x.cuda(), idx.cuda(), torch.rand(32, 4, generator=generator).cuda()))
        _in_turn(buffer, cases)


@pytest.mark.parametrize("function", [_own_stream, _own_stream_of_few])
def test_repeated_calls_on_the_buffers_own_stream(function: Any) -> None:
    run_ranks(on_gpu, 2, function, timeout_s=100)
