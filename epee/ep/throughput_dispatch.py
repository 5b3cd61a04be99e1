"""The two launches of a dispatch, and the tensors over what it brings.

`launch_layout` counts, exchanges counts and grants, and finds all places; `launch_payload` moves the rows into the
receivers' slots (rank layout), or into their landing slots and from there to the experts' blocks in ordinary memory
(expert layout).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .throughput_machine import Machine, Taken
from .throughput_plan import Shape, dispatch_shape, layout_shape, num_expander_blocks
from .throughput_types import DispatchOptions, Received, ThroughputHandle

SMALL_TOKENS = 1024
FOUR_STAGES_BELOW_BYTES = 8 << 10


class Payload(NamedTuple):
    """What a dispatch sends: `[num_tokens, hidden]`, `[num_tokens, num_scales]`, `[num_tokens, num_topk]`."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_weights: torch.Tensor | None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row without its scales."""
        return self.x.shape[1] * self.x.element_size()

    @property
    def num_scales(self) -> int:
        """4-byte scales of a row."""
        return 0 if self.scales is None else self.scales.shape[1]


class Launch(NamedTuple):
    """How the payload kernel is launched: its shape, the blocks that send, and their channels (expert layout)."""

    shape: Shape
    num_senders: int
    num_channels: int


class Exchange(NamedTuple):
    """What this rank says in the exchange: the slot it grants, what the call is, a mailbox or None, a refusal or 0."""

    slot: int
    signature: int
    mailbox: int | None
    refused: int = 0


def plan_launch(machine: Machine, row_bytes: int, is_expert: bool, num_sms: int | None) -> Launch:
    """Return how to launch the payload kernel; in the expert layout it takes every multiprocessor."""
    limits = machine.platform.limits
    senders = machine.num_sms(num_sms)
    if not is_expert:
        num_stages = 4 if row_bytes < FOUR_STAGES_BELOW_BYTES else 2
        return Launch(dispatch_shape(row_bytes, senders, limits, num_stages), senders, 0)
    one = dispatch_shape(row_bytes, senders, limits, 1)
    warps = one.block // 64 * 2
    num_channels = senders * warps // 2
    num_expander_blocks(machine.config.num_ranks, num_channels, warps, limits.num_sms - senders)
    shape = Shape(limits.num_sms, 32 * warps, warps * one.chunk_bytes, one.chunk_bytes, 2)
    return Launch(shape, senders, num_channels)


def launch_layout(
    machine: Machine,
    handle: ThroughputHandle,
    route: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    exchange: Exchange,
    launch: Launch,
    stream: int,
    timeout_s: float,
) -> None:
    """Launch counting and exchange; without `route` only the exchange."""
    config = machine.config
    kernel = machine.kernel("throughput_layout", timeout_s)
    a = kernel.args
    machine.set_handle(a, handle)
    a.recv_info = handle.words.data_ptr() + 4 * handle.space.recv_info
    has_topk = route is not None and route.dtype != torch.bool
    a.topk_idx = route.data_ptr() if route is not None and has_topk else 0
    a.token_in_rank = route.data_ptr() if route is not None and not has_topk else 0
    a.topk_weights = 0 if topk_weights is None else topk_weights.data_ptr()
    if topk_weights is None:
        a.weights_of = 0
    a.mailbox = 0 if exchange.mailbox is None else machine.mailbox_address(exchange.mailbox)
    a.signature, a.grant, a.refused = exchange.signature, exchange.slot, exchange.refused
    a.num_tokens, a.expert_alignment = handle.num_tokens, handle.expert_alignment
    a.max_expanded_rows = config.max_expanded_rows if handle.is_expert else 0
    a.num_channels, a.num_blocks, a.do_count = launch.num_channels, launch.shape.grid, int(route is not None)
    if route is None:
        shape = Shape(1, 32, 8 * (config.num_counters + 1), 0, 0)
    else:
        limits = machine.platform.limits
        shape, a.kept_per_warp = layout_shape(handle.num_tokens, config.num_counters, config.lanes_per_token, limits)
    machine.launch(kernel, shape.grid, shape, stream, "together" if shape.grid > 1 else "early")


