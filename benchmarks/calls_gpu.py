"""Time calls as users make them, from Python, eager: elapsed and host time of a call.

    python benchmarks/calls_gpu.py --num-ranks 4 --json bench-out/calls_gpu.json
    python benchmarks/calls_gpu.py --only latency,v1 --default-device

Clock: CUDA events around a block of calls back to back, divided by their number (elapsed), and the host's clock around
the same block without the wait for the GPU (host); the best of five blocks, each begun by all ranks together, on the
slowest rank; beside it the median, least and largest elapsed time of the five. A block begins with three calls that
are not timed: the first one after a wait takes the host 100 to 400 us, which made calls with few in a block (those of
4096 tokens) look slower on the host than others until 2026-11-30. `tensor.add_` of one element is timed in the same
way, as a measure of the machine's host; with several ranks NCCL's `all_to_all_single` as well. Every result is checked
against a closed form first.

Groups (`--only`): "barrier"; "latency" (`LatencyBuffer`, 128 tokens) and "latency-names" (the same by DeepEP's names);
"throughput" (`Buffer`); "v1" and "v2" (DeepEP's `Buffer` and `ElasticBuffer`); "clients": calls with the arguments with
which programs make them (the files that `tests/clients` runs, and DeepEP's README). Hidden 7168, top-8 of 256 experts.

The rows of the barrier:

    V2 names           epee.compat.deep_ep.ElasticBuffer.barrier()
    Buffer             epee.Buffer.barrier()
    launch             the kernel alone, arguments prepared
    graph of one       a CUDA graph with one barrier, replayed
    graph of twenty    a CUDA graph with twenty, replayed; time of one barrier
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import epee
import epee.compat.deep_ep as deep_ep
from benchmarks import gpu
from epee.compat.deep_ep.utils import per_token_cast_to_fp8
from epee.compat.mooncake import ep as mooncake

TIMEOUT_S = 20
BLOCKS, WARM_UP, UNTIMED = 5, 20, 3
IN_GRAPH = 20
HIDDEN, NUM_TOPK, NUM_EXPERTS = 7168, 8, 256
FEW, MANY = 128, 4096


class Times(NamedTuple):
    """Microseconds of a call: the best block's elapsed and host time; median, least and largest elapsed time."""

    elapsed: float
    host: float
    median: float
    least: float
    largest: float


Rows = dict[str, Times]
Calls = dict[str, Callable[[], object]]


