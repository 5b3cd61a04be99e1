"""`Buffer` over several hosts: bits of the reference for every placement, whatever is drawn; bytes on the network."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import epee
from epee.ep.throughput.hosts import layout
from tests.ep.buffer_cases import Call, Setup, check_setups, copy_of, run_setups
from tests.ep.test_buffer_properties import setups

from . import interface_bytes, run_on_hosts, run_on_loopbacks

ROUNDS = int(os.environ.get("EPEE_TEST_ROUNDS", "20"))  # for each placement, at least; 200 make 1,000 of all, by hand
SETUPS = 5  # of one start of the processes
PLACEMENTS = [(0, 1), (0, 0, 1), (0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3)]


def _in_chunks(rank: int, num_ranks: int, drawn: list[Setup], length: int) -> list[list[dict[str, Any]]]:
    """Run setups whose tokens travel in chunks of `length`, and go back in even shorter ones."""
    layout.CHUNK_TOKENS, layout.CHUNK_BYTES, layout.SUM_BYTES = length, 1, 1
    return run_setups(rank, num_ranks, drawn)


def _agrees(placement: tuple[int, ...], num_rounds: int, run: Any, length: int = 128) -> None:
    num_ranks = len(placement)

    @settings(
        max_examples=-(-num_rounds // SETUPS),  # the first one is the simplest of all, whatever is asked for
        phases=(Phase.generate,),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn=st.lists(setups(num_ranks), min_size=SETUPS, max_size=SETUPS), wide=st.booleans())
    def check(drawn: list[Setup], wide: bool) -> None:
        placed = [
            replace(setup, host_of=placement, wide_partials=wide ^ bool(index % 2)) for index, setup in enumerate(drawn)
        ]

        def start(_: Any, count: int, given: list[Setup], timeout_s: float) -> Any:
            return run(_in_chunks, placement, given, length, timeout_s=timeout_s)

        check_setups(num_ranks, placed, timeout_s=100.0, run=start)

    check()


@pytest.mark.hosts
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_agrees_with_the_reference_on_hosts(placement: tuple[int, ...]) -> None:
    """Dispatch, cached dispatch and both combines, for everything that hypothesis can think of."""
    _agrees(placement, ROUNDS, run_on_hosts)


@pytest.mark.parametrize(("placement", "length"), [((0, 1), 1), ((0, 1, 0, 1), 3), ((0, 0, 1), 8)])
def test_agrees_with_the_reference_in_many_rounds(placement: tuple[int, ...], length: int) -> None:
    _agrees(placement, 20, run_on_loopbacks, length)


LONG = Setup(
    num_ranks=4,
    num_local_experts=4,
    hidden=512,
    num_topk=4,
    dtype="bfloat16",
    num_slots=2,
    calls=(
        Call(1, (700, 0, 300, 1), with_weights_back=True, num_bias=1),
        Call(2, (500, 400, 0, 0), layout="expert", payload="fp8"),
        Call(3, (400, 400, 400, 400), routing="one rank", payload="fp8 packed"),
        Call(4, (0, 0, 0, 0)),
        Call(5, (300, 300, 300, 300), routing="mask", with_out=True),
    ),
)


def test_calls_of_several_rounds_agree_with_the_reference() -> None:
    placement = (0, 0, 1, 1)

    def start(function: Any, count: int, given: list[Setup], timeout_s: float) -> Any:
        return run_on_loopbacks(function, placement, given, timeout_s=timeout_s)

    check_setups(4, [replace(LONG, host_of=placement)], timeout_s=100.0, run=start)


def _dispatched(rank: int, num_ranks: int) -> list[Any]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(300 + rank, 128, generator=generator)
    idx = torch.randint(-1, 8, (300 + rank, 3), generator=generator)
    found = []
    sizes = {"num_experts": 8, "hidden": 128, "num_topk": 3, "max_tokens_per_rank": 400, "max_recv_rows": 6000}
    with epee.Buffer(dtype=torch.float32, **sizes) as buffer:
        for kind in ("rank", "expert"):
            result = buffer.dispatch(x, idx, layout=kind)
            handle = result.handle
            found.append([copy_of(result.x), handle.src_rank, handle.src_token, result.num_tokens_per_expert])
    return found


def test_dispatch_gives_the_same_bits_for_every_placement_of_the_same_ranks() -> None:
    placed = [run_on_loopbacks(_dispatched, placement, timeout_s=60) for placement in [(0, 0, 1, 1), (0, 1, 0, 1)]]
    placed.append(run_on_loopbacks(_dispatched, (0, 0, 0, 0), timeout_s=60))
    for other in placed[1:]:
        for mine, theirs in zip(placed[0], other, strict=True):
            for want, got in zip(mine, theirs, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(want[:3], got[:3], strict=True))
                assert want[3] == got[3]


# ---- bytes

TOKENS, HIDDEN, EXPERTS, TOPK = 1024, 2048, 32, 4


def _routing(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 + rank)
    return torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK, 1).indices


def _sent(rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the bytes that this rank's host has sent for a dispatch and for its combine."""
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "num_topk": TOPK, "max_tokens_per_rank": TOKENS}
    idx, weights = _routing(rank), torch.ones(TOKENS, TOPK)
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
    with epee.Buffer(max_recv_rows=4 * TOKENS, **sizes) as buffer:
        found, before = [], 0
        handle = buffer.dispatch(x, idx, weights).handle
        y = torch.ones(handle.num_recv, HIDDEN, dtype=torch.bfloat16)
        for call in (lambda: buffer.dispatch(x, idx, weights), lambda: buffer.combine(y, handle)):
            dist.barrier()
            before = interface_bytes()[1]
            dist.barrier()
            call()
            dist.barrier()
            found.append(interface_bytes()[1] - before)
            dist.barrier()
    return found[0], found[1]


