"""`LatencyBuffer` on the GPUs of one host: the CPU side of its dispatch and combine.

Data path: `csrc/kernels/latency/dispatch.cuh` and `latency/combine.cuh` move everything, from GPU to GPU; a call is one
launch, or two when the caller separates its send and receive phases (`return_hook`). The CPU waits for nothing and
learns nothing by itself: counts, `got` and the mask are tensors on the device. The common part of calls of a kind and
size is prepared once (`plan.py`): a call allocates, writes the words that vary, launches.

Memory of a rank: one region (`LatencyMemory`), lent to all ranks, into which peers store; it serves calls of all sizes
that fit (`plans_of`), with the same words and numbers of calls. Results are ordinary tensors. For the writers, and why
slots are safe to reuse, see `csrc/kernels/latency/call.cuh`.

Protocol on the CPU: all ranks make the same calls of a kind in the same order; hooks may be called in any. All work
runs after what the buffer has put on other streams before. Reports of kernels are in pinned memory and are raised by
`check`, with which every call begins.

Into the region of `LatencyMemory` the CPU writes the addresses of the others' regions, the members, and the number from
which calls count. An agreed view is entered in two steps: `set_view` makes this rank unreachable for all others and
clears what was stored; once all members have done so, `open_view` lets calls reach the others again.

A crash of a peer leaves its region mapped, and its words as they were or unset: kernels wait for the timeout, then
exclude that source; a process that replaces it lends another region (`attach_peer`, `replace_peer`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ....arrays import plain_tensors
from ....errors import InvalidArgument, InvalidState
from ....gpu.device import GpuDevice, Share
from ....gpu.experts import expert_table
from ....gpu.lent import AllGather
from ....gpu.params import COPIED_WORDS, MAX_EXPERTS
from ....gpu.platform import LentRegion, Platform
from .half import OPS, Half
from .params import (
    BOTH_HALVES,
    COMBINE_POINTERS,
    DISPATCH_POINTERS,
    KERNELS,
    OP_COMBINE,
    OP_DISPATCH,
    RECEIVE_HALF,
    SEND_HALF,
    kernel_head,
)
from .plan import CallPlan, LatencyCombinePlan, LatencyDispatchPlan, Planner
from .report import take_report
from .shapes import LatencyConfig
from .types import CoreCombined, CoreHandle, CoreReceived

# Words that peers write: their type, and their value for a call, of whose number `low` is the low half.
_WORDS: dict[str, tuple[torch.dtype, Callable[[int, int], int]]] = {
    "heads": (torch.int64, lambda tag, low: low << 32),
    "weights": (torch.int64, lambda tag, low: low << 32),
    "flags": (torch.int64, lambda tag, low: tag),
    "packets": (torch.int32, lambda tag, low: low),
}
_WORDS_OF_PEERS = {
    f"{op}_{part}": how for op in OPS.values() for part, how in _WORDS.items() if (op, part) != ("dispatch", "weights")
}


class LatencyMemory:
    """The memory of one rank. One thread at a time.

    Args:
        platform: the GPU.
        config: sizes, equal on all ranks.
        all_gather: returns the bytes of all ranks in rank order, b"" for ranks to be attached later (`replace_peer`);
            called at construction.

    Attributes:
        active_ranks: `[num_ranks]` int32 on the device, the mask of calls that bring none.
        address: of what this rank lends.
        nbytes: of it.
    """

    def __init__(self, platform: Platform, config: LatencyConfig, all_gather: AllGather) -> None:
        self.config, self.platform = config, platform
        with plain_tensors():
            self.active_ranks = torch.ones(config.num_ranks, dtype=torch.int32, device=platform.device)
        self._own: LentRegion = platform.create(config.region_layout.nbytes)
        self.address, self.nbytes = self._own.address, self._own.nbytes
        self._peers: list[LentRegion | None] = self._attach(all_gather)
        self._write_peers()
        self._agreed: tuple[list[bool], int] = [True] * config.num_ranks, 0  # members, the last call's number
        self._is_open = True  # whether calls reach the others in that view

    def tags(self) -> int:
        """Return the highest call number that this rank has used; waits for the GPU."""
        self.platform.synchronize()
        return max(int(self._words(name).max()) for name in ("dispatch_tags", "combine_tags"))

    def set_view(self, active: Sequence[bool], tag: int) -> None:
        """Prepare for an agreed view: every member calls this with equal arguments, and `open_view` before its calls.

        Until then a call, which only a graph can make, reaches no other rank: it ends at once, without them. No rank
        makes a call of the view before all members are ready; stores of earlier calls meanwhile have no effect.

        Args:
            active: the members.
            tag: above all ranks' `tags()`, so that nothing of earlier calls passes for new.
        """
        self.platform.synchronize()
        self._agreed, self._is_open = ([bool(one) for one in active], tag), False
        self._write_words(
            "peers", [self._own.address * (rank == self.config.rank) for rank in range(self.config.num_ranks)]
        )
        for rank in range(self.config.num_ranks):
            self._note_calls(rank, tag)
        self._count_from(tag)
        self.platform.synchronize()

    def open_view(self) -> None:
        """Let calls reach the others' memory in the view that was set last, from its number on.

        Replays meanwhile have used the numbers of the view's calls, and have stored them where no other rank writes.
        """
        if self._is_open:
            return  # replays since then are calls
        self.platform.synchronize()
        active, tag = self._agreed
        self._note_calls(self.config.rank, tag)
        self._count_from(tag)
        self.active_ranks.copy_(torch.tensor(active, dtype=torch.int32, device="cpu"))
        self._write_peers()
        self.platform.synchronize()
        self._is_open = True

    def _count_from(self, tag: int) -> None:
        """Set call `tag` as the last one of this rank, in which all others have taken part."""
        for op in OPS.values():
            self._write_words(f"{op}_tags", [tag, tag])
            self._write_words(f"{op}_heard", [tag] * self.config.num_ranks)
        self._write_words("news", [0] * COPIED_WORDS)  # a dead rank may have a successor
        self._write_words("reported", [0, 0])

    def _note_calls(self, rank: int, tag: int) -> None:
        """Set all words that a process of `rank` has stored here to those of call `tag`, which no call uses.

        So none passes for one of a later call, neither the words of its previous process nor words so old that the 32
        bits of their number wrap around. Rows stay: they are not read without their flag.
        """
        low = _signed(tag & 0xFFFFFFFF, 32)
        layout = self.config.region_layout
        for name, (dtype, word) in _WORDS_OF_PEERS.items():
            field = layout[name]
            if field.nbytes:
                words = self._own.lease(layout.offset(name), field.nbytes, None).view(dtype)
                words.view(field.shape[0], field.shape[1], -1)[:, rank].fill_(word(tag, low))

    @property
    def blob(self) -> bytes:
        """The blob with which a replaced peer attaches this rank's region."""
        return self._own.blob

    def attach_peer(self, blob: bytes) -> LentRegion:
        """Map the region of a process that replaces a rank; no call uses it before `replace_peer`.

        Raises:
            InvalidArgument: it has another size; and as `CudaRegion.attach`.
        """
        region = self.platform.attach(blob)
        if region.nbytes != self.nbytes:
            size = region.nbytes
            region.close()
            raise InvalidArgument(f"a peer lends {size} bytes, this rank {self.nbytes}; use equal sizes")
        return region

    def replace_peer(self, rank: int, region: LentRegion) -> None:
        """Make kernels use another region for a rank, and unmap the one before; no call may be in flight."""
        old = self._peers[rank]
        if old is region:
            return
        self.platform.synchronize()
        self._peers[rank] = region
        if self._is_open:
            self._write_peers()
            self.platform.synchronize()
        if old is not None:
            old.close()

    def close(self) -> None:
        """Free all memory. No kernel may be in flight."""
        for region in self._peers:
            if region is not None:
                region.close()
        self._own.close()

    def _attach(self, all_gather: AllGather) -> list[LentRegion | None]:
        rank = self.config.rank
        blobs = all_gather(self._own.blob)
        regions: list[LentRegion | None] = [
            self._own if peer == rank else self.platform.attach(blob) if blob else None
            for peer, blob in enumerate(blobs)
        ]
        for peer, region in enumerate(regions):
            if region is not None and region.nbytes != self.nbytes:
                raise InvalidArgument(
                    f"rank {peer} lends {region.nbytes} bytes, this rank {self.nbytes}; "
                    "all ranks must make the buffer with the same sizes"
                )
        all_gather(b"attached")  # no rank may leave before all have copied its descriptors
        return regions

    def _words(self, name: str) -> torch.Tensor:
        layout = self.config.region_layout
        return self._own.lease(layout.offset(name), layout[name].nbytes, None).view(torch.int64)

    def _write_peers(self) -> None:
        self._write_words("peers", [0 if region is None else region.address for region in self._peers])

    def _write_words(self, name: str, values: Sequence[int]) -> None:
        self._words(name)[: len(values)].copy_(torch.tensor(values, dtype=torch.int64, device="cpu"))


