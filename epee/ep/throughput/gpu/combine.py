"""The launch of a combine: the memory of this rank's rows, and the arguments of the kernel.

Combines of a shape with equal `CheckedCombine` share a `CombinePlan`: the kernels to be launched, with all arguments
except addresses and the numbers of the call, which `start` writes.

A combine that adds up in an order given by the caller (`csrc/kernels/throughput/order.cuh`) has three kernels: a
combine without tokens, in which the ranks meet and exchange the addresses of all rows; the sum; the end of the call. An
`OrderPlan` is to such combines what a `CombinePlan` is to others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ....gpu.shapes import BULK_BYTES, FEW_TOKENS, PAYLOADS, LaunchShape, combine_shape
from ....gpu.signature import combine_signature
from ....gpu.stage import call_words
from ....memory.fresh import Allocate, allocator
from ....memory.layout import Layout
from ..order import ORDERS, CombineOrder
from .dispatch import plan_of
from .machine import DEFAULT_SMS, Machine
from .place import ExpertPlace
from .shape import Shape
from .types import CombineOptions, DispatchOptions, ThroughputHandle

_THREADS = 256


class CheckedOrder(NamedTuple):
    """The properties that decide how the sum is launched, except addresses.

    Attributes:
        is_expert, expert_alignment, num_tokens, capacity: of the handle.
        dtype: of the rows.
        is_bias_f32: there is a bias, and it is float32.
        by, bias_first, round_partials: of the order.
        place: number of the `ExpertPlace`, if the rows are in one.
    """

    is_expert: bool
    expert_alignment: int
    num_tokens: int
    capacity: int | None
    dtype: torch.dtype
    is_bias_f32: bool
    by: str
    bias_first: bool
    round_partials: bool
    place: int


class OrderPlan:
    """The launches of sums with equal checked, after the combine in which the ranks meet.

    Args:
        shape: of the calls.
        checked: of the calls.
    """

    def __init__(self, shape: Shape, checked: CheckedOrder) -> None:
        machine, config = shape.machine, shape.config
        self._machine, self._has_tokens = machine, checked.num_tokens > 0
        grid = min(checked.num_tokens, 8 * machine.max_sms)
        self._stage = shape.stage("combine_throughput_order", LaunchShape(1, _THREADS, 0, 0, 0), grid=grid)
        self._end = shape.stage("combine_throughput_order_end", LaunchShape(1, 32, 0, 0, 0))
        self.new_out = allocator((checked.num_tokens, config.hidden), checked.dtype, machine.platform.device)
        a = self._stage.args
        if checked.is_expert:
            place = shape.expert_place(checked.expert_alignment)
            regions, a.slot_bytes, a.num_slots = place.regions, place.slot_bytes, ExpertPlace.num_slots
            a.max_rows = config.expanded_rows(checked.expert_alignment)
        else:
            regions, a.slot_bytes, a.num_slots = machine.slots, config.slot_bytes, config.num_slots + 1
            a.max_rows = config.recv_rows(checked.capacity)
        for rank, region in enumerate(regions):
            a.slots[rank] = region.address
        a.is_bias_f32, a.is_expert = int(checked.is_bias_f32), int(checked.is_expert)
        a.num_tokens, a.row_bytes = checked.num_tokens, config.hidden * checked.dtype.itemsize
        a.payload, a.by = list(PAYLOADS).index(checked.dtype), ORDERS.index(checked.by)
        a.bias_first, a.round_partials = int(checked.bias_first), int(checked.round_partials)
        self._write = call_words(a, "handle y bias_0 bias_1 out")

    def start(
        self,
        y: torch.Tensor,
        handle: ThroughputHandle,
        bias: Sequence[torch.Tensor],
        out: torch.Tensor,
        timeout_s: float,
        stream: int,
    ) -> None:
        """Launch the sum, in the call of the combine that was launched last, and the end of that call."""
        machine = self._machine
        if self._has_tokens:
            bias_0 = bias[0].data_ptr() if bias else 0
            bias_1 = bias[1].data_ptr() if len(bias) > 1 else 0
            number, timeout_ns = machine.number, int(timeout_s * 1e9)
            self._write(number, timeout_ns, handle.addresses, y.data_ptr(), bias_0, bias_1, out.data_ptr())
            machine.launch_written(self._stage, stream)
        machine.launch(self._end, timeout_s, stream)


def order_plan_of(
    shape: Shape,
    handle: ThroughputHandle,
    dtype: torch.dtype,
    bias: Sequence[torch.Tensor],
    order: CombineOrder,
    place: int,
) -> OrderPlan:
    """Return how such sums are launched; `place` as in `CheckedOrder`, other arguments as of `combine.combine`."""
    is_bias_f32 = bool(bias) and bias[0].dtype == torch.float32
    looks = handle.is_expert, handle.expert_alignment, handle.num_tokens, handle.capacity
    checked = CheckedOrder(*looks, dtype, is_bias_f32, order.by, order.bias_first, order.round_partials, place)
    key = checked, shape.machine.max_sms
    plan: OrderPlan | None = shape.plans.get(key)
    if plan is None:
        plan = OrderPlan(shape, checked)
        shape.keep_plan(key, plan)
    return plan


FEW_SMS = 16  # for few tokens by default: more ask for everything at once and are served later
MAX_COPY_WARPS = 8  # they share the 16 barriers of a combining block


_COPIED_SLOT = 1  # of an `ExpertPlace`: for rows that a combine copies; users write in place into the first one
# This rank's slot; whether the kernel must copy the rows there while the peers are pulling; the number of the
# `ExpertPlace`, 0 in the rank layout.
CombineSource: TypeAlias = "tuple[int, bool, int]"


def find_source(shape: Shape, handle: ThroughputHandle, address: int, has_weights: bool) -> CombineSource | None:
    """Return the memory from which the peers pull; None if the ranks have to meet first (`Shape.expert_place`).

    Args:
        shape, handle: of the call.
        address: of the rows; 0 if there are none.
        has_weights: weights go back.
    """
    if not handle.is_expert:
        return *find_rows(shape.machine, address, shape if has_weights else None), 0
    place = shape.ready_place(handle.expert_alignment)
    if place is None:
        return None
    is_there = address != 0 and address == place.regions[shape.config.rank].address
    return 0 if is_there else _COPIED_SLOT, False, place.number


def find_rows(machine: Machine, address: int, writer: Shape | None = None) -> tuple[int, bool]:
    """Return the slot from which the peers pull rows of the rank layout, and whether they are copied there.

    Args:
        machine: the owner of the memory.
        address: of the rows; 0 if there are none.
        writer: the shape in which weights will be written beside them: not into a slot that another shape has filled,
            where they could overwrite parts of a live result.
    """
    if address:
        slot = machine.slot_at(address)
        if slot is not None and slot not in machine.pool.haunters and writer in (None, machine.filled_by[slot]):
            return slot, False
    return machine.landing, address != 0


class CheckedCombine(NamedTuple):
    """The properties that decide how a combine is launched, except addresses.

    Attributes:
        layout, expert_alignment, num_tokens, capacity: of the handle; no tokens if the ranks only meet.
        dtype: of the rows.
        has_weights: weights go back.
        is_bias_f32: there is a bias, and it is float32.
        is_ordered: in another library's order.
        is_copied, place: of the `CombineSource`; the latter is its number.
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


