"""vLLM's three prepare/finalize classes on epee, by their own files; by hand (EPEE_CLIENTS=all): the wheel is large."""

from __future__ import annotations

import importlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee.compat.deep_ep as deep_ep
from epee.compat.deep_ep.utils import per_token_cast_back, per_token_cast_to_fp8
from tests.clients import dense, fetch, stubs
from tests.harness import DEAD, run_mortal, run_ranks
from tests.survive import stages

HIDDEN, MAX_TOKENS = 2048, 16  # vLLM's low-latency class knows few hidden sizes
TOKENS = {2: (9, 13), 3: (9, 0, 13), 4: (9, 0, 13, 4)}
# as for SGLang: experts multiply by powers of two; bfloat16 sums, or FP8 rows
CLOSE = {"rtol": 2**-7, "atol": 2**-6}
FP8_CLOSE = {"rtol": 2**-3, "atol": 2**-4}


class Modular:
    """The base class of vLLM's prepare/finalize classes."""


@dataclass
class Metadata:
    """`ExpertTokensMetadata`."""

    expert_num_tokens: torch.Tensor | None
    expert_num_tokens_cpu: torch.Tensor | None

    @staticmethod
    def make_from_list(counts: list[int], device: torch.device) -> Metadata:
        """Return the counts as tensors."""
        tensor = torch.tensor(counts, dtype=torch.int32, device=device)
        return Metadata(tensor, tensor)


class Delegate:
    """`TopKWeightAndReduceDelegate`."""


class Contiguous:
    """`TopKWeightAndReduceContiguous`: rows are weighted and summed by the test's experts already."""

    def apply(self, output: None, fused_expert_output: torch.Tensor, **others: Any) -> torch.Tensor:
        """Return the rows."""
        return fused_expert_output


