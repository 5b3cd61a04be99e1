"""Lists of unlike sizes, and PREMUL_SUM, on "GPU" tensors with the kernels' own sources, beside CPU tensors."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from tests.backend.test_staging import _device, _plain, on_gpu
from tests.collectives import cases, mask_cases, pool_cases
from tests.collectives.cases import closed_at_end, give_half, look_soon

Placing = Callable[[torch.Tensor], torch.Tensor]
premul: Callable[[Any], Any] = torch._C._distributed_c10d._make_nccl_premul_sum
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64)
SIZES = ((3, 1, 2), (0, 5, 2), (4, 0, 0), (700, 12_001, 9_000), (40_000, 1, 0))  # of the ranks; the last are large


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor, wherever it is."""
    return tensor.cpu() if tensor.device.type == "cuda" else _plain(tensor)


def same_bits(got: torch.Tensor, wanted: torch.Tensor, what: Any) -> None:
    assert torch.equal(plain_of(got).contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)), what


def opts(kind: str, op: Any) -> Any:
    options = getattr(torch._C._distributed_c10d, kind)()
    options.reduceOp = op
    options.asyncOp = False
    return options


def products(
    rank: int, num_ranks: int, to: Placing = on_gpu, counts: tuple[int, ...] = (5, 30_001), dtypes: Any = FLOATS
) -> None:
    """Every reduction by PREMUL_SUM has the bits of CPU tensors and leaves its inputs."""
    group: Any = dist.group.WORLD
    op = premul(1 / (3 + rank))
    for dtype in dtypes:
        for seed, count in enumerate(counts):
            mine = cases._values(rank, count, dtype, seed)
            wide = cases._values(rank, count * num_ranks, dtype, seed + 10)
            found: list[list[torch.Tensor]] = []
            for place in (torch.clone, to):
                x, root, listed, single, both = (place(mine) for _ in range(5))
                dist.all_reduce(x, op=op)
                dist.reduce(root, num_ranks - 1, op=op)
                given, kept = place(wide), place(wide)
                dist.reduce_scatter(listed, list(given.split(count)), op=op)
                group._reduce_scatter_base(single, given, opts("ReduceScatterOptions", op))
                in_place = kept[rank * count : (rank + 1) * count]
                group._reduce_scatter_base(in_place, kept, opts("ReduceScatterOptions", op))
                group.allreduce_coalesced([both, other := place(wide)], opts("AllreduceCoalescedOptions", op))
                found.append([x, root, listed, single, kept, both, other, given])
            for number, (wanted, got) in enumerate(zip(*found, strict=True)):
                same_bits(got, wanted, (dtype, count, number))


def products_emulated(rank: int, num_ranks: int) -> None:
    """See there; also strided, asynchronous, and with a factor on the "GPU"."""
    with closed_at_end(half := give_half(rank)):
        products(rank, num_ranks)
        x = on_gpu(torch.arange(12.0).view(3, 4))
        work = dist.all_reduce(x.t(), op=premul(on_gpu(torch.tensor([0.5 + rank]))), async_op=True)
        assert work is not None
        work.wait()
        factor = sum(0.5 + peer for peer in range(num_ranks))
        assert torch.equal(_plain(x), torch.arange(12.0).view(3, 4) * factor)
        for _ in range(3):  # calls that look like earlier ones
            dist.all_reduce(y := on_gpu(torch.full((7,), 4.0)), op=premul(0.25))
            assert _plain(y).tolist() == [num_ranks] * 7
            dist.all_reduce(y)
            assert _plain(y).tolist() == [num_ranks**2] * 7
        with pytest.raises(epee.MismatchError, match="ranks disagree"):
            look_soon(lambda: dist.all_reduce(y, op=premul(1.0) if rank else dist.ReduceOp.SUM), half)
        with pytest.raises(epee.InvalidArgument, match="PREMUL_SUM does not exist for"):
            dist.all_reduce(on_gpu(torch.ones(3, dtype=torch.int32)), op=premul(2.0))
        with pytest.raises(epee.InvalidArgument, match="the factor must be a real number"):
            dist.all_reduce(y, op=premul(torch.tensor(1j)))
        dist.all_reduce(y := on_gpu(torch.ones(2)))
        assert _plain(y).tolist() == [num_ranks] * 2


def unlike(
    rank: int, num_ranks: int, to: Placing = on_gpu, scale: int = 1, members: tuple[int, ...] | None = None
) -> None:
    """Lists of unlike sizes give what closed forms give, contiguous, as views of one tensor, strided, asynchronous.

    Rows of ranks that are no `members` stay as they were.
    """
    members = tuple(range(num_ranks)) if members is None else members
    for seed, pattern in enumerate(SIZES):
        sizes = [pattern[r % len(pattern)] * scale for r in range(num_ranks)]
        n, first = sizes[rank], sum(sizes[:rank])
        total = sum(sizes)
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            rows = [(torch.arange(total) * (peer + 2) % 31 + seed).to(dtype) for peer in range(num_ranks)]
            gathered = torch.cat(
                [rows[r][: sizes[r]] if r in members else torch.full((sizes[r],), -1, dtype=dtype)
                 for r in range(num_ranks)]
            )  # fmt: skip
            summed = sum(rows[r] for r in members)
            assert isinstance(summed, torch.Tensor)
            wanted = summed[first : first + n]
            what = (sizes, dtype)
            views = to(torch.full((total,), -1, dtype=dtype))
            dist.all_gather(list(views.split(sizes)), to(rows[rank][:n]))
            same_bits(views, gathered, what)
            apart = [to(torch.full((2, k), -1, dtype=dtype)) for k in sizes]
            strided = to(rows[rank][:n].repeat_interleave(2))[::2]
            work = dist.all_gather([out[1] for out in apart], strided, async_op=True)
            assert work is not None
            work.wait()
            same_bits(torch.cat([plain_of(out)[1] for out in apart]), gathered, what)
            kept = to(torch.full((total,), -1, dtype=dtype))
            kept[first : first + n] = to(rows[rank][:n])
            dist.all_gather(list(kept.split(sizes)), kept[first : first + n])  # in place
            same_bits(kept, gathered, what)
            given = to(rows[rank])
            out = to(torch.zeros(n, dtype=dtype))
            dist.reduce_scatter(out, list(given.split(sizes)))
            same_bits(out, wanted, what)
            same_bits(given, rows[rank], what)
            work = dist.reduce_scatter(given[first : first + n], list(given.split(sizes)), async_op=True)  # in place
            assert work is not None
            work.wait()
            same_bits(given[first : first + n], wanted, what)
            spread = to(rows[rank].repeat_interleave(2))[::2]
            dist.reduce_scatter(out, list(spread.split(sizes)), op=dist.ReduceOp.MAX)
            same_bits(out, torch.stack([rows[r] for r in members]).amax(0)[first : first + n], what)


