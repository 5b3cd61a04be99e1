"""SGLang's four dispatchers on epee, by their own files: what goes out comes back as a dense layer says."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

import epee.compat.deep_ep as deep_ep
from epee.compat.deep_ep.utils import per_token_cast_back, per_token_cast_to_fp8
from epee.compat.mooncake import install_as_mooncake
from epee.errors import UnsupportedError
from tests.clients import dense, fetch, stubs
from tests.harness import run_ranks

HIDDEN, MAX_TOKENS = 128, 16
TOKENS = {2: (9, 13), 4: (9, 0, 13, 4)}
# experts multiply by a power of two, so bfloat16 rows stay exact: what is left is the rounding of partial sums of a
# rank (2^-9 of each) and of the total
CLOSE = {"rtol": 2**-7, "atol": 2**-6}
FP8_CLOSE = {"rtol": 2**-3, "atol": 2**-4}  # three bits of mantissa: 2^-4 of each value


class World:
    """What the mocked rest of SGLang answers on this rank."""

    def __init__(self, folder: Path, output: str = "bf16", device: str = "cpu") -> None:
        deep_ep.install_as_deep_ep()
        install_as_mooncake()
        self.is_prefill = False
        resources = SimpleNamespace(buffers={})
        variables = MagicMock()
        variables.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get.return_value = MAX_TOKENS
        variables.SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get.return_value = MAX_TOKENS
        variables.SGLANG_DEEPEP_V2_NUM_SMS.get.return_value = 0
        variables.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.get.side_effect = lambda: self.do_expand
        variables.SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE.get.return_value = False
        variables.SGLANG_ZBAL_LOCAL_MEM_SIZE.get.return_value = 0
        self.do_expand: bool | None = False
        self.active = torch.ones(dist.get_world_size(), dtype=torch.int32, device=device)
        runtime = {
            "get_resources": lambda: resources,
            "get_exec": lambda: SimpleNamespace(
                moe=SimpleNamespace(deepep_dispatcher_output_dtype=output, deepep_v2_mode="direct")
            ),
        }
        given: dict[str, dict[str, Any]] = {
            "sglang.srt.environ": {"envs": variables},
            "sglang.srt.runtime_context": runtime,
            "sglang.srt.layers.dp_attention": {"get_is_extend_in_batch": lambda: self.is_prefill},
            "sglang.srt.layers": {
                "deep_gemm_wrapper": SimpleNamespace(
                    ENABLE_JIT_DEEPGEMM=True, DEEPGEMM_SCALE_UE8M0=False, DEEPGEMM_BLACKWELL=False
                )
            },
            "sglang.srt.utils": {
                "is_npu": lambda: False,
                "is_hip": lambda: False,
                "is_cuda": lambda: True,
                "is_blackwell": lambda: self.is_blackwell,
                "is_flashinfer_available": lambda: True,
                "get_bool_env_var": lambda name, default="false": False,
                "get_int_env_var": lambda name, default=0: MAX_TOKENS,
                "get_cuda_version": lambda: (13, 0),
            },
            "flashinfer.comm.mnnvl": {"is_mnnvl_fabric_supported": lambda device: True},  # so `use_fabric` is passed
            "sglang.srt.elastic_ep.elastic_ep": {
                "ElasticEPStateManager": SimpleNamespace(instance=lambda: SimpleNamespace(active_ranks=self.active))
            },
            "sglang.kernels.ops.quantization.fp8_kernel": {"sglang_per_token_group_quant_fp8": _quantised},
        }
        self.is_blackwell = False
        names = {file: file.removesuffix(".py").replace("/", ".") for file in fetch.SGLANG.files}
        stubs.install(("sglang", "flashinfer"), {name: folder / file for file, name in names.items()}, given)
        utils = importlib.import_module("sglang.srt.layers.moe.utils")
        utils.get_deepep_config = lambda: ""  # type: ignore[attr-defined]
        utils.is_tbo_enabled = lambda: False  # type: ignore[attr-defined]
        self.mode = utils.DeepEPMode
        self.scale_format = utils.DeepEPv2Fp8ScaleFormat
        utils.get_deepep_v2_fp8_scale_format = lambda: self.scale_format(False, False)  # type: ignore[attr-defined]
        if device == "cpu":
            torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment]
            torch.cuda.current_device = lambda: 0

    def module(self, name: str) -> Any:
        """Return one of the dispatchers' modules."""
        return importlib.import_module(f"sglang.srt.layers.moe.token_dispatcher.{name}")


