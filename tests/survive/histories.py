"""What a rank logs about its calls, and the checks over the logs of all survivors (C-2, C-3, C-5, C-8 of the notes).

A rank logs one `Entry` per collective call: how it ended, over whom, in which epoch, and the values it got. All results
are recomputed from the contributors, so a result that mixes contributors, or differs between survivors, is found.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Entry(NamedTuple):
    """One call of one rank. `status` is "ok" or the name of the error; `ranks` whom the error names."""

    seq: int
    op: str
    status: str
    ranks: tuple[int, ...]
    epoch: int
    contributors: tuple[int, ...]
    value: list[int]
    elapsed_s: float
    rank: int


UNTOUCHED = -7


def contribution(rank: int, seq: int) -> int:
    """Return what `rank` puts into call `seq`: no two subsets of ranks have the same sum."""
    return (1 << rank) + 1000 * seq


def expected(op: str, seq: int, contributors: tuple[int, ...], num_ranks: int) -> list[int]:
    """Return the values that call `seq` must give with these contributors."""
    if op == "all_reduce":
        return [sum(contribution(rank, seq) for rank in contributors)]
    if op == "all_gather":
        return [contribution(rank, seq) if rank in contributors else UNTOUCHED for rank in range(num_ranks)]
    if op == "broadcast":
        return [contribution(contributors[0], seq)]
    if op == "barrier":
        return []
    raise ValueError(op)


def check_histories(histories: list[list[Entry]], num_ranks: int, victims: set[int]) -> None:
    """Check the logs of all survivors against each other and against the closed form."""
    assert len({len(history) for history in histories}) == 1, [len(history) for history in histories]
    for entries in zip(*histories, strict=True):
        told: set[Any] = {
            entry._replace(elapsed_s=0.0, rank=-1, value=tuple(entry.value) if entry.status == "ok" else ())
            for entry in entries
        }
        assert len(told) == 1, f"survivors disagree: {told}"
        entry = entries[0]
        if entry.status == "ok":
            assert entry.value == expected(entry.op, entry.seq, entry.contributors, num_ranks), entry
        else:
            assert entry.status == "RankFailedError", entry
            assert entry.ranks, entry
            assert set(entry.ranks) <= victims, entry
            for failed in entries:
                assert all(value in before(failed) for value in failed.value), f"a failed call wrote: {failed}"


def before(entry: Entry) -> list[int]:
    """Return the values that the tensor of a call may hold before it."""
    own = contribution(entry.rank, entry.seq)
    return {"all_gather": [UNTOUCHED], "all_reduce": [own], "broadcast": [own, UNTOUCHED]}.get(entry.op, [])


def make_call(op: str, rank: int, num_ranks: int, seq: int, dist: Any, length: int = 1) -> tuple[Any, Any]:
    """Return (function that makes the call, function that reads its result) for call `seq`."""
    mine = torch.full((length,), contribution(rank, seq), dtype=torch.int64)
    if op == "all_reduce":
        return lambda: dist.all_reduce(mine), lambda: sorted(set(mine.tolist()))
    if op == "all_gather":
        out = torch.full((num_ranks * length,), UNTOUCHED, dtype=torch.int64)
        return (
            lambda: dist.all_gather_into_tensor(out, mine),
            lambda: [value for row in out.view(num_ranks, length).tolist() for value in sorted(set(row))],
        )
    if op == "broadcast":
        root = int(dist.group.WORLD.active_ranks().nonzero()[0])
        if rank != root:
            mine.fill_(UNTOUCHED)
        return lambda: dist.broadcast(mine, root), lambda: sorted(set(mine.tolist()))
    return dist.barrier, list
