"""The checks of user arguments, and the plan of each collective: every check of user input is here.

A check that fails raises `InvalidArgument` before anything was sent; the group then notifies the peers (`group.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...engine.membership.members import position_of
from ...engine.outbox import PeerRegions
from ...engine.plan import Plan, Sink
from ...engine.signature import MAX_COUNT, NO_REDUCE, OP_CODE
from ...engine.signature import pack as pack_signature
from ...engine.tensors import (
    CARRIERS,
    Array,
    Carrier,
    Target,
    carrier_of,
    in_place,
    overlap,
    private,
    refuse_shared,
    source,
    target,
)
from ...errors import InvalidArgument, expected
from .alltoall import AllToAll
from .copying import Barrier, Scatter, Spread, UnevenGather
from .packing import FinishAfter, GatheredPart, PackedTensors, ZeroAfter, pack, shapes_word
from .reduce import PREMUL_SUM, Reducer, check, premultiply
from .reducing_hosts import plan_reduce_scatter, plan_reduction
from .sparse.all_reduce import plan_sparse

_SUM = dist.ReduceOp.SUM


def reduce_code(op: Any) -> int:
    """Return the wire code of a torch reduce op (`ReduceOp` or its enum)."""
    if op == _SUM:
        return 0
    return int(getattr(op, "op", op))


class PremulSum(int):
    """The wire code of PREMUL_SUM, with the factor of this rank. Factors of other ranks may differ.

    Attributes:
        factor: by which this rank's values are multiplied.
    """

    factor: float

    @classmethod
    def of(cls, op: Any) -> PremulSum:
        """Read the factor of an operation that torch has made, which is a number or a tensor of one element.

        Raises:
            InvalidArgument: the factor is no real number.
        """
        code = cls(PREMUL_SUM)
        code.factor = float(premul_factor(op))  # now: the program may change a tensor before the call is planned again
        return code


def premul_factor(op: Any) -> float | torch.Tensor:
    """Return the factor of a PREMUL_SUM as the program gave it, a tensor of one element without dimensions.

    Raises:
        InvalidArgument: it is no real number.
    """
    factor: float | torch.Tensor = op.__getstate__()[1]
    if isinstance(factor, torch.Tensor):
        is_number = factor.layout is torch.strided and not factor.is_complex() and factor.dtype is not torch.bool
        if not is_number or factor.is_meta or factor.numel() != 1:
            raise InvalidArgument(
                "PREMUL_SUM: the factor must be a real number or a strided tensor of one, "
                f"got {factor.dtype} {tuple(factor.shape)} ({factor.layout}) on {factor.device}; give a float"
            )
        return factor.detach().reshape(())
    return factor


def reduction(op: Any) -> int:
    """Return the wire code of a torch reduce op; that of PREMUL_SUM is a `PremulSum`."""
    if op == _SUM:
        return 0
    code = int(getattr(op, "op", op))
    return code if code != PREMUL_SUM else PremulSum.of(op)


@cache
def _reducer(op: int, dtype: torch.dtype, name: str) -> Reducer:
    check(op, dtype, name)
    return Reducer(op, dtype, CARRIERS[dtype])


@cache
def _prefix(name: str, dtype: torch.dtype | None, op: int = NO_REDUCE, root: int = -1) -> int:
    return pack_signature(OP_CODE[name], CARRIERS[dtype].code if dtype else 0, op, root)


def _signature(name: str, dtype: torch.dtype | None, count: int, op: int = NO_REDUCE, root: int = -1) -> int:
    if count > MAX_COUNT:
        raise InvalidArgument(f"{name}: a call moves at most {MAX_COUNT} elements, got {count}; split the tensor")
    return _prefix(name, dtype, op, root) | count << 23


def one(tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """Return the only tensor of a list."""
    if len(tensors) != 1:
        raise InvalidArgument(f"{name} takes one tensor per call, got {len(tensors)}; use the coalesced form")
    return tensors[0]


def check_one_dtype(tensors: Sequence[torch.Tensor]) -> None:
    """Check that a coalesced call has one dtype: it is one call with one signature.

    Several dtypes could differ by rank.
    """
    if not tensors:
        raise InvalidArgument("a coalesced call needs at least one tensor, got an empty list")
    kinds = {str(tensor.dtype) for tensor in tensors}
    if len(kinds) > 1:
        raise InvalidArgument(
            f"the tensors of a coalesced call must have one dtype, got {', '.join(sorted(kinds))}; "
            "make one coalesced call per dtype"
        )


def check_root(root: int, peer_regions: PeerRegions, name: str) -> int:
    """Return the position of rank `root` among the members."""
    if 0 <= root < peer_regions.group_size == len(peer_regions.members):
        return root  # the case of nearly every call
    num_ranks = max(peer_regions.group_size, peer_regions.num_roots)
    if not 0 <= root < num_ranks:
        raise InvalidArgument(f"{name}: the root must be a rank of the group, 0 ... {num_ranks - 1}, got {root}")
    return position_of(peer_regions, root, name)


def check_fits(tensor: torch.Tensor, like: torch.Tensor, count: int | None, name: str) -> None:
    """Check that a tensor has the dtype of another and so many elements; None: any number."""
    if tensor.dtype is not like.dtype:
        raise InvalidArgument(f"{name} must have dtype {like.dtype} like the other tensors, got {tensor.dtype}")
    if count is not None and tensor.numel() != count:
        raise InvalidArgument(f"{name} must have {count} elements, got {tensor.numel()}; shapes must fit the input")


def check_listed(tensors: Sequence[Any], num_entries: int, name: str) -> None:
    """Check that a list has an entry for each rank of the group."""
    if len(tensors) != num_entries:
        raise InvalidArgument(f"{name} must have one tensor per rank ({num_entries}), got {len(tensors)}")


def check_paired(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], name: str) -> None:
    """Check that a coalesced call has as many outputs as inputs."""
    if len(outputs) != len(inputs):
        raise InvalidArgument(f"{name}: as many outputs as inputs ({len(inputs)}) are needed, got {len(outputs)}")


def refuse_beside_root(tensors: Sequence[torch.Tensor], root: int, name: str) -> None:
    """Refuse a list that belongs to the root on a rank that is not it; `name`: of the call and the list."""
    if tensors:
        raise InvalidArgument(f"{name} belong to the root only (rank {root}), got {len(tensors)} on this rank")


def _list_of(tensors: Sequence[torch.Tensor], peer_regions: PeerRegions, name: str) -> list[torch.Tensor]:
    """Return the tensors of the members, in their order, from a list with one per rank of the group."""
    num_entries = peer_regions.list_length
    check_listed(tensors, num_entries, name)
    if peer_regions.num_entries:
        return [tensors[rank] if rank < num_entries else _in_vain(tensors[0]) for rank in peer_regions.members]
    return [tensors[rank] for rank in peer_regions.members]


def _in_vain(like: torch.Tensor) -> torch.Tensor:
    """Return the stand-in for the tensor of a lost member for which the user's list has no entry."""
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def _part(array: Array, rank: int, count: int, peer_regions: PeerRegions) -> Array:
    """Return the elements of a rank in an array that has `count` for each, or others where it has none of it."""
    if peer_regions.num_entries and rank >= peer_regions.num_entries:
        return np.zeros(count, array.dtype)
    return array[rank * count : (rank + 1) * count]


