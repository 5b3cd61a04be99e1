"""The launch of a combine: where this rank's rows lie, and what the kernel has to know.

Combines of a shape that are alike (`CombineFacts`) share a `CombinePlan`: what is to be launched, with all arguments
but addresses and the numbers of the call, which `start` writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ....memory.fresh import allocator
from ....memory.layout import Layout
from ...gpu.platform import LentRegion
from ...gpu.signature import combine_signature
from ...gpu.stage import HandlePlace
from ..shapes import BULK_BYTES, FEW_TOKENS, PAYLOADS, combine_shape
from .machine import DEFAULT_SMS, Machine
from .place import ExpertPlace
from .shape import Shape
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


def _place_expert_rows(shape: Shape, y: torch.Tensor, handle: ThroughputHandle) -> CombineSource:
    """Find `y`, rows of the expert layout, in the lent memory, or copy it there."""
    rank, place = shape.config.rank, shape.expert_place(handle.expert_alignment)
    is_there = y.numel() > 0 and y.data_ptr() == place.regions[rank].address
    if y.numel() and not is_there:
        lent = place.regions[rank].lease(place.slot_bytes, y.numel() * y.element_size(), None)
        lent.view(y.dtype).view(y.shape).copy_(y)
    return CombineSource(place.regions, 0 if is_there else 1, place.slot_bytes, False, place.number)


def place_rows(machine: Machine, y: torch.Tensor, writer: Shape | None = None) -> CombineSource:
    """Find `y`, rows of the rank layout, in the lent memory, or decide that the kernel copies it there.

    Args:
        machine: whose memory.
        y: the rows.
        writer: the shape in which weights will be written beside them: not into a slot that another shape has filled,
            where something of a result that lives may lie in their place.
    """
    slot, is_copied = find_rows(machine, y, writer)
    return CombineSource(machine.slots, slot, machine.config.slot_bytes, is_copied)


def find_rows(machine: Machine, y: torch.Tensor, writer: Shape | None = None) -> tuple[int, bool]:
    """Return the slot from which the peers pull, and whether `y` is copied there; arguments as of `place_rows`."""
    if y.numel():
        slot = machine.slot_at(y.data_ptr())
        if slot is not None and slot not in machine.pool.haunters and writer in (None, machine.filled_by[slot]):
            return slot, False
    return machine.landing, y.numel() > 0


class CombineFacts(NamedTuple):
    """What decides how a combine is launched, but for addresses.

    Attributes:
        layout, expert_alignment, num_tokens, capacity: of the handle; no tokens where the ranks only meet.
        dtype: of the rows.
        has_weights: weights go back.
        is_bias_f32: there is a bias, and it is float32.
        is_ordered: in another library's order.
        is_copied, place: of the `CombineSource`: the latter is its number.
        num_sms: as the caller asks.
    """

    layout: str
    expert_alignment: int
    num_tokens: int
    dtype: torch.dtype
    has_weights: bool
    is_bias_f32: bool
    is_ordered: bool
    is_copied: bool
    place: int
    num_sms: int | None
    capacity: int | None

    @property
    def is_expert(self) -> bool:
        """Whether the layout is "expert"."""
        return self.layout == "expert"


class CombinePlan:
    """How combines with equal facts are launched.

    Args:
        shape: of the calls.
        facts: of the calls.
        place: of the rows.

    Attributes:
        max_sms: multiprocessors that the calls may take.
        new_out: makes what the sums go into, uninitialised.
    """

    def __init__(self, shape: Shape, facts: CombineFacts, place: CombineSource) -> None:
        machine, config = shape.machine, shape.config
        limits = machine.platform.limits
        self.max_sms = machine.max_sms
        self.new_out = allocator((facts.num_tokens, config.hidden), facts.dtype, machine.platform.device)
        row_bytes = config.hidden * facts.dtype.itemsize
        num_entries = config.num_topk if facts.is_expert else config.num_ranks
        is_few = facts.num_tokens <= FEW_TOKENS
        num_sms = machine.num_sms(facts.num_sms, FEW_SMS if is_few and not facts.is_copied else DEFAULT_SMS)
        launch = combine_shape(row_bytes, num_entries, num_sms, limits, facts.has_weights)
        num_copy_blocks = machine.max_sms - num_sms if facts.is_copied else 0
        if facts.is_copied and num_copy_blocks == 0:
            num_sms, num_copy_blocks = num_sms - 1, 1
        name = f"combine_throughput_{facts.layout}_{PAYLOADS[facts.dtype]}"
        self._stage = shape.stage(name, launch, "early", grid=num_sms + num_copy_blocks)
        a = self._args = self._stage.args
        self._handle = HandlePlace(a)
        _set_place(shape, a, place, facts)
        a.is_bias_f32 = int(facts.is_bias_f32)
        a.signature = combine_signature(facts.layout, facts.dtype, facts.has_weights, facts.is_ordered, facts.place)
        a.num_tokens, a.row_bytes, a.chunk_bytes = facts.num_tokens, row_bytes, launch.chunk_bytes
        a.num_stages, a.max_entries = launch.num_stages, num_entries
        a.num_pull_blocks, a.num_copy_blocks = num_sms, num_copy_blocks
        a.num_copy_warps = min(MAX_COPY_WARPS, launch.block // 32, launch.shared_bytes // (2 * launch.chunk_bytes))

    def start(
        self,
        machine: Machine,
        y: torch.Tensor,
        handle: ThroughputHandle,
        slot: int,
        bias: Sequence[torch.Tensor],
        out: torch.Tensor,
        out_weights: torch.Tensor | None,
        timeout_s: float,
        stream: int,
    ) -> None:
        """Launch a combine of `y`, which lies in `slot` or is copied there, into `out`."""
        a = self._args
        self._handle.write(handle.addresses)
        a.y, a.out, a.slot = y.data_ptr(), out.data_ptr(), slot
        a.bias_0 = bias[0].data_ptr() if bias else 0
        a.bias_1 = bias[1].data_ptr() if len(bias) > 1 else 0
        a.out_weights = 0 if out_weights is None else out_weights.data_ptr()
        machine.announce()
        machine.launch(self._stage, timeout_s, stream)


def launch_combine(
    shape: Shape,
    y: torch.Tensor,
    handle: ThroughputHandle,
    topk_weights: torch.Tensor | None,
    bias: Sequence[torch.Tensor],
    out: torch.Tensor,
    options: CombineOptions,
    stream: int,
    memo: dict[Any, CombinePlan] | None = None,
) -> torch.Tensor | None:
    """Launch a combine into `out`; returns the weights that come back, if any go out. `memo` as in `plan_of`."""
    machine = shape.machine
    writer = None if topk_weights is None else shape
    place = _place_expert_rows(shape, y, handle) if handle.is_expert else place_rows(machine, y, writer)
    out_weights = _send_weights(shape, place, handle, topk_weights)
    short = place.is_copied, place.number, options.num_sms, machine.max_sms
    plan = None if memo is None else memo.get(short)
    if plan is None:
        is_bias_f32 = bool(bias) and bias[0].dtype == torch.float32
        facts = CombineFacts(
            handle.layout,
            handle.expert_alignment,
            handle.num_tokens,
            y.dtype,
            topk_weights is not None,
            is_bias_f32,
            options.order is not None,
            place.is_copied,
            place.number,
            options.num_sms,
            handle.capacity,
        )
        plan = _plan_of(shape, facts, place)
        if memo is not None:
            memo[short] = plan
    plan.start(machine, y, handle, place.slot, bias, out, out_weights, options.timeout_s, stream)
    return out_weights


def _plan_of(shape: Shape, facts: CombineFacts, place: CombineSource) -> CombinePlan:
    """Return how such combines are launched on as many multiprocessors as the call in progress may take."""
    key = facts, shape.machine.max_sms
    plan: CombinePlan | None = shape.plans.get(key)
    if plan is None:
        plan = CombinePlan(shape, facts, place)
        shape.keep_plan(key, plan)
    return plan


def launch_refusal(shape: Shape, timeout_s: float, stream: int) -> None:
    """Launch a combine that only tells the peers that this rank's call, which it has announced, was refused."""
    machine = shape.machine
    launch = combine_shape(BULK_BYTES, machine.config.num_ranks, 1, machine.platform.limits, False)
    stage = shape.stage("combine_throughput_rank_bf16", launch, "early", grid=1)
    a = stage.args
    a.refused, a.num_tokens, a.num_pull_blocks, a.num_copy_blocks = 1, 0, 1, 0
    a.row_bytes, a.chunk_bytes, a.num_stages = BULK_BYTES, launch.chunk_bytes, launch.num_stages
    machine.launch(stage, timeout_s, stream)


