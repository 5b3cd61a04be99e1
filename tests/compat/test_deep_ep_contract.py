"""Names, signatures and small parts of `epee.compat.deep_ep`, as DeepEP 2.1 documents them."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import epee.compat.deep_ep as deep_ep
from epee.compat.deep_ep import event as events
from epee.compat.deep_ep.shared.layout import send_head
from epee.compat.deep_ep.utils import per_token_cast_back, per_token_cast_to_fp8
from epee.ep import is_capturing
from epee.errors import InvalidArgument, InvalidState, UnsupportedError
from epee.gpu import event as gpu_event
from tests.harness import run_ranks

EVENTS = "previous_event=None, async_finish=False, allocate_on_comm_stream=False"
ROUTING = "num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None, num_tokens_per_expert=None"
ELASTIC_EVENTS = (
    "previous_event=None, previous_event_before_epilogue=None, async_with_compute_stream=False, "
    "allocate_on_comm_stream=False"
)
EP_EVENTS = "previous_event=None, async_with_compute_stream=False, allocate_on_comm_stream=False"
LATENCY_ENDS = "async_finish=False, return_recv_hook=False"

# positional order matters: scripts call by position
SIGNATURES = {
    "Config": "num_sms=20, num_max_nvl_chunked_send_tokens=6, num_max_nvl_chunked_recv_tokens=256, "
    "num_max_rdma_chunked_send_tokens=6, num_max_rdma_chunked_recv_tokens=256",
    "Config.get_nvl_buffer_size_hint": "self, hidden_bytes, num_ranks",
    "Config.get_rdma_buffer_size_hint": "self, hidden_bytes, num_ranks",
    "EventHandle": "",
    "EventHandle.current_stream_wait": "self",
    "EventOverlap": "event=None, extra_tensors=None",
    "EventOverlap.current_stream_wait": "self, release_handle=False",
    "EventOverlap.register_hook_after_wait": "self, fn",
    "EventOverlap.__call__": "self, release_handle=False",
    "get_physical_domain_size": "group",
    "get_logical_domain_size": "group, allow_hybrid_mode=True",
    "Buffer": "group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
    "allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, enable_shrink=False, "
    "comm=None, use_fabric=None",
    "Buffer.destroy": "self",
    "Buffer.is_sm90_compiled": "",
    "Buffer.set_num_sms": "new_num_sms",
    "Buffer.capture": "",
    "Buffer.get_comm_stream": "self",
    "Buffer.get_local_buffer_tensor": "self, dtype, size=None, offset=0, use_rdma_buffer=False",
    "Buffer.get_dispatch_config": "num_ranks",
    "Buffer.get_combine_config": "num_ranks",
    "Buffer.get_dispatch_layout": f"self, topk_idx, num_experts, {EVENTS}",
    "Buffer.dispatch": f"self, x, handle=None, {ROUTING}, topk_idx=None, topk_weights=None, expert_alignment=1, "
    f"num_worst_tokens=0, config=None, {EVENTS}",
    "Buffer.combine": f"self, x, handle, topk_weights=None, bias=None, config=None, {EVENTS}",
    "Buffer.internode_dispatch": f"self, x, handle=None, {ROUTING}, topk_idx=None, topk_weights=None, "
    f"expert_alignment=1, config=None, {EVENTS}",
    "Buffer.internode_combine": f"self, x, handle, topk_weights=None, bias=None, config=None, {EVENTS}",
    "Buffer.get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts",
    "Buffer.clean_low_latency_buffer": "self, num_max_dispatch_tokens_per_rank, hidden, num_experts",
    "Buffer.low_latency_dispatch": "self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "
    "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True, round_scale=False, "
    f"use_ue8m0=False, {LATENCY_ENDS}, x_global_scale=None, use_nvfp4=False",
    "Buffer.low_latency_combine": "self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, "
    f"{LATENCY_ENDS}, out=None, combine_wait_recv_cost_stats=None, overlap=False, src_signals=None, "
    "src_signal_expect_value=0, packed_recv_count=None, comp_signal=None, block_m=64, threshold=0, num_sms=3",
    "Buffer.low_latency_update_mask_buffer": "self, rank_to_mask, mask=False",
    "Buffer.low_latency_query_mask_buffer": "self, mask_status",
    "Buffer.low_latency_clean_mask_buffer": "self",
    "Buffer.get_next_low_latency_combine_buffer": "self, handle",
    "ElasticBuffer": "group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0, "
    "use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True, "
    "prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300, "
    "num_gpu_timeout_secs=100, explicitly_destroy=False",
    "ElasticBuffer.destroy": "self",
    "ElasticBuffer.get_buffer_size_hint": "group, num_max_tokens_per_rank, hidden, num_topk=0, "
    "use_fp8_dispatch=False, allow_hybrid_mode=True, allow_multiple_reduction=True",
    "ElasticBuffer.barrier": "self, use_comm_stream=True, with_cpu_sync=False, sequential=True",
    "ElasticBuffer.capture": "",
    "ElasticBuffer.get_comm_stream": "self",
    "ElasticBuffer.get_physical_domain_size": "self",
    "ElasticBuffer.get_logical_domain_size": "self",
    "ElasticBuffer.get_theoretical_num_sms": "self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, "
    "nvlink_gbs=0, sm_read_gbs=200, sm_write_gbs=50",
    "ElasticBuffer.get_theoretical_num_qps": "self, num_sms",
    "ElasticBuffer.dispatch": "self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, "
    "num_experts=None, num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, "
    f"{ELASTIC_EVENTS}, handle=None, do_handle_copy=True, do_cpu_sync=None, do_expand=False, "
    "do_zero_padding=False, use_tma_aligned_col_major_sf=False",
    "ElasticBuffer.combine": f"self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, {ELASTIC_EVENTS}",
    "ElasticBuffer.get_engram_storage_size_hint": "num_entries, hidden, num_max_tokens_per_rank, dtype=torch.bfloat16",
    "ElasticBuffer.engram_write": "self, storage, sf=None",
    "ElasticBuffer.engram_fetch": "self, indices, num_qps=0, use_tma_aligned_col_major_sf=False",
    "ElasticBuffer.get_pp_buffer_size_hint": "num_max_tensor_bytes, num_max_inflight_tensors",
    "ElasticBuffer.pp_set_config": "self, num_max_tensor_bytes, num_max_inflight_tensors",
    "ElasticBuffer.pp_send": "self, t, dst_rank_idx, num_sms=0",
    "ElasticBuffer.pp_recv": "self, t, src_rank_idx, num_sms=0",
    "ElasticBuffer.get_agrs_num_max_session_bytes": "group, shapes, dtype",
    "ElasticBuffer.get_agrs_buffer_size_hint": "group, num_max_session_bytes",
    "ElasticBuffer.create_agrs_session": "self",
    "ElasticBuffer.destroy_agrs_session": "self",
    "ElasticBuffer.agrs_new_session": "self, enabled=True",
    "ElasticBuffer.agrs_set_config": "self, num_max_session_bytes, num_max_all_gathers_per_session",
    "ElasticBuffer.agrs_get_inplace_tensor": "self, shapes, dtype",
    "ElasticBuffer.all_gather": "self, t",
    "EPBuffer": "group, num_bytes=None, num_max_tokens_per_rank=0, hidden=0, num_topk=0, use_fp8_dispatch=False, "
    "lb_allocation_plan_or_num_bytes=0, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True, "
    "prefer_overlap_with_compute=True, sl_idx=None, num_allocated_qps=0, num_cpu_timeout_secs=300, "
    "num_gpu_timeout_secs=100, explicitly_destroy=False",
    "EPBuffer.dispatch": "self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, "
    "num_experts=None, num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, "
    f"{EP_EVENTS}, handle=None, do_handle_copy=False, do_cpu_sync=None, do_expand=False, do_zero_padding=False, "
    "use_tma_aligned_col_major_sf=False, defer_epilogue=False",
    "EPBuffer.combine": f"self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, {EP_EVENTS}, "
    "defer_epilogue=False",
    "EPBuffer.lb_get_theoretical_num_sms": "self",
    "EPBuffer.lb_prefetch_weights": "self, redundant_expert_weights, expert_weights, redundancy_mapping, num_sms=0, "
    "previous_event=None",
    "EPBuffer.lb_reduce_grads": "self, redundant_expert_grads, expert_grads, redundancy_mapping, num_sms=0, "
    "previous_event=None",
    "EPHandle.deterministic_sort": "self, do_cpu_sync, is_cached_dispatch, recv_x, recv_sf, recv_topk_idx, "
    "recv_topk_weights, channel_linked_list",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_is_the_documented_one(name: str) -> None:
    found: Any = deep_ep
    for part in name.split("."):
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters.values()
    shown = [each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in parameters]
    assert ", ".join(shown) == SIGNATURES[name]
    assert all(each.kind == each.POSITIONAL_OR_KEYWORD for each in parameters)


HANDLE_FIELDS = (
    "do_expand",
    "num_experts",
    "expert_alignment",
    "num_max_tokens_per_rank",
    "num_sms",
    "topk_idx",
    "num_recv_tokens",
    "num_expanded_tokens",
    "num_recv_tokens_per_expert_list",
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
    "token_metadata_at_forward",
    "channel_linked_list",
    "cached_recv_src_metadata_before_sort",
)


def test_a_v2_handle_has_the_documented_fields() -> None:
    there = {field.name for field in dataclasses.fields(deep_ep.EPHandle)} | set(dir(deep_ep.EPHandle))
    assert set(HANDLE_FIELDS) <= there


UNSUPPORTED = [name for name in SIGNATURES if any(word in name for word in ("engram", ".lb_"))]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_here_says_so_by_name(name: str) -> None:
    owner, method = name.split(".")
    found = getattr(deep_ep, owner).__dict__.get(method) or inspect.getattr_static(getattr(deep_ep, owner), method)
    function = getattr(found, "__func__", found)
    needed = [
        each for each in inspect.signature(function).parameters.values() if each.default is inspect.Parameter.empty
    ]
    with pytest.raises(
        UnsupportedError, match=rf"^{method} is not supported: .*epee|^{method} is not supported: there"
    ):
        function(*[None] * len(needed))


@pytest.mark.parametrize("name", ["BucketBuffer", "BucketSession", "BufferAllocator", "EngramBuffer", "PPBuffer"])
def test_a_buffer_of_another_kind_says_that_it_is_not_here(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{name} is not supported: epee"):
        getattr(deep_ep, name)(None, 1 << 20)


def test_communicators_of_nccl_are_not_here() -> None:
    with pytest.raises(UnsupportedError, match=r"^get_nccl_comm_handle is not supported: epee"):
        deep_ep.comm.get_nccl_comm_handle(None)
    deep_ep.comm.destroy_all_managed_nccl_comm()


def test_all_names_are_there() -> None:
    assert deep_ep.topk_idx_t == torch.int64
    assert all(hasattr(deep_ep, name) for name in deep_ep.__all__)
    assert deep_ep.utils.EventHandle is deep_ep.EventHandle
    for name in deep_ep.__all__:
        assert name == "topk_idx_t" or getattr(deep_ep, name).__doc__, name


IMPORTS = """
import deep_ep, deep_ep.utils
from deep_ep import Buffer, Config, ElasticBuffer, EPHandle, EventHandle, EventOverlap, topk_idx_t
from deep_ep.utils import EventHandle as other
from deep_ep.utils.event import EventOverlap as another
from deep_ep.utils.math import per_token_cast_to_fp8
assert deep_ep is found and other is EventHandle and another is EventOverlap
assert Buffer is found.buffer.Buffer
import deep_ep.buffers.elastic, deep_ep.buffers.ep, deep_ep.utils.envs, deep_ep.utils.testing, deep_ep.utils.refs
import deep_ep.utils.gate, deep_ep.comm
from deep_ep.buffers.legacy import Buffer as third
from deep_ep.hybrid_ep_buffer import HybridEPBuffer, indices_to_map
from deep_ep._C import Config as fourth, topk_idx_t
assert third is Buffer and fourth is Config and HybridEPBuffer is deep_ep.HybridEPBuffer
assert deep_ep.__spec__.name == "epee.compat.deep_ep" and third.__module__ == "epee.compat.deep_ep.buffer"
if is_installed:
    from deep_ep_cpp import EventHandle as fifth
    assert fifth is EventHandle
    import deep_ep.no_such_module
