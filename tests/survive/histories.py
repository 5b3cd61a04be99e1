"""What a rank logs about its calls, and the checks over all survivors' logs (C-2 ... C-5, C-8, C-14 of the notes).

A rank logs one `Entry` per call: how it ended, over whom, in which epoch, and the values it got. All results are
recomputed from the contributors, so a result that mixes contributors, or differs between survivors, is found.

For classes U and P alike survivors must tell the same about a call: status, contributors, epoch. (Class P would allow
contributors to differ; this backend decides whole calls.) What differs by rank in class P are the values. Messages
(`send_recv`: everybody exchanges one message with everybody) are judged pair by pair.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

CLASS_U = ("all_reduce", "all_gather", "broadcast", "barrier")
CLASS_P = ("reduce", "gather", "scatter", "reduce_scatter", "all_to_all")
COLLECTIVES = CLASS_U + CLASS_P
ALL_OPS = (*COLLECTIVES, "send_recv")


class Entry(NamedTuple):
    """One call of one rank. `status` is "ok" or the name of the error; `ranks` whom the error names, `text` it."""

    seq: int
    op: str
    status: str
    ranks: tuple[int, ...]
    epoch: int
    contributors: tuple[int, ...]
    value: list[int]
    elapsed_s: float
    rank: int
    root: int = 0
    ended_ns: int = 0
    text: str = ""


UNTOUCHED = -7


def contribution(rank: int, seq: int) -> int:
    """Return what `rank` puts into call `seq`: no two subsets of ranks have the same sum."""
    return (1 << rank) + 1000 * seq


def part(rank: int, seq: int, dst_rank: int) -> int:
    """Return what `rank` puts into call `seq` for `dst_rank`, where each destination gets its own."""
    return contribution(rank, seq) + 1_000_000_000 * (dst_rank + 1)


def expected(
    op: str, seq: int, contributors: tuple[int, ...], num_ranks: int, rank: int = 0, root: int | None = None
) -> list[int]:
    """Return the values that `rank` must have after call `seq` with these contributors."""
    ranks = range(num_ranks)
    root = contributors[0] if root is None else root
    if op == "all_reduce":
        return [sum(contribution(other, seq) for other in contributors)]
    if op == "all_gather":
        return [contribution(other, seq) if other in contributors else UNTOUCHED for other in ranks]
    if op == "broadcast":
        return [contribution(root, seq)]
    if op == "barrier":
        return []
    if op == "reduce":
        mine = contribution(rank, seq)
        return [sum(contribution(other, seq) for other in contributors) if rank == root else mine]
    if op == "gather":
        return expected("all_gather", seq, contributors, num_ranks) if rank == root else []
    if op == "scatter":
        return [part(root, seq, rank)]
    if op == "reduce_scatter":
        return [sum(part(other, seq, rank) for other in contributors)]
    if op == "all_to_all":
        return [part(other, seq, rank) if other in contributors else UNTOUCHED for other in ranks]
    raise ValueError(op)


def check_histories(histories: list[list[Entry]], num_ranks: int, victims: set[int]) -> None:
    """Check the logs of all survivors against each other and against the closed form."""
    assert len({len(history) for history in histories}) == 1, [len(history) for history in histories]
    for entries in zip(*histories, strict=True):
        if entries[0].op == "send_recv":
            for entry in entries:
                _check_messages(entry, num_ranks, victims)
            continue
        told: set[Any] = {entry._replace(elapsed_s=0.0, rank=-1, value=(), ended_ns=0, text="") for entry in entries}
        assert len(told) == 1, f"survivors disagree: {entries}"
        for entry in entries:
            _check_entry(entry, num_ranks, victims)


def _check_entry(entry: Entry, num_ranks: int, victims: set[int]) -> None:
    if entry.status == "ok":
        root = entry.contributors[0] if entry.root < 0 else entry.root
        want = expected(entry.op, entry.seq, entry.contributors, num_ranks, entry.rank, root)
        assert entry.value == want, (entry, want)
        return
    assert entry.status == "RankFailedError", entry
    assert entry.ranks, entry
    assert set(entry.ranks) <= victims, entry
    assert all(value in before(entry) for value in entry.value), f"a failed call wrote: {entry}"


def _check_messages(entry: Entry, num_ranks: int, victims: set[int]) -> None:
    """A survivor's message has come; a victim's has come whole, or there was an error and nothing was written."""
    assert entry.status in ("ok", "RankFailedError"), entry
    assert set(entry.ranks) <= victims, entry
    for peer in range(num_ranks):
        allowed = [part(peer, entry.seq, entry.rank)] if peer != entry.rank else [UNTOUCHED]
        if peer in entry.ranks:
            allowed.append(UNTOUCHED)
        assert entry.value[peer] in allowed, (peer, entry)


def before(entry: Entry) -> list[int]:
    """Return the values that the tensor of a call may hold before it."""
    own = contribution(entry.rank, entry.seq)
    return {"all_reduce": [own], "reduce": [own], "broadcast": [own, UNTOUCHED]}.get(entry.op, [UNTOUCHED])


def make_call(
    op: str, rank: int, num_ranks: int, seq: int, dist: Any, length: int = 1, root: int | None = None
) -> tuple[Any, Any]:
    """Return (function that makes the call, function that reads its result) for call `seq`.

    `root` is that of rooted calls; None: the lowest rank that takes part.
    """
    if root is None:
        root = int(dist.group.WORLD.active_ranks().nonzero()[0])
    mine = torch.full((length,), contribution(rank, seq), dtype=torch.int64)
    if op == "all_reduce":
        return lambda: dist.all_reduce(mine), lambda: sorted(set(mine.tolist()))
    if op == "reduce":
        return lambda: dist.reduce(mine, root), lambda: sorted(set(mine.tolist()))
    if op == "all_gather":
        out = torch.full((num_ranks * length,), UNTOUCHED, dtype=torch.int64)
        return lambda: dist.all_gather_into_tensor(out, mine), lambda: _rows(out, num_ranks)
    if op == "broadcast":
        if rank != root:
            mine.fill_(UNTOUCHED)
        return lambda: dist.broadcast(mine, root), lambda: sorted(set(mine.tolist()))
    if op == "barrier":
        return dist.barrier, list
    return _make_pairwise(op, rank, num_ranks, seq, dist, length, root, mine)


def _make_pairwise(
    op: str, rank: int, num_ranks: int, seq: int, dist: Any, length: int, root: int, mine: torch.Tensor
) -> tuple[Any, Any]:
    out = torch.full((num_ranks * length,), UNTOUCHED, dtype=torch.int64)
    one = out[:length]
    parts = torch.tensor([part(rank, seq, peer) for peer in range(num_ranks)]).repeat_interleave(length)
    if op == "gather":
        rows = list(out.view(num_ranks, length)) if rank == root else None
        return lambda: dist.gather(mine, rows, root), lambda: _rows(out, num_ranks) if rank == root else []
    if op == "scatter":
        rows = list(parts.view(num_ranks, length)) if rank == root else None
        return lambda: dist.scatter(one, rows, root), lambda: sorted(set(one.tolist()))
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(one, parts), lambda: sorted(set(one.tolist()))
    if op == "all_to_all":
        return lambda: dist.all_to_all_single(out, parts), lambda: _rows(out, num_ranks)
    raise ValueError(op)


def _rows(out: torch.Tensor, num_ranks: int) -> list[int]:
    """Return the one value of each row; a row of several values shows them all, so it is never right."""
    return [value for row in out.view(num_ranks, -1).tolist() for value in sorted(set(row))]