def _absent(peer_regions: PeerRegions) -> list[int]:
    """Return the ranks whose entries in the results are filled with zeros."""
    members = peer_regions.members
    return [rank for rank in range(peer_regions.list_length) if rank not in members] if peer_regions.zeroes else []


def _zeroing(sink: Any, outputs: Sequence[torch.Tensor], carrier: Carrier, name: str, peer_regions: PeerRegions) -> Any:
    """Return the last sink of a call, which also fills the outputs of excluded ranks with zeros."""
    absent = _absent(peer_regions)
    targets = [target(outputs[rank], carrier, f"{name}[{rank}]") for rank in absent]
    return ZeroAfter(sink, [place.array for place in targets], targets) if absent else sink


def _gathered(output: torch.Tensor, carrier: Carrier, name: str, peer_regions: PeerRegions) -> Target:
    """Return the destination for all ranks' rows; those of lost ranks are kept."""
    is_filled = peer_regions.num_ranks == peer_regions.group_size and not peer_regions.num_entries
    return (target if is_filled else in_place)(output, carrier, name)


def _apart(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], carrier: Carrier, name: str, peer_regions: PeerRegions
) -> Target:
    """Return the destination for results, a private one when the output shares memory with an input."""
    for tensor in inputs:
        if overlap(output, tensor):
            return private(output, carrier, name)  # the entries of lost ranks stay as they are
    return _gathered(output, carrier, name, peer_regions)