"""


def _import(rank: int, num_ranks: int, do_install: bool) -> None:
    if do_install:
        deep_ep.install_as_deep_ep()
        deep_ep.install_as_deep_ep()
    else:
        sys.modules["deep_ep"] = deep_ep
        exec(IMPORTS[: IMPORTS.index("import deep_ep.buffers")], {"found": deep_ep})
        return
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'deep_ep\.no_such_module'"):
        exec(IMPORTS, {"found": deep_ep, "is_installed": do_install})


@pytest.mark.parametrize("do_install", [False, True])
def test_it_can_be_imported_as_deep_ep(do_install: bool) -> None:
    run_ranks(_import, 1, do_install, backend=None)


def test_it_does_not_take_the_place_of_another_deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", sys)
    with pytest.raises(InvalidState, match="another deep_ep"):
        deep_ep.install_as_deep_ep()


MOONCAKE = """
from mooncake import pg, ep
import mooncake.ep as again
from mooncake.mooncake_ep_buffer import Buffer, EventOverlap
from mooncake.mooncake_elastic_buffer import ElasticBuffer, EPHandle
from mooncake.pg import MooncakeBackendOptions, set_transfer_engine
assert again is ep and Buffer is ep.Buffer and issubclass(ep.MooncakeBackendOptions, MooncakeBackendOptions)
assert issubclass(ElasticBuffer, found.ElasticBuffer) and EPHandle is found.EPHandle
assert ep.get_ep_buffer_size_hint(8, 256, 2, 4) == Buffer.get_ep_buffer_size_hint(8, 256, 2, 4) > 0
"""


def _import_mooncake(rank: int, num_ranks: int) -> None:
    from epee.compat.mooncake import install_as_mooncake

    install_as_mooncake()
    install_as_mooncake()
    exec(MOONCAKE, {"found": deep_ep})


def test_it_can_be_imported_as_mooncake() -> None:
    run_ranks(_import_mooncake, 1, backend=None)


def _foreign_pg(rank: int, num_ranks: int) -> None:
    from epee.compat.mooncake import install_as_mooncake

    sys.modules["mooncake.pg"] = sys
    with pytest.raises(InvalidState, match=r"another mooncake\.pg"):
        install_as_mooncake()


def test_it_does_not_take_the_place_of_another_mooncake() -> None:
    run_ranks(_foreign_pg, 1, backend=None)


def test_configs() -> None:
    assert deep_ep.Config(num_max_rdma_chunked_recv_tokens=127).num_max_rdma_chunked_recv_tokens == 132
    for bad in ({"num_sms": 0}, {"num_max_nvl_chunked_send_tokens": 256}, {"num_max_rdma_chunked_send_tokens": 300}):
        with pytest.raises(InvalidArgument, match=next(iter(bad))):
            deep_ep.Config(**bad)
    # three slots of 4096 tokens of each rank, bfloat16, with ids, weights and scales beside
    rows, hint = 3 * 4 * 4096, deep_ep.Config(20).get_nvl_buffer_size_hint(14336, 4)
    assert rows * 14336 < hint < rows * 14336 * 1.1
    assert deep_ep.Config(24).get_nvl_buffer_size_hint(14336, 4) == hint
    assert deep_ep.Config().get_rdma_buffer_size_hint(14336, 8) == 0
    # two hosts of 8 ranks: a round of rows lent and one of sums, 4 MiB as bfloat16, wider with weights; four of these
    # are staged in a rank's own memory, and four in the mirror of a rank of the other host
    staged = 2 * (4 << 20) * (7168 * 4 + 32 * 4) // 14336
    assert 2 * 4 * staged <= deep_ep.Config().get_rdma_buffer_size_hint(14336, 16) <= 2 * 4 * staged * 1.01
    before = deep_ep.Buffer.num_sms
    try:
        deep_ep.Buffer.set_num_sms(24)
        for found in (deep_ep.Buffer.get_dispatch_config(4), deep_ep.Buffer.get_combine_config(3)):
            assert (found.num_sms, found.num_channels) == (24, 12)
        with pytest.raises(InvalidArgument, match="even"):
            deep_ep.Buffer.set_num_sms(7)
    finally:
        deep_ep.Buffer.set_num_sms(before)


def test_a_communicator_that_is_no_group_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="comm is not supported"):
        deep_ep.Buffer(None, comm=object())


def test_events_without_cuda_are_done() -> None:
    assert not torch.cuda.is_initialized()
    event = deep_ep.EventHandle()
    event.current_stream_wait()
    event.synchronize()
    ran: list[int] = []
    overlap = deep_ep.EventOverlap(event, (torch.zeros(1),))
    overlap.register_hook_after_wait(lambda: ran.append(1) or len(ran))
    assert overlap.wait() == 1
    assert overlap(release_handle=True) is None
    assert (overlap.event, overlap.extra_tensors, ran) == (None, None, [1])
    with pytest.raises(InvalidState, match="no event"):
        overlap.current_stream_wait()
    with overlap as same:
        assert same is overlap
    with deep_ep.Buffer.capture() as captured:
        captured.register_hook_after_wait(lambda: ran.append(2))
    assert ran == [1, 2]
    assert isinstance(deep_ep.ElasticBuffer.capture(), deep_ep.EventHandle)
    events.wait_for(None)
    assert not is_capturing()


def test_events_with_cuda_go_to_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    class Stream:
        pass

    class Event:
        def record(self, stream: Stream) -> None:
            log.append(("record", stream, self))

        def wait(self, stream: Stream) -> None:
            log.append(("wait", stream, self))

        def synchronize(self) -> None:
            log.append(("synchronize", None, self))

    first, second = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(gpu_event, "CudaEvent", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(events, "current_stream", lambda: first)
    event = deep_ep.EventHandle()
    monkeypatch.setattr(events, "current_stream", lambda: second)
    events.wait_for(deep_ep.EventOverlap(event))
    event.synchronize()
    assert [(what, stream) for what, stream, _ in log] == [("record", first), ("wait", second), ("synchronize", None)]
    assert len({id(each) for *_, each in log}) == 1
    assert is_capturing()


def test_fp8_follows_the_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(5, 300, generator=generator) * torch.logspace(-6, 4, 5)[:, None]).to(torch.bfloat16)
    stored, scales = per_token_cast_to_fp8(x)
    assert (stored.shape, scales.shape) == ((5, 300), (5, 3))
    for token in range(5):
        for block in range(3):
            part = x[token, 128 * block : 128 * block + 128].float()
            amax = torch.maximum(part.abs().max(), torch.tensor(1e-4))
            assert scales[token, block] == amax / torch.tensor(448.0)
            wanted = (part * (torch.tensor(448.0) / amax)).to(torch.float8_e4m3fn)
            assert torch.equal(stored[token, 128 * block : 128 * block + 128].float(), wanted.float())
    back = per_token_cast_back(stored, scales)
    assert back.dtype == torch.bfloat16
    big = x.float().abs() > 1e-4  # three bits of mantissa: half a step is 1/16, and bfloat16 adds 1/256 to it
    assert bool(((back - x).float().abs()[big] <= x.float().abs()[big] * 0.07 + 1e-6).all())
    assert per_token_cast_back(stored[:0], scales[:0]).shape == (0, 300)
    assert [part.shape for part in per_token_cast_to_fp8(x[:0])] == [(0, 300), (0, 3)]


def test_fp8_with_powers_of_two() -> None:
    x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    x[0, :128] = 448.0  # a scale of exactly one stays one
    stored, scales = per_token_cast_to_fp8(x, round_scale=True)
    packed_stored, packed = per_token_cast_to_fp8(x, round_scale=True, use_ue8m0=True)
    mantissa, _ = torch.frexp(scales)
    assert bool((mantissa == 0.5).all())
    assert scales[0, 0] == 1.0
    least = x.float().view(4, 8, 128).abs().amax(2) / 448
    assert bool((scales >= least).all())
    assert bool((scales < 2 * least).all())
    assert packed.dtype == torch.int32
    assert packed.shape == (4, 2)
    assert torch.equal(packed.view(torch.uint8).to(torch.int32) - 127, torch.log2(scales).to(torch.int32))
    assert torch.equal(packed_stored.view(torch.uint8), stored.view(torch.uint8))
    assert torch.equal(per_token_cast_back(stored, packed), per_token_cast_back(stored, scales))
    for bad in ({"use_ue8m0": True}, {"round_scale": True, "use_ue8m0": True}):
        with pytest.raises(InvalidArgument, match="512"):
            per_token_cast_to_fp8(x[:, :896], **bad)
    with pytest.raises(InvalidArgument, match="hidden"):
        per_token_cast_to_fp8(x[0])


def test_more_channels_than_tokens() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    assert send_head(mask, 8).tolist() == [[0, -1], [0, 0]]
    assert send_head(mask[:0], 8).shape == (0, 2)


def test_the_page_names_every_public_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deep_ep.md").read_text()
    missing = [
        name for name in [*SIGNATURES, *HANDLE_FIELDS, *deep_ep.__all__] if f"`{name.split('.')[-1]}" not in page
    ]
    assert not [name for name in missing if not name.endswith("__call__")]