def block_times(call: Callable[[], object], num_calls: int) -> Times:
    """Return the times of a call over the blocks, each of the rank where it is largest."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(BLOCKS):
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(UNTIMED):
            call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        began = time.perf_counter()
        for _ in range(num_calls):
            call()
        host = time.perf_counter() - began
        end.record()
        torch.cuda.synchronize()
        times.append((start.elapsed_time(end) * 1e3 / num_calls, host * 1e6 / num_calls))
    elapsed = sorted(block[0] for block in times)
    found = [elapsed[0], min(host for _, host in times), elapsed[len(elapsed) // 2], elapsed[0], elapsed[-1]]
    mine = torch.tensor(found, device="cpu", dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return Times(*mine.tolist())


class Inputs:
    """Rows and routing of this rank, equal weights; `num_ranks_of[token]` ranks receive a token."""

    def __init__(self, rank: int, num_ranks: int, num_tokens: int) -> None:
        generator = torch.Generator("cpu").manual_seed(100 * num_tokens + rank)
        scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator, device="cpu", dtype=torch.float32)
        idx = scores.topk(NUM_TOPK, dim=1).indices
        owners = idx // (NUM_EXPERTS // num_ranks)
        reached = torch.zeros(num_tokens, num_ranks, dtype=torch.int64, device="cpu").scatter_(1, owners, 1)
        rows = torch.randn(num_tokens, HIDDEN, generator=generator, device="cpu", dtype=torch.float32)
        self.x = rows.bfloat16().cuda()
        self.idx = idx.cuda()
        self.weights = torch.full((num_tokens, NUM_TOPK), 1 / NUM_TOPK, dtype=torch.float32, device="cuda")
        self.num_ranks_of = reached.sum(1).cuda()

    def check_summed(self, got: torch.Tensor) -> None:
        """Raise unless `got` is what comes back when every rank returns the rows as they came."""
        wanted = (self.x.float() * self.num_ranks_of[:, None]).bfloat16()
        assert torch.equal(got[: len(wanted)], wanted), "a combine of what was dispatched gave other rows"

    def check_weighted(self, got: torch.Tensor, factor: float = 1) -> None:
        """Raise unless `got` is x times a factor, but for roundings: FP8 there, bfloat16 back."""
        wanted = self.x.float() * factor
        assert torch.allclose(got.float(), wanted, rtol=0.1, atol=0.1 * factor), "a pair gave other rows"

    def check_weights(self, got: torch.Tensor | None) -> None:
        """Raise unless `got` is what comes back of the weights: each from the rank of its expert."""
        assert got is not None
        assert torch.equal(got, self.weights), "a combine gave other weights"


def time_latency(rank: int, num_ranks: int, num_calls: int) -> Rows:
    """Time `LatencyBuffer`: a pair with FP8, and each call alone."""
    given = Inputs(rank, num_ranks, FEW)
    buffer = epee.LatencyBuffer(
        num_experts=NUM_EXPERTS,
        hidden=HIDDEN,
        num_topk=NUM_TOPK,
        max_tokens_per_rank=FEW,
        device="cuda",
        timeout=TIMEOUT_S,
    )
    got = buffer.dispatch(given.x, given.idx, given.weights)
    assert isinstance(got.x, torch.Tensor)
    given.check_weighted(buffer.combine(got.x, got.handle).x)
    rows, handle = got.x, got.handle

    def pair() -> None:
        back = buffer.dispatch(given.x, given.idx, given.weights, use_fp8=True)
        buffer.combine(rows, back.handle)

    return {
        "LatencyBuffer pair, FP8": block_times(pair, num_calls),
        "LatencyBuffer dispatch, FP8": block_times(
            lambda: buffer.dispatch(given.x, given.idx, given.weights, use_fp8=True), num_calls
        ),
        "LatencyBuffer combine": block_times(lambda: buffer.combine(rows, handle), num_calls),
    }


def time_latency_names(rank: int, num_ranks: int, num_calls: int) -> Rows:
    """Time the same calls by DeepEP's names."""
    given = Inputs(rank, num_ranks, FEW)
    nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(FEW, HIDDEN, num_ranks, NUM_EXPERTS)
    buffer = deep_ep.Buffer(
        dist.group.WORLD, 0, nbytes, low_latency_mode=True, num_qps_per_rank=NUM_EXPERTS // num_ranks
    )
    rows, _, handle, _, _ = buffer.low_latency_dispatch(given.x, given.idx, FEW, NUM_EXPERTS, use_fp8=False)
    assert isinstance(rows, torch.Tensor)
    given.check_weighted(buffer.low_latency_combine(rows, given.idx, given.weights, handle)[0])

    def pair() -> None:
        back = buffer.low_latency_dispatch(given.x, given.idx, FEW, NUM_EXPERTS)
        buffer.low_latency_combine(rows, given.idx, given.weights, back[2])

    calls = {"low_latency pair, FP8": pair}
    stats = torch.zeros(NUM_EXPERTS // num_ranks, dtype=torch.int32, device="cuda")
    for name, options in {
        "with hooks": {"return_recv_hook": True},
        "with events": {"async_finish": True},
        "with statistics": {"cumulative_local_expert_recv_stats": stats},
    }.items():

        def pair_so(options: dict[str, Any] = options) -> torch.Tensor:
            both = {key: value for key, value in options.items() if value is True}
            _, _, handle, event, hook = buffer.low_latency_dispatch(given.x, given.idx, FEW, NUM_EXPERTS, **options)
            _end(event, hook)
            out, event, hook = buffer.low_latency_combine(rows, given.idx, given.weights, handle, **both)
            _end(event, hook)
            return out

        given.check_weighted(pair_so())
        calls[f"low_latency pair {name}, FP8"] = pair_so
    return {name: block_times(call, num_calls) for name, call in calls.items()}


def _end(event: Any, hook: Any) -> None:
    """Wait as programs do, if there is anything to wait for."""
    if hook is not None:
        hook()
    if event.event is not None:
        event.current_stream_wait()


def time_throughput(rank: int, num_ranks: int, num_calls: int) -> Rows:
    """Time `Buffer`: dispatch with and without CPU sync, cached, combine."""
    rows: Rows = {}
    for num_tokens in (FEW, MANY):
        given = Inputs(rank, num_ranks, num_tokens)
        buffer = epee.Buffer(
            num_experts=NUM_EXPERTS,
            hidden=HIDDEN,
            num_topk=NUM_TOPK,
            max_tokens_per_rank=num_tokens,
            device="cuda",
            timeout=TIMEOUT_S,
        )
        got = buffer.dispatch(given.x, given.idx, given.weights)
        assert isinstance(got.x, torch.Tensor)
        given.check_summed(buffer.combine(got.x, got.handle).x)
        num = num_calls if num_tokens == FEW else num_calls // 4
        calls = {
            "dispatch": lambda given=given, buffer=buffer: buffer.dispatch(
                given.x, given.idx, given.weights, sync=False
            ),
            "dispatch, CPU sync": lambda given=given, buffer=buffer: buffer.dispatch(given.x, given.idx, given.weights),
            "cached dispatch": lambda given=given, buffer=buffer, got=got: buffer.dispatch(given.x, handle=got.handle),
            "combine": lambda buffer=buffer, got=got: buffer.combine(got.x, got.handle),
            "combine, weights": lambda buffer=buffer, got=got: buffer.combine(
                got.x, got.handle, topk_weights=got.topk_weights
            ),
        }
        given.check_weights(buffer.combine(got.x, got.handle, topk_weights=got.topk_weights).topk_weights)
        calls |= _expert_calls(buffer, given)
        for name, call in calls.items():
            rows[f"Buffer {name}, {num_tokens}"] = block_times(call, num)
        del got, calls
        buffer.close()
    return rows


def _expert_calls(buffer: epee.Buffer, given: Inputs) -> Calls:
    """Return the calls of the expert layout: rows in ordinary memory, and where a combine need not copy them."""
    got = buffer.dispatch(given.x, given.idx, given.weights, layout="expert")
    assert isinstance(got.x, torch.Tensor)
    given.check_weighted(buffer.combine(got.x, got.handle).x)
    back = buffer.combine(got.x, got.handle, topk_weights=got.topk_weights)
    given.check_weighted(back.x)
    given.check_weights(back.topk_weights)
    there = buffer.combine_input(got.handle).copy_(got.x)
    given.check_weighted(buffer.combine(there, got.handle).x)
    return {
        "dispatch, expert layout": lambda: buffer.dispatch(
            given.x, given.idx, given.weights, layout="expert", sync=False
        ),
        "dispatch, expert layout, CPU sync": lambda: buffer.dispatch(
            given.x, given.idx, given.weights, layout="expert"
        ),
        "combine, expert layout": lambda: buffer.combine(got.x, got.handle),
        "combine, expert layout, in place": lambda: buffer.combine(there, got.handle),
        "combine, expert layout, weights": lambda: buffer.combine(got.x, got.handle, topk_weights=got.topk_weights),
    }


def time_v1(rank: int, num_ranks: int, num_calls: int) -> Rows:
    """Time DeepEP V1's names: the layout, a step, and its calls alone."""
    rows: Rows = {}
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 30)
    for num_tokens in (FEW, MANY):
        given = Inputs(rank, num_ranks, num_tokens)

        def dispatch(given: Inputs = given) -> Any:
            per_rank, _, per_expert, is_in, _ = buffer.get_dispatch_layout(given.idx, NUM_EXPERTS)
            return buffer.dispatch(
                given.x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=is_in,
                num_tokens_per_expert=per_expert,
                topk_idx=given.idx,
                topk_weights=given.weights,
            )

        def step(dispatch: Callable[[], Any] = dispatch) -> None:
            got = dispatch()
            buffer.combine(got[0], got[4])

        def weighted_step(dispatch: Callable[[], Any] = dispatch) -> None:
            got = dispatch()
            buffer.combine(got[0], got[4], topk_weights=got[2])

        got = dispatch()
        given.check_summed(buffer.combine(got[0], got[4])[0])
        back = buffer.combine(got[0], got[4], topk_weights=got[2])
        given.check_summed(back[0])
        given.check_weights(back[1])
        num = num_calls if num_tokens == FEW else num_calls // 4
        calls = {
            "get_dispatch_layout": lambda given=given: buffer.get_dispatch_layout(given.idx, NUM_EXPERTS),
            "layout + dispatch + combine": step,
            "layout + dispatch + combine, weights": weighted_step,
            "cached dispatch": lambda given=given, got=got: buffer.dispatch(given.x, handle=got[4]),
            "combine": lambda got=got: buffer.combine(got[0], got[4]),
            "combine, weights": lambda got=got: buffer.combine(got[0], got[4], topk_weights=got[2]),
        }
        for name, call in calls.items():
            rows[f"V1 {name}, {num_tokens}"] = block_times(call, num)
        del got, calls
    return rows


