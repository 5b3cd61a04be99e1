"""The moves of a collective on one rank: rows of GPU memory for each rank and from each, in the kernels' format.

Arithmetic only. Rows are contiguous; a row of no bytes has no address. Rows of ranks that take no part are skipped by
the kernels, which alone know those ranks. Input and output may share memory if a function says so: an element is
written by the thread that has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...engine.tensors import CARRIERS
from ...gpu.ranks import MAX_LOCAL, MAX_RANKS, room_of
from .params import OP_NUMBERS, REDUCTIONS

Kind = tuple[torch.dtype | None, str]  # of a reduction; bytes that are only moved have no dtype
MOVED: Kind = (None, "sum")
NOTHING = tuple((0,) * room_of(n) for n in range(MAX_LOCAL + 1))  # by the number of ranks
UNEVEN = -1
PREMUL_SUM = "premul_sum"  # a sum for the kernels; it does not match a SUM of other ranks
_REDUCTION_CODES = {name: number for number, name in enumerate((*REDUCTIONS, PREMUL_SUM), 1)}


class Stretch(NamedTuple):
    """Contiguous memory: its address and its bytes."""

    at: int
    nbytes: int


Rows = Sequence[Stretch]


def row_of(tensor: torch.Tensor) -> Stretch:
    """Return the memory of a contiguous tensor."""
    return Stretch(tensor.data_ptr(), tensor.nbytes)


def rows_of(tensor: torch.Tensor, num_ranks: int) -> list[Stretch]:
    """Return a contiguous tensor cut into equal rows."""
    at, nbytes = tensor.data_ptr(), tensor.nbytes // num_ranks
    return [Stretch(at + rank * nbytes, nbytes) for rank in range(num_ranks)]


class Move(NamedTuple):
    """The move of one call (`params.CollectiveCall`, `CollectiveParams`); tuples have `room_of(num_ranks)` elements.

    Attributes:
        num_bytes: of every row, or `UNEVEN`.
        is_whole: all takers get one and the same row, so it may be cut into shares.
    """

    op: str
    kind: Kind
    signature: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    in_bytes: tuple[int, ...]
    out_bytes: tuple[int, ...]
    num_bytes: int
    sources: int
    takers: int
    root: int = -1
    is_whole: bool = False


def signature_of(op: str, dtype: torch.dtype | None, reduction: str = "", root: int = -1) -> int:
    """Return the signature of a call, equal on all ranks, above the bits of a number of bytes."""
    code = 0 if dtype is None else CARRIERS[dtype].code
    word = OP_NUMBERS[op] | code << 5 | _REDUCTION_CODES.get(reduction, 0) << 11 | (root + 1) << 15
    return word << 40


def _summed(kind: Kind) -> Kind:
    """Return the kind of the kernels that make a reduction."""
    return (kind[0], "sum") if kind[1] == PREMUL_SUM else kind


def _all(value: int, num_ranks: int) -> tuple[int, ...]:
    return (value,) * num_ranks + NOTHING[num_ranks][num_ranks:]


def _only(value: int, rank: int, num_ranks: int) -> tuple[int, ...]:
    nothing = NOTHING[num_ranks]
    return (*nothing[:rank], value, *nothing[rank + 1 :])


def _addresses(rows: Rows, num_ranks: int) -> tuple[int, ...]:
    return (*[row.at for row in rows], *NOTHING[num_ranks][len(rows) :])


def _sizes(rows: Rows, num_ranks: int) -> tuple[int, ...]:
    return (*[row.nbytes for row in rows], *NOTHING[num_ranks][len(rows) :])


def all_reduce(num_ranks: int, x: Stretch, out: Stretch, kind: Kind) -> Move:
    """Reduce `x` of all ranks into `out` on all; they may be the same memory."""
    everybody, size = (1 << num_ranks) - 1, x.nbytes
    sizes, signature = _all(size, num_ranks), signature_of("all_reduce", *kind)
    inputs, outputs = _all(x.at, num_ranks), _all(out.at, num_ranks)
    return Move(
        "all_reduce", _summed(kind), signature, inputs, outputs, sizes, sizes, size, everybody, everybody, -1, True
    )


def reduce(num_ranks: int, rank: int, x: Stretch, out: Stretch, kind: Kind, root: int) -> Move:
    """Reduce `x` of all ranks into `out` on the root, elsewhere unused; they may be the same memory."""
    size, is_root = x.nbytes, rank == root
    return Move(
        "reduce",
        _summed(kind),
        signature_of("reduce", *kind, root),
        _all(x.at, num_ranks),
        _all(out.at, num_ranks),
        _only(size, root, num_ranks),
        _all(size, num_ranks) if is_root else NOTHING[num_ranks],
        size,
        (1 << num_ranks) - 1,
        1 << root,
        root,
    )


def broadcast(num_ranks: int, rank: int, x: Stretch, root: int, dtype: torch.dtype) -> Move:
    """Copy the root's `x` to all."""
    size, everybody, at = x.nbytes, (1 << num_ranks) - 1, _all(x.at, num_ranks)
    is_root, signature = rank == root, signature_of("broadcast", dtype, "", root)
    nothing = NOTHING[num_ranks]
    sent, got = (_all(size, num_ranks), nothing) if is_root else (nothing, _only(size, root, num_ranks))
    others = everybody & ~(1 << root)
    return Move("broadcast", MOVED, signature, at, at, sent, got, size, 1 << root, others, root, True)


