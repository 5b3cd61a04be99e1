"""`LatencyBuffer` on the GPUs of one host: the host side of its dispatch and combine.

Data path: `csrc/kernels/latency/dispatch.cuh` and `latency/combine.cuh` move everything, from GPU to GPU; a call is one
launch, or two when the caller wants its send half and its receive half apart (`return_hook`). The host waits for
nothing and learns nothing by itself: counts, `got` and the mask are tensors on the device.

Memory of a rank: one region (`params.LatencyConfig.region_layout`), lent to all ranks, into which peers store;
results are ordinary tensors. Who writes what, and why slots are safe to reuse, says `csrc/kernels/latency/call.cuh`.

Protocol on the host: all ranks make the same calls of a kind in the same order; hooks may be called in any. Everything
runs behind what the buffer has put on other streams before. What kernels report lies in pinned memory and is raised by
`check`, which every call begins with.

A crash of a peer leaves its words unset: kernels wait for the time-out, then leave that source out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ....errors import InvalidArgument, InvalidState
from ...gpu.lent import AllGather
from ...gpu.params import MAX_RANKS, NEWS_WORDS, NUM_REPORTS, REPORT_WORDS
from ...gpu.platform import Launcher, LentRegion, Platform
from ...gpu.share import Share
from .half import OPS, Half, HalfLaunch
from .params import (
    BOTH_HALVES,
    KERNELS,
    OP_COMBINE,
    OP_DISPATCH,
    SCALE_BLOCK,
    SEND_HALF,
    LatencyConfig,
    Launch,
    combine_launch,
    dispatch_launch,
    handle_space,
    kernel_head,
)
from .report import take_report
from .types import CoreCombined, CoreHandle, CoreOptions, CoreReceived

FP8 = torch.float8_e4m3fn
# Words that peers write: their type, and how they show a call, of whose number `low` is the low half.
_WORDS: dict[str, tuple[torch.dtype, Callable[[int, int], int]]] = {
    "heads": (torch.int64, lambda tag, low: low << 32),
    "weights": (torch.int64, lambda tag, low: low << 32),
    "flags": (torch.int64, lambda tag, low: tag),
    "packets": (torch.int32, lambda tag, low: low),
}
_WORDS_OF_PEERS = {
    f"{op}_{part}": how for op in OPS.values() for part, how in _WORDS.items() if (op, part) != ("dispatch", "weights")
}
_FOR_COMBINE = ("recv_rows", "recv_weights", "recv_info", "sent_to")


class LatencyCore:
    """A rank's end of a latency buffer. One call at a time; calls of a kind in the same order on all ranks.

    Args:
        platform: the GPU.
        config: sizes, equal on all ranks.
        all_gather: gives everybody's bytes in rank order, b"" for ranks to be attached later (`replace_peer`); called
            at construction.

    Attributes:
        active_ranks: `[num_ranks]` int32 on the device, the mask of calls that bring none.
        nbytes: GPU memory that this rank lends.
        num_calls: calls that this rank has begun; those recorded in graphs do not count.
        is_poisoned: fill results with 0xFF before each call.
    """

    def __init__(self, platform: Platform, config: LatencyConfig, all_gather: AllGather) -> None:
        config.check()
        self.config, self.platform = config, platform
        self.is_closed = False
        self.is_poisoned = False
        self.num_calls = 0
        self._kernels: dict[str, Launcher] = {}
        head = kernel_head(config.num_ranks, platform.limits.stall_one_in)
        for path, params in KERNELS.items():
            self._kernels.update(platform.kernels(path, head, params))
        self._report = platform.host_words(NUM_REPORTS * REPORT_WORDS)
        self._abort = platform.host_words(NEWS_WORDS)
        self._lost = platform.host_words(1)
        self.active_ranks = torch.ones(config.num_ranks, dtype=torch.int32, device=platform.device)
        self._own: LentRegion = platform.create(config.region_layout.nbytes)
        self.nbytes = self._own.nbytes
        self._peers: list[LentRegion | None] = self._attach(all_gather)
        self._write_peers()
        self._agreed: tuple[list[bool], int] = [True] * config.num_ranks, 0  # who takes part, the last call's number
        self._is_open = True  # whether calls reach the others in that view
        self._share = Share(platform.device, platform.limits.num_sms)
        self._is_alone = True
        self._last_stream: int | None = None
        self._open: dict[int, deque[Half]] = {OP_DISPATCH: deque(), OP_COMBINE: deque()}
        for name, kernel in self._kernels.items():
            self._set_constants(kernel.args, "dispatch" if "dispatch" in name else "combine")
        platform.synchronize()  # calls may come on any stream

    # --- calls ----------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        options: CoreOptions,
        active_ranks: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
    ) -> CoreReceived:
        """Send tokens, and receive them unless a hook is wanted; the caller has checked the arguments.

        Args:
            x: `[num_tokens, hidden]` bfloat16, unit stride in the last dimension, rows 16-byte aligned.
            topk_idx: `[num_tokens, num_topk]` int64, contiguous.
            topk_weights: `[num_tokens, num_topk]` float32, contiguous, or None for ones.
            options: how.
            active_ranks: `[num_ranks]` or longer, int32 on the device: who takes part; silent sources become 0.
            stats: `[num_local_experts]` int32 on the device to which the counts are added, or None.
        Raises:
            what an earlier call left behind; InvalidState: too many receive halves are outstanding.
        """
        config = self.config
        self._begin(OP_DISPATCH)
        num_tokens, device = topk_idx.shape[0], self.platform.device
        handle = CoreHandle(
            config,
            num_tokens,
            torch.empty(handle_space(config, num_tokens).total, dtype=torch.int32, device=device),
        )
        shape = config.num_local_experts, config.capacity, config.hidden
        out = torch.empty(shape, dtype=FP8 if options.use_fp8 else torch.bfloat16, device=device)
        scales = None
        if options.use_fp8:
            per_word = 4 * SCALE_BLOCK if options.use_ue8m0 else SCALE_BLOCK
            kind = torch.int32 if options.use_ue8m0 else torch.float32
            scales = torch.empty(shape[0], shape[2] // per_word, shape[1], dtype=kind, device=device)
        self._poison(out, scales, handle.words)
        if options.return_hook:
            handle.clear()
        tensors = (x, topk_idx, topk_weights, out, scales, active_ranks, stats)
        launch = partial(self._launch_dispatch, tensors, handle, options)
        hook = self._run(OP_DISPATCH, launch, options.return_hook)
        return CoreReceived(out, None if scales is None else scales.transpose(1, 2), handle, hook)

    def combine(
        self,
        y: torch.Tensor,
        handle: CoreHandle,
        topk_weights: torch.Tensor | None,
        options: CoreOptions,
        is_wide: bool = False,
        out: torch.Tensor | None = None,
        active_ranks: torch.Tensor | None = None,
    ) -> CoreCombined:
        """Sum the experts' rows of this rank's tokens; the caller has checked the arguments.

        Args:
            y: `[L, ranks * T, hidden]` bfloat16, contiguous, anywhere on this GPU; never copied.
            handle: of the dispatch.
            topk_weights: `[num_tokens, num_topk]` float32, contiguous, instead of the dispatch's (on all or none).
            options: how.
            is_wide: partials cross as float32 (on all ranks or none).
            out: `[num_tokens, hidden]` bfloat16, contiguous, or None.
            active_ranks: as in `dispatch`.
        Raises: as `dispatch`.
        """
        self._begin(OP_COMBINE)
        device = self.platform.device
        if out is None:
            out = torch.empty(handle.num_tokens, self.config.hidden, dtype=torch.bfloat16, device=device)
            self._poison(out)
        num_ranks = self.config.num_ranks
        words = torch.empty(num_ranks + -(-num_ranks // 8), dtype=torch.int64, device=device)
        if options.return_hook:
            words.zero_()
        waits, got = words[:num_ranks], words[num_ranks:].view(torch.bool)[:num_ranks]
        tensors = (y, topk_weights, out, got, waits, active_ranks)
        launch = partial(self._launch_combine, tensors, handle, options, is_wide)
        return CoreCombined(out, got, waits, self._run(OP_COMBINE, launch, options.return_hook))

    def refuse(self, op: int) -> None:
        """Take part in the peers' next call of a kind only to say that this rank's was invalid."""
        self._begin(op, do_check=False)
        self._run(op, partial(self._launch_refusal, op), False)

    def _launch_refusal(self, op: int, turn: HalfLaunch) -> None:
        kernel = self._kernels["dispatch_latency_bf16" if op == OP_DISPATCH else "combine_latency_bf16"]
        a = kernel.args
        self._set_call(a, CoreOptions(), None, turn, 0)
        a.num_tokens, a.refused = 0, 1
        limits = self.platform.limits
        if op == OP_COMBINE:
            launch = combine_launch(self.config, 0, BOTH_HALVES, 1, limits)
            a.handle_got = a.recv_info = self._own.address  # read, and not used
        else:
            launch = dispatch_launch(self.config, 0, BOTH_HALVES, 1, limits)
            a.sent_to = self._own.address + self.config.region_layout.offset("scratch")
        self._launch(kernel, Launch(1, launch.block, launch.shared_bytes))
        a.refused = 0

    def _launch_dispatch(
        self, tensors: tuple[Any, ...], handle: CoreHandle, options: CoreOptions, turn: HalfLaunch
    ) -> None:
        x, topk_idx, topk_weights, out, scales, active_ranks, stats = tensors
        config = self.config
        kernel = self._kernels["dispatch_latency_fp8" if options.use_fp8 else "dispatch_latency_bf16"]
        a = kernel.args
        self._set_call(a, options, active_ranks, turn, handle.address("waits"))
        a.x, a.topk_idx, a.topk_weights = x.data_ptr(), topk_idx.data_ptr(), _address(topk_weights)
        a.x_stride = x.stride(0) * x.itemsize
        a.out_x, a.out_scales, a.stats = out.data_ptr(), _address(scales), _address(stats)
        for name in ("counts", "ranges", "src_token", "got"):
            setattr(a, f"out_{name}", handle.address(name))
        for name in (*_FOR_COMBINE, "own_ids", "own_weights"):
            setattr(a, name, handle.address(name))
        a.num_tokens, a.kind, a.scale_kind = handle.num_tokens, options.kind, options.scale_kind
        a.row_words = config.hidden * out.itemsize // 4
        a.scale_words = 0 if scales is None else scales.shape[1]
        max_sms = self._max_sms()
        self._launch(kernel, dispatch_launch(config, handle.num_tokens, turn.halves, max_sms, self.platform.limits))

    def _launch_combine(
        self, tensors: tuple[Any, ...], handle: CoreHandle, options: CoreOptions, is_wide: bool, turn: HalfLaunch
    ) -> None:
        y, topk_weights, out, got, waits, active_ranks = tensors
        kernel = self._kernels["combine_latency_f32" if is_wide else "combine_latency_bf16"]
        a = kernel.args
        self._set_call(a, options, active_ranks, turn, waits.data_ptr())
        a.y, a.y_stride, a.out, a.out_got = y.data_ptr(), 2 * self.config.hidden, out.data_ptr(), got.data_ptr()
        a.topk_weights, a.has_weights = _address(topk_weights), int(topk_weights is not None)
        a.handle_got = handle.address("got")
        for name in _FOR_COMBINE:
            setattr(a, name, handle.address(name))
        a.num_tokens, a.kind = handle.num_tokens, int(is_wide) | 2 * a.has_weights
        max_sms, limits = self._max_sms(), self.platform.limits
        launch = combine_launch(self.config, handle.num_tokens, turn.halves, max_sms, limits)
        self._launch(kernel, launch)

    # --- order of calls -------------------------------------------------------------------------------------------

    def _begin(self, op: int, do_check: bool = True) -> None:
        """Refuse what cannot start, raise what earlier calls have left behind, join the streams."""
        if self.is_closed:
            raise InvalidState("the buffer is closed; make a new one")
        if len(self._open[op]) >= self.config.max_in_flight:
            raise InvalidState(
                f"{OPS[op]}: the oldest of {len(self._open[op])} calls has not received yet, "
                f"{self.config.max_in_flight} may be in flight; call the oldest hook first"
            )
        if do_check and not self.platform.is_capturing():
            self.check()
        self._join()

    def _join(self) -> None:
        if self.platform.is_capturing():
            return
        stream = self.platform.stream()
        if self._last_stream is not None and self._last_stream != stream:
            self.platform.wait(self.platform.mark(self._last_stream))
        self._last_stream = stream

    def _run(self, op: int, launch: Callable[[HalfLaunch], None], is_split: bool) -> Callable[[], None] | None:
        """Launch a call, or its send half; then what is returned receives."""
        half = Half(op, self._open[op], self._join, launch)
        if not self.platform.is_capturing():
            self.num_calls += 1
        if is_split:
            launch(HalfLaunch(SEND_HALF, 0, 0))
            self._open[op].append(half)
            return half
        self._open[op].append(half)
        try:
            half.receive(BOTH_HALVES)
        except BaseException:
            self._open[op].remove(half)
            raise
        return None

    def _poison(self, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors if self.is_poisoned else ():
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xFF)

    def _max_sms(self) -> int:
        capturing = self.platform.is_capturing()
        max_sms, self._is_alone = self._share.limit(self.platform.stream(), capturing)
        if capturing:
            self._share.in_graphs = True
        return max_sms

    def _launch(self, kernel: Launcher, launch: Launch) -> None:
        stream = self.platform.stream()
        mode, at_once = "plain", launch.grid
        if self._is_alone or 2 * launch.grid <= self.platform.limits.num_sms:
            mode, at_once = "early", 2 * launch.grid  # the next kernel's blocks take their places beside this one's
        self._share.stream = stream
        self._share.width = max(self._share.width, at_once)
        kernel(launch.grid, launch.block, launch.shared_bytes, stream, mode)

    def _set_call(
        self, a: Any, options: CoreOptions, active_ranks: torch.Tensor | None, turn: HalfLaunch, waits: int
    ) -> None:
        mask = self.active_ranks if active_ranks is None else active_ranks
        a.call.mask, a.call.waits = mask.data_ptr(), waits
        a.call.halves, a.call.ahead, a.call.advance = turn
        a.call.timeout_ns, a.call.is_strict = int(options.timeout_s * 1e9), int(options.is_strict)

    # --- view and memory ------------------------------------------------------------------------------------------

    def tags(self) -> int:
        """Return the highest call number that this rank has used; waits for the GPU."""
        self.platform.synchronize()
        return max(int(self._words(name).max()) for name in ("dispatch_tags", "combine_tags"))

    def set_view(self, active: Sequence[bool], tag: int) -> None:
        """Get ready for an agreed view: every member calls this with equal arguments, and `open_view` before its calls.

        Until then a call, which only a graph can make, reaches no other rank: it ends at once, without them. Nobody
        makes a call of the view before all members are ready; who stores something of earlier calls meanwhile harms
        nobody.

        Args:
            active: who is in.
            tag: above everybody's `tags()`, so that nothing of earlier calls passes for new.
        """
        self._open[OP_DISPATCH].clear()
        self._open[OP_COMBINE].clear()
        self.platform.synchronize()
        self._agreed, self._is_open = ([bool(one) for one in active], tag), False
        self._write_words("peers", [self._own.address * (rank == self.config.rank) for rank in range(MAX_RANKS)])
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
        """Let call `tag` have been the last one of this rank, and all others have been in it."""
        for op in OPS.values():
            self._write_words(f"{op}_tags", [tag, tag])
            self._write_words(f"{op}_heard", [tag] * self.config.num_ranks)
        self._write_words("news", [0, 0, 0])  # who was dead may have a successor
        self._write_words("reported", [0, 0])

    def _note_calls(self, rank: int, tag: int) -> None:
        """Let all words that a process of `rank` has stored here be those of call `tag`, which none was.

        So none passes for one of a later call, neither what its process before has stored nor what is so old that its
        32 bits of a number come round. Rows stay: nobody looks at them without their flag.
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
        """What a replaced peer needs to attach this rank's region."""
        return self._own.blob

    def attach_peer(self, blob: bytes) -> LentRegion:
        """Map the region of a process that takes a rank's place; no call uses it before `replace_peer`.

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
        """Let kernels use another region for a rank, and unmap the one before; no call may be in flight."""
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

    @property
    def num_outstanding(self) -> int:
        """Calls that have been sent and not received."""
        return sum(not half.is_done for halves in self._open.values() for half in halves)

    def join(self) -> None:
        """Let the current stream go on behind everything that this buffer has put on any other."""
        if not self.is_closed:
            self._join()

    def lost(self) -> tuple[int, ...]:
        """Return the ranks that the calls since the last look have left out, without waiting for the GPU."""
        word = self._lost.words[0]
        if not word:
            return ()
        self._lost.words[0] = 0
        return tuple(rank for rank in range(self.config.num_ranks) if word >> rank & 1)

    def check(self) -> None:
        """Raise what a kernel has reported since the last look; costs a few loads of host memory."""
        error = take_report(self._report.words, self.config.rank)
        if error is not None:
            raise error

    def drain(self, grace_s: float) -> None:
        """Wait for the kernels in flight; abort them when they take longer than `grace_s`."""
        if self.is_closed or self._last_stream is None or self.platform.is_capturing():
            return
        mark, deadline = self.platform.mark(self._last_stream), time.monotonic() + grace_s
        while not self.platform.is_done(mark):
            if time.monotonic() > deadline:
                self.abort()
                break
            time.sleep(1e-4)
        self.platform.synchronize()

    def abort(self) -> None:
        """End every wait of the kernels in flight, from any thread; close the buffer afterwards."""
        self._abort.words[0] = 1

    def mark_dead(self, ranks: Sequence[int]) -> None:
        """Say which ranks are dead: waits for them end, also in kernels in flight. Any thread, one at a time."""
        self._abort.words[1] = sum(1 << rank for rank in ranks)

    def waiting(self) -> int:
        """Return a number that changes while a kernel that has waited for a millisecond goes on waiting. Any thread."""
        return self._abort.words[2]

    def close(self) -> None:
        """Give up all memory; results live on. Idempotent. No kernel may be in flight."""
        if self.is_closed:
            return
        self.is_closed = True
        for calls in self._open.values():
            calls.clear()  # their hooks must not launch anything any more
        self._share.leave()
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
        all_gather(b"attached")  # nobody may leave before everybody has copied its descriptors
        return regions

    def _words(self, name: str) -> torch.Tensor:
        layout = self.config.region_layout
        return self._own.lease(layout.offset(name), layout[name].nbytes, None).view(torch.int64)

    def _write_peers(self) -> None:
        self._write_words("peers", [0 if region is None else region.address for region in self._peers])

    def _write_words(self, name: str, values: Sequence[int]) -> None:
        self._words(name)[: len(values)].copy_(torch.tensor(values, dtype=torch.int64, device="cpu"))

    def _set_constants(self, args: Any, op: str) -> None:
        config, layout = self.config, self.config.region_layout
        call = args.call
        call.own, call.report, call.abort = self._own.address, self._report.address, self._abort.address
        call.lost, call.rank = self._lost.address, config.rank
        call.op = OP_DISPATCH if op == "dispatch" else OP_COMBINE
        call.peers_offset, call.reported_offset = layout.offset("peers"), layout.offset("reported")
        call.news_offset = layout.offset("news")
        call.tags_offset, call.end_offset = layout.offset(f"{op}_tags"), layout.offset(f"{op}_end")
        call.heard_offset, call.max_in_flight = layout.offset(f"{op}_heard"), config.max_in_flight
        args.at = config.places(op)
        args.num_topk, args.hidden, args.token_words = config.num_topk, config.hidden, config.token_words
        if op == "dispatch":
            args.num_experts, args.num_local_experts = config.num_experts, config.num_local_experts
            args.meta_words, args.owner_factor = config.meta_words, config.owner_factor
        else:
            args.weights_offset = layout.offset("combine_weights")
            args.num_rows = config.num_local_experts * config.capacity


def _signed(value: int, num_bits: int) -> int:
    return value - (1 << num_bits) if value >> (num_bits - 1) else value


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