@pytest.mark.hosts
def test_a_token_crosses_the_network_once_per_host_and_comes_back_as_one_row() -> None:
    placement = (0, 0, 1, 1)
    told = run_on_hosts(_sent, placement, timeout_s=60)
    row, beside = 2 * HIDDEN, 16 + 8 * TOPK + 4 * TOPK
    for host, first in ((0, 0), (1, 2)):
        mine = [rank for rank, place in enumerate(placement) if place == host]
        others = [rank for rank, place in enumerate(placement) if place != host]
        away = sum(_on_host(rank, others) for rank in mine)  # records that leave this host
        back = sum(_on_host(rank, mine) for rank in others)  # sums that this host sends back
        assert told[first][0] <= away * (row + beside) * 1.08 + (64 << 10)
        assert told[first][1] <= back * row * 1.08 + (64 << 10)
        assert told[first][0] >= away * row, "the interface counts what was sent"


def _on_host(source: int, ranks: list[int]) -> int:
    """Return how many tokens of a rank go to one of these."""
    owner = _routing(source) // (EXPERTS // 4)
    return int(torch.isin(owner, torch.tensor(ranks)).any(1).sum())


# ---- ends


def _text(call: Any) -> str:
    try:
        call()
    except epee.EpeeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _refusals(rank: int, num_ranks: int) -> list[str]:
    x = torch.ones(4, 64)
    idx = torch.zeros(4, 2, dtype=torch.int64)
    told = []
    sizes = {"num_experts": 8, "hidden": 64, "num_topk": 2, "max_tokens_per_rank": 4, "dtype": torch.float32}
    with epee.Buffer(**sizes, max_recv_rows=7) as buffer:
        bad = torch.full_like(idx, 99) if rank == 1 else idx
        told.append(_text(lambda: buffer.dispatch(x, bad)))  # refused by one
        told.append(_text(lambda: buffer.dispatch(x, idx)))  # more rows than rank 0 has room for
        told.append(_text(lambda: buffer.dispatch(x, idx, layout="expert" if rank == 0 else "rank")))
        few = buffer.dispatch(x[:1], idx[:1])
        order = few.handle.in_order(epee.ep.CombineOrder(by="rank", bias_first=True))
        told.append(_text(lambda: buffer.combine(few.x, order, bias=x[:1])))
        assert buffer.sync(torch.tensor([1, 1, 0, 1], dtype=torch.int32)).tolist() == [1] * num_ranks
        assert buffer.sync().tolist() == [1] * num_ranks
        assert buffer.all_gather_bytes(bytes([rank]) * 300) == [bytes([peer]) * 300 for peer in range(num_ranks)]
        again = buffer.dispatch(x[:1], idx[:1])
        assert torch.equal(buffer.combine(again.x, again.handle).x, x[:1])
    told.append(_text(lambda: epee.Buffer(**{**sizes, "hidden": 72 if rank == 2 else 64})))
    told.append(_text(lambda: epee.Buffer(**{**sizes, "hidden": 7 if rank == 2 else 64})))
    return told


def test_what_one_rank_gets_wrong_fails_on_all_and_the_buffer_works_on() -> None:
    told = run_on_loopbacks(_refusals, (0, 0, 1, 1), timeout_s=60)
    for rank, (bad, full, other, order, size, odd) in enumerate(told):
        assert bad.startswith("InvalidArgument" if rank == 1 else "MismatchError")
        assert "99" in bad
        assert full.startswith("InvalidArgument")
        assert "rank 0 would receive 16 rows" in full
        assert full == told[0][1]
        assert other.startswith("MismatchError")
        assert "layout" in other
        assert other == told[0][2]
        assert order.startswith("UnsupportedError")
        assert size.startswith("MismatchError")
        assert "hidden" in size
        assert odd.startswith("InvalidArgument" if rank == 2 else "MismatchError")


def _many(rank: int, num_ranks: int, times: int) -> list[int]:
    import os

    counts = []
    for _ in range(times):
        with epee.Buffer(num_experts=4, hidden=64, num_topk=1, max_tokens_per_rank=8) as buffer:
            buffer.barrier()
        counts.append(len(os.listdir("/proc/self/fd")))
        dist.barrier()
    return counts


def test_buffers_that_are_closed_leave_no_descriptor() -> None:
    for counts in run_on_loopbacks(_many, (0, 1), 12, timeout_s=60):
        assert max(counts[6:]) <= max(counts[:6]) + 2, counts  # links end a moment after their buffer
