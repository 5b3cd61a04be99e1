"""What the tests of groups over hosts share: every operation beside its closed form, on any placement."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.backend.cases import all_gather_single, reduce_scatter_single

FLOAT = torch.float32


def full(count: int, value: float) -> torch.Tensor:
    """Return a vector of equal numbers."""
    return torch.full((count,), value, dtype=FLOAT, device="cpu")


def ramp(count: int, shift: float = 0.0) -> torch.Tensor:
    """Return small whole numbers, whose sums are exact in any order."""
    return torch.arange(count, dtype=FLOAT, device="cpu") % 97 + shift


def everything(rank: int, num_ranks: int, sizes: tuple[int, ...]) -> int:
    """Make every collective and messages in a ring, for vectors of each size; return how many calls were checked."""
    num_checked = 0
    for count in sizes:
        num_checked += _to_all(rank, num_ranks, count) + _with_root(rank, num_ranks, count)
        _ring(rank, num_ranks, count)
    found: list[object] = [None] * num_ranks
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": peer} for peer in range(num_ranks)]
    dist.barrier()
    return num_checked


def _to_all(rank: int, num_ranks: int, count: int) -> int:
    x = ramp(count, rank)
    dist.all_reduce(x)
    assert torch.equal(x, ramp(count) * num_ranks + sum(range(num_ranks)))
    rows = torch.empty(num_ranks * count, dtype=FLOAT, device="cpu")
    all_gather_single(rows, ramp(count, rank))
    for peer in range(num_ranks):
        assert torch.equal(rows.view(num_ranks, -1)[peer], ramp(count, peer))
    there, back = ramp(num_ranks * count, rank), torch.empty(num_ranks * count, dtype=FLOAT, device="cpu")
    dist.all_to_all_single(back, there)
    for peer in range(num_ranks):
        assert torch.equal(back.view(num_ranks, -1)[peer], ramp(num_ranks * count, peer).view(num_ranks, -1)[rank])
    share = torch.empty(count, dtype=FLOAT, device="cpu")
    reduce_scatter_single(share, ramp(num_ranks * count, rank))
    mine = ramp(num_ranks * count).view(num_ranks, -1)[rank]
    assert torch.equal(share, mine * num_ranks + sum(range(num_ranks)))
    return 4


def _with_root(rank: int, num_ranks: int, count: int) -> int:
    for root in range(num_ranks):
        x = ramp(count, rank)
        dist.broadcast(x, root)
        assert torch.equal(x, ramp(count, root))
        rows = [torch.empty(count, dtype=FLOAT, device="cpu") for _ in range(num_ranks)]
        dist.gather(ramp(count, rank), rows if rank == root else None, dst=root)
        assert rank != root or all(torch.equal(row, ramp(count, peer)) for peer, row in enumerate(rows))
        segments = [ramp(count, 10 * peer + root) for peer in range(num_ranks)]
        dist.scatter(x, segments if rank == root else None, src=root)
        assert torch.equal(x, ramp(count, 10 * rank + root))
        x = ramp(count, rank)
        dist.reduce(x, root)
        assert rank != root or torch.equal(x, ramp(count) * num_ranks + sum(range(num_ranks)))
    return 4 * num_ranks


def _ring(rank: int, num_ranks: int, count: int) -> None:
    to, source = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    got = torch.empty(count, dtype=FLOAT, device="cpu")
    ops = [dist.P2POp(dist.isend, ramp(count, rank), to), dist.P2POp(dist.irecv, got, source)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(got, ramp(count, source))
    if rank == 0:  # and from anybody
        for _ in range(num_ranks - 1):
            word = torch.empty(3, dtype=FLOAT, device="cpu")
            peer = dist.recv(word)
            assert torch.equal(word, full(3, peer))
    else:
        dist.send(full(3, rank), 0)
