"""What newer clients ask of the drop-ins: arguments of forks, memory to clear, MXFP8 scales, 2.5's `EPBuffer`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee.compat.deep_ep as deep_ep
from epee.compat.mooncake.elastic_buffer import ElasticBuffer as MooncakeElastic
from epee.errors import InvalidArgument, UnsupportedError
from tests.harness import run_ranks

HIDDEN, NUM_LOCAL, NUM_MAX = 128, 2, 6


def inputs(rank: int, num_ranks: int, num_scales: int, dtype: torch.dtype) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return an FP8 pair of random bits with so many scales a row, top-k ids and weights."""
    gen = torch.Generator().manual_seed(rank)
    count = 4 + rank % 2
    values = torch.randint(0, 256, (count, HIDDEN), dtype=torch.uint8, generator=gen).view(torch.float8_e4m3fn)
    scales = torch.randint(0, 256, (count, 4 * num_scales), dtype=torch.uint8, generator=gen).view(dtype)
    idx = torch.rand(count, NUM_LOCAL * num_ranks, generator=gen).topk(2, dim=1)[1]
    return (values, scales), idx, torch.rand(count, 2, generator=gen)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes."""
    return x.contiguous().view(torch.uint8)


def _scales(rank: int, num_ranks: int) -> None:
    num_experts = NUM_LOCAL * num_ranks
    v1 = deep_ep.Buffer(dist.group.WORLD)
    v2 = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=NUM_MAX)
    for num_scales, dtype in ((1, torch.int32), (3, torch.int32), (HIDDEN // 32, torch.float32)):
        given = [inputs(each, num_ranks, num_scales, dtype) for each in range(num_ranks)]
        pair, idx, weights = given[rank]
        per_rank, _, per_expert, is_in, _ = v1.get_dispatch_layout(idx, num_experts)
        first = v1.dispatch(
            pair, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in, num_tokens_per_expert=per_expert,
        )  # fmt: skip
        second = v2.dispatch(pair, topk_idx=idx, topk_weights=weights, num_experts=num_experts)
        expanded = v2.dispatch(pair, topk_idx=idx, topk_weights=weights, num_experts=num_experts, do_expand=True)
        here = [(idx // NUM_LOCAL == rank).any(1) for _, idx, _ in given]
        for at in range(2):
            wanted = torch.cat([bits(given[src][0][at][here[src]]) for src in range(num_ranks)])
            for got in (first, second):
                assert got[0][at].dtype == pair[at].dtype
                assert torch.equal(bits(got[0][at]), wanted)
            rows = [
                bits(given[src][0][at][(given[src][1] == expert).any(1)])
                for expert in range(rank * NUM_LOCAL, (rank + 1) * NUM_LOCAL)
                for src in range(num_ranks)
            ]
            assert torch.equal(bits(expanded[0][at]), torch.cat(rows))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_scales_of_any_number_travel_as_bytes(num_ranks: int) -> None:
    run_ranks(_scales, num_ranks)


def _arguments(rank: int, num_ranks: int) -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("epee").addHandler(handler)
    for _ in range(2):
        deep_ep.Buffer(dist.group.WORLD, allow_mnnvl=True, use_fabric=True)
    assert sum("allow_mnnvl=True changes nothing" in text for text in records) == 1
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 10, 1 << 12, low_latency_mode=True)
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
    idx, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    for wrong, call in (
        ("use_nvfp4", lambda: buffer.low_latency_dispatch(x, idx, 2, num_ranks, use_nvfp4=True, use_fp8=False)),
        ("overlap", lambda: buffer.low_latency_combine(x, idx, weights, (), overlap=True, comp_signal=idx)),
    ):
        with pytest.raises(UnsupportedError, match=f"^{wrong} is not supported: epee"):
            call()
    recv, _, handle, _, _ = buffer.low_latency_dispatch(
        x, idx, 2, num_ranks, use_fp8=False, x_global_scale=torch.ones(1), use_nvfp4=False
    )
    combined, _, _ = buffer.low_latency_combine(
        recv, idx, weights, handle, overlap=False, src_signals=None, src_signal_expect_value=1, packed_recv_count=None,
        comp_signal=idx, block_m=128, threshold=3, num_sms=5,
    )  # fmt: skip
    assert torch.equal(combined, x)
    place = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
    assert (place.dtype, place.shape) == (torch.int8, (1 << 12,))
    place.zero_()
    assert not place.any()
    assert buffer.get_local_buffer_tensor(torch.int32, torch.Size([3, 4]), offset=1 << 7).shape == (3, 4)
    for size, offset in ((torch.Size([1 << 8]), 1), (None, 1 << 9), (None, -1)):
        with pytest.raises(InvalidArgument, match=r"256 elements of torch\.int32"):
            buffer.get_local_buffer_tensor(torch.int32, size, offset)
    recv, _, _, _, _ = buffer.low_latency_dispatch(x, idx, 2, num_ranks, use_fp8=False)  # clearing changes nothing
    assert rank or torch.equal(recv[0, :2], x)


def test_arguments_of_forks_are_taken_where_they_change_nothing() -> None:
    run_ranks(_arguments, 2)


def _newer_buffers(rank: int, num_ranks: int) -> None:
    num_experts = NUM_LOCAL * num_ranks
    group = dist.group.WORLD
    plain = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=NUM_MAX, explicitly_destroy=True)
    newer = deep_ep.EPBuffer(group, num_max_tokens_per_rank=NUM_MAX)
    mooncake = MooncakeElastic(group, num_max_tokens_per_rank=NUM_MAX, transport="ibgda")
    (values, _), idx, weights = inputs(rank, num_ranks, 1, torch.int32)
    x = values.view(torch.uint8).to(torch.bfloat16)
    options: Any = {"topk_idx": idx, "topk_weights": weights, "num_experts": num_experts, "do_expand": True}
    wanted = plain.dispatch(x, **options)
    total, total_weights, _ = plain.combine(wanted[0], wanted[3], topk_weights=wanted[2])
    event = newer.dispatch(x, **options, async_with_compute_stream=True, defer_epilogue=True)
    deferred = event.current_stream_wait()
    for got in (newer.dispatch(x, **options)[:4], deferred, mooncake.dispatch(x, **options)[:4]):
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[2], wanted[2])
        got[3].deterministic_sort(True, False, got[0], None, got[1], got[2], None)
        assert torch.equal(got[0], wanted[0])
        owner = newer if got[3] is not None and got[3].room.core is deferred[3].room.core else mooncake
        back, back_weights, _ = owner.combine(got[0], got[3], topk_weights=got[2])
        assert torch.equal(back, total)
        assert torch.equal(back_weights, total_weights)
    done = newer.combine(deferred[0], deferred[3], async_with_compute_stream=True, defer_epilogue=True)
    assert torch.equal(done.current_stream_wait()[0], total)
    for call in (
        lambda: newer.dispatch(x, **options, defer_epilogue=True),
        lambda: newer.combine(x, None, defer_epilogue=True),
    ):
        with pytest.raises(InvalidArgument, match="defer_epilogue=True needs async_with_compute_stream"):
            call()
    with pytest.raises(UnsupportedError, match=r"^lb_allocation_plan_or_num_bytes is not supported: epee"):
        deep_ep.EPBuffer(group, lb_allocation_plan_or_num_bytes=1 << 20)
    with pytest.raises(InvalidArgument, match="transport must be one of auto, ibgda, nccl"):
        MooncakeElastic(group, transport="tcp")
    assert deep_ep.comm.get_physical_domain_size(newer) == (1, num_ranks)
    assert deep_ep.comm.get_logical_domain_size(group) == (1, num_ranks)
    deep_ep.comm.barrier(newer)
    mooncake.update_ep_member()
    again = mooncake.dispatch(x, **options)
    assert torch.equal(mooncake.combine(again[0], again[3])[0], total)


def test_newer_buffers_do_as_the_older_one() -> None:
    run_ranks(_newer_buffers, 2)