def _quantised(x: torch.Tensor, scale: Any, quant_dtype: Any, *others: Any, **more: Any) -> Any:
    if quant_dtype == "mxfp8":  # a power of two for 32 channels, as a byte: here always one, so values are what is sent
        return x.to(torch.float8_e4m3fn), torch.full((len(x), HIDDEN // 32), 127, dtype=torch.uint8, device=x.device)
    return per_token_cast_to_fp8(x) if quant_dtype is not None else (x, None)


class Client:
    """vLLM's modules, the rest of it mocked."""

    def __init__(self, folder: Path) -> None:
        deep_ep.install_as_deep_ep()
        layers = "vllm.model_executor.layers.fused_moe"
        given: dict[str, dict[str, Any]] = {
            layers: {"modular_kernel": (kernel := SimpleNamespace())},
            f"{layers}.topk_weight_and_reduce": {
                "TopKWeightAndReduceContiguous": Contiguous,
                "TopKWeightAndReduceDelegate": Delegate,
            },
            f"{layers}.utils": {"moe_kernel_quantize_input": _quantised},
            "vllm.v1.worker.ubatching": {
                "dbo_current_ubatch_id": lambda: 0,
                "dbo_enabled": lambda: False,
                "dbo_get_previous_event": lambda capture: None,
            },
            "vllm.platforms": {"current_platform": SimpleNamespace(is_rocm=lambda: False)},
            "vllm.forward_context": {"get_forward_context": lambda: SimpleNamespace(dp_metadata=self.padded)},
            "vllm.utils.math_utils": {"round_up": lambda x, y: -(-x // y) * y, "cdiv": lambda x, y: -(-x // y)},
            "vllm": {"envs": SimpleNamespace(VLLM_DEEPEPLL_NVFP4_DISPATCH=False)},
        }
        for name in ("PrepareResultType", "ReceiverType", "TopKWeightAndReduce", "FusedMoEExperts"):
            setattr(kernel, name, object)
        kernel.FusedMoEPrepareAndFinalizeModular = Modular
        kernel.ExpertTokensMetadata = Metadata
        kernel.FusedMoEActivationFormat = SimpleNamespace(Standard=0, BatchedExperts=1)
        given[f"{layers}.modular_kernel"] = vars(kernel)
        self.padded = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(TOKENS[dist.get_world_size()]))
        names = {file.removesuffix(".py").replace("/", "."): folder / file for file in fetch.VLLM.files}
        stubs.install(("vllm", "flashinfer"), names, given)

    def module(self, name: str) -> Any:
        """Return one of vLLM's files as a module."""
        found = next(file for file in fetch.VLLM.files if file.endswith(f"/{name}.py"))
        return importlib.import_module(found.removesuffix(".py").replace("/", "."))


class Case:
    """A batch, and how rows are sent."""

    def __init__(self, rank: int, num_ranks: int, seed: int, kind: str, device: str) -> None:
        self.rank, self.num_local = rank, 3
        sizes = dense.Sizes(TOKENS[num_ranks], hidden=HIDDEN)
        self.num_experts = sizes.num_experts
        mine = dense.batch(sizes, rank, seed)
        self.x = mine.x.to(device, torch.bfloat16)
        self.idx, self.weights = mine.idx.to(device), mine.probs.to(device)
        self.wanted = self.x.float() * (2.0 ** (self.idx % 3) * self.weights).sum(1, keepdim=True)
        self.kind = kind
        self.quant = SimpleNamespace(
            is_block_quantized=kind == "fp8",
            quant_dtype=None if kind == "bf16" else "mxfp8" if kind == "mxfp8" else torch.float8_e4m3fn,
            a1_scale=None, a2_scale=None, a1_gscale=None, per_act_token_quant=False, block_shape=[128, 128],
            is_scale_swizzled=False, mx_alignment=0,
        )  # fmt: skip

    def prepared(self, client: Any) -> Any:
        """Return what a client's `prepare_async` gives in the end."""
        made = client.prepare_async(self.x, self.weights, self.idx, self.num_experts, None, False, self.quant)
        if isinstance(made, tuple):
            made[0]()
            made = made[1]
        return made()

    def finished(self, client: Any, rows: torch.Tensor) -> None:
        """Compare what a client's `finalize_async` brings back."""
        output = torch.full_like(self.x, float("nan"))
        made = client.finalize_async(output, rows.to(torch.bfloat16), self.weights, self.idx, False, Delegate())
        for step in made if isinstance(made, tuple) else (made,):
            step()
        torch.testing.assert_close(output.float(), self.wanted, **(CLOSE if self.kind == "bf16" else FP8_CLOSE))

    def values(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Return received rows as float32."""
        if scales is None or self.kind == "mxfp8":
            if self.kind == "mxfp8":
                assert scales is not None
                assert scales.shape == (len(x), HIDDEN // 32)
            return x.float()
        flat = per_token_cast_back(x.reshape(-1, HIDDEN), scales.reshape(-1, scales.shape[-1]).contiguous())
        return flat.float().view(x.shape)

    def weighted(self, rows: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return each row times its local experts' factors and weights; `idx` has ids over all ranks."""
        is_local = idx.div(self.num_local, rounding_mode="floor") == self.rank
        return rows * torch.where(is_local, 2.0 ** (idx % 3) * weights, 0).sum(1, keepdim=True)


def _globalized(idx: torch.Tensor, psum: torch.Tensor, offset: int, num_experts: int) -> torch.Tensor:
    """What vLLM's kernel does: local ids become global ones, rows behind those received have none."""
    idx = torch.where(idx >= 0, idx + offset, -1)
    idx[int(psum[-1]) :] = -1
    return idx


def _high_throughput(rank: int, num_ranks: int, folder: Path, kind: str, device: str = "cpu") -> None:
    client = Client(folder).module("deepep_ht")
    buffer = deep_ep.Buffer(
        group=dist.group.WORLD, num_nvl_bytes=1 << 20, num_rdma_bytes=0, low_latency_mode=False,
        num_qps_per_rank=1, explicitly_destroy=True,
    )  # fmt: skip
    made = client.DeepEPHTPrepareAndFinalize(buffer, num_ranks, num_ranks, rank * 3)
    for seed in range(3):
        case = Case(rank, num_ranks, seed, kind, device)
        x, scales, meta, idx, weights = case.prepared(made)
        assert len(meta.expert_num_tokens) == 3
        case.finished(made, case.weighted(case.values(x, scales), idx, weights))
    buffer.destroy()


def _low_latency(rank: int, num_ranks: int, folder: Path, kind: str, device: str = "cpu") -> None:
    vllm = Client(folder)
    client = vllm.module("deepep_ll")
    bytes_needed = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=MAX_TOKENS, hidden=HIDDEN, num_ranks=num_ranks, num_experts=3 * num_ranks
    )
    buffer = deep_ep.Buffer(
        group=dist.group.WORLD, num_nvl_bytes=0, num_rdma_bytes=bytes_needed, low_latency_mode=True,
        num_qps_per_rank=3, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=True,
        enable_shrink=True,
    )  # fmt: skip
    made = client.DeepEPLLPrepareAndFinalize(buffer, MAX_TOKENS, num_ranks, use_fp8_dispatch=kind == "fp8")
    manager = vllm.module("all2all").DeepEPLLAll2AllManager
    manager._buffer, manager._mask = buffer, torch.zeros(num_ranks, dtype=torch.int32, device=device)
    if device == "cpu":
        torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
    for seed in range(3):
        case = Case(rank, num_ranks, seed, kind, device)
        x, scales, meta, _, _ = case.prepared(made)
        y = torch.full(x.shape, float("nan"), dtype=torch.bfloat16, device=device)
        values = case.values(x, scales)
        for at, count in enumerate(meta.expert_num_tokens.tolist()):
            y[at, :count] = (values[at, :count] * 2.0 ** ((rank * 3 + at) % 3)).to(torch.bfloat16)
        case.finished(made, y)
        assert manager.query_active_mask(manager).tolist() == [0] * num_ranks
        manager.clean_buffers(manager)


def killed(rank: int, num_ranks: int, folder: str, files: Path, device: str) -> list[int]:
    """Rank 1 ends before the first call; the others make calls, and clear the buffer and its mask as vLLM does."""
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)
    sizes = dense.Sizes((9, 13, 4, 6)[:num_ranks], hidden=HIDDEN)
    most = MAX_TOKENS
    nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, sizes.hidden, num_ranks, sizes.num_experts)
    buffer = deep_ep.Buffer(
        dist.group.WORLD, 0, nbytes, low_latency_mode=True, num_qps_per_rank=3,
        allow_nvlink_for_low_latency_mode=True, explicitly_destroy=True, enable_shrink=True,
    )  # fmt: skip
    manager = Client(files).module("all2all").DeepEPLLAll2AllManager
    manager._buffer, manager._mask = buffer, torch.zeros(num_ranks, dtype=torch.int32, device=device)
    stages.meet(folder, "made", rank, range(num_ranks))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for seed in range(4):
        mine = dense.batch(sizes, rank, seed)
        x, idx, weights = (part.to(device) for part in (mine.x.to(torch.bfloat16), mine.idx, mine.probs))
        recv, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, most, sizes.num_experts, use_fp8=False, return_recv_hook=True
        )
        assert hook is not None
        hook()
        assert isinstance(recv, torch.Tensor)
        routings = [dense.batch(sizes, other, seed).idx for other in range(num_ranks) if other != 1]
        first = rank * sizes.num_local
        assert counts.tolist() == [sum(int((r == first + at).sum()) for r in routings) for at in range(sizes.num_local)]
        factors = 2.0 ** ((first + torch.arange(sizes.num_local, device=device)) % 3)
        y = recv * factors[:, None, None].to(recv.dtype)
        out, _, hook = buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=True)
        assert hook is not None
        hook()
        is_there = mine.idx.div(sizes.num_local, rounding_mode="floor") != 1
        wanted = x.float().cpu() * (2.0 ** (mine.idx % 3) * mine.probs * is_there).sum(1, keepdim=True)
        torch.testing.assert_close(out.float().cpu(), wanted, **CLOSE)
        assert manager.query_active_mask(manager).tolist() == [int(other == 1) for other in range(num_ranks)]
        if seed == 1:
            manager.clean_buffers(manager)
            assert manager.query_active_mask(manager).tolist() == [0] * num_ranks
    mask: list[int] = manager.query_active_mask(manager).tolist()
    stages.meet(folder, "done", rank, [other for other in range(num_ranks) if other != 1])
    return mask


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_killed_before_the_first_call_and_clean_buffers_after_it(num_ranks: int) -> None:
    mask = [int(rank == 1) for rank in range(num_ranks)]
    found = run_mortal(killed, num_ranks, fetch.files_of(fetch.VLLM), "cpu", dead={1})
    assert found == [DEAD if rank == 1 else mask for rank in range(num_ranks)]


