"""What the checks have found out about calls, remembered for those that look alike.

Almost all calls of a model look like one before: the same shapes, types, devices and flags. So on GPUs, where a call
costs the host some 20 us, what the checks look at is a key, and their finding a plan: a call whose key is known needs
no checks, and finds what the path has prepared for such calls (`latency/gpu/plan.py`). A key holds all that a check of
`checks.py` looks at but data and addresses; what depends on those (where x begins, whether `out` meets an input,
whether the handle has been received) is looked at in each call. What fails there, has no key, or is unknown goes
through the checks, which raise what there is to raise. Remembered are only calls whose tensors are used as they came:
no copy was made of one, and none was detached.

Who calls: the thread of a call, with the buffer's lock. At most `MAX_PLANS` of a kind are remembered, then it begins
anew.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ..config import CPU
from ..throughput.placement import check_topk_idx
from .checks import (
    DispatchFlags,
    GivenToCombine,
    GivenToDispatch,
    check_latency_combine,
    check_latency_dispatch,
)
from .types import CallSizes, CombinePlan, DispatchPlan, LatencyCombineCall, LatencyDispatchCall, LatencyHandle

MAX_PLANS = 512
NO_KEY = (AttributeError, TypeError, RuntimeError)  # of what is no tensor, or none with strides


class Plans:
    """The plans of one buffer.

    Args:
        sizes: of the buffer; on CPUs nothing is remembered.

    Attributes:
        looks_at_ids: whether each call has its ids checked on the host.
    """

    def __init__(self, sizes: CallSizes) -> None:
        config = self._config = sizes.config
        self._sizes = sizes
        self._remembers = config.is_cuda
        self.looks_at_ids = config.device == CPU  # where kernels do not look at ids, or are emulated
        self._dispatches: dict[Hashable, DispatchPlan] = {}
        self._combines: dict[Hashable, CombinePlan] = {}

    def known_dispatch(self, given: tuple[Any, Any, Any, Any], flags: tuple[Any, Any, Any, Any]) -> DispatchPlan | None:
        """Return the plan of dispatches that look like these, if there is one; raises one of `NO_KEY` where there is
        no key. Addresses and ids are still to be looked at."""
        return self._dispatches.get(_dispatch_key(given, flags, False))

    def known_combine(self, num_tokens: int, given: tuple[Any, Any, Any, Any, Any]) -> CombinePlan | None:
        """Return the plan of combines without hooks, as `known_dispatch`; addresses are still to be looked at."""
        return self._combines.get(_combine_key(num_tokens, given, False, False))

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
            plan = self._dispatches.get(key)
        except NO_KEY:
            key = plan = None
        x, topk_idx, topk_weights, active_ranks = given
        if plan is not None and not (plan.num_tokens and x.data_ptr() % 16):
            if self.looks_at_ids:
                check_topk_idx(topk_idx, self._config.num_experts)
            return LatencyDispatchCall(plan, x, topk_idx, topk_weights, active_ranks, timeout_s)
        call = check_latency_dispatch(self._sizes, GivenToDispatch(*given), DispatchFlags(*flags), async_op, timeout_s)
        is_whole = call.x.stride(1) == 1  # a layout without rows has another stride there
        is_as_given = call.x is x and call.topk_idx is topk_idx and call.topk_weights is topk_weights
        if key is not None and is_whole and is_as_given and call.active_ranks is active_ranks:
            remember(self._dispatches, key, call.plan)
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
            plan = self._combines.get(key)
        except NO_KEY:
            key = plan = None
        if plan is not None and handle.is_received and (out is None or not meet(out, y, topk_weights)):
            return LatencyCombineCall(plan, handle, y, topk_weights, out, active_ranks, timeout_s)
        call = check_latency_combine(self._sizes, handle, GivenToCombine(*given), return_hook, async_op, timeout_s)
        is_as_given = call.y is y and call.topk_weights is topk_weights and call.out is out
        if key is not None and is_as_given and call.active_ranks is active_ranks:
            remember(self._combines, key, call.plan)
        return call


# In a key a flag stands by its identity: 1 and the true of numpy are equal to True, and refused. Of what `check_tensor`
# looks at, two things are left out: who needs a gradient, where only the address is used; who is negated, but for
# float32, which alone may be a part of complex numbers. Tensors of other layouts have no key, or are not contiguous.


def _dispatch_key(given: tuple[Any, Any, Any, Any], flags: tuple[Any, Any, Any, Any], async_op: bool) -> Hashable:
    """Return what the checks of a dispatch look at; raises one of `NO_KEY` for what has no such thing."""
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
    """Return what the checks of a combine look at, as `_dispatch_key`."""
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


def meet(out: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None) -> bool:
    """Tell whether `out` shares memory with an input; all lie in one piece each."""
    start = out.data_ptr()
    end = start + out.numel() * 2
    first = y.data_ptr()
    if start < first + y.numel() * 2 and first < end:
        return True
    if weights is None:
        return False
    first = weights.data_ptr()
    return start < first + weights.numel() * 4 and first < end


def remember(plans: dict[Hashable, Any], key: Hashable, plan: DispatchPlan | CombinePlan) -> None:
    """Keep a plan; not for ever, as callers may bring new shapes all the time."""
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan
