"""Launches the collective kernels on one rank: memory, plans, arguments. No groups, no checks of tensors, no streams.

Data path: `csrc/kernels/collective/call.cuh` and the heads of the three kernel files. This module owns the lent region
and the words of the host, decides by size which kernel does a call, and launches it on the platform's current stream. A
call returns when its kernel is queued; what kernels report is raised by `check`. All ranks make the same calls with the
same sizes in the same order, on one stream at a time. In a graph nothing but launches is recorded.

The platform is `ep.gpu.platform.CudaPlatform`, or the tests' emulation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import AbortedError, CommTimeoutError, EpeeError, InvalidArgument, ProtocolError, context
from .params import (
    EXCHANGE_THREADS,
    KERNELS,
    NEWS_WORDS,
    NUM_REPORTS,
    OP_NUMBERS,
    OPS,
    REPORT_WORDS,
    TILE_BYTES,
    TWO_SHOT_THREADS,
    CollectiveConfig,
    kernel_head,
)

Kind = tuple[torch.dtype | None, str]  # of a reduction
AllGather = Callable[[bytes], list[bytes]]
TIMEOUT, ABORTED, PEER_GAVE_UP, PEER_DEAD = 1, 2, 9, 10  # `FailureCode` in `common/report.cuh`
_WAITS = {1: "its last call", 2: "packets", 3: "a chunk", 4: "a credit", 5: "the barrier"}
_MOVED: Kind = (None, "sum")


class CollectivePlatform(Protocol):
    """The part of a machine (`ep.gpu.platform.Platform`) that collectives use."""

    device: torch.device

    def create(self, nbytes: int) -> Any:
        """Allocate `nbytes` bytes of zeros on the GPU that other processes can map."""

    def attach(self, blob: bytes) -> Any:
        """Map the memory that another rank's `create` made; `blob` is how it names it."""

    def kernels(self, path: str, head: str, params: Mapping[str, type[ctypes.Structure]]) -> Mapping[str, Any]:
        """Compile and load the kernels of one file, by name.

        Args:
            path: of the file, below `csrc/kernels`.
            head: constants, put before the text.
            params: of each kernel, the struct that is its one argument.
        """

    def host_words(self, count: int) -> Any:
        """Allocate `count` pinned 64-bit words, all zero, that host and GPU can read and write."""

    def stream(self) -> int:
        """Return the raw handle of the current stream."""

    def synchronize(self) -> None:
        """Let the host wait for all work of the GPU."""


@dataclass(frozen=True)
class CollectivePlan:
    """Which kernel does a call, and with how many blocks; equal on all ranks, best values by measurement.

    Attributes:
        one_shot_bytes: largest row of an all_reduce or broadcast that crosses once.
        two_shot_bytes: largest row of these that crosses in packets.
        exchange_bytes: largest row of the others that crosses in packets.
        max_blocks: of kernels that send packets.
        warps: least number of warps in a block of those, where there is work for more.
        lanes: of a pipeline whose ranks have two roles, and three, if the memory has as many; all blocks of a rank's
            roles must fit on the GPU at once.
        chunk_bytes: of a pipeline's calls, if a slot has room for as much; fewer where each lane would have less than
            `min_chunks`.
        pipeline: threads of a pipeline's block, two warps of which only wait, and its blocks on a multiprocessor.
        launch: mode of all launches, as in `jit.kernel.Kernel`.
    """

    one_shot_bytes: int = 128 << 10
    two_shot_bytes: int = 1 << 20
    exchange_bytes: int = 1 << 20
    max_blocks: int = 128
    warps: int = 1
    lanes: tuple[int, int] = (132, 88)
    chunk_bytes: int = 32 << 10
    min_chunks: int = 2
    pipeline: tuple[int, int] = (384, 2)
    launch: str = "early"