def time_v2(rank: int, num_ranks: int, num_calls: int) -> Rows:
    """Time DeepEP V2's names: a step with and without CPU sync."""
    rows: Rows = {}
    for num_tokens in (FEW, MANY):
        given = Inputs(rank, num_ranks, num_tokens)
        buffer = deep_ep.ElasticBuffer(
            dist.group.WORLD,
            num_max_tokens_per_rank=num_tokens,
            num_cpu_timeout_secs=TIMEOUT_S,
            explicitly_destroy=True,
        )
        for do_cpu_sync in (False, True):

            def step(given: Inputs = given, buffer: Any = buffer, do_cpu_sync: bool = do_cpu_sync) -> torch.Tensor:
                got = buffer.dispatch(
                    given.x, given.idx, given.weights, num_experts=NUM_EXPERTS, do_cpu_sync=do_cpu_sync
                )
                return buffer.combine(got[0], got[3])[0]

            given.check_summed(step())
            num = num_calls if num_tokens == FEW else num_calls // 4
            rows[f"V2 dispatch + combine, {num_tokens}, do_cpu_sync={int(do_cpu_sync)}"] = block_times(step, num)
        buffer.destroy()
    return rows


class V1Steps:
    """A layer's calls on DeepEP V1's buffer: Megatron's, SGLang's and vLLM's, and those of DeepEP's README.

    Args:
        given: inputs.
        is_async: with events, as all of them do by default.
        options: of dispatches, those of SGLang.
    """

    def __init__(self, buffer: Any, given: Inputs, is_async: bool, options: dict[str, Any]) -> None:
        self.buffer, self.given, self.options = buffer, given, options
        self.is_async = is_async
        self.x: Any = given.x
        self.config = {key: value for key, value in options.items() if key == "config"}

    def run(self) -> dict[str, Any]:
        """Return the arguments of a call that runs behind the work before."""
        event = deep_ep.Buffer.capture() if self.is_async else None
        return {"previous_event": event, "async_finish": self.is_async, "allocate_on_comm_stream": self.is_async}

    def dispatch(self) -> Any:
        """Count the layout and dispatch; the dispatch waits for the layout's event."""
        given, run = self.given, self.run()
        per_rank, _, per_expert, is_in, run["previous_event"] = self.buffer.get_dispatch_layout(
            given.idx, NUM_EXPERTS, **run
        )
        got = self.buffer.dispatch(
            self.x, topk_idx=given.idx, topk_weights=given.weights, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=None, is_token_in_rank=is_in, num_tokens_per_expert=per_expert,
            **run, **self.options,
        )  # fmt: skip
        _end(got[5], None)
        return got

    def combine(self, rows: torch.Tensor, handle: Any, weights: torch.Tensor | None = None) -> Any:
        """Combine, with weights as in the backward of a dispatch."""
        back = self.buffer.combine(rows, handle, topk_weights=weights, **self.run(), **self.config)
        _end(back[2], None)
        return back

    def forward(self) -> Any:
        """A layer's forward: rows come back without weights."""
        got = self.dispatch()
        rows = got[0] if isinstance(got[0], torch.Tensor) else self.rows
        return self.combine(rows, got[4])

    def checked(self) -> Any:
        """Return a dispatch whose rows have come back as they should."""
        got = self.dispatch()
        if isinstance(got[0], torch.Tensor):
            self.given.check_summed(self.combine(got[0], got[4])[0])
            back = self.combine(got[0], got[4], got[2])
            self.given.check_summed(back[0])
            self.given.check_weights(back[1])
        else:
            self.rows = torch.zeros(got[0][0].shape, dtype=torch.bfloat16, device="cuda")
            self.given.check_weights(self.combine(self.rows, got[4], got[2])[1])
        return got

    def backward(self, got: Any) -> None:
        """A layer's backward: a dispatch by the handle, a combine with the gradients of the weights."""
        out = self.buffer.dispatch(self.given.x, handle=got[4], **self.run())
        _end(out[5], None)
        self.combine(got[0], got[4], got[2])


