"""DeepEP's low-latency calls: the tuples and values that scripts written for it expect, on one buffer for all calls."""

from __future__ import annotations

import inspect
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee.compat.deep_ep as deep_ep
from epee.errors import CommTimeoutError, InvalidArgument, InvalidState, MismatchError, RankFailedError
from epee.reference import latency as oracle
from tests.ep.latency_cases import BF16, PLAIN, Shape, bits, expert_outputs, inputs, quantisation
from tests.harness import DEAD, run_ranks
from tests.survive import stages

SHAPE = Shape(num_experts=8, hidden=512, num_topk=3, max_tokens=4)
NUM_TOKENS = (4, 1, 0, 3)


def make(**changes: Any) -> Any:
    os.environ["EPEE_POISON"] = "1"
    return deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, explicitly_destroy=True, **changes)


def check_rows(recv_x: Any, counts: torch.Tensor, want: oracle.Packed) -> None:
    mine, theirs = (each if isinstance(each, tuple) else (each,) for each in (recv_x, want.x))
    assert torch.equal(counts, want.num_tokens_per_expert)
    for have, expected in zip(mine, theirs, strict=True):
        assert have.stride() == expected.stride()
        for expert, count in enumerate(counts.tolist()):
            assert torch.equal(bits(have[expert, :count]), bits(expected[expert, :count]))


def _calls(rank: int, num_ranks: int) -> None:
    buffer = make()
    stats = torch.zeros(SHAPE.num_experts // num_ranks, dtype=torch.int32)
    cost = torch.zeros(num_ranks, dtype=torch.int64)
    buffer.clean_low_latency_buffer(SHAPE.max_tokens, SHAPE.hidden, SHAPE.num_experts)
    total = torch.zeros_like(stats)
    for seed, payload in enumerate(PLAIN * 2):
        use_hook, zero_copy = seed >= 4, seed % 2 == 1
        given = inputs(SHAPE, NUM_TOKENS[:num_ranks], seed)
        mine, how = given[rank], quantisation(payload)
        packed = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens, **how)
        recv_x, counts, handle, event, hook = buffer.low_latency_dispatch(
            mine.x,
            mine.topk_idx,
            SHAPE.max_tokens,
            SHAPE.num_experts,
            stats,
            cost,
            **how,
            async_finish=not use_hook and zero_copy,
            return_recv_hook=use_hook,
        )
        total += packed[rank].num_tokens_per_expert
        if use_hook:
            assert not torch.equal(stats, total) or not packed[rank].num_tokens_per_expert.any()
            hook()
        else:
            assert hook is None
        if event.event is not None:
            event.current_stream_wait()
        assert (event.event is not None) == (not use_hook and zero_copy)
        assert torch.equal(stats, total)
        check_rows(recv_x, counts, packed[rank])
        src_info, layout_range, *sizes = handle
        assert sizes == [SHAPE.max_tokens, SHAPE.hidden, SHAPE.num_experts]
        assert src_info.dtype == torch.int32
        assert src_info.shape == (SHAPE.num_experts // num_ranks, num_ranks * SHAPE.max_tokens)
        assert torch.equal(layout_range, packed[rank].layout_range)
        outputs = expert_outputs(packed, seed)
        y = outputs[rank]
        if zero_copy:
            buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = y
            y = torch.full_like(y, float("nan"))
        out = torch.empty(len(mine.x), SHAPE.hidden, dtype=BF16) if seed % 3 else None
        combined, event, hook = buffer.low_latency_combine(
            y,
            mine.topk_idx,
            mine.topk_weights,
            list(handle),
            use_logfmt=seed == 2,
            zero_copy=zero_copy,
            return_recv_hook=use_hook,
            out=out,
            combine_wait_recv_cost_stats=cost,
        )
        if hook is not None:
            hook()
        assert out is None or combined is out
        assert torch.equal(bits(combined), bits(oracle.combine(given, packed, outputs)[rank]))
    assert (cost >= 0).all()
    buffer.destroy()
    with pytest.raises(InvalidState, match="destroyed"):
        buffer.low_latency_dispatch(mine.x, mine.topk_idx, SHAPE.max_tokens, SHAPE.num_experts)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_tuples_and_values(num_ranks: int) -> None:
    run_ranks(_calls, num_ranks)


def _silent(rank: int, num_ranks: int) -> str:
    """Rank 1 makes no call until rank 0 has given its own up."""
    os.environ["EPEE_TIMEOUT_S"] = "0.3"
    store = dist.distributed_c10d._get_default_store()
    buffer = make()
    mine = inputs(SHAPE, NUM_TOKENS[:num_ranks], 0)[rank]
    call = mine.x, mine.topk_idx, SHAPE.max_tokens, SHAPE.num_experts
    text = ""
    buffer.low_latency_dispatch(*call)
    if rank == 0:
        with pytest.raises(CommTimeoutError) as caught:
            buffer.low_latency_dispatch(*call)
        text = str(caught.value)
        store.set("said", "")
    store.wait(["said"], timedelta(seconds=30))
    buffer.destroy()
    return text


def test_an_error_says_what_there_is_to_do_in_deep_eps_terms() -> None:
    text, _ = run_ranks(_silent, 2)
    assert "rank 1" in text
    assert "make the buffer with enable_shrink=True" in text


def _both_kinds(rank: int, num_ranks: int) -> None:
    buffer = make()
    for seed in range(3):
        given = inputs(SHAPE, NUM_TOKENS[:num_ranks], seed)
        mine = given[rank]
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, SHAPE.max_tokens, SHAPE.num_experts, use_fp8=False
        )
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.topk_idx, SHAPE.num_experts)
        normal_x, _, _, _, normal_handle, _ = buffer.dispatch(
            mine.x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=mine.topk_idx,
            topk_weights=mine.topk_weights,
        )
        ones = torch.ones_like(mine.topk_weights)
        low, _, _ = buffer.low_latency_combine(recv_x, mine.topk_idx, ones, handle)
        normal, _, _ = buffer.combine(normal_x, normal_handle)
        factor = (mine.topk_idx >= 0).sum(1, keepdim=True)
        assert torch.allclose(low.float(), mine.x.float() * factor, rtol=1e-2, atol=1e-6)
        assert normal.shape == low.shape
    buffer.destroy()


