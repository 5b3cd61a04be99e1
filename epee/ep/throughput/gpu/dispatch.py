"""The two launches of a dispatch, and the tensors over what it brings.

`launch_layout` counts, exchanges counts and grants, and finds all places; `launch_payload` moves the rows into the
receivers' slots (rank layout), or into their landing slots and from there to the experts' blocks in ordinary memory
(expert layout).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...gpu.params import FEW_KERNEL
from ..shapes import FEW_TOKENS, LaunchShape, dispatch_shape, few_shape, layout_shape, num_expander_blocks
from .machine import Machine
from .slots import Taken
from .types import DispatchOptions, DispatchResult, ThroughputHandle

SMALL_TOKENS = 1024
FEW_SMS = 65  # for few tokens by default: none of them is busy for long, and more gain nothing
FOUR_STAGES_BELOW_BYTES = 8 << 10


class Payload(NamedTuple):
    """What a dispatch sends: `[num_tokens, hidden]`, `[num_tokens, num_scales]`, `[num_tokens, num_topk]`.

    `row_bytes` of a row without its scales; `num_scales` 4-byte scales of a row.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_weights: torch.Tensor | None
    row_bytes: int
    num_scales: int

    @classmethod
    def of(cls, x: torch.Tensor, scales: torch.Tensor | None, topk_weights: torch.Tensor | None) -> Payload:
        """Return the payload of these tensors."""
        num_scales = 0 if scales is None else scales.shape[1]
        return cls(x, scales, topk_weights, x.shape[1] * x.element_size(), num_scales)


class DispatchLaunch(NamedTuple):
    """The launch of the payload kernel: its shape, the blocks that send, and their channels (expert layout).

    `few_warps` moving warps in each block when one kernel does the whole dispatch, else 0.
    """

    shape: LaunchShape
    num_senders: int
    num_channels: int
    few_warps: int = 0


class Announcement(NamedTuple):
    """This rank's part of the exchange: the slot it grants, what the call is, a mailbox or None, a refusal or 0."""

    slot: int
    signature: int
    mailbox: int | None
    refused: int = 0


def plan_launch(
    machine: Machine, row_bytes: int, is_expert: bool, num_sms: int | None, few_tokens: int | None = None
) -> DispatchLaunch:
    """Return how to launch the payload kernel; in the expert layout it takes every multiprocessor.

    Args:
        machine: whose kernel.
        row_bytes: of a token.
        is_expert: the layout.
        num_sms: as the user asks.
        few_tokens: how many tokens a fresh rank-layout dispatch sends, which one kernel does alone if they are few.
    """
    key = (row_bytes, is_expert, num_sms, few_tokens, machine.max_sms, FEW_TOKENS)
    launch: DispatchLaunch | None = machine.plans.get(key)
    if launch is None:
        launch = machine.plans[key] = _plan(machine, row_bytes, is_expert, num_sms, few_tokens)
    return launch


