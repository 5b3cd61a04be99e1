"""What DeepEP's low-latency calls and Mooncake's `ep.Buffer` have in common: padded results, handles that are tuples.

Data path: `LatencyBuffer`s (`PaddedRooms`: one for each shape, made at its first call, collective) move the rows;
here arguments and results are turned around. A handle is a tuple (source tokens `[L, R * T]` int32, ranges `[L, R]`
int64, T, hidden, experts); its first tensor is the key under which the epee handle is remembered, so a tuple that went
through lists or pytrees still works, and a copy of its tensors does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeGuard, cast

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from epee.compat.deep_ep.event import EventHandle, EventOverlap, is_capturing
from epee.compat.deep_ep.shared.rows import int64_routing
from epee.ep.config import BufferConfig
from epee.ep.event import Event as CoreEvent
from epee.ep.handle import Payload
from epee.ep.latency.buffer import LatencyBuffer as Core
from epee.ep.latency.types import LatencyCombined, LatencyDispatched, LatencyHandle, Quantisation
from epee.ep.latency.wire import region_layout
from epee.errors import InvalidArgument, InvalidState
from epee.memory.layout import align_up

_ALIGN = 128
_MOST_TOPK = 11  # that DeepEP and Mooncake serve: sizes that are asked for before top-k is known
PaddedHandle: TypeAlias = "tuple[torch.Tensor, torch.Tensor, int, int, int]"
Hook: TypeAlias = "Callable[[], None] | None"


class RoomShape(NamedTuple):
    """The sizes that a room is made for.

    Attributes:
        max_tokens: most tokens of a rank.
        hidden: elements of a row.
        num_experts: over all ranks.
        num_topk: columns of `topk_idx`.
        device: of the tensors.
    """

    max_tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    device: torch.device


class Ways(NamedTuple):
    """How a call runs: the arguments that both interfaces have.

    Attributes:
        active_ranks: `[num_ranks or more]` int32, or None.
        timeout_us: above 0, or None for the group's.
        async_finish: return an event.
        return_recv_hook: only send; the hook receives.
    """

    active_ranks: torch.Tensor | None
    timeout_us: int | None
    async_finish: bool
    return_recv_hook: bool


@dataclass(eq=False)
class _KnownPaddedHandle:
    """The buffer, the handle and the routing behind a handle's tuple."""

    core: Core
    handle: LatencyHandle
    topk_idx: torch.Tensor
    combine_buffer: torch.Tensor | None = None