def test_one_object_serves_normal_and_low_latency_calls() -> None:
    run_ranks(_both_kinds, 4)


def _mistakes(rank: int, num_ranks: int) -> list[str]:
    buffer = make()
    given = inputs(SHAPE, NUM_TOKENS[:num_ranks], 1)
    mine = given[rank]
    arguments = (mine.x, mine.topk_idx, SHAPE.max_tokens, SHAPE.num_experts)
    recv_x, _, handle, _, _ = buffer.low_latency_dispatch(*arguments, use_fp8=False)
    with pytest.raises(InvalidState, match="enable_shrink=True"):
        buffer.low_latency_update_mask_buffer(0, True)
    with pytest.raises(InvalidState, match="enable_shrink=True"):
        buffer.low_latency_query_mask_buffer(torch.zeros(num_ranks, dtype=torch.int32))
    with pytest.raises(InvalidState, match="enable_shrink=True"):
        buffer.low_latency_clean_mask_buffer()
    with pytest.raises(InvalidArgument, match="same tensors, not copies"):
        buffer.get_next_low_latency_combine_buffer((handle[0].clone(), *handle[1:]))
    with pytest.raises(InvalidArgument, match="exclude each other"):
        buffer.low_latency_combine(recv_x, mine.topk_idx, mine.topk_weights, handle, use_logfmt=True, zero_copy=True)
    texts = []
    for bad in ({"zero_copy": True}, {"topk_idx": mine.topk_idx + 1}, {"x": recv_x[:, :1]}):
        changes = bad if rank == 0 else {}
        call = {"x": recv_x, "topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights, "handle": handle, **changes}
        with pytest.raises(InvalidArgument if rank == 0 else MismatchError) as caught:
            buffer.low_latency_combine(**call)
        texts.append(str(caught.value))
    with pytest.raises(InvalidArgument, match="exclude each other"):
        buffer.low_latency_dispatch(*arguments, async_finish=True, return_recv_hook=True)
    buffer.low_latency_combine(recv_x, mine.topk_idx, mine.topk_weights, handle)
    return texts


def test_mistakes_are_told_to_all_and_the_buffer_goes_on() -> None:
    here, peer = run_ranks(_mistakes, 2)
    for mine, told, word in zip(here, peer, ("zero_copy", "topk_idx", "y must be"), strict=True):
        assert word in mine
        assert "rank 0 refused its call" in told
        assert word in told


def _shrink(rank: int, num_ranks: int, folder: str) -> list[int]:
    buffer = make(enable_shrink=True)
    status = torch.full((num_ranks,), 7, dtype=torch.int32)

    def a_round(seed: int, lost: int | None) -> None:
        given = inputs(SHAPE, NUM_TOKENS[:num_ranks], seed)
        mine = given[rank]
        got = [src != lost for src in range(num_ranks)]
        packed = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens, got=[got] * num_ranks)
        recv_x, counts, handle, _, _ = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, SHAPE.max_tokens, SHAPE.num_experts, use_fp8=False
        )
        check_rows(recv_x, counts, packed[rank])
        outputs = expert_outputs(packed, seed)
        combined, _, _ = buffer.low_latency_combine(outputs[rank], mine.topk_idx, mine.topk_weights, handle)
        want = oracle.combine(given, packed, outputs, got=[got] * num_ranks)[rank]
        assert torch.equal(bits(combined), bits(want)), seed
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(src == lost) for src in range(num_ranks)]

    a_round(0, None)
    if rank != 2:
        buffer.low_latency_update_mask_buffer(2, True)
        a_round(1, 2)
        buffer.low_latency_clean_mask_buffer()
    else:
        for other in range(num_ranks):
            buffer.low_latency_update_mask_buffer(other, other != rank)
        given = inputs(SHAPE, NUM_TOKENS[:num_ranks], 1)[rank]
        _, _, handle, _, _ = buffer.low_latency_dispatch(
            given.x, given.topk_idx, SHAPE.max_tokens, SHAPE.num_experts, use_fp8=False
        )
        y = buffer.get_next_low_latency_combine_buffer(handle)
        buffer.low_latency_combine(y, given.topk_idx, given.topk_weights, handle, zero_copy=True)
        for other in range(num_ranks):
            buffer.low_latency_update_mask_buffer(other, mask=False)
    dist.barrier()
    a_round(2, None)
    dist.barrier()
    stages.meet(folder, "through", rank, range(num_ranks))  # nobody is in gloo's barrier any more
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for seed in range(3, 6):
        a_round(seed, 1)
    stages.meet(folder, "over", rank, (0, 2, 3))
    return status.tolist()  # type: ignore[no-any-return]