# ---- one function per collective


def broadcast(peer_regions: PeerRegions, tensor: torch.Tensor, root: int) -> Plan:
    """Send rank `root`'s tensor to all ranks."""
    carrier = carrier_of(tensor, "broadcast: tensor")
    position = check_root(root, peer_regions, "broadcast")
    signature = _signature("broadcast", tensor.dtype, tensor.numel(), root=root)
    if position == peer_regions.rank:
        return Spread("broadcast", signature, source(tensor, carrier), True, {}, peer_regions)
    sink = target(tensor, carrier, "broadcast: tensor")
    return Spread("broadcast", signature, sink.array, False, {position: sink}, peer_regions)


def all_reduce(peer_regions: PeerRegions, tensor: torch.Tensor, op: int, root: int | None = None) -> Plan:
    """Reduce in place, on all ranks or on `root`."""
    name, label = ("all_reduce", "all_reduce: tensor") if root is None else ("reduce", "reduce: tensor")
    position = -1 if root is None else check_root(root, peer_regions, name)
    try:
        carrier = carrier_of(tensor, label)
    except expected(InvalidArgument):
        if tensor.layout is torch.sparse_coo and root is None:
            return plan_sparse(peer_regions, tensor, op, label)
        raise
    dtype = tensor.dtype
    reducer = _reducer(op, dtype, name)
    sink: Any
    if op == PREMUL_SUM:
        sink = _premultiplied(tensor, carrier, label, op, position in (-1, peer_regions.rank))
    elif position in (-1, peer_regions.rank):
        sink = in_place(tensor, carrier, label)
    else:
        sink = Target(source(tensor, carrier))
    signature = _signature(name, dtype, len(sink.array), op, -1 if root is None else root)
    return plan_reduction(name, signature, sink, reducer, op, peer_regions, position)


def _premultiplied(tensor: torch.Tensor, carrier: Carrier, label: str, op: int, is_taker: bool) -> Any:
    """Return a private copy of `tensor` times this rank's factor, which goes to `tensor` when it holds the result."""
    assert isinstance(op, PremulSum)
    if is_taker:
        packed = PackedTensors([tensor], carrier, label, fill=True)
        premultiply(packed.array, tensor.dtype, op.factor)
        return packed
    return Sink(premultiply(source(tensor, carrier).copy(), tensor.dtype, op.factor))


def all_reduce_coalesced(peer_regions: PeerRegions, tensors: Sequence[torch.Tensor], op: int) -> Plan:
    """Reduce several tensors of one dtype in place, as one."""
    name = "all_reduce_coalesced"
    carrier = carrier_of(tensors[0], f"{name}: tensors[0]")
    reducer = _reducer(op, tensors[0].dtype, name)
    refuse_shared(tensors, f"{name}: tensors")
    packed = PackedTensors(tensors, carrier, f"{name}: tensors", fill=True)
    if isinstance(op, PremulSum):
        premultiply(packed.array, tensors[0].dtype, op.factor)
    signature = _signature(name, tensors[0].dtype, len(packed.array), op)
    plan = plan_reduction(name, signature, packed, reducer, op, peer_regions)
    plan.detail = shapes_word([tensor.numel() for tensor in tensors])
    return plan


