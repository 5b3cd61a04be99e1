"""`Buffer` on the GPUs of one host: the host side of dispatch and combine.

A `Throughput` is a rank's end of a GPU buffer. A dispatch is two kernels (`dispatch.py`): one counts,
exchanges counts and grants, and finds all places; the other moves the rows to where they stay. Few tokens need one
kernel only. A combine is one kernel
(`combine.py`) that pulls the rows back and sums them. The host waits for nothing but the counts, and only
when it is asked to. Memory, kernels and the order of calls are in `machine.py`. Several `Throughput`s with calls of
different sizes may be over one memory: `shape.py` says how.

Failures are numbers in pinned host memory: `check` raises them, as does every call before it starts. After a failure
the buffer works on; the ranks stay in step because failed calls count as well. A late peer may still write into a slot
that was granted in a failed call: see `slots.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....errors import ResourceError
from ...gpu.lent import AllGather
from ...gpu.params import RECV_INFO_COUNTS
from ...gpu.platform import Platform
from ...gpu.report import REFUSED_INVALID_ARGUMENT
from ..shapes import LaunchShape, ThroughputConfig
from .combine import CombinePlan, launch_combine, launch_refusal
from .dispatch import (
    DispatchPlan,
    Payload,
    allocate_expanded,
    cut_expanded,
    plan_of,
    short_key,
    view_slot,
)
from .machine import Machine
from .order import launch_order
from .shape import Shape
from .types import CombineOptions, DispatchOptions, DispatchResult, ThroughputHandle

_ONE_WARP = LaunchShape(1, 32, 0, 0, 0)


class Throughput:
    """A rank's end of a GPU buffer. One call at a time; calls of all ranks in the same order.

    Args:
        platform: the GPU.
        config: sizes, equal on all ranks.
        all_gather: gives everybody's bytes in rank order; called at construction and at the first expert-layout combine
            of a view (never while a graph is recorded). A replacement gives its own for everybody at construction, and
            maps the others' memory later (`Machine.replace_peer`).

    Attributes:
        machine: kernels, memory, and the order of calls; shared by all that are over one memory.
        config: sizes.
    """

    def __init__(self, platform: Platform, config: ThroughputConfig, all_gather: AllGather) -> None:
        self.machine = Machine(platform, config, all_gather)
        self._set_shape(config)
        self._barrier = self.machine.stage("barrier", _ONE_WARP)

    def _set_shape(self, config: ThroughputConfig) -> None:
        self.config = config
        self._shape = Shape(self.machine, config)
        self._counts = slice(RECV_INFO_COUNTS, RECV_INFO_COUNTS + config.num_local_experts)
        self._num_info_words = config.info_words // 2

    def of_sizes(self, config: ThroughputConfig) -> Throughput:
        """Return an end for calls of other sizes over the same memory, with which it has all else in common. Local.

        Args:
            config: the sizes. Rank, ranks and slots are this one's; all ranks make each call with equal sizes.

        Raises:
            InvalidArgument: the kernels cannot do it, or a slot has no room for it.
        """
        mine = self.machine.config
        config = replace(
            config,
            rank=mine.rank,
            num_ranks=mine.num_ranks,
            num_slots=mine.num_slots,
            room_slot_bytes=mine.slot_bytes,
            room_expert_slot_bytes=mine.room_expert_slot_bytes,
        )
        config.check()
        other = copy.copy(self)
        other._set_shape(config)
        return other

    def dispatch(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        route: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        handle: ThroughputHandle | None,
        options: DispatchOptions,
        memo: dict[Any, DispatchPlan] | None = None,
    ) -> DispatchResult:
        """Send rows; the caller has checked the arguments, see `Buffer.dispatch` for their meaning.

        Args:
            x: `[num_tokens, hidden]`, unit stride in the last dimension, rows 16-byte aligned.
            scales: `[num_tokens, num_scales]` of 4-byte elements, any strides, or None.
            route: `[num_tokens, num_topk]` int64, or `[num_tokens, num_ranks]` bool, contiguous; None with a handle.
            topk_weights: `[num_tokens, num_topk]` float32 contiguous, or None.
            handle: of an earlier dispatch, to go the same way again; its layout and alignment count.
            options: how.
            memo: one and the same, at first empty, for all calls whose tensors and handles are alike but for addresses.
        Raises:
            what an earlier call left behind; with `options.sync` also what this one met.
        """
        machine = self.machine
        machine.begin()
        payload = x, scales, topk_weights
        plan = plan_of(self._shape, handle, payload, route, options, memo)
        return self.start_dispatch(plan, payload, route, handle, options.timeout_s, machine.stream)

    def start_dispatch(
        self,
        plan: DispatchPlan,
        payload: Payload,
        route: torch.Tensor | None,
        handle: ThroughputHandle | None,
        timeout_s: float,
        stream: int,
        is_late: bool = True,
    ) -> DispatchResult:
        """Send rows as planned, in a call that has begun on the raw `stream`; arguments as of `dispatch` and others."""
        machine, is_expert = self.machine, plan.is_expert
        if handle is None:
            handle = plan.new_handle(machine.num_calls + 1)
        elif payload[2] is not None and (is_expert or handle.capacity is not None):  # for `lost_weight`
            handle = handle.with_weights(payload[2])
        # all memory before the first kernel: behind it there is no way back without the peers
        expanded = allocate_expanded(machine, plan, payload, handle, stream) if is_expert else None
        taken = None if is_expert else machine.take(stream, is_granted=True)
        try:
            slot = machine.grant_landing() if taken is None else taken.slot
            machine.filled_by[slot] = self._shape
            if machine.is_poisoned:
                machine.poison_slot(slot)
            mailbox = machine.open_mailbox() if plan.has_mailbox else 0
            plan.start(machine, payload, handle, route, (slot, mailbox, 0), expanded, timeout_s, stream)
            if mailbox:
                self._wait_counts(plan, handle, mailbox, timeout_s)
        except BaseException:
            if taken is not None:
                taken()
            raise
        if expanded is not None:
            return cut_expanded(expanded, handle)
        return view_slot(machine, plan, handle, taken, stream, is_late)

    def known_dispatch(self, memo: dict[Any, DispatchPlan], is_exact: bool, num_sms: int | None) -> DispatchPlan | None:
        """Return the plan of a call whose like has been made, or None; `memo` as in `dispatch`."""
        return memo.get(short_key(self.machine, is_exact, num_sms))

    def known_combine(self, memo: dict[Any, CombinePlan], is_copied: bool, num_sms: int | None) -> CombinePlan | None:
        """Return the plan of a combine of rank-layout rows alone whose like has been made, or None.

        Args:
            memo: as in `combine`.
            is_copied, num_sms: see `find_rows`; of the call.
        """
        return memo.get((is_copied, 0, num_sms, self.machine.max_sms))

    def combine_input(self, handle: ThroughputHandle, dtype: torch.dtype) -> torch.Tensor | None:
        """Return `[num_recv, hidden]` memory from which a combine needs no copy, or None when no slot is free."""
        machine, hidden = self.machine, self.config.hidden
        stream = machine.begin()
        if handle.num_recv == 0:
            return torch.empty(0, hidden, dtype=dtype, device=machine.platform.device)
        if handle.is_expert:
            place = self._shape.expert_place(handle.expert_alignment)
            rows = self.config.expanded_rows(handle.expert_alignment) if handle.num_recv is None else handle.num_recv
            if place.is_leased:
                return None
            region, nbytes = place.regions[self.config.rank], rows * hidden * dtype.itemsize
            machine.poison(region, 0, nbytes)
            place.is_leased = True
            released = None if machine.platform.is_capturing() else place.free
            return region.lease(0, nbytes, released).view(dtype).view(rows, hidden)
        rows = self.config.recv_rows(handle.capacity) if handle.num_recv is None else handle.num_recv
        taken = machine.take(stream, is_granted=False)
        if taken is None:
            return None
        machine.filled_by[taken.slot] = self._shape
        machine.poison_slot(taken.slot)
        return machine.lease(taken)[: rows * hidden * dtype.itemsize].view(dtype).view(rows, hidden)

    def combine(
        self,
        y: torch.Tensor,
        handle: ThroughputHandle,
        topk_weights: torch.Tensor | None,
        bias: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        options: CombineOptions,
        memo: dict[Any, CombinePlan] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring rows back and sum them; the caller has checked the arguments, see `Buffer.combine`.

        Args:
            y: `[num_recv, hidden]` contiguous, anywhere; from `combine_input` or a dispatch it is not copied.
            handle: of the dispatch.
            topk_weights: `[num_recv, num_topk]` or, expert layout, `[num_recv]`; float32 contiguous, or None.
            bias: up to two contiguous `[num_tokens, hidden]`, both of y's dtype or both float32.
            out: where to write, contiguous, or None.
            options: how.
            memo: as in `dispatch`, for calls without bias; their handles' alignments are alike.
        Returns:
            `[num_tokens, hidden]`, and the weights `[num_tokens, num_topk]` or None.
        """
        stream = self.machine.begin()
        if out is None:
            out = y.new_empty((handle.num_tokens, self.config.hidden))
        if options.order is None:
            return out, launch_combine(self._shape, y, handle, topk_weights, bias, out, options, stream, memo)
        # a combine without tokens, unless weights are to come back: the ranks meet and learn where all rows lie
        met = handle if topk_weights is not None else replace(handle, num_tokens=0)
        weights = launch_combine(self._shape, y, met, topk_weights, (), out, options, stream)
        launch_order(self._shape, y, handle, bias, out, options.order, stream, options.timeout_s)
        return out, weights

    def barrier(self, timeout_s: float) -> None:
        """All ranks meet on the device, on their current streams; the host waits for nobody."""
        self.machine.begin()
        self.start_barrier(timeout_s)

    def start_barrier(self, timeout_s: float) -> None:
        """Launch a barrier in a call that has begun."""
        machine = self.machine
        machine.announce()
        machine.launch(self._barrier, timeout_s, machine.stream)

    def refuse(
        self, timeout_s: float, tell: Callable[[int], None] | None = None, code: int = REFUSED_INVALID_ARGUMENT
    ) -> None:
        """Take part in the peers' next call, whatever it is, only to tell them that this rank's was invalid.

        Args:
            timeout_s: of the refusal's kernels, which wait for nobody.
            tell: gets the call's number before the peers can see that it is refused; the host waits for the GPU then.
            code: why, as `gpu/report.py` has it.
        """
        machine = self.machine
        stream = machine.begin(do_check=False)
        if tell is not None:
            tell(machine.num_finished() + 1)
        nothing = torch.empty(0, self.config.hidden, dtype=self.config.dtype, device=machine.platform.device)
        payload = nothing, None, None
        # nobody stores into the slot of a refused call
        plan = plan_of(self._shape, None, payload, None, DispatchOptions(sync=False), None)
        handle = plan.new_handle(machine.num_calls + 1)
        plan.start(machine, payload, handle, None, (0, 0, code), None, timeout_s, stream)
        launch_refusal(
            self._shape, timeout_s, stream
        )  # ends the call, for peers that combine as for those that dispatch

    def check(self) -> None:
        """Raise what a kernel has reported since the last look; costs a few loads of host memory."""
        self.machine.check()

    def close(self) -> None:
        """Give up all memory; tensors over it keep what they use. Idempotent. No kernel may be in flight."""
        self.machine.close()

    def _wait_counts(self, plan: DispatchPlan, handle: ThroughputHandle, mailbox: int, timeout_s: float) -> None:
        """Wait until the layout kernel has all counts; they become the handle's."""
        info = self.machine.wait_mailbox(mailbox, self._num_info_words, timeout_s)
        if info is None:
            self.machine.check()
            raise ResourceError("dispatch failed and left no report")
        handle.num_recv = info[plan.num_rows_at]
        handle.num_tokens_per_expert = info[self._counts]
