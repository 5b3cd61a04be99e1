"""Ranks that disagree: `MismatchError` on every one, both sides named, tensors untouched, the group works on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.engine.outbox import CELL_WORDS, GAVE_UP
from epee.errors import InvalidArgument, MismatchError
from tests.harness import run_ranks

from . import cases

Op = dist.ReduceOp


def pair(first: Callable[[], Any], others: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda rank: first() if rank == 0 else others()


def ones(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, dtype=dtype)


# name -> (what rank 0 calls, what the others call, words that every message must hold)
DISAGREEMENTS: dict[str, tuple[Callable[[int, int], Any], Callable[[int, int], Any], tuple[str, ...]]] = {
    "dtype": (
        lambda r, n: dist.all_reduce(ones(4)),
        lambda r, n: dist.all_reduce(ones(4, torch.float64)),
        ("float32", "float64", "rank 0"),
    ),
    "count": (
        lambda r, n: dist.all_reduce(ones(4)),
        lambda r, n: dist.all_reduce(ones(5)),
        ("4 elements", "5 elements"),
    ),
    "count of large tensors": (
        lambda r, n: dist.all_reduce(ones(400_000)),
        lambda r, n: dist.all_reduce(ones(3)),
        ("400000 elements", "3 elements"),
    ),
    "reduce op": (
        lambda r, n: dist.all_reduce(ones(4), op=Op.SUM),
        lambda r, n: dist.all_reduce(ones(4), op=Op.MAX),
        ("SUM", "MAX"),
    ),
    "root": (
        lambda r, n: dist.broadcast(ones(4), 0),
        lambda r, n: dist.broadcast(ones(4), 1),
        ("root 0", "root 1"),
    ),
    "operation": (
        lambda r, n: dist.all_reduce(ones(4)),
        lambda r, n: dist.broadcast(ones(4), 0),
        ("all_reduce", "broadcast"),
    ),
    "barrier against data": (lambda r, n: dist.barrier(), lambda r, n: dist.all_reduce(ones(4)), ("barrier",)),
    "gather root": (
        lambda r, n: dist.gather(ones(2), [ones(2) for _ in range(n)], dst=0),
        lambda r, n: dist.gather(ones(2), [ones(2) for _ in range(n)] if r == 1 else None, dst=1),
        ("root 0", "root 1"),
    ),
    "scatter count": (
        lambda r, n: dist.scatter(ones(2), [ones(2) for _ in range(n)], src=0),
        lambda r, n: dist.scatter(ones(3), src=0),
        ("2 elements", "3 elements"),
    ),
    "all_gather count": (
        lambda r, n: dist.all_gather([ones(2) for _ in range(n)], ones(2)),
        lambda r, n: dist.all_gather([ones(3) for _ in range(n)], ones(3)),
        ("2 elements", "3 elements"),
    ),
    "reduce_scatter count": (
        lambda r, n: dist.reduce_scatter(ones(2), [ones(2) for _ in range(n)]),
        lambda r, n: dist.reduce_scatter(ones(3), [ones(3) for _ in range(n)]),
        ("2 elements", "3 elements"),
    ),
    "reduce root": (
        lambda r, n: dist.reduce(ones(2), 0),
        lambda r, n: dist.reduce(ones(2), 1),
        ("root 0", "root 1"),
    ),
    "all_to_all splits": (
        lambda r, n: dist.all_to_all_single(ones(n), ones(n)),
        lambda r, n: dist.all_to_all_single(ones(2 * n), ones(2 * n)),
        ("rank 0 sends 1 elements to rank 1", "expects 2"),
    ),
    "all_to_all dtype": (
        lambda r, n: dist.all_to_all_single(ones(n), ones(n)),
        lambda r, n: dist.all_to_all_single(ones(n, torch.int32), ones(n, torch.int32)),
        ("float32", "int32"),
    ),
    "shapes of a coalesced list": (
        lambda r, n: dist.all_reduce_coalesced([ones(2), ones(4)]),
        lambda r, n: dist.all_reduce_coalesced([ones(3), ones(3)]),
        ("shapes",),
    ),
}


def disagree(rank: int, num_ranks: int) -> dict[str, str]:
    messages = {}
    for seq, (name, (first, others, _)) in enumerate(DISAGREEMENTS.items()):
        try:
            (first if rank == 0 else others)(rank, num_ranks)
        except MismatchError as exc:
            messages[name] = str(exc)
        x = torch.full((3,), float(seq))
        dist.all_reduce(x)  # the group works on, in step
        assert x.tolist() == [seq * num_ranks] * 3
    return messages


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_disagreement_is_an_error_on_every_rank_that_names_both_sides(num_ranks: int) -> None:
    for messages in run_ranks(disagree, num_ranks, backend="epee"):
        assert set(messages) == set(DISAGREEMENTS)
        for name, text in messages.items():
            for word in DISAGREEMENTS[name][2]:
                assert word in text, f"{name}: {text!r} should hold {word!r}"
            assert "rank=" in text


def order(rank: int, num_ranks: int) -> list[str]:
    told = []
    calls = [lambda: dist.all_reduce(ones(2)), lambda: dist.broadcast(ones(2), 0)]
    for call in calls if rank == 0 else reversed(calls):
        with pytest.raises(MismatchError) as caught:
            call()
        told.append(str(caught.value))
    dist.barrier()
    return told


def test_another_order_of_calls_is_a_mismatch_each_time() -> None:
    for told in run_ranks(order, 2, backend="epee"):
        assert all("all_reduce" in text and "broadcast" in text for text in told)


def untouched(rank: int, num_ranks: int, folder: str) -> None:
    cases.init(rank, num_ranks, folder, staging_bytes=64 << 10)
    for length in (8, 5_000, 30_000, 200_000):  # in the cell, in staging, in rounds, with reused halves
        before = cases.values(rank, (length + rank,), torch.float32)
        for call in (
            lambda x: dist.all_reduce(x),
            lambda x: dist.broadcast(x, 0),
            lambda x: dist.reduce(x, 1),
            lambda x: cases.all_gather_single(x, x[: len(x) // num_ranks].clone()),
        ):
            keep = before.clone()[: (length + rank) // num_ranks * num_ranks] if length == 8 else before.clone()
            if keep.numel() % num_ranks:
                keep = keep[: keep.numel() // num_ranks * num_ranks]
            x = keep.clone()
            if rank == 0:
                x = torch.cat([x, x[:num_ranks]])
                keep = x.clone()
            with pytest.raises(MismatchError):
                call(x)
            cases.same(x, keep, f"after a mismatch of {length}")
    dist.barrier()
    dist.destroy_process_group()


def test_a_mismatch_leaves_every_tensor_bit_identical(tmp_path: Path) -> None:
    run_ranks(untouched, 2, str(tmp_path), backend=None)


def refused_by_one(rank: int, num_ranks: int) -> str:
    told = ""
    if rank == 1:
        with pytest.raises(InvalidArgument, match="overlap"):
            dist.all_reduce(torch.ones(1).expand(4))
    else:
        with pytest.raises(MismatchError) as caught:
            dist.all_reduce(torch.ones(4))
        told = str(caught.value)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [num_ranks] * 2
    return told


def test_a_call_that_one_rank_refuses_fails_on_the_others_with_its_reason() -> None:
    for rank, told in enumerate(run_ranks(refused_by_one, 3, backend="epee")):
        assert rank == 1 or ("rank 1 refused" in told and "overlap" in told)


def refused_by_all(rank: int, num_ranks: int) -> None:
    for _ in range(3):
        with pytest.raises(InvalidArgument):
            dist.all_reduce(torch.ones(3), op=Op.BAND)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x[0].item() == num_ranks


def test_a_call_that_every_rank_refuses_leaves_the_group_in_step() -> None:
    run_ranks(refused_by_all, 3, backend="epee")


def async_mismatch(rank: int, num_ranks: int) -> None:
    works = [dist.all_reduce(ones(2), async_op=True)]
    works.append(dist.all_reduce(ones(2 + rank), async_op=True))
    works.append(dist.all_reduce(ones(2), async_op=True))
    works[0].wait()
    with pytest.raises(MismatchError):
        works[1].wait()
    with pytest.raises(MismatchError):
        works[1].wait()  # again
    assert isinstance(works[1].exception(), MismatchError)
    assert not works[1].is_success()
    works[2].wait()
    assert works[2].is_success()


def test_a_mismatch_of_an_asynchronous_call_is_raised_by_its_wait() -> None:
    run_ranks(async_mismatch, 2, backend="epee")


class LateWords:
    """Words of a peer, of which the header of a call is loaded just before the peer begins the call and is through."""

    def __init__(self, words: Any, cell: int, mark: int, begin: Path) -> None:
        self.words, self.cell, self.mark, self.begin = words, cell, mark, begin

    def __getitem__(self, index: int) -> int:
        seen: int = self.words[index]
        if index == self.cell and not self.begin.exists():
            self.begin.write_text("")
            deadline = time.monotonic() + 20
            while not self.words[self.mark] and time.monotonic() < deadline:
                time.sleep(0.002)
        return seen


def overtaken(rank: int, num_ranks: int, folder: str) -> str:
    cases.init(rank, num_ranks, folder)
    begin, x = Path(f"{folder}/begin"), torch.ones(2 + rank)
    engine: Any = dist.group.WORLD._engine  # type: ignore[union-attr]
    cell = engine.peer_regions.first_cell + (engine.seq + 1) * CELL_WORDS
    if rank == 0:
        deadline = time.monotonic() + 20
        while not begin.exists() and time.monotonic() < deadline:
            time.sleep(0.002)
    else:
        engine.members.words[0] = LateWords(engine.members.words[0], cell, cell + GAVE_UP, begin)
    work = dist.all_reduce(x, async_op=True)  # not by the short way
    assert work is not None
    with pytest.raises(MismatchError) as caught:
        work.wait()
    if rank == 1:
        engine.members.words[0] = engine.members.words[0].words
    dist.barrier()
    dist.destroy_process_group()
    return str(caught.value)


def test_a_mismatch_that_a_peer_finds_while_it_is_looked_at_is_no_withdrawal(tmp_path: Path) -> None:
    for told in run_ranks(overtaken, 2, str(tmp_path), backend=None):
        assert "the ranks disagree" in told
