"""all_reduce of sparse COO tensors: the sum, or the mean, of all ranks' entries, in place.

Each rank puts one block: the indices of its entries (int64, a row for each sparse dimension), then their values. The
entries are coalesced: sorted, each index once. Their number is in the preamble of the call, so they may
differ from rank to rank, and every rank knows how many rounds the longest block takes; shape and dtype must agree.

Every rank copies all blocks and adds them up (`merge`) before it publishes that (MERGED), and takes nothing before all
have: memory for the result is there before any rank completes the call, and a rank that has none fails the call for
all. A commit only replaces the entries of the caller's tensor. Sums run in ascending rank order from zero, in float32
for float16 and bfloat16, as those of dense tensors do; the result is coalesced and has the same bits on all ranks.

A block that fits into two staging buffers is put in one piece. Otherwise its rounds alternate between two halves, as in
`alltoall.py`.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from ....engine.call import EngineCall
from ....engine.outbox import ALIGN_BYTES, PREAMBLE, PeerRegions
from ....engine.plan import Plan, Range, Sink
from ....engine.signature import OP_CODE, REDUCE_OPS, pack
from ....engine.tensors import CARRIERS, Array, Carrier, NeedsStaging, source
from ....errors import InvalidArgument, ProtocolError
from ..reduce import AVG, SUM, check, quietly
from ..rounds import CHUNK_BYTES

NAME = "sparse_all_reduce"
MAX_KEY = (1 << 62) - 1  # of the sparse dimensions: the key of an entry, its flat index, is an int64
_HALVES = (torch.float16, torch.bfloat16)


class SparseSink(Sink):
    """The tensor whose entries are replaced by those of `result`; none for a call that no thread waits for any more."""

    result: torch.Tensor | None = None

    def __init__(self, tensor: torch.Tensor | None) -> None:
        super().__init__(np.empty(0, np.uint8))
        self._tensor = tensor

    def finish(self) -> None:
        """Replace the entries; whatever modes of torch the thread is in."""
        if self._tensor is not None:
            assert self.result is not None
            with torch.inference_mode(self._tensor.is_inference()), torch.no_grad():
                self._tensor.copy_(self.result)


def plan_sparse(peer_regions: PeerRegions, tensor: torch.Tensor, op: int, label: str) -> SparseReduction:
    """Return the plan of an all_reduce of a sparse COO tensor.

    Raises:
        InvalidArgument: an operation, dtype or tensor that cannot be reduced.
        NeedsStaging: the tensor is on a GPU.
    """
    if op not in (SUM, AVG):
        wanted = REDUCE_OPS[op] if 0 <= op < len(REDUCE_OPS) else str(op)
        raise InvalidArgument(f"{label}: sparse tensors have SUM and AVG, got {wanted}; call .to_dense()")
    check(op, tensor.dtype, "all_reduce")
    if tensor.is_meta:
        raise InvalidArgument(f"{label} must have data, got a meta tensor")
    if tensor.is_cuda:
        raise NeedsStaging(f"{label} is on {tensor.device}; this call takes CPU tensors; move it with .cpu()")
    return SparseReduction(tensor, op, label, peer_regions)


class SparseReduction(Plan):
    """An all_reduce of a sparse COO tensor."""

    merge_bytes = ALIGN_BYTES  # the phase that publishes that this rank has its result; no rank reads bytes of it
    num_halves = 2

    def __init__(self, tensor: torch.Tensor, op: int, label: str, peer_regions: PeerRegions) -> None:
        shape = tuple(tensor.shape)
        super().__init__(NAME, pack(OP_CODE[NAME], CARRIERS[tensor.dtype].code, op, count=math.prod(shape)))
        self._rank, self._op, self._dtype = peer_regions.rank, op, tensor.dtype
        self._carrier: Carrier = CARRIERS[tensor.dtype]
        self._shape, num_sparse = shape, tensor.sparse_dim()
        self._sparse_shape, self._width = shape[:num_sparse], math.prod(shape[num_sparse:])
        if math.prod(self._sparse_shape) > MAX_KEY:
            raise InvalidArgument(
                f"{label}: the product of the sparse dimensions must be at most {MAX_KEY}, got {self._sparse_shape}"
            )
        self.detail = zlib.crc32(repr((shape, num_sparse)).encode()) | 1 << 32
        self._sink = SparseSink(tensor)
        plain = tensor.detach().coalesce()
        indices, values = source(plain.indices(), CARRIERS[torch.int64]), source(plain.values(), self._carrier)
        self._entry_bytes = 8 * num_sparse + self._width * self._carrier.dtype.itemsize
        count = plain.indices().shape[1]
        if not self._is_inside(indices.reshape(num_sparse, count)):
            raise InvalidArgument(f"{label}: indices must lie in the shape {shape}, got some outside of it")
        self._blocks: list[Array] = []
        self._block: Array = np.concatenate([indices.view(np.uint8), values.view(np.uint8)])
        self.preamble = array("Q", [count])
        self._chunk_bytes = min(CHUNK_BYTES, peer_regions.staging_bytes)
        self._compact_bytes = 2 * peer_regions.staging_bytes
        self.put_bytes = len(self._block) if len(self._block) <= self._compact_bytes else 2 * self._chunk_bytes

    def _is_inside(self, indices: Array) -> bool:
        """Return whether all indices lie in the dense shape."""
        limits = np.asarray(self._sparse_shape, np.int64).reshape(-1, 1)
        return bool(((indices >= 0) & (indices < limits)).all())

    # ---- parts of a call

    def _range(self, k: int, num_bytes: int) -> tuple[int, int]:
        """Return the bytes of a block that are moved in round `k`."""
        if num_bytes <= self._compact_bytes:
            return (0, num_bytes) if k == 0 else (0, 0)
        return min(num_bytes, k * self._chunk_bytes), min(num_bytes, (k + 1) * self._chunk_bytes)

    def _staging_offset(self, k: int, num_bytes: int) -> int:
        """Return where round `k` of a block begins in its staging memory."""
        return k % 2 * self._chunk_bytes if num_bytes > self._compact_bytes else 0

    def put(self, peer_regions: PeerRegions, k: int, offset: int) -> None:
        """Write round `k` of the block."""
        first, last = self._range(k, len(self._block))
        start = offset + self._staging_offset(k, len(self._block))
        peer_regions.views[np.dtype(np.uint8)][self._rank][start : start + last - first] = self._block[first:last]

    def exports(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return what `put` has written."""
        first, last = self._range(k, len(self._block))
        return ((self._staging_offset(k, len(self._block)), last - first),)

    def exports_merged(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return nothing: the counter alone is read."""
        return ()

    def agree(self, peer_regions: PeerRegions, offsets: list[int], cell: int, call: EngineCall) -> None:
        """Allocate memory for all ranks' blocks, of the lengths in their preambles, and derive the rounds."""
        if self._blocks:
            return
        blocks, rounds = [], 1
        for rank, words in enumerate(peer_regions.words):
            num_bytes = words[cell + PREAMBLE] * self._entry_bytes
            is_compact = num_bytes <= self._compact_bytes
            if rank != self._rank and num_bytes:
                block_bytes = num_bytes if is_compact else 2 * self._chunk_bytes
                if offsets[rank] + block_bytes > peer_regions.payload_bytes or offsets[rank] & 63:
                    raise ProtocolError(
                        f"{call.describe(peer_regions)}: the block of rank {peer_regions.members[rank]} "
                        "passes the end of its outbox"
                    )
            if not is_compact:
                rounds = max(rounds, -(-num_bytes // self._chunk_bytes))
            blocks.append(self._block if rank == self._rank else np.empty(num_bytes, np.uint8))
        self.rounds, self.num_halves = rounds, min(2, rounds)
        self._blocks = blocks

    def merge(self, peer_regions: PeerRegions, k: int, offsets: list[int], offset: int) -> None:
        """Copy round `k` of all blocks; behind the last one make the result."""
        views = peer_regions.views[np.dtype(np.uint8)]
        for rank, block in enumerate(self._blocks):
            first, last = self._range(k, len(block))
            if rank != self._rank and first < last:
                start = offsets[rank] + self._staging_offset(k, len(block))
                block[first:last] = views[rank][start : start + last - first]
        if k == self.rounds - 1:
            self._sink.result = self._reduce(peer_regions)

    def commit(self) -> None:
        """Replace the entries of the tensor; the copies of all blocks end with the call."""
        self._sink.finish()
        self._blocks = []

    def sinks(self) -> Sequence[Sink]:
        """Return the sink of the result."""
        return (self._sink,)

    def detach(self) -> None:
        """Detach from the tensor; its entries were copied before."""
        result, self._sink = self._sink.result, SparseSink(None)
        self._sink.result = result

    def deliver(self, results: Sequence[Sink]) -> None:
        """Write a result that a plan of the same call has kept to the tensor of this one."""
        (kept,) = results
        assert isinstance(kept, SparseSink)
        self._sink.result = kept.result
        self._sink.finish()

    # ---- sums

    def _reduce(self, peer_regions: PeerRegions) -> torch.Tensor:
        parts = [self._entries(rank, peer_regions) for rank in range(len(self._blocks))]
        keys = np.unique(np.concatenate([part for part, _ in parts]))
        wide = self._carrier.dtype
        if self._dtype in _HALVES:
            wide = np.dtype(np.float32)
        elif self._op == AVG and wide.kind in "iu":
            wide = np.dtype(np.int64)
        total = np.zeros((len(keys), self._width), wide)
        for part, values in parts:
            quietly(_add, total, np.searchsorted(keys, part), values)
        if self._op == AVG:
            quietly(_divide, total, len(parts))
        indices = np.empty((len(self._sparse_shape), len(keys)), np.int64)
        for row in reversed(range(len(self._sparse_shape))):
            keys, indices[row] = np.divmod(keys, max(1, self._sparse_shape[row]))
        shape = (len(total), *self._shape[len(self._sparse_shape) :])
        with torch.inference_mode(False), torch.no_grad():
            return torch.sparse_coo_tensor(
                torch.from_numpy(indices),
                torch.from_numpy(total).to(self._dtype).view(shape),
                self._shape,
                dtype=self._dtype,
                device="cpu",
                check_invariants=False,
                is_coalesced=True,
            )

    def _entries(self, rank: int, peer_regions: PeerRegions) -> tuple[Array, Array]:
        """Return the keys of a rank's entries, ascending, and their values, a row each, in the dtype of the sum."""
        block = self._blocks[rank]
        count = len(block) // self._entry_bytes if self._entry_bytes else 0
        cut = 8 * len(self._sparse_shape) * count
        indices = block[:cut].view(np.int64).reshape(len(self._sparse_shape), count)
        keys = np.zeros(count, np.int64)
        for size, row in zip(self._sparse_shape, indices, strict=True):
            keys = keys * size + row
        if not self._is_inside(indices) or not bool((np.diff(keys) > 0).all()):
            raise ProtocolError(
                f"{self.name} (rank={peer_regions.members[self._rank]}): the indices of rank "
                f"{peer_regions.members[rank]} are not those "
                f"of entries of {self._shape}, sorted; is its memory damaged?"
            )
        values = block[cut:].view(self._carrier.dtype).reshape(count, self._width)
        if self._dtype in _HALVES:
            with torch.inference_mode(False), torch.no_grad():
                values = torch.from_numpy(values).view(self._dtype).to(torch.float32).numpy()
        return keys, values


def _add(total: Array, rows: Array, values: Array) -> None:
    total[rows] += values  # each row once


def _divide(total: Array, num_parts: int) -> None:
    if total.dtype.kind in "iu":
        np.subtract(total, np.fmod(total, num_parts), total)  # so that the quotient truncates towards zero
        np.floor_divide(total, num_parts, total)
    else:
        flat = total.view(total.real.dtype)
        np.divide(flat, num_parts, flat)