def all_gather(peer_regions: PeerRegions, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Plan:
    """Send each rank's tensor to all ranks, one output per rank; sizes may differ from rank to rank."""
    carrier = carrier_of(tensor, "all_gather: input")
    count, dtype = tensor.numel(), tensor.dtype
    sinks: dict[int, Any] = {}
    longest, is_uneven = count, False
    for rank, output in enumerate(_list_of(outputs, peer_regions, "all_gather: outputs")):
        label = f"all_gather: outputs[{rank}]"
        if output.numel() != count or output.dtype is not dtype:
            num = count if rank == peer_regions.rank else output.numel()
            check_fits(output, tensor, num, label)
            longest, is_uneven = max(longest, num), True
        carrier_of(output, label)
        sinks[rank] = target(output, carrier, label)
    refuse_shared(outputs, "all_gather: outputs")
    counts = [len(sink.array) for sink in sinks.values()] if is_uneven else ()
    if peer_regions.zeroes:
        sinks[peer_regions.num_ranks - 1] = _zeroing(
            sinks[peer_regions.num_ranks - 1], outputs, carrier, "all_gather: outputs", peer_regions
        )
    signature = _signature("all_gather", dtype, longest)
    if not is_uneven:
        return Spread("all_gather", signature, source(tensor, carrier), True, sinks, peer_regions)
    plan = UnevenGather("all_gather", signature, source(tensor, carrier), sinks, peer_regions, longest)
    plan.detail = shapes_word(counts)
    return plan


class _Piece:
    """A rank's part of an output that is one tensor; the last part has the whole and finishes it."""

    __slots__ = ("array", "whole")

    def __init__(self, array: Array) -> None:
        self.array = array
        self.whole: Any = None

    def finish(self) -> None:
        if self.whole is not None:
            self.whole.finish()


def _pieces(whole: Target, count: int, peer_regions: PeerRegions) -> dict[int, _Piece]:
    array, found = whole.array, {}
    for position, rank in enumerate(peer_regions.members):
        found[position] = piece = _Piece(_part(array, rank, count, peer_regions))
    piece.whole = whole
    if absent := _absent(peer_regions):
        zeros = [array[rank * count : (rank + 1) * count] for rank in absent]
        piece.whole = ZeroAfter(whole, zeros, (), first=True)
    return found


def all_gather_single(peer_regions: PeerRegions, output: torch.Tensor, tensor: torch.Tensor) -> Plan:
    """Gather as `all_gather` with one output, filled in rank order."""
    carrier = carrier_of(tensor, "all_gather: input")
    carrier_of(output, "all_gather: output")
    count = tensor.numel()
    check_fits(output, tensor, count * peer_regions.list_length, "all_gather: output")
    sinks = _pieces(_gathered(output, carrier, "all_gather: output", peer_regions), count, peer_regions)
    signature = _signature("all_gather", tensor.dtype, count)
    return Spread("all_gather", signature, source(tensor, carrier), True, sinks, peer_regions)


def all_gather_coalesced(
    peer_regions: PeerRegions, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Plan:
    """Plan several `all_gather_single` of one dtype as one call."""
    name = "all_gather_coalesced"
    carrier = carrier_of(inputs[0], f"{name}: inputs[0]")
    check_paired(outputs, inputs, name)
    targets = []
    for position, (output, tensor) in enumerate(zip(outputs, inputs, strict=True)):
        check_fits(output, tensor, tensor.numel() * peer_regions.list_length, f"{name}: outputs[{position}]")
        carrier_of(output, f"{name}: outputs[{position}]")
        targets.append(_gathered(output, carrier, f"{name}: outputs[{position}]", peer_regions))
    refuse_shared(outputs, f"{name}: outputs")
    counts = [tensor.numel() for tensor in inputs]
    flat = np.empty(sum(counts), carrier.dtype)
    pack([source(tensor, carrier) for tensor in inputs], flat)
    sinks: dict[int, Any] = {
        position: GatheredPart(targets, counts, rank, carrier)
        if rank < peer_regions.list_length
        else Target(np.empty(sum(counts), carrier.dtype))
        for position, rank in enumerate(peer_regions.members)
    }
    sinks[peer_regions.num_ranks - 1] = FinishAfter(sinks[peer_regions.num_ranks - 1], targets)
    zeros: list[Array] = []
    for part, count in zip(targets, counts, strict=True):
        zeros += [part.array[rank * count : (rank + 1) * count] for rank in _absent(peer_regions)]
    if zeros:
        sinks[peer_regions.num_ranks - 1] = ZeroAfter(sinks[peer_regions.num_ranks - 1], zeros, (), first=True)
    plan = Spread(name, _signature(name, inputs[0].dtype, len(flat)), flat, True, sinks, peer_regions)
    plan.detail = shapes_word(counts)
    return plan


def all_gather_lists(
    peer_regions: PeerRegions, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
) -> Plan:
    """Send each rank's list of tensors to all ranks: `output_lists[r][i]` gets rank r's `inputs[i]`."""
    name = "all_gather_coalesced"
    carrier = carrier_of(inputs[0], f"{name}: inputs[0]")
    num_entries = peer_regions.list_length
    if len(output_lists) != num_entries:
        raise InvalidArgument(f"{name}: one list per rank ({num_entries}) is needed, got {len(output_lists)}")
    flat = np.empty(sum(tensor.numel() for tensor in inputs), carrier.dtype)
    pack([source(tensor, carrier) for tensor in inputs], flat)
    sinks: dict[int, Any] = {}
    absent: list[Target] = []
    for rank, outputs in enumerate(output_lists):
        for position, (output, tensor) in enumerate(zip(outputs, inputs, strict=True)):
            label = f"{name}: outputs[{rank}][{position}]"
            carrier_of(output, label)
            check_fits(output, tensor, tensor.numel(), label)
        if rank in peer_regions.members:
            label = f"{name}: outputs[{rank}]"
            sinks[peer_regions.members.index(rank)] = PackedTensors(outputs, carrier, label, fill=False)
        elif peer_regions.zeroes:
            absent += [target(output, carrier, f"{name}: outputs[{rank}]") for output in outputs]
    refuse_shared([output for outputs in output_lists for output in outputs], f"{name}: outputs")
    if absent:
        last = max(sinks)
        sinks[last] = ZeroAfter(sinks[last], [place.array for place in absent], absent)
    plan = Spread(name, _signature(name, inputs[0].dtype, len(flat)), flat, True, sinks, peer_regions)
    plan.detail = shapes_word([tensor.numel() for tensor in inputs])
    return plan


def gather(peer_regions: PeerRegions, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Plan:
    """Send each rank's tensor to `root`, whose `outputs` are one per rank."""
    carrier = carrier_of(tensor, "gather: input")
    sinks: dict[int, Any] = {}
    if check_root(root, peer_regions, "gather") == peer_regions.rank:
        for rank, output in enumerate(_list_of(outputs, peer_regions, "gather: outputs")):
            carrier_of(output, f"gather: outputs[{rank}]")
            check_fits(output, tensor, tensor.numel(), f"gather: outputs[{rank}]")
            sinks[rank] = target(output, carrier, f"gather: outputs[{rank}]")
        refuse_shared(outputs, "gather: outputs")
        if peer_regions.zeroes:
            sinks[peer_regions.num_ranks - 1] = _zeroing(
                sinks[peer_regions.num_ranks - 1], outputs, carrier, "gather: outputs", peer_regions
            )
    else:
        refuse_beside_root(outputs, root, "gather: outputs")
    signature = _signature("gather", tensor.dtype, tensor.numel(), root=root)
    reader = position_of(peer_regions, root, "gather")
    return Spread("gather", signature, source(tensor, carrier), True, sinks, peer_regions, reader)


def scatter(peer_regions: PeerRegions, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Plan:
    """Send tensor r of `root`'s `inputs` to rank r."""
    carrier = carrier_of(output, "scatter: output")
    position = check_root(root, peer_regions, "scatter")
    segments: list[Array] = []
    if position == peer_regions.rank:
        for rank, tensor in enumerate(_list_of(inputs, peer_regions, "scatter: inputs")):
            carrier_of(tensor, f"scatter: inputs[{rank}]")
            check_fits(tensor, output, output.numel(), f"scatter: inputs[{rank}]")
            segments.append(source(tensor, carrier))
    else:
        refuse_beside_root(inputs, root, "scatter: inputs")
    sink = _apart(output, inputs, carrier, "scatter: output", peer_regions)
    signature = _signature("scatter", output.dtype, output.numel(), root=root)
    return Scatter("scatter", signature, segments, position, sink, peer_regions)


def reduce_scatter(peer_regions: PeerRegions, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> Plan:
    """Reduce all ranks' `inputs[r]` to rank r; sizes may differ from entry to entry."""
    carrier = carrier_of(output, "reduce_scatter: output")
    reducer = _reducer(op, output.dtype, "reduce_scatter")
    segments, count, dtype = [], output.numel(), output.dtype
    longest, is_uneven = count, False
    for rank, tensor in enumerate(_list_of(inputs, peer_regions, "reduce_scatter: inputs")):
        carrier_of(tensor, f"reduce_scatter: inputs[{rank}]")
        if tensor.numel() != count or tensor.dtype is not dtype:
            num = count if rank == peer_regions.rank else tensor.numel()
            check_fits(tensor, output, num, f"reduce_scatter: inputs[{rank}]")
            longest, is_uneven = max(longest, num), True
        segments.append(source(tensor, carrier))
    sink = _apart(output, inputs, carrier, "reduce_scatter: output", peer_regions)
    if isinstance(op, PremulSum):
        segments = [premultiply(segment.copy(), output.dtype, op.factor) for segment in segments]
    signature = _signature("reduce_scatter", output.dtype, longest, op)
    plan = plan_reduce_scatter(("reduce_scatter", signature, segments, sink, peer_regions, longest), reducer, op)
    if is_uneven:
        plan.detail = shapes_word([len(segment) for segment in segments])
    return plan


def reduce_scatter_single(peer_regions: PeerRegions, output: torch.Tensor, tensor: torch.Tensor, op: int) -> Plan:
    """Reduce as `reduce_scatter` with one input that holds the segments in rank order."""
    carrier = carrier_of(output, "reduce_scatter: output")
    carrier_of(tensor, "reduce_scatter: input")
    reducer = _reducer(op, output.dtype, "reduce_scatter")
    count = output.numel()
    check_fits(tensor, output, count * peer_regions.list_length, "reduce_scatter: input")
    values = source(tensor, carrier)
    if isinstance(op, PremulSum):
        values = premultiply(values.copy(), output.dtype, op.factor)
    segments = [_part(values, rank, count, peer_regions) for rank in peer_regions.members]
    sink = _apart(output, [tensor], carrier, "reduce_scatter: output", peer_regions)
    signature = _signature("reduce_scatter", output.dtype, count, op)
    return plan_reduce_scatter(("reduce_scatter", signature, segments, sink, peer_regions, count), reducer, op)


def reduce_scatter_coalesced(
    peer_regions: PeerRegions, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: int
) -> Plan:
    """Plan several `reduce_scatter_single` of one dtype as one call."""
    name = "reduce_scatter_coalesced"
    carrier = carrier_of(inputs[0], f"{name}: inputs[0]")
    reducer = _reducer(op, inputs[0].dtype, name)
    check_paired(outputs, inputs, name)
    counts = [output.numel() for output in outputs]
    for position, (output, tensor) in enumerate(zip(outputs, inputs, strict=True)):
        carrier_of(output, f"{name}: outputs[{position}]")
        check_fits(tensor, output, counts[position] * peer_regions.list_length, f"{name}: inputs[{position}]")
    refuse_shared(outputs, f"{name}: outputs")
    flats = [source(tensor, carrier) for tensor in inputs]
    segments = np.empty((peer_regions.num_ranks, sum(counts)), carrier.dtype)
    for position, rank in enumerate(peer_regions.members):
        pieces = [_part(flat, rank, n, peer_regions) for flat, n in zip(flats, counts, strict=True)]
        pack(pieces, segments[position])
    if isinstance(op, PremulSum):
        premultiply(segments.reshape(-1), inputs[0].dtype, op.factor)
    sink = PackedTensors(outputs, carrier, f"{name}: outputs", fill=False)
    signature = _signature(name, inputs[0].dtype, len(sink.array), op)
    plan = plan_reduce_scatter((name, signature, list(segments), sink, peer_regions, len(sink.array)), reducer, op)
    plan.detail = shapes_word(counts)
    return plan


def all_to_all(peer_regions: PeerRegions, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Plan:
    """Send tensor j of rank i's `inputs` to `outputs[i]` of rank j; sizes may differ from pair to pair."""
    all_outputs = outputs
    outputs = _list_of(outputs, peer_regions, "all_to_all: outputs")
    inputs = _list_of(inputs, peer_regions, "all_to_all: inputs")
    carrier = carrier_of(inputs[0], "all_to_all: inputs[0]")
    segments: list[Array] = []
    sinks: list[Any] = []
    for rank, tensor in enumerate(inputs):
        carrier_of(tensor, f"all_to_all: inputs[{rank}]")
        check_fits(tensor, inputs[0], None, f"all_to_all: inputs[{rank}]")
        segments.append(source(tensor, carrier))
    for rank, output in enumerate(outputs):
        carrier_of(output, f"all_to_all: outputs[{rank}]")
        check_fits(output, inputs[0], None, f"all_to_all: outputs[{rank}]")
        sinks.append(_apart(output, inputs, carrier, f"all_to_all: outputs[{rank}]", peer_regions))
    refuse_shared(outputs, "all_to_all: outputs")
    if peer_regions.zeroes:
        sinks[-1] = _zeroing(sinks[-1], all_outputs, carrier, "all_to_all: outputs", peer_regions)
    return AllToAll(_signature("all_to_all", inputs[0].dtype, 0), segments, sinks, peer_regions)


def all_to_all_single(
    peer_regions: PeerRegions,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> Plan:
    """Exchange as `all_to_all` with one tensor each way, split along dimension 0."""
    carrier = carrier_of(tensor, "all_to_all: input")
    carrier_of(output, "all_to_all: output")
    check_fits(output, tensor, None, "all_to_all: output")
    num_entries = peer_regions.list_length
    sent = split_counts(tensor, input_splits, num_entries, "all_to_all: input")
    is_like = output_splits == input_splits and output.shape == tensor.shape  # the usual case costs one count
    expected = sent if is_like else split_counts(output, output_splits, num_entries, "all_to_all: output")
    values = source(tensor, carrier)
    whole = _apart(output, [tensor], carrier, "all_to_all: output", peer_regions)
    first_sent, first_expected = list(accumulate(sent, initial=0)), list(accumulate(expected, initial=0))
    array, members, absent = whole.array, peer_regions.members, _absent(peer_regions)
    inside = members if members[-1] < num_entries else [rank for rank in members if rank < num_entries]
    segments = [values[first_sent[rank] : first_sent[rank + 1]] for rank in inside]
    sinks = [_Piece(array[first_expected[rank] : first_expected[rank + 1]]) for rank in inside]
    sinks[-1].whole = whole
    if absent:
        zeros = [array[first_expected[rank] : first_expected[rank + 1]] for rank in absent]
        sinks[-1].whole = ZeroAfter(whole, zeros, (), first=True)
    for _ in members[len(inside) :]:  # lost, and without an entry here: as much as with the first rank
        segments.append(np.zeros(sent[0], carrier.dtype))
        sinks.append(_Piece(np.empty(expected[0], carrier.dtype)))
    return AllToAll(_signature("all_to_all", tensor.dtype, 0), segments, sinks, peer_regions)


def split_counts(tensor: torch.Tensor, splits: Sequence[int], num_ranks: int, name: str) -> list[int]:
    """Return how many elements of `tensor` belong to each rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % num_ranks:
            raise InvalidArgument(
                f"{name}: dimension 0 must divide by the {num_ranks} ranks, got {rows} rows; give split sizes"
            )
        return [tensor.numel() // num_ranks] * num_ranks
    if len(splits) != num_ranks or any(size < 0 for size in splits) or sum(splits) != rows:
        raise InvalidArgument(
            f"{name}: split sizes must be {num_ranks} numbers >= 0 that add up to {rows} rows, got {list(splits)}"
        )
    row = tensor.numel() // rows if rows else 0
    return [size * row for size in splits]


def barrier(peer_regions: PeerRegions) -> Plan:
    """Return a plan in which every rank waits for all others."""
    return Barrier("barrier", _prefix("barrier", None))
