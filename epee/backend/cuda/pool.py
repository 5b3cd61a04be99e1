"""Memory of a group for tensors that collectives read in place: no copies through slots.

Data path: each rank allocates one region (`gpu/platform.py`), whose address all others learn in a meeting of the group
(`meeting.py`), and map. A call whose rows lie in the pools of all ranks is made by loads from there
(`csrc/kernels/collective/direct.cuh`); no rank ever stores into another rank's pool. This module allocates pieces of
the own region; nothing here communicates.

Freed pieces are set aside until the GPU has done all that was queued, as kernels of this rank, or of peers in a call of
this rank, may still read or write them; that wait comes only when no other piece is free.
"""

from __future__ import annotations

import bisect
import functools
import math
import threading

import torch

from ...errors import InvalidArgument, InvalidState, ResourceError
from ...gpu.platform import Platform
from ...untraced import untraced_methods

ALIGN = 512


@untraced_methods
class MemoryPool:
    """Memory that the ranks of a group have mapped; created by `ProcessGroup.memory_pool`.

    Tensors from here are like any others. A collective of more than 1 MiB in a row (or the limit that
    `EPEE_STAGING_BYTES` gives) on the group that created the pool is copy-free if the rows that other ranks read lie
    here on every rank: the input, and of all_reduce and broadcast the result, contiguous, beginning at a multiple of 16
    bytes. Their offsets in each rank's pool may differ. If they lie elsewhere on one rank, or that rank has no pool,
    like a process that joined later until all have called `memory_pool` once more, the call is made as without a pool,
    on all ranks. So is every call while a rank cannot map the pool of another one: all ranks log a warning that names
    the rank and the reason, and try again at the next meeting, as in `memory_pool`.

    Lifetime: the pool lives as long as its group, its mapping as long as the last tensor. A tensor's memory is reused
    when its last view is deleted and the GPU has done what was queued by then. A CUDA graph holds no tensor: keep those
    that it uses.

    Failures: a rank that loses a call may use its tensors at once, as only this rank writes here; a peer that read them
    late gets an error. The memory of a process that has died stays mapped, and is read by no call that begins without
    it; it is freed when the others unmap it.

    Attributes:
        nbytes: of this rank.
    """

    def __init__(self, platform: Platform, nbytes: int) -> None:
        self.nbytes = -(-nbytes // ALIGN) * ALIGN
        self._platform, self._region = platform, platform.create(self.nbytes)
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]  # offset and bytes, in order, none adjacent
        self._aside: list[tuple[int, int]] = []
        self._lock = threading.RLock()  # tensors are freed anywhere, also while the lock is held

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a contiguous tensor of the pool, with the previous contents of its memory.

        Args:
            shape: as of `torch.empty`, by numbers.
            dtype: of the elements.

        Raises:
            InvalidArgument: a size is below 0. ResourceError: no piece of the pool is as long. InvalidState: a graph is
                being recorded, and freed memory would have to be waited for.
        """
        if any(size < 0 for size in shape):
            raise InvalidArgument(f"shape must be sizes >= 0, got {list(shape)}")
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device=self._platform.device)
        room = -(-nbytes // ALIGN) * ALIGN
        with self._lock:
            at = self._take(room)
            if at is None and self._aside:
                self._settle()
                at = self._take(room)
            if at is None:
                free = sum(size for _, size in self._free)
                raise ResourceError(
                    f"memory_pool: no {nbytes} contiguous bytes are left of {self.nbytes} ({free} free); drop tensors, "
                    "or make the pool larger"
                )
        piece = self._region.lease(at, nbytes, functools.partial(self._give_back, at, room))
        return piece.view(dtype).view(shape)

    def holds(self, at: int, nbytes: int) -> bool:
        """Return whether memory lies here, and is aligned for the kernels."""
        start = self._region.address
        return start <= at and at + nbytes <= start + self.nbytes and at % 16 == 0

    @property
    def address(self) -> int:
        """Address of the pool on this GPU."""
        return self._region.address

    @property
    def blob(self) -> bytes:
        """Bytes with which other processes map it."""
        return self._region.blob

    def close(self) -> None:
        """Release it; tensors keep the mapping. Idempotent."""
        self._region.close()

    def _take(self, room: int) -> int | None:
        for i, (at, size) in enumerate(self._free):
            if size < room:
                continue
            self._free[i : i + 1] = [(at + room, size - room)] if size > room else []
            return at
        return None

    def _give_back(self, at: int, room: int) -> None:
        with self._lock:
            self._aside.append((at, room))

    def _settle(self) -> None:
        """Wait for the GPU, then make the pieces freed so far available."""
        if self._platform.is_capturing():
            raise InvalidState(
                "memory_pool: the free memory is that of earlier tensors, for which the CPU must wait, which a graph "
                "cannot record; allocate before the recording"
            )
        aside, self._aside = self._aside, []
        self._platform.synchronize()
        for piece in aside:
            bisect.insort(self._free, piece)
        joined: list[tuple[int, int]] = []
        for at, size in self._free:
            if joined and sum(joined[-1]) == at:
                joined[-1] = joined[-1][0], joined[-1][1] + size
            else:
                joined.append((at, size))
        self._free = joined