def time_clients(rank: int, num_ranks: int, num_calls: int) -> Rows:
    """Time calls as programs make them, by the names of both of DeepEP's buffers, Mooncake's and HybridEP's.

    One buffer at a time: beside others on other streams each would take a part of the multiprocessors only.
    """
    rows: Rows = {}
    for num_tokens in (FEW, MANY):
        given = Inputs(rank, num_ranks, num_tokens)
        num = num_calls if num_tokens == FEW else num_calls // 4
        for calls_of in (_v1_calls, _v2_calls, _hybrid_calls):
            with contextlib.ExitStack() as ends:
                for name, call in calls_of(given, num_ranks, ends).items():
                    rows[f"{name}, {num_tokens}"] = block_times(call, num)
                del call
    return rows | _mooncake_calls(rank, num_ranks, num_calls)


def _v1_calls(given: Inputs, num_ranks: int, ends: contextlib.ExitStack) -> Calls:
    """Return Megatron's and SGLang's calls on V1's buffer, which ends with them."""
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 30, explicitly_destroy=True)
    ends.callback(buffer.destroy)
    calls: Calls = {}
    config = deep_ep.Buffer.get_dispatch_config(num_ranks)
    steps = V1Steps(buffer, given, True, {"expert_alignment": 128, "config": config})
    steps.x = per_token_cast_to_fp8(given.x)
    steps.checked()
    calls["SGLang forward, FP8, events"] = steps.forward
    for is_async, name in ((False, "no events"), (True, "events")):
        steps = V1Steps(buffer, given, is_async, {})
        steps.checked()
        calls[f"Megatron forward, {name}"] = steps.forward

    @functools.cache
    def held() -> Any:
        """Return a dispatch whose results live on: made behind the rows before, which have all slots."""
        return steps.dispatch()

    for is_async, name in ((False, "no events"), (True, "events")):
        back = V1Steps(buffer, given, is_async, {})
        calls[f"Megatron backward, {name}"] = lambda back=back: back.backward(held())
    return calls