def _plan(
    machine: Machine, row_bytes: int, is_expert: bool, num_sms: int | None, few_tokens: int | None = None
) -> DispatchLaunch:
    limits = machine.platform.limits
    if few_tokens is not None and few_tokens <= FEW_TOKENS:
        most = min(FEW_SMS, machine.max_sms // 2)  # so that the next kernel fits beside it
        few = few_shape(few_tokens, row_bytes, machine.config.num_counters, machine.num_sms(num_sms, most), limits)
        if few is not None:
            return DispatchLaunch(few[0], 0, 0, few[1])
    senders = machine.num_sms(num_sms)
    if not is_expert:
        num_stages = 4 if row_bytes < FOUR_STAGES_BELOW_BYTES else 2
        return DispatchLaunch(dispatch_shape(row_bytes, senders, limits, num_stages), senders, 0)
    one = dispatch_shape(row_bytes, senders, limits, 1)
    warps = one.block // 64 * 2
    num_channels = senders * warps // 2
    num_expander_blocks(machine.config.num_ranks, num_channels, warps, machine.max_sms - senders)
    shape = LaunchShape(machine.max_sms, 32 * warps, warps * one.chunk_bytes, one.chunk_bytes, 2)
    return DispatchLaunch(shape, senders, num_channels)


def launch_layout(
    machine: Machine,
    handle: ThroughputHandle,
    route: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    announcement: Announcement,
    launch: DispatchLaunch,
    stream: int,
    timeout_s: float,
) -> None:
    """Launch counting and exchange; without `route` only the exchange."""
    config = machine.config
    kernel = machine.kernel("layout_throughput", timeout_s)
    a = kernel.args
    set_layout(machine, a, handle, route, topk_weights, announcement, launch)
    if route is None:
        shape = LaunchShape(1, 32, 8 * (config.num_counters + 1), 0, 0)
    else:
        shape, a.kept_per_warp = layout_shape(
            handle.num_tokens, config.num_counters, config.lanes_per_token, machine.max_sms, machine.platform.limits
        )
    machine.announce()
    machine.launch(kernel, shape.grid, shape, stream, "together" if shape.grid > 1 else "early")


def set_layout(
    machine: Machine,
    a: Any,
    handle: ThroughputHandle,
    route: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    announcement: Announcement,
    launch: DispatchLaunch,
) -> None:
    """Set the `LayoutParams` of a call."""
    machine.set_handle(a, handle)
    has_topk = route is not None and route.dtype != torch.bool
    a.topk_idx = route.data_ptr() if route is not None and has_topk else 0
    a.token_in_rank = route.data_ptr() if route is not None and not has_topk else 0
    a.topk_weights = 0 if topk_weights is None else topk_weights.data_ptr()
    if topk_weights is None:
        a.weights_of = 0
    a.mailbox = 0 if announcement.mailbox is None else machine.mailbox_address(announcement.mailbox)
    a.signature, a.grant, a.refused = announcement.signature, announcement.slot, announcement.refused
    a.num_tokens, a.expert_alignment = handle.num_tokens, handle.expert_alignment
    a.max_expanded_rows = machine.config.expanded_rows(handle.expert_alignment) if handle.is_expert else 0
    a.num_channels, a.num_blocks, a.do_count = launch.num_channels, launch.shape.grid, int(route is not None)


def launch_few(
    machine: Machine,
    payload: Payload,
    handle: ThroughputHandle,
    route: torch.Tensor,
    announcement: Announcement,
    launch: DispatchLaunch,
    stream: int,
    options: DispatchOptions,
) -> None:
    """Launch the one kernel that dispatches few tokens."""
    kernel = machine.kernel(FEW_KERNEL, options.timeout_s)
    a = kernel.args
    set_layout(machine, a.layout, handle, route, payload.topk_weights, announcement, launch)
    set_payload(machine, a.payload, payload, handle, launch, options)
    a.num_move_warps = launch.few_warps
    machine.announce()
    machine.launch(kernel, launch.shape.grid, launch.shape, stream, "early")


def launch_payload(
    machine: Machine,
    payload: Payload,
    handle: ThroughputHandle,
    launch: DispatchLaunch,
    stream: int,
    options: DispatchOptions,
    expanded: DispatchResult | None,
) -> None:
    """Launch the movement of rows, in the expert layout into `expanded`."""
    shape = launch.shape
    name = "expert" if handle.is_expert else str(shape.num_stages)
    kernel = machine.kernel(f"dispatch_throughput_{name}", options.timeout_s)
    a = kernel.args
    set_payload(machine, a, payload, handle, launch, options)
    if expanded is not None:
        a.out_x = expanded.x.data_ptr()
        a.out_weights, a.out_scales = _address(expanded.topk_weights), _address(expanded.scales)
        a.out_src_rank, a.out_src_token = _address(expanded.src_rank), _address(expanded.row_src_token)
        a.out_src_k = _address(expanded.src_k)
    # Launched early, the blocks have their barriers ready when the counts come: 3 us that matter for few tokens.
    mode = "early" if handle.num_tokens <= SMALL_TOKENS else "plain"
    machine.launch(kernel, shape.grid, shape, stream, mode)


def set_payload(
    machine: Machine,
    a: Any,
    payload: Payload,
    handle: ThroughputHandle,
    launch: DispatchLaunch,
    options: DispatchOptions,
) -> None:
    """Set the `DispatchParams` of a call, but for where an expert-layout result goes."""
    machine.set_handle(a, handle)
    if payload.topk_weights is not None:
        # An empty tensor's address is 0, which would say "no weights" to the expanders of a rank without tokens.
        a.weights_of = payload.topk_weights.data_ptr() or handle.words.data_ptr()
    x = payload.x
    a.x, a.x_stride = x.data_ptr(), x.stride()[0] * x.itemsize
    a.num_scales = payload.num_scales
    if payload.scales is not None:
        a.scales = payload.scales.data_ptr()
        a.scale_row_stride, a.scale_column_stride = payload.scales.stride()
    a.num_tokens, a.row_bytes = handle.num_tokens, payload.row_bytes
    a.chunk_bytes, a.num_sender_blocks = launch.shape.chunk_bytes, launch.num_senders
    a.fill_tail = int(not options.sync and handle.has_topk)
    if handle.is_expert:
        a.expert_alignment = handle.expert_alignment
        a.max_expanded_rows = machine.config.expanded_rows(handle.expert_alignment)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def allocate_expanded(machine: Machine, payload: Payload, handle: ThroughputHandle, stream: int) -> DispatchResult:
    """Return room for an expert-layout result in full capacity."""
    rows, device = machine.config.expanded_rows(handle.expert_alignment), machine.platform.device
    x, num_scales = payload.x, payload.num_scales
    weights = torch.empty(rows, dtype=torch.float32, device=device)
    sources = torch.empty(3, rows, dtype=torch.int64, device=device)
    full = DispatchResult(
        x=torch.empty(rows, x.shape[1], dtype=x.dtype, device=device),
        scales=torch.empty(rows, num_scales, dtype=torch.int32, device=device) if num_scales else None,
        topk_idx=None,
        topk_weights=weights,
        src_rank=sources[0],
        row_src_token=sources[1],
        src_k=sources[2],
        handle=handle,
        readers=[stream],
    )
    if machine.is_poisoned:
        for tensor in (full.x, full.scales):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xFF)
    return full


