"""V2 `ElasticBuffer`: results, order of additions and handle fields against the reference and by counting."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import epee
import epee.compat.deep_ep as deep_ep
from epee import reference
from epee.errors import InvalidState, UnsupportedError
from epee.reference import Received, Routed
from epee.reference.orders import combine_in_order
from tests.compat import cut_cases
from tests.compat.deep_ep_cases import num_rows_of, world
from tests.ep.buffer_cases import (
    Call,
    Setup,
    copy_of,
    make_bias,
    make_input,
    make_output,
    make_weights_back,
    same_bits,
)
from tests.harness import run_ranks

NUM_MAX = 12
FIELDS = (
    "num_recv_tokens",
    "num_expanded_tokens",
    "num_recv_tokens_per_expert_list",
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
)


@dataclass(frozen=True)
class Case:
    """A call and how V2 is asked to make it."""

    call: Call
    do_cpu_sync: bool | None = None
    is_single: bool = False  # allow_multiple_reduction=False
    is_col_major: bool = False

    @property
    def do_expand(self) -> bool:
        """Whether rows are per (expert, token)."""
        return self.call.layout == "expert"


def _cases(num_ranks: int) -> tuple[Case, ...]:
    uneven = tuple(7 - 3 * rank if rank < 3 else 9 for rank in range(num_ranks))
    plain = Call(1, uneven, num_bias=2, with_weights_back=True)
    expanded = replace(plain, seed=2, layout="expert", expert_alignment=4, with_again=True)
    return (
        Case(plain),
        Case(replace(plain, seed=3, expert_alignment=4), do_cpu_sync=False),
        Case(replace(plain, seed=4, routing="nowhere", num_bias=1)),
        Case(replace(plain, seed=5, payload="fp8 strided", with_again=True), is_col_major=True),
        Case(replace(plain, seed=6, payload="fp8 packed", with_weights=False)),
        Case(replace(plain, seed=7, payload="float32", num_tokens=(0,) * (num_ranks - 1) + (5,), routing="one rank")),
        Case(expanded),
        Case(replace(expanded, seed=8), is_single=True),
        Case(replace(expanded, seed=9, num_bias=0), do_cpu_sync=False),
        Case(replace(expanded, seed=10, payload="fp8", expert_alignment=1), do_cpu_sync=True, is_col_major=True),
        Case(replace(expanded, seed=11, with_weights=False, with_again=False, num_bias=1)),
        Case(replace(expanded, seed=12, routing="nowhere")),
        # float32 rows are not rounded at the end, so every other order of additions would show
        Case(replace(plain, seed=14, payload="float32")),
        Case(replace(expanded, seed=15, payload="float32")),
        Case(replace(expanded, seed=16, payload="float32"), is_single=True),
        Case(replace(expanded, seed=13, num_tokens=(0,) * (num_ranks - 1) + (5,), routing="one rank"), is_single=True),
    )


def _setup(num_ranks: int) -> Setup:
    return Setup(num_ranks, 3, 512, 3, "bfloat16", 2, tuple(case.call for case in _cases(num_ranks)))


def _run(rank: int, num_ranks: int, setup: Setup, cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    os.environ["EPEE_POISON"] = "1"
    many = deep_ep.ElasticBuffer(world(), num_max_tokens_per_rank=NUM_MAX, hidden=512, num_topk=3, deterministic=True)
    single = deep_ep.ElasticBuffer(world(), 1 << 20, allow_multiple_reduction=False)
    return [_run_case(single if case.is_single else many, setup, case, rank) for case in cases]


def _run_case(buffer: deep_ep.ElasticBuffer, setup: Setup, case: Case, rank: int) -> dict[str, Any]:
    call = case.call
    given, next_given = (make_input(setup, call, rank, again=again) for again in (False, True))
    assert given.topk_idx is not None
    topk_idx = given.topk_idx.clone()
    stats = torch.full((setup.num_local_experts,), 100, dtype=torch.int32)
    recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(
        given.x,
        topk_idx,
        given.topk_weights,
        stats,
        setup.num_experts,
        NUM_MAX,
        call.expert_alignment,
        do_expand=case.do_expand,
        do_cpu_sync=case.do_cpu_sync,
        use_tma_aligned_col_major_sf=case.is_col_major,
    )
    topk_idx.fill_(-1)  # the handle has a copy
    assert event.event is None
    again = buffer.dispatch(next_given.x, topk_weights=next_given.topk_weights, handle=handle, do_cpu_sync=False)
    assert again[3] is handle
    y = make_output(setup, call, rank, num_rows_of(recv_x))
    bias: Any = make_bias(setup, call, rank)
    shape = (len(y),) if case.do_expand else (len(y), setup.num_topk)
    weights = make_weights_back(call, rank, shape, torch.float32)
    combined, weights_back, event = buffer.combine(y, handle, weights, bias or None, async_with_compute_stream=True)
    event.current_stream_wait()
    results = {
        "x": copy_of(recv_x),
        "strides": recv_x[1].stride() if isinstance(recv_x, tuple) else None,
        "topk_idx": copy_of(recv_idx),
        "topk_weights": copy_of(recv_weights),
        "again": [copy_of(part) for part in again[:3]],
        "stats": stats,
        "combined": combined,
        "weights": weights_back,
    }
    return results | {"kept routing": handle.topk_idx} | {name: getattr(handle, name) for name in FIELDS}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_agrees_with_the_reference_and_with_counting(num_ranks: int) -> None:
    setup, cases = _setup(num_ranks), _cases(num_ranks)
    by_rank = run_ranks(_run, num_ranks, setup, cases)
    for index, case in enumerate(cases):
        _check(setup, case, [results[index] for results in by_rank])


def _check(setup: Setup, case: Case, by_rank: list[dict[str, Any]]) -> None:
    call = case.call
    inputs = [make_input(setup, call, rank) for rank in range(setup.num_ranks)]
    again = [make_input(setup, call, rank, again=True) for rank in range(setup.num_ranks)]
    options: Any = {"layout": call.layout, "expert_alignment": call.expert_alignment}
    wanted = reference.dispatch(inputs, setup.num_experts, **options)
    wanted_again = reference.dispatch(again, setup.num_experts, **options)
    for rank, (got, want) in enumerate(zip(by_rank, wanted, strict=True)):
        where = f"rank {rank}: {case}"
        num_rows = _num_rows(setup, case, want)
        weights = want.topk_weights if call.with_weights else None
        _check_results((got["x"], got["topk_idx"], got["topk_weights"]), want, weights, num_rows, where)
        new_weights = wanted_again[rank].topk_weights if call.with_again else None
        _check_results(tuple(got["again"]), wanted_again[rank], new_weights, num_rows, f"again, {where}")
        if case.is_col_major:
            assert got["strides"] == (1, -(-num_rows // 4) * 4), where
        _check_handle(setup, case, inputs, rank, want, got)
    _check_combined(setup, case, by_rank, inputs, wanted)


def _num_rows(setup: Setup, case: Case, want: Received) -> int:
    """Rows of the results: what was received, or the worst case."""
    if case.do_cpu_sync is not False:
        return len(want.src_rank)
    if not case.do_expand:
        return NUM_MAX * setup.num_ranks
    alignment = case.call.expert_alignment
    rows = setup.num_ranks * NUM_MAX * min(setup.num_topk, setup.num_local_experts)
    rows += (alignment - 1) * setup.num_local_experts
    return -(-rows // alignment) * alignment


def _check_results(
    got: tuple[Any, ...], want: Received, weights: torch.Tensor | None, num_rows: int, where: str
) -> None:
    pairs = list(zip(got[0], want.x, strict=True)) if isinstance(want.x, tuple) else [(got[0], want.x)]
    for part, expected in pairs:
        _check_filled(part, expected, num_rows, 0, f"x of {where}")
    _check_filled(got[1], want.topk_idx, num_rows, -1, f"ids of {where}")
    _check_filled(got[2], weights, num_rows, 0, f"weights of {where}")


def _check_filled(got: Any, want: Any, num_rows: int, fill: int, where: str) -> None:
    if want is None:
        assert got is None, where
        return
    same_bits(got[: len(want)], want, where)
    assert len(got) == num_rows, where
    assert bool((got[len(want) :].float() == fill).all()), where


def _check_handle(
    setup: Setup, case: Case, inputs: list[Routed], rank: int, want: Received, got: dict[str, Any]
) -> None:
    """Count every field of the handle one row at a time."""
    where, num_local, num_topk = f"rank {rank}: {case}", setup.num_local_experts, setup.num_topk
    tokens: dict[tuple[int, int], list[int]] = {}
    counts = [0] * num_local
    for row, (src, token, k) in enumerate(
        zip(want.src_rank.tolist(), want.src_token.tolist(), want.src_k.tolist(), strict=True)
    ):
        if src < 0:
            continue
        groups = tokens.setdefault((src, token), [-1] * num_topk)
        if case.do_expand:
            groups[k] = row
    num_scaleup = setup.host_of.count(0) if setup.host_of else setup.num_ranks
    metadata, per_rank = [], [0] * num_scaleup
    for src, token in sorted(tokens):
        routing = inputs[src].topk_idx
        assert routing is not None
        local = [k for k, expert in enumerate(routing[token].tolist()) if expert >= 0 and expert // num_local == rank]
        for k in local:
            counts[int(routing[token, k]) % num_local] += 1
        per_rank[src % num_scaleup] += 1
        metadata.append([src * NUM_MAX + token, src % num_scaleup * num_topk + local[-1], *tokens[src, token]])
    num_recv = NUM_MAX * setup.num_ranks if case.do_cpu_sync is False else len(tokens)
    metadata += [[-1] * (num_topk + 2)] * (num_recv - len(metadata))
    assert got["num_recv_tokens"] == num_recv, where
    assert got["num_expanded_tokens"] == (_num_rows(setup, case, want) if case.do_expand else 0), where
    assert got["recv_src_metadata"].tolist() == metadata, where
    assert got["recv_src_metadata"].shape == (num_recv, num_topk + 2), where
    assert got["psum_num_recv_tokens_per_scaleup_rank"].tolist() == [
        sum(per_rank[: src + 1]) for src in range(num_scaleup)
    ], where
    assert got["num_unaligned_recv_tokens_per_expert"].tolist() == counts, where
    assert got["stats"].tolist() == [100 + count for count in counts], where
    aligned = [-(-count // case.call.expert_alignment) * case.call.expert_alignment for count in counts]
    assert got["num_recv_tokens_per_expert_list"] == ([] if case.do_cpu_sync is False else aligned), where
    ends = [sum(aligned[: expert + (0 if case.do_expand else 1)]) for expert in range(num_local)]
    ends = [end + count for end, count in zip(ends, counts, strict=True)] if case.do_expand else ends
    assert got["psum_num_recv_tokens_per_expert"].tolist() == ends, where
    _check_slots(setup, inputs[rank], got, where)
    for name in FIELDS[3:8]:
        assert got[name].dtype == torch.int32, (name, where)


def _check_slots(setup: Setup, given: Routed, got: dict[str, Any], where: str) -> None:
    assert given.topk_idx is not None
    same_bits(got["kept routing"], given.topk_idx, f"routing kept by {where}")
    sent = [0] * setup.num_ranks
    slots = []
    for experts in given.topk_idx.tolist():
        homes = [expert // setup.num_local_experts if expert >= 0 else -1 for expert in experts]
        slots.append([sent[home] if home >= 0 else -1 for home in homes])
        for home in set(homes) - {-1}:
            sent[home] += 1
    assert got["dst_buffer_slot_idx"].tolist() == slots, where


def _check_combined(
    setup: Setup, case: Case, by_rank: list[dict[str, Any]], inputs: list[Routed], received: list[Received]
) -> None:
    ranks, call = range(setup.num_ranks), case.call
    num_rows = [_num_rows(setup, case, there) for there in received]
    y = [make_output(setup, call, rank, num_rows[rank])[: len(received[rank].src_rank)] for rank in ranks]
    plain = [Routed(given.x, given.topk_idx) for given in inputs]  # V2 sums without weights
    there = reference.dispatch(plain, setup.num_experts, layout=call.layout, expert_alignment=call.expert_alignment)
    bias = [make_bias(setup, call, rank) for rank in ranks]
    if setup.host_of:
        wanted = reference.combine_by_host(plain, there, y, setup.host_of, wide_partials=case.is_single, bias=bias)
    else:
        wanted = combine_in_order(
            plain,
            there,
            y,
            setup.num_experts,
            by="k" if case.do_expand and case.is_single else "last_k",
            bias_first=True,
            round_partials=case.do_expand and not case.is_single,
            bias=bias,
        )
    weights = []
    for rank, there in enumerate(received):
        shape = (num_rows[rank],) if case.do_expand else (num_rows[rank], setup.num_topk)
        given = make_weights_back(call, rank, shape, torch.float32)[: len(there.src_rank)]
        # V2 takes the weight of the rank that owns the expert, whatever the others say
        weights.append(given if there.topk_idx is None else torch.where(there.topk_idx >= 0, given, 0.0))
    by_host = setup.host_of
    if by_host:
        back = reference.combine_weights_by_host(inputs, received, weights, by_host)
    else:
        back = reference.combine_weights(inputs, received, weights)
    for rank in ranks:
        same_bits(by_rank[rank]["combined"], wanted[rank], f"combine of rank {rank}: {case}")
        same_bits(by_rank[rank]["weights"], back[rank], f"weights back at rank {rank}: {case}")


def _pairs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.full((3, 8), rank + 1.0, dtype=torch.bfloat16)
    return x, torch.tensor([[0, 3], [1, -1], [2, 0]])


def _refuse(rank: int, num_ranks: int) -> dict[str, str]:
    buffer = deep_ep.ElasticBuffer(world(), num_max_tokens_per_rank=4, num_cpu_timeout_secs=20)
    x, idx = _pairs(rank)
    handle = buffer.dispatch(x, idx, num_experts=4)[3]
    good: dict[str, Any] = {"x": x, "topk_idx": idx, "num_experts": 4}
    cached: dict[str, Any] = {"x": x, "handle": handle}
    bad: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "num_max_tokens_per_rank=4": (good, {"x": x.repeat(2, 1), "topk_idx": idx.repeat(2, 1)}),
        "topk_idx must": (good, {"topk_idx": None}),
        "num_experts must": (good, {"num_experts": 5}),
        "num_experts": (cached, {"num_experts": 8}),
        "topk_idx and cumulative": (cached, {"topk_idx": idx}),
        "do_cpu_sync": (cached, {"do_cpu_sync": True}),
        "do_expand": (cached, {"do_expand": True}),
        "handle must": (cached, {"handle": (handle,)}),
    }
    texts = {}
    for name, (arguments, change) in bad.items():
        with pytest.raises(epee.InvalidArgument if rank else epee.MismatchError) as caught:
            buffer.dispatch(**arguments) if rank == 0 else buffer.dispatch(**{**arguments, **change})
        texts[name] = str(caught.value)
        buffer.dispatch(**good)
    with pytest.raises(epee.InvalidArgument if rank else epee.MismatchError) as caught:
        buffer.combine(x.repeat(2, 1), None if rank else handle)  # type: ignore[arg-type]
    texts["EPHandle"] = str(caught.value)
    torch.distributed.barrier()  # who refuses needs nobody: gone before the other has begun, it would be a death to it
    return texts


def test_a_refused_call_is_refused_everywhere_and_the_buffer_works_on() -> None:
    peer, here = run_ranks(_refuse, 2)
    for name, text in here.items():
        assert name in text, text
        assert "rank 1 refused" in peer[name]
        assert text[:60] in peer[name]


def _keep_reference(rank: int, num_ranks: int) -> None:
    buffer = deep_ep.ElasticBuffer(world(), num_max_tokens_per_rank=4)
    x, idx = _pairs(rank)
    recv_x, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=4, do_handle_copy=False)
    assert handle.topk_idx is idx
    assert isinstance(recv_x, torch.Tensor)
    idx.fill_(1)
    with pytest.raises(epee.InvalidArgument, match="topk_idx must be the routing"):
        buffer.combine(recv_x, handle)


def test_a_routing_that_is_not_copied_must_stay_as_it_is() -> None:
    run_ranks(_keep_reference, 2)


def _barrier(rank: int, num_ranks: int, folder: str) -> None:
    buffer = deep_ep.ElasticBuffer(world(), num_max_tokens_per_rank=4)
    for turn in range(2):  # first through the group, then through the buffer's own memory
        mark = Path(folder) / f"{turn}"
        if rank == 0:
            time.sleep(0.1)
            mark.touch()
        buffer.barrier()
        assert mark.exists()
        x, idx = _pairs(rank)
        buffer.dispatch(x, idx, num_experts=4)


def test_a_barrier_waits_for_everybody(tmp_path: Path) -> None:
    run_ranks(_barrier, 2, str(tmp_path))


def _life(rank: int, num_ranks: int) -> None:
    buffer = deep_ep.ElasticBuffer(world(), num_max_tokens_per_rank=4, explicitly_destroy=True)
    x, idx = _pairs(rank)
    recv_x, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=4)
    assert isinstance(recv_x, torch.Tensor)
    before = recv_x.clone()
    # larger calls and other shapes make more room
    buffer.dispatch(x.repeat(100, 1), idx.repeat(100, 1), num_experts=8, num_max_tokens_per_rank=500)
    wide = buffer.dispatch(x.float(), idx, num_experts=4, num_max_tokens_per_rank=500)[0]
    assert isinstance(wide, torch.Tensor)
    assert torch.equal(wide, before.float())
    assert torch.equal(buffer.combine(recv_x, handle)[0][1], x[1])
    buffer.destroy()
    assert torch.equal(recv_x, before)
    for call in (buffer.destroy, buffer.barrier, lambda: buffer.combine(recv_x, handle)):
        with pytest.raises(InvalidState, match="destroyed"):
            call()
    with pytest.raises(InvalidState, match="explicitly_destroy"):
        deep_ep.ElasticBuffer(world()).destroy()


def test_room_grows_and_goes() -> None:
    run_ranks(_life, 2)


def _describe(rank: int, num_ranks: int) -> dict[str, Any]:
    buffer = deep_ep.ElasticBuffer(world(), num_max_tokens_per_rank=4096, hidden=7168, num_topk=8)
    hint = deep_ep.ElasticBuffer.get_buffer_size_hint(world(), 4096, 7168, 8)
    assert buffer.num_bytes == hint
    assert hint % (2 << 20) == 0
    assert hint >= num_ranks * 4096 * 7168 * 2
    assert deep_ep.ElasticBuffer(world(), 12345).num_bytes == 12345
    assert deep_ep.ElasticBuffer(world()).num_bytes == 0
    assert buffer.get_physical_domain_size() == deep_ep.get_physical_domain_size(world()) == (1, num_ranks)
    assert buffer.get_logical_domain_size() == deep_ep.get_logical_domain_size(world(), False) == (1, num_ranks)
    assert (buffer.rank_idx, buffer.num_ranks, buffer.scaleup_rank_idx) == (rank, num_ranks, rank)
    assert buffer.get_theoretical_num_qps(24) == 0
    with pytest.raises(UnsupportedError, match="engram_write"):
        buffer.engram_write(torch.zeros(1))
    busy = deep_ep.ElasticBuffer(world(), prefer_overlap_with_compute=False)
    return {
        "sms": buffer.get_theoretical_num_sms(256, 8),
        "fast link": buffer.get_theoretical_num_sms(256, 8, nvlink_gbs=4300),
        "alone": busy.get_theoretical_num_sms(256, 8),
    }


def test_what_a_buffer_says_about_itself() -> None:
    # the model's value for four H200 is 11.5 SMs, with its margin and made even: 16
    assert run_ranks(_describe, 4)[2] == {"sms": 16, "fast link": 144, "alone": 64}
    assert run_ranks(_describe, 1)[0]["sms"] == 4


@pytest.mark.parametrize("name", list(cut_cases.NAMES))
def test_results_may_be_cut_to_the_rows_that_came(name: str) -> None:
    run_ranks(cut_cases.cut_results, 2, name)


def test_rows_that_came_may_not_be_cut_off() -> None:
    here, peer = run_ranks(cut_cases.too_few, 2, "deep_ep")
    assert all(text.startswith("InvalidArgument: y must") for text in here)
    assert all("rank 0" in text for text in peer)