def _signed(value: int, num_bits: int) -> int:
    return value - (1 << num_bits) if value >> (num_bits - 1) else value


Words = tuple[int, tuple[int, ...]]  # timeout in nanoseconds, pointers in the order of the kernel's arguments


class LatencyCore:
    """The GPU side of a rank's latency buffer. One call at a time; calls of a kind in the same order on all ranks.

    Args:
        platform, config, all_gather: as for `LatencyMemory`.

    Attributes:
        device: kernels, reports, the order of calls.
        memory: that the ranks lend each other; `active_ranks` is its mask.
        plans: makes the plans of calls.
        experts: the table by which kernels map an expert to its rank.
        num_calls: calls that this rank has begun; those recorded in graphs do not count.
        is_poisoned: fill results with 0xFF before each call.
    """

    def __init__(self, platform: Platform, config: LatencyConfig, all_gather: AllGather) -> None:
        config.check()
        self.config, self.platform = config, platform
        self.is_poisoned = False
        self.num_calls = 0
        self.device = GpuDevice(platform, kernel_head(config.num_ranks, platform.limits.stall_one_in), KERNELS)
        self._lost = platform.mapped_words(1)
        self.experts = expert_table(platform.device, MAX_EXPERTS)
        self.plans = Planner(platform, config, self.device.kernels)
        self._planners = {config: self.plans}
        self.memory = LatencyMemory(platform, config, all_gather)
        self.active_ranks = self.memory.active_ranks
        self._mask_address = self.active_ranks.data_ptr()
        self._share = self.device.share
        self._open: dict[int, deque[Half]] = {OP_DISPATCH: deque(), OP_COMBINE: deque()}
        for name, kernel in self.device.kernels.items():
            self._set_constants(kernel.args, "dispatch" if "dispatch" in name else "combine", config)
        platform.synchronize()  # calls may come on any stream

    def plans_of(self, config: LatencyConfig) -> Planner:
        """Return the planner of calls of other sizes in the same memory. Local.

        All ranks make such calls, as others, in the same order; sizes that differ are a mismatch for the kernels.

        Args:
            config: with the sections of this core.

        Raises:
            InvalidArgument: they do not fit, or the kernels cannot do it.
        """
        if config not in self._planners:
            config.check()
            kernels = {name: kernel.bind() for name, kernel in self.device.kernels.items()}
            for name, kernel in kernels.items():
                self._set_constants(kernel.args, "dispatch" if "dispatch" in name else "combine", config)
            self._planners[config] = Planner(self.platform, config, kernels)
        return self._planners[config]

    # --- calls ----------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        plan: LatencyDispatchPlan,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        active_ranks: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
        timeout_ns: int = 0,
        is_capturing: bool | None = None,
        quiet: int | None = None,
        counts: torch.Tensor | None = None,
    ) -> CoreReceived:
        """Send tokens, and receive them unless a hook is wanted; the caller has checked the arguments.

        Args:
            plan: from `plans`, for as many tokens with such rows.
            x: `[num_tokens, hidden]` bfloat16, unit stride in the last dimension, rows 16-byte aligned.
            topk_idx: `[num_tokens, num_topk]` int64, contiguous.
            topk_weights: `[num_tokens, num_topk]` float32, contiguous, or None for ones.
            active_ranks: `[num_ranks]` or longer, int32 on the device: the members; silent sources become 0.
            stats: `[num_local_experts]` int32 on the device to which the counts are added, or None.
            timeout_ns: bound of the kernel's waits, 0 for the plan's.
            is_capturing: whether the current stream is recording a graph, None if the caller does not know.
            quiet: what `quiet_stream` has just returned; `is_capturing` is not read then.
            counts: for the counts, of `plan.new_counts`; None for a part of the words.
        Raises:
            errors left by an earlier call; InvalidState: too many receive phases are outstanding.
        """
        stream, is_capturing = self._begin(OP_DISPATCH, is_capturing) if quiet is None else (quiet, False)
        out, words = plan.new_x(), plan.new_words()
        scales = None if plan.new_scales is None else plan.new_scales()
        handle = CoreHandle(plan.config, plan.num_tokens, plan.space, words, counts)
        if self.is_poisoned:
            _poison(out, words, None if scales is None else scales.transpose(1, 2))
        base = handle.address
        got, recv_rows, recv_weights, recv_info, sent_to, own_counts, ranges, src_token, ids, weights = plan.offsets
        pointers = (  # one by one, which is cheaper than a loop
            self._mask_address if active_ranks is None else active_ranks.data_ptr(),
            base + plan.waits,
            x.data_ptr(),
            topk_idx.data_ptr(),
            0 if topk_weights is None else topk_weights.data_ptr(),
            out.data_ptr(),
            0 if scales is None else scales.data_ptr(),
            0 if stats is None else stats.data_ptr(),
            base + got,
            base + recv_rows,
            base + recv_weights,
            base + recv_info,
            base + sent_to,
            base + own_counts if counts is None else counts.data_ptr(),
            base + ranges,
            base + src_token,
            base + ids,
            base + weights,
        )
        calls = plan.calls
        what = (timeout_ns or calls.timeout_ns, pointers)
        hook = None
        if quiet is None or calls.is_split:
            held = (x, topk_idx, topk_weights, out, scales, words, counts, active_ranks, stats)
            hook = self._run(calls, what, held, stream, is_capturing)
        else:
            self._launch(calls, BOTH_HALVES, (0, 1), what, stream, False)
        return CoreReceived(out, scales, handle, hook, stream)

    def combine(
        self,
        plan: LatencyCombinePlan,
        y: torch.Tensor,
        handle: CoreHandle,
        topk_weights: torch.Tensor | None,
        out: torch.Tensor | None = None,
        active_ranks: torch.Tensor | None = None,
        timeout_ns: int = 0,
        is_capturing: bool | None = None,
        quiet: int | None = None,
    ) -> CoreCombined:
        """Sum the experts' rows of this rank's tokens; the caller has checked the arguments.

        Args:
            plan: from `plans`, for as many tokens, with or without weights.
            y: `[L, ranks * T, hidden]` bfloat16, contiguous, anywhere on this GPU; never copied.
            handle: of the dispatch.
            topk_weights: `[num_tokens, num_topk]` float32, contiguous, instead of the dispatch's.
            out: `[num_tokens, hidden]` bfloat16, contiguous, or None.
            active_ranks, timeout_ns, is_capturing, quiet: as in `dispatch`.
        Raises: as `dispatch`.
        """
        stream, is_capturing = self._begin(OP_COMBINE, is_capturing) if quiet is None else (quiet, False)
        if out is None:
            out = plan.new_out()
            if self.is_poisoned:
                _poison(out)
        words = plan.new_words()
        base, waits = handle.address, words.data_ptr()
        got, recv_rows, recv_weights, recv_info, sent_to = plan.offsets
        pointers = (
            self._mask_address if active_ranks is None else active_ranks.data_ptr(),
            waits,
            y.data_ptr(),
            0 if topk_weights is None else topk_weights.data_ptr(),
            out.data_ptr(),
            waits + plan.got,
            base + got,
            base + recv_rows,
            base + recv_weights,
            base + recv_info,
            base + sent_to,
        )
        calls = plan.calls
        what = (timeout_ns or calls.timeout_ns, pointers)
        hook = None
        if quiet is None or calls.is_split:
            held = (y, topk_weights, handle.words, out, words, active_ranks)
            hook = self._run(calls, what, held, stream, is_capturing)
        else:
            self._launch(calls, BOTH_HALVES, (0, 1), what, stream, False)
        return CoreCombined(out, words, hook, stream, self.config.num_ranks)

    def refuse(self, op: int) -> None:
        """Take part in the peers' next call of a kind only to report that this rank's was invalid."""
        stream, is_capturing = self._begin(op, None, do_check=False)
        region = self.memory.address
        if op == OP_DISPATCH:
            names, places = DISPATCH_POINTERS, {"sent_to": region + self.config.region_layout.offset("scratch")}
        else:
            names, places = COMBINE_POINTERS, {"handle_got": region, "recv_info": region}  # read, and not used
        pointers = (self._mask_address, 0, *[places.get(name, 0) for name in names.split()])
        plan = self.plans.refusal(op)
        self._run(plan, (plan.timeout_ns, pointers), (), stream, is_capturing)

    # --- order of calls -------------------------------------------------------------------------------------------

    def quiet_stream(self, op: int, is_split: bool = False) -> int | None:
        """Return the current stream if the start of a call would find nothing to do, else None.

        Besides the checks of `GpuDevice.quiet_stream` this reads whether calls wait for their hooks, of which a call
        with a hook (`is_split`) may find some, and results to be filled.
        """
        num_open = len(self._open[op])
        is_busy = num_open >= self.config.max_in_flight if is_split else num_open
        return None if is_busy or self.is_poisoned else self.device.quiet_stream()

    def _begin(self, op: int, is_capturing: bool | None, do_check: bool = True) -> tuple[int, bool]:
        """Refuse what cannot start, raise errors left by earlier calls, join the streams.

        Returns:
            The raw current stream, and whether it is recording a graph.
        """
        self.device.require_open()
        if len(self._open[op]) >= self.config.max_in_flight:
            raise InvalidState(
                f"{OPS[op]}: the oldest of {len(self._open[op])} calls has not received yet, "
                f"{self.config.max_in_flight} may be in flight; call the oldest hook first"
            )
        if is_capturing is None:
            is_capturing = self.platform.is_capturing()
        if do_check and not is_capturing:
            self.check()
        return self._join(is_capturing), is_capturing

    def _join(self, is_capturing: bool) -> int:
        """Make the current stream wait for the buffer's last one, and return it."""
        stream = self.platform.stream()
        if not is_capturing:
            self.device.follow(stream)
        return stream

    def _run(self, plan: CallPlan, what: Words, held: tuple[Any, ...], stream: int, is_capturing: bool) -> Half | None:
        """Launch a call, or its send phase; then the returned object receives.

        Args:
            plan: of the call.
            what: its timeout and its pointers.
            held: tensors that must live until the receive phase is launched, if that is launched separately.
            stream, is_capturing: the current stream.
        """
        calls = self._open[plan.op]
        if plan.is_split:
            half = Half(plan.op, calls, partial(self._receive, plan, what, held))
            self._launch(plan, SEND_HALF, (0, 0), what, stream, is_capturing)
            calls.append(half)
            return half
        if not calls:
            self._launch(plan, BOTH_HALVES, (0, 1), what, stream, is_capturing)
        else:  # the count of received calls advances when the earlier ones have been received
            self._launch(plan, BOTH_HALVES, (len(calls), 0), what, stream, is_capturing)
            calls.append(Half(plan.op, calls, None))
        return None

    def _receive(
        self, plan: CallPlan, what: Words, held: tuple[Any, ...], ahead: int, advance: int, quiet: int | None
    ) -> None:
        """Launch the receive phase of a call, on the stream that is current now."""
        stream, is_capturing = quiet, False
        if stream is None:
            is_capturing = self.platform.is_capturing()
            stream = self._join(is_capturing)
        self._launch(plan, RECEIVE_HALF, (ahead, advance), what, stream, is_capturing)

    def _launch(
        self, plan: CallPlan, halves: int, turn: tuple[int, int], what: Words, stream: int, is_capturing: bool
    ) -> None:
        ready = plan.made[halves] or plan.ready(halves)
        if is_capturing or ready.fits_at != (Share.num_changes, stream):
            share = self._share
            limit = share.limit(stream, is_capturing)
            if is_capturing:
                share.in_graphs = True
            width = ready.fit(*limit)
            if not is_capturing:
                ready.fits_at = share.seen, stream
            share.stream = stream
            if width > share.width:
                share.widen(width)
        if halves & SEND_HALF and not is_capturing:
            self.num_calls += 1  # after all that can fail: the call becomes visible to the peers
        timeout_ns, pointers = what
        ready.launch(stream, timeout_ns, turn, pointers)

    # --- view, reports, end ---------------------------------------------------------------------------------------

    def set_view(self, active: Sequence[bool], tag: int) -> None:
        """Prepare for an agreed view, as `LatencyMemory.set_view`; calls that wait for their hooks are dropped."""
        self._open[OP_DISPATCH].clear()
        self._open[OP_COMBINE].clear()
        self.memory.set_view(active, tag)

    @property
    def num_outstanding(self) -> int:
        """Calls that have been sent and not received."""
        return sum(not half.is_done for halves in self._open.values() for half in halves)

    def join(self) -> None:
        """Make the current stream wait for all work of this buffer on other streams."""
        if not self.device.is_closed:
            self._join(self.platform.is_capturing())

    def lost(self) -> tuple[int, ...]:
        """Return the ranks that the calls since the last check have excluded, without waiting for the GPU."""
        word = self._lost.words[0]
        if not word:
            return ()
        self._lost.words[0] = 0
        return tuple(rank for rank in range(self.config.num_ranks) if word >> rank & 1)

    def check(self) -> None:
        """Raise what a kernel has reported since the last check; costs a few loads of pinned memory."""
        if self.device.has_reports:
            error = take_report(self.device.report.words, self.config.rank)
            if error is not None:
                raise error

    def close(self) -> None:
        """Free all memory; results live on. Idempotent. No kernel may be in flight."""
        if self.device.is_closed:
            return
        self.device.close()
        for calls in self._open.values():
            calls.clear()  # their hooks must not launch anything any more
        self.memory.close()

    def _set_constants(self, args: Any, op: str, config: LatencyConfig) -> None:
        """Fill in what all calls of the same sizes have in common."""
        layout = config.region_layout
        call = args.call
        call.own, call.report, call.abort = self.memory.address, self.device.report.address, self.device.news.address
        call.lost, call.rank = self._lost.address, config.rank
        call.op = OP_DISPATCH if op == "dispatch" else OP_COMBINE
        call.peers_offset, call.reported_offset = layout.offset("peers"), layout.offset("reported")
        call.news_offset = layout.offset("news")
        call.tags_offset, call.end_offset = layout.offset(f"{op}_tags"), layout.offset(f"{op}_end")
        call.heard_offset, call.max_in_flight = layout.offset(f"{op}_heard"), config.max_in_flight
        args.at = config.places(op)
        args.num_topk, args.hidden, args.token_words = config.num_topk, config.hidden, config.token_words
        if op == "dispatch":
            args.experts = self.experts.data_ptr()
            args.num_experts, args.num_local_experts = config.num_experts, config.num_local_experts
            args.meta_words, args.owner_factor = config.meta_words, config.owner_factor
        else:
            args.weights_offset, args.weights_section = layout.offset("combine_weights"), config.sections.weights
            args.num_rows = config.num_local_experts * config.capacity


def _poison(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.view(torch.uint8).fill_(0xFF)