def _quantised(x: torch.Tensor, block: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert block == 128
    return per_token_cast_to_fp8(x)


def _sizes(num_ranks: int) -> dense.Sizes:
    return dense.Sizes(TOKENS[num_ranks], hidden=HIDDEN)


def _batch(num_ranks: int, rank: int, seed: int, device: str = "cpu") -> tuple[torch.Tensor, Any, torch.Tensor]:
    """Return rows, SGLang's top-k output, and the sum that must come back: expert e multiplies by 2^(e % 3)."""
    mine = dense.batch(_sizes(num_ranks), rank, seed)
    x = mine.x.to(torch.bfloat16)
    factors = (2.0 ** (mine.idx % 3)) * mine.probs
    wanted = x.float() * factors.sum(1, keepdim=True)
    topk = SimpleNamespace(topk_ids=mine.idx.to(device, torch.int32), topk_weights=mine.probs.to(device))
    return x.to(device), topk, wanted.to(device)


def _factor(expert: int, rank: int, num_local: int) -> float:
    return 2.0 ** ((rank * num_local + expert) % 3)


def _values(got: Any) -> torch.Tensor:
    """Return received rows as bfloat16, `[..., hidden]`."""
    if got.hidden_states_scale is None:
        return got.hidden_states.to(torch.bfloat16)
    values, scales = got.hidden_states, got.hidden_states_scale
    flat = per_token_cast_back(values.reshape(-1, HIDDEN).contiguous(), scales.reshape(-1, scales.shape[-1]))
    return flat.view(*values.shape)


def _common(num_ranks: int) -> dict[str, Any]:
    sizes = _sizes(num_ranks)
    return {
        "group": dist.group.WORLD,
        "router_topk": sizes.num_topk,
        "num_experts": sizes.num_experts,
        "num_local_experts": sizes.num_local,
        "hidden_size": HIDDEN,
        "params_dtype": torch.bfloat16,
    }


def _normal(rank: int, num_ranks: int, folder: Path, output: str, device: str = "cpu") -> None:
    world = World(folder, output, device)
    client, num_local = world.module("deepep"), _sizes(num_ranks).num_local
    assert client.use_deepep
    world.is_prefill = True
    for is_async in (False, True):
        dispatcher = client.DeepEPDispatcher(**_common(num_ranks), deepep_mode=world.mode.NORMAL, async_finish=is_async)
        for seed in range(2):
            x, topk, wanted = _batch(num_ranks, rank, seed, device)
            got = dispatcher.dispatch(x, topk)
            rows = _values(got).float()
            assert (got.hidden_states_scale is not None) == (output == "fp8")
            assert all(count % 128 == 0 for count in got.num_recv_tokens_per_expert)
            assert len(got.num_recv_tokens_per_expert) == num_local
            y = torch.zeros_like(rows)
            for at in range(num_local):
                y += (
                    rows * (got.topk_weights * (got.topk_ids == at)).sum(1, keepdim=True) * _factor(at, rank, num_local)
                )
            back = dispatcher.combine(
                client.DeepEPNormalCombineInput(y.to(torch.bfloat16), got.topk_ids, got.topk_weights)
            )
            torch.testing.assert_close(back.float(), wanted, **(FP8_CLOSE if output == "fp8" else CLOSE))


@pytest.mark.parametrize("output", ["bf16", "fp8"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_normal_dispatcher(num_ranks: int, output: str) -> None:
    run_ranks(_normal, num_ranks, fetch.files_of(fetch.SGLANG), output)


def _masked_outputs(got: Any, rank: int, num_local: int) -> torch.Tensor:
    """Return expert outputs for padded rows; what lies behind an expert's rows must not matter."""
    values = _values(got)
    y = torch.full((num_local, *values.shape[1:]), float("nan"), dtype=torch.bfloat16, device=values.device)
    for at, count in enumerate(got.masked_m.tolist()):
        y[at, :count] = values[at, :count] * _factor(at, rank, num_local)
    return y


def _low_latency(rank: int, num_ranks: int, folder: Path, output: str, use_hook: bool, device: str = "cpu") -> None:
    world = World(folder, output, device)
    client, num_local = world.module("deepep"), _sizes(num_ranks).num_local
    dispatcher = client.DeepEPDispatcher(
        **_common(num_ranks), deepep_mode=world.mode.LOW_LATENCY, return_recv_hook=use_hook
    )
    for seed in range(3):
        x, topk, wanted = _batch(num_ranks, rank, seed, device)
        dispatcher.dispatch_a(x, topk)
        got = dispatcher.dispatch_b()
        assert (got.hidden_states_scale is not None) == (output == "fp8")
        y = _masked_outputs(got, rank, num_local)
        dispatcher.combine_a(client.DeepEPLLCombineInput(y, got.topk_ids, got.topk_weights))
        torch.testing.assert_close(dispatcher.combine_b().float(), wanted, **(FP8_CLOSE if output == "fp8" else CLOSE))
    made = client.DeepEPBuffer._state().buffer
    client.DeepEPBuffer.clean_buffer()
    assert made is client.DeepEPBuffer._state().buffer


@pytest.mark.parametrize("use_hook", [False, True])
@pytest.mark.parametrize(("num_ranks", "output"), [(2, "bf16"), (2, "fp8"), (4, "fp8")])
def test_the_low_latency_dispatcher(num_ranks: int, output: str, use_hook: bool) -> None:
    run_ranks(_low_latency, num_ranks, fetch.files_of(fetch.SGLANG), output, use_hook)


class _Stream:
    """A stream of a machine without a GPU, to overlap on."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def _refused(rank: int, num_ranks: int, folder: Path) -> None:
    world = World(folder, "nvfp4")
    client, num_local = world.module("deepep"), _sizes(num_ranks).num_local
    dispatcher = client.DeepEPDispatcher(
        **_common(num_ranks), deepep_mode=world.mode.LOW_LATENCY, return_recv_hook=True
    )
    x, topk, wanted = _batch(num_ranks, rank, 0)
    dispatcher.set_quant_config({"input_global_scale": torch.ones(())})
    with pytest.raises(UnsupportedError, match=r"^use_nvfp4 is not supported: epee"):
        dispatcher._low_latency_dispatcher.dispatch_a(x, topk)
    inner = dispatcher._low_latency_dispatcher
    inner.use_nvfp4 = False  # a scale alone changes nothing
    got = inner.dispatch_b(*inner.dispatch_a(x, topk))
    y = _masked_outputs(got, rank, num_local)
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    handle, counts = inner.handle, inner.packed_recv_count
    for world.is_blackwell in (False, True):
        for overlap in (True, False):
            inner.handle, inner.packed_recv_count = handle, counts
            signals = SimpleNamespace(
                overlap=overlap, stream=_Stream(), wait_event=None, signal=torch.zeros(4), threshold=1, num_sms=3
            )
            inner.set_overlap_args(signals, {"block_m": 64, "threshold": 1})
            if overlap:
                with pytest.raises(UnsupportedError, match=r"^overlap is not supported: epee"):
                    inner.combine_a(y, got.topk_ids, got.topk_weights)
                continue
            back, _, hook = inner.combine_a(y, got.topk_ids, got.topk_weights)
            hook()
            torch.testing.assert_close(back.float(), wanted, **CLOSE)


def test_what_forks_add_is_refused_in_a_sentence_or_changes_nothing() -> None:
    run_ranks(_refused, 2, fetch.files_of(fetch.SGLANG))


def _mooncake(rank: int, num_ranks: int, folder: Path, use_hook: bool, device: str = "cpu") -> None:
    world = World(folder, device=device)
    client, num_local = world.module("mooncake"), _sizes(num_ranks).num_local
    dispatcher = client.MooncakeEPDispatcher(
        **_common(num_ranks), deepep_mode=world.mode.LOW_LATENCY, return_recv_hook=use_hook
    )
    for seed in range(3):
        x, topk, wanted = _batch(num_ranks, rank, seed, device)
        got = dispatcher.dispatch(x, topk)
        y = _masked_outputs(got, rank, num_local)
        back = dispatcher.combine((y, got.topk_ids, got.topk_weights))
        torch.testing.assert_close(back.float(), wanted, **FP8_CLOSE)
    assert world.active.tolist() == [1] * num_ranks
    client.EPBuffer.get_existing_buffer().update_ep_member()


@pytest.mark.parametrize("use_hook", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_mooncakes_dispatcher(num_ranks: int, use_hook: bool) -> None:
    run_ranks(_mooncake, num_ranks, fetch.files_of(fetch.SGLANG), use_hook)


def _elastic(rank: int, num_ranks: int, folder: Path, use_fp8: bool, device: str = "cpu") -> None:
    world = World(folder, device=device)
    client, num_local = world.module("deepep_v2"), _sizes(num_ranks).num_local
    assert client.use_deepep_v2
    for is_prefill, do_expand in ((True, False), (True, True), (False, False)):
        world.is_prefill, world.do_expand = is_prefill, do_expand
        dispatcher = client.DeepEPv2Dispatcher(**_common(num_ranks), use_fp8_dispatch=use_fp8)
        dispatcher.prebuild()
        for seed in range(2):
            x, topk, wanted = _batch(num_ranks, rank, seed, device)
            got = dispatcher.dispatch(x, topk)
            assert (got.is_expanded, got.use_masked_gemm) == (do_expand or not is_prefill, not is_prefill)
            rows = _values(got).float()
            y = torch.zeros_like(rows)
            if got.is_expanded:
                ends = got.psum_num_recv_tokens_per_expert.tolist()
                for at, end in enumerate(ends):
                    first = -(-ends[at - 1] // 128) * 128 if at else 0
                    part = slice(first, end)
                    y[part] = rows[part] * got.topk_weights[part, None] * _factor(at, rank, num_local)
            else:
                for at in range(num_local):
                    weight = (got.topk_weights * (got.topk_ids == at)).sum(1, keepdim=True)
                    y += rows * weight * _factor(at, rank, num_local)
            back = dispatcher.combine(client.DeepEPv2CombineInput(y.to(torch.bfloat16), None))
            assert back.shape == x.shape
            torch.testing.assert_close(back.float(), wanted, **(FP8_CLOSE if use_fp8 else CLOSE))


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_v2_dispatcher(num_ranks: int, use_fp8: bool) -> None:
    run_ranks(_elastic, num_ranks, fetch.files_of(fetch.SGLANG), use_fp8)
