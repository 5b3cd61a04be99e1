"""The moves of a collective of mode "mask": as in `cuda/moves.py`, for kernels that mend a loss (`settle.cuh`)."""

from __future__ import annotations

from ....gpu.ranks import room_of
from ..moves import NOTHING, Move

ONE_ROW = ("all_reduce", "broadcast", "all_gather", "reduce", "gather", "vote")  # all get the same row of a rank


def masked(move: Move, rank: int, num_ranks: int, num_entries: int) -> Move:
    """Return a move for the kernels of mode "mask".

    Args:
        move: made for lists of `num_entries` ranks: the group's, or fewer, if the highest ones are lost.
        rank: this process's.
        num_ranks: of the group.
        num_entries: as for `move`.
    """
    if num_entries != num_ranks:
        move = widened(move, num_ranks, num_entries)
    if move.op not in ("reduce", "gather"):
        return move
    outputs = move.outputs if rank == move.root else NOTHING[num_ranks]
    # all ranks receive which ranks count; only the root keeps the result
    return move._replace(takers=(1 << num_ranks) - 1, outputs=outputs)


def widened(move: Move, num_ranks: int, num_entries: int) -> Move:
    """Return a move of all ranks of the group; those beyond the lists get nothing and have no output row."""
    everybody, listed = (1 << num_ranks) - 1, (1 << num_entries) - 1
    sources = everybody if move.sources == listed else move.sources
    takers = everybody & ~(1 << move.root) if move.op == "broadcast" else move.takers
    rows = (move.inputs, move.outputs, move.in_bytes, move.out_bytes)
    room = room_of(num_ranks) - room_of(num_entries)
    inputs, outputs, in_bytes, out_bytes = ((*row, *(0,) * room) for row in rows)
    return move._replace(
        inputs=inputs,
        outputs=outputs,
        in_bytes=in_bytes,
        out_bytes=out_bytes,
        sources=sources,
        takers=everybody if takers == listed else takers,
    )
