"""Common parts of DeepEP's low-latency calls and Mooncake's `ep.Buffer`: padded results, handles that are tuples.

Data path: the pool (`epee.ep.BufferPool`) finds or creates a `LatencyBuffer` of the call's sizes, that buffer moves the
rows; this module converts arguments and results. A handle is a tuple (source tokens `[L, R * T]` int32, ranges `[L, R]`
int64, T, hidden, experts), made when it is read, which refers to the epee handle (`KnownHandles`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from epee.compat.deep_ep.event import EventHandle, EventOverlap, no_event
from epee.compat.deep_ep.shared.known import KnownHandles
from epee.compat.deep_ep.shared.layout import align_up
from epee.compat.deep_ep.shared.rows import described, device_of, has_memory, int64_routing
from epee.ep import (
    BufferPool,
    LatencyBuffer,
    LatencyCombined,
    LatencyDispatched,
    LatencyHandle,
    LatencyNeed,
    Payload,
    latency_bytes,
)
from epee.errors import InvalidArgument, expected
from epee.values import is_whole, shown

_ALIGN = 128
_MOST = 1 << 20  # tokens of a rank, and experts: far above use, so that sizes made of them cannot overflow
_MOST_TOPK = 11  # served by DeepEP and Mooncake; used for sizes that are needed before top-k is known
PaddedHandle: TypeAlias = "tuple[torch.Tensor, torch.Tensor, int, int, int]"
Hook: TypeAlias = "Callable[[], None] | None"
_Latent = TypeVar("_Latent", LatencyDispatched, LatencyCombined)


class CallOptions(NamedTuple):
    """The options of a call that both interfaces have.

    Attributes:
        active_ranks: `[num_ranks or more]` int32, or None.
        timeout_us: above 0, or None for the group's.
        async_finish: return an event.
        return_recv_hook: only send; the hook receives.
        zero_copy: of a combine: use the contents of `next_combine_buffer(handle)`.
    """

    active_ranks: torch.Tensor | None
    timeout_us: int | None
    async_finish: bool
    return_recv_hook: bool
    zero_copy: bool = False


@dataclass(eq=False, slots=True)
class _KnownPaddedHandle:
    """The buffer and the epee handle of a handle's tuple; its sizes; the routing, on GPUs its shape only."""

    core: LatencyBuffer
    handle: LatencyHandle
    sizes: tuple[int, int, int]
    routing: torch.Tensor | torch.Size
    combine_buffer: torch.Tensor | None = None

    def entry(self, idx: int) -> torch.Tensor | int:
        """Return an entry of the tuple."""
        if idx < 2:
            return self.handle.layout_range if idx else self.handle.src_token
        return self.sizes[idx - 2]


