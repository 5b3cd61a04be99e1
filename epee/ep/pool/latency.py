"""The memory of a drop-in layer's low-latency calls: made at construction, cut into sections for each call.

Other libraries' buffers are given bytes at construction and sizes in each call. So memory of that many bytes is lent by
all ranks in the constructor, and a call of new sizes computes its offsets there without a message to the others: a rank
that dies before its first call is a death like any other, and a first call can be recorded in a CUDA graph.

There is one memory for GPUs and one for CPUs. If a call does not fit, a larger one replaces it: the ranks meet on the
CPU through the one that they have, so that none waits for a lost rank, and make it together. Without bytes the first
call makes memory. Either has room for more tokens than it needs (`num_tokens_made_for`), so it happens rarely. Handles
keep the memory of their calls, and memory that a CUDA graph has recorded stays until the end.

A process that replaces a lost rank joins the memory that the others have (`LatencyBuffer.awaited_bytes`), with its
first call, while they meet it before theirs (`meet_again`); then calls look for room, or all grow together.
"""

from __future__ import annotations

import logging
import weakref
from typing import TypeAlias, TypeGuard, cast

import torch
import torch.distributed as dist

from ...arrays import writing
from ...errors import CommTimeoutError, InvalidArgument, InvalidState, PeerError, RankFailedError
from ...gpu.payload import DoesNotFit
from ..config import MAX_LATENCY_TOKENS
from ..latency.buffer import LatencyBuffer
from ..streams import is_capturing
from .meetings import Steps, steps_of
from .needs import LatencyNeed, latency_bytes, num_tokens_made_for

_log = logging.getLogger(__name__)
# Most tokens and experts; the shapes of a row and of a token's ids. The latter are `torch.Size` in a lookup.
LatelyKey: TypeAlias = "tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]]"