def _v2_calls(given: Inputs, num_ranks: int, ends: contextlib.ExitStack) -> Calls:
    """Return torchtitan's, SGLang's and DeepSpeed's calls on V2's buffer."""
    buffer = deep_ep.ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=len(given.x), hidden=HIDDEN, num_topk=NUM_TOPK,
        num_cpu_timeout_secs=TIMEOUT_S, explicitly_destroy=True,
    )  # fmt: skip
    ends.callback(buffer.destroy)

    def dispatch(do_expand: bool, do_cpu_sync: bool) -> Any:
        return buffer.dispatch(
            given.x, topk_idx=given.idx, topk_weights=given.weights, num_experts=NUM_EXPERTS,
            num_max_tokens_per_rank=len(given.x), do_expand=do_expand, do_cpu_sync=do_cpu_sync,
        )  # fmt: skip

    def forward(do_expand: bool = False, do_cpu_sync: bool = True, is_async: bool = True) -> torch.Tensor:
        got = dispatch(do_expand, do_cpu_sync)
        out, _, event = buffer.combine(got[0], handle=got[3], topk_weights=None, async_with_compute_stream=is_async)
        _end(event, None)
        return out

    got = dispatch(False, True)

    def backward() -> Any:
        buffer.dispatch(given.x, handle=got[3], num_sms=got[3].num_sms, do_cpu_sync=False)
        return buffer.combine(got[0], handle=got[3], topk_weights=got[2])

    given.check_summed(forward())
    given.check_weights(backward()[1])
    for do_cpu_sync in (True, False):
        given.check_weighted(forward(True, do_cpu_sync), NUM_TOPK)
    return {
        "torchtitan forward": forward,
        "torchtitan backward": backward,
        "torchtitan without grad, expanded": lambda: forward(True, False),
        "SGLang V2, expanded": lambda: forward(True, False, False),
        "DeepSpeed, expanded, CPU sync": lambda: forward(True, True, False),
    }


