"""Cached results of the checks of calls, found again by a cache key.

Almost all calls of a model equal an earlier one in shapes, types, devices and flags. So on GPUs, where a call costs the
CPU some 20 us, the inputs of the checks form a key, and their result is the call's entry (`CheckedLatencyDispatch`): a
call whose key is cached needs no checks, and finds what the path has prepared for such calls (`latency/gpu/plan.py`). A
key holds everything that a check of `checks.py` reads except data and addresses; what depends on those (where x begins,
whether `out` overlaps an input, whether the handle has been received) is checked in each call. A call that fails there,
has no key, or is not cached goes through the checks, which raise the errors. Only calls whose tensors are used
unchanged are cached: none was copied, and none was detached.

Calls with the default options are found by less when the fast path is allowed (`attempt.CallsAgain`): by a few options
and the number of tokens, and then by one comparison of all tensors with those of the last such call, which costs less
than reading the properties of each. Where that fails the call is looked up by the whole key.

Called on the thread of the call, with the buffer's lock. At most `MAX_FACTS` entries of a kind are cached, then the
cache is cleared.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import expected
from ...torch_private import MetadataCheck, metadata_check_of
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
    CheckedLatencyCombine,
    CheckedLatencyDispatch,
    LatencyCombineCall,
    LatencyDispatchCall,
    LatencyHandle,
)

MAX_FACTS = 512
_NO_KEY = (AttributeError, TypeError, RuntimeError)  # raised for a value that is no tensor, or has no strides


class _LatencyLike(NamedTuple):
    """The entry of calls that are alike, and a comparison of tensors with theirs."""

    looks: MetadataCheck
    checked: Any


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
        self._dispatches: dict[Hashable, CheckedLatencyDispatch] = {}
        self._combines: dict[Hashable, CheckedLatencyCombine] = {}
        self._like_dispatches: dict[Hashable, _LatencyLike] = {}  # the same by less, for `find_dispatch`
        self._like_combines: dict[Hashable, _LatencyLike] = {}

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
            key = _dispatch_key(given, flags)
            checked = None if async_op and flags[0] is not False else self._dispatches.get(key)  # both are refused
        except expected(*_NO_KEY):
            key = checked = None
        x, topk_idx, topk_weights, active_ranks = given
        if checked is not None and not (checked.num_tokens and x.data_ptr() % 16):
            if self._looks_at_ids:
                check_topk_idx(topk_idx, self._config.num_experts)
            return LatencyDispatchCall(checked, x, topk_idx, topk_weights, active_ranks, timeout_s)
        call = check_latency_dispatch(self._sizes, GivenToDispatch(*given), DispatchFlags(*flags), async_op, timeout_s)
        is_whole = call.x.stride(1) == 1  # a layout without rows has another stride there
        is_as_given = call.x is x and call.topk_idx is topk_idx and call.topk_weights is topk_weights
        if key is not None and is_whole and is_as_given and call.active_ranks is active_ranks:
            _remember(self._dispatches, key, call.checked)
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
            key = _combine_key(handle.num_tokens, given, return_hook) if self._remembers else None
            checked = None if async_op and return_hook is not False else self._combines.get(key)  # likewise
        except expected(*_NO_KEY):
            key = checked = None
        if checked is not None and handle.is_received and (out is None or not _meet(out, y, topk_weights)):
            return LatencyCombineCall(checked, handle, y, topk_weights, out, active_ranks, timeout_s)
        call = check_latency_combine(self._sizes, handle, GivenToCombine(*given), return_hook, async_op, timeout_s)
        is_as_given = call.y is y and call.topk_weights is topk_weights and call.out is out
        if key is not None and is_as_given and call.active_ranks is active_ranks:
            _remember(self._combines, key, call.checked)
        return call

    # -- found by less

    def find_dispatch(
        self, x: Any, idx: Any, weights: Any, mask: Any, quantisation: tuple[Any, Any, Any], return_hook: Any
    ) -> CheckedLatencyDispatch | None:
        """Return the cache entry of dispatches with the default options whose arguments match, if there is one.

        `quantisation`: use_fp8, round_scale, use_ue8m0.
        """
        use_fp8, round_scale, use_ue8m0 = quantisation
        tensors: tuple[Any, ...]
        if mask is None:
            tensors = (x, idx) if weights is None else (x, idx, weights)
        else:
            tensors = (x, idx, mask) if weights is None else (x, idx, weights, mask)
        try:
            if not type(use_fp8) is type(round_scale) is type(use_ue8m0) is type(return_hook) is bool:
                return None
            key = x.shape, weights is None, mask is None, quantisation, return_hook
            like = self._like_dispatches.get(key)
            if like is not None and like.looks(*tensors):
                checked: CheckedLatencyDispatch | None = like.checked
            else:
                flags = return_hook, use_fp8, round_scale, use_ue8m0
                checked = self._dispatches.get(_dispatch_key((x, idx, weights, mask), flags))
                if checked is not None:
                    _note(self._like_dispatches, key, checked, tensors)
            if x.data_ptr() % 16:
                return None
        except expected(*_NO_KEY):
            return None
        if checked is not None and self._looks_at_ids:
            check_topk_idx(idx, self._config.num_experts)
        return checked

    def find_combine(
        self, y: Any, num_tokens: int, weights: Any, out: Any, partial_dtype: Any, mask: Any, return_hook: Any
    ) -> CheckedLatencyCombine | None:
        """Return the cache entry of combines, as `find_dispatch`; `num_tokens`: of the dispatch."""
        tensors = [y]
        if weights is not None:
            tensors.append(weights)
        if out is not None:
            tensors.append(out)
        if mask is not None:
            tensors.append(mask)
        try:
            if type(return_hook) is not bool:
                return None
            key = num_tokens, weights is None, out is None, mask is None, partial_dtype, return_hook
            like = self._like_combines.get(key)
            if like is not None and like.looks(*tensors):
                checked: CheckedLatencyCombine | None = like.checked
            else:
                given = y, weights, out, mask, partial_dtype
                checked = self._combines.get(_combine_key(num_tokens, given, return_hook))
                if checked is not None:
                    _note(self._like_combines, key, checked, tensors)
            return None if out is not None and _meet(out, y, weights) else checked
        except expected(*_NO_KEY):
            return None


# In a key a flag stands by its identity: 1 and the true of numpy are equal to True, and refused. Two properties that
# `check_tensor` checks are left out: requires_grad, where only the address is used; the negative bit, except for
# float32, which alone may be a part of complex numbers. Tensors of other layouts have no key, or are not contiguous.


def _dispatch_key(given: tuple[Any, Any, Any, Any], flags: tuple[Any, Any, Any, Any]) -> Hashable:
    """Return the inputs of the checks of a dispatch; raises one of `_NO_KEY` for a value without them."""
    x, idx, weights, mask = given
    return_hook, use_fp8, round_scale, use_ue8m0 = flags
    return (
        type(x), x.shape, x.stride(), x.dtype, x.device,
        type(idx), idx.shape, idx.dtype, idx.device, idx.is_contiguous(),
        None if weights is None else _weights_key(weights),
        None if mask is None else _mask_key(mask),
        id(return_hook), id(use_fp8), id(round_scale), id(use_ue8m0),
    )  # fmt: skip


def _combine_key(num_tokens: int, given: tuple[Any, Any, Any, Any, Any], return_hook: object) -> Hashable:
    """Return the inputs of the checks of a combine, as `_dispatch_key`."""
    y, weights, out, mask, partial_dtype = given
    return (
        num_tokens, type(y), y.shape, y.dtype, y.device, y.is_contiguous(),
        None if weights is None else _weights_key(weights),
        None if out is None else (type(out), out.shape, out.dtype, out.device, out.is_contiguous(), out.requires_grad),
        None if mask is None else _mask_key(mask),
        partial_dtype, id(return_hook),
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


def _remember(known: dict[Hashable, Any], key: Hashable, entry: object) -> None:
    """Cache an entry; not forever, as callers may bring new shapes all the time."""
    if len(known) >= MAX_FACTS:
        known.clear()
    known[key] = entry


def _note(known: dict[Hashable, Any], key: Hashable, checked: object, tensors: Sequence[Any]) -> None:
    """Cache an entry under the properties of a call's tensors, if these can be compared."""
    looks = metadata_check_of(*tensors)
    if looks is not None:
        _remember(known, key, _LatencyLike(looks, checked))
