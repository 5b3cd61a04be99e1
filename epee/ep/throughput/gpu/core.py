"""`Buffer` on the GPUs of one host: the host side of dispatch and combine.

A `Throughput` is a rank's end of a GPU buffer. A dispatch is two kernels (`dispatch.py`): one counts,
exchanges counts and grants, and finds all places; the other moves the rows to where they stay. Few tokens need one
kernel only. A combine is one kernel
(`combine.py`) that pulls the rows back and sums them. The host waits for nothing but the counts, and only
when it is asked to. Memory, kernels and the order of calls are in `machine.py`. Several `Throughput`s with calls of
different sizes may be over one memory: `shape.py` says how.

Failures are numbers in pinned host memory: `check` raises them, as does every call before it starts. After a failure
the buffer works on; the ranks stay in step because failed calls count as well. A late peer may still write into a slot
that was granted in a failed call: see `slots.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from ....errors import ResourceError
from ...gpu.lent import AllGather
from ...gpu.params import RECV_INFO_COUNTS, RECV_INFO_EXPANDED, RECV_INFO_ROWS
from ...gpu.platform import Platform
from ...gpu.report import REFUSED_INVALID_ARGUMENT, ReasonOf
from ..shapes import HandleSpace, LaunchShape, ThroughputConfig, handle_space
from .combine import CombinePlan, launch_combine, launch_refusal, place_rows
from .dispatch import (
    Announcement,
    DispatchPlan,
    Payload,
    allocate_expanded,
    cut_expanded,
    plan_of,
    short_key,
    view_slot,
)
from .machine import Machine
from .order import launch_order
from .shape import Shape
from .types import CombineOptions, DispatchFacts, DispatchOptions, DispatchResult, ThroughputHandle

_ONE_WARP = LaunchShape(1, 32, 0, 0, 0)


class Throughput:
    """A rank's end of a GPU buffer. One call at a time; calls of all ranks in the same order.

    Args:
        platform: the GPU.
        config: sizes, equal on all ranks.
        all_gather: gives everybody's bytes in rank order; called at construction and at the first expert-layout combine
            of a view (never while a graph is recorded). A replacement gives its own for everybody at construction, and
            maps the others' memory later (`replace_peer`).
    """

    def __init__(self, platform: Platform, config: ThroughputConfig, all_gather: AllGather) -> None:
        self._machine = Machine(platform, config, all_gather)
        self._set_shape(config)
        self._no_words = torch.empty(0, dtype=torch.int32, device=platform.device)  # to make others from is quicker
        self._barrier = self._machine.stage("barrier", _ONE_WARP)

    def _set_shape(self, config: ThroughputConfig) -> None:
        self.config = config
        self._shape = Shape(self._machine, config)
        self._spaces: dict[int, HandleSpace] = {}

    def of_sizes(self, config: ThroughputConfig) -> Throughput:
        """Return an end for calls of other sizes over the same memory, with which it has all else in common. Local.

        Args:
            config: the sizes. Rank, ranks and slots are this one's; all ranks make each call with equal sizes.

        Raises:
            InvalidArgument: the kernels cannot do it, or a slot has no room for it.
        """
        mine = self._machine.config
        config = replace(
            config,
            rank=mine.rank,
            num_ranks=mine.num_ranks,
            num_slots=mine.num_slots,
            room_slot_bytes=mine.slot_bytes,
            room_expert_slot_bytes=mine.room_expert_slot_bytes,
        )
        config.check()
        other = copy.copy(self)
        other._set_shape(config)
        return other

    @property
    def is_recorded(self) -> bool:
        """Whether a CUDA graph has recorded calls."""
        return self._machine.is_recorded

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that this rank lends."""
        return self._machine.nbytes

    @property
    def stream(self) -> int:
        """The raw stream of the last call."""
        return self._machine.stream

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
        memo: dict[Any, DispatchPlan] | None = None,
    ) -> DispatchResult:
        """Send rows; the caller has checked the arguments, see `Buffer.dispatch` for their meaning.

        Args:
            x: `[num_tokens, hidden]`, unit stride in the last dimension, rows 16-byte aligned.
            scales: `[num_tokens, num_scales]` of 4-byte elements, any strides, or None.
            route: `[num_tokens, num_topk]` int64, or `[num_tokens, num_ranks]` bool, contiguous; None with a handle.
            topk_weights: `[num_tokens, num_topk]` float32 contiguous, or None.
            handle: of an earlier dispatch, to go the same way again; its layout and alignment count.
            options: how.
            memo: one and the same, at first empty, for all calls whose tensors and handles are alike but for addresses.
        Raises:
            what an earlier call left behind; with `options.sync` also what this one met.
        """
        machine = self._machine
        machine.begin()
        payload = Payload(x, scales, topk_weights)
        plan = plan_of(self._shape, handle, payload, route, options, memo)
        return self.start_dispatch(plan, payload, route, handle, options.timeout_s)

    def start_dispatch(
        self,
        plan: DispatchPlan,
        payload: Payload,
        route: torch.Tensor | None,
        handle: ThroughputHandle | None,
        timeout_s: float,
    ) -> DispatchResult:
        """Send rows as planned, in a call that has begun; arguments as of `dispatch`."""
        machine, facts = self._machine, plan.facts
        stream, is_expert = machine.stream, facts.is_expert
        is_fresh = handle is None
        if handle is None:
            handle = self._new_handle(facts)
        elif payload.topk_weights is not None and (is_expert or handle.capacity is not None):  # for `lost_weight`
            handle = handle.with_weights(payload.topk_weights)
        # all memory before the first kernel: behind it there is no way back without the peers
        expanded = allocate_expanded(machine, plan, payload, handle, stream) if is_expert else None
        taken = None if is_expert else machine.take(stream, is_granted=True)
        try:
            slot = machine.grant_landing() if taken is None else taken.slot
            machine.filled_by[slot] = self._shape
            if machine.is_poisoned:
                machine.poison_slot(slot)
            mailbox = machine.open_mailbox() if facts.is_exact and is_fresh else None
            plan.start(machine, payload, handle, route, Announcement(slot, mailbox), expanded, timeout_s, stream)
            if mailbox is not None:
                self._wait_counts(handle, mailbox, timeout_s)
        except BaseException:
            if taken is not None:
                taken()
            raise
        if expanded is not None:
            return cut_expanded(expanded, handle)
        return view_slot(machine, plan, handle, taken, stream)

    @property
    def quiet_test(self) -> Callable[[], bool]:
        """What tells whether a call need not begin: nothing is to be done or seen that the last one has not."""
        return self._machine.is_quiet

    def known_dispatch(self, memo: dict[Any, DispatchPlan] | None, is_exact: bool, num_sms: int | None) -> Any:
        """Return the plan of a call whose like has been made, or None; `memo` as in `dispatch`."""
        return None if memo is None else memo.get(short_key(self._machine, is_exact, num_sms))

    def known_combine(
        self, memo: dict[Any, CombinePlan] | None, y: torch.Tensor, handle: ThroughputHandle, num_sms: int | None
    ) -> tuple[CombinePlan, int] | None:
        """Return the plan of a combine without weights whose like has been made and the slot of `y`, or None."""
        if memo is None or handle.is_expert:
            return None
        place = place_rows(self._machine, y)
        plan = memo.get((place.is_copied, 0, num_sms, self._machine.max_sms))
        return None if plan is None else (plan, place.slot)

    def start_combine(
        self,
        planned: tuple[CombinePlan, int],
        y: torch.Tensor,
        handle: ThroughputHandle,
        out: torch.Tensor,
        timeout_s: float,
    ) -> None:
        """Bring rows back into `out` as `known_combine` says, in a call that has begun."""
        plan, slot = planned
        plan.start(self._machine, y, handle, slot, (), out, None, timeout_s, self._machine.stream)

    def combine_input(self, handle: ThroughputHandle, dtype: torch.dtype) -> torch.Tensor | None:
        """Return `[num_recv, hidden]` memory from which a combine needs no copy, or None when no slot is free."""
        machine, hidden = self._machine, self.config.hidden
        stream = machine.begin()
        if handle.num_recv == 0:
            return torch.empty(0, hidden, dtype=dtype, device=machine.platform.device)
        if handle.is_expert:
            place = self._shape.expert_place(handle.expert_alignment)
            rows = self.config.expanded_rows(handle.expert_alignment) if handle.num_recv is None else handle.num_recv
            if place.is_leased:
                return None
            region, nbytes = place.regions[self.config.rank], rows * hidden * dtype.itemsize
            machine.poison(region, 0, nbytes)
            place.is_leased = True
            released = None if machine.platform.is_capturing() else place.free
            return region.lease(0, nbytes, released).view(dtype).view(rows, hidden)
        rows = self.config.recv_rows(handle.capacity) if handle.num_recv is None else handle.num_recv
        taken = machine.take(stream, is_granted=False)
        if taken is None:
            return None
        machine.filled_by[taken.slot] = self._shape
        machine.poison_slot(taken.slot)
        return machine.lease(taken)[: rows * hidden * dtype.itemsize].view(dtype).view(rows, hidden)

    def combine(
        self,
        y: torch.Tensor,
        handle: ThroughputHandle,
        topk_weights: torch.Tensor | None,
        bias: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        options: CombineOptions,
        memo: dict[Any, CombinePlan] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring rows back and sum them; the caller has checked the arguments, see `Buffer.combine`.

        Args:
            y: `[num_recv, hidden]` contiguous, anywhere; from `combine_input` or a dispatch it is not copied.
            handle: of the dispatch.
            topk_weights: `[num_recv, num_topk]` or, expert layout, `[num_recv]`; float32 contiguous, or None.
            bias: up to two contiguous `[num_tokens, hidden]`, both of y's dtype or both float32.
            out: where to write, contiguous, or None.
            options: how.
            memo: as in `dispatch`, for calls without bias; their handles' alignments are alike.
        Returns:
            `[num_tokens, hidden]`, and the weights `[num_tokens, num_topk]` or None.
        """
        stream = self._machine.begin()
        if out is None:
            out = y.new_empty((handle.num_tokens, self.config.hidden))
        if options.order is None:
            return out, launch_combine(self._shape, y, handle, topk_weights, bias, out, options, stream, memo)
        # a combine without tokens, unless weights are to come back: the ranks meet and learn where all rows lie
        met = handle if topk_weights is not None else replace(handle, num_tokens=0)
        weights = launch_combine(self._shape, y, met, topk_weights, (), out, options, stream)
        launch_order(self._shape, y, handle, bias, out, options.order, stream, options.timeout_s)
        return out, weights

    def barrier(self, timeout_s: float) -> None:
        """All ranks meet on the device, on their current streams; the host waits for nobody."""
        self._machine.begin()
        self.start_barrier(timeout_s)

    def start_barrier(self, timeout_s: float) -> None:
        """Launch a barrier in a call that has begun."""
        machine = self._machine
        machine.announce()
        machine.launch(self._barrier, timeout_s, machine.stream)

    def refuse(
        self, timeout_s: float, tell: Callable[[int], None] | None = None, code: int = REFUSED_INVALID_ARGUMENT
    ) -> None:
        """Take part in the peers' next call, whatever it is, only to tell them that this rank's was invalid.

        Args:
            timeout_s: of the refusal's kernels, which wait for nobody.
            tell: gets the call's number before the peers can see that it is refused; the host waits for the GPU then.
            code: why, as `gpu/report.py` has it.
        """
        machine = self._machine
        stream = machine.begin(do_check=False)
        if tell is not None:
            tell(machine.num_finished() + 1)
        nothing = torch.empty(0, self.config.hidden, dtype=self.config.dtype, device=machine.platform.device)
        payload = Payload(nothing, None, None)
        # nobody stores into the slot of a refused call
        plan = plan_of(self._shape, None, payload, None, DispatchOptions(sync=False), None)
        handle = self._new_handle(plan.facts)
        announcement = Announcement(0, None, code)
        plan.start(machine, payload, handle, None, announcement, None, timeout_s, stream)
        launch_refusal(
            self._shape, timeout_s, stream
        )  # ends the call, for peers that combine as for those that dispatch

    def set_hooks(self, interrupt: Callable[[], None], reason_of: ReasonOf) -> None:
        """Set what is called while the host waits, and what knows why peers have refused calls."""
        self._machine.interrupt, self._machine.reason_of = interrupt, reason_of

    def set_poison(self, is_poisoned: bool) -> None:
        """Fill receive memory with 0xFF before each use, or not."""
        self._machine.is_poisoned = is_poisoned

    @property
    def num_calls(self) -> int:
        """Calls that the peers have heard of; those recorded in graphs do not count."""
        return self._machine.num_calls

    @property
    def members(self) -> frozenset[int]:
        """Ranks that take part in calls, as far as kernels know."""
        return self._machine.members

    def tags(self) -> int:
        """Return the highest call number that this rank has used; waits for the GPU."""
        return self._machine.tags()

    def set_view(
        self,
        active: Sequence[bool],
        tag: int,
        ghosts: Mapping[int, Collection[int]] = MappingProxyType({}),
        is_open: bool = True,
    ) -> None:
        """Go on in an agreed view: every member calls this with equal arguments, no call of any of them is in flight.

        Handles from before do not serve any more: kernels refuse them, also in graphs. Errors that nobody has heard of
        yet are dropped.

        Args:
            active: `num_ranks` flags: who takes part. Who does not is neither written to, awaited, nor counted.
            tag: above every member's `tags()`, so that nothing of earlier calls passes for new.
            ghosts: ranks that another process has now, with numbers of the processes that had them, from `FIRST_GHOST`
                on. What those have stored is forgotten, and what they might still write is not lent.
            is_open: False: the members' memory is not mapped yet, and no member stores here before this has returned;
                until `open_view` dispatches of graphs fail, and kernels reach no peer.
        """
        self._machine.set_view(active, tag, ghosts, is_open)

    def open_view(self) -> None:
        """Let kernels run in the view that was set last; no call of this rank is in flight."""
        self._machine.open_view()

    @property
    def blobs(self) -> tuple[bytes, bytes]:
        """By which another process maps what this rank has lent from the beginning."""
        return self._machine.blobs

    def replace_peer(self, rank: int, blobs: Sequence[bytes]) -> None:
        """Map what a process that has `rank` now lends; raises, and may be repeated, as `Machine.replace_peer`."""
        self._machine.replace_peer(rank, blobs)

    def mark_dead(self, ranks: Sequence[int]) -> None:
        """Say which ranks are dead: calls in flight that have them in their view end with an error. Any thread."""
        self._machine.mark_dead(ranks)

    def waiting(self) -> int:
        """Return a number that changes while a kernel that has waited for a millisecond goes on waiting. Any thread."""
        return self._machine.waiting()

    def bury(self, ranks: Sequence[int]) -> None:
        """Hear that processes of ranks, or ghosts, have ended, with their GPUs' work: what they might write is free."""
        self._machine.bury(ranks)

    def join(self) -> None:
        """Let the current stream go on behind everything that this buffer has put on any other."""
        self._machine.join()

    def drain(self, grace_s: float) -> None:
        """Wait for the kernels in flight; abort them when they take longer than `grace_s`."""
        self._machine.drain(grace_s)

    def abort(self) -> None:
        """End every wait of the kernels in flight, from any thread; close the buffer afterwards."""
        self._machine.abort()

    def check(self) -> None:
        """Raise what a kernel has reported since the last look; costs a few loads of host memory."""
        self._machine.check()

    def close(self) -> None:
        """Give up all memory; tensors over it keep what they use. Idempotent. No kernel may be in flight."""
        self._machine.close()

    def _new_handle(self, facts: DispatchFacts) -> ThroughputHandle:
        num_tokens = facts.num_tokens
        space = self._spaces.get(num_tokens)
        if space is None:
            space = self._spaces.setdefault(num_tokens, handle_space(self.config, num_tokens))
        return ThroughputHandle(
            self._machine.num_calls + 1,
            facts.layout,
            facts.expert_alignment,
            num_tokens,
            space,
            self._no_words.new_empty(space.total),
            facts.has_topk,
            facts.has_weights,
            capacity=facts.capacity,
        )

    def _wait_counts(self, handle: ThroughputHandle, mailbox: int, timeout_s: float) -> None:
        """Wait until the layout kernel has all counts; they become the handle's."""
        info = self._machine.wait_mailbox(mailbox, self.config.info_words // 2, timeout_s)
        if info is None:
            self._machine.check()
            raise ResourceError("dispatch failed and left no report")
        handle.num_recv = info[RECV_INFO_EXPANDED if handle.is_expert else RECV_INFO_ROWS]
        handle.num_tokens_per_expert = info[RECV_INFO_COUNTS : RECV_INFO_COUNTS + self.config.num_local_experts]