class LatencyRooms:
    """The `LatencyBuffer`s of one pool.

    Args:
        group: of the ranks.
        timeout: seconds that a call waits for a silent peer; None for epee's default.
        nbytes: of memory to be made now; too few for any call are as 0: the first call makes it.
        meets: making further rooms on a group, and `meet_again` on existing ones, are one step (`meetings.py`): if a
            rank takes it the second way, all continue in the memory that they have.

    Attributes:
        lately: buffers of calls on GPUs, by `LatelyKey`, for cached calls: a user of one of them must not need more
            than that. Emptied whenever the next call may need anything else.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None, nbytes: int, meets: bool = False) -> None:
        self._steps = steps_of(group) if meets else None
        self._group = group
        self._timeout = timeout
        self._whole: dict[str, LatencyBuffer] = {}  # with memory of their own, by type of device
        self._kept: list[LatencyBuffer] = []  # whose memory graphs have recorded
        self._cores: dict[LatencyNeed, LatencyBuffer] = {}
        self._apart: set[LatencyBuffer] = set()  # whose ranks meet before their next call
        self.lately: dict[LatelyKey, LatencyBuffer] = {}
        self._wanted = nbytes if nbytes >= _least_bytes(group.size()) else 0  # still to be made
        device = current_gpu()
        if self._steps is not None and self._adopt(self._steps):
            return
        if self._wanted and not LatencyBuffer.awaited_bytes(group, device, self._wanted):
            self._make(self._wanted, device)

    @property
    def wholes(self) -> list[LatencyBuffer]:
        """The buffers with memory of their own."""
        return [*self._whole.values(), *self._kept]

    def buffer(self, need: LatencyNeed, active_ranks: torch.Tensor | None = None) -> LatencyBuffer:
        """Return the buffer for a call; see `BufferPool.latency_buffer`."""
        if self._apart:
            self._meet(need, active_ranks)
        core = self._cores.get(need)
        if core is None:
            core = self._cores[need] = self._find(need)
        return core

    def _adopt(self, steps: Steps) -> bool:
        """Take over the memory of this process's newest rooms on the group if a peer meets again in it.

        Raises:
            InvalidState: a peer does, and this process no longer has those rooms.
        """
        before, steps.newest = steps.newest, weakref.ref(self)
        if not steps.has_memory or not steps.is_met_again(self._timeout):
            return False
        older = None if before is None else before()
        if older is None:
            raise InvalidState(
                "a peer has called update_ep_member on its buffer, and this rank has dropped the one that belongs to "
                "it; keep it until the new one is made, or make new ones on all ranks"
            )
        wholes = older._in_group()
        self._whole.update(wholes)
        self._apart.update(wholes.values())
        if wholes:
            self._wanted = 0
        return bool(wholes)

    def _in_group(self) -> dict[str, LatencyBuffer]:
        """Return the memory that replacements of lost ranks join, by type of device."""
        return {kind: whole for kind, whole in self._whole.items() if whole.takes_replacements}

    def meet_again(self) -> None:
        """Make the next call begin with the current members of the group; see `BufferPool.meet_again`."""
        self.lately.clear()
        if self._steps is not None and self._steps.has_memory:
            self._steps.meet_again()
        for kind, whole in list(self._whole.items()):
            if whole.takes_replacements:
                self._apart.add(whole)
            else:
                self._wanted = max(self._wanted, whole.config.room_bytes)
                self._replace(kind)

    def close(self) -> None:
        """Free all memory. Local, idempotent."""
        for whole in self.wholes:
            whole.close()
        for part in (self._whole, self._kept, self._cores, self._apart, self.lately):
            part.clear()

    def _meet(self, need: LatencyNeed, active_ranks: torch.Tensor | None) -> None:
        whole = self._whole.get(need.device.type)
        if whole is None or whole not in self._apart:
            return
        if self._steps is not None:
            self._steps.meet()
        agreed = whole.sync()
        self._apart.discard(whole)
        # otherwise a GPU would wait until the timeout for ranks that are no members
        if _is_mask(active_ranks, len(agreed)):
            with writing(active_ranks):
                active_ranks[: len(agreed)] *= agreed.to(active_ranks.device)

    def _find(self, need: LatencyNeed) -> LatencyBuffer:
        whole = self._whole.get(need.device.type) or self._make_first(need)
        try:
            if whole.config.device != need.device:
                raise InvalidArgument(
                    f"x must be on {whole.config.device}, where this buffer has its memory, got {need.device}; call "
                    "torch.cuda.set_device before the buffer is made"
                )
            return _cut(whole, need)
        except DoesNotFit as error:
            return _cut(self._grow(need, whole, error), need)
        except InvalidArgument as error:
            whole.refuse(error)  # concerns this rank's sizes alone, as far as it knows
            raise

    def _make_first(self, need: LatencyNeed) -> LatencyBuffer:
        """Make memory, or join that of the others. Collective."""
        device = None if need.device.type == "cpu" else need.device
        needed = self._wanted or _bytes_for(need, self._group.size())
        self._require_no_graph(need, needed)
        awaited = LatencyBuffer.awaited_bytes(self._group, device, needed)
        made = self._make(awaited or needed, device)
        if awaited and self._steps is not None:
            self._steps.join()
        return made

    def _grow(self, need: LatencyNeed, whole: LatencyBuffer, reason: DoesNotFit) -> LatencyBuffer:
        """Replace `whole` by larger memory. Collective."""
        needed = max(_bytes_for(need, self._group.size()), whole.config.room_bytes)
        self._require_no_graph(need, needed)
        try:
            whole.all_gather_bytes(b"grow")  # all are here, or none begins
        except (RankFailedError, PeerError, CommTimeoutError) as error:
            raise InvalidArgument(f"{reason}; it cannot be made when a rank is lost") from error
        _log.info("%s: %d bytes are made", reason, needed)
        return self._make(needed, None if need.device.type == "cpu" else need.device)

    def _require_no_graph(self, need: LatencyNeed, needed: int) -> None:
        if is_capturing():
            raise InvalidArgument(
                f"low-latency calls of {need.max_tokens} tokens of hidden {need.hidden} need {needed} bytes of memory, "
                "which cannot be made while a CUDA graph is recorded; make the buffer with as many "
                "(get_low_latency_rdma_size_hint), or one call of these sizes before"
            )

    def _make(self, nbytes: int, device: torch.device | None) -> LatencyBuffer:
        made = LatencyBuffer.of_bytes(self._group, nbytes, device=device, timeout=self._timeout)
        _log.info("memory for low-latency calls: %d bytes on %s", made.nbytes, made.config.device)
        kind = made.config.device.type
        if kind in self._whole:
            self._replace(kind)
        self._whole[kind] = made
        self._wanted = 0
        if self._steps is not None and made.takes_replacements:
            self._steps.has_memory = True
        return made

    def _replace(self, kind: str) -> None:
        """Release memory: it is freed with the last handle of its calls."""
        whole = self._whole.pop(kind)
        self.lately.clear()
        self._apart.discard(whole)
        self._cores = {need: core for need, core in self._cores.items() if core.whole is not whole}
        if whole.is_recorded:
            self._kept.append(whole)


def current_gpu() -> torch.device | None:
    """Return the device of memory made before any tensor is given: the current GPU, None for the CPU without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _cut(whole: LatencyBuffer, need: LatencyNeed) -> LatencyBuffer:
    return whole.of_sizes(
        num_experts=need.num_experts,
        hidden=need.hidden,
        num_topk=need.num_topk,
        max_tokens_per_rank=need.max_tokens,
    )


def _bytes_for(need: LatencyNeed, num_ranks: int) -> int:
    """Return the bytes that are made for calls of such sizes, and of more tokens."""
    num_tokens = max(need.max_tokens, min(num_tokens_made_for(need.max_tokens), MAX_LATENCY_TOKENS))
    return latency_bytes(num_ranks, num_tokens, need.hidden, need.num_experts, need.num_topk)


def _least_bytes(num_ranks: int) -> int:
    """Return the bytes of a call of one small token."""
    return latency_bytes(num_ranks, 1, 8, num_ranks, 1)


def _is_mask(given: object, num_ranks: int) -> TypeGuard[torch.Tensor]:
    """Whether this can be a call's mask; any other value is refused by the call."""
    is_flat = isinstance(given, torch.Tensor) and given.dtype == torch.int32 and given.dim() == 1
    return is_flat and len(cast(torch.Tensor, given)) >= num_ranks