def all_gather(x: Stretch, rows: Rows, dtype: torch.dtype) -> Move:
    """Place `x` of rank r in `rows[r]`, as long as that; `x` may be this rank's own row."""
    num_ranks, size = len(rows), x.nbytes
    everybody, got = (1 << num_ranks) - 1, _sizes(rows, num_ranks)
    signature, num_bytes = _lengths("all_gather", rows, dtype)
    at, sent = _all(x.at, num_ranks), _all(size, num_ranks)
    return Move(
        "all_gather", MOVED, signature, at, _addresses(rows, num_ranks), sent, got, num_bytes, everybody, everybody
    )


def _lengths(op: str, rows: Rows, dtype: torch.dtype | None, reduction: str = "") -> tuple[int, int]:
    """Return the signature of a call whose `rows` have the same lengths on all ranks, and its `num_bytes`.

    It says whether all rows are equally long, as kernels depend on it; each pair of ranks compares its own length.
    """
    is_even = all(row.nbytes == rows[0].nbytes for row in rows)
    signature = signature_of(op, dtype, reduction, -1 if is_even else MAX_RANKS)
    return signature, rows[0].nbytes if is_even else UNEVEN


def gather(num_ranks: int, rank: int, x: Stretch, rows: Rows, root: int, dtype: torch.dtype) -> Move:
    """Place `x` of rank r in `rows[r]` on the root; elsewhere there are none."""
    size = x.nbytes
    return Move(
        "gather",
        MOVED,
        signature_of("gather", dtype, "", root),
        _all(x.at, num_ranks),
        _addresses(rows, num_ranks),
        _only(size, root, num_ranks),
        _all(size, num_ranks) if rank == root else NOTHING[num_ranks],
        size,
        (1 << num_ranks) - 1,
        1 << root,
        root,
    )


def scatter(num_ranks: int, rank: int, out: Stretch, rows: Rows, root: int, dtype: torch.dtype) -> Move:
    """Copy the root's `rows[r]` to `out` of rank r; elsewhere there are none."""
    size = out.nbytes
    return Move(
        "scatter",
        MOVED,
        signature_of("scatter", dtype, "", root),
        _addresses(rows, num_ranks),
        _all(out.at, num_ranks),
        _all(size, num_ranks) if rank == root else NOTHING[num_ranks],
        _only(size, root, num_ranks),
        size,
        1 << root,
        (1 << num_ranks) - 1,
        root,
    )


def reduce_scatter(rows: Rows, out: Stretch, kind: Kind) -> Move:
    """Reduce this rank's row of all ranks into `out`, which may be that row; rows may be of different lengths."""
    num_ranks = len(rows)
    everybody, sent, got = (1 << num_ranks) - 1, _sizes(rows, num_ranks), _all(out.nbytes, num_ranks)
    signature, num_bytes = _lengths("reduce_scatter", rows, *kind)
    inputs, outputs = _addresses(rows, num_ranks), _all(out.at, num_ranks)
    return Move("reduce_scatter", _summed(kind), signature, inputs, outputs, sent, got, num_bytes, everybody, everybody)


def all_to_all(inputs: Rows, outputs: Rows, dtype: torch.dtype, is_even: bool) -> Move:
    """Copy `inputs[r]` to rank r, and the row of rank r for this rank to `outputs[r]`; the two must not overlap.

    Args:
        inputs, outputs: one for each rank, of one dtype.
        is_even: all rows of all ranks are equally long; the same value on all ranks.
    """
    num_ranks = len(inputs)
    everybody, signature = (1 << num_ranks) - 1, signature_of("all_to_all", dtype, "", -1 if is_even else MAX_RANKS)
    sent, got = _sizes(inputs, num_ranks), _sizes(outputs, num_ranks)
    num_bytes = sent[0] if is_even else UNEVEN
    return Move(
        "all_to_all",
        MOVED,
        signature,
        _addresses(inputs, num_ranks),
        _addresses(outputs, num_ranks),
        sent,
        got,
        num_bytes,
        everybody,
        everybody,
    )


def vote(num_ranks: int, ballot: Stretch, ballots: Rows) -> Move:
    """Place the `ballot` of rank r in `ballots[r]`, on all (`csrc/kernels/collective/mask/tries.cuh`)."""
    everybody, sizes = (1 << num_ranks) - 1, _all(ballot.nbytes, num_ranks)
    at, rows = _all(ballot.at, num_ranks), _addresses(ballots, num_ranks)
    return Move("vote", MOVED, signature_of("vote", None), at, rows, sizes, sizes, ballot.nbytes, everybody, everybody)


def barrier(num_ranks: int) -> Move:
    """Move nothing."""
    everybody = (1 << num_ranks) - 1
    return Move(
        "barrier", MOVED, signature_of("barrier", None), *(NOTHING[num_ranks],) * 4, 0, everybody, everybody
    )  # fmt: skip