def size_hint(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Return the bytes that a rank lends for calls of this size; address space on CPUs, and it bounds nothing."""
    config = BufferConfig(num_ranks, num_experts, hidden, _MOST_TOPK, max_tokens, torch.bfloat16, is_latency=True)
    config.check()
    return align_up(region_layout(config).nbytes, _ALIGN)


class PaddedRooms:
    """The latency buffers behind one compatible buffer.

    Args:
        group: of the ranks.
        timeout: seconds that a call waits for a silent peer; None for epee's default.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None = None) -> None:
        self._group = group
        self._timeout = timeout
        self._rooms: dict[RoomShape, Core] = {}
        self._apart: set[RoomShape] = set()  # rooms whose ranks meet before their next call
        self._handles: Any = WeakTensorKeyDictionary()
        self._is_closed = False

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        sizes: tuple[int, int],
        how: Quantisation,
        ways: Ways,
        when_received: Callable[[LatencyDispatched], None] | None = None,
    ) -> tuple[Payload, torch.Tensor, PaddedHandle, EventOverlap, Hook]:
        """Send each token to its experts. Collective.

        Args:
            x: `[num_tokens, hidden]` bfloat16.
            topk_idx: `[num_tokens, num_topk]` int64 (or int32).
            sizes: most tokens of a rank, experts over all ranks.
            how: rows are sent.
            ways: of the call.
            when_received: called when the receive half has been done.
        """
        routing = int64_routing(topk_idx)
        if not isinstance(x, torch.Tensor) or x.dim() != 2:
            raise InvalidArgument("x must be bfloat16 [num_tokens, hidden]")
        max_tokens, num_experts = sizes
        core = self._room(RoomShape(max_tokens, x.shape[1], num_experts, routing.shape[1], x.device), ways.active_ranks)
        got = core.dispatch(
            x,
            routing,
            use_fp8=how.use_fp8,
            round_scale=how.round_scale,
            use_ue8m0=how.use_ue8m0,
            **_options(ways),
        )
        handle = (got.handle.src_token, got.handle.layout_range, max_tokens, x.shape[1], num_experts)
        self._handles[handle[0]] = _KnownPaddedHandle(
            core, got.handle, routing.clone() if routing is topk_idx else routing
        )
        then = None if when_received is None else lambda: when_received(got)
        hook = self._after(got, ways, then)
        return got.x, got.num_tokens_per_expert, handle, _event(got.event, ways), hook

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: object,
        out: torch.Tensor | None,
        ways: Ways,
        zero_copy: bool,
        when_received: Callable[[LatencyCombined], None] | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook]:
        """Bring expert outputs back and sum them, weighted by `topk_weights`. Collective.

        Args:
            x: `[num_local_experts, num_ranks * max_tokens, hidden]` bfloat16; with `zero_copy` what was written into
                `next_combine_buffer(handle)` is taken instead.
            topk_idx: that of the dispatch.
            topk_weights: `[num_tokens, num_topk]` float32.
            handle: of the dispatch.
            out: `[num_tokens, hidden]` bfloat16, or None.
            ways: of the call.
            zero_copy: see x.
            when_received: called when the receive half has been done.
        """
        known = self._known(handle)
        try:
            rows = self._rows(x, known, zero_copy)
            _check_same_routing(topk_idx, known.topk_idx)
        except InvalidArgument as error:
            known.core.refuse(error)
            raise
        got = known.core.combine(rows, known.handle, topk_weights=topk_weights, out=out, **_options(ways))
        then = None if when_received is None else lambda: when_received(got)
        hook = self._after(got, ways, then)
        return got.x, _event(got.event, ways), hook

    def next_combine_buffer(self, handle: object) -> torch.Tensor:
        """Return memory for the expert outputs that a combine with `zero_copy` takes."""
        known = self._known(handle)
        known.combine_buffer = known.core.combine_input(known.handle)
        return known.combine_buffer

    def meet_again(self) -> None:
        """Let the next call of each shape begin with who is in the group then. All ranks call it; handles end.

        On a group of the backend "epee" it begins with `sync`, which takes in those who took the places of lost ranks;
        on others with a new room. Whom the ranks do not agree on there is taken out of that call's mask.
        """
        for shape, core in list(self._rooms.items()):
            if core.takes_replacements:
                self._apart.add(shape)
            else:
                self._rooms.pop(shape).close()

    def forget(self) -> None:
        """Close the rooms; the next call makes new ones. Handles end."""
        for core in self._rooms.values():
            core.close()
        self._rooms.clear()

    def close(self) -> None:
        """Close for good. Idempotent."""
        self._is_closed = True
        self.forget()

    def _room(self, shape: RoomShape, active_ranks: torch.Tensor | None) -> Core:
        if self._is_closed:
            raise InvalidState("the buffer is destroyed; make a new one")
        core = self._rooms.get(shape)
        if core is None:
            if is_capturing():
                raise InvalidState("a first call of this shape makes memory, which a CUDA graph cannot record")
            core = self._rooms[shape] = Core(
                self._group,
                num_experts=shape.num_experts,
                hidden=shape.hidden,
                num_topk=shape.num_topk,
                max_tokens_per_rank=shape.max_tokens,
                device=None if shape.device.type == "cpu" else shape.device,
                timeout=self._timeout,
            )
        elif shape in self._apart:
            agreed = core.sync()
            self._apart.discard(shape)
            if _is_mask(active_ranks, len(agreed)):  # else a GPU would wait until the time-out for who is not in
                active_ranks[: len(agreed)] *= agreed.to(active_ranks.device)
        return core

    def _known(self, handle: object) -> _KnownPaddedHandle:
        key = handle[0] if isinstance(handle, (tuple, list)) and handle else None
        known = self._handles.get(key) if isinstance(key, torch.Tensor) else None
        if known is None:
            raise InvalidArgument(
                "handle must be what a dispatch of this buffer returned (the same tensors, not copies), got "
                f"{type(handle).__name__}; dispatch again"
            )
        return cast(_KnownPaddedHandle, known)

    def _rows(self, x: torch.Tensor, known: _KnownPaddedHandle, zero_copy: bool) -> torch.Tensor:
        if not zero_copy:
            return x
        if known.combine_buffer is None:
            raise InvalidArgument("zero_copy needs rows in the buffer that was handed out for this handle; ask for it")
        return known.combine_buffer

    def _after(self, got: LatencyDispatched | LatencyCombined, ways: Ways, then: Callable[[], None] | None) -> Hook:
        """Return the hook; without one, do now what comes after the receive half."""
        hook = got.hook
        if hook is None:
            if then is not None:
                if ways.async_finish:
                    got.event.wait()  # it reads what the call writes
                then()
            return None

        def receive() -> None:
            hook()
            if then is not None:
                then()

        return receive


def _is_mask(given: object, num_ranks: int) -> TypeGuard[torch.Tensor]:
    """Whether this can be a call's mask; what cannot is refused by the call."""
    is_flat = isinstance(given, torch.Tensor) and given.dtype == torch.int32 and given.dim() == 1
    return is_flat and len(cast(torch.Tensor, given)) >= num_ranks


def _options(ways: Ways) -> dict[str, Any]:
    return {
        "active_ranks": ways.active_ranks,
        "timeout_us": ways.timeout_us,
        "async_op": ways.async_finish,
        "return_hook": ways.return_recv_hook,
    }


def _event(event: CoreEvent, ways: Ways) -> EventOverlap:
    return EventOverlap(EventHandle.of(event.recorded()) if ways.async_finish else None)


def _check_same_routing(topk_idx: object, known: torch.Tensor) -> None:
    """Raise unless a combine names the routing of its dispatch; on GPUs only its shape is looked at."""
    routing = int64_routing(topk_idx)
    if routing.shape != known.shape or (routing.device.type == "cpu" and not torch.equal(routing, known)):
        raise InvalidArgument("topk_idx must be that of the handle's dispatch, but it differs; dispatch again")
