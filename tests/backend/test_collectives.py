"""Every operation, dtype and layout on 1 to 4 ranks against closed forms, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks

from . import cases
from .cases import DTYPES, Placed, init, reduced, salts, same, values

SMALL = ((), (0,), (1,), (5,), (3, 4))
# With 64 KiB staging buffers these need one step, two steps, all rounds at once, and reused halves.
LARGE = ((70_001,), (20_000,))


def reductions(rank: int, num_ranks: int, dtype: torch.dtype, shape: tuple[int, ...], strided: bool) -> None:
    salt = salts()
    what = f"{dtype} {shape} strided={strided}"
    for op in cases.reduce_ops(dtype):
        s = salt()
        parts = [values(r, shape, dtype, s) for r in range(num_ranks)]
        expected = reduced(parts, op)
        x = Placed(parts[rank], strided)
        dist.all_reduce(x.tensor, op=op)
        x.check(expected, f"all_reduce {op} {what}")

        root = s % num_ranks
        x = Placed(parts[rank], strided)
        dist.reduce(x.tensor, root, op=op)
        x.check(expected if rank == root else parts[rank], f"reduce {op} to {root} {what}")

        given = [values(rank, shape, dtype, s + 100 + dst) for dst in range(num_ranks)]
        mine = [Placed(t, strided) for t in given]
        out = Placed(torch.zeros(shape, dtype=dtype), strided)
        dist.reduce_scatter(out.tensor, [p.tensor for p in mine], op=op)
        wanted = reduced([values(r, shape, dtype, s + 100 + rank) for r in range(num_ranks)], op)
        out.check(wanted, f"reduce_scatter {op} {what}")

        if shape:
            whole = Placed(torch.cat(given), strided)
            out = Placed(torch.zeros(shape, dtype=dtype), strided)
            if not dtype.is_complex:
                cases.reduce_scatter_single(out.tensor, whole.tensor, op=op)
                out.check(wanted, f"reduce_scatter_single {op} {what}")
            whole.check(torch.cat(given), f"reduce_scatter input {what}")


def copies(rank: int, num_ranks: int, dtype: torch.dtype, shape: tuple[int, ...], strided: bool) -> None:
    salt = salts()
    what = f"{dtype} {shape} strided={strided}"
    zeros = torch.zeros(shape, dtype=dtype)
    for root in range(num_ranks):
        s = salt()
        x = Placed(values(rank, shape, dtype, s), strided)
        dist.broadcast(x.tensor, root)
        x.check(values(root, shape, dtype, s), f"broadcast from {root} {what}")

        outs = [Placed(zeros, strided) for _ in range(num_ranks)] if rank == root else []
        part = Placed(values(rank, shape, dtype, s), strided).tensor
        dist.gather(part, [o.tensor for o in outs] or None, dst=root)
        for r, out in enumerate(outs):
            out.check(values(r, shape, dtype, s), f"gather to {root} {what}")

        out = Placed(zeros, strided)
        given = [Placed(values(r, shape, dtype, s + 50), strided).tensor for r in range(num_ranks)]
        dist.scatter(out.tensor, given if rank == root else None, src=root)
        out.check(values(rank, shape, dtype, s + 50), f"scatter from {root} {what}")

    s = salt()
    parts = [values(r, shape, dtype, s) for r in range(num_ranks)]
    outs = [Placed(zeros, strided) for _ in range(num_ranks)]
    dist.all_gather([o.tensor for o in outs], Placed(parts[rank], strided).tensor)
    for r, out in enumerate(outs):
        out.check(parts[r], f"all_gather {what}")

    sent = [values(10 * rank + r, shape, dtype, s) for r in range(num_ranks)]
    outs = [Placed(zeros, strided) for _ in range(num_ranks)]
    dist.all_to_all([o.tensor for o in outs], [Placed(t, strided).tensor for t in sent])
    for r, out in enumerate(outs):
        out.check(values(10 * r + rank, shape, dtype, s), f"all_to_all {what}")
    if shape:
        single_forms(rank, num_ranks, dtype, shape, strided)


def single_forms(rank: int, num_ranks: int, dtype: torch.dtype, shape: tuple[int, ...], strided: bool) -> None:
    what = f"{dtype} {shape} strided={strided}"
    rows, rest = shape[0], shape[1:]
    parts = [values(r, shape, dtype, 7) for r in range(num_ranks)]
    out = Placed(torch.zeros((rows * num_ranks, *rest), dtype=dtype), strided)
    cases.all_gather_single(out.tensor, Placed(parts[rank], strided).tensor)
    out.check(torch.cat(parts), f"all_gather_single {what}")

    full = (rows * num_ranks, *rest)
    inputs = [values(r, full, dtype, 8) for r in range(num_ranks)]
    out = Placed(torch.zeros(full, dtype=dtype), strided)
    dist.all_to_all_single(out.tensor, Placed(inputs[rank], strided).tensor)
    out.check(torch.cat([x[rank * rows : (rank + 1) * rows] for x in inputs]), f"all_to_all_single even {what}")

    splits = [[(rows * (src + 2 * dst)) % (rows + 2) for dst in range(num_ranks)] for src in range(num_ranks)]
    inputs = [values(r, (sum(splits[r]), *rest), dtype, 9) for r in range(num_ranks)]
    expected = [splits[src][rank] for src in range(num_ranks)]
    out = Placed(torch.zeros((sum(expected), *rest), dtype=dtype), strided)
    dist.all_to_all_single(out.tensor, Placed(inputs[rank], strided).tensor, expected, splits[rank])
    pieces = [inputs[src].split(splits[src])[rank] for src in range(num_ranks)]
    out.check(torch.cat(pieces), f"all_to_all_single uneven {what}")


def everything(rank: int, num_ranks: int, folder: str) -> None:
    init(rank, num_ranks, folder, staging_bytes=64 << 10)
    for dtype in DTYPES:
        for shape in SMALL:
            for strided in (False, True):
                reductions(rank, num_ranks, dtype, shape, strided)
                copies(rank, num_ranks, dtype, shape, strided)
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.complex128):
        for shape in LARGE:
            reductions(rank, num_ranks, dtype, shape, strided=False)
            copies(rank, num_ranks, dtype, shape, strided=False)
    reductions(rank, num_ranks, torch.float32, (40_000,), strided=True)
    copies(rank, num_ranks, torch.float32, (40_000,), strided=True)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(180)  # five seconds, but much work for a machine that is busy
@pytest.mark.parametrize("num_ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_operation_equals_its_closed_form(num_ranks: int, tmp_path: Path) -> None:
    run_ranks(everything, num_ranks, str(tmp_path), backend=None, timeout_s=170)


def other_dtypes(rank: int, num_ranks: int, folder: str) -> None:
    """What torch and gloo hardly serve: unsigned integers above 8 bits, and float8, which is only copied."""
    init(rank, num_ranks, folder, staging_bytes=64 << 10)
    for shape in ((), (0,), (5,), (3, 4)):
        for strided in (False, True):
            for dtype in cases.UNSIGNED:
                reductions(rank, num_ranks, dtype, shape, strided)
            for dtype in (*cases.UNSIGNED, *cases.FLOAT8):
                copies(rank, num_ranks, dtype, shape, strided)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_unsigned_and_float8_dtypes_equal_their_closed_forms(num_ranks: int, tmp_path: Path) -> None:
    run_ranks(other_dtypes, num_ranks, str(tmp_path), backend=None)


def means(rank: int, num_ranks: int) -> None:
    for dtype in (*cases.INTEGERS[:-1], *cases.UNSIGNED[:-1]):  # all but 64 bits
        info = torch.iinfo(dtype)
        x = torch.tensor([info.max, info.min, info.max if rank else info.min], dtype=dtype)
        y = x.clone()
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        both = info.max * (num_ranks - 1) + info.min
        mean = abs(both) // num_ranks * (1 if both >= 0 else -1)  # towards zero
        assert x.tolist() == [info.max, info.min, mean], dtype
        out = torch.zeros(3, dtype=dtype)
        dist.reduce_scatter(out, [y.clone() for _ in range(num_ranks)], op=dist.ReduceOp.AVG)
        assert out.tolist() == x.tolist()
    negative = torch.tensor([-1, -3, 1, 3], dtype=torch.int64) if rank == 0 else torch.zeros(4, dtype=torch.int64)
    dist.all_reduce(negative, op=dist.ReduceOp.AVG)
    assert negative.tolist() == [0, -(3 // num_ranks), 0, 3 // num_ranks]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_mean_of_integers_does_not_wrap_and_truncates_towards_zero(num_ranks: int) -> None:
    run_ranks(means, num_ranks, backend="epee")


def default_staging(rank: int, num_ranks: int, folder: str) -> None:
    init(rank, num_ranks, folder)
    for length in (65_537, 1_000_003, 9_000_001):  # one step, two steps in staging, more than two staging buffers
        parts = [values(r, (length,), torch.float32) for r in range(num_ranks)]
        x = parts[rank].clone()
        dist.all_reduce(x)
        same(x, reduced(parts, dist.ReduceOp.SUM), f"all_reduce {length}")
        dist.broadcast(x.copy_(parts[rank]), 1)
        same(x, parts[1], f"broadcast {length}")
        out = torch.empty(num_ranks * length)
        cases.all_gather_single(out, parts[rank])
        same(out, torch.cat(parts), f"all_gather {length}")
        half = length // num_ranks
        got = torch.empty(half)
        cases.reduce_scatter_single(got, parts[rank][: half * num_ranks])
        same(got, reduced([p[rank * half : (rank + 1) * half] for p in parts], dist.ReduceOp.SUM), "reduce_scatter")
        out = torch.empty(half * num_ranks)
        dist.all_to_all_single(out, parts[rank][: half * num_ranks])
        same(out, torch.cat([p[rank * half : (rank + 1) * half] for p in parts]), "all_to_all")
    dist.destroy_process_group()


def test_large_tensors_go_through_the_default_staging_in_rounds(tmp_path: Path) -> None:
    run_ranks(default_staging, 2, str(tmp_path), backend=None)


def nan_and_zero(rank: int, num_ranks: int) -> torch.Tensor:
    x = torch.tensor([float("nan"), -0.0, float("inf"), 1.0])
    if rank:
        x = torch.tensor([1.0, -0.0, float("-inf"), float("nan")])
    dist.all_reduce(x)
    return x


def test_special_floats_are_reduced_alike_on_all_ranks() -> None:
    first, second = run_ranks(nan_and_zero, 2, backend="epee")
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))
    assert first[0].isnan()
    assert first[1].item() == 0.0
    assert torch.signbit(first[1])
    assert first[2].isnan()


def order_dependent(rank: int, num_ranks: int, length: int) -> list[torch.Tensor]:
    results = []
    for _ in range(3):
        x = values(rank, (length,), torch.float32, 3) * 10.0 ** (5 * rank)
        dist.all_reduce(x)
        results.append(x)
    return results


@pytest.mark.parametrize("length", [1000, 200_001])
def test_float_sums_are_bit_identical_on_all_ranks_and_between_runs(length: int) -> None:
    runs = [run_ranks(order_dependent, 3, length, backend="epee") for _ in range(2)]
    reference = runs[0][0][0]
    for run in runs:
        for results in run:
            for result in results:
                same(result, reference, "sum")


def coalesced(rank: int, num_ranks: int) -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    shapes = ((3,), (2, 2), (0,), (500,))
    for dtypes in ((torch.float32,) * 4, (torch.int64,) * 4, (torch.bfloat16,) * 4):
        parts = [
            [values(r, s, d, i) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))] for r in range(num_ranks)
        ]
        mine = [Placed(t, strided=bool(i % 2)) for i, t in enumerate(parts[rank])]
        with _coalescing_manager(async_ops=True) as manager:
            for p in mine:
                dist.all_reduce(p.tensor)
        manager.wait()
        for i, p in enumerate(mine):
            p.check(reduced([parts[r][i] for r in range(num_ranks)], dist.ReduceOp.SUM), f"coalesced all_reduce {i}")

        outs = [torch.zeros((num_ranks * t.shape[0], *t.shape[1:]), dtype=t.dtype) for t in parts[rank]]
        with _coalescing_manager() as manager:
            for out, t in zip(outs, parts[rank], strict=True):
                cases.all_gather_single(out, t)
        for i, out in enumerate(outs):
            same(out, torch.cat([parts[r][i] for r in range(num_ranks)]), f"coalesced all_gather {i}")

        wide = [[torch.cat([t] * num_ranks) for t in parts[r]] for r in range(num_ranks)]
        outs = [torch.zeros_like(t) for t in parts[rank]]
        with _coalescing_manager() as manager:
            for out, t in zip(outs, wide[rank], strict=True):
                cases.reduce_scatter_single(out, t)
        for i, out in enumerate(outs):
            same(out, reduced([parts[r][i] for r in range(num_ranks)], dist.ReduceOp.SUM), f"coalesced rs {i}")
    same_dtype = [torch.ones(4), torch.ones(3) * 2]
    dist.all_reduce_coalesced(same_dtype)
    assert same_dtype[1].tolist() == [2.0 * num_ranks] * 3
    group = dist.group.WORLD
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(num_ranks)]
    opts = torch._C._distributed_c10d.AllgatherOptions()
    group.allgather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((3,), rank + 10.0)], opts).wait()
    assert [outs[1][0].item() for outs in lists] == [r + 10.0 for r in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_coalesced_forms_equal_the_single_calls(num_ranks: int) -> None:
    run_ranks(coalesced, num_ranks, backend="epee")


def objects(rank: int, num_ranks: int) -> None:
    got = [None] * num_ranks
    dist.all_gather_object(got, {"rank": rank, "text": "x" * (1000 * rank)})
    assert [g["rank"] for g in got] == list(range(num_ranks))
    items = [rank, "a"] if rank == 0 else [None, None]
    dist.broadcast_object_list(items, 0)
    assert items == [0, "a"]
    gathered = [None] * num_ranks if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    assert rank or gathered == list(range(num_ranks))
    out = [None]
    dist.scatter_object_list(out, [f"for {r}" for r in range(num_ranks)] if rank == 0 else None, 0)
    assert out == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list([3, "b"], 1)
    elif rank == 1:
        items = [None, None]
        dist.recv_object_list(items, 0)
        assert items == [3, "b"]


def test_object_collectives_work() -> None:
    run_ranks(objects, 3, backend="epee")


def aliases(rank: int, num_ranks: int, folder: str) -> None:
    init(rank, num_ranks, folder, staging_bytes=64 << 10)
    for length in (6, 30_000, 90_000):
        parts = [values(r, (length,), torch.float32) for r in range(num_ranks)]
        for shift in (0, 1):  # in its own place, and across two places
            out = torch.zeros(num_ranks * length + 1)
            view = out[rank * length + shift : (rank + 1) * length + shift]
            view.copy_(parts[rank])
            cases.all_gather_single(out[:-1], view)
            same(out[:-1], torch.cat(parts), f"all_gather into its input, shift {shift}, {length}")
        third = length // num_ranks
        whole = parts[rank].clone()
        cases.reduce_scatter_single(whole[1 : third + 1], whole[: third * num_ranks])
        wanted = reduced([p[rank * third : (rank + 1) * third] for p in parts], dist.ReduceOp.SUM)
        same(whole[1 : third + 1], wanted, "reduce_scatter into its input")
        whole = parts[rank].clone()
        dist.all_to_all_single(whole[: third * num_ranks], whole[: third * num_ranks])
        wanted = torch.cat([p[rank * third : (rank + 1) * third] for p in parts])
        same(whole[: third * num_ranks], wanted, "all_to_all in place")
        whole = parts[rank].clone()
        dist.scatter(whole[1 : third + 1], list(whole[: third * num_ranks].chunk(num_ranks)) if rank == 0 else None, 0)
        same(whole[1 : third + 1], parts[0][rank * third : (rank + 1) * third], "scatter into its input")
    dist.destroy_process_group()


def test_outputs_may_alias_inputs(tmp_path: Path) -> None:
    run_ranks(aliases, 3, str(tmp_path), backend=None)


def lazy_views(rank: int, num_ranks: int) -> None:
    z = values(rank, (6,), torch.complex64)
    gathered = [torch.zeros(6, dtype=torch.complex64) for _ in range(num_ranks)]
    group = dist.group.WORLD
    group.allgather([gathered], [z.conj()]).wait()
    for r in range(num_ranks):
        same(gathered[r], values(r, (6,), torch.complex64).conj().resolve_conj(), "conjugate view")
    target = torch.zeros(6, dtype=torch.complex64)
    group.broadcast([target.conj()]).wait()
    assert not target.any()
    leaf = torch.nn.Parameter(torch.ones(3))
    dist.all_reduce(leaf)
    assert leaf.tolist() == [num_ranks] * 3


def test_conjugate_views_and_parameters_are_served() -> None:
    run_ranks(lazy_views, 2, backend="epee")


def sixteen(rank: int, num_ranks: int) -> None:
    x = torch.full((1000,), float(rank))
    dist.all_reduce(x)
    assert x[0].item() == sum(range(num_ranks))
    big = torch.full((300_000,), float(rank))
    dist.all_reduce(big)
    assert big[-1].item() == sum(range(num_ranks))
    out = torch.empty(num_ranks, dtype=torch.int64)
    dist.all_to_all_single(out, torch.arange(num_ranks) + 100 * rank)
    assert out.tolist() == [100 * r + rank for r in range(num_ranks)]
    pairs = dist.new_group([rank - rank % 2, rank - rank % 2 + 1], use_local_synchronization=True)
    y = torch.ones(1)
    dist.all_reduce(y, group=pairs)
    assert y.item() == 2
    dist.barrier()


def test_sixteen_ranks_work() -> None:
    run_ranks(sixteen, 16, backend="epee", timeout_s=55)


def over_two_to_the_31(rank: int, num_ranks: int) -> None:
    length = (1 << 31) + 5
    x = torch.zeros(length, dtype=torch.uint8) if rank == 0 else torch.empty(length, dtype=torch.uint8)
    if rank == 0:
        x[-1], x[length // 2] = 7, 3
    dist.broadcast(x, 0)
    assert x[-1].item() == 7
    assert x[length // 2].item() == 3
    assert x[1 << 31].item() == 0


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_more_than_two_to_the_31_elements_work() -> None:
    run_ranks(over_two_to_the_31, 2, backend="epee", timeout_s=170)


def sums_and_messages_over_two_to_the_31(rank: int, num_ranks: int) -> None:
    length = (1 << 31) + 5
    x = torch.zeros(length, dtype=torch.uint8)
    x[-1], x[length // 2], x[1 << 31] = 7, 3, rank + 1
    dist.all_reduce(x)  # in place, in rounds, through a private copy
    assert [x[i].item() for i in (0, length // 2, 1 << 31, -1)] == [0, 6, 3, 14]
    if rank == 0:
        dist.send(x, 1)
    else:
        y = torch.empty(length, dtype=torch.uint8)
        dist.recv(y, 0)
        assert torch.equal(x, y)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif("HUGE_TESTS" not in os.environ, reason="10 GiB of memory and a minute: set HUGE_TESTS=1 to run it")
def test_sums_and_messages_of_more_than_two_to_the_31_elements_work() -> None:
    run_ranks(sums_and_messages_over_two_to_the_31, 2, backend="epee", timeout_s=290)
