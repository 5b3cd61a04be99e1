"""The pool of buffers: what is made, how large, and what the ranks tell each other before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from epee.ep import BufferPool, LatencyNeed, Need, Wish, latency_bytes
from epee.ep.pool.agreement import conclude, pack_refusal, pack_wish
from epee.ep.pool.needs import num_tokens_made_for
from epee.errors import InvalidArgument, InvalidState, MismatchError, ProtocolError
from epee.gpu.payload import DTYPE_CODES
from tests.harness import run_ranks

CPU = torch.device("cpu")
WISH = Wish(64, torch.bfloat16, 2, 4, 0, 5, (3, 4))
OTHER = replace(WISH, num_tokens=7, num_sent=(7, 0))


def test_ranks_that_want_the_same_know_each_others_wishes() -> None:
    assert conclude([pack_wish(WISH), pack_wish(OTHER)]) == [WISH, OTHER]


@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_a_wish_names_any_dtype_that_travels(dtype: torch.dtype) -> None:
    wish = replace(WISH, dtype=dtype)
    assert conclude([pack_wish(wish), pack_wish(wish)]) == [wish, wish]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("hidden", 72, "rank 0 has 64, rank 1 has 72"),
        ("dtype", torch.float32, "rank 0 has torch.bfloat16, rank 1 has torch.float32"),
        ("num_topk", 0, "rank 0 has 2, rank 1 has 0"),
        ("num_experts", 8, "rank 0 has 4, rank 1 has 8"),
        ("num_worst_tokens", 100, "rank 0 has 0, rank 1 has 100"),
    ],
)
def test_what_must_be_equal_is_named(name: str, value: object, shown: str) -> None:
    with pytest.raises(MismatchError, match=f"disagree about {name}: {shown}"):
        conclude([pack_wish(WISH), pack_wish(replace(OTHER, **{name: value}))])  # type: ignore[arg-type]


def test_a_refusal_reaches_all_with_its_reason_and_as_many_bytes() -> None:
    told = pack_refusal(2, InvalidArgument("x must be " + "long " * 100))
    assert len(told) == len(pack_wish(WISH))
    with pytest.raises(MismatchError, match=r"rank 1 refused its call.*InvalidArgument: x must be long"):
        conclude([pack_wish(WISH), told])


def test_a_result_that_cannot_hold_its_rows_is_refused_on_all() -> None:
    records = [pack_wish(replace(wish, num_worst_tokens=10)) for wish in (WISH, replace(OTHER, num_sent=(7, 7)))]
    with pytest.raises(InvalidArgument, match="got 10, but rank 1 receives 11 rows"):
        conclude(records)
    records = [pack_wish(replace(wish, num_worst_tokens=11)) for wish in (WISH, replace(OTHER, num_sent=(7, 7)))]
    assert len(conclude(records)) == 2


@pytest.mark.parametrize(
    "broken", [{"num_sent": (8, 0)}, {"num_tokens": 1 << 31}, {"hidden": -8}, {"num_sent": (-1, 0)}]
)
def test_what_no_rank_can_mean_is_not_believed(broken: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="rank 1 says"):
        conclude([pack_wish(WISH), pack_wish(replace(OTHER, **broken))])  # type: ignore[arg-type]


def test_room_is_for_the_rank_with_most_tokens() -> None:
    assert Need.of([WISH, OTHER], CPU) == Need("rank", 4, 64, 2, 7, torch.bfloat16, CPU)
    fp8 = replace(WISH, dtype=torch.float8_e4m3fn, num_topk=0)
    assert Need.of([fp8, fp8], CPU) == Need("rank", 4, 64, 1, 5, torch.float8_e4m3fn, CPU)
    assert Need.unasked(replace(WISH, num_worst_tokens=300), CPU) == Need(
        "rank", 4, 64, 2, 300, torch.bfloat16, CPU, 300
    )
    huge = Need.unasked(replace(WISH, num_worst_tokens=1 << 20), CPU)
    assert (huge.num_tokens, huge.num_rows) == (1 << 16, 1 << 20)


@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_a_room_is_wide_enough_for_what_comes_back(dtype: torch.dtype) -> None:
    assert Need("rank", 4, 64, 2, 7, dtype, CPU).itemsize == max(2, dtype.itemsize)


def test_room_grows_by_powers_of_two() -> None:
    assert [num_tokens_made_for(count) for count in (0, 1, 128, 129, 4096, 4097)] == [128, 128, 128, 256, 4096, 8192]


def test_an_expanded_room_on_a_gpu_is_capped() -> None:
    need = Need("both", 256, 7168, 8, 4096, torch.bfloat16, torch.device("cuda"), 4 * 4096)
    assert need.num_rows_of(4, 4096) == 2 * 8 * 4096
    assert replace(need, num_topk=1).num_rows_of(4, 4096) == 4 * 4096
    assert replace(need, layout="expert", device=CPU).num_rows_of(4, 4096) == 4 * 4096 * 8
    assert replace(need, layout="rank", num_rows=0).num_rows_of(4, 4096) == 4 * 4096
    assert replace(need, layout="rank", num_rows=5000).num_rows_of(4, 4096) == 5000


def _life(rank: int, num_ranks: int) -> None:
    group = dist.distributed_c10d._get_default_group()
    pool = BufferPool(group, 30.0)
    need = Need("rank", num_ranks, 64, 2, 5, torch.bfloat16, CPU)
    latency = LatencyNeed(4, 64, num_ranks, 2, CPU)
    for _ in range(2):  # through the group, then through a room
        assert pool.sum_counts(torch.tensor([rank, 10], dtype=torch.int32)).tolist() == [1, 20]
        pool.cpu_barrier()
        assert pool.agree(WISH) == [WISH, WISH]
        assert not pool.barrier(), "there is no room on a GPU"
        pool.room(need)
    room = pool.room(replace(need, num_tokens=128))
    assert room is pool.room(need), "it had room for 128"
    padded = pool.latency_buffer(latency)
    assert padded is pool.latency_buffer(latency)
    assert padded is not pool.latency_buffer(latency._replace(max_tokens=8))
    x, topk_idx = torch.ones(5, 64, dtype=torch.bfloat16), torch.arange(10).view(5, 2) % num_ranks
    room.core.dispatch(x, topk_idx)
    assert room.core.nbytes > 128 * num_ranks * 128
    assert padded.nbytes > latency_bytes(num_ranks, 4, 64, num_ranks, 2) > 2 * num_ranks * 4 * 64 * 4
    assert pool.nbytes == room.core.nbytes + padded.nbytes, "both latency buffers lie in one memory"
    pool.check()
    grown = pool.room(replace(need, num_tokens=129))
    assert (grown.num_tokens, grown.itemsize) == (256, 2)
    pool.close()
    pool.close()
    assert pool.nbytes == 0
    pool.refuse(InvalidArgument("nobody is there to be told"))
    for call in (lambda: pool.room(need), lambda: pool.latency_buffer(latency), pool.barrier, pool.cpu_barrier):
        with pytest.raises(InvalidState, match="destroyed"):
            call()
    for core in (grown.core, padded):
        with pytest.raises(InvalidState, match="closed"):
            core.all_gather_bytes(b"x")


def test_a_pool_makes_what_is_needed_and_closes_it() -> None:
    run_ranks(_life, 2)


def _refused(rank: int, num_ranks: int) -> str:
    pool = BufferPool(dist.distributed_c10d._get_default_group(), 30.0)
    if rank == 1:
        pool.refuse_wish(InvalidArgument("x is wrong"))
        text = ""
    else:
        with pytest.raises(MismatchError) as caught:
            pool.agree(WISH)
        text = str(caught.value)
    assert pool.agree(WISH) == [WISH, WISH]
    pool.close()
    return text


def test_a_refused_wish_costs_one_call() -> None:
    here, peer = run_ranks(_refused, 2)
    assert "rank 1 refused its call" in here
    assert "InvalidArgument: x is wrong" in here
    assert peer == ""