def cut_expanded(full: DispatchResult, handle: ThroughputHandle) -> DispatchResult:
    """Cut an expert-layout result to its size, when that is known."""
    rows = handle.num_recv
    if rows is None:
        return full

    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Return the first `rows` rows, of what is there."""
        return None if tensor is None else tensor[:rows]

    return DispatchResult(
        x=full.x[:rows],
        scales=cut(full.scales),
        topk_idx=None,
        topk_weights=cut(full.topk_weights),
        src_rank=cut(full.src_rank),
        row_src_token=cut(full.row_src_token),
        src_k=cut(full.src_k),
        handle=handle,
        readers=full.readers,
    )


def view_slot(
    machine: Machine, payload: Payload, handle: ThroughputHandle, taken: Taken | None, is_fresh: bool, stream: int
) -> DispatchResult:
    """Return tensors over the slot that a rank-layout dispatch filled, or copies when it was the landing slot."""
    config, offsets = machine.config, machine.offsets
    rows = config.max_recv_rows if handle.num_recv is None else handle.num_recv
    most, views = config.max_recv_rows, machine.views(taken)

    def field(name: str, dtype: torch.dtype, columns: int) -> torch.Tensor:
        """Return `[rows, columns]` of a field: a view of the slot, or a copy out of the landing slot."""
        alias = views.alias(dtype, offsets[name], (most, columns), rows)
        return alias if taken is not None else alias.clone()

    num_topk, num_scales = config.num_topk, payload.num_scales
    got = DispatchResult(
        x=field("x", payload.x.dtype, config.hidden),
        scales=field("scales", torch.int32, num_scales) if num_scales else None,
        topk_idx=field("topk_idx", torch.int64, num_topk) if handle.has_topk else None,
        topk_weights=field("topk_weights", torch.float32, num_topk) if payload.topk_weights is not None else None,
        src_rank=None,
        row_src_token=None,
        src_k=None,
        handle=handle,
        readers=[stream] if taken is None else taken.streams,
    )
    if is_fresh:
        got.kept = machine.kept_rows(taken, rows, handle.has_topk, got.readers)
    return got
