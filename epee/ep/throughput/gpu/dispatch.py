"""The launches of a dispatch, and the tensors over its results.

The first kernel counts, exchanges counts and grants, and computes all offsets; the second moves the rows into the
receivers' slots (rank layout), or into their landing slots and from there to the experts' blocks in ordinary memory
(expert layout; a rank's own rows go there at once). Few tokens in the rank layout need one kernel that does both.

Dispatches of a shape with equal `CheckedDispatch` share a `DispatchPlan`: the kernels to be launched, with all
arguments except addresses and the numbers of the call, which `start` writes.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, TypeAlias

import torch

from ....errors import ResourceError
from ....gpu.params import FEW_KERNEL, RECV_INFO_COUNTS, RECV_INFO_EXPANDED, RECV_INFO_ROWS
from ....gpu.shapes import (
    FEW_TOKENS,
    LaunchShape,
    dispatch_shape,
    expert_shape,
    few_shape,
    handle_space,
    layout_shape,
    num_senders,
)
from ....gpu.signature import dispatch_signature
from ....gpu.stage import Stage, call_words
from ....memory.fresh import allocator, first_rows, part_of
from .machine import Machine
from .shape import Shape
from .slots import Taken
from .types import CheckedDispatch, DispatchOptions, DispatchResult, HandleForm, ThroughputHandle
from .views import FieldAt, KeptRows

SMALL_TOKENS = 1024
FEW_SMS = 65  # for few tokens by default: none of them is busy for long, and more gain nothing
FOUR_STAGES_BELOW_BYTES = 8 << 10
_ONE_WARP = 32


# The payload of a dispatch: `[num_tokens, hidden]`, `[num_tokens, num_scales]`, `[num_tokens, num_topk]`. A plain
# tuple, as is the next one: to make one of a class of its own takes ten times as long.
Payload: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]"
# A rank's part of the exchange: the slot that it grants; the address where the kernel answers, 0 for none; why it has
# no rows, as `gpu/report.py` encodes it: then only the kernels that the peers wait for are launched, else 0.
Part: TypeAlias = "tuple[int, int, int]"
# Room for an expert-layout result in full capacity: rows, scales, weights, and one after the other `src_rank`,
# `row_src_token` and `src_k`.
Expanded: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]"


class Fields(NamedTuple):
    """The fields of a rank-layout result in its slot; None for missing ones. `kept`: as the places of `KeptRows`."""

    x: FieldAt
    scales: FieldAt | None
    topk_idx: FieldAt | None
    topk_weights: FieldAt | None
    kept: tuple[int | None, int]


class DispatchPlan:
    """The launches of dispatches with equal checked.

    Args:
        shape: of the calls.
        checked: of the calls.

    Attributes:
        checked: of the calls.
        max_sms: multiprocessors that the calls may take.
        most_rows: of a result: the maximum.
        num_topk: of the shape.
        is_expert: whether the layout is "expert".
        has_mailbox: whether the CPU waits for the counts.
        new_handle: makes a handle of the number of the call.
        checked_handle: the common fields of handles, for the code that makes them of the result of `new_handle`; empty
            at first.
    """

    _space: Any = staticmethod(handle_space)

    def __init__(self, shape: Shape, checked: CheckedDispatch) -> None:
        machine, config = shape.machine, shape.config
        self._shape, self.checked = shape, checked
        self._fields = _fields(shape, checked)
        is_expert, alignment = checked.is_expert, checked.expert_alignment
        self.max_sms = machine.max_sms
        self.most_rows = config.expanded_rows(alignment) if is_expert else config.recv_rows(checked.capacity)
        self.num_topk = config.num_topk
        self.is_expert, self.has_mailbox = is_expert, checked.is_exact and checked.is_fresh
        self._is_fresh, self._has_topk = checked.is_fresh, checked.has_topk
        self._num_rows_at = RECV_INFO_EXPANDED if is_expert else RECV_INFO_ROWS
        self._counts = slice(RECV_INFO_COUNTS, RECV_INFO_COUNTS + config.num_local_experts)
        self._num_info_words = config.info_words // 2
        self.checked_handle: dict[str, Any] = {}
        device, most = machine.platform.device, self.most_rows
        self.new_handle = HandleForm(checked, self._space(config, checked.num_tokens), device).make
        self._hidden = config.hidden
        if is_expert:
            self._new_x = allocator((most, config.hidden), checked.dtype, device)
            self._new_scales = allocator((most, checked.num_scales), torch.int32, device)
            self._new_weights = allocator((most,), torch.float32, device)
            self._new_sources = allocator((3 * most,), torch.int64, device)
        self._set_stages()

    def _set_stages(self) -> None:
        """Make the kernels to be launched."""
        shape, checked, machine, config = self._shape, self.checked, self._shape.machine, self._shape.config
        self._num_senders = self._num_channels = self._few_warps = 0
        limits = machine.platform.limits
        few = None
        if checked.is_fresh and not checked.is_expert and checked.num_tokens <= FEW_TOKENS:
            most = min(FEW_SMS, machine.max_sms // 2)  # so that the next kernel fits beside it
            wanted = machine.num_sms(checked.num_sms, most)
            few = few_shape(checked.num_tokens, checked.row_bytes, config.num_counters, wanted, limits)
        self._payload: Stage | None = None
        if few is not None:
            launch, self._few_warps = few
            self._first = shape.stage(FEW_KERNEL, launch, "early")
            self._first.args.num_move_warps = self._few_warps
            layout, payload = self._first.args.layout, self._first.args.payload
        else:
            launch = self._payload_shape(machine)
            # Launched early, the blocks have their barriers ready when the counts come: 3 us that matter to few tokens.
            mode = "early" if checked.num_tokens <= SMALL_TOKENS else "plain"
            name = "dispatch_throughput_expert" if checked.is_expert else "dispatch_throughput"
            self._payload = shape.stage(f"{name}_{launch.num_stages}", launch, mode)
            self._first = _layout_stage(shape, checked)
            layout, payload = self._first.args, self._payload.args
        self._layout_args, self._payload_args = layout, payload
        self._write_layout = call_words(layout, "topk_idx token_in_rank topk_weights handle mailbox grant refused")
        self._write_payload = call_words(payload, "x scales handle")
        self._set_arguments(layout, payload, launch)

    def start(
        self,
        payload: Payload,
        route: torch.Tensor | None,
        handle: ThroughputHandle | None,
        timeout_s: float,
        stream: int,
        is_late: bool = True,
    ) -> DispatchResult:
        """Send rows, in a call that has begun on the raw `stream`.

        Args:
            payload: the tensors to send. The caller has checked it; rows are 16-byte aligned, of unit stride.
            route: `[num_tokens, num_topk]` int64, or `[num_tokens, num_ranks]` bool, contiguous; None with a handle.
            handle: of an earlier dispatch, whose routing is used again.
            timeout_s: how long the GPU waits for a peer.
            stream: raw, of the call.
            is_late: parts of the result that few programs read are made when they are read.
        Raises:
            errors of this call, if the CPU waits for the counts.
        """
        machine = self._shape.machine
        if handle is None:
            handle = self.new_handle(machine.num_calls + 1)
        elif payload[2] is not None and (self.is_expert or handle.capacity is not None):  # for `lost_weight`
            handle = handle.with_weights(payload[2])
        # all memory before the first kernel: after it there is no way back without the peers
        expanded = self._allocate_expanded() if self.is_expert else None
        taken = None if self.is_expert else machine.take(stream, is_granted=True)
        try:
            slot = machine.grant_landing() if taken is None else taken.slot
            machine.filled_by[slot] = self._shape
            if machine.is_poisoned:
                machine.poison_slot(slot)
            mailbox = machine.mailboxes.open() if self.has_mailbox else 0
            self._launch(payload, handle, route, (slot, mailbox, 0), expanded, timeout_s, stream)
            if mailbox:
                self._wait_counts(handle, mailbox, timeout_s)
        except BaseException:
            if taken is not None:
                taken()
            raise
        if expanded is not None:
            return self._cut_expanded(expanded, handle, stream)
        return self._view(handle, taken, stream, is_late)

    def refuse(self, payload: Payload, code: int, timeout_s: float, stream: int) -> None:
        """Take part as a dispatch only to report to the peers why there is none; no rank stores into its slot."""
        handle = self.new_handle(self._shape.machine.num_calls + 1)
        self._launch(payload, handle, None, (0, 0, code), None, timeout_s, stream)

    def _launch(
        self,
        payload: Payload,
        handle: ThroughputHandle,
        route: torch.Tensor | None,
        part: Part,
        expanded: Expanded | None,
        timeout_s: float,
        stream: int,
    ) -> None:
        """Launch the kernels, in the expert layout to write into `expanded`."""
        machine, layout, sends = self._shape.machine, self._layout_args, self._payload_args
        x, scales, weights = payload
        slot, mailbox, refused = part
        addresses, timeout_ns = handle.addresses, int(timeout_s * 1e9)
        topk_idx = mask = 0
        if route is not None:
            if self._has_topk:
                topk_idx = route.data_ptr()
            else:
                mask = route.data_ptr()
        sent = 0 if weights is None else weights.data_ptr()
        given = sent if self._is_fresh else 0
        from_scales = 0 if scales is None else scales.data_ptr()
        number = 0 if machine.is_capturing else machine.num_calls + 1
        self._write_layout(number, timeout_ns, topk_idx, mask, given, addresses, mailbox, slot, refused)
        self._write_payload(number, timeout_ns, x.data_ptr(), from_scales, addresses)
        if weights is not None:
            # An empty tensor's address is 0, which would mean "no weights" to the expanders of a rank without tokens.
            sends.weights_of = sent or handle.words.data_ptr()
        if weights is None or not self._is_fresh:
            layout.weights_of = 0
        if expanded is not None:
            self._set_out(sends, expanded)
        machine.launch_written(self._first, stream, is_first=True)
        if self._payload is not None and not refused:
            machine.launch_written(self._payload, stream)

    def _wait_counts(self, handle: ThroughputHandle, mailbox: int, timeout_s: float) -> None:
        """Wait until the layout kernel has all counts; they become the handle's."""
        machine = self._shape.machine
        info = machine.mailboxes.wait(mailbox, self._num_info_words, timeout_s, machine.interrupt)
        if info is None:
            machine.check()
            raise ResourceError("dispatch failed and left no report")
        handle.num_recv = info[self._num_rows_at]
        handle.num_tokens_per_expert = info[self._counts]

    def _allocate_expanded(self) -> Expanded:
        """Return room for an expert-layout result in full capacity."""
        x, scales = self._new_x(), self._new_scales() if self.checked.num_scales else None
        if self._shape.machine.is_poisoned:
            for tensor in (x, scales):
                if tensor is not None:
                    tensor.view(torch.uint8).fill_(0xFF)
        return x, scales, self._new_weights(), self._new_sources()

    def _set_out(self, a: Any, expanded: Expanded) -> None:
        """Set where an expert-layout result goes."""
        x, scales, weights, sources = expanded
        a.out_x, a.out_scales = x.data_ptr(), 0 if scales is None else scales.data_ptr()
        a.out_weights, at = weights.data_ptr(), sources.data_ptr()
        a.out_src_rank, a.out_src_token, a.out_src_k = (at + 8 * i * self.most_rows for i in range(3))

    def _cut_expanded(self, expanded: Expanded, handle: ThroughputHandle, stream: int) -> DispatchResult:
        """Return an expert-layout result, cut to its size when that is known."""
        x, scales, weights, sources = expanded
        most, num_scales = self.most_rows, self.checked.num_scales
        rows = most if handle.num_recv is None else handle.num_recv
        return DispatchResult(
            first_rows(x, (most, self._hidden), rows),
            None if scales is None else first_rows(scales, (most, num_scales), rows),
            None,
            part_of(weights, 0, rows),
            handle,
            [stream],
            sources=(part_of(sources, 0, rows), part_of(sources, most, rows), part_of(sources, 2 * most, rows)),
        )

    def _view(self, handle: ThroughputHandle, taken: Taken | None, stream: int, is_late: bool) -> DispatchResult:
        """Return tensors over the slot that a rank-layout dispatch filled, or copies when it was the landing slot.

        With `is_late` those that are not always read are made when they are.
        """
        machine = self._shape.machine
        rows = self.most_rows if handle.num_recv is None else handle.num_recv
        views, at = machine.views(taken), self._fields
        readers = [stream] if taken is None else taken.streams
        kept = None
        if self._is_fresh:  # data that the handle may be asked for later
            is_graphs = taken is not None and taken.is_graphs
            current = None if is_graphs else machine.platform.stream
            kept = KeptRows(views.words, at.kept, (rows, self.num_topk), readers, current)
            if taken is not None and not is_graphs:
                views.kept = weakref.ref(kept)
        x = views.alias(at.x, rows)
        scales = None if at.scales is None else views.alias(at.scales, rows)
        if taken is not None and is_late:
            late = views, at.topk_idx, at.topk_weights, rows
            return DispatchResult(x, scales, None, None, handle, readers, kept, late=late)
        topk_idx = None if at.topk_idx is None else views.alias(at.topk_idx, rows)
        topk_weights = None if at.topk_weights is None else views.alias(at.topk_weights, rows)
        if taken is None:
            x, scales, topk_idx, topk_weights = x.clone(), _clone(scales), _clone(topk_idx), _clone(topk_weights)
            if kept is not None:
                kept.keep()
        return DispatchResult(x, scales, topk_idx, topk_weights, handle, readers, kept)

    def _payload_shape(self, machine: Machine) -> LaunchShape:
        """Return the launch of the payload kernel, which in the expert layout takes every multiprocessor."""
        checked, limits = self.checked, machine.platform.limits
        senders = self._num_senders = machine.num_sms(checked.num_sms)
        num_stages = 4 if checked.row_bytes < FOUR_STAGES_BELOW_BYTES else 2
        if not checked.is_expert:
            return dispatch_shape(checked.row_bytes, senders, limits, num_stages)
        launch = expert_shape(checked.row_bytes, machine.max_sms, limits, num_stages)
        warps = launch.block // 32
        senders = self._num_senders = num_senders(senders, machine.max_sms, machine.config.num_ranks, warps)
        self._num_channels = senders * warps // 2
        return launch

    def _set_arguments(self, a: Any, sends: Any, launch: LaunchShape) -> None:
        """Set the constants among the `LayoutParams`, and among the `DispatchParams` of the kernel of this launch."""
        shape, checked = self._shape, self.checked
        if self._payload is not None and checked.is_fresh:
            a.kept_per_warp = layout_shape(*_layout_sizes(shape, checked))[1]
        a.signature = signature_of(checked)
        a.num_tokens, a.expert_alignment = checked.num_tokens, checked.expert_alignment
        a.max_expanded_rows = self.most_rows if checked.is_expert else 0
        a.num_channels, a.num_blocks, a.do_count = self._num_channels, launch.grid, int(checked.is_fresh)
        a.shape, a.capacity = shape.signature(checked.capacity), checked.capacity or 0
        sends.x_stride, sends.num_scales = checked.row_stride, checked.num_scales
        if checked.num_scales:
            sends.scale_row_stride, sends.scale_column_stride = checked.scale_strides
        sends.num_tokens, sends.row_bytes = checked.num_tokens, checked.row_bytes
        sends.chunk_bytes, sends.num_sender_blocks = launch.chunk_bytes, self._num_senders
        sends.fill_tail = int(not checked.is_exact and checked.has_topk)
        if not checked.is_expert:
            a.max_recv_rows = sends.max_recv_rows = self.most_rows
        else:
            sends.expert_alignment = checked.expert_alignment
            sends.max_expanded_rows = self.most_rows


