"""Checks of CUDA tensors, and the conversion of a group method's arguments to what the kernels move.

Strided tensors are copied on the current stream, into contiguous ones before the call and back after it; so is an input
that shares memory with an output in a way that the kernels do not allow. Nothing waits for the GPU.

PREMUL_SUM is a SUM of copies of the inputs, each times the factor of its rank; it differs from SUM only in its
signature (`signature`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...arrays import require_memory, writing
from ...engine.tensors import CARRIERS, overlap, refuse_overlap, refuse_shared
from ...errors import InvalidArgument
from ..collectives import reduce as reductions
from ..collectives.arguments import (
    check_fits,
    check_listed,
    check_one_dtype,
    check_paired,
    one,
    premul_factor,
    reduce_code,
    refuse_beside_root,
    split_counts,
)
from . import moves
from .moves import PREMUL_SUM, Kind, Move, Stretch, row_of, rows_of
from .params import ELEMENTS

_NAMES = {0: "sum", 1: "avg", 2: "product", 3: "min", 4: "max", 5: "and", 6: "or", 7: "xor", 8: PREMUL_SUM}
_AS_SIGNED = {"uint16": torch.int16, "uint32": torch.int32, "uint64": torch.int64}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_SAME_BITS = ("sum", "product", "and", "or", "xor")  # equal for signed and unsigned integers


class NotServed(Exception):
    """No kernel makes this call, on any rank: it goes through cpu memory."""


class Prepared:
    """A call of one rank: its moves, in this order, and what is copied back afterwards.

    Attributes:
        device: of all tensors.
        outputs: the tensors that the call's work returns.
        is_plain: all tensors are used as given.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.moves: list[Move] = []
        self.device: torch.device | None = None
        self.outputs: Any = None
        self.is_plain = True
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kept: list[torch.Tensor] = []  # kept alive until the call is queued
        self._given: list[torch.Tensor] = []

    def copy_back(self) -> None:
        """Queue the copies to outputs that are not written in place."""
        for tensor, scratch in self._back:
            with writing(tensor):
                tensor.copy_(scratch)

    def again(self, move: Move) -> Move:
        """Return a move that may be repeated: its kernel copies an input that it overwrites."""
        own, is_taker = move.inputs[self.rank], move.takers >> self.rank & 1
        if move.kind == moves.MOVED or not own or not is_taker or own != move.outputs[self.rank]:
            return move
        there = [tensor for tensor in self._given if tensor.data_ptr() == own]  # coalesced ones may overlap
        copy = torch.empty_like(max(there, key=lambda tensor: tensor.nbytes))
        self._kept.append(copy)
        return move._replace(inputs=tuple(copy.data_ptr() if at == own else at for at in move.inputs))

    # --- tensors

    def _check(self, tensor: torch.Tensor, name: str) -> None:
        if tensor.layout is not torch.strided:
            raise InvalidArgument(f"{name} must be a strided tensor, got {tensor.layout}; call .to_dense()")
        if tensor.dtype not in CARRIERS:
            raise InvalidArgument(f"{name} has dtype {tensor.dtype}, which cannot be communicated; convert it first")
        if not tensor.is_cuda:
            raise NotServed
        require_memory(tensor, name)
        if self.device is None:
            self.device = tensor.device
        elif self.device != tensor.device:
            raise InvalidArgument(f"{name} must be on {self.device} like the other tensors, got {tensor.device}")

    def take(self, tensor: torch.Tensor, name: str, apart: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Return an input as contiguous memory, a copy where it shares memory with one of the tensors `apart`."""
        self._check(tensor, name)
        plain = tensor.detach()
        if not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
            plain, self.is_plain = plain.contiguous().resolve_conj().resolve_neg(), False
        elif any(overlap(plain, other) for other in apart):
            plain, self.is_plain = plain.clone(), False
        self._kept.append(plain)
        return plain

    def give(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return memory for the results of `tensor`, with the same contents."""
        self._check(tensor, name)
        plain = tensor.detach()
        if plain.is_contiguous() and not (plain.is_conj() or plain.is_neg()):
            self._given.append(plain)
            return plain
        refuse_overlap(tensor, name)
        self.is_plain = False
        scratch = plain.contiguous().resolve_conj().resolve_neg()
        if scratch.data_ptr() == plain.data_ptr():
            scratch = plain.clone()
        self._back.append((plain, scratch))
        self._given.append(scratch)
        return scratch

    def multiply(self, tensor: torch.Tensor, name: str, opts: Any) -> torch.Tensor:
        """Return a contiguous copy of an input times the factor of a PREMUL_SUM."""
        self._check(tensor, name)
        factor = premul_factor(opts.reduceOp)
        if isinstance(factor, torch.Tensor) and factor.is_cuda and factor.device != tensor.device:
            raise InvalidArgument(
                f"{name} is on {tensor.device}, so the factor of PREMUL_SUM must be there or on the CPU, "
                f"got {factor.device}"
            )
        if isinstance(factor, torch.Tensor) and not factor.is_cuda:
            factor = float(factor)
        self.is_plain = False
        copy = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        (torch.view_as_real(copy) if copy.is_complex() else copy).mul_(factor)  # by parts, as on CPU tensors
        self._kept.append(copy)
        return copy

    def root(self, root: int, name: str) -> int:
        """Check a root."""
        if not 0 <= root < self.num_ranks:
            raise InvalidArgument(
                f"{name}: the root must be a rank of the group, 0 ... {self.num_ranks - 1}, got {root}"
            )
        return root

    def listed(self, tensors: Sequence[Any], name: str) -> Sequence[Any]:
        """Check that the list has a tensor for each rank."""
        check_listed(tensors, self.num_ranks, name)
        return tensors


def kind_of(opts: Any, dtype: torch.dtype, name: str) -> Kind:
    """Return the kind of kernels that reduce a dtype.

    Raises:
        InvalidArgument: the reduction does not exist for the dtype. NotServed: the kernels do not support it.
    """
    code = reduce_code(opts.reduceOp) if opts is not None else 0
    reductions.check(code, dtype, name)
    reduction = _NAMES[code]
    if dtype in _REAL:
        return _REAL[dtype], reduction
    if dtype is torch.bool:
        return torch.uint8, reduction
    signed = _AS_SIGNED.get(str(dtype).removeprefix("torch."))
    if signed is not None and reduction in _SAME_BITS:
        dtype = signed
    if dtype not in ELEMENTS or (reduction == "avg" and not dtype.is_floating_point):
        raise NotServed
    return dtype, reduction


# ---- one function per method of the group: outputs, inputs, torch's options


def _allreduce(c: Prepared, tensors: Sequence[torch.Tensor], opts: Any = None) -> None:
    tensor = one(tensors, "all_reduce")
    if tensor.layout is torch.sparse_coo:
        raise NotServed
    out = c.give(tensor, "all_reduce: tensor")
    kind = kind_of(opts, out.dtype, "all_reduce")
    x = c.multiply(tensor, "all_reduce: tensor", opts) if kind[1] == PREMUL_SUM else out
    c.moves.append(moves.all_reduce(c.num_ranks, row_of(x), row_of(out), kind))


def _allreduce_coalesced(c: Prepared, tensors: Sequence[torch.Tensor], opts: Any = None) -> None:
    check_one_dtype(tensors)
    refuse_shared(tensors, "all_reduce_coalesced: tensors")
    for tensor in tensors:
        _allreduce(c, [tensor], opts)


def _reduce(c: Prepared, tensors: Sequence[torch.Tensor], opts: Any) -> None:
    root, tensor = c.root(opts.rootRank, "reduce"), one(tensors, "reduce")
    out = (c.give if root == c.rank else c.take)(tensor, "reduce: tensor")
    kind = kind_of(opts, out.dtype, "reduce")
    x = c.multiply(tensor, "reduce: tensor", opts) if kind[1] == PREMUL_SUM else out
    c.moves.append(moves.reduce(c.num_ranks, c.rank, row_of(x), row_of(out), kind, root))


def _broadcast(c: Prepared, tensors: Sequence[torch.Tensor], opts: Any = None) -> None:
    root, tensor = c.root(opts.rootRank if opts is not None else 0, "broadcast"), one(tensors, "broadcast")
    x = (c.take if root == c.rank else c.give)(tensor, "broadcast: tensor")
    c.moves.append(moves.broadcast(c.num_ranks, c.rank, row_of(x), root, x.dtype))


def _allgather(
    c: Prepared, output_lists: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor], opts: Any = None
) -> None:
    tensor, outputs = one(tensors, "all_gather"), c.listed(_first(output_lists), "all_gather: outputs")
    rows = _outputs(c, outputs, tensor, "all_gather")
    x = c.take(tensor, "all_gather: input", _not_in_place(c, outputs, tensor))
    c.moves.append(moves.all_gather(row_of(x), rows, x.dtype))


