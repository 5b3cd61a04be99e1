"""What the tests of growth have in common: starting founders and newcomers, every operation with its closed form."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import epee


def start(rank: int, num_ranks: int, folder: str, mode: str, joins: bool = False, **options: Any) -> Any:
    store = dist.FileStore(str(Path(folder) / "store"), -1)
    chosen = epee.BackendOptions(fault_mode=mode, op_timeout=20.0, is_extension=joins, **options)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=chosen)
    return dist.group.WORLD


def total() -> int:
    x = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(x)
    return int(x)


def await_ranks(group: Any, num_ranks: int) -> None:
    """Poll as the survivors do until so many ranks take part or ask to; all members leave the loop at the same call."""
    deadline = time.monotonic() + 30
    while group.get_num_synced_ranks() < num_ranks:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def every_operation(group: Any, present: list[int]) -> None:
    """Run every collective over a group that counts `num_slots` ranks of which `present` are there; check all results.

    Places of absent ranks must stay as they were (-7). With Mooncake's names lists end with the highest rank that is
    there, and places of absent ranks below are zero.
    """
    is_mooncakes = group.options.counts_present
    rank, size, n = group.rank(), dist.get_world_size(group) if is_mooncakes else group.num_slots, 5
    absent = 0 if is_mooncakes else -7
    root = present[-1]
    assert group.active_ranks().tolist() == [int(r in present) for r in range(group.num_slots)]
    assert not is_mooncakes or size == 1 + present[-1]

    def row(src: int, dst: int = 0) -> torch.Tensor:
        return torch.arange(n, dtype=torch.int64) + 100 * src + 1000 * dst

    def expected(first: int = 0) -> list[list[int]]:
        return [row(src, first).tolist() if src in present else [absent] * n for src in range(size)]

    def blank(*shape: int) -> torch.Tensor:
        return torch.full(shape, -7, dtype=torch.int64)

    x = row(rank)
    dist.all_reduce(x)
    sums = sum(row(src) for src in present)
    assert torch.equal(x, sums)
    wide = torch.full((300_000,), rank + 1, dtype=torch.int64)  # several rounds
    dist.all_reduce(wide)
    assert wide.unique().tolist() == [sum(src + 1 for src in present)]
    x = row(rank)
    dist.broadcast(x, src=root)
    assert torch.equal(x, row(root))
    x = row(rank)
    dist.reduce(x, dst=root)
    assert torch.equal(x, sums if rank == root else row(rank))
    outs = list(blank(size, n))
    dist.all_gather(outs, row(rank))
    assert [out.tolist() for out in outs] == expected()
    out = blank(size, n)
    dist.all_gather_into_tensor(out, row(rank))
    assert out.tolist() == expected()
    outs = list(blank(size, n))
    dist.gather(row(rank), outs if rank == root else None, dst=root)
    assert [out.tolist() for out in outs] == (expected() if rank == root else [[-7] * n] * size)
    out = blank(n)
    dist.scatter(out, [row(root, dst) for dst in range(size)] if rank == root else None, src=root)
    assert torch.equal(out, row(root, rank))
    mine = [row(rank, dst) for dst in range(size)]
    reduced = sum(row(src, rank) for src in present)
    out = blank(n)
    dist.reduce_scatter(out, mine)
    assert torch.equal(out, reduced)
    out = blank(n)
    dist.reduce_scatter_tensor(out, torch.stack(mine).flatten())
    assert torch.equal(out, reduced)
    outs = list(blank(size, n))
    dist.all_to_all(outs, mine)
    assert [out.tolist() for out in outs] == expected(rank)
    out = blank(size * n)
    dist.all_to_all_single(out, torch.stack(mine).flatten())
    assert out.view(size, n).tolist() == expected(rank)
    out = blank(sum(src + 1 for src in range(size)))
    sent = torch.cat([torch.full((rank + 1,), 10 * rank + dst, dtype=torch.int64) for dst in range(size)])
    dist.all_to_all_single(out, sent, [src + 1 for src in range(size)], [rank + 1] * size)
    for src, part in enumerate(out.split([src + 1 for src in range(size)])):
        assert part.unique().tolist() == [10 * src + rank if src in present else absent]
    outs2 = [[blank(n), blank(2)] for _ in range(size)]
    dist.all_gather_coalesced(outs2, [row(rank), torch.full((2,), rank)])
    assert [pair[0].tolist() for pair in outs2] == expected()
    assert [pair[1].tolist() for pair in outs2] == [
        [src] * 2 if src in present else [absent] * 2 for src in range(size)
    ]
    dist.barrier()
    assert group.last_contributors() == tuple(present)


def ring(group: Any, present: list[int]) -> None:
    """Send around the ranks that are there, small and large, by requests and by blocking calls."""
    rank = group.rank()
    place = present.index(rank)
    after, before = present[(place + 1) % len(present)], present[place - 1]
    for count in (3, 200_000):
        got = torch.zeros(count)
        sent = torch.full((count,), float(rank))
        for request in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, got, before)]
        ):
            request.wait()
        assert got.unique().tolist() == [before]
    token = torch.zeros(1)
    if place == 0:
        dist.send(token, after)
        dist.recv(token, before)
        assert token.item() == len(present) - 1
    else:
        assert dist.recv(token) == before
        dist.send(token + 1, after)
    # once more, by name: a rank whose process ends would end a receive from any source that another still waits in
    if place == 0:
        dist.send(token, after)
        dist.recv(token, before)
    else:
        dist.recv(token, before)
        dist.send(token, after)
