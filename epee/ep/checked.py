"""The checks of a `Buffer`'s calls, made once for calls that are alike.

A call on a GPU costs the host little more than its launch, so to look at each argument would show. What the rules of
`checks.py` are about, but for addresses, is the call's *facts*: shapes, strides, dtypes, devices, options. Facts that
have passed are remembered, and a call with the same facts is only looked at for what they do not say: where rows begin.
Calls whose arguments had to be changed (made contiguous), or may overlap others (`out`, `bias`), are checked each time,
and so are all calls on CPUs, whose checks look at the data and plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .checks import (
    CombineCall,
    DispatchCall,
    GivenRouting,
    PayloadRows,
    check_combine,
    check_dispatch,
    check_payload,
)
from .config import BufferConfig
from .handle import Handle
from .throughput.order import RANKS_THEN_BIAS

_MOST_FACTS = 1024  # that are remembered: callers may bring new shapes all the time
_ALIGNMENT = 16  # of rows on GPUs, as `checks.check_rows` says
_MAY_BE_NEGATED = frozenset({torch.float16, torch.float32, torch.float64})  # parts of complex numbers, lazily


class CheckedCalls:
    """Checks the calls of one buffer.

    Args:
        config: of the buffer.
    """

    def __init__(self, config: BufferConfig) -> None:
        self._config = config
        self._passed: dict[tuple[object, ...] | None, dict[Any, Any]] = {}  # with the path's memo

    def dispatch(
        self,
        x: Any,
        routing: GivenRouting,
        topk_weights: Any,
        layout: str,
        expert_alignment: int,
        members: Sequence[int] | None,
    ) -> DispatchCall:
        """Return a checked dispatch; arguments and errors as of `check_payload` and `check_dispatch`."""
        payload = check_payload(x, self._config)
        call = check_dispatch(self._config, payload, routing, topk_weights, layout, expert_alignment, members)
        facts = self._dispatch_facts(x, routing, topk_weights, layout, expert_alignment)
        if facts is not None and _are_whole(routing.topk_idx, routing.is_token_in_rank, topk_weights):
            return call._replace(memo=self._memo_of(facts))
        return call

    def dispatch_again(
        self, x: Any, routing: GivenRouting, topk_weights: Any, layout: str, expert_alignment: int
    ) -> DispatchCall | None:
        """Return a dispatch whose like has passed the checks, else None; arguments as of `dispatch`."""
        memo = self._passed.get(self._dispatch_facts(x, routing, topk_weights, layout, expert_alignment))
        if memo is None:
            return None
        payload = _known_payload(x)
        if payload.rows.data_ptr() % _ALIGNMENT:
            return None
        idx: Any = routing.topk_idx
        mask: Any = routing.is_token_in_rank
        known = routing.handle
        if known is not None:
            layout, expert_alignment = known.layout, known.expert_alignment
        most: Any = routing.capacity
        weights = _detached(topk_weights)
        return DispatchCall(payload, layout, expert_alignment, idx, weights, None, known, mask, memo, most)

    def combine(
        self,
        y: Any,
        handle: Handle,
        topk_weights: Any,
        bias: object,
        out: object,
        members: Sequence[int] | None,
    ) -> CombineCall:
        """Return a checked combine; arguments and errors as of `check_combine`."""
        call = check_combine(self._config, y, handle, topk_weights, bias, out, members)
        is_plain = bias is None and out is None and call.order is RANKS_THEN_BIAS
        facts = self._combine_facts(y, handle, topk_weights) if is_plain else None
        if facts is not None and _are_whole(y, topk_weights):
            return call._replace(memo=self._memo_of(facts))
        return call

    def combine_again(self, y: Any, handle: Handle) -> CombineCall | None:
        """Return a combine of rows alone whose like has passed the checks, else None."""
        memo = self._passed.get(self._combine_facts(y, handle, None))
        if memo is None or y.data_ptr() % _ALIGNMENT:
            return None
        rows = y.detach() if y.requires_grad else y
        return CombineCall(rows, handle, None, (), None, RANKS_THEN_BIAS, None, memo)

    def _memo_of(self, facts: tuple[object, ...]) -> dict[Any, Any]:
        if len(self._passed) >= _MOST_FACTS:
            self._passed.clear()
        return self._passed.setdefault(facts, {})

    def _dispatch_facts(
        self, x: Any, routing: GivenRouting, topk_weights: Any, layout: object, expert_alignment: object
    ) -> tuple[object, ...] | None:
        """Return what the rules look at, None where only they can tell what is wrong."""
        if not self._config.is_cuda:
            return None
        topk_idx, mask, handle, capacity = routing
        try:
            facts = (
                _facts_of(x) if isinstance(x, torch.Tensor) else tuple(map(_facts_of, x)),
                None if topk_idx is None else _facts_of(topk_idx),
                None if topk_weights is None else _facts_of(topk_weights),
                None if mask is None else _facts_of(mask),
                None if handle is None else _facts_of_handle(handle),
                layout,
                expert_alignment,
                type(expert_alignment),  # True is no 1
                capacity,
                type(capacity),
            )
            hash(facts)
        except (AttributeError, RuntimeError, TypeError):  # no dense tensors: the rules will say so
            return None
        return facts

    def _combine_facts(self, y: Any, handle: Handle, topk_weights: Any) -> tuple[object, ...] | None:
        if not self._config.is_cuda:
            return None
        try:
            weights = None if topk_weights is None else _facts_of(topk_weights)
            order = handle.order  # whose ids are not looked at on GPUs
            sums = None if order is None else (order.by, order.bias_first, order.round_partials)
            return _facts_of(y), weights, handle.num_recv, _facts_of_handle(handle), sums
        except (AttributeError, RuntimeError, TypeError):  # no dense tensors: the rules will say so
            return None


def _facts_of(value: Any) -> tuple[object, ...]:
    """Return what can be wrong with a tensor; raises for what is no dense one."""
    dtype = value.dtype
    return value.shape, value.stride(), dtype, value.device, dtype in _MAY_BE_NEGATED and value.is_neg()


def _facts_of_handle(handle: Handle) -> tuple[object, ...]:
    return handle.layout, handle.expert_alignment, handle.num_tokens, handle.with_topk, handle.capacity


def _known_payload(x: Any) -> PayloadRows:
    """Return a payload whose facts have passed."""
    if isinstance(x, torch.Tensor):
        return PayloadRows(_detached(x), x.dtype)
    values, scales = x
    return PayloadRows(_detached(values), values.dtype, _detached(scales), scales.dtype)


def _are_whole(*given: Any) -> bool:
    """Tell whether checked tensors are used as they are."""
    return all(value is None or value.is_contiguous() for value in given)


def _detached(value: Any) -> Any:
    return value.detach() if value is not None and value.requires_grad else value
