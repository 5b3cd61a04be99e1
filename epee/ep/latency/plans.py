"""Cached results of the checks of calls, found again by a cache key.

Almost all calls of a model equal an earlier one in shapes, types, devices and flags. So on GPUs, where a call costs the
CPU some 20 us, the inputs of the checks form a key, and their result is the call's entry (`LatencyDispatchFacts`): a
call whose key is cached needs no checks, and finds what the path has prepared for such calls (`latency/gpu/plan.py`). A
key holds everything that a check of `checks.py` reads except data and addresses; what depends on those (where x begins,
whether `out` overlaps an input, whether the handle has been received) is checked in each call. A call that fails there,
has no key, or is not cached goes through the checks, which raise the errors. Only calls whose tensors are used
unchanged are cached: none was copied, and none was detached.

Calls with the default options are found by less when the fast path is allowed (`attempt.CallsAgain`): properties for
which a buffer has only one valid value (its dtype, its GPU, the shape of y) are compared directly, and only the rest is
a key. A new one of these is looked up by the whole key.

Called on the thread of the call, with the buffer's lock. At most `MAX_FACTS` entries of a kind are cached, then the
cache is cleared.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ...errors import expected
from ..config import CPU
from ..throughput.placement import check_topk_idx
from .checks import (
    DispatchFlags,
    GivenToCombine,
    GivenToDispatch,
    check_latency_combine,
    check_latency_dispatch,
)
from .types import (
    CallSizes,
    LatencyCombineCall,
    LatencyCombineFacts,
    LatencyDispatchCall,
    LatencyDispatchFacts,
    LatencyHandle,
)

MAX_FACTS = 512
_Tensor, _BF16, _INT64, _INT32, _FLOAT32 = torch.Tensor, torch.bfloat16, torch.int64, torch.int32, torch.float32
_NO_KEY = (AttributeError, TypeError, RuntimeError)  # raised for a value that is no tensor, or has no strides


class LatencyPlans:
    """The cache entries of one buffer's calls, with their plans.

    Args:
        sizes: of the buffer; on CPUs nothing is cached.

    Attributes:
        buffer_id: of the buffer.
    """

    def __init__(self, sizes: CallSizes) -> None:
        config = self._config = sizes.config
        self._sizes, self.buffer_id = sizes, sizes.buffer_id
        self._remembers = config.is_cuda
        self._looks_at_ids = config.device == CPU  # where kernels do not check ids, or are emulated
        self._device, self._num_ranks, self._hidden = config.device, config.num_ranks, config.hidden
        self._num_topk, self._num_experts = config.num_topk, config.num_experts
        rows = config.num_ranks * config.max_tokens_per_rank
        self._y_shape = torch.Size((config.num_local_experts, rows, config.hidden))
        self._dispatches: dict[Hashable, LatencyDispatchFacts] = {}
        self._combines: dict[Hashable, LatencyCombineFacts] = {}
        self._quick_dispatches: dict[Hashable, LatencyDispatchFacts] = {}  # the same by less, for `find_dispatch`
        self._quick_combines: dict[Hashable, LatencyCombineFacts] = {}

    def dispatch(
        self, given: tuple[Any, Any, Any, Any], flags: tuple[Any, Any, Any, Any], async_op: bool, timeout_s: float
    ) -> LatencyDispatchCall:
        """Return a checked dispatch.

        Args:
            given: as `GivenToDispatch`.
            flags: as `DispatchFlags`.
            async_op: of the call.
            timeout_s: of the call.

        Raises:
            As `check_latency_dispatch`.
        """
        if not self._remembers:
            return check_latency_dispatch(
                self._sizes, GivenToDispatch(*given), DispatchFlags(*flags), async_op, timeout_s
            )
        key: Hashable
        try:
            key = _dispatch_key(given, flags, async_op)
            facts = self._dispatches.get(key)
        except expected(*_NO_KEY):
            key = facts = None
        x, topk_idx, topk_weights, active_ranks = given
        if facts is not None and not (facts.num_tokens and x.data_ptr() % 16):
            if self._looks_at_ids:
                check_topk_idx(topk_idx, self._config.num_experts)
            return LatencyDispatchCall(facts, x, topk_idx, topk_weights, active_ranks, timeout_s)
        call = check_latency_dispatch(self._sizes, GivenToDispatch(*given), DispatchFlags(*flags), async_op, timeout_s)
        is_whole = call.x.stride(1) == 1  # a layout without rows has another stride there
        is_as_given = call.x is x and call.topk_idx is topk_idx and call.topk_weights is topk_weights
        if key is not None and is_whole and is_as_given and call.active_ranks is active_ranks:
            _remember(self._dispatches, key, call.facts)
        return call

    def combine(
        self,
        handle: LatencyHandle,
        given: tuple[Any, Any, Any, Any, Any],
        return_hook: object,
        async_op: bool,
        timeout_s: float,
    ) -> LatencyCombineCall:
        """Return a checked combine.

        Args:
            handle: of this buffer and epoch.
            given: as `GivenToCombine`.
            return_hook, async_op, timeout_s: of the call.

        Raises:
            As `check_latency_combine`.
        """
        y, topk_weights, out, active_ranks, _ = given
        key: Hashable
        try:
            key = _combine_key(handle.num_tokens, given, return_hook, async_op) if self._remembers else None
            facts = self._combines.get(key)
        except expected(*_NO_KEY):
            key = facts = None
        if facts is not None and handle.is_received and (out is None or not _meet(out, y, topk_weights)):
            return LatencyCombineCall(facts, handle, y, topk_weights, out, active_ranks, timeout_s)
        call = check_latency_combine(self._sizes, handle, GivenToCombine(*given), return_hook, async_op, timeout_s)
        is_as_given = call.y is y and call.topk_weights is topk_weights and call.out is out
        if key is not None and is_as_given and call.active_ranks is active_ranks:
            _remember(self._combines, key, call.facts)
        return call

    # -- found by less

    def find_dispatch(
        self, x: Any, idx: Any, weights: Any, mask: Any, quantisation: tuple[Any, Any, Any], return_hook: Any
    ) -> LatencyDispatchFacts | None:
        """Return the cache entry of dispatches with the default options whose arguments match, if there is one.

        `quantisation`: use_fp8, round_scale, use_ue8m0.
        """
        use_fp8, round_scale, use_ue8m0 = quantisation
        device = self._device
        try:
            is_usual = (
                type(x) is type(idx) is _Tensor
                and type(use_fp8) is type(round_scale) is type(use_ue8m0) is type(return_hook) is bool
                and x.dtype is _BF16
                and idx.dtype is _INT64
                and x.device == device
                and idx.device == device
                and x.is_contiguous()
                and idx.is_contiguous()
                and x.data_ptr() % 16 == 0
            )
            if not is_usual:
                return None
            key = x.shape, weights is None, mask is None, quantisation, return_hook
            facts = self._quick_dispatches.get(key)
            if facts is None:
                flags = return_hook, use_fp8, round_scale, use_ue8m0
                facts = self._dispatches.get(_dispatch_key((x, idx, weights, mask), flags, False))
                if facts is None:
                    return None
                _remember(self._quick_dispatches, key, facts)
            shape = facts.num_tokens, self._num_topk
            are_usual = idx.shape == shape and (weights is None or self._are_weights(weights, shape))
            if not (are_usual and (mask is None or self._is_mask(mask))):
                return None
        except expected(*_NO_KEY):
            return None
        if self._looks_at_ids:
            check_topk_idx(idx, self._num_experts)
        return facts

    def find_combine(
        self, y: Any, num_tokens: int, weights: Any, out: Any, partial_dtype: Any, mask: Any, return_hook: Any
    ) -> LatencyCombineFacts | None:
        """Return the cache entry of combines, as `find_dispatch`; `num_tokens`: of the dispatch."""
        try:
            is_usual = (
                type(y) is _Tensor
                and y.dtype is _BF16
                and y.shape == self._y_shape
                and y.device == self._device
                and y.is_contiguous()
                and type(return_hook) is bool
                and (weights is None or self._are_weights(weights, (num_tokens, self._num_topk)))
                and (out is None or (self._is_out(out, (num_tokens, self._hidden)) and not _meet(out, y, weights)))
                and (mask is None or self._is_mask(mask))
            )
            if not is_usual:
                return None
            key = num_tokens, weights is None, out is None, mask is None, partial_dtype, return_hook
            facts = self._quick_combines.get(key)
            if facts is None:
                facts = self._combines.get(
                    _combine_key(num_tokens, (y, weights, out, mask, partial_dtype), return_hook, False)
                )
                if facts is not None:
                    _remember(self._quick_combines, key, facts)
        except expected(*_NO_KEY):
            return None
        return facts

    def _are_weights(self, weights: Any, shape: tuple[int, int]) -> bool:
        return (
            type(weights) is _Tensor
            and weights.dtype is _FLOAT32
            and weights.shape == shape
            and weights.device == self._device
            and weights.is_contiguous()
            and not weights.is_neg()
        )

    def _is_out(self, out: Any, shape: tuple[int, int]) -> bool:
        is_usual = type(out) is _Tensor and out.dtype is _BF16 and out.shape == shape and out.device == self._device
        return is_usual and out.is_contiguous() and not out.requires_grad

    def _is_mask(self, mask: Any) -> bool:
        is_usual = type(mask) is _Tensor and mask.dtype is _INT32 and mask.device == self._device
        return is_usual and mask.dim() == 1 and mask.numel() >= self._num_ranks and mask.is_contiguous()


# In a key a flag stands by its identity: 1 and the true of numpy are equal to True, and refused. Two properties that
# `check_tensor` checks are left out: requires_grad, where only the address is used; the negative bit, except for
# float32, which alone may be a part of complex numbers. Tensors of other layouts have no key, or are not contiguous.


def _dispatch_key(given: tuple[Any, Any, Any, Any], flags: tuple[Any, Any, Any, Any], async_op: bool) -> Hashable:
    """Return the inputs of the checks of a dispatch; raises one of `_NO_KEY` for a value without them."""
    x, idx, weights, mask = given
    return_hook, use_fp8, round_scale, use_ue8m0 = flags
    return (
        type(x), x.shape, x.stride(), x.dtype, x.device,
        type(idx), idx.shape, idx.dtype, idx.device, idx.is_contiguous(),
        None if weights is None else _weights_key(weights),
        None if mask is None else _mask_key(mask),
        id(return_hook), id(use_fp8), id(round_scale), id(use_ue8m0), async_op,
    )  # fmt: skip


def _combine_key(
    num_tokens: int, given: tuple[Any, Any, Any, Any, Any], return_hook: object, async_op: bool
) -> Hashable:
    """Return the inputs of the checks of a combine, as `_dispatch_key`."""
    y, weights, out, mask, partial_dtype = given
    return (
        num_tokens, type(y), y.shape, y.dtype, y.device, y.is_contiguous(),
        None if weights is None else _weights_key(weights),
        None if out is None else (type(out), out.shape, out.dtype, out.device, out.is_contiguous(), out.requires_grad),
        None if mask is None else _mask_key(mask),
        partial_dtype, id(return_hook), async_op,
    )  # fmt: skip


def _mask_key(mask: torch.Tensor) -> Hashable:
    return type(mask), mask.shape, mask.dtype, mask.device, mask.is_contiguous()


def _weights_key(weights: torch.Tensor) -> Hashable:
    shape, dtype, device = weights.shape, weights.dtype, weights.device
    return type(weights), shape, dtype, device, weights.is_contiguous(), weights.is_neg()


def _meet(out: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None) -> bool:
    """Return whether `out` shares memory with an input; all are contiguous."""
    start = out.data_ptr()
    end = start + out.numel() * 2
    first = y.data_ptr()
    if start < first + y.numel() * 2 and first < end:
        return True
    if weights is None:
        return False
    first = weights.data_ptr()
    return start < first + weights.numel() * 4 and first < end


def _remember(known: dict[Hashable, Any], key: Hashable, facts: LatencyDispatchFacts | LatencyCombineFacts) -> None:
    """Cache an entry; not forever, as callers may bring new shapes all the time."""
    if len(known) >= MAX_FACTS:
        known.clear()
    known[key] = facts