def size_hint(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Return the bytes of a buffer for calls of this size."""
    return align_up(latency_bytes(num_ranks, max_tokens, hidden, num_experts, _MOST_TOPK), _ALIGN)


class PaddedCalls:
    """The calls of one compatible buffer, and the handles that they have returned.

    Args:
        pool: finds or creates the buffers.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._lately = pool.lately
        self._handles: KnownHandles[_KnownPaddedHandle] = KnownHandles(5)

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        sizes: tuple[int, int],
        how: tuple[bool, bool, bool],
        options: CallOptions,
        when_received: Callable[[LatencyDispatched], None] | None = None,
    ) -> tuple[Payload, torch.Tensor, PaddedHandle, EventOverlap, Hook]:
        """Send each token to its experts. Collective.

        Args:
            x: `[num_tokens, hidden]` bfloat16.
            topk_idx: `[num_tokens, num_topk]` int64 (or int32).
            sizes: most tokens of a rank, experts over all ranks.
            how: format in which rows are sent: use_fp8, round_scale, use_ue8m0.
            options: of the call.
            when_received: called after the receive phase.
        """
        if options.timeout_us is None:
            found = self._dispatch_again(x, topk_idx, sizes, how, options, when_received)
            if found is not None:
                return found
        use_fp8, round_scale, use_ue8m0 = how
        try:
            routing = int64_routing(topk_idx)
            _check_sizes(x, *sizes)
        except expected(InvalidArgument) as error:
            self.refuse(error, x)
            raise
        (max_tokens, num_experts), hidden, device = sizes, x.shape[1], x.device
        core = self._pool.latency_buffer(
            LatencyNeed(max_tokens, hidden, num_experts, routing.shape[1], device), options.active_ranks
        )
        got = core.dispatch(
            x,
            routing,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            active_ranks=options.active_ranks,
            timeout_us=options.timeout_us,
            async_op=options.async_finish,
            return_hook=options.return_recv_hook,
        )
        if self._pool.is_gpu(device):
            kept: torch.Tensor | torch.Size = routing.shape
        else:
            kept = routing.clone() if routing is topk_idx else routing
        handle = self._handles.handle(_KnownPaddedHandle(core, got.handle, (max_tokens, hidden, num_experts), kept))
        return got.x, got.num_tokens_per_expert, handle, _event(got, options), _after(got, options, when_received)

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: object,
        out: torch.Tensor | None,
        options: CallOptions,
        when_received: Callable[[LatencyCombined], None] | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook]:
        """Send expert outputs back and sum them, weighted by `topk_weights`. Collective.

        Args:
            x: `[num_local_experts, num_ranks * max_tokens, hidden]` bfloat16; not read with `options.zero_copy`.
            topk_idx: that of the dispatch.
            topk_weights: `[num_tokens, num_topk]` float32.
            handle: of the dispatch.
            out: `[num_tokens, hidden]` bfloat16, or None.
            options: of the call.
            when_received: called after the receive phase.
        """
        try:
            known = self._handles.checked(handle)
        except expected(InvalidArgument) as error:
            self.refuse(error, topk_weights if options.zero_copy else x)
            raise
        if options.timeout_us is None:
            found = self._combine_again(x, topk_idx, topk_weights, known, out, options, when_received)
            if found is not None:
                return found
        try:
            rows = self._rows(x, known, options.zero_copy)
            _check_same_routing(topk_idx, known.routing)
        except expected(InvalidArgument) as error:
            known.core.refuse(error)
            raise
        got = known.core.combine(
            rows,
            known.handle,
            topk_weights=topk_weights,
            out=out,
            active_ranks=options.active_ranks,
            timeout_us=options.timeout_us,
            async_op=options.async_finish,
            return_hook=options.return_recv_hook,
        )
        return got.x, _event(got, options), _after(got, options, when_received)

    def refuse(self, error: Exception, x: object) -> None:
        """Make the peers' next call fail at once because of `error`; `x` is the refused call's."""
        self._pool.refuse_latency(error, device_of(x) if isinstance(x, torch.Tensor) else None)

    def _dispatch_again(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        sizes: tuple[int, int],
        how: tuple[bool, bool, bool],
        options: CallOptions,
        when_received: Callable[[LatencyDispatched], None] | None,
    ) -> tuple[Payload, torch.Tensor, PaddedHandle, EventOverlap, Hook] | None:
        """Run a cached dispatch on a GPU, without timeout; arguments as of `dispatch`.

        Returns:
            None, without any effect, if it matches no earlier one (`LatencyBuffer.again`).
        """
        if not type(x) is type(topk_idx) is torch.Tensor or not type(sizes[0]) is type(sizes[1]) is int:
            return None
        core = self._lately.get((sizes, x.shape[1:], topk_idx.shape[1:]))
        if core is None or core.again is None:
            return None
        given = x, topk_idx, None, options.active_ranks, *how, options.return_recv_hook, True
        got = None
        if options.async_finish is False:
            got = core.again.dispatch(*given)
        elif options.async_finish is True and options.return_recv_hook is False:
            got = core.again.dispatch_async(None, *given)
        if got is None:
            return None
        of_call = sizes[0], core.config.hidden, sizes[1]
        handle = self._handles.handle(_KnownPaddedHandle(core, got.handle, of_call, topk_idx.shape))
        if got.hook is None and when_received is None and not options.async_finish:
            return got.x, got.num_tokens_per_expert, handle, no_event(), None
        return got.x, got.num_tokens_per_expert, handle, *_ends(core, got, options, when_received)

    def _combine_again(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        known: _KnownPaddedHandle,
        out: torch.Tensor | None,
        options: CallOptions,
        when_received: Callable[[LatencyCombined], None] | None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook] | None:
        """Run a cached combine on a GPU, as `_dispatch_again`."""
        again = known.core.again
        if again is None or type(topk_idx) is not torch.Tensor or topk_idx.dtype is not torch.int64:
            return None
        if type(known.routing) is not torch.Size or topk_idx.shape != known.routing:
            return None
        rows = known.combine_buffer if options.zero_copy else x
        given = rows, known.handle, topk_weights, out, None, options.active_ranks, options.return_recv_hook
        got = None
        if options.async_finish is False:
            got = again.combine(*given)
        elif options.async_finish is True and options.return_recv_hook is False:
            got = again.combine_async(None, *given)
        if got is None:
            return None
        if got.hook is None and when_received is None and not options.async_finish:
            return got.x, no_event(), None
        return got.x, *_ends(known.core, got, options, when_received)

    def next_combine_buffer(self, handle: object) -> torch.Tensor:
        """Return memory for the expert outputs that a combine with `zero_copy` reads."""
        known = self._handles.checked(handle)
        known.combine_buffer = known.core.combine_input(known.handle)
        return known.combine_buffer

    def _rows(self, x: torch.Tensor, known: _KnownPaddedHandle, zero_copy: bool) -> torch.Tensor:
        if not zero_copy:
            return x
        if known.combine_buffer is None:
            raise InvalidArgument("zero_copy needs rows in the buffer that was handed out for this handle; ask for it")
        return known.combine_buffer