def test_with_shrink_lost_ranks_are_masked(tmp_path: Path) -> None:
    status = [0, 1, 0, 0]
    assert run_ranks(_shrink, 4, str(tmp_path), dead={1}) == [status, DEAD, status, status]


def _without_shrink(rank: int, num_ranks: int, folder: str) -> None:
    buffer = make()
    mine = inputs(SHAPE, NUM_TOKENS[:num_ranks], 1)[rank]
    arguments = (mine.x, mine.topk_idx, SHAPE.max_tokens, SHAPE.num_experts)
    buffer.low_latency_dispatch(*arguments)
    dist.barrier()
    stages.meet(folder, "through", rank, range(num_ranks))  # nobody is in gloo's barrier any more
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankFailedError, match="rank 1 is dead"):
        buffer.low_latency_dispatch(*arguments)


def test_without_shrink_a_dead_rank_is_an_error(tmp_path: Path) -> None:
    run_ranks(_without_shrink, 2, str(tmp_path), dead={1})


def test_the_size_hint_grows_with_what_is_asked_for() -> None:
    small = deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 288)
    assert small % 128 == 0
    assert 2 * 8 * 128 * 7168 * 2 < small < deep_ep.Buffer.get_low_latency_rdma_size_hint(256, 7168, 8, 288)
    with pytest.raises(InvalidArgument, match="num_experts"):
        deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 289)
    assert not inspect.isabstract(deep_ep.Buffer)
