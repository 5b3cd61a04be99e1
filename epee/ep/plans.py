"""Cached plans of the calls of a `Buffer`: a call is checked once, planned once, and found again by its cache key.

`latency/plans.py` has the same for `LatencyBuffer`.

A call on a GPU costs the CPU little more than its launch, so checking each argument would be noticeable. Everything
that the rules of `checks.py` read, except addresses, is the call's *cache key* (`checked`): shapes, strides, dtypes,
devices, options. Keys that have passed are stored with what the path has planned for them (`CheckedCalls`). A call with
the same key is only checked for what the key does not contain: the alignment of rows; of a combine, whether rows and
weights are contiguous, and how many there are. Calls whose arguments had to be changed (made contiguous), or may
overlap others (`out`, `bias`), are checked each time; so are all calls on CPUs, whose checks read the data and plan:
they need nothing of this module.

When the fast path is allowed (`attempt.CallsAgain`) a call's plan is first looked up by less (`KnownPlans`): among the
last few kinds of dispatches by one comparison of all tensors, which costs less than reading the properties of each;
else by a key. A drop-in layer that has a key of its own keeps the plan (`Buffer.dispatches_like`): then nothing is
looked up here.

Called on the thread of the call, with the buffer's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import expected
from ..torch_private import MAX_CHECKS, MetadataCheck, metadata_check_of
from .checks import CombineCall, DispatchCall, GivenRouting, check_combine, check_dispatch
from .config import BufferConfig
from .handle import Handle
from .members.rows import RowExchange
from .throughput.gpu.combine import AnyCombinePlan, find_source
from .throughput.gpu.dispatch import DispatchPlan, short_key
from .throughput.gpu.shape import Shape
from .throughput.gpu_handle import CudaHandle

_MOST_FACTS = 1024  # cached at most: callers may bring new shapes all the time
# raised for a value that is no tensor, or no dense one
NO_FACTS = (AttributeError, RuntimeError, TypeError, ValueError)
_MAY_BE_NEGATED = frozenset({torch.float16, torch.float32, torch.float64})  # parts of complex numbers, lazily
_MOST_KEYS = 1024  # of a kind, that lead to plans
BY_TOPK = (None, None, None)  # no mask, no handle, no capacity
ALIGNMENT = 16  # of rows, as in `checks.check_rows`


class CheckedCalls:
    """Checks the calls of one buffer on a GPU.

    Args:
        config: of the buffer.
    """

    def __init__(self, config: BufferConfig) -> None:
        self._config = config
        self._passed: dict[object, dict[Any, Any]] = {}  # with the path's memo

    def dispatch(
        self, x: Any, routing: GivenRouting, others: tuple[Any, Any, Any], members: Sequence[int] | None
    ) -> DispatchCall:
        """Return a checked dispatch; arguments and errors as of `check_dispatch`."""
        call = check_dispatch(self._config, x, routing, others, members)
        topk_weights, layout, expert_alignment = others
        routed = routing.is_token_in_rank, routing.handle, routing.capacity
        given = x, routing.topk_idx, topk_weights, routed, layout, expert_alignment
        checked = self._checked(checked_dispatch, *given)
        if checked is not None and _are_whole(routing.topk_idx, routing.is_token_in_rank, topk_weights):
            return call._replace(memo=self._note(checked))
        return call

    def combine(
        self, y: Any, handle: Handle, others: tuple[Any, Any, Any], members: Sequence[int] | None
    ) -> CombineCall:
        """Return a checked combine; arguments and errors as of `check_combine`."""
        call = check_combine(self._config, y, handle, others, members)
        topk_weights, bias, out = others
        is_plain = bias is None and out is None and len(call.y) == handle.num_recv  # fewer rows are checked each time
        checked = self._checked(checked_combine, y, handle, topk_weights) if is_plain else None
        if checked is not None and _are_whole(y, topk_weights):
            return call._replace(memo=self._note(checked))
        return call

    def memo_of(self, checked: object) -> dict[Any, Any] | None:
        """Return the memo of calls with this cache key, None if none has passed the checks.

        The alignment of rows is not in the key and is still to be checked.
        """
        return self._passed.get(checked)

    def _note(self, checked: tuple[object, ...]) -> dict[Any, Any]:
        if len(self._passed) >= _MOST_FACTS:
            self._passed.clear()
        return self._passed.setdefault(checked, {})

    def _checked(self, checked_of: Callable[..., tuple[object, ...]], *given: Any) -> tuple[object, ...] | None:
        """Return the cache key of a call; None if only the rules can determine the error."""
        try:
            checked = checked_of(*given)
            hash(checked)
        except expected(*NO_FACTS):
            return None
        return checked


class _Like(NamedTuple):
    """The plan of dispatches that are alike: their options, and a comparison of tensors with theirs."""

    plan: DispatchPlan
    options: object
    looks: MetadataCheck


class KnownPlans:
    """Finds the plans of one buffer's calls that are like earlier ones.

    Args:
        shape: of the buffer's calls.
        checked: the calls that have passed its checks.
        exchange, buffer_id: of the buffer.

    Attributes:
        buffer_id: of the buffer.
    """

    def __init__(self, shape: Shape, checked: CheckedCalls, exchange: RowExchange, buffer_id: int) -> None:
        self._shape, self._machine = shape, shape.machine
        self._checked, self._exchange, self.buffer_id = checked, exchange, buffer_id
        self._dispatches: dict[Any, DispatchPlan] = {}
        self._lately: list[_Like] = []  # the last few of the usual kinds, the newest first
        self._combines: dict[Any, AnyCombinePlan] = {}

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        others: tuple[Any, Any, Any],
        how: tuple[Any, Any],
        num_sms: Any,
        sync: Any,
    ) -> DispatchPlan | None:
        """Return the plan of dispatches whose arguments have the properties of these, if there is one.

        It is valid while the properties of these tensors stay the same (`checked_topk`).

        Args:
            others: the mask, the handle and the capacity.
            how: layout and alignment.
            Others as of `Buffer.dispatch`.
        """
        mask, handle, capacity = others
        is_exact, form = sync, None
        if handle is not None:
            is_ours = type(handle) is CudaHandle and handle.buffer_id == self.buffer_id
            if not is_ours or handle.epoch != self._exchange.epoch:
                return None
            is_exact, form = handle.is_exact, handle.form
        if type(sync) is not bool or not (num_sms is None or type(num_sms) is int):
            return None
        options = how, type(how[1]), num_sms, is_exact, form
        tensors: tuple[Any, ...] = ()  # the only arguments that vary between calls of the usual kinds
        if mask is None and capacity is None:
            if handle is None and topk_weights is not None:
                tensors = x, topk_idx, topk_weights
            elif handle is not None and topk_idx is topk_weights is None:
                tensors = (x,)
        max_sms = self._machine.max_sms
        try:
            rows = x if isinstance(x, torch.Tensor) else x[0]
            if rows.data_ptr() % ALIGNMENT:
                return None
            if tensors:
                for like in self._lately:
                    if like.options == options and like.looks(*tensors):
                        if like.plan.max_sms == max_sms:
                            return like.plan
                        break
            key = _key_of(x, topk_idx, topk_weights, others, options)
            plan = self._dispatches.get(key)
            if plan is None or plan.max_sms != max_sms:
                checked = checked_dispatch(x, topk_idx, topk_weights, others, *how)
                memo = self._checked.memo_of(checked)
                plan = None if memo is None else memo.get(short_key(self._machine, is_exact, num_sms))
                if plan is None:
                    return None
                _remember(self._dispatches, key, plan)
        except expected(*NO_FACTS):
            return None
        if tensors:
            self._note(plan, options, tensors)
        return plan

    def _note(self, plan: DispatchPlan, options: object, tensors: tuple[Any, ...]) -> None:
        """Store a plan under the properties of its tensors, if these can be compared."""
        looks = metadata_check_of(*tensors)
        if looks is not None:
            others = [like for like in self._lately if like.plan is not plan or like.options != options]
            self._lately = [_Like(plan, options, looks), *others][:MAX_CHECKS]

    def combine(self, y: Any, handle: CudaHandle, topk_weights: Any, num_sms: Any) -> tuple[AnyCombinePlan, int] | None:
        """Return the plan of combines with the properties of these arguments, if there is one, and the slot of `y`."""
        if not (num_sms is None or type(num_sms) is int):
            return None
        try:
            address = y.data_ptr()
            if address % ALIGNMENT or not y.is_contiguous():
                return None
            source = find_source(self._shape, handle.core, address, topk_weights is not None)
            if source is None:
                return None
            slot, is_copied, number = source
            (num_rows, hidden), dtype = y.shape, y.dtype
            is_negative = dtype in _MAY_BE_NEGATED and y.is_neg()
            weights = None
            if topk_weights is not None:
                if not topk_weights.is_contiguous():
                    return None
                weights = _checked_weights(topk_weights, num_rows)
            looks = num_rows == handle.num_rows, hidden, dtype, y.device, is_negative, weights
            key = looks, handle.form, num_sms, is_copied, number
            plan = self._combines.get(key)
            if plan is not None and plan.max_sms == self._machine.max_sms:
                return plan, slot
            checked = checked_combine(y, handle, topk_weights)
        except expected(*NO_FACTS):
            return None
        memo = self._checked.memo_of(checked)
        plan = None if memo is None else memo.get((is_copied, number, num_sms, self._machine.max_sms))  # as `combine`
        if plan is None:
            return None
        _remember(self._combines, key, plan)
        return plan, slot


def _key_of(x: Any, topk_idx: Any, topk_weights: Any, others: tuple[Any, Any, Any], options: Any) -> object:
    """Return the key of `checked_dispatch` and the options; faster for frequent kinds of calls."""
    mask, handle, capacity = others
    if mask is None and capacity is None:
        if handle is None and topk_weights is not None:
            return checked_topk(x, topk_idx, topk_weights), options
        if handle is not None and topk_idx is None and topk_weights is None:
            return _checked_of(x) if isinstance(x, torch.Tensor) else tuple(map(_checked_of, x)), handle.form, options
    return checked_dispatch(x, topk_idx, topk_weights, others, *options[0]), options


def checked_dispatch(
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    others: tuple[Any, Handle | None, Any],
    layout: object,
    expert_alignment: object,
) -> tuple[object, ...]:
    """Return what the rules of a dispatch read; raises one of `NO_FACTS` if only the rules can determine the error.

    Args:
        x, topk_idx, topk_weights, layout, expert_alignment: as the caller gave them.
        others: the mask, the handle and the capacity, likewise.
    """
    mask, handle, capacity = others
    return (
        _checked_of(x) if isinstance(x, torch.Tensor) else tuple(map(_checked_of, x)),
        None if topk_idx is None else _checked_of(topk_idx),
        None if topk_weights is None else _checked_of(topk_weights),
        None if mask is None else _checked_of(mask),
        None if handle is None else _checked_of_handle(handle),
        layout,
        expert_alignment,
        type(expert_alignment),  # True is no 1
        capacity,
        type(capacity),
    )


def checked_topk(x: Any, topk_idx: Any, topk_weights: Any) -> tuple[object, ...]:
    """Return what the rules read of the tensors of a dispatch by `topk_idx`, as `checked_dispatch`."""
    kind = None
    if isinstance(x, torch.Tensor):
        kind = x.dtype
        rows: tuple[object, ...] = x.shape, x.stride(), x.device, kind in _MAY_BE_NEGATED and x.is_neg()
    else:
        rows = tuple(map(_checked_of, x))
    return (
        rows,
        kind,
        topk_idx.shape,
        topk_idx.stride(),
        topk_idx.dtype,
        topk_idx.device,
        topk_weights.shape,
        topk_weights.stride(),
        topk_weights.dtype,
        topk_weights.device,
        topk_weights.is_neg(),
    )


def checked_combine(y: Any, handle: Handle, topk_weights: Any) -> tuple[object, ...]:
    """Return what the rules of a combine read, as `checked_dispatch`; the number of rows follows from no shape.

    Nor do strides stand there, which of one row say nothing: `y` and `topk_weights` are contiguous.
    """
    num_rows, *others = y.shape
    weights = None if topk_weights is None else _checked_weights(topk_weights, num_rows)
    order = handle.order  # whose ids are not checked on GPUs
    sums = None if order is None else (order.by, order.bias_first, order.round_partials)
    dtype = y.dtype
    looks = dtype, y.device, dtype in _MAY_BE_NEGATED and y.is_neg()
    return num_rows == handle.num_recv, *others, looks, weights, _checked_of_handle(handle), sums


def _checked_weights(weights: Any, num_rows: int) -> tuple[object, ...]:
    """Return the checked properties of the contiguous weights of so many rows."""
    count, *others = weights.shape
    return count == num_rows, *others, weights.dtype, weights.device, weights.is_neg()


def _checked_of(value: Any) -> tuple[object, ...]:
    """Return the checked properties of a tensor; raises for a value that is no dense tensor."""
    dtype = value.dtype
    return value.shape, value.stride(), dtype, value.device, dtype in _MAY_BE_NEGATED and value.is_neg()


def _checked_of_handle(handle: Handle) -> tuple[object, ...]:
    return handle.layout, handle.expert_alignment, handle.num_tokens, handle.with_topk, handle.capacity


def _are_whole(*given: Any) -> bool:
    """Return whether checked tensors are used as they are."""
    return all(value is None or value.is_contiguous() for value in given)


def _remember(plans: dict[Any, Any], key: object, plan: object) -> None:
    if len(plans) >= _MOST_KEYS:
        plans.clear()
    plans[key] = plan
