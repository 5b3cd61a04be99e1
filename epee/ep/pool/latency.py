"""The memory behind a drop-in layer's low-latency calls: made when its object is made, cut for calls as they come.

Other libraries' buffers are told bytes at construction and sizes in each call. So memory of that many bytes is lent by
all ranks in the constructor, and a call of new sizes finds its place there without a word to the others: a rank that
dies before its first call is a death like any other, and a first call can be recorded in a CUDA graph.

What does not fit grows, once: the ranks meet on the host through the buffer that they have, so that nobody waits for
one that is lost, then make another one together. Without bytes the first call makes memory, of its sizes.

A process that takes a lost rank's place while a buffer of the others runs comes into it with its first call, as they
meet it in theirs (`meet_again`).
"""

from __future__ import annotations

import logging
from typing import TypedDict, TypeGuard, cast

import torch
import torch.distributed as dist

from ...errors import CommTimeoutError, InvalidArgument, PeerError, RankFailedError
from ..config import DoesNotFit
from ..latency.buffer import LatencyBuffer
from ..streams import is_capturing
from .needs import LatencyNeed, latency_bytes

_log = logging.getLogger(__name__)
_NO_SIZES = (1, 8, 1, 1)


class _Sizes(TypedDict):
    num_experts: int
    hidden: int
    num_topk: int
    max_tokens_per_rank: int


class LatencyRooms:
    """The `LatencyBuffer`s of one pool.

    Args:
        group: of the ranks.
        timeout: seconds that a call waits for a silent peer; None for epee's default.
        nbytes: of memory to be made now; too few for any call are as 0: the first call makes it.

    Attributes:
        lately: buffers of calls on GPUs, by most tokens and experts, for calls like earlier ones: who uses one of them
            needs not ask `buffer`. Emptied in place where that would do more than look one up.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None, nbytes: int) -> None:
        self._group = group
        self._timeout = timeout
        self._wholes: list[LatencyBuffer] = []  # each has memory of its own
        self._cores: dict[LatencyNeed, LatencyBuffer] = {}
        self._apart: set[LatencyBuffer] = set()  # whose ranks meet before their next call
        self.lately: dict[tuple[int, int], LatencyBuffer] = {}
        self._wanted = nbytes if nbytes >= _least_bytes(group.size()) else 0  # still to be made
        if self._wanted and not LatencyBuffer.is_awaited(group, current_gpu(), self._wanted, _NO_SIZES):
            self._make_wanted(current_gpu())

    @property
    def wholes(self) -> list[LatencyBuffer]:
        """The buffers with memory of their own."""
        return self._wholes

    def buffer(self, need: LatencyNeed, active_ranks: torch.Tensor | None = None) -> LatencyBuffer:
        """Return the buffer for a call; see `BufferPool.latency_buffer`."""
        core = self._cores.get(need)
        if core is None:
            core = self._cores[need] = self._find(need)
        if self._apart and core.whole in self._apart:
            agreed = core.sync()
            self._apart.discard(core.whole)
            if _is_mask(active_ranks, len(agreed)):  # else a GPU would wait until the time-out for who is not in
                active_ranks[: len(agreed)] *= agreed.to(active_ranks.device)
        return core

    def meet_again(self) -> None:
        """Let the next call of each buffer begin with who is in the group then; see `BufferPool.meet_again`."""
        self.lately.clear()
        for whole in list(self._wholes):
            if whole.takes_replacements:
                self._apart.add(whole)
                continue
            self._wanted = max(self._wanted, whole.config.room_bytes)
            self._cores = {need: core for need, core in self._cores.items() if core.whole is not whole}
            self._wholes.remove(whole)
            whole.close()

    def close(self) -> None:
        """Give all memory back. Local, idempotent."""
        self.lately.clear()
        for whole in self._wholes:
            whole.close()
        self._wholes.clear()
        self._cores.clear()
        self._apart.clear()

    def _find(self, need: LatencyNeed) -> LatencyBuffer:
        if self._wanted and not is_capturing():
            self._make_wanted(None if need.device.type == "cpu" else need.device)
        for whole in self._wholes:
            if whole.config.device == need.device:
                try:
                    return whole.of_sizes(**_sizes(need))
                except DoesNotFit as error:
                    _log.debug("%s", error)
        return self._grow(need)

    def _grow(self, need: LatencyNeed) -> LatencyBuffer:
        """Make a buffer for calls of these sizes. Collective."""
        needed = latency_bytes(self._group.size(), need.max_tokens, need.hidden, need.num_experts, need.num_topk)
        have = sum(whole.nbytes for whole in self._wholes)
        told = f"low-latency calls of {need.max_tokens} tokens of hidden {need.hidden} need {needed} bytes of memory"
        remedy = f"this buffer has {have}; make it with that many (get_low_latency_rdma_size_hint)"
        if is_capturing():
            raise InvalidArgument(f"{told}, which cannot be made while a CUDA graph is recorded; {remedy}")
        device = None if need.device.type == "cpu" else need.device
        sizes = need.num_experts, need.hidden, need.num_topk, need.max_tokens
        if self._wholes and not LatencyBuffer.is_awaited(self._group, device, 0, sizes):
            try:
                self._wholes[0].all_gather_bytes(b"grow")  # all are here, or nobody begins
            except (RankFailedError, PeerError, CommTimeoutError) as error:
                raise InvalidArgument(f"{told}, which cannot be made when a rank is lost; {remedy}") from error
        _log.info("%s, this buffer has %d: more is made", told, have)
        made = LatencyBuffer(self._group, **_sizes(need), device=device, timeout=self._timeout)
        self._wholes.append(made)
        return made

    def _make_wanted(self, device: torch.device | None) -> None:
        made = LatencyBuffer.of_bytes(self._group, self._wanted, device=device, timeout=self._timeout)
        _log.info("memory for low-latency calls: %d bytes on %s", made.nbytes, made.config.device)
        self._wholes.append(made)
        self._wanted = 0


def current_gpu() -> torch.device | None:
    """Return where memory is made that no tensor has asked for yet: the current GPU, None for the CPU without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _least_bytes(num_ranks: int) -> int:
    """Return the bytes of a call of one small token."""
    return latency_bytes(num_ranks, 1, 8, num_ranks, 1)


def _sizes(need: LatencyNeed) -> _Sizes:
    return {
        "num_experts": need.num_experts,
        "hidden": need.hidden,
        "num_topk": need.num_topk,
        "max_tokens_per_rank": need.max_tokens,
    }


def _is_mask(given: object, num_ranks: int) -> TypeGuard[torch.Tensor]:
    """Whether this can be a call's mask; what cannot is refused by the call."""
    is_flat = isinstance(given, torch.Tensor) and given.dtype == torch.int32 and given.dim() == 1
    return is_flat and len(cast(torch.Tensor, given)) >= num_ranks