# What a combine brings back: the rows, contiguous; weights of the rows, contiguous, or None; biases.
Brought: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None, Sequence[torch.Tensor]]"


class CombinePlan:
    """The launches of combines with equal checked.

    Args:
        shape: of the calls.
        checked: of the calls.

    Attributes:
        max_sms: multiprocessors that the calls may take.
        new_out: allocates the sums, uninitialised.
        new_weights: allocates the weights that come back; None without.
    """

    def __init__(self, shape: Shape, checked: CheckedCombine) -> None:
        machine, config = shape.machine, shape.config
        limits = machine.platform.limits
        self._machine, self.max_sms = machine, machine.max_sms
        device = machine.platform.device
        self.new_out = allocator((checked.num_tokens, config.hidden), checked.dtype, device)
        self.new_weights: Allocate | None = None
        if checked.has_weights:
            self.new_weights = allocator((checked.num_tokens, config.num_topk), torch.float32, device)
        row_bytes = config.hidden * checked.dtype.itemsize
        num_entries = config.num_topk if checked.is_expert else config.num_ranks
        is_few = checked.num_tokens <= FEW_TOKENS
        num_sms = machine.num_sms(checked.num_sms, FEW_SMS if is_few and not checked.is_copied else DEFAULT_SMS)
        launch = combine_shape(row_bytes, num_entries, num_sms, limits, checked.has_weights)
        num_copy_blocks = machine.max_sms - num_sms if checked.is_copied else 0
        if checked.is_copied and num_copy_blocks == 0:
            num_sms, num_copy_blocks = num_sms - 1, 1
        name = f"combine_throughput_{checked.layout}_{PAYLOADS[checked.dtype]}"
        self._stage = shape.stage(name, launch, "early", grid=num_sms + num_copy_blocks)
        a = self._stage.args
        self._write = call_words(a, "handle y bias_0 bias_1 out out_weights slot refused")
        _set_place(shape, a, checked)
        self._lent, self._slot_bytes, self._weights_offset = a.slots[config.rank], a.slot_bytes, a.weights_offset
        self._is_expert = checked.is_expert
        a.is_bias_f32 = int(checked.is_bias_f32)
        a.signature = combine_signature(
            checked.layout, checked.dtype, checked.has_weights, checked.is_ordered, checked.place
        )
        a.num_tokens, a.row_bytes, a.chunk_bytes = checked.num_tokens, row_bytes, launch.chunk_bytes
        a.num_stages, a.max_entries = launch.num_stages, num_entries
        a.num_pull_blocks, a.num_copy_blocks = num_sms, num_copy_blocks
        a.num_copy_warps = min(MAX_COPY_WARPS, launch.block // 32, launch.shared_bytes // (2 * launch.chunk_bytes))

    def start(
        self,
        brought: Brought,
        handle: ThroughputHandle,
        slot: int,
        out: torch.Tensor,
        out_weights: torch.Tensor | None,
        timeout_s: float,
        stream: int,
    ) -> None:
        """Launch a combine of rows that lie in `slot` or are copied there, into `out`."""
        machine, (y, topk_weights, bias) = self._machine, brought
        rows = y.data_ptr()
        if topk_weights is not None or self._is_expert:
            self._copy(rows, y, topk_weights, slot, stream)
        bias_0 = bias[0].data_ptr() if bias else 0
        bias_1 = bias[1].data_ptr() if len(bias) > 1 else 0
        weights = 0 if out_weights is None else out_weights.data_ptr()
        number, timeout_ns = 0 if machine.is_capturing else machine.num_calls + 1, int(timeout_s * 1e9)
        self._write(number, timeout_ns, handle.addresses, rows, bias_0, bias_1, out.data_ptr(), weights, slot, 0)
        machine.launch_written(self._stage, stream, is_first=True)

    def _copy(self, rows: int, y: torch.Tensor, topk_weights: torch.Tensor | None, slot: int, stream: int) -> None:
        """Copy what the kernel does not into the slot: rows of the expert layout, and weights. The call before has
        ended on the stream then, and with it the peers' reads of the slot."""
        copy, at = self._machine.platform.copy, self._lent + slot * self._slot_bytes
        if self._is_expert and rows and slot == _COPIED_SLOT:
            copy(at, rows, y.nbytes, stream)
        if topk_weights is not None and (weights := topk_weights.data_ptr()):
            copy(at + self._weights_offset, weights, topk_weights.nbytes, stream)


class OrderedPlan:
    """A combine in another order; as a `CombinePlan`.

    Args:
        meet: in which the ranks meet, and weights travel.
        sums: adds up.
    """

    def __init__(self, meet: CombinePlan, sums: OrderPlan) -> None:
        self._meet, self._sums = meet, sums
        self.max_sms, self.new_out, self.new_weights = meet.max_sms, sums.new_out, meet.new_weights

    def start(
        self,
        brought: Brought,
        handle: ThroughputHandle,
        slot: int,
        out: torch.Tensor,
        out_weights: torch.Tensor | None,
        timeout_s: float,
        stream: int,
    ) -> None:
        """Launch a combine, as `CombinePlan.start`."""
        y, topk_weights, bias = brought
        self._meet.start((y, topk_weights, ()), handle, slot, out, out_weights, timeout_s, stream)
        self._sums.start(y, handle, bias, out, timeout_s, stream)


AnyCombinePlan: TypeAlias = CombinePlan | OrderedPlan


def combine(
    shape: Shape,
    y: torch.Tensor,
    handle: ThroughputHandle,
    topk_weights: torch.Tensor | None,
    bias: Sequence[torch.Tensor],
    out: torch.Tensor | None,
    options: CombineOptions,
    memo: dict[Any, AnyCombinePlan] | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Bring rows back and sum them, in a call that has begun; the caller has checked the arguments.

    Args:
        shape: of the call.
        y: `[num_recv, hidden]` contiguous, anywhere; from `combine_input` or a dispatch it is not copied.
        handle: of the dispatch.
        topk_weights: `[num_recv, num_topk]` or, expert layout, `[num_recv]`; float32 contiguous, or None.
        bias: up to two contiguous `[num_tokens, hidden]`, both of y's dtype or both float32.
        out: where to write, contiguous, or None.
        options: how.
        memo: as in `dispatch.plan_of`, for calls without bias; their handles' alignments are alike.
    Returns:
        `[num_tokens, hidden]`, and the weights `[num_tokens, num_topk]` or None.
    """
    machine, has_weights = shape.machine, topk_weights is not None
    source = find_source(shape, handle, y.data_ptr(), has_weights)
    if source is None:
        shape.expert_place(handle.expert_alignment)
        source = find_source(shape, handle, y.data_ptr(), has_weights)
        assert source is not None
    slot, is_copied, number = source
    short = is_copied, number, options.num_sms, machine.max_sms
    plan = None if memo is None else memo.get(short)
    if plan is None:
        plan = _plan_of(shape, y.dtype, handle, has_weights, bias, options, source)
        if memo is not None:
            memo[short] = plan
    out = plan.new_out() if out is None else out
    out_weights = None if plan.new_weights is None else plan.new_weights()
    plan.start((y, topk_weights, bias), handle, slot, out, out_weights, options.timeout_s, machine.stream)
    return out, out_weights


def _plan_of(
    shape: Shape,
    dtype: torch.dtype,
    handle: ThroughputHandle,
    has_weights: bool,
    bias: Sequence[torch.Tensor],
    options: CombineOptions,
    source: CombineSource,
) -> AnyCombinePlan:
    """Return the plan of such combines on as many multiprocessors as the call in progress may take."""
    order, (_, is_copied, number) = options.order, source
    # in another order without tokens, unless weights are to come back: the ranks meet and exchange the addresses of all
    # rows
    num_tokens = handle.num_tokens if order is None or has_weights else 0
    checked = CheckedCombine(
        handle.layout,
        handle.expert_alignment,
        num_tokens,
        dtype,
        has_weights,
        order is None and bool(bias) and bias[0].dtype == torch.float32,
        order is not None,
        is_copied,
        number,
        options.num_sms,
        handle.capacity,
    )
    key = checked, shape.machine.max_sms
    plan: AnyCombinePlan | None = shape.plans.get(key)
    if plan is None:
        kind = CombinePlan if shape.plan_kinds is None else shape.plan_kinds[1]
        plan = kind(shape, checked)
        shape.keep_plan(key, plan)
    if not isinstance(plan, CombinePlan) or order is None:
        return plan
    return OrderedPlan(plan, order_plan_of(shape, handle, dtype, bias, order, number))


def refuse(shape: Shape, code: int, timeout_s: float, tell: Callable[[int], None] | None = None) -> None:
    """Take part in the peers' next call, whatever it is, only to report to them that this rank has none.

    Args:
        shape: any of the machine.
        code: why, as `gpu/report.py` encodes it.
        timeout_s: of the refusal's kernels, which wait for no rank.
        tell: gets the call's number before the peers can see that it is refused; the CPU waits for the GPU then.
    """
    machine, config = shape.machine, shape.config
    stream = machine.begin(do_check=False)
    if tell is not None:
        tell(machine.num_finished() + 1)
    nothing = torch.empty(0, config.hidden, dtype=config.dtype, device=machine.platform.device), None, None
    plan_of(shape, None, nothing, None, DispatchOptions(sync=False), None).refuse(nothing, code, timeout_s, stream)
    _launch_refusal(shape, timeout_s, stream)  # ends the call, for peers that combine as for those that dispatch


def _launch_refusal(shape: Shape, timeout_s: float, stream: int) -> None:
    """Launch a combine that only reports to the peers that this rank's call, which it has announced, was refused."""
    machine = shape.machine
    launch = combine_shape(BULK_BYTES, machine.config.num_ranks, 1, machine.platform.limits, False)
    stage = shape.stage("combine_throughput_rank_bf16", launch, "early", grid=1)
    a = stage.args
    a.refused, a.num_tokens, a.num_pull_blocks, a.num_copy_blocks = 1, 0, 1, 0
    a.row_bytes, a.chunk_bytes, a.num_stages = BULK_BYTES, launch.chunk_bytes, launch.num_stages
    machine.launch(stage, timeout_s, stream)


def combine_input(shape: Shape, handle: ThroughputHandle, dtype: torch.dtype) -> torch.Tensor | None:
    """Return `[num_recv, hidden]` memory from which a combine needs no copy, or None when no slot is free."""
    machine, config = shape.machine, shape.config
    stream = machine.begin()
    if handle.num_recv == 0:
        return torch.empty(0, config.hidden, dtype=dtype, device=machine.platform.device)
    if handle.is_expert:
        return _expert_input(shape, handle, dtype)
    rows = config.recv_rows(handle.capacity) if handle.num_recv is None else handle.num_recv
    taken = machine.take(stream, is_granted=False)
    if taken is None:
        return None
    machine.filled_by[taken.slot] = shape
    machine.poison_slot(taken.slot)
    return machine.lease(taken)[: rows * config.hidden * dtype.itemsize].view(dtype).view(rows, config.hidden)


def _expert_input(shape: Shape, handle: ThroughputHandle, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the same for rows of the expert layout."""
    machine, config = shape.machine, shape.config
    place = shape.expert_place(handle.expert_alignment)
    rows = config.expanded_rows(handle.expert_alignment) if handle.num_recv is None else handle.num_recv
    if place.is_leased:
        return None
    region, nbytes = place.regions[config.rank], rows * config.hidden * dtype.itemsize
    machine.poison(region, 0, nbytes)
    place.is_leased = True
    released = None if machine.platform.is_capturing() else place.free
    return region.lease(0, nbytes, released).view(dtype).view(rows, config.hidden)


def _layout_of(shape: Shape, is_expert: bool, expert_alignment: int) -> Layout:
    """Return the fields of the slots that a combine pulls from."""
    return shape.expert_layout(expert_alignment) if is_expert else shape.config.slot_layout


def _set_place(shape: Shape, args: Any, checked: CheckedCombine) -> None:
    config = shape.config
    is_expert, alignment = checked.is_expert, checked.expert_alignment
    regions, args.slot_bytes, args.num_slots = shape.machine.slots, config.slot_bytes, config.num_slots + 1
    if is_expert:
        place = shape.expert_place(alignment)
        regions, args.slot_bytes, args.num_slots = place.regions, place.slot_bytes, ExpertPlace.num_slots
    for rank, region in enumerate(regions):
        args.slots[rank] = region.address
    args.max_rows = config.expanded_rows(alignment) if is_expert else config.recv_rows(checked.capacity)
    args.weights_offset = _layout_of(shape, is_expert, alignment).offset("combine_weights")
