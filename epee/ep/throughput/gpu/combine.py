"""The launch of a combine: where this rank's rows lie, and what the kernel has to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ....memory.layout import Layout
from ...gpu.platform import LentRegion
from ...gpu.signature import combine_signature
from ..shapes import BULK_BYTES, FEW_TOKENS, PAYLOADS, combine_shape
from .machine import DEFAULT_SMS, Machine
from .place import ExpertPlace
from .types import CombineOptions, ThroughputHandle

FEW_SMS = 16  # for few tokens by default: more ask for everything at once and are served later
MAX_COPY_WARPS = 8  # they share the 16 barriers of a combining block


class CombineSource(NamedTuple):
    """The rows that peers pull: the regions, this rank's slot in its region, whether the kernel must copy the
    rows there while the peers are pulling, and the number of the `ExpertPlace`, if it is one."""

    regions: list[LentRegion]
    slot: int
    slot_bytes: int
    is_copied: bool
    number: int = 0


def place_rows(machine: Machine, y: torch.Tensor, handle: ThroughputHandle) -> CombineSource:
    """Find `y` in the lent memory, or decide how it gets there."""
    rank = machine.config.rank
    if handle.is_expert:
        place = machine.expert_place(handle.expert_alignment)
        is_there = y.numel() > 0 and y.data_ptr() == place.regions[rank].address
        if y.numel() and not is_there:
            lent = place.regions[rank].lease(place.slot_bytes, y.numel() * y.element_size(), None)
            lent.view(y.dtype).view(y.shape).copy_(y)
        return CombineSource(place.regions, 0 if is_there else 1, place.slot_bytes, False, place.number)
    slot_bytes = machine.config.slot_bytes
    offset = y.data_ptr() - machine.slots[rank].address
    slot, rest = divmod(offset, slot_bytes)
    is_lent = rest == 0 and 0 <= slot <= machine.config.num_slots  # a result is never in the landing slot
    if y.numel() and is_lent and slot not in machine.pool.haunted:
        return CombineSource(machine.slots, slot, slot_bytes, False)
    return CombineSource(machine.slots, machine.landing, slot_bytes, y.numel() > 0)


def launch_combine(
    machine: Machine,
    y: torch.Tensor,
    handle: ThroughputHandle,
    topk_weights: torch.Tensor | None,
    bias: Sequence[torch.Tensor],
    out: torch.Tensor,
    options: CombineOptions,
    stream: int,
) -> torch.Tensor | None:
    """Launch a combine into `out`; returns the weights that come back, if any go out."""
    config, limits = machine.config, machine.platform.limits
    place = place_rows(machine, y, handle)
    out_weights = _send_weights(machine, place, handle, topk_weights)
    kernel = machine.kernel(f"combine_throughput_{handle.layout}_{PAYLOADS[y.dtype]}", options.timeout_s)
    a = kernel.args
    machine.set_handle(a, handle)
    _set_place(machine, a, place, handle)
    row_bytes = config.hidden * y.element_size()
    num_entries = config.num_topk if handle.is_expert else config.num_ranks
    is_few = handle.num_tokens <= FEW_TOKENS
    num_sms = machine.num_sms(options.num_sms, FEW_SMS if is_few and not place.is_copied else DEFAULT_SMS)
    shape = combine_shape(row_bytes, num_entries, num_sms, limits, topk_weights is not None)
    a.y, a.out = y.data_ptr(), out.data_ptr()
    a.bias_0 = bias[0].data_ptr() if bias else 0
    a.bias_1 = bias[1].data_ptr() if len(bias) > 1 else 0
    a.is_bias_f32 = int(bool(bias) and bias[0].dtype == torch.float32)
    a.out_weights = 0 if out_weights is None else out_weights.data_ptr()
    a.signature = combine_signature(
        handle.layout, y.dtype, topk_weights is not None, options.order is not None, place.number
    )
    a.num_tokens, a.row_bytes, a.chunk_bytes = handle.num_tokens, row_bytes, shape.chunk_bytes
    a.num_stages, a.max_entries = shape.num_stages, num_entries
    num_copy_blocks = machine.max_sms - num_sms if place.is_copied else 0
    if place.is_copied and num_copy_blocks == 0:
        num_sms, num_copy_blocks = num_sms - 1, 1
    a.num_pull_blocks, a.num_copy_blocks = num_sms, num_copy_blocks
    a.num_copy_warps = min(MAX_COPY_WARPS, shape.block // 32, shape.shared_bytes // (2 * shape.chunk_bytes))
    machine.announce()
    machine.launch(kernel, num_sms + num_copy_blocks, shape, stream, "early")
    return out_weights


def launch_refusal(machine: Machine, timeout_s: float, stream: int) -> None:
    """Launch a combine that only tells the peers that this rank's call was refused."""
    kernel = machine.kernel("combine_throughput_rank_bf16", timeout_s)
    a = kernel.args
    limits = machine.platform.limits
    shape = combine_shape(BULK_BYTES, machine.config.num_ranks, 1, limits, False)
    a.refused, a.num_tokens, a.num_pull_blocks, a.num_copy_blocks = 1, 0, 1, 0
    a.row_bytes, a.chunk_bytes, a.num_stages = BULK_BYTES, shape.chunk_bytes, shape.num_stages
    machine.launch(kernel, 1, shape, stream, "early")


def _send_weights(
    machine: Machine, place: CombineSource, handle: ThroughputHandle, topk_weights: torch.Tensor | None
) -> torch.Tensor | None:
    """Put the weights beside the rows; return where those of this rank's tokens will go."""
    if topk_weights is None:
        return None
    config = machine.config
    layout = _layout_of(machine, handle)
    if topk_weights.numel():
        at = place.slot * place.slot_bytes + layout.offset("combine_weights")
        lent = place.regions[config.rank].lease(at, 4 * topk_weights.numel(), None)
        lent.view(torch.float32).view(topk_weights.shape).copy_(topk_weights)
    return torch.empty(handle.num_tokens, config.num_topk, dtype=torch.float32, device=machine.platform.device)


def _layout_of(machine: Machine, handle: ThroughputHandle) -> Layout:
    """Return the fields of the slots that a combine pulls from."""
    if handle.is_expert:
        return machine.config.expert_layout(machine.expert_place(handle.expert_alignment).expert_alignment)
    return machine.config.slot_layout


def _set_place(machine: Machine, args: Any, place: CombineSource, handle: ThroughputHandle) -> None:
    config = machine.config
    layout = _layout_of(machine, handle)
    for rank, region in enumerate(place.regions):
        args.slots[rank] = region.address
    args.slot_bytes, args.slot, args.refused = place.slot_bytes, place.slot, 0
    args.num_slots = ExpertPlace.num_slots if handle.is_expert else config.num_slots + 1
    args.max_rows = config.expanded_rows(handle.expert_alignment) if handle.is_expert else config.max_recv_rows
    args.weights_offset = layout.offset("combine_weights")