def _layout_sizes(shape: Shape, checked: CheckedDispatch) -> tuple[Any, ...]:
    config, machine = shape.config, shape.machine
    return checked.num_tokens, config.num_counters, config.lanes_per_token, machine.max_sms, machine.platform.limits


def _layout_stage(shape: Shape, checked: CheckedDispatch) -> Stage:
    """Return the kernel that counts and exchanges; without routing only the latter."""
    if not checked.is_fresh:
        launch = LaunchShape(1, _ONE_WARP, 8 * (shape.config.num_counters + 1), 0, 0)
    else:
        launch, _ = layout_shape(*_layout_sizes(shape, checked))
    return shape.stage("layout_throughput", launch, "together" if launch.grid > 1 else "early")


def _fields(shape: Shape, checked: CheckedDispatch) -> Fields:
    config, offsets = shape.config, shape.offsets
    most = config.max_recv_rows

    def field(name: str, dtype: torch.dtype, columns: int) -> FieldAt:
        """Return the location of a field in full capacity."""
        return dtype, offsets[name], (most, columns)

    return Fields(
        x=field("x", checked.dtype, config.hidden),
        scales=field("scales", torch.int32, checked.num_scales) if checked.num_scales else None,
        topk_idx=field("topk_idx", torch.int64, config.num_topk) if checked.has_topk else None,
        topk_weights=field("topk_weights", torch.float32, config.num_topk) if checked.has_weights else None,
        kept=(offsets["topk_idx"] // 8 if checked.has_topk else None, offsets["src_token"] // 8),
    )


def short_key(machine: Machine, is_exact: bool, num_sms: int | None) -> tuple[object, ...]:
    """Return the part of a plan's key beside what calls with one memo have in common."""
    return is_exact, num_sms, machine.max_sms, FEW_TOKENS


def plan_of(
    shape: Shape,
    handle: ThroughputHandle | None,
    payload: Payload,
    route: torch.Tensor | None,
    options: DispatchOptions,
    memo: dict[Any, DispatchPlan] | None,
) -> DispatchPlan:
    """Return the plan of such dispatches on as many multiprocessors as the call in progress may take.

    Args:
        shape: of the call.
        handle: of an earlier dispatch, or None.
        payload, route, options: of the call.
        memo: of calls that differ only in `options`, or None: where their plans are found sooner.
    """
    machine = shape.machine
    short = short_key(machine, options.sync, options.num_sms)
    plan = None if memo is None else memo.get(short)
    if plan is None:
        checked = _checked_of(handle, payload, route, options)
        key = checked, machine.max_sms, FEW_TOKENS
        plan = shape.plans.get(key)
        if plan is None:
            kind = DispatchPlan if shape.plan_kinds is None else shape.plan_kinds[0]
            plan = kind(shape, checked)
            shape.keep_plan(key, plan)
        if memo is not None:
            memo[short] = plan
    return plan


def _checked_of(
    handle: ThroughputHandle | None, payload: Payload, route: torch.Tensor | None, options: DispatchOptions
) -> CheckedDispatch:
    x, scales, topk_weights = payload
    is_by_experts = route is not None and route.dtype != torch.bool
    return CheckedDispatch(
        num_tokens=x.shape[0],
        dtype=x.dtype,
        row_bytes=x.shape[1] * x.itemsize,
        row_stride=x.stride(0) * x.itemsize,
        num_scales=0 if scales is None else scales.shape[1],
        scale_dtype=None if scales is None else scales.dtype,
        scale_strides=(0, 0) if scales is None else scales.stride(),
        layout=options.layout if handle is None else handle.layout,
        expert_alignment=options.expert_alignment if handle is None else handle.expert_alignment,
        has_topk=is_by_experts if handle is None else handle.has_topk,
        has_weights=topk_weights is not None,
        is_fresh=route is not None,
        is_exact=options.sync,
        num_sms=options.num_sms,
        capacity=options.capacity if handle is None else handle.capacity,
    )


def signature_of(checked: CheckedDispatch) -> int:
    """Return what all ranks compare of a dispatch."""
    return dispatch_signature(
        checked.layout,
        checked.expert_alignment,
        checked.dtype,
        checked.num_scales,
        checked.scale_dtype,
        checked.has_topk,
        checked.has_weights,
    )


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
