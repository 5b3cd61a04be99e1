"""Calls of a `Buffer` that are like earlier ones: checked once, planned once, then facts, a launch, and no more.

A call on a GPU costs the host little more than its launch, so to look at each argument would show. What the rules of
`checks.py` are about, but for addresses, is the call's *facts*: shapes, strides, dtypes, devices, options. Facts that
have passed are remembered with what the path has planned for them (`CheckedCalls`). A call with the same facts is only
looked at for what they do not say: where rows begin, how many a combine has. Calls whose arguments had to be changed
(made contiguous), or may overlap others (`out`, `bias`), are checked each time, and so are all calls on CPUs, whose
checks look at the data and plan.

Most calls come with the options' defaults, when nothing has happened since the last one (`CudaPath.quiet_stream`). Such
a call needs none of what stands around others: no time-out to check, no epoch to enter, no stream to choose, nobody to
tell. So it is looked for first (`RowsAgain`). Whatever is not as it was gives None, before anything has happened, and
the call goes the ordinary way, which checks it, makes it or raises. A drop-in layer that has a key of its own keeps the
plan (`plan_like`), and makes calls by it (`dispatch_like`): then nothing is looked up here. `latency/again.py` is the
same for `LatencyBuffer`.

Who calls `RowsAgain`: the thread of a call. It does by itself what `with turns.queue(), turns` and `CallAttempt` do:
the lock; the end of a buffer that was closed meanwhile; a refusal where an error comes (from a signal handler) before
the peers have heard of the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..memory.looks import Looks, looks_of
from .attempt import refuse
from .checks import CombineCall, DispatchCall, GivenRouting, check_combine, check_dispatch, check_payload
from .config import BufferConfig
from .control.inbox import OP_COMBINE, OP_DISPATCH, Exchange
from .gpu.ranges import is_profiling
from .handle import Combined, Handle, Payload
from .throughput.gpu.combine import AnyCombinePlan, find_rows
from .throughput.gpu.dispatch import DispatchPlan
from .throughput.gpu_handle import CudaDispatched, CudaHandle
from .throughput.gpu_path import CudaPath
from .turns import Turns

_MOST_FACTS = 1024  # that are remembered: callers may bring new shapes all the time
NO_FACTS = (AttributeError, RuntimeError, TypeError, ValueError)  # of what is no tensor, or no dense one
_MAY_BE_NEGATED = frozenset({torch.float16, torch.float32, torch.float64})  # parts of complex numbers, lazily
_MOST_KEYS = 1024  # of a kind, that lead to plans
_BY_TOPK = (None, None, None)  # no mask, no handle, no capacity
_ALIGNMENT = 16  # of rows, as `checks.check_rows` says


class CheckedCalls:
    """Checks the calls of one buffer.

    Args:
        config: of the buffer.
    """

    def __init__(self, config: BufferConfig) -> None:
        self._config = config
        self._passed: dict[object, dict[Any, Any]] = {}  # with the path's memo

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
        others = routing.is_token_in_rank, routing.handle, routing.capacity
        given = x, routing.topk_idx, topk_weights, others, layout, expert_alignment
        facts = self._facts(dispatch_facts, *given)
        if facts is not None and _are_whole(routing.topk_idx, routing.is_token_in_rank, topk_weights):
            return call._replace(memo=self._note(facts))
        return call

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
        is_plain = bias is None and out is None
        facts = self._facts(combine_facts, y, handle, topk_weights) if is_plain else None
        if facts is not None and _are_whole(y, topk_weights):
            return call._replace(memo=self._note(facts))
        return call

    def memo_of(self, facts: object) -> dict[Any, Any] | None:
        """Return the memo of calls with these facts, None where none has passed the checks.

        What facts do not say is still to be looked at: where rows begin.
        """
        return self._passed.get(facts)

    def _note(self, facts: tuple[object, ...]) -> dict[Any, Any]:
        if len(self._passed) >= _MOST_FACTS:
            self._passed.clear()
        return self._passed.setdefault(facts, {})

    def _facts(self, facts_of: Callable[..., tuple[object, ...]], *given: Any) -> tuple[object, ...] | None:
        """Return the facts of a call, None where only the rules can tell what is wrong, or on CPUs."""
        if not self._config.is_cuda:
            return None
        try:
            facts = facts_of(*given)
            hash(facts)
        except NO_FACTS:
            return None
        return facts


class _Found(NamedTuple):
    """The plan of dispatches that are alike: their options, and what tells whether tensors are like theirs, if any."""

    plan: DispatchPlan
    options: object
    looks: Looks | None


class RowsAgain:
    """Makes the calls of one buffer that are like earlier ones.

    Args:
        turns, exchange, path: of the buffer.
        checked: what its checks have let pass.
        buffer_id: of the buffer.
        timeout_s: of calls that name none.
    """

    def __init__(
        self,
        turns: Turns,
        exchange: Exchange,
        path: CudaPath,
        checked: CheckedCalls,
        buffer_id: int,
        timeout_s: float,
    ) -> None:
        self._turns, self._closing, self._exchange, self._path = turns, turns.closing, exchange, path
        self._machine = path.machine
        self._checked, self._id, self._timeout_s = checked, buffer_id, timeout_s
        self._dispatches: dict[Any, _Found] = {}
        self._last: Any = None  # of them, the last one of a dispatch by `topk_idx` whose `looks` are known
        self._combines: dict[Any, AnyCombinePlan] = {}

    def dispatch(
        self,
        x: Payload,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        others: tuple[torch.Tensor | None, Handle | None, int | None],
        layout: str,
        expert_alignment: int,
        num_sms: int | None,
        sync: bool,
    ) -> CudaDispatched | None:
        """Run a dispatch; None, and nothing has happened, where it is not like one before.

        Args:
            others: the mask, the handle and the capacity.
            Others as of `Buffer.dispatch`.
        """
        queue = self._turns.queue_here()
        if queue is None or is_profiling():
            return None
        with queue:
            before = self._machine.num_calls
            try:
                stream = self._path.quiet_stream()
                if stream is None:
                    return None
                plan = self._dispatch_plan(x, topk_idx, topk_weights, others, (layout, expert_alignment), num_sms, sync)
                if plan is None:
                    return None
                mask, handle, _ = others
                known: Any = handle  # as all of these, it looks as that of a call that has passed the checks
                route = mask if topk_idx is None else topk_idx
                return self._path.dispatch_again(plan, x, route, topk_weights, known, stream)
            except Exception as error:
                self._tell(OP_DISPATCH, error, before)
                raise
            finally:
                if self._closing.asked:
                    self._turns.__exit__(None, None, None)

    def dispatch_like(
        self, plan: DispatchPlan, x: Payload, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> CudaDispatched | None:
        """Run a dispatch of a plan that `plan_like` has returned, as `dispatch`; all of the result is made at once.

        Args:
            plan: of a call whose arguments looked as these, but for addresses.
            x, topk_idx, topk_weights: as of `Buffer.dispatch`.
        """
        queue = self._turns.queue_here()
        if queue is None or is_profiling():
            return None
        with queue:
            machine = self._machine
            before = machine.num_calls
            try:
                stream = self._path.quiet_stream()
                rows = x if isinstance(x, torch.Tensor) else x[0]
                if stream is None or plan.max_sms != machine.max_sms or rows.data_ptr() % _ALIGNMENT:
                    return None
                return self._path.dispatch_again(plan, x, topk_idx, topk_weights, None, stream, is_late=False)
            except Exception as error:
                self._tell(OP_DISPATCH, error, before)
                raise
            finally:
                if self._closing.asked:
                    self._turns.__exit__(None, None, None)

    def plan_like(
        self,
        x: Payload,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        how: tuple[str, int],
        num_sms: int | None,
        sync: bool,
    ) -> DispatchPlan | None:
        """Return the plan of dispatches whose arguments look like these of one that has been made, if it has one.

        It serves while what these tensors look like is what they look like here (`topk_facts`); `how`: layout and
        alignment.
        """
        return self._dispatch_plan(x, topk_idx, topk_weights, _BY_TOPK, how, num_sms, sync)

    def combine(self, y: torch.Tensor, handle: object, num_sms: int | None) -> Combined | None:
        """Run a combine of rows alone, as `dispatch`."""
        queue = self._turns.queue_here()
        if queue is None or type(handle) is not CudaHandle or is_profiling():
            return None
        with queue:
            before = self._machine.num_calls
            try:
                stream = self._path.quiet_stream()
                if stream is None or handle.buffer_id != self._id or handle.epoch != self._exchange.epoch:
                    return None
                found = self._combine_plan(y, handle, num_sms)
                if found is None:
                    return None
                plan, slot = found
                return self._path.combine_again(plan, y, handle, slot, stream)
            except Exception as error:
                self._tell(OP_COMBINE, error, before)
                raise
            finally:
                if self._closing.asked:
                    self._turns.__exit__(None, None, None)

    def _dispatch_plan(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        others: tuple[Any, Any, Any],
        how: tuple[Any, Any],
        num_sms: Any,
        sync: Any,
    ) -> DispatchPlan | None:
        """Return the plan of dispatches whose arguments look like these, if there is one; `how`: layout, alignment."""
        handle, is_exact = others[1], sync
        if handle is not None:
            is_ours = type(handle) is CudaHandle and handle.buffer_id == self._id
            if not is_ours or handle.epoch != self._exchange.epoch:
                return None
            is_exact = handle.is_exact
        if type(sync) is not bool or not (num_sms is None or type(num_sms) is int):
            return None
        options = how, type(how[1]), num_sms, is_exact
        is_usual = topk_weights is not None and handle is None and others[0] is None and others[2] is None
        last: Any = self._last if is_usual else None
        max_sms = self._machine.max_sms
        try:
            rows = x if isinstance(x, torch.Tensor) else x[0]
            if rows.data_ptr() % _ALIGNMENT:
                return None
            is_last = last is not None and last.options == options and last.looks(x, topk_idx, topk_weights)
            if is_last and last.plan.max_sms == max_sms:
                return last.plan
            key = _key_of(x, topk_idx, topk_weights, others, options)
            found = self._dispatches.get(key)
            if found is not None and found.plan.max_sms == max_sms:
                if is_usual and found.looks is not None:
                    self._last = found
                return found.plan
            facts = dispatch_facts(x, topk_idx, topk_weights, others, *how)
        except NO_FACTS:
            return None
        memo = self._checked.memo_of(facts)
        plan = None if memo is None else self._path.known_dispatch(memo, is_exact, num_sms)
        if plan is not None:
            _remember(self._dispatches, key, _Found(plan, options, looks_of(x, topk_idx, topk_weights)))
        return plan

    def _combine_plan(self, y: Any, handle: CudaHandle, num_sms: Any) -> tuple[AnyCombinePlan, int] | None:
        """Return the plan of combines whose arguments look like these, if there is one, and the slot of `y`."""
        if handle.layout != "rank" or not (num_sms is None or type(num_sms) is int):
            return None
        try:
            address = y.data_ptr()
            if address % _ALIGNMENT:
                return None
            slot, is_copied = find_rows(self._machine, address)
            (num_rows, hidden), dtype = y.shape, y.dtype
            is_negative = dtype in _MAY_BE_NEGATED and y.is_neg()
            looks = num_rows == handle.num_rows, hidden, y.stride(), dtype, y.device, is_negative
            key = looks, handle.form, num_sms, is_copied
            plan = self._combines.get(key)
            if plan is not None and plan.max_sms == self._machine.max_sms:
                return plan, slot
            facts = combine_facts(y, handle, None)
        except NO_FACTS:
            return None
        memo = self._checked.memo_of(facts)
        plan = None if memo is None else self._path.known_combine(memo, is_copied, num_sms)
        if plan is None:
            return None
        _remember(self._combines, key, plan)
        return plan, slot

    def _tell(self, op: int, error: Exception, before: int) -> None:
        """Tell the peers of an error that has come before they have heard of the call, as `CallAttempt` does."""
        if self._machine.num_calls == before and not self._path.is_told(error):
            refuse(self._exchange, self._path, op, error, time.monotonic() + self._timeout_s, self._timeout_s)


def _key_of(x: Any, topk_idx: Any, topk_weights: Any, others: tuple[Any, Any, Any], options: Any) -> object:
    """Return what `dispatch_facts` says, and the options; of frequent kinds of calls with less ado."""
    mask, handle, capacity = others
    if mask is None and capacity is None:
        if handle is None and topk_weights is not None:
            return topk_facts(x, topk_idx, topk_weights), options
        if handle is not None and topk_idx is None and topk_weights is None:
            return _facts_of(x) if isinstance(x, torch.Tensor) else tuple(map(_facts_of, x)), handle.form, options
    return dispatch_facts(x, topk_idx, topk_weights, others, *options[0]), options


def dispatch_facts(
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    others: tuple[Any, Handle | None, Any],
    layout: object,
    expert_alignment: object,
) -> tuple[object, ...]:
    """Return what the rules of a dispatch look at; raises one of `NO_FACTS` where only they can tell what is wrong.

    Args:
        x, topk_idx, topk_weights, layout, expert_alignment: as the caller gave them.
        others: the mask, the handle and the capacity, likewise.
    """
    mask, handle, capacity = others
    return (
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


def topk_facts(x: Any, topk_idx: Any, topk_weights: Any) -> tuple[object, ...]:
    """Return what the rules look at of the tensors of a dispatch by `topk_idx`, as `dispatch_facts`."""
    kind = None
    if isinstance(x, torch.Tensor):
        kind = x.dtype
        rows: tuple[object, ...] = x.shape, x.stride(), x.device, kind in _MAY_BE_NEGATED and x.is_neg()
    else:
        rows = tuple(map(_facts_of, x))
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


def combine_facts(y: Any, handle: Handle, topk_weights: Any) -> tuple[object, ...]:
    """Return what the rules of a combine look at, as `dispatch_facts`; how many rows there are follows no shape."""
    num_rows, *others = y.shape
    weights = None if topk_weights is None else _facts_of(topk_weights)
    order = handle.order  # whose ids are not looked at on GPUs
    sums = None if order is None else (order.by, order.bias_first, order.round_partials)
    dtype = y.dtype
    looks = y.stride(), dtype, y.device, dtype in _MAY_BE_NEGATED and y.is_neg()
    return num_rows == handle.num_recv, *others, looks, weights, _facts_of_handle(handle), sums


def _facts_of(value: Any) -> tuple[object, ...]:
    """Return what can be wrong with a tensor; raises for what is no dense one."""
    dtype = value.dtype
    return value.shape, value.stride(), dtype, value.device, dtype in _MAY_BE_NEGATED and value.is_neg()


def _facts_of_handle(handle: Handle) -> tuple[object, ...]:
    return handle.layout, handle.expert_alignment, handle.num_tokens, handle.with_topk, handle.capacity


def _are_whole(*given: Any) -> bool:
    """Tell whether checked tensors are used as they are."""
    return all(value is None or value.is_contiguous() for value in given)


def _remember(plans: dict[Any, Any], key: object, plan: object) -> None:
    if len(plans) >= _MOST_KEYS:
        plans.clear()
    plans[key] = plan
