"""Throughput mode on the GPUs of one host: the host side of dispatch and combine.

A `Throughput` is a rank's end of a GPU buffer. A dispatch is two kernels (`throughput_dispatch.py`): one counts,
exchanges counts and grants, and finds all places; the other moves the rows to where they stay. A combine is one kernel
(`throughput_combine.py`) that pulls the rows back and sums them. The host waits for nothing but the counts, and only
when it is asked to. Memory, kernels and the order of calls are in `throughput_machine.py`.

Failures are numbers in pinned host memory: `check` raises them, as does every call before it starts. After a failure
the buffer works on; the ranks stay in step because failed calls count as well. A slot that was granted in a failed call
stays unused until a later exchange has succeeded, as a late peer may still write into it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ResourceError
from .throughput_combine import launch_combine, launch_refusal
from .throughput_dispatch import (
    Exchange,
    Payload,
    cut_expanded,
    launch_layout,
    launch_payload,
    plan_launch,
    view_slot,
)
from .throughput_machine import AllGather, Machine, Taken
from .throughput_params import RECV_INFO_COUNTS, RECV_INFO_EXPANDED, RECV_INFO_ROWS
from .throughput_plan import HandleSpace, Shape, ThroughputConfig, handle_space, signature
from .throughput_platform import Platform
from .throughput_report import REFUSED_INVALID_ARGUMENT
from .throughput_types import CombineOptions, DispatchOptions, Received, ThroughputHandle


class Throughput:
    """A rank's end of a GPU buffer. One call at a time; calls of all ranks in the same order.

    Args:
        platform: the GPU.
        config: sizes, equal on all ranks.
        all_gather: gives everybody's bytes in rank order; called at construction and, once, at the first
            expert-layout combine (never while a graph is recorded).
    """

    def __init__(self, platform: Platform, config: ThroughputConfig, all_gather: AllGather) -> None:
        self.config = config
        self._machine = Machine(platform, config, all_gather)
        self._spaces: dict[int, HandleSpace] = {}
        self._num_calls = 0

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that this rank lends."""
        return self._machine.nbytes

    @property
    def num_copies(self) -> int:
        """Results that were copied out because no slot was free."""
        return self._machine.pool.num_copies

    def dispatch(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        route: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        handle: ThroughputHandle | None,
        options: DispatchOptions,
    ) -> Received:
        """Send rows; the caller has checked the arguments, see `Buffer.dispatch` for their meaning.

        Args:
            x: `[num_tokens, hidden]`, unit stride in the last dimension, rows 16-byte aligned.
            scales: `[num_tokens, num_scales]` of 4-byte elements, any strides, or None.
            route: `[num_tokens, num_topk]` int64, or `[num_tokens, num_ranks]` bool, contiguous; None with a handle.
            topk_weights: `[num_tokens, num_topk]` float32 contiguous, or None.
            handle: of an earlier dispatch, to go the same way again; its layout and alignment count.
            options: how.
        Raises:
            what an earlier call left behind; with `options.sync` also what this one met.
        """
        machine = self._machine
        stream = machine.begin()
        is_fresh = handle is None
        if handle is None:
            handle = self._new_handle(x.shape[0], route, topk_weights, options)
        payload = Payload(x, scales, topk_weights)
        launch = plan_launch(machine, payload.row_bytes, handle.is_expert, options.num_sms)
        taken = None if handle.is_expert else machine.take(stream)
        mailbox = machine.open_mailbox() if options.sync and is_fresh else None
        word = signature(
            "dispatch", handle.layout, handle.expert_alignment, payload.row_bytes, payload.num_scales, x.dtype,
            handle.has_topk, topk_weights is not None, 0 if is_fresh else handle.call_idx,
        )  # fmt: skip
        exchange = Exchange(machine.pool.landing if taken is None else taken.slot, word, mailbox)
        weights = topk_weights if is_fresh else None
        launch_layout(machine, handle, route, weights, exchange, launch, stream, options.timeout_s)
        expanded = launch_payload(machine, payload, handle, launch, stream, options)
        if mailbox is not None:
            self._wait_counts(handle, mailbox, options.timeout_s, taken)
        if expanded is not None:
            return cut_expanded(expanded, handle)
        return view_slot(machine, payload, handle, taken, topk_weights is not None, stream)

    def combine_input(self, handle: ThroughputHandle, dtype: torch.dtype) -> torch.Tensor | None:
        """Return `[num_recv, hidden]` memory from which a combine needs no copy, or None when no slot is free."""
        machine, hidden = self._machine, self.config.hidden
        stream = machine.begin()
        if handle.is_expert:
            region = machine.expert_regions()[self.config.rank]
            rows = self.config.max_expanded_rows if handle.num_recv is None else handle.num_recv
            return region.lease(0, rows * hidden * dtype.itemsize, None).view(dtype).view(rows, hidden)
        taken = machine.take(stream)
        if taken is None:
            return None
        rows = self.config.max_recv_rows if handle.num_recv is None else handle.num_recv
        return machine.lease(taken)[: rows * hidden * dtype.itemsize].view(dtype).view(rows, hidden)

    def combine(
        self,
        y: torch.Tensor,
        handle: ThroughputHandle,
        topk_weights: torch.Tensor | None,
        bias: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        options: CombineOptions,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring rows back and sum them; the caller has checked the arguments, see `Buffer.combine`.

        Args:
            y: `[num_recv, hidden]` contiguous, anywhere; from `combine_input` or a dispatch it is not copied.
            handle: of the dispatch.
            topk_weights: `[num_recv, num_topk]` or, expert layout, `[num_recv]`; float32 contiguous, or None.
            bias: up to two contiguous `[num_tokens, hidden]`, both of y's dtype or both float32.
            out: where to write, contiguous, or None.
            options: how.
        Returns:
            `[num_tokens, hidden]`, and the weights `[num_tokens, num_topk]` or None.
        """
        stream = self._machine.begin()
        if out is None:
            shape = (handle.num_tokens, self.config.hidden)
            out = torch.empty(shape, dtype=y.dtype, device=self._machine.platform.device)
        return out, launch_combine(self._machine, y, handle, topk_weights, bias, out, options, stream)

    def barrier(self, timeout_s: float) -> None:
        """All ranks meet on the device, on their current streams."""
        stream = self._machine.begin()
        self._machine.launch(self._machine.kernel("barrier", timeout_s), 1, Shape(1, 32, 0, 0, 0), stream)

    def refuse_combine(self, timeout_s: float) -> None:
        """Take part in a combine only to tell the peers that this rank's arguments were invalid; they raise."""
        machine = self._machine
        stream = machine.platform.stream()
        launch_refusal(machine, timeout_s, stream)

    def refuse_dispatch(self, timeout_s: float) -> None:
        """Take part in a dispatch only to tell the peers that this rank's arguments were invalid; they raise."""
        machine = self._machine
        stream = machine.platform.stream()
        options = DispatchOptions(timeout_s=timeout_s, sync=False)
        handle = self._new_handle(0, None, None, options)
        nothing = torch.empty(0, self.config.hidden, dtype=self.config.dtype, device=machine.platform.device)
        payload = Payload(nothing, None, None)
        launch = plan_launch(machine, payload.row_bytes, False, None)
        exchange = Exchange(machine.pool.landing, 0, None, REFUSED_INVALID_ARGUMENT)
        launch_layout(machine, handle, None, None, exchange, launch, stream, timeout_s)
        launch_payload(machine, payload, handle, launch, stream, options)

    def abort(self) -> None:
        """End every wait of the kernels in flight, from any thread; close the buffer afterwards."""
        self._machine.abort()

    def check(self) -> None:
        """Raise what a kernel has reported since the last look; costs a few loads of host memory."""
        self._machine.check()

    def close(self) -> None:
        """Give up all memory; tensors over it keep what they use. Idempotent. No kernel may be in flight."""
        self._machine.close()

    def _new_handle(
        self,
        num_tokens: int,
        route: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> ThroughputHandle:
        self._num_calls += 1
        space = self._spaces.get(num_tokens)
        if space is None:
            space = self._spaces.setdefault(num_tokens, handle_space(self.config, num_tokens))
        return ThroughputHandle(
            call_idx=self._num_calls,
            layout=options.layout,
            expert_alignment=options.expert_alignment,
            num_tokens=num_tokens,
            space=space,
            words=torch.empty(space.total, dtype=torch.int32, device=self._machine.platform.device),
            has_topk=route is not None and route.dtype != torch.bool,
            has_weights=topk_weights is not None,
        )

    def _wait_counts(self, handle: ThroughputHandle, mailbox: int, timeout_s: float, taken: Taken | None) -> None:
        """Wait until the layout kernel has all counts; they become the handle's."""
        info = self._machine.wait_mailbox(mailbox, timeout_s)
        if info is None:
            if taken is not None:
                self._machine.pool.quarantine(taken.slot)
            self._machine.check()
            raise ResourceError("dispatch failed and left no report")
        self._machine.pool.settle()
        handle.num_recv = info[RECV_INFO_EXPANDED if handle.is_expert else RECV_INFO_ROWS]
        handle.num_tokens_per_expert = info[RECV_INFO_COUNTS : RECV_INFO_COUNTS + self.config.num_local_experts]
