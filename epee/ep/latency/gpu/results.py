"""Results of `LatencyBuffer` on GPUs: parts that are rarely used are made when they are first read.

All small results of a call are in one tensor on the device; counts, ranges, `got` are views of it. Making one costs the
CPU about as much as a third of a launch, so a call makes none. A view made later equals one made at once: it names
memory, and nothing is launched for it.

Called on the user's thread, at any time.
"""

from __future__ import annotations

import torch

from ....gpu.event import Event
from ....memory.fresh import Late
from ...streams import CallStream
from ..types import Hook, LatencyCombined, LatencyDispatched, LatencyHandle
from .types import CoreCombined, CoreHandle


class CudaLatencyHandle(LatencyHandle):
    """The handle of CUDA tensors.

    Attributes:
        core: what the kernels know.
    """

    def __init__(self, made_by: tuple[int, int, int], num_topk: int, core: CoreHandle, is_received: bool) -> None:
        """Begin with the buffer, the call and the epoch that made it."""
        self.buffer_id, self.seq, self.epoch = made_by
        self.num_tokens, self.num_topk = core.num_tokens, num_topk
        self.core, self.is_received = core, is_received

    @Late
    def got(self) -> torch.Tensor:
        return self.core.got

    @Late
    def layout_range(self) -> torch.Tensor:
        return self.core.layout_range

    @Late
    def src_token(self) -> torch.Tensor:
        return self.core.src_token


class _Ends:
    """The common part of both kinds of results: the end of their call."""

    _core: CoreHandle | CoreCombined  # where the kernel writes
    _where: tuple[CallStream, torch.device, int]  # that the call's work is on; a raw stream

    @Late
    def event(self) -> Event:
        call_stream, device, stream = self._where
        return call_stream.event(device, stream)

    @Late
    def got(self) -> torch.Tensor:
        return self._core.got

    @Late
    def wait_us(self) -> torch.Tensor:
        return self._core.wait_us


class CudaLatencyDispatched(_Ends, LatencyDispatched):  # type: ignore[misc]  # made late, and never None
    """The result of a dispatch of CUDA tensors.

    Args:
        x: as the attribute.
        handle: as the attribute.
        call_stream: the stream of the call.
        device, stream: that the call's work is on; a raw stream.
        hook: as the attribute.
    """

    def __init__(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: CudaLatencyHandle,
        call_stream: CallStream,
        device: torch.device,
        stream: int,
        hook: Hook | None,
    ) -> None:
        self.x, self.handle, self.hook = x, handle, hook
        self._core = self._handle = handle.core
        self._where = call_stream, device, stream
        if call_stream.is_own:
            self.event = call_stream.event(device, stream)  # recorded now

    @Late
    def num_tokens_per_expert(self) -> torch.Tensor:
        return self._handle.num_tokens_per_expert


class CudaLatencyCombined(_Ends, LatencyCombined):  # type: ignore[misc]  # likewise
    """The result of a combine of CUDA tensors.

    Args:
        core: the tensors that the kernel writes.
        weights: `[num_tokens, num_topk]` float32 that it multiplied by, None for those of the dispatch.
        handle: of the dispatch.
        num_local_experts: of a rank.
        call_stream, device, stream, hook: as of `CudaLatencyDispatched`.
    """

    def __init__(
        self,
        core: CoreCombined,
        weights: torch.Tensor | None,
        handle: CoreHandle,
        num_local_experts: int,
        call_stream: CallStream,
        device: torch.device,
        stream: int,
        hook: Hook | None,
    ) -> None:
        self.x, self.hook, self.lost = core.x, hook, None
        self._core, self._where = core, (call_stream, device, stream)
        self._weights, self._handle, self._num_local_experts = weights, handle, num_local_experts
        if call_stream.is_own:
            self.event = call_stream.event(device, stream)

    @property
    def lost_weight(self) -> torch.Tensor:
        """`[num_tokens]` float32: the weights of each token whose expert is not in the sums (see `got`)."""
        weights = self._handle.own_weights if self._weights is None else self._weights.detach()
        return lost_weight(self._handle.own_ids, weights, self.got, self._num_local_experts)


def lost_weight(ids: torch.Tensor, weights: torch.Tensor, got: torch.Tensor, num_local_experts: int) -> torch.Tensor:
    """Return `[num_tokens]` float32: the weights of each token whose expert is on a rank that is not in `got`."""
    is_lost = (ids >= 0) & ~got[(ids.clamp(min=0) // num_local_experts).long()]
    lost = torch.zeros(len(ids), dtype=torch.float32, device=ids.device)
    for k in range(ids.shape[1]):
        lost = torch.where(is_lost[:, k], lost + weights[:, k], lost)
    return lost
