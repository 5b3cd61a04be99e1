"""Combines that add up in an order given by the caller (`csrc/kernels/throughput/order.cuh`).

Three kernels: a combine without tokens, in which the ranks meet and exchange the addresses of all rows; the sum; the
end of the call. An `OrderPlan` is to such combines what a `CombinePlan` is to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ....gpu.shapes import PAYLOADS, LaunchShape
from ....gpu.stage import call_words
from ....memory.fresh import allocator
from ..order import ORDERS, CombineOrder
from .place import ExpertPlace
from .shape import Shape
from .types import ThroughputHandle

_THREADS = 256


class OrderFacts(NamedTuple):
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
    """The launches of sums with equal facts, after the combine in which the ranks meet.

    Args:
        shape: of the calls.
        facts: of the calls.
    """

    def __init__(self, shape: Shape, facts: OrderFacts) -> None:
        machine, config = shape.machine, shape.config
        self._machine, self._has_tokens = machine, facts.num_tokens > 0
        grid = min(facts.num_tokens, 8 * machine.max_sms)
        self._stage = shape.stage("combine_throughput_order", LaunchShape(1, _THREADS, 0, 0, 0), grid=grid)
        self._end = shape.stage("combine_throughput_order_end", LaunchShape(1, 32, 0, 0, 0))
        self.new_out = allocator((facts.num_tokens, config.hidden), facts.dtype, machine.platform.device)
        a = self._stage.args
        if facts.is_expert:
            place = shape.expert_place(facts.expert_alignment)
            regions, a.slot_bytes, a.num_slots = place.regions, place.slot_bytes, ExpertPlace.num_slots
            a.max_rows = config.expanded_rows(facts.expert_alignment)
        else:
            regions, a.slot_bytes, a.num_slots = machine.slots, config.slot_bytes, config.num_slots + 1
            a.max_rows = config.recv_rows(facts.capacity)
        for rank, region in enumerate(regions):
            a.slots[rank] = region.address
        a.is_bias_f32, a.is_expert = int(facts.is_bias_f32), int(facts.is_expert)
        a.num_tokens, a.row_bytes = facts.num_tokens, config.hidden * facts.dtype.itemsize
        a.payload, a.by = list(PAYLOADS).index(facts.dtype), ORDERS.index(facts.by)
        a.bias_first, a.round_partials = int(facts.bias_first), int(facts.round_partials)
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
    """Return how such sums are launched; `place` as in `OrderFacts`, other arguments as of `combine.combine`."""
    is_bias_f32 = bool(bias) and bias[0].dtype == torch.float32
    looks = handle.is_expert, handle.expert_alignment, handle.num_tokens, handle.capacity
    facts = OrderFacts(*looks, dtype, is_bias_f32, order.by, order.bias_first, order.round_partials, place)
    key = facts, shape.machine.max_sms
    plan: OrderPlan | None = shape.plans.get(key)
    if plan is None:
        plan = OrderPlan(shape, facts)
        shape.keep_plan(key, plan)
    return plan