def _hybrid_calls(given: Inputs, num_ranks: int, ends: contextlib.ExitStack) -> Calls:
    """Return Megatron's and torchtitan's calls on HybridEP's buffer."""
    num_local = NUM_EXPERTS // num_ranks
    buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, HIDDEN, len(given.x), num_local)
    ends.callback(buffer.destroy)
    routing_map = torch.zeros(len(given.x), NUM_EXPERTS, dtype=torch.bool, device="cuda").scatter_(1, given.idx, True)
    probs = routing_map.float() / NUM_TOPK

    def dispatch() -> Any:
        return buffer.dispatch_with_permute(
            hidden=given.x, routing_map=routing_map, probs=probs, num_of_experts_per_rank=num_local
        )

    def forward() -> torch.Tensor:
        got = dispatch()
        return buffer.combine_with_unpermute(hidden=got[0], handle=got[4])[0]

    got = dispatch()

    def backward() -> Any:
        buffer.dispatch_with_permute(hidden=given.x, handle=got[4], num_permuted_tokens=len(got[0]))
        return buffer.combine_with_unpermute(hidden=got[0], probs=got[1], handle=got[4])

    given.check_weighted(forward(), NUM_TOPK)
    assert torch.equal(backward()[1], probs), "a combine gave other probs"
    return {"HybridEP forward": forward, "HybridEP backward": backward}