def _not_in_place(c: Prepared, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the outputs with which the input must not share memory: all but this rank's own, if that begins there."""
    is_in_place = bool(outputs) and outputs[c.rank].data_ptr() == tensor.data_ptr()
    return [out for rank, out in enumerate(outputs) if rank != c.rank or not is_in_place]


def _first(lists: Sequence[Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    return lists[0] if len(lists) == 1 else []


def _outputs(c: Prepared, outputs: Sequence[torch.Tensor], like: torch.Tensor, name: str) -> list[Stretch]:
    for rank, output in enumerate(outputs):
        count = like.numel() if name == "gather" or rank == c.rank else output.numel()
        check_fits(output, like, count, f"{name}: outputs[{rank}]")
    refuse_shared(outputs, f"{name}: outputs")
    return [row_of(c.give(output, f"{name}: outputs[{rank}]")) for rank, output in enumerate(outputs)]


def _all_gather_single(c: Prepared, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> None:
    check_fits(output, tensor, tensor.numel() * c.num_ranks, "all_gather: output")
    rows = rows_of(c.give(output, "all_gather: output"), c.num_ranks)
    is_own = rows[c.rank].at == tensor.data_ptr()
    x = c.take(tensor, "all_gather: input", () if is_own else [output])
    c.moves.append(moves.all_gather(row_of(x), rows, x.dtype))


def _all_gather_coalesced(
    c: Prepared, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
) -> None:
    check_one_dtype(inputs)
    for output, tensor in _pairs(outputs, inputs, "all_gather_coalesced"):
        _all_gather_single(c, output, tensor)


def _all_gather_lists(
    c: Prepared, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
) -> None:
    c.listed(output_lists, "all_gather_coalesced: outputs")
    if any(len(outputs) != len(inputs) for outputs in output_lists):
        raise InvalidArgument(f"all_gather_coalesced: outputs[r] must be {len(inputs)} tensors like the inputs")
    check_one_dtype(inputs)
    for tensor, outputs in zip(inputs, zip(*output_lists, strict=True), strict=True):
        _allgather(c, [outputs], [tensor])


def _pairs(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], name: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    check_paired(outputs, inputs, name)
    refuse_shared(outputs, f"{name}: outputs")
    return list(zip(outputs, inputs, strict=True))


def _gather(
    c: Prepared, output_lists: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor], opts: Any
) -> None:
    root, tensor = c.root(opts.rootRank, "gather"), one(tensors, "gather")
    outputs: Sequence[torch.Tensor] = output_lists[0] if output_lists else []
    if root == c.rank:
        outputs = c.listed(outputs, "gather: outputs")
    else:
        refuse_beside_root(outputs, root, "gather: outputs")
    rows = _outputs(c, outputs, tensor, "gather")
    x = c.take(tensor, "gather: input", _not_in_place(c, outputs, tensor))
    c.moves.append(moves.gather(c.num_ranks, c.rank, row_of(x), rows, root, x.dtype))


def _scatter(
    c: Prepared, outputs: Sequence[torch.Tensor], input_lists: Sequence[Sequence[torch.Tensor]], opts: Any
) -> None:
    root, output = c.root(opts.rootRank, "scatter"), one(outputs, "scatter")
    inputs: Sequence[torch.Tensor] = input_lists[0] if input_lists else []
    if root == c.rank:
        inputs = c.listed(inputs, "scatter: inputs")
    else:
        refuse_beside_root(inputs, root, "scatter: inputs")
    out = c.give(output, "scatter: output")
    rows = []
    for rank, tensor in enumerate(inputs):
        check_fits(tensor, output, output.numel(), f"scatter: inputs[{rank}]")
        apart = () if tensor.data_ptr() == output.data_ptr() and rank == c.rank else (output,)
        rows.append(row_of(c.take(tensor, f"scatter: inputs[{rank}]", apart)))
    c.moves.append(moves.scatter(c.num_ranks, c.rank, row_of(out), rows, root, out.dtype))


def _reduce_scatter(
    c: Prepared,
    outputs: Sequence[torch.Tensor],
    input_lists: Sequence[Sequence[torch.Tensor]],
    opts: Any = None,
) -> None:
    output, inputs = one(outputs, "reduce_scatter"), c.listed(_first(input_lists), "reduce_scatter: inputs")
    out = c.give(output, "reduce_scatter: output")
    kind = kind_of(opts, out.dtype, "reduce_scatter")
    rows = []
    for rank, tensor in enumerate(inputs):
        name = f"reduce_scatter: inputs[{rank}]"
        check_fits(tensor, output, output.numel() if rank == c.rank else tensor.numel(), name)
        if kind[1] == PREMUL_SUM:
            rows.append(row_of(c.multiply(tensor, name, opts)))
            continue
        apart = () if tensor.data_ptr() == output.data_ptr() and rank == c.rank else (output,)
        rows.append(row_of(c.take(tensor, name, apart)))
    c.moves.append(moves.reduce_scatter(rows, row_of(out), kind))


def _reduce_scatter_single(c: Prepared, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> None:
    check_fits(tensor, output, output.numel() * c.num_ranks, "reduce_scatter: input")
    out = c.give(output, "reduce_scatter: output")
    kind = kind_of(opts, out.dtype, "reduce_scatter")
    if kind[1] == PREMUL_SUM:
        x = c.multiply(tensor, "reduce_scatter: input", opts)
    else:
        is_own = output.data_ptr() == tensor.data_ptr() + c.rank * output.nbytes
        x = c.take(tensor, "reduce_scatter: input", () if is_own else [output])
    c.moves.append(moves.reduce_scatter(rows_of(x, c.num_ranks), row_of(out), kind))


def _reduce_scatter_coalesced(
    c: Prepared, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
) -> None:
    check_one_dtype(inputs)
    for output, tensor in _pairs(outputs, inputs, "reduce_scatter_coalesced"):
        _reduce_scatter_single(c, output, tensor, opts)


def _alltoall(c: Prepared, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> None:
    c.listed(outputs, "all_to_all: outputs")
    c.listed(inputs, "all_to_all: inputs")
    for rank, tensor in enumerate((*inputs, *outputs)):
        name = "inputs" if rank < c.num_ranks else "outputs"
        check_fits(tensor, inputs[0], None, f"all_to_all: {name}[{rank % c.num_ranks}]")
    refuse_shared(outputs, "all_to_all: outputs")
    sent = [row_of(c.take(tensor, f"all_to_all: inputs[{rank}]", outputs)) for rank, tensor in enumerate(inputs)]
    got = [row_of(c.give(tensor, f"all_to_all: outputs[{rank}]")) for rank, tensor in enumerate(outputs)]
    c.moves.append(moves.all_to_all(sent, got, inputs[0].dtype, False))


def _all_to_all_single(
    c: Prepared,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    opts: Any = None,
) -> None:
    check_fits(output, tensor, None, "all_to_all: output")
    sent = split_counts(tensor, input_splits, c.num_ranks, "all_to_all: input")
    got = split_counts(output, output_splits, c.num_ranks, "all_to_all: output")
    x, out = c.take(tensor, "all_to_all: input", [output]), c.give(output, "all_to_all: output")
    is_even = not output_splits and not input_splits
    c.moves.append(moves.all_to_all(_cut(x, sent), _cut(out, got), x.dtype, is_even))


def _cut(tensor: torch.Tensor, counts: Sequence[int]) -> list[Stretch]:
    at, rows = tensor.data_ptr(), []
    for count in counts:
        rows.append(Stretch(at, count * tensor.itemsize))
        at += count * tensor.itemsize
    return rows


def _barrier(c: Prepared, device: torch.device) -> None:
    c.device, c.is_plain = device, False  # it has no tensors that a cached call could be recognised by
    c.moves.append(moves.barrier(c.num_ranks))


_METHODS: dict[str, Callable[..., None]] = {
    "allreduce": _allreduce,
    "allreduce_coalesced": _allreduce_coalesced,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "all_gather_single": _all_gather_single,
    "all_gather_single_coalesced": _all_gather_coalesced,
    "allgather_coalesced": _all_gather_lists,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_single_coalesced": _reduce_scatter_coalesced,
    "alltoall": _alltoall,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
}
_SINGLE = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")


def prepare(method: str, rank: int, num_ranks: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Prepared:
    """Return a call of the group's method.

    Args:
        method: its name.
        rank: this process's.
        num_ranks: as many entries lists have.
        args, kwargs: of the method.

    Raises:
        InvalidArgument: an argument is invalid. NotServed: the kernels do not support the call.
    """
    make = _METHODS.get(method)
    if make is None:
        raise NotServed
    prepared = Prepared(rank, num_ranks)
    make(prepared, *args, **kwargs)
    if prepared.device is None:
        raise NotServed
    prepared.outputs = [args[0]] if method in _SINGLE else args[0]
    return prepared
