"""A shape: how calls of certain sizes cut slots into fields, and the kernels with these sizes as constants.

Data path. A slot is `slot_bytes` of lent memory for the life of the buffer, and holds payload only: rows, ids, weights
and scales, which the senders of a call write, and which the receiver and, in a combine, the peers read. The offsets of
its fields follow from the shape. The words that peers wait for and compare are in the control block, whose layout no
shape changes; slots, grants, call numbers and reports do not depend on a shape. So calls of several shapes share one
memory, in any order, without a message to the peers. A result keeps its slot until it dies, whatever shapes later calls
have: the offsets of its tensors are fixed, and the slot is not cut anew before it is taken anew.

Protocol. A dispatch is of one shape on all ranks. Each sends its shape along, a hash of all sizes that decide the
offsets of fields and how many counts travel (`signature.shape_signature`), and a difference fails the call on all of
them before a row moves. Cached dispatches and combines go by a handle, whose dispatch was compared. Bounds are those of
the shape, which fits into the slot: no value from a peer makes a kernel write beyond one.

A crash leaves nothing here: a shape is arithmetic and arguments, none of it is shared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from ....gpu.params import BarrierParams, DispatchParams, LayoutParams
from ....gpu.shapes import PAYLOADS, LaunchShape, ThroughputConfig
from ....gpu.signature import shape_signature
from ....gpu.stage import Stage
from ....memory.layout import Layout
from .machine import Machine, parts_of
from .place import ExpertPlace

MOST_PLANS = 1024  # that are kept; each has some KiB
PlanKinds: TypeAlias = "tuple[type[Any], type[Any]]"
_FIELDS = ("x", "topk_idx", "src_token", "topk_weights", "scales")


class Shape:
    """The sizes of calls on a machine.

    Args:
        machine: whose memory and kernels they use.
        config: the sizes; slots are the machine's.
        plan_kinds: the classes of plans for dispatches and combines; None: those of one host.

    Attributes:
        offsets: of the fields of a slot.
        plans: how kernels are launched, by the checked that decide it.
    """

    def __init__(self, machine: Machine, config: ThroughputConfig, plan_kinds: PlanKinds | None = None) -> None:
        self.machine = machine
        self.config = config
        self.plan_kinds = plan_kinds
        self.offsets = {name: config.slot_layout.offset(name) for name in _FIELDS}
        self.plans: dict[tuple[object, ...], Any] = {}
        self._expert_layouts: dict[int, tuple[Layout, int]] = {}  # by alignment, with what they need

    def beside(self, config: ThroughputConfig) -> Shape:
        """Return the shape of calls of other sizes on the machine. Local.

        Args:
            config: the sizes. Rank, ranks and slots are the machine's; all ranks make each call with equal sizes.

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
        return Shape(self.machine, config)

    def signature(self, capacity: int | None) -> int:
        """Return what all ranks compare of a dispatch without a handle: the sizes, and the capacity of the call."""
        config = self.config
        return shape_signature(
            config.hidden,
            config.num_experts,
            config.num_topk,
            config.max_tokens,
            list(PAYLOADS).index(config.dtype),
            config.max_recv_rows,
            config.max_expanded_rows,
            capacity or 0,
        )

    def stage(self, name: str, launch: LaunchShape, mode: str = "plain", grid: int = 0) -> Stage:
        """Return a kernel to be launched again and again; arguments as of `Machine.stage`."""
        stage = self.machine.stage(name, launch, mode, grid)
        for part in parts_of(stage.args):
            if not isinstance(part, BarrierParams):
                self._set_constants(part)
        return stage

    def keep_plan(self, key: tuple[object, ...], plan: Any) -> None:
        """Cache the plan of calls with equal checked; not forever, as callers may bring new checked all the time."""
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
        self.plans[key] = plan

    def expert_layout(self, expert_alignment: int) -> Layout:
        """Return the fields of a slot for expert-layout rows."""
        return self._expert_layout(expert_alignment)[0]

    def expert_place(self, expert_alignment: int) -> ExpertPlace:
        """Return where expert-layout rows are pulled from; collective as `Machine.expert_place`."""
        return self.machine.expert_place(self._expert_layout(expert_alignment)[1])

    def ready_place(self, expert_alignment: int) -> ExpertPlace | None:
        """Return where expert-layout rows are pulled from, None if the ranks have to meet first."""
        return self.machine.ready_place(self._expert_layout(expert_alignment)[1])

    def _expert_layout(self, expert_alignment: int) -> tuple[Layout, int]:
        found = self._expert_layouts.get(expert_alignment)
        if found is None:
            config = self.config
            found = config.expert_layout(expert_alignment), config.expert_slot_bytes(expert_alignment)
            self._expert_layouts[expert_alignment] = found
        return found

    def _set_constants(self, args: Any) -> None:
        """Fill in what no call of this shape changes."""
        config = self.config
        args.num_topk, args.num_experts = config.num_topk, config.num_experts
        args.num_local_experts = config.num_local_experts  # no field of the kernels between hosts
        if isinstance(args, LayoutParams):
            args.max_tokens = config.max_tokens
            args.lanes_per_token, args.max_recv_rows = config.lanes_per_token, config.max_recv_rows
        if isinstance(args, DispatchParams):
            offsets = self.offsets
            args.max_recv_rows = config.max_recv_rows
            args.topk_idx_offset, args.weights_offset = offsets["topk_idx"], offsets["topk_weights"]
            args.scales_offset, args.src_token_offset = offsets["scales"], offsets["src_token"]