def _v2(rank: int, num_ranks: int, folder: Path, kind: str, device: str = "cpu") -> None:
    client = Client(folder).module("deepep_v2")
    client._globalize_recv_topk_idx = _globalized
    buffer = deep_ep.ElasticBuffer(
        group=dist.group.WORLD, num_max_tokens_per_rank=MAX_TOKENS, hidden=HIDDEN, num_topk=2,
        use_fp8_dispatch=kind != "bf16", allow_hybrid_mode=False, prefer_overlap_with_compute=False,
        allow_multiple_reduction=False, explicitly_destroy=True,
    )  # fmt: skip
    for use_graph in (False, True):
        made = client.DeepEPV2PrepareAndFinalize(
            buffer, num_ranks, num_ranks, rank * 3, 3 * num_ranks, 2, kind != "bf16", use_graph
        )
        for seed in range(3):
            case = Case(rank, num_ranks, seed, kind, device)
            x, scales, _, idx, weights = case.prepared(made)
            case.finished(made, case.weighted(case.values(x, scales), idx, weights))
    buffer.destroy()


CASES = [(_high_throughput, ("bf16", "fp8")), (_low_latency, ("bf16", "fp8")), (_v2, ("bf16", "fp8", "mxfp8"))]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("run", "kind"), [(run, kind) for run, kinds in CASES for kind in kinds])
def test_a_class_brings_back_what_a_dense_layer_says(run: Any, kind: str, num_ranks: int) -> None:
    run_ranks(run, num_ranks, fetch.files_of(fetch.VLLM), kind)