class Collectives:
    """The collectives of one rank with those of its peers.

    Args:
        platform: the GPU.
        config: sizes, equal on all ranks.
        all_gather: gives everybody's bytes in rank order; called at construction.
        kinds: (dtype, reduction) pairs whose kernels are loaded at construction; any other would be inside a call.
    """

    def __init__(
        self,
        platform: CollectivePlatform,
        config: CollectiveConfig,
        all_gather: AllGather,
        kinds: Sequence[tuple[torch.dtype, str]] = ((torch.bfloat16, "sum"),),
        plan: CollectivePlan | None = None,
        stall_one_in: int = 0,
    ) -> None:
        config.check()
        self.config, self.platform = config, platform
        self.plan = plan or CollectivePlan()
        self.timeout_s = 10.0
        self._kernels: dict[Kind, dict[str, Any]] = {}
        for dtype, reduction in (_MOVED, *kinds):
            head = kernel_head(config.num_ranks, dtype, reduction, self.plan.pipeline, stall_one_in)
            loaded = self._kernels.setdefault((dtype, reduction), {})
            for path, params in KERNELS.items():
                loaded.update(platform.kernels(path, head, params))
        self._report = platform.host_words(NUM_REPORTS * REPORT_WORDS)
        self._abort = platform.host_words(NEWS_WORDS)
        self._own = platform.create(config.region_layout.nbytes)
        self.nbytes = int(self._own.nbytes)
        blobs = all_gather(self._own.blob)
        self._peers = [self._own if rank == config.rank else platform.attach(blob) for rank, blob in enumerate(blobs)]
        call = config.call(self._own.address, self._report.address, self._abort.address)
        for kernels in self._kernels.values():
            for kernel in kernels.values():
                kernel.args.call = call
        self._words("peers")[: config.num_ranks].copy_(
            torch.tensor([peer.address for peer in self._peers], dtype=torch.int64, device="cpu")
        )
        self.set_view(range(config.num_ranks))
        all_gather(b"attached")  # nobody leaves before all have attached, nor stores before all have set their words

    # --- calls ---

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, reduction: str = "sum") -> None:
        """Reduce `x` of all ranks into `out` on all; they may be the same memory. Contiguous."""
        nbytes, kind = x.nbytes, (x.dtype, reduction)
        if nbytes <= min(self.plan.one_shot_bytes, self.config.packet_bytes):
            self._exchange("all_reduce", kind, x, out, (nbytes, 0, 0), -1)
        elif nbytes <= min(self.plan.two_shot_bytes, self.config.packet_bytes):
            self._two_shot("all_reduce", kind, x, out, -1)
        else:
            self._pipeline("all_reduce", kind, x, out, (nbytes, 0, 0), -1, has_gather=True)

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """Copy the root's `x` to all. Contiguous."""
        nbytes = x.nbytes
        if nbytes <= min(self.plan.one_shot_bytes, self.config.packet_bytes):
            self._exchange("broadcast", _MOVED, x, x, (nbytes, 0, 0), root)
        elif nbytes <= min(self.plan.two_shot_bytes, self.config.packet_bytes):
            self._two_shot("broadcast", _MOVED, x, x, root)
        else:
            self._pipeline("broadcast", _MOVED, x, x, (nbytes, 0, 0), root, has_gather=True)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Place `x` of rank r as r-th part of `out`; `x` may be that part. Contiguous."""
        self._move("all_gather", _MOVED, x, out, (x.nbytes, 0, x.nbytes))

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Place this rank's part of `x` of rank r as r-th part of `out`. Contiguous, apart from each other."""
        nbytes = x.nbytes // self.config.num_ranks
        self._move("all_to_all", _MOVED, x, out, (nbytes, nbytes, nbytes))

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor, reduction: str = "sum") -> None:
        """Reduce this rank's part of `x` of all ranks into `out`, which may be that part. Contiguous."""
        self._move("reduce_scatter", (x.dtype, reduction), x, out, (out.nbytes, out.nbytes, 0))

    def barrier(self) -> None:
        """Let the stream wait until those of all ranks have come here."""
        kernel = self._kernels[_MOVED]["collective_barrier"]
        self._launch(kernel, "barrier", 1, 32, -1)

    # --- state ---

    def set_view(self, ranks: Sequence[int]) -> None:
        """Say who takes part from now on. All say the same; no call is in flight anywhere, nor begins meanwhile."""
        self._words("view").fill_(sum(1 << rank for rank in ranks))
        self.platform.synchronize()

    def set_number(self, number: int) -> None:
        """Let the next call be `number` + 1. All ranks do so, with one above all calls made, under the same rule."""
        self._words("tags").fill_(number)
        self._words("joined").fill_(number)
        self.platform.synchronize()

    def abort(self) -> None:
        """End every wait of the kernels in flight and of later ones, from any thread."""
        self._abort.words[0] = 1

    def mark_dead(self, ranks: Sequence[int]) -> None:
        """Say which ranks are dead: calls with them end, also those in flight."""
        self._abort.words[1] = sum(1 << rank for rank in ranks)

    def check(self) -> None:
        """Raise the oldest failure that kernels have reported since the last look."""
        words = self._report.words
        pending = [i * REPORT_WORDS for i in range(NUM_REPORTS) if words[i * REPORT_WORDS]]
        if pending:
            at = min(pending, key=lambda place: int(words[place + 1]))
            facts = [int(word) for word in words[at : at + 7]]
            words[at] = 0
            raise _error(self.config.rank, facts)

    def close(self) -> None:
        """Give up all memory. No kernel may be in flight on any rank."""
        for peer in self._peers:
            peer.close()

    # --- launches ---

    def _words(self, name: str) -> torch.Tensor:
        layout = self.config.region_layout
        words: torch.Tensor = self._own.lease(layout.offset(name), layout[name].nbytes, None)
        return words.view(torch.int64)

    def _move(self, op: str, kind: Kind, x: torch.Tensor, out: torch.Tensor, row: tuple[int, int, int]) -> None:
        if row[0] <= min(self.plan.exchange_bytes, self.config.packet_bytes):
            self._exchange(op, kind, x, out, row, -1)
        else:
            self._pipeline(op, kind, x, out, row, -1, has_gather=False)

    def _exchange(
        self,
        op: str,
        kind: Kind,
        x: torch.Tensor,
        out: torch.Tensor,
        row: tuple[int, int, int],
        root: int,
    ) -> None:
        kernel = self._kernel(kind, f"collective_exchange_{'placed' if kind is _MOVED else 'reduced'}")
        args = kernel.args
        setattr(args, "in", x.data_ptr())
        args.out = out.data_ptr()
        args.num_bytes, args.in_stride, args.out_stride = row
        self._launch(kernel, op, *self._packet_grid(row[0], EXCHANGE_THREADS), root)

    def _two_shot(self, op: str, kind: Kind, x: torch.Tensor, out: torch.Tensor, root: int) -> None:
        kernel = self._kernel(kind, "collective_two_shot")
        args = kernel.args
        setattr(args, "in", x.data_ptr())
        args.out, args.num_bytes = out.data_ptr(), x.nbytes
        self._launch(kernel, op, *self._packet_grid(x.nbytes, TWO_SHOT_THREADS), root)

    def _pipeline(
        self,
        op: str,
        kind: Kind,
        x: torch.Tensor,
        out: torch.Tensor,
        row: tuple[int, int, int],
        root: int,
        *,
        has_gather: bool,
    ) -> None:
        config = self.config
        is_placed = kind is _MOVED and not has_gather
        kernel = self._kernel(kind, f"collective_pipeline_{'placed' if is_placed else 'reduced'}")
        args = kernel.args
        setattr(args, "in", x.data_ptr())
        args.out, args.has_gather = out.data_ptr(), int(has_gather)
        args.num_bytes, args.in_stride, args.out_stride = row
        lanes = min(config.num_lanes, self.plan.lanes[has_gather and root < 0])  # a root has one role, the others two
        args.slot_bytes, args.num_slots, args.num_lanes = config.chunk_bytes, config.num_slots, lanes
        parts = lanes * (config.num_ranks if has_gather else 1) * self.plan.min_chunks
        chunk = min(config.chunk_bytes, self.plan.chunk_bytes, max(1024, -(-row[0] // parts)))
        args.chunk_vecs = -(-chunk // 128) * 8
        self._launch(kernel, op, lanes * (3 if has_gather else 2), self.plan.pipeline[0], root)

    def _kernel(self, kind: Kind, name: str) -> Any:
        kernels = self._kernels.get(kind)
        if kernels is None:
            have = list(self._kernels)
            raise InvalidArgument(f"reduction {kind[1]} of {kind[0]} was not loaded, only {have}; name it in kinds=")
        return kernels[name]

    def _packet_grid(self, nbytes: int, max_threads: int) -> tuple[int, int]:
        tiles = max(1, -(-nbytes // TILE_BYTES))
        grid = min(-(-tiles // self.plan.warps), self.plan.max_blocks)
        return grid, 32 * min(max_threads // 32, -(-tiles // grid))

    def _launch(self, kernel: Any, op: str, grid: int, block: int, root: int) -> None:
        call = kernel.args.call
        call.op, call.timeout_ns = OP_NUMBERS[op], int(self.timeout_s * 1e9)
        kernel.args.root = root
        kernel(grid, block, 0, self.platform.stream(), self.plan.launch)


def _error(rank: int, facts: Sequence[int]) -> EpeeError:
    code, tag, op, peer, expected, got, where = facts
    head = context(OPS[op - 1] if 1 <= op <= len(OPS) else f"op {op}", rank=rank, peer=peer, seq=tag)
    what = f"{_WAITS.get(where, f'wait {where}')} of rank {peer} (expected={expected}, got={got})"
    if code == TIMEOUT:
        return CommTimeoutError(f"{head}: no sign of {what} within the time-out; output is lost", [peer])
    if code == PEER_DEAD:
        return CommTimeoutError(f"{head}: rank {peer} is dead, so the call ended; output is lost", [peer])
    if code == PEER_GAVE_UP:
        return CommTimeoutError(f"{head}: rank {peer} has given the call up and gone on; output is lost", [peer])
    if code == ABORTED:
        return AbortedError(f"{head}: the call was aborted, waiting for {what}")
    return ProtocolError(f"{head}: the kernel reports code {code} about {what}")