def _send_weights(
    shape: Shape, place: CombineSource, handle: ThroughputHandle, topk_weights: torch.Tensor | None
) -> torch.Tensor | None:
    """Put the weights beside the rows; return where those of this rank's tokens will go."""
    if topk_weights is None:
        return None
    config = shape.config
    layout = _layout_of(shape, handle.is_expert, handle.expert_alignment)
    if topk_weights.numel():
        at = place.slot * place.slot_bytes + layout.offset("combine_weights")
        lent = place.regions[config.rank].lease(at, 4 * topk_weights.numel(), None)
        lent.view(torch.float32).view(topk_weights.shape).copy_(topk_weights)
    return torch.empty(handle.num_tokens, config.num_topk, dtype=torch.float32, device=topk_weights.device)


def _layout_of(shape: Shape, is_expert: bool, expert_alignment: int) -> Layout:
    """Return the fields of the slots that a combine pulls from."""
    return shape.expert_layout(expert_alignment) if is_expert else shape.config.slot_layout


def _set_place(shape: Shape, args: Any, place: CombineSource, facts: CombineFacts) -> None:
    config = shape.config
    for rank, region in enumerate(place.regions):
        args.slots[rank] = region.address
    args.slot_bytes, args.refused = place.slot_bytes, 0
    args.num_slots = ExpertPlace.num_slots if facts.is_expert else config.num_slots + 1
    is_expert, alignment = facts.is_expert, facts.expert_alignment
    args.max_rows = config.expanded_rows(alignment) if is_expert else config.recv_rows(facts.capacity)
    args.weights_offset = _layout_of(shape, is_expert, alignment).offset("combine_weights")
