"""Calls of a `LatencyBuffer` on a GPU that are like earlier ones, in quiet times: facts, a launch, and no more.

Most calls come with the options' defaults, in the shapes of an earlier one, when nothing has happened since. Such a
call needs none of what stands around others: no time-out to check, no epoch to enter, no stream to choose, nobody to
tell. So it is looked for first, and whatever is not as it was (a profiler, another stream or GPU, a graph, a report, a
death, a call that waits for its hook, a new view, poison, arguments that look otherwise) gives None, before anything
has happened: then the call goes the ordinary way, which checks it, makes it or raises, and takes note of what is quiet.

What a tensor must look like is asked of it directly where a buffer has but one answer (its dtype, its GPU, the shape of
y); the rest is a key. Plans are those of `plans.py`: a new key is looked up there, by all that the checks look at.

Who calls: the thread of a call. It does by itself what `with turns.queue(), turns` and `CallAttempt` do: the lock; the
end of a buffer that was closed meanwhile; a refusal where an error comes (from an allocation, or from a signal handler)
before the peers have heard of the call.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ..attempt import refuse
from ..control.inbox import OP_COMBINE, OP_DISPATCH, Exchange
from ..gpu.ranges import is_profiling
from ..throughput.placement import check_topk_idx
from ..turns import Turns
from .gpu.results import CudaLatencyHandle
from .gpu_path import LatencyCudaPath
from .plans import NO_KEY, Plans, meet, remember
from .types import CallSizes, CombinePlan, DispatchPlan, LatencyCombined, LatencyDispatched

_Tensor, _BF16, _INT64, _INT32, _FLOAT32 = torch.Tensor, torch.bfloat16, torch.int64, torch.int32, torch.float32


class CallsAgain:
    """Makes the calls of one buffer that are like earlier ones.

    Args:
        turns, exchange, path: of the buffer.
        plans: that its checked calls have made.
        sizes: of its calls.
        timeout_s: of calls that name none.
    """

    def __init__(
        self,
        turns: Turns,
        exchange: Exchange,
        path: LatencyCudaPath,
        plans: Plans,
        sizes: CallSizes,
        timeout_s: float,
    ) -> None:
        config = sizes.config
        self._turns, self._closing, self._exchange, self._path = turns, turns.closing, exchange, path
        self._plans, self._id, self._timeout_s = plans, sizes.buffer_id, timeout_s
        self._device, self._num_ranks = config.device, config.num_ranks
        self._num_topk, self._num_experts = config.num_topk, config.num_experts
        rows = config.num_ranks * config.max_tokens_per_rank
        self._y_shape = torch.Size((config.num_local_experts, rows, config.hidden))
        self._hidden = config.hidden
        self._dispatches: dict[Any, DispatchPlan] = {}
        self._combines: dict[Any, CombinePlan] = {}

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        active_ranks: torch.Tensor | None,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        reads_counts: bool = False,
    ) -> LatencyDispatched | None:
        """Run a dispatch with the default options; None, and nothing has happened, where it is not like one before.

        Args:
            reads_counts: the caller reads `num_tokens_per_expert` of the result at once.
            Others as of `LatencyBuffer.dispatch`.
        """
        queue = self._turns.queue_here()
        if queue is None or is_profiling():
            return None
        with queue:
            before = self._path.num_calls
            try:
                stream = self._path.quiet_stream(OP_DISPATCH, active_ranks is None)
                if stream is None:
                    return None
                plan = self._dispatch_plan(x, topk_idx, topk_weights, active_ranks, use_fp8, round_scale, use_ue8m0)
                if plan is None:
                    return None
                return self._path.dispatch_again(plan, x, topk_idx, topk_weights, active_ranks, stream, reads_counts)
            except Exception as error:
                self._tell(OP_DISPATCH, error, before)
                raise
            finally:
                if self._closing.asked:
                    self._turns.__exit__(None, None, None)

    def combine(
        self,
        y: torch.Tensor,
        handle: object,
        topk_weights: torch.Tensor | None,
        out: torch.Tensor | None,
        partial_dtype: torch.dtype | None,
        active_ranks: torch.Tensor | None,
    ) -> LatencyCombined | None:
        """Run a combine with the default options, as `dispatch`."""
        queue = self._turns.queue_here()
        if queue is None or type(handle) is not CudaLatencyHandle or is_profiling():
            return None
        with queue:
            before = self._path.num_calls
            try:
                stream = self._path.quiet_stream(OP_COMBINE, active_ranks is None)
                is_own = handle.buffer_id == self._id and handle.epoch == self._exchange.epoch
                if stream is None or not (is_own and handle.is_received):
                    return None
                plan = self._combine_plan(y, handle.num_tokens, topk_weights, out, partial_dtype, active_ranks)
                if plan is None:
                    return None
                return self._path.combine_again(plan, y, handle.core, topk_weights, out, active_ranks, stream)
            except Exception as error:
                self._tell(OP_COMBINE, error, before)
                raise
            finally:
                if self._closing.asked:
                    self._turns.__exit__(None, None, None)

    def _dispatch_plan(
        self, x: Any, idx: Any, weights: Any, mask: Any, use_fp8: Any, round_scale: Any, use_ue8m0: Any
    ) -> DispatchPlan | None:
        """Return the plan of dispatches whose arguments look like these, if there is one."""
        device = self._device
        try:
            is_usual = (
                type(x) is type(idx) is _Tensor
                and type(use_fp8) is type(round_scale) is type(use_ue8m0) is bool
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
            key = x.shape, weights is None, mask is None, use_fp8, round_scale, use_ue8m0
            plan = self._dispatches.get(key)
            if plan is None:
                plan = self._plans.known_dispatch((x, idx, weights, mask), (False, use_fp8, round_scale, use_ue8m0))
                if plan is None:
                    return None
                remember(self._dispatches, key, plan)
            shape = plan.num_tokens, self._num_topk
            are_usual = idx.shape == shape and (weights is None or self._are_weights(weights, shape))
            if not (are_usual and (mask is None or self._is_mask(mask))):
                return None
        except NO_KEY:
            return None
        if self._plans.looks_at_ids:
            check_topk_idx(idx, self._num_experts)
        return plan

    def _combine_plan(
        self, y: Any, num_tokens: int, weights: Any, out: Any, partial_dtype: Any, mask: Any
    ) -> CombinePlan | None:
        """Return the plan of combines whose arguments look like these, if there is one."""
        try:
            is_usual = (
                type(y) is _Tensor
                and y.dtype is _BF16
                and y.shape == self._y_shape
                and y.device == self._device
                and y.is_contiguous()
                and (weights is None or self._are_weights(weights, (num_tokens, self._num_topk)))
                and (out is None or (self._is_out(out, (num_tokens, self._hidden)) and not meet(out, y, weights)))
                and (mask is None or self._is_mask(mask))
            )
            if not is_usual:
                return None
            key = num_tokens, weights is None, out is None, mask is None, partial_dtype
            plan = self._combines.get(key)
            if plan is None:
                plan = self._plans.known_combine(num_tokens, (y, weights, out, mask, partial_dtype))
                if plan is not None:
                    remember(self._combines, key, plan)
        except NO_KEY:
            return None
        return plan

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

    def _tell(self, op: int, error: Exception, before: int) -> None:
        """Tell the peers of an error that has come before they have heard of the call, as `CallAttempt` does."""
        if self._path.num_calls == before and not self._path.is_told(error):
            refuse(self._exchange, self._path, op, error, time.monotonic() + self._timeout_s, self._timeout_s)
