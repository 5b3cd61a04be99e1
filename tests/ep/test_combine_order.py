"""Orders of a combine: against the oracle on real processes, the oracle against sums worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee import reference
from epee.ep.throughput.order import CombineOrder, last_k
from epee.reference import Routed
from epee.reference.orders import combine_in_order
from tests.ep.buffer_cases import Call, Setup, make_bias, make_buffer, make_input, make_output, placed, same_bits
from tests.harness import run_ranks

ORDERS = {
    "rank": ("rank", False, False),
    "bias first": ("rank", True, False),
    "last k": ("last_k", True, False),
    "last k, bias last": ("last_k", False, False),
    "rounded": ("last_k", True, True),
    "rounded by rank": ("rank", True, True),
    "k": ("k", True, False),
}


def gpu_setup(num_ranks: int) -> Setup:
    """The calls without float64, which GPUs do not have."""
    whole = _setup(num_ranks)
    calls = (replace(call, payload="float16") if call.payload == "float64" else call for call in whole.calls)
    return replace(whole, dtype="float32", calls=tuple(calls))


def _setup(num_ranks: int) -> Setup:
    routings = ("random", "repeats", "nowhere", "one rank")
    calls = [
        Call(
            seed=10 * index + num_ranks,
            num_tokens=tuple((7 * rank + 5 * index) % 13 for rank in range(num_ranks)),
            routing=routing,
            layout=layout,
            payload=payload,
            num_bias=(index + num_ranks) % 3,
            capacity=4 + index if layout == "rank" and routing != "random" else None,
        )
        for index, (routing, (layout, payload)) in enumerate(
            (routing, kind)
            for routing in routings
            for kind in (("rank", "bfloat16"), ("expert", "bfloat16"), ("expert", "float64"), ("rank", "float32"))
        )
    ]
    return Setup(num_ranks, 3, 8, 5, "float64", 2, tuple(calls))


def _orders_of(call: Call) -> dict[str, tuple[str, bool, bool]]:
    if call.layout == "expert":
        return ORDERS
    return {name: order for name, order in ORDERS.items() if order[0] != "k" and not order[2]}


def _run(rank: int, num_ranks: int, setup: Setup) -> list[dict[str, torch.Tensor]]:
    results = []
    with make_buffer(setup) as buffer:
        for call in setup.calls:
            given = placed(make_input(setup, call, rank), buffer)
            options = {"layout": call.layout, "capacity": call.capacity}
            handle = buffer.dispatch(given.x, given.topk_idx, given.topk_weights, **options).handle
            y = placed(make_output(setup, call, rank, handle.num_recv), buffer)
            bias = placed(tuple(make_bias(setup, call, rank)), buffer) or None
            found = {}
            for name, (by, bias_first, round_partials) in _orders_of(call).items():
                order = CombineOrder(by, bias_first, round_partials, given.topk_idx)
                found[name] = buffer.combine(y, handle.in_order(order), bias=bias).x.clone()
            results.append(found)
    return results


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_order_agrees_with_the_oracle(num_ranks: int) -> None:
    check_orders(_setup(num_ranks))


def check_orders(setup: Setup, around: Callable[..., Any] | None = None, timeout_s: float = 40.0) -> None:
    """Run every order on every call and compare with the oracle; `around` as in `check_setups`."""
    num_ranks = setup.num_ranks
    if around is None:
        by_rank = run_ranks(_run, num_ranks, setup, timeout_s=timeout_s)
    else:
        by_rank = run_ranks(around, num_ranks, _run, setup, timeout_s=timeout_s)
    for index, call in enumerate(setup.calls):
        inputs = [make_input(setup, call, rank) for rank in range(num_ranks)]
        received = reference.dispatch(inputs, setup.num_experts, layout=call.layout, capacity=call.capacity)
        y = [make_output(setup, call, rank, len(there.src_rank)) for rank, there in enumerate(received)]
        bias = [make_bias(setup, call, rank) for rank in range(num_ranks)]
        for name, (by, bias_first, round_partials) in _orders_of(call).items():
            wanted = combine_in_order(
                inputs,
                received,
                y,
                setup.num_experts,
                by=by,
                bias_first=bias_first,
                round_partials=round_partials,
                bias=bias,
            )
            for rank, want in enumerate(wanted):
                same_bits(by_rank[rank][index][name], want, f"{name}, rank {rank}: {call}")


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_the_two_oracles_agree_where_they_overlap(layout: str) -> None:
    setup = _setup(3)
    for call in setup.calls:
        call = replace(call, layout=layout, capacity=call.capacity if layout == "rank" else None)
        inputs = [make_input(setup, call, rank) for rank in range(3)]
        received = reference.dispatch(inputs, setup.num_experts, layout=layout, capacity=call.capacity)
        y = [make_output(setup, call, rank, len(there.src_rank)) for rank, there in enumerate(received)]
        bias = [make_bias(setup, call, rank) for rank in range(3)]
        plain = reference.combine(inputs, received, y, bias=bias)
        for got, want in zip(combine_in_order(inputs, received, y, setup.num_experts, bias=bias), plain, strict=True):
            same_bits(got, want, f"{call}")


BIG = 2.0**24  # float32 cannot add 1 to it


def _by_hand(experts: list[int], y: list[float], dtype: torch.dtype = torch.float32, **options: Any) -> float:
    """Combine one token of rank 0 (six experts on three ranks); `y` in order of rank, then of expert."""
    topk_idx = torch.tensor([experts])
    inputs = [Routed(torch.zeros(1, 1), topk_idx)] + [Routed(torch.zeros(0, 1), topk_idx[:0])] * 2
    received = reference.dispatch(inputs, 6, layout=options.pop("layout", "expert"))
    rows = iter(y)
    given = [torch.tensor([next(rows) for _ in there.src_rank], dtype=dtype).view(-1, 1) for there in received]
    return float(combine_in_order(inputs, received, given, 6, **options)[0])


def test_the_oracle_by_hand() -> None:
    # ranks 2, 2, 1, 0: one row each in the rank layout, the last k are 3 (rank 0), 2 and 1
    assert _by_hand([5, 4, 3, 0], [1.0, BIG, -BIG], layout="rank", by="rank") == 0.0
    assert _by_hand([5, 4, 3, 0], [1.0, BIG, -BIG], layout="rank", by="last_k") == 1.0
    # ranks 2, 0, 1, 2: rows of experts 0, 3, 4 and 5
    assert _by_hand([5, 0, 3, 4], [BIG, 1.0, 1.0, -BIG], by="k") == 2.0  # -BIG + BIG + 1 + 1
    assert _by_hand([5, 0, 3, 4], [BIG, 1.0, 1.0, -BIG], by="last_k") == 1.0  # BIG + 1 + (-BIG + 1)
    # bfloat16 has 8 bits: 256 + 1 is 256 once it is rounded
    assert _by_hand([0, 1, 2, -1], [256.0, 1.0, 1.0], torch.bfloat16, by="last_k") == 258.0
    assert _by_hand([0, 1, 2, -1], [256.0, 1.0, 1.0], torch.bfloat16, by="last_k", round_partials=True) == 256.0
    bias = [[torch.tensor([[-BIG]])], [], []]
    assert _by_hand([0, 2, -1, -1], [BIG, 1.0], by="rank", bias=bias) == 0.0
    assert _by_hand([0, 2, -1, -1], [BIG, 1.0], by="rank", bias=bias, bias_first=True) == 1.0


def test_the_last_k_of_each_rank() -> None:
    routing = torch.tensor([[5, 0, 3, 4], [-1, -1, -1, -1], [2, 2, -1, 0]])
    assert last_k(routing, 3, 2).tolist() == [[1, 2, 3], [-1, -1, -1], [3, 1, -1]]


def _refusals(rank: int, num_ranks: int) -> list[str]:
    x, topk_idx = torch.ones(3, 8), torch.tensor([[0], [3], [1]])
    texts = []
    with epee.Buffer(
        dist.group.WORLD, num_experts=4, hidden=8, num_topk=1, max_tokens_per_rank=4, dtype=torch.float32
    ) as buffer:
        d = buffer.dispatch(x, topk_idx)
        y = torch.ones(d.handle.num_recv, 8)
        bad: list[Any] = [
            "rank",
            CombineOrder("upwards"),
            CombineOrder("k"),
            CombineOrder(round_partials=True),
            CombineOrder("last_k"),
            CombineOrder("last_k", topk_idx=topk_idx[:2]),
            CombineOrder("last_k", topk_idx=topk_idx + 4),
            CombineOrder("last_k", topk_idx=topk_idx.flip(0) - 1),
        ]
        for order in bad:
            with pytest.raises(epee.InvalidArgument) as caught:
                buffer.combine(y, d.handle.in_order(order))
            texts.append(str(caught.value))
        assert torch.equal(buffer.combine(y, d.handle.in_order(CombineOrder("last_k", topk_idx=topk_idx))).x, x)
    return texts


def test_what_is_no_order_is_refused_by_name() -> None:
    texts = run_ranks(_refusals, 2)[0]
    assert all("order" in text or "topk_idx" in text for text in texts)
    assert "token" in texts[-1]


def _share(rank: int, num_ranks: int) -> list[list[bytes]]:
    with epee.Buffer(dist.group.WORLD, num_experts=4, hidden=8, num_topk=1, max_tokens_per_rank=4) as buffer:
        found = [buffer.all_gather_bytes(bytes([rank + 1]) * length) for length in (0, 1, 248, 249, 1000)]
        with pytest.raises(epee.InvalidArgument if rank else epee.MismatchError, match="bytes"):
            buffer.all_gather_bytes(b"" if rank == 0 else "text")  # type: ignore[arg-type]
        with pytest.raises(epee.MismatchError):
            buffer.all_gather_bytes(b"a" * (rank + 1))
        return [*found, buffer.all_gather_bytes(b"ok")]


def test_bytes_are_gathered_in_rank_order() -> None:
    for found in run_ranks(_share, 2):
        assert found[:5] == [[b"\1" * length, b"\2" * length] for length in (0, 1, 248, 249, 1000)]
        assert found[5] == [b"ok", b"ok"]


def _k_of_rows(rank: int, num_ranks: int) -> list[Any]:
    setup = Setup(num_ranks, 2, 8, 3, "float32", 2, (Call(3, (4, 6), layout="expert", expert_alignment=4),))
    with make_buffer(setup) as buffer:
        given = make_input(setup, setup.calls[0], rank)
        x = torch.ones(len(given.x), 8)
        handle = buffer.dispatch(x, given.topk_idx, layout="expert", expert_alignment=4).handle
        again = buffer.dispatch(x, handle=handle).handle
        assert buffer.dispatch(x, given.topk_idx).handle.src_k is None
        return [handle.src_rank, handle.src_token, handle.src_k, again.src_k]


def test_a_row_of_the_expert_layout_says_which_k_it_is() -> None:
    call = Call(3, (4, 6), layout="expert", expert_alignment=4)
    setup = Setup(2, 2, 8, 3, "float32", 2, (call,))
    inputs = [make_input(setup, call, rank) for rank in range(2)]
    wanted = reference.dispatch(inputs, setup.num_experts, layout="expert", expert_alignment=4)
    for got, want in zip(run_ranks(_k_of_rows, 2), wanted, strict=True):
        for value, expected in zip(got, [want.src_rank, want.src_token, want.src_k, want.src_k], strict=True):
            same_bits(value, expected, "where a row came from")
