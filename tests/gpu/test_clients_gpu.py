"""The clients' own files on GPUs: the cases of `tests/clients` on CUDA tensors, and what exists on GPUs alone.

The files come from wheels on the package index, or, where there is no network, from a folder that was filled before:
`python -m tests.clients.fetch FOLDER` on a machine that has one (with EPEE_CLIENTS=all for `clean_buffers`), and
EPEE_CLIENTS_DIR=FOLDER here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients import fetch, test_sglang, test_training, test_vllm
from tests.harness import DEAD, run_mortal, run_ranks

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(110)]

LIMIT_S = 100
NUM_REPLAYS = 100


def _on_gpu(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    result = function(rank, num_ranks, *args, "cuda")
    torch.cuda.synchronize()
    dist.barrier()  # a rank that leaves while another is still in its last call is a death to it
    return result


def run(function: Callable[..., Any], *args: Any) -> None:
    """Run a case with two ranks, a GPU each."""
    run_ranks(_on_gpu, 2, function, *args, timeout_s=LIMIT_S)


# ---- training: forward, backward, gradients of the gate; 20 steps without growth of rooms


@pytest.mark.parametrize("backend", ["default", "epee"])
def test_megatrons_fused_dispatch_and_combine(backend: str) -> None:
    run(test_training._megatron_v1, fetch.files_of(fetch.MEGATRON), backend)


def test_megatrons_hybrid_dispatch_and_combine() -> None:
    run(test_training._megatron_hybrid, fetch.files_of(fetch.MEGATRON))


def test_torchtitans_dispatcher() -> None:
    run(test_training._titan_v2, fetch.files_of(fetch.TORCHTITAN))


def test_torchtitans_hybrid_dispatcher() -> None:
    run(test_training._titan_hybrid, fetch.files_of(fetch.TORCHTITAN))


def test_deepspeeds_exchange() -> None:
    run(test_training._deepspeed, fetch.files_of(fetch.DEEPSPEED))


# ---- inference


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (test_sglang._normal, ("bf16",)),
        (test_sglang._normal, ("fp8",)),
        (test_sglang._low_latency, ("bf16", False)),
        (test_sglang._low_latency, ("fp8", True)),
        (test_sglang._mooncake, (False,)),
        (test_sglang._mooncake, (True,)),
        (test_sglang._elastic, (False,)),
        (test_sglang._elastic, (True,)),
    ],
)
def test_sglangs_dispatchers(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    run(function, fetch.files_of(fetch.SGLANG), *args)


@pytest.mark.parametrize(
    ("function", "kind"), [(function, kind) for function, kinds in test_vllm.CASES for kind in kinds]
)
def test_vllms_classes(function: Callable[..., Any], kind: str) -> None:
    run(function, fetch.files_of(fetch.VLLM), kind)


class Step:
    """A decode step of SGLang on this rank: what it reads stays where it is, so it can be recorded in a graph."""

    def __init__(self, rank: int, num_ranks: int, folder: Path, kind: str, device: str) -> None:
        world = test_sglang.World(folder, "fp8", device)
        self.device, self.rank, self.num_ranks, self.is_v2 = device, rank, num_ranks, kind == "v2"
        self.client = world.module({"v2": "deepep_v2", "mooncake": "mooncake"}.get(kind, "deepep"))
        common, num_local = test_sglang._common(num_ranks), test_sglang._sizes(num_ranks).num_local
        self.dispatcher: Any
        if kind == "v2":
            world.is_prefill, world.do_expand = False, False
            self.dispatcher = self.client.DeepEPv2Dispatcher(**common, use_fp8_dispatch=True)
        elif kind == "mooncake":
            self.dispatcher = self.client.MooncakeEPDispatcher(
                **common, deepep_mode=world.mode.LOW_LATENCY, return_recv_hook=True
            )
        else:
            self.dispatcher = self.client.DeepEPDispatcher(
                **common, deepep_mode=world.mode.LOW_LATENCY, return_recv_hook=True
            )
        self.x, self.topk, _ = test_sglang._batch(num_ranks, rank, 0, device)
        factors = [test_sglang._factor(at, rank, num_local) for at in range(num_local)]
        self.factors = torch.tensor(factors, device=device)

    def load(self, seed: int) -> torch.Tensor:
        """Take another batch; return what must come back."""
        x, topk, wanted = test_sglang._batch(self.num_ranks, self.rank, seed, self.device)
        self.x.copy_(x)
        self.topk.topk_ids.copy_(topk.topk_ids)
        self.topk.topk_weights.copy_(topk.topk_weights)
        return wanted

    def run(self) -> torch.Tensor:
        """Dispatch, the experts, combine, without a wait of the host."""
        got = self.dispatcher.dispatch(self.x, self.topk)
        rows = test_sglang._values(got)
        if not self.is_v2:
            y = rows * self.factors[:, None, None].to(rows.dtype)
            given = y, got.topk_ids, got.topk_weights
            is_deep_ep = hasattr(self.client, "DeepEPLLCombineInput")
            back: torch.Tensor = self.dispatcher.combine(
                self.client.DeepEPLLCombineInput(*given) if is_deep_ep else given
            )
            return back
        assert got.use_masked_gemm
        ends = got.psum_num_recv_tokens_per_expert
        first = torch.cat([ends.new_zeros(1), (ends[:-1] + 127) // 128 * 128])
        expert = (
            torch.searchsorted(first, torch.arange(len(rows), device=self.device, dtype=ends.dtype), right=True) - 1
        )
        y = rows.float() * (got.topk_weights * self.factors[expert])[:, None]
        combined: torch.Tensor = self.dispatcher.combine(self.client.DeepEPv2CombineInput(y.to(torch.bfloat16), None))
        return combined


def _graph(rank: int, num_ranks: int, folder: Path, kind: str, device: str) -> None:
    step = Step(rank, num_ranks, folder, kind, device)
    eager, mapped = [], 0
    is_alone = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) == 1  # tests beside take memory of the GPU
    for seed in range(NUM_REPLAYS):
        wanted = step.load(seed)
        out = step.run()
        torch.testing.assert_close(out.float(), wanted, **test_sglang.FP8_CLOSE)
        eager.append(out.clone())
        free = torch.cuda.mem_get_info()[0]
        if seed == 5:
            mapped = free
    assert not is_alone or mapped - torch.cuda.mem_get_info()[0] < 64 << 20, "rooms grow"
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.run()
    for seed, wanted in enumerate(eager):
        step.load(seed)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted), (kind, seed)
    torch.cuda.synchronize()
    dist.barrier()


@pytest.mark.parametrize("kind", ["low latency", "mooncake", "v2"])
def test_a_recorded_decode_step_replays_with_other_routings(kind: str) -> None:
    run(_graph, fetch.files_of(fetch.SGLANG), kind)


# ---- processes that see one GPU each


def _sees_one(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> None:
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[rank] if len(seen) >= num_ranks else str(rank)
    assert torch.cuda.device_count() == 1
    _on_gpu(rank, num_ranks, function, *args)


@pytest.mark.parametrize(
    ("function", "client", "args"),
    [
        (test_training._megatron_v1, fetch.MEGATRON, ("default",)),
        (test_training._megatron_v1, fetch.MEGATRON, ("epee",)),
        (test_sglang._low_latency, fetch.SGLANG, ("fp8", True)),
        (test_sglang._elastic, fetch.SGLANG, (True,)),
    ],
)
def test_one_visible_gpu_per_process(function: Callable[..., Any], client: fetch.Client, args: tuple[Any, ...]) -> None:
    run_ranks(_sees_one, 2, function, fetch.files_of(client), *args, timeout_s=LIMIT_S)


# ---- a rank that is killed before the first call


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_killed_before_the_first_call_and_clean_buffers_after_it(num_ranks: int) -> None:
    mask = [0, 1, 0][:num_ranks]
    found = run_mortal(test_vllm.killed, num_ranks, fetch.files_of(fetch.VLLM), "cuda", dead={1}, timeout_s=LIMIT_S)
    assert found == [DEAD if rank == 1 else mask for rank in range(num_ranks)]