def _ends(
    core: LatencyBuffer, got: _Latent, options: CallOptions, when_received: Callable[[_Latent], None] | None
) -> tuple[EventOverlap, Hook]:
    """Return the event and the hook of a cached call."""
    if got.hook is not None:
        core.hooked(got)
    return _event(got, options), got.hook if when_received is None else _after(got, options, when_received)


def _after(got: _Latent, options: CallOptions, when_received: Callable[[_Latent], None] | None) -> Hook:
    """Return the hook; without one, run the work after the receive phase now."""
    hook = got.hook
    if when_received is None:
        return hook
    if hook is None:
        if options.async_finish:
            got.event.wait()  # the function reads what the call writes
        when_received(got)
        return None

    def receive() -> None:
        """Run the receive phase, then the work after it."""
        hook()
        when_received(got)

    return receive


def _event(got: LatencyDispatched | LatencyCombined, options: CallOptions) -> EventOverlap:
    return EventOverlap(EventHandle.of(got.event.recorded())) if options.async_finish else no_event()


def _check_sizes(x: object, max_tokens: object, num_experts: object) -> None:
    """Raise unless the sizes of a dispatch are such that memory for it can be looked for; the rest is checked there."""
    if not has_memory(x) or x.dim() != 2:
        raise InvalidArgument(f"x must be bfloat16 [num_tokens, hidden], got {described(x)}")
    for name, value in (("num_max_dispatch_tokens_per_rank", max_tokens), ("num_experts", num_experts)):
        if not is_whole(value, 1, _MOST):
            raise InvalidArgument(f"{name} must be a number from 1 to {_MOST}, got {shown(value)}")


def _check_same_routing(topk_idx: object, known: torch.Tensor | torch.Size) -> None:
    """Raise unless a combine has the routing of its dispatch; on GPUs only its shape is compared."""
    routing = int64_routing(topk_idx)
    is_same = torch.equal(routing, known) if isinstance(known, torch.Tensor) else routing.shape == known
    if not is_same:
        raise InvalidArgument("topk_idx must be that of the handle's dispatch, but it differs; dispatch again")