def launch_payload(
    machine: Machine,
    payload: Payload,
    handle: ThroughputHandle,
    launch: Launch,
    stream: int,
    options: DispatchOptions,
) -> Received | None:
    """Launch the movement of rows; returns the expert layout's result, in full capacity."""
    shape = launch.shape
    name = "expert" if handle.is_expert else str(shape.num_stages)
    kernel = machine.kernel(f"throughput_dispatch_{name}", options.timeout_s)
    a = kernel.args
    machine.set_handle(a, handle)
    if payload.topk_weights is not None:
        # An empty tensor's address is 0, which would say "no weights" to the expanders of a rank without tokens.
        a.weights_of = payload.topk_weights.data_ptr() or handle.words.data_ptr()
    a.recv_info = handle.words.data_ptr() + 4 * handle.space.recv_info
    a.x, a.x_stride = payload.x.data_ptr(), payload.x.stride(0) * payload.x.element_size()
    a.num_scales = payload.num_scales
    if payload.scales is not None:
        a.scales = payload.scales.data_ptr()
        a.scale_row_stride, a.scale_column_stride = payload.scales.stride()
    a.num_tokens, a.row_bytes = handle.num_tokens, payload.row_bytes
    a.chunk_bytes, a.num_sender_blocks = shape.chunk_bytes, launch.num_senders
    a.fill_tail = int(not options.sync and handle.has_topk and not handle.is_expert)
    a.expert_alignment, a.max_expanded_rows = handle.expert_alignment, machine.config.max_expanded_rows
    expanded = _allocate_expanded(machine, a, payload, handle, stream) if handle.is_expert else None
    # Launched early, the blocks have their barriers ready when the counts come: 3 us that matter for few tokens.
    mode = "early" if handle.num_tokens <= SMALL_TOKENS else "plain"
    machine.launch(kernel, shape.grid, shape, stream, mode)
    return expanded


def _allocate_expanded(
    machine: Machine, args: Any, payload: Payload, handle: ThroughputHandle, stream: int
) -> Received:
    rows, device = machine.config.max_expanded_rows, machine.platform.device
    x, num_scales = payload.x, payload.num_scales
    weights = torch.empty(rows, dtype=torch.float32, device=device)
    sources = torch.empty(3, rows, dtype=torch.int64, device=device)
    full = Received(
        x=torch.empty(rows, x.shape[1], dtype=x.dtype, device=device),
        scales=torch.empty(rows, num_scales, dtype=torch.int32, device=device) if num_scales else None,
        topk_idx=None,
        topk_weights=weights,
        src_rank=sources[0],
        src_token=sources[1],
        src_k=sources[2],
        handle=handle,
        stream=stream,
    )
    args.out_x, args.out_weights = full.x.data_ptr(), weights.data_ptr()
    args.out_scales = 0 if full.scales is None else full.scales.data_ptr()
    args.out_src_rank, args.out_src_token, args.out_src_k = (column.data_ptr() for column in sources)
    return full


def cut_expanded(full: Received, handle: ThroughputHandle) -> Received:
    """Cut an expert-layout result to its size, when that is known."""
    rows = handle.num_recv
    if rows is None:
        return full

    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[:rows]

    return Received(
        x=full.x[:rows],
        scales=cut(full.scales),
        topk_idx=None,
        topk_weights=cut(full.topk_weights),
        src_rank=cut(full.src_rank),
        src_token=full.src_token[:rows],
        src_k=cut(full.src_k),
        handle=handle,
        stream=full.stream,
    )


def view_slot(
    machine: Machine, payload: Payload, handle: ThroughputHandle, taken: Taken | None, has_weights: bool, stream: int
) -> Received:
    """Return tensors over the slot that a rank-layout dispatch filled, or copies when it was the landing slot."""
    config, layout = machine.config, machine.config.slot_layout
    rows = config.max_recv_rows if handle.num_recv is None else handle.num_recv
    if taken is None:
        at = machine.pool.landing * config.slot_bytes
        base = machine.slots[config.rank].lease(at, config.slot_bytes, None)
    else:
        base = machine.lease(taken)
    words = base.view(torch.int64)

    def field(name: str, typed: torch.Tensor, columns: int) -> torch.Tensor:
        start = layout.offset(name) // typed.element_size()
        shape, strides = ((rows, columns), (columns, 1)) if columns else ((rows,), (1,))
        view = typed.as_strided(shape, strides, start)
        return view if taken is not None else view.clone()

    num_topk, num_scales = config.num_topk, payload.num_scales
    return Received(
        x=field("x", base.view(payload.x.dtype), config.hidden),
        scales=field("scales", base.view(torch.int32), num_scales) if num_scales else None,
        topk_idx=field("topk_idx", words, num_topk) if handle.has_topk else None,
        topk_weights=field("topk_weights", base.view(torch.float32), num_topk) if has_weights else None,
        src_rank=None,
        src_token=field("src_token", words, 0),
        src_k=None,
        handle=handle,
        stream=stream,
    )
