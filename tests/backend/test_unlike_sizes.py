"""Lists of unlike sizes in all_gather and reduce_scatter, as torch documents and vLLM calls them, on CPU tensors."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from tests.harness import run_ranks
from tests.hosts import run_on_loopbacks

from . import cases
from .cases import Op, Placed, reduced, values

# With 64 KiB of staging memory: one round, all rounds at once, and halves used again; with ranks that have nothing.
SIZES = ((3, 1, 2, 5), (0, 4, 0, 1), (0, 0, 0, 0), (30_001, 7, 12_000, 0), (5, 70_001, 0, 20_000), (1, 0, 150_003, 2))


def lists(rank: int, num_ranks: int, dtypes: tuple[torch.dtype, ...], members: tuple[int, ...] | None = None) -> None:
    """Every operation, contiguous, strided, as views of one tensor, asynchronous and in place, beside closed forms."""
    members = tuple(range(num_ranks)) if members is None else members
    salt = cases.salts()
    for pattern in SIZES:
        sizes = list(pattern[:num_ranks])
        total, n, first = sum(sizes), sizes[rank], sum(sizes[:rank])
        for dtype in dtypes:
            s, what = salt(), f"{dtype} {sizes}"
            parts = [values(r, (sizes[r],), dtype, s) for r in range(num_ranks)]
            wholes = [values(r, (total,), dtype, s + 500) for r in range(num_ranks)]
            left = torch.zeros(total, dtype=dtype)  # what entries of ranks that take no part keep
            gathered = torch.cat([parts[r] if r in members else torch.zeros_like(parts[r]) for r in range(num_ranks)])
            wanted = {
                op: reduced([wholes[r][first : first + n] for r in members], op) if n else torch.zeros(0, dtype=dtype)
                for op in (Op.SUM, Op.AVG, Op.MAX)
            }
            for strided in (False, True):
                outs = [Placed(torch.zeros(k, dtype=dtype), strided) for k in sizes]
                dist.all_gather([out.tensor for out in outs], Placed(parts[rank], strided).tensor)
                for r, out in enumerate(outs):
                    out.check(parts[r] if r in members else torch.zeros_like(parts[r]), f"all_gather {r} {what}")
                given = Placed(wholes[rank], strided)
                for op, result in wanted.items():
                    got = Placed(torch.zeros(n, dtype=dtype), strided)
                    dist.reduce_scatter(got.tensor, list(given.tensor.split(sizes)), op=op)
                    got.check(result, f"reduce_scatter {op} {what}")
                given.check(wholes[rank], f"input of reduce_scatter {what}")
            views = left.clone()
            works: list[Any] = [dist.all_gather(list(views.split(sizes)), parts[rank], async_op=True)]
            mine = wholes[rank].clone()
            works += [dist.reduce_scatter(mine[first : first + n], list(mine.split(sizes)), async_op=True)]  # in place
            for work in reversed(works):
                assert work.wait()
            cases.same(views, gathered, f"views {what}")
            cases.same(mine[first : first + n], wanted[Op.SUM], f"in place {what}")


def run(rank: int, num_ranks: int, folder: str, fault_mode: str) -> None:
    cases.init(rank, num_ranks, folder, staging_bytes=64 << 10, fault_mode=fault_mode)
    lists(rank, num_ranks, (torch.float32, torch.bfloat16) if num_ranks > 2 else (torch.int16, torch.float64))


@pytest.mark.parametrize(("num_ranks", "fault_mode"), [(1, "raise"), (2, "raise"), (3, "mask"), (4, "raise")])
def test_every_rank_gets_entries_of_their_own_sizes(num_ranks: int, fault_mode: str, tmp_path: Path) -> None:
    run_ranks(run, num_ranks, str(tmp_path), fault_mode, backend=None)


def over_hosts(rank: int, num_ranks: int) -> None:
    lists(rank, num_ranks, (torch.int32,))  # exact in any order of sums


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 1), (0, 1, 0, 2)])
def test_lists_over_hosts_give_the_same(placement: tuple[int, ...]) -> None:
    run_on_loopbacks(over_hosts, placement, timeout_s=80)


def survivors(rank: int, num_ranks: int, folder: str) -> None:
    cases.init(rank, num_ranks, folder, fault_mode="mask", staging_bytes=64 << 10)
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lists(rank, num_ranks, (torch.float32,), (0, 2))
    group: Any = dist.group.WORLD
    assert group.last_contributors() == (0, 2)


def test_survivors_of_a_death_keep_what_their_entries_for_it_held(tmp_path: Path) -> None:
    run_ranks(survivors, 3, str(tmp_path), backend=None, dead=(1,))


def mourners(rank: int, num_ranks: int) -> None:
    sizes = [r + 1 for r in range(num_ranks)]
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    outs = [torch.zeros(k) for k in sizes]
    with pytest.raises(epee.RankFailedError):
        dist.all_gather(outs, torch.ones(sizes[rank]))
    assert not any(out.any() for out in outs)
    dist.reduce_scatter(out := torch.zeros(sizes[rank]), [torch.ones(k) for k in sizes])
    assert out.tolist() == [num_ranks - 1.0] * sizes[rank]


def test_a_death_in_mode_raise_leaves_the_outputs_and_the_group_works_on() -> None:
    run_ranks(mourners, 3, backend="epee", dead=(1,))


def different(rank: int, num_ranks: int) -> list[str]:
    """Make calls whose lists do not fit each other; return what this rank is told."""
    sizes = [r + 1 for r in range(num_ranks)]
    more = [k + (r == num_ranks - 1) for r, k in enumerate(sizes)]
    told = []

    def refused(call: Any, kind: Any = epee.MismatchError) -> None:
        with pytest.raises(kind) as caught:
            call()
        told.append(str(caught.value))

    def ones(counts: list[int]) -> list[torch.Tensor]:
        return [torch.ones(k) for k in counts]

    refused(lambda: dist.all_gather(ones(more if rank == 0 else sizes), torch.ones(sizes[rank])))
    swapped = [sizes[0], *sizes[:0:-1]] if rank == 0 else sizes  # the longest entry is as long
    refused(lambda: dist.all_gather(ones(swapped), torch.ones(sizes[rank])))
    refused(lambda: dist.reduce_scatter(torch.ones(sizes[rank]), ones(swapped)))
    longest = [sizes[-1]] * num_ranks if rank == 0 else sizes  # of one size on one rank
    refused(lambda: dist.reduce_scatter(torch.ones(longest[rank]), ones(longest)))
    own = [k + (rank == 0) for k in sizes]
    refused(
        lambda: dist.all_gather(ones(own), torch.ones(sizes[rank])),
        epee.MismatchError if rank else epee.InvalidArgument,
    )
    refused(
        lambda: dist.reduce_scatter(torch.ones(sizes[rank]), ones(own)),
        epee.MismatchError if rank else epee.InvalidArgument,
    )
    group: Any = dist.group.WORLD
    mixed = [torch.ones(k, dtype=torch.float64 if r else torch.float32) for r, k in enumerate(sizes)]
    refused(
        lambda: group.allgather([mixed], [torch.ones(sizes[rank])]).wait(), (epee.MismatchError, epee.InvalidArgument)
    )
    refused(
        lambda: dist.gather(torch.ones(sizes[rank]), ones(sizes) if rank == 0 else None),
        (epee.MismatchError, epee.InvalidArgument),
    )
    dist.all_gather(outs := ones(sizes), torch.full((sizes[rank],), rank + 3.0))
    assert [out[0].item() for out in outs] == [r + 3.0 for r in range(num_ranks)]
    return told


def test_lists_that_do_not_fit_each_other_are_refused_on_all_ranks_in_words() -> None:
    for told in run_ranks(different, 3, backend="epee"):
        assert "3 elements" in told[0]
        assert "4 elements" in told[0]
        assert all("different lists of shapes" in text for text in told[1:4])
        assert all("must have" in text for text in told[4:6])


def all_gatherv(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Gather rows as vLLM's communicators for devices without NCCL do."""
    parts = [torch.empty(k, *x.shape[1:]) for k in sizes]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def reduce_scatterv(x: torch.Tensor, sizes: list[int], rank: int) -> torch.Tensor:
    """Reduce rows as vLLM's communicators do."""
    out = torch.empty(sizes[rank], *x.shape[1:])
    dist.reduce_scatter(out, list(x.split(sizes, dim=0)))
    return out


def rows(rank: int, num_ranks: int) -> None:
    for sizes in ([4, 7, 2], [0, 5, 1], [3, 3, 3]):
        mine = torch.arange(sizes[rank] * 8.0).view(-1, 8) + 100 * rank
        whole = all_gatherv(mine, sizes)
        wanted = torch.cat([torch.arange(sizes[r] * 8.0).view(-1, 8) + 100 * r for r in range(num_ranks)])
        assert torch.equal(whole, wanted)
        assert torch.equal(reduce_scatterv(whole, sizes, rank), mine * num_ranks)


def test_rows_are_gathered_and_reduced_as_vllm_does_it() -> None:
    run_ranks(rows, 3, backend="epee")
