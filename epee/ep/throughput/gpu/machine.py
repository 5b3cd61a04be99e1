"""The parts of a rank's GPU side of a buffer: kernels, lent memory, reports, and the order of calls.

Memory map of a rank: a control block (`gpu/params.control_layout`), a receive region of `num_slots + 1` slots (the last
is the landing slot for results that are copied out and for rows that combine copies in), and, once the expert layout
has been combined, a region for its rows (`place.py`). All of it is lent to all ranks (`gpu/lent.py`); the kernels
document who writes what. What depends on a call's sizes is in `shape.py`: a slot is a container of fixed size, and each
shape cuts it into fields in its own way.

Every call of a buffer carries the next tag, so calls run one after another. Calls from another stream than the last one
wait for the work queued there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ....errors import EpeeError, InvalidArgument, InvalidState, ResourceError, expected
from ....gpu.device import GpuDevice, Mailboxes, Share
from ....gpu.experts import expert_table
from ....gpu.lent import AllGather, Lending
from ....gpu.params import (
    KERNELS,
    MAX_EXPERTS,
    OP_BARRIER,
    OP_COMBINE,
    OP_DISPATCH,
    DispatchParams,
    FewParams,
    LayoutParams,
    control_layout,
    kernel_head,
)
from ....gpu.platform import LentRegion, Platform
from ....gpu.ranks import room_of
from ....gpu.report import Describe, ReasonOf, blame, is_echo, take_report
from ....gpu.shapes import LaunchShape, ThroughputConfig
from ....gpu.stage import Stage
from ....jit.params import sized_kernels
from .place import ExpertPlace, Places
from .slots import ReceiveSlotPool, Taken
from .view import ViewWords
from .views import SlotViews

DEFAULT_SMS = 24
NEWS_S = 0.1  # how long a rank whose peers have left a call waits for the report of a death
_log = logging.getLogger(__name__)


def _nothing() -> None:
    """Do nothing: the default `interrupt`."""


class Machine:
    """Kernels and memory of one rank. One call at a time; calls of all ranks in the same order.

    Args:
        platform: the GPU.
        config: the sizes that memory is made for, equal on all ranks.
        all_gather: returns the bytes of all ranks in rank order; called at construction and at the first expert-layout
            combine of a view (never while a graph is recorded). A replacement returns its own bytes for every rank at
            construction, and maps the others' memory later (`replace_peer`).

    Attributes:
        device: kernels, reports, the order of calls.
        codes: of its reports.
        mailboxes: where kernels answer.
        slots: the receive regions of all ranks.
        members: ranks that take part.
        experts: the table by which kernels map an expert to its rank.
        stream: raw, of the last call.
        num_calls: calls that this rank has announced to its peers; those recorded in graphs do not count.
        max_sms: multiprocessors that the call in progress may take.
        interrupt: called while the CPU waits for the GPU; may call `abort`.
        look: looks for deaths at once, and marks them; does nothing by default.
        reason_of: returns the peers' reasons for calls that they refused.
        is_poisoned: fill receive memory with 0xFF before each use.
        filled_by: the shape in which a slot was filled last, which determines the offsets of its fields.
        describe: returns the errors of reports that only these kernels make.
    """

    kernels = KERNELS
    describe: Describe | None = None

    def __init__(self, platform: Platform, config: ThroughputConfig, all_gather: AllGather) -> None:
        config.check()
        self.config = config
        self.platform = platform
        self.is_capturing = False
        self.stream = 0
        self.num_calls = 0
        self.look: Callable[[], None] = _nothing
        self.interrupt: Callable[[], None] = _nothing
        self.reason_of: ReasonOf | None = None
        self.is_poisoned = False
        self.filled_by: list[object] = [None] * (config.num_slots + 1)
        self._all_gather = all_gather
        num_local = len(config.island)
        self.device = GpuDevice(platform, self._head(), sized_kernels(self.kernels, room_of(num_local)))
        self._lending = Lending(platform, config.position)
        self._control = self._lending.meet(None, control_layout(num_local).nbytes, all_gather).regions
        self.slots = self._lending.meet(None, (config.num_slots + 1) * config.slot_bytes, all_gather).regions
        self._own_slots = self.slots[config.position]
        self._slots_address, self._slot_bytes = self._own_slots.address, config.slot_bytes
        self._places = Places(self._lending, platform.keeps_addresses)
        if config.room_expert_slot_bytes:
            self._places.meet(config.room_expert_slot_bytes, range(num_local), all_gather)
        self.mailboxes = Mailboxes(platform, config.most_info_words // 2)
        self._exchanged = platform.mapped_words(1)
        self.pool = ReceiveSlotPool(platform, config.num_slots, self._exchanged.words)
        self._share, self.codes = self.device.share, self.device.codes
        self.max_sms, self._is_alone = platform.limits.num_sms, True
        self.experts = expert_table(platform.device, MAX_EXPERTS)
        self._views: dict[int, SlotViews] = {}
        self._lent: dict[int, Taken] = {}  # slots whose aliases are tracked
        for name, kernel in self.device.kernels.items():
            for part in parts_of(kernel.args):
                self._set_constants(name, part)
        self._view = ViewWords(self._control[config.position], num_local)
        everybody = (True,) * num_local
        self._agreed: tuple[tuple[bool, ...], int] = everybody, 0  # members, and the last call's number
        self._is_open = True  # whether kernels may run in that view
        self._view.write(*self._agreed)
        self._gone: set[int] = set()  # ranks, and evicted processes, that have ended
        self.members = frozenset(range(num_local))
        self._barrier: Stage | None = None
        platform.synchronize()  # calls may come on any stream

    def _head(self) -> str:
        """Return the generated head of the kernels' sources."""
        limits = self.platform.limits
        return kernel_head(self.config.num_ranks, limits.max_warps, limits.stall_one_in)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory of this rank."""
        return self._lending.nbytes

    def stage(self, name: str, shape: LaunchShape, mode: str = "plain", grid: int = 0) -> Stage:
        """Return a kernel to be launched repeatedly, in `grid` blocks if that differs from `shape`."""
        return Stage(self.device.kernels[name], grid or shape.grid, shape, mode)

    def launch(self, stage: Stage, timeout_s: float, stream: int) -> None:
        """Launch a kernel of a call that has been announced, its waits bounded by `timeout_s`."""
        call = stage.call
        call.timeout_ns = int(timeout_s * 1e9)
        call.ordinal = self.number
        self.launch_written(stage, stream)

    def launch_written(self, stage: Stage, stream: int, is_first: bool = False) -> None:
        """Launch a kernel whose call number and timeout have been written (`call_words`).

        With `is_first` it is the first one of its call, which is counted here: from then on it is visible to peers.
        """
        if is_first and not self.is_capturing:
            self.num_calls += 1
        beside = self._is_alone, self.max_sms
        grid, block, shared_bytes = stage.sizes
        if stage.beside != beside:
            mode, at_once = stage.mode, grid
            if mode == "early":
                if self._is_alone or 2 * grid <= self.max_sms:
                    at_once *= 2  # the next kernel's blocks start beside this one's
                else:
                    mode = "plain"
            if self._share.width < at_once:
                self._share.widen(at_once)
            stage.mode_beside, stage.beside = mode, beside
        stage.kernel(grid, block, shared_bytes, stream, stage.mode_beside)

    def barrier(self, timeout_s: float) -> None:
        """Let all ranks meet on the device, on the streams of the calls that have begun; the CPU waits for no rank."""
        if self._barrier is None:
            self._barrier = self.stage("barrier", LaunchShape(1, 32, 0, 0, 0))
        self.announce()
        self.launch(self._barrier, timeout_s, self.stream)

    @property
    def number(self) -> int:
        """Number of the call that was announced last; 0 while a graph is recorded."""
        return 0 if self.is_capturing else self.num_calls

    def announce(self) -> None:
        """Count a call, right before its first kernel is launched: from then on it is visible to peers."""
        if not self.is_capturing:
            self.num_calls += 1

    def quiet_stream(self) -> int | None:
        """Return the current stream if `begin` would find nothing to do but to order streams, which is done, else None.

        Besides the checks of `GpuDevice.quiet_stream` this reads what other buffers do on the GPU, and blocked slots.
        """
        if self.is_capturing or self.is_poisoned or self.pool.haunters:
            return None
        stream = self.device.quiet_stream() if self._share.seen == Share.num_changes else None
        return self._follow_quietly() if stream is None else stream

    def _follow_quietly(self) -> int | None:
        """Order a call after those on another stream, or after other buffers have begun or moved; None if `begin` would
        find more to do.
        """
        device, share = self.device, self._share
        is_busy = device.is_closed or self.platform.is_capturing() or device.has_reports or share.stream is None
        if is_busy or self._view.haunted:
            return None
        stream = self.stream = share.stream = self.platform.stream()
        try:
            self.max_sms, self._is_alone = share.limit(stream, False)
        except expected(ResourceError):  # raised by `begin`
            return None
        device.follow(stream)
        return stream

    def begin(self, do_check: bool = True) -> int:
        """Start a call: raise errors left by earlier ones, return the current stream.

        The call's work on the stream runs after everything that this buffer has put on any other.
        """
        self.device.require_open()
        stream = self.stream = self.platform.stream()
        self.is_capturing = self.platform.is_capturing()
        if do_check and not self.is_capturing:
            self.check()
        if do_check:  # a refusal is one block that waits for no rank
            if not self.is_capturing:
                self._share.stream = stream
            self.max_sms, self._is_alone = self._share.limit(stream, self.is_capturing)
        if self.is_capturing:
            self._share.in_graphs = True
            return stream
        self._join(stream)
        if self._view.haunted and self._view.haunted != self.pool.haunted:
            self._view.tell_haunted(self.pool.haunted)
        return stream

    def join(self) -> None:
        """Make the current stream wait for all work of this buffer on other streams."""
        if not self.device.is_closed and not self.platform.is_capturing():
            self._join(self.platform.stream())

    def _join(self, stream: int) -> None:
        self._share.stream = stream
        self.device.follow(stream)

    def check(self) -> None:
        """Raise what a kernel has reported since the last check; costs a few loads of pinned memory."""
        if not self.device.has_reports:
            return
        error = self._take_report()
        if error is not None:
            if is_echo(error) and (dead := self._await_news()):
                error = blame(error, dead, self.config.rank)
            while (later := self._take_report()) is not None:
                _log.warning("after the error that is raised now, another call failed: %s", later)
            try:
                raise error
            finally:
                # otherwise it would hold the caller's tensors, through traceback and frames, until a collection
                del error

    def _take_report(self) -> EpeeError | None:
        """Return the oldest unread report as an error."""
        return take_report(self.device.report.words, self.config.rank, self.reason_of, self.describe)

    def _await_news(self) -> list[int]:
        """Return the members that are known to be dead; a peer may have received a report a little earlier.

        It looks itself: a pidfd reports a process only when the driver has torn down its contexts, which took longer
        than `NEWS_S` on a busy machine, and the notifier looks closely only while a kernel waits, as this one did not.
        """
        deadline = time.monotonic() + NEWS_S
        while True:
            self.look()
            dead = self._news()
            if dead or time.monotonic() > deadline:
                return dead
            time.sleep(1e-3)

    def _news(self) -> list[int]:
        """Return the members that are known to be dead."""
        return [rank for rank in sorted(self.members) if self.device.is_marked(rank)]

    def num_finished(self) -> int:
        """Return how many calls this rank's kernels have finished; waits for the GPU."""
        return self._view.seq

    # --- view -----------------------------------------------------------------------------------------------------

    def tags(self) -> int:
        """Return the highest call number that this rank has used, on the GPU or on the CPU side; waits for the GPU."""
        self.platform.synchronize()
        return max(self._view.seq, self.num_calls)

    def set_view(
        self,
        active: Sequence[bool],
        tag: int,
        ghosts: Mapping[int, Collection[int]] = MappingProxyType({}),
        is_open: bool = True,
    ) -> None:
        """Continue in an agreed view. Every member calls this with equal arguments while no call of any is in flight.

        Earlier handles become invalid: kernels refuse them, also in graphs. Errors that have not been raised yet are
        dropped.

        Args:
            active: `num_ranks` flags of the members. Other ranks are neither written to, awaited, nor counted.
            tag: above every member's `tags()`, so that nothing of earlier calls passes for new.
            ghosts: ranks that another process has now, with numbers of the evicted processes that had them, from
                `FIRST_GHOST` on. What those have stored is cleared, and what they might still write is not lent.
            is_open: False: the members' memory is not mapped yet, and no member stores here before this has returned;
                until `open_view` dispatches of graphs fail, and kernels reach no peer.
        """
        self.platform.synchronize()
        self._reclaim()
        for rank, others in ghosts.items():
            self._view.clear_source(rank)
            self.pool.pass_on(rank, set(others) - self._gone, is_member=rank in self.members)
        outside = [rank for rank, is_in in enumerate(active) if not is_in and rank != self.config.rank]
        self.pool.haunt([rank for rank in outside if rank in self.members and rank not in self._gone])
        members = frozenset(range(len(active))) - frozenset(outside)
        self._gone -= members
        self.pool.release(members)
        self._exchanged.words[0] = tag  # all members have left all earlier calls
        self.num_calls = tag
        self._agreed, self._is_open = (tuple(active), tag), False
        if is_open:
            self.open_view()
        else:
            self._view.shut(tag)
            for rank in range(len(active)):
                self._view.note_calls(rank, tag)
        self.members = members
        self._places.open()
        self.platform.synchronize()
        while (error := self._take_report()) is not None:
            _log.info("the view has changed behind a call that failed: %s", error)

    def open_view(self) -> None:
        """Let kernels run in the view that was set last, from its number on; no call of this rank is in flight.

        Replays meanwhile have used the numbers of the view's calls, and have stored them where no other rank writes.
        """
        if self._is_open:
            return  # replays since then are calls
        self.platform.synchronize()
        active, tag = self._agreed
        self._view.clear_source(self.config.rank)
        self._view.note_calls(self.config.rank, tag)
        self._view.write(active, tag, self.pool.haunted)
        self.platform.synchronize()
        self._is_open = True

    @property
    def blobs(self) -> tuple[bytes, bytes]:
        """The blobs by which another process maps what this rank has lent from the beginning."""
        return self._control[self.config.position].blob, self._own_slots.blob

    def replace_peer(self, rank: int, blobs: Sequence[bytes]) -> None:
        """Map what the process that has `rank` now lends, named by its `blobs`, unless mapped. No call is in flight.

        Raises:
            As `Lending.put`; to be repeated.
        """
        for regions, blob in zip((self._control, self.slots), blobs, strict=True):
            self._lending.put(regions, rank, blob)

    def bury(self, ranks: Sequence[int]) -> None:
        """Record that processes of ranks, or evicted ones, have ended with all work of their GPUs."""
        if not self._gone.issuperset(ranks):
            self._gone |= set(ranks)
            self.pool.release(self._gone)

    def num_sms(self, wanted: int | None, default: int = DEFAULT_SMS) -> int:
        """Return how many multiprocessors a call uses."""
        available = self.platform.limits.num_sms
        if wanted is None:
            return max(1, min(default, available - 1, self.max_sms))
        if not 1 <= wanted <= available:
            raise InvalidArgument(f"num_sms must be 1 ... {available}, got {wanted}")
        return min(wanted, self.max_sms)

    # --- memory ---------------------------------------------------------------------------------------------------

    def expert_place(self, slot_bytes: int) -> ExpertPlace:
        """Return the memory from which expert-layout rows are pulled, in slots of so many bytes at least. Collective
        for the first call in a view, if none was lent at construction, and when slots grow.
        """
        place = self._places.ready(slot_bytes)
        if place is None:
            if self.platform.is_capturing():
                raise InvalidState(
                    "the first expert-layout combine, with the largest expert_alignment, must run before a graph is "
                    "recorded, and once more after a sync()"
                )
            place = self._places.meet(slot_bytes, self.members, self._all_gather)
        return place

    def ready_place(self, slot_bytes: int) -> ExpertPlace | None:
        """Return the memory of `expert_place`, None if the ranks have to meet first."""
        return self._places.ready(slot_bytes)

    def take(self, stream: int, is_granted: bool) -> Taken | None:
        """Take a slot for a result, or for rows to combine, or None when there is none free; a graph must have one."""
        if is_granted and not (self.is_capturing or self.pool.haunters):
            for slot in reversed(self._lent):  # the newest first, as the pool does
                views = self._views[slot]
                if views.is_idle():
                    return self._take_over(slot, views, stream)
        elif self._lent:
            self._reclaim()
        call = self.num_calls + 1 if is_granted else None
        if self.is_capturing:
            return self._take_for_graph(stream, call)
        new = self.pool.take(stream, call)
        if new is None:
            return None
        self._save_rows(self._views.get(new))
        return Taken(self.pool, new, [stream], False)

    def _take_over(self, slot: int, views: SlotViews, stream: int) -> Taken:
        """Reuse the slot of a dead result for the next one: equals returning and taking it, in less time."""
        taken = self._lent[slot]
        for reader in taken.streams:
            if reader != stream:
                self.platform.wait(self.platform.mark(reader))
        if views.kept is not None and views.kept() is not None:
            self._save_rows(views)
        self.pool.grant_again(slot, self.num_calls + 1)
        del self._lent[slot]
        taken.streams = [stream]  # the old ones are the old result's
        return taken

    def _save_rows(self, views: SlotViews | None) -> None:
        """Copy what the handle of a slot's last result may be asked for, if that handle still exists."""
        if views is not None and views.kept is not None:
            rows, views.kept = views.kept(), None
            if rows is not None:
                rows.keep()

    def _reclaim(self) -> None:
        """Return slots whose results have died."""
        for slot in tuple(self._lent):
            if self._views[slot].is_idle():
                self._lent.pop(slot)()

    @property
    def landing(self) -> int:
        """The landing slot, for rows that a combine copies in; raises as `ReceiveSlotPool.landing`."""
        if self.pool.haunted:
            self._reclaim()
        return self.pool.landing

    def slot_at(self, address: int) -> int | None:
        """Return the slot of this rank that begins at an address; None if there is none."""
        slot, rest = divmod(address - self._slots_address, self._slot_bytes)
        return slot if rest == 0 and 0 <= slot <= self.config.num_slots else None

    def grant_landing(self) -> int:
        """Return the landing slot for a call that grants it to the peers; raises as `ReceiveSlotPool.landing`."""
        if self.pool.haunted:
            self._reclaim()
        return self.pool.grant_landing(self.num_calls + 1, self.is_capturing)

    def _take_for_graph(self, stream: int, call: int | None) -> Taken:
        """Take a slot permanently. One that a handle may still be asked for cannot be copied now, so it stays free."""
        passed: list[int] = []
        while (slot := self.pool.take(stream, call, for_graph=True)) is not None:
            views = self._views.get(slot)
            rows = None if views is None or views.kept is None else views.kept()
            if rows is None or rows.is_kept:
                break
            passed.append(slot)
        for other in passed:
            self.pool.give_back(other, [stream])
        if slot is None:
            raise ResourceError(
                "no slot is free for this graph to own; make the buffer with a larger num_slots, or drop the handles "
                "of earlier dispatches"
            )
        return Taken(self.pool, slot, [stream], True)

    def poison(self, region: LentRegion, offset: int, nbytes: int) -> None:
        """If poisoning is on, fill memory with 0xFF, so that rows never written show as NaN."""
        if self.is_poisoned and nbytes:
            region.lease(offset, nbytes, None).fill_(0xFF)

    def poison_slot(self, slot: int) -> None:
        """The same with a slot of this rank."""
        slot_bytes = self.config.slot_bytes
        self.poison(self._own_slots, slot * slot_bytes, slot_bytes)

    def views(self, taken: Taken | None) -> SlotViews:
        """Return the tensors over a slot, which returns to the pool when their aliases have died; those over the
        landing slot for None.
        """
        slot = self.pool.landing if taken is None else taken.slot
        views = self._views.get(slot)
        if views is None:
            words = self._lease(slot, None).view(torch.int64)
            views = self._views[slot] = SlotViews(self._lease(slot, None), words)
        if taken is not None:
            self._lent[slot] = taken
        return views

    def lease(self, taken: Taken) -> torch.Tensor:
        """Return the bytes of a slot; it returns to the pool when the last view has died."""
        return self._lease(taken.slot, taken)

    def _lease(self, slot: int, released: Callable[[], None] | None) -> torch.Tensor:
        slot_bytes = self.config.slot_bytes
        return self._own_slots.lease(slot * slot_bytes, slot_bytes, released)

    def close(self) -> None:
        """Free all memory; tensors over it keep what they use. Idempotent."""
        self.device.close()
        self._views.clear()
        self._lent.clear()
        self._lending.close()

    def _set_constants(self, name: str, args: Any) -> None:
        """Fill in what no call changes, whatever its shape."""
        config = self.config
        call = args.call
        for rank, region in enumerate(self._control):
            call.control[rank] = region.address
        call.report, call.abort, call.rank = self.device.report.address, self.device.news.address, config.position
        call.exchanged = self._exchanged.address
        call.op = OP_BARRIER if name == "barrier" else OP_COMBINE if "combine" in name else OP_DISPATCH
        if isinstance(args, LayoutParams):
            args.num_slots, args.experts = config.num_slots + 1, self.experts.data_ptr()
        if isinstance(args, DispatchParams):
            for rank, region in enumerate(self.slots):
                args.slots[rank] = region.address
            args.slot_bytes = config.slot_bytes


def parts_of(args: Any) -> tuple[Any, ...]:
    """Return the structs in the arguments of a kernel: two if it stands for two kernels."""
    if isinstance(args, FewParams):
        return args.layout, args.payload
    return (args if hasattr(args, "call") else args.host,)
