"""The launch that sums a combine's rows in an order that the caller asks for (`csrc/kernels/throughput/order.cuh`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...gpu.stage import HandlePlace, Stage
from ..order import ORDERS, CombineOrder
from ..shapes import PAYLOADS, LaunchShape
from .place import ExpertPlace
from .shape import Shape
from .types import ThroughputHandle

_THREADS = 256
_KEY = ("order",)


def launch_order(
    shape: Shape,
    y: torch.Tensor,
    handle: ThroughputHandle,
    bias: Sequence[torch.Tensor],
    out: torch.Tensor,
    order: CombineOrder,
    stream: int,
    timeout_s: float,
) -> None:
    """Launch the sum behind a combine of `y`; arguments as in `launch_combine`."""
    machine, config = shape.machine, shape.config
    stage, end = _stages(shape)
    stage.grid = min(handle.num_tokens, 8 * machine.max_sms)
    a = stage.args
    HandlePlace(a).write(handle.addresses)
    if handle.is_expert:
        place = shape.expert_place(handle.expert_alignment)
        regions, a.slot_bytes, a.num_slots = place.regions, place.slot_bytes, ExpertPlace.num_slots
        a.max_rows = config.expanded_rows(handle.expert_alignment)
    else:
        regions, a.slot_bytes, a.num_slots = machine.slots, config.slot_bytes, config.num_slots + 1
        a.max_rows = config.recv_rows(handle.capacity)
    for rank, region in enumerate(regions):
        a.slots[rank] = region.address
    a.y, a.out = y.data_ptr(), out.data_ptr()
    a.bias_0 = bias[0].data_ptr() if bias else 0
    a.bias_1 = bias[1].data_ptr() if len(bias) > 1 else 0
    a.is_bias_f32 = int(bool(bias) and bias[0].dtype == torch.float32)
    a.num_tokens, a.row_bytes = handle.num_tokens, config.hidden * y.element_size()
    a.payload, a.by = list(PAYLOADS).index(y.dtype), ORDERS.index(order.by)
    a.bias_first, a.round_partials = int(order.bias_first), int(order.round_partials)
    a.is_expert = int(handle.is_expert)
    if handle.num_tokens:
        machine.launch(stage, timeout_s, stream)
    machine.launch(end, timeout_s, stream)


def _stages(shape: Shape) -> tuple[Stage, Stage]:
    """Return the kernel that sums, and the one that ends the call."""
    stages: tuple[Stage, Stage] | None = shape.plans.get(_KEY)
    if stages is None:
        first = shape.stage("combine_throughput_order", LaunchShape(1, _THREADS, 0, 0, 0))
        stages = first, shape.stage("combine_throughput_order_end", LaunchShape(1, 32, 0, 0, 0))
        shape.keep_plan(_KEY, stages)
    return stages