def unlike_emulated(rank: int, num_ranks: int) -> None:
    """See there; lists that do not fit each other are errors on all ranks, and the group works on."""
    with closed_at_end(half := give_half(rank)):
        unlike(rank, num_ranks)
        sizes = [r + 1 for r in range(num_ranks)]
        x = on_gpu(torch.ones(sizes[rank]))
        wrong = [k + (rank == 0 and r == 1) for r, k in enumerate(sizes)]  # rank 0 expects more of rank 1
        with pytest.raises(epee.MismatchError, match="ranks disagree"):
            look_soon(lambda: dist.all_gather([on_gpu(torch.zeros(k)) for k in wrong], x), half)
        mine = [2] * num_ranks if rank == 1 else sizes
        given = [on_gpu(torch.ones(k)) for k in mine]
        with pytest.raises(epee.MismatchError, match="ranks disagree"):
            look_soon(lambda: dist.reduce_scatter(on_gpu(torch.zeros(mine[rank])), given), half)
        own = [on_gpu(torch.zeros(k + (rank == 0))) for k in sizes]  # rank 0's own entry does not fit its input
        with pytest.raises(epee.MismatchError if rank else epee.InvalidArgument, match=r"disagree|elements"):
            look_soon(lambda: dist.all_gather(own, x), half)
        dist.all_reduce(y := on_gpu(torch.ones(2)))
        assert _plain(y).tolist() == [num_ranks] * 2


def alone(rank: int, num_ranks: int) -> None:
    """A group of one rank."""
    with closed_at_end(give_half(rank)):
        unlike(rank, num_ranks)
        products(rank, num_ranks)


def pooled(rank: int, num_ranks: int) -> None:
    """Tensors in memory pools, on all ranks and on one."""
    half, pool = pool_cases.give_pool(rank)
    with closed_at_end(half):
        in_pool = functools.partial(pool_cases.in_pool, pool)
        unlike(rank, num_ranks, in_pool)
        unlike(rank, num_ranks, in_pool if rank else on_gpu)
        products(rank, num_ranks, in_pool, dtypes=(torch.float32,))


def masked(rank: int, num_ranks: int, folder: str, victim: int) -> None:
    """In mode "mask", before and after a death."""
    half = mask_cases.init(rank, num_ranks, folder)
    unlike(rank, num_ranks)
    products(rank, num_ranks, counts=(5, 40_001), dtypes=(torch.bfloat16,))
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    left = tuple(r for r in range(num_ranks) if r != victim)
    sizes = [2 * r + 1 for r in range(num_ranks)]
    views = [on_gpu(torch.full((k,), -1.0)) for k in sizes]
    dist.all_gather(views, on_gpu(torch.full((sizes[rank],), rank + 5.0)))  # the call that loses the rank
    for r, got in enumerate(views):
        assert _plain(got).tolist() == [(r + 5.0) if r in left else 0.0] * sizes[r]
    assert dist.group.WORLD.last_contributors() == left  # type: ignore[union-attr]
    unlike(rank, num_ranks, members=left)
    dist.all_reduce(y := on_gpu(torch.full((5,), 2.0)), op=premul(0.5 + rank))
    assert _plain(y).tolist() == [2 * sum(0.5 + r for r in left)] * 5
    with closed_at_end(half):
        pass


def staged(rank: int, num_ranks: int) -> None:
    """Without kernels both go through CPU memory."""
    device = _device()

    def settled(values: torch.Tensor) -> torch.Tensor:
        return on_gpu(values)

    x = settled(torch.full((3,), 4.0))
    dist.all_reduce(x, op=premul(0.5 + rank))
    sizes = [2 * r + 1 for r in range(num_ranks)]
    outs = [settled(torch.zeros(k)) for k in sizes]
    dist.all_gather(outs, settled(torch.full((sizes[rank],), rank + 1.0)))
    out = settled(torch.zeros(sizes[rank]))
    work = dist.reduce_scatter(out, [settled(torch.full((k,), float(k))) for k in sizes], async_op=True)
    assert work is not None
    work.wait()
    device.synchronize()
    assert _plain(x).tolist() == [4 * sum(0.5 + r for r in range(num_ranks))] * 3
    for r, got in enumerate(outs):
        assert _plain(got).tolist() == [r + 1.0] * sizes[r]
    assert _plain(out).tolist() == [num_ranks * float(sizes[rank])] * sizes[rank]
