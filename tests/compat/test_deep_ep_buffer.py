"""V1 `Buffer`: results and handles against the reference and by counting; growth; refusals; lifetimes."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

import epee
import epee.compat.deep_ep as deep_ep
from epee import reference
from epee.ep.pool import throughput as rooms
from epee.errors import InvalidState, UnsupportedError
from epee.reference.orders import combine_in_order
from tests.compat import cut_cases
from tests.compat.deep_ep_cases import NUM_SMS, routing_of, run_v1, v1_handle, v1_handle_over_hosts, world
from tests.ep.buffer_cases import Call, Setup, make_bias, make_input, make_output, make_weights_back, same_bits
from tests.harness import run_ranks

NUM_WORST = 40


def _calls(num_ranks: int) -> tuple[Call, ...]:
    uneven = tuple(7 - 3 * rank if rank < 3 else 9 for rank in range(num_ranks))
    calls = (
        Call(1, uneven, num_bias=2, with_weights_back=True),
        Call(2, uneven, "repeats", expert_alignment=4, num_bias=1),
        Call(3, uneven, "nowhere", num_bias=0, with_weights_back=True),
        Call(4, (0,) * (num_ranks - 1) + (5,), "one rank"),
        Call(5, uneven, "mask", expert_alignment=3),
        Call(6, uneven, payload="fp8 strided"),
        Call(7, uneven, payload="fp8 packed", num_bias=1),
        Call(8, uneven, payload="float32", num_bias=2),  # not rounded at the end: another order would show
    )
    return tuple(replace(call, with_weights=call.routing != "mask") for call in calls)


def _setup(num_ranks: int) -> Setup:
    return Setup(num_ranks, 2, 512, 3, "bfloat16", 2, _calls(num_ranks))


def _run(rank: int, num_ranks: int, setup: Setup) -> list[dict[str, Any]]:
    os.environ["EPEE_POISON"] = "1"
    buffer = deep_ep.Buffer(world(), 1 << 20)
    results = []
    for call in setup.calls:
        worst = (0,) if call.routing == "mask" else (0, NUM_WORST)
        results += [run_v1(buffer, setup, call, rank, num_worst_tokens) for num_worst_tokens in worst]
    return results


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_agrees_with_the_reference_and_with_counting(num_ranks: int) -> None:
    setup = _setup(num_ranks)
    by_rank = run_ranks(_run, num_ranks, setup)
    at = 0
    for call in setup.calls:
        for num_worst in (0,) if call.routing == "mask" else (0, NUM_WORST):
            _check(setup, call, [results[at] for results in by_rank], num_worst)
            at += 1
    assert all(len(results) == at for results in by_rank)


def _check(setup: Setup, call: Call, by_rank: list[dict[str, Any]], num_worst: int) -> None:
    ranks = range(setup.num_ranks)
    inputs = [make_input(setup, call, rank) for rank in ranks]
    again = [make_input(setup, call, rank, again=True) for rank in ranks]
    wanted = reference.dispatch(inputs, setup.num_experts, expert_alignment=call.expert_alignment)
    wanted_again = reference.dispatch(again, setup.num_experts)
    members = [routing_of(setup, given)["is_token_in_rank"] for given in inputs]
    for rank in ranks:
        got, want, where = by_rank[rank], wanted[rank], f"rank {rank}, {num_worst}: {call}"
        num_recv = len(want.src_rank)
        _check_rows(got["x"], want.x, num_worst, f"x of {where}")
        _check_rows(got["again"], wanted_again[rank].x, num_worst, f"again, {where}")
        _check_filled(got["topk_idx"], want.topk_idx, num_worst, -1, f"ids of {where}")
        _check_filled(got["topk_weights"], want.topk_weights, num_worst, 0, f"weights of {where}")
        if call.routing == "mask":
            counts = [sum(expert + src for src in ranks) for expert in range(setup.num_experts)]
            local = counts[2 * rank : 2 * rank + 2]
            assert got["list"] == [-(-count // call.expert_alignment) * call.expert_alignment for count in local]
        else:
            assert got["list"] == ([] if num_worst else want.num_tokens_per_expert)
            for name, value in routing_of(setup, inputs[rank]).items():
                same_bits(got["routing"][name], value, f"{name} of {where}")
            _check_per_host(setup, got["routing"]["num_tokens_per_rdma_rank"], members[rank])
        if setup.host_of:
            handle, long, fill = v1_handle_over_hosts(members, want, rank, setup.host_of, NUM_SMS // 2), 7, 255
        else:
            handle, long, fill = v1_handle(members, want, rank, NUM_SMS // 2), 3, -1
        for index, (part, expected) in enumerate(zip(got["handle"], handle, strict=True)):
            if index == long:
                _check_filled(part, expected, num_worst, fill, f"handle[{index}] of {where}")
            else:
                same_bits(part, expected, f"handle[{index}] of {where}")
        assert (got["handle"][6][-1] if setup.host_of else got["handle"][0][-1, rank]) == num_recv
    _check_combined(setup, call, by_rank, inputs, wanted, num_worst)


def _check_per_host(setup: Setup, got: Any, member: torch.Tensor) -> None:
    """Count the tokens that go to each host."""
    if not setup.host_of:
        assert got is None
        return
    counts = [0] * (max(setup.host_of) + 1)
    for row in member.tolist():
        for host in {setup.host_of[rank] for rank, is_in in enumerate(row) if is_in}:
            counts[host] += 1
    assert got.tolist() == counts
    assert got.dtype == torch.int32


def _check_combined(
    setup: Setup,
    call: Call,
    by_rank: list[dict[str, Any]],
    inputs: list[reference.Routed],
    received: list[reference.Received],
    num_worst: int,
) -> None:
    ranks = range(setup.num_ranks)
    num_rows = [num_worst or len(there.src_rank) for there in received]
    y = [make_output(setup, call, rank, num_rows[rank])[: len(received[rank].src_rank)] for rank in ranks]
    bias = [make_bias(setup, call, rank) for rank in ranks]
    if setup.host_of:
        wanted = reference.combine_by_host(inputs, received, y, setup.host_of, bias=bias)
    elif call.routing == "mask":
        assert call.num_bias == 0
        wanted = reference.combine(inputs, received, y)
    else:
        wanted = combine_in_order(inputs, received, y, setup.num_experts, by="rank", bias_first=True, bias=bias)
    for rank in ranks:
        same_bits(by_rank[rank]["combined"], wanted[rank], f"combine of rank {rank}, {num_worst}: {call}")
    if not call.with_weights_back:
        assert all(got["weights"] is None for got in by_rank)
        return
    weights = [
        make_weights_back(call, rank, (num_rows[rank], setup.num_topk), torch.float32)[: len(received[rank].src_rank)]
        for rank in ranks
    ]
    by_host = setup.host_of
    if by_host:
        backs = reference.combine_weights_by_host(inputs, received, weights, by_host)
    else:
        backs = reference.combine_weights(inputs, received, weights)
    for rank, want in enumerate(backs):
        same_bits(by_rank[rank]["weights"], want, f"weights back at rank {rank}, {num_worst}: {call}")


def _check_rows(got: Any, want: Any, num_worst: int, where: str) -> None:
    assert isinstance(got, tuple) == isinstance(want, tuple)
    for part, expected in zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]:
        _check_filled(part, expected, num_worst, 0, where)


def _check_filled(got: Any, want: Any, num_worst: int, fill: int, where: str) -> None:
    """The rows that were received, then `fill` up to `num_worst` rows."""
    if want is None:
        assert got is None, where
        return
    same_bits(got[: len(want)], want, where)
    assert len(got) == (num_worst or len(want)), where
    assert bool((got[len(want) :].float() == fill).all()), where


def _tokens(rank: int, num_tokens: int, hidden: int = 8, num_experts: int = 4) -> dict[str, Any]:
    """Arguments of a dispatch of `num_tokens` tokens, token t to expert `(rank + t) % num_experts`, weight 1."""
    topk_idx = ((torch.arange(num_tokens) + rank) % num_experts)[:, None]
    setup = Setup(2, num_experts // 2, hidden, 1, "bfloat16", 2, ())
    routing = routing_of(setup, reference.Routed(topk_idx, topk_idx))
    x = (torch.arange(num_tokens, dtype=torch.float32) + 100 * rank)[:, None].expand(-1, hidden).to(torch.bfloat16)
    return {"x": x, "topk_idx": topk_idx, "topk_weights": torch.ones(num_tokens, 1), **routing}


def _goes_round(buffer: deep_ep.Buffer, given: dict[str, Any]) -> Any:
    """Dispatch and combine unchanged rows; they must come back. Returns the handle."""
    recv_x, _, weights, _, handle, _ = buffer.dispatch(**given)
    assert handle is not None
    assert isinstance(recv_x, torch.Tensor)
    back, weights_back, _ = buffer.combine(recv_x, handle, topk_weights=weights)
    assert torch.equal(back, given["x"])
    assert weights_back is not None
    assert torch.equal(weights_back, given["topk_weights"])
    return handle


def _grow(rank: int, num_ranks: int) -> list[int]:
    """Shapes change from call to call; only rank 1 ever has many tokens, and bytes bound nothing."""
    buffer = deep_ep.Buffer(world(), num_nvl_bytes=1)
    made: list[int] = []
    assert buffer.runtime is not None
    small = _tokens(rank, 3)
    kept = _goes_round(buffer, small)
    first_room = buffer._known(kept).room
    for num_tokens, hidden, num_experts in (
        (3, 8, 4),
        (200 * rank, 8, 4),
        (1, 8, 4),
        (5, 16, 4),
        (5, 16, 8),
        (3, 8, 4),
    ):
        _goes_round(buffer, _tokens(rank, num_tokens, hidden, num_experts))
        made.append(len(buffer.runtime._rooms.wholes))
    wide = _tokens(rank, 4)
    wide["x"] = wide["x"].double()
    room = buffer._known(_goes_round(buffer, wide)).room
    assert (room.num_tokens, room.itemsize) == (256, 8)  # wider, and no smaller than before
    # the first handle outlives the room that made it
    core = first_room.core
    again, *_ = buffer.dispatch(small["x"] + 1, handle=kept)
    assert isinstance(again, torch.Tensor)
    assert torch.equal(buffer.combine(again, kept)[0], small["x"] + 1)
    del first_room, kept
    gc.collect()
    with pytest.raises(InvalidState, match="closed"):
        core.all_gather_bytes(b"x")
    _goes_round(buffer, small)
    return made


def test_a_buffer_learns_its_shape_and_grows_on_all_ranks_alike() -> None:
    assert run_ranks(_grow, 2) == [[1, 1, 1, 2, 3, 3]] * 2


def _capture(rank: int, num_ranks: int) -> None:
    buffer = deep_ep.Buffer(world())
    recording = True
    rooms.is_capturing = lambda: recording
    for _ in range(2):
        with pytest.raises(epee.InvalidArgument, match="graph"):
            buffer.dispatch(**_tokens(rank, 3))
    recording = False
    _goes_round(buffer, _tokens(rank, 3))
    recording = True
    _goes_round(buffer, _tokens(rank, 100))
    with pytest.raises(epee.InvalidArgument, match="graph"):
        buffer.dispatch(**_tokens(rank, 200 * rank))
    recording = False
    _goes_round(buffer, _tokens(rank, 200 * rank))


def test_a_buffer_never_grows_while_a_graph_is_recorded() -> None:
    run_ranks(_capture, 2)


def _without(name: str) -> Any:
    return lambda given: {**given, name: None}


def _with(name: str, change: Any) -> Any:
    return lambda given: {**given, name: change(given[name])}


BAD = {
    "no layout": (_without("num_tokens_per_rank"), "get_dispatch_layout"),
    "weights missing": (_without("topk_weights"), "both"),
    "rows that are no matrix": (_with("x", lambda x: x[0]), "x must"),
    "rows of another dtype": (_with("x", lambda x: x.long()), "x must"),
    "ids of another dtype": (_with("topk_idx", lambda idx: idx.float()), "topk_idx must"),
    "an expert too many": (_with("topk_idx", lambda idx: idx + 1), "4 at token"),
    "a mask of another routing": (_with("is_token_in_rank", lambda mask: ~mask), "get_dispatch_layout"),
    "a mask of another shape": (_with("is_token_in_rank", lambda mask: mask[1:]), "is_token_in_rank"),
    "experts that do not divide": (_with("num_tokens_per_expert", lambda counts: counts[1:]), "multiple of 2"),
    "weights of another shape": (_with("topk_weights", lambda weights: weights[1:]), "topk_weights"),
    "a handle beside ids": (lambda given: {**given, "handle": ()}, "handle must"),
}


def _refuse(rank: int, num_ranks: int) -> dict[str, str]:
    texts = {}
    buffer = deep_ep.Buffer(world())
    with pytest.raises(epee.InvalidArgument if rank else epee.MismatchError, match="both"):  # before there is a room
        buffer.dispatch(**{**_tokens(rank, 3), **({"topk_weights": None} if rank else {})})
    handle = _goes_round(buffer, _tokens(rank, 3))
    for name, (spoil, _) in BAD.items():
        given = _tokens(rank, 4)
        with pytest.raises(epee.InvalidArgument if rank else epee.MismatchError) as caught:
            buffer.dispatch(**(spoil(given) if rank else given))
        texts[name] = str(caught.value)
        _goes_round(buffer, _tokens(rank, 5))
    good, x = _tokens(rank, 3), torch.zeros(handle[3].shape[0], 8, dtype=torch.bfloat16)
    copied = tuple(part.clone() for part in handle)
    for name, call in {
        "combine by a copy": lambda: buffer.combine(x, copied if rank else handle),
        "combine by no handle": lambda: buffer.combine(x, None if rank else handle),  # type: ignore[arg-type]
        "combine of other rows": lambda: buffer.combine(x[rank:], handle),
        "cached with ids": lambda: buffer.dispatch(
            good["x"], handle=handle, topk_idx=good["topk_idx"] if rank else None
        ),
    }.items():
        with pytest.raises(epee.InvalidArgument if rank else epee.MismatchError) as caught:
            call()
        texts[name] = str(caught.value)
    _goes_round(buffer, good)
    return texts


def test_a_refused_call_is_refused_everywhere_and_the_buffer_works_on() -> None:
    peer, here = run_ranks(_refuse, 2)
    for name, (_, text) in BAD.items():
        assert text in here[name], (name, here[name])
    for name, text in here.items():
        assert text[:40] in peer[name], (name, peer[name])
        assert "rank 1 refused" in peer[name]


def _disagree(rank: int, num_ranks: int) -> list[str]:
    buffer = deep_ep.Buffer(world())
    texts = []
    for given in (
        _tokens(rank, 3, hidden=8 + 8 * rank),
        _tokens(rank, 3, num_experts=4 + 4 * rank),
        {**_tokens(rank, 3), "num_worst_tokens": 10 + rank},
    ):
        with pytest.raises(epee.MismatchError, match="disagree") as caught:
            buffer.dispatch(**given)
        texts.append(str(caught.value))
    with pytest.raises(epee.InvalidArgument, match="num_worst_tokens") as small:
        buffer.dispatch(**_tokens(rank, 8), num_worst_tokens=7)
    _goes_round(buffer, _tokens(rank, 3))
    return [*texts, str(small.value)]


def test_ranks_that_disagree_hear_the_same() -> None:
    one, other = run_ranks(_disagree, 2)
    assert one == other
    assert [name in text for name, text in zip(("hidden", "num_experts", "num_worst"), one, strict=False)] == [True] * 3


def _lifetimes(rank: int, num_ranks: int) -> None:
    kept = deep_ep.Buffer(world())
    with pytest.raises(InvalidState, match="explicitly_destroy"):
        kept.destroy()
    buffer = deep_ep.Buffer(world(), explicitly_destroy=True)
    recv_x, _, _, _, handle, _ = buffer.dispatch(**_tokens(rank, 3))
    assert isinstance(recv_x, torch.Tensor)
    before = recv_x.clone()
    buffer.destroy()
    assert buffer.runtime is None
    assert torch.equal(recv_x, before)
    for call in (
        lambda: buffer.dispatch(**_tokens(rank, 3)),
        lambda: buffer.dispatch(before, handle=handle),
        lambda: buffer.combine(before, handle),  # type: ignore[arg-type]
        buffer.destroy,
    ):
        with pytest.raises(InvalidState, match="destroyed"):
            call()
    with pytest.raises(epee.InvalidArgument, match="handle"):
        kept.combine(before, handle)  # type: ignore[arg-type]
    _goes_round(kept, _tokens(rank, 3))
    core = kept._known(_goes_round(kept, _tokens(rank, 3))).room.core
    assert kept.runtime is not None
    assert kept.runtime.nbytes == core.nbytes > 0
    del kept
    gc.collect()
    with pytest.raises(InvalidState, match="closed"):
        core.all_gather_bytes(b"x")


def test_memory_goes_with_destroy_or_with_the_object() -> None:
    run_ranks(_lifetimes, 2)


def _int32(rank: int, num_ranks: int) -> Any:
    buffer = deep_ep.Buffer(world())
    given = _tokens(rank, 4)
    given["topk_idx"] = given["topk_idx"].to(torch.int32)
    counts = buffer.get_dispatch_layout(given["topk_idx"], 4)
    assert torch.equal(counts[3], given["is_token_in_rank"])
    with pytest.raises(epee.InvalidArgument, match="4 at token"):
        buffer.get_dispatch_layout(given["topk_idx"] + 1, 4)
    with pytest.raises(epee.InvalidArgument, match="multiple of 2"):
        buffer.get_dispatch_layout(given["topk_idx"], 5)
    recv_idx = buffer.dispatch(**given)[1]
    assert recv_idx is not None
    return recv_idx.dtype, recv_idx


def test_ids_may_be_int32_and_come_back_so() -> None:
    for dtype, recv_idx in run_ranks(_int32, 2):
        assert dtype == torch.int32
        assert set(recv_idx.view(-1).tolist()) == {0, 1}


def _other_device(rank: int, num_ranks: int) -> None:
    buffer, elastic = deep_ep.Buffer(world()), deep_ep.ElasticBuffer(world(), num_max_tokens_per_rank=8)
    given = _tokens(rank, 3)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="device"):
            buffer.dispatch(**{**given, "x": given["x"].to("meta")})
        with pytest.raises(UnsupportedError, match="device"):
            elastic.dispatch(given["x"].to("meta"), given["topk_idx"], num_experts=4)
        _goes_round(buffer, given)


def test_a_device_that_is_not_served_is_unsupported() -> None:
    run_ranks(_other_device, 2)


def test_worst_case_results_may_be_cut_to_the_rows_that_came() -> None:
    run_ranks(cut_cases.cut_by_v1, 2)