def _mooncake_calls(rank: int, num_ranks: int, num_calls: int) -> Rows:
    """Time SGLang's calls on Mooncake's buffer."""
    given, rows = Inputs(rank, num_ranks, FEW), {}
    nbytes = mooncake.get_ep_buffer_size_hint(FEW, HIDDEN, num_ranks, NUM_EXPERTS)
    buffer = mooncake.Buffer(dist.group.WORLD, nbytes)
    active = torch.ones(num_ranks, dtype=torch.int32, device="cuda")
    y = torch.zeros(NUM_EXPERTS // num_ranks, num_ranks * FEW, HIDDEN, dtype=torch.bfloat16, device="cuda")

    def pair(use_hook: bool, use_fp8: bool = True) -> torch.Tensor:
        run = {"async_finish": not use_hook, "return_recv_hook": use_hook}
        got = buffer.dispatch(given.x, given.idx, active, FEW, NUM_EXPERTS, -1, use_fp8=use_fp8, **run)
        _end(got[3], got[4])
        rows = y if use_fp8 else got[0]
        back = buffer.combine(rows, given.idx, given.weights, active, -1, got[2], **run)
        _end(back[1], back[2])
        return back[0]

    for use_hook in (True, False):
        given.check_weighted(pair(use_hook, use_fp8=False))
        rows[f"Mooncake pair, {'hooks' if use_hook else 'events'}, FP8"] = block_times(
            lambda use_hook=use_hook: pair(use_hook), num_calls
        )
    return rows


def time_machine(num_ranks: int, num_calls: int) -> Rows:
    """Time what a call of anybody costs here: `tensor.add_`, and NCCL's exchange of one row a rank."""
    word = torch.zeros(1, device="cuda")
    rows: Rows = {"tensor.add_": block_times(lambda: word.add_(1), num_calls)}
    if num_ranks > 1:
        group = dist.new_group(backend="nccl")
        there, back = (torch.zeros(num_ranks, 64, device="cuda") for _ in range(2))
        rows["NCCL all_to_all_single"] = block_times(
            lambda: dist.all_to_all_single(back, there, group=group), num_calls
        )
    return rows


def time_barrier(rank: int, num_ranks: int, num_calls: int) -> Rows:
    """Time the barrier; the first dispatch makes the buffer's memory."""
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=128, num_cpu_timeout_secs=TIMEOUT_S)
    x = torch.ones(16, 256, dtype=torch.bfloat16, device="cuda")
    idx = torch.arange(32, device="cuda").view(16, 2) % (4 * num_ranks)
    buffer.dispatch(x, idx, num_experts=4 * num_ranks)
    assert buffer.runtime is not None
    whole: Any = buffer.runtime._rooms.whole
    path: Any = whole._path
    whole.barrier()  # the first one makes the launch
    machine, barrier = path.machine, path.machine._barrier
    stream = machine.platform.stream()

    def launch() -> None:
        machine.announce()
        barrier.call.ordinal = machine.num_calls
        barrier.kernel(1, 32, 0, stream, "plain")

    rows: Rows = {}
    rows["V2 names"] = block_times(buffer.barrier, num_calls)
    rows["Buffer"] = block_times(whole.barrier, num_calls)
    rows["launch"] = block_times(launch, num_calls)
    one, many = gpu.graph_of(buffer.barrier, 1), gpu.graph_of(buffer.barrier, IN_GRAPH)
    rows["graph of one"] = block_times(one.replay, num_calls)
    twenty = block_times(many.replay, max(1, num_calls // IN_GRAPH))
    rows["graph of twenty"] = Times(*(us / IN_GRAPH for us in twenty))
    buffer.barrier(with_cpu_sync=True)
    return rows


GROUPS: dict[str, Callable[[int, int, int], Rows]] = {
    "barrier": time_barrier,
    "latency": time_latency,
    "latency-names": time_latency_names,
    "throughput": time_throughput,
    "v1": time_v1,
    "v2": time_v2,
    "clients": time_clients,
}


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", args.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.num_ranks)
    if args.default_device:
        torch.set_default_device("cuda")
    rows: Rows = {}
    try:
        rows.update(time_machine(args.num_ranks, args.calls))
        for name in args.only:
            rows.update(GROUPS[name](rank, args.num_ranks, args.calls))
    except BaseException:  # noqa: BLE001 - the other ranks must not wait for this one
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if rank == 0:
        report(rows, args)
    dist.barrier()
    dist.destroy_process_group()


def report(rows: Rows, args: argparse.Namespace) -> None:
    """Print the rows, and write them where that is asked for."""
    mode = ", set_default_device" if args.default_device else ""
    print(f"{args.num_ranks}x {torch.cuda.get_device_name()}, torch {torch.__version__}, {args.calls} calls{mode}")
    unit = rows["tensor.add_"][1]
    for name, times in rows.items():
        print(
            f"  {name:46s} elapsed {times.elapsed:8.2f} us ({times.least:.1f} to {times.largest:.1f})   "
            f"host {times.host:8.2f} us = {times.host / unit:5.2f} add_",
            flush=True,
        )
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        facts = {"num_ranks": args.num_ranks, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
        facts |= {"default_device": args.default_device, "date": time.strftime("%Y-%m-%d")}
        best = {name: (times.elapsed, times.host) for name, times in rows.items()}
        blocks = {name: (times.median, times.least, times.largest) for name, times in rows.items()}
        Path(args.json).write_text(
            json.dumps({**facts, "elapsed_and_host_us": best, "elapsed_of_blocks_us": blocks}, indent=1)
        )


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, separated by commas")
    parser.add_argument("--default-device", action="store_true", help="with torch.set_default_device('cuda')")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    start(args.num_ranks, args.only.split(","), args.calls, args.default_device, args.json)


def start(
    num_ranks: int, names: list[str], calls: int = 300, default_device: bool = False, json_path: str = ""
) -> None:
    """Time groups of calls on so many ranks, and report."""
    args = argparse.Namespace(
        num_ranks=num_ranks, only=names, calls=calls, default_device=default_device, json=json_path
    )
    with tempfile.TemporaryDirectory() as folder:
        gpu.spawn(run, (args, folder), num_ranks)


if __name__ == "__main__":
    main()
