"""`Buffer`: dispatch tokens to the ranks that own their experts, combine the results back.

This file is the public face: it checks arguments, keeps one call at a time, and hands the work to the path of the
buffer's device (`cpu.py`, `throughput/gpu_path.py`). A call whose arguments are refused still takes part in the
exchange, as a refusal, so that the peers raise at once instead of waiting, and everybody's call numbers stay in step.
"""

from __future__ import annotations

import itertools
import time
import weakref
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from ..errors import EpeeError, InvalidArgument
from .calls import Calls
from .checks import (
    check_combine,
    check_dispatch,
    check_handle,
    check_payload,
    check_run,
    check_timeout,
)
from .config import PAYLOAD_DTYPES, BufferConfig
from .control.bootstrap import bear, group_of, refuse, size_of
from .control.inbox import OP_COMBINE, OP_DISPATCH, OP_GATHER, Exchange
from .control.messages import ControlPlane, refused_alike
from .handle import Combined, Dispatched, Handle, Payload, mask_of
from .latency.calls import LatencyCalls, Waits
from .latency.checks import check_only_in, check_options
from .latency.cpu import LatencyCpuPath
from .latency.gpu_path import LatencyCudaPath, latency_config
from .latency.types import LatencyCombined, LatencyDispatched, LatencyHandle, LatencyOptions, Quantisation
from .membership.group_view import seat_of
from .membership.lane import retire
from .paths import begin_lane, make_path, platform_of, return_all, settings, with_policy
from .streams import Lanes, RunOptions
from .throughput.cpu import CpuPath
from .throughput.gpu_path import CudaPath, throughput_config
from .throughput.order import CombineOrder

_buffer_ids = itertools.count(1)
_T = TypeVar("_T")
_Latent = TypeVar("_Latent", LatencyDispatched, LatencyCombined)


class Buffer(Calls):
    """Shared memory of the ranks of a group, through which tokens travel to experts and back.

    Construction is collective: all ranks of `group` make their buffer together, with equal arguments.

    Args:
        group: any c10d process group of the ranks (gloo, nccl ...), None for the default group. Used now, never in
            a call. A replacement in a group of the backend "epee" takes part in the buffer that runs.
        num_experts: over all ranks, a multiple of the number of ranks. Rank r owns `num_experts / num_ranks`
            experts, starting at r times that.
        hidden: elements of a row, a multiple of 8 (of 128 for FP8 pairs).
        num_topk: columns of `topk_idx`, 1 ... 32.
        max_tokens_per_rank: most tokens that one rank dispatches in a call.
        dtype: widest payload: bfloat16, float16, float32 or float64. Narrower ones and FP8 pairs fit as well.
        device: None or "cpu", or the GPU of this rank ("cuda" for the current one); the ranks are on CPUs or on GPUs.
        num_slots: results, and combine inputs, of each layout that may live in the arena at once (on GPUs both
            together).
        max_recv_rows: rows that a call can receive; None for `num_ranks * max_tokens_per_rank` in the rank layout
            (the worst case) and `1.5 * max_tokens_per_rank * num_topk` in the expert layout. Padding of the expert
            layout, `num_local_experts * (expert_alignment - 1)` rows, is always added.
        timeout: seconds that a call waits for a silent peer by default; None for EPEE_TIMEOUT_S.
        mode: "throughput", or "latency" for small batches: padded results per expert, a send and a receive half, masks
            of lost ranks (docs/low-latency.md). `num_slots` is then how many calls may be sent and not yet received.
        fault_mode, on_stall: throughput mode on CPUs: what a lost rank is ("raise" an error, or "mask": calls go on
            without it), and what becomes of one that is silent until the time-out ("error", "evict", "wait"). None: the
            group's, on the backend "epee"; else "raise", and "error" ("evict" in mode "mask").

    Memory: on CPUs each layout gets an arena at its first use, `2 * num_slots + 2` slots of `rows` rows; docs/buffer.md
    has the formula. That is address space: pages are taken when they are first written, and slots are reused lowest
    first. On GPUs `num_slots + 1` slots of the rank layout are taken at construction, and two of the expert layout at
    its first combine.

    After an error the buffer works. When ranks die, are voted out or leave, CPU tensors go on without them, on groups
    of the backend "epee" also with those that come in their place; GPUs do so after `sync` (docs/buffer.md), latency
    mode in its own way (docs/low-latency.md).

    Raises:
        InvalidArgument: a rule above is broken (the peers raise `MismatchError`).
        MismatchError: the ranks disagree; the same text on all of them.
        UnsupportedError: several hosts, not Linux on x86-64, or a device that is not served yet.
        ResourceError: no memory, descriptors or permission.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_experts: int,
        hidden: int,
        num_topk: int,
        max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        num_slots: int = 2,
        max_recv_rows: int | None = None,
        timeout: float | None = None,
        mode: str = "throughput",
        fault_mode: str | None = None,
        on_stall: str | None = None,
    ) -> None:
        super().__init__()
        self._id = next(_buffer_ids)
        members = group_of(group)
        self.rank = members.rank()
        self.num_ranks = size_of(members)
        self.config = BufferConfig(
            self.num_ranks,
            num_experts,
            hidden,
            num_topk,
            max_tokens_per_rank,
            dtype,
            num_slots,
            max_recv_rows or 0,
            mode=mode,
        )
        seat = seat_of(members, self.num_ranks)
        refusal: EpeeError | None = None
        self._timeout, poison, platform = 0.0, False, None
        try:
            self._timeout, poison = settings(self.config, max_recv_rows, timeout)
            platform = self._platform_of(device)
            if platform is not None:
                self.config = replace(self.config, path="cuda", device=platform.device)
                if not self.config.is_latency:
                    share = "descriptors" if platform.keeps_addresses else "cudaIpc"
                    self.config = replace(self.config, share=share)
                (latency_config if self.config.is_latency else throughput_config)(self.config, self.rank).check()
            self.config = with_policy(self.config, seat, fault_mode, on_stall)
        except Exception as error:  # noqa: BLE001 - raised by `refuse`, after the peers have heard of it
            refusal = error if isinstance(error, EpeeError) else InvalidArgument(f"{type(error).__name__}: {error}")
        retire()
        if refusal is not None:
            refuse(members, self.config, refusal)
        born = bear(self.config)
        self._exchange = Exchange(self.config, self.rank, born.inboxes, born.watch, self._closing.check)
        if self.config.is_lane:
            begin_lane(members, seat, self._exchange, born.watch, self._timeout, self._closing.check)
        try:
            self._control = ControlPlane(self.config, self.rank, self._exchange)
            self._lanes = Lanes(self.config.device)
            self._path = self._on_device(
                lambda: make_path(self._control, self._id, platform, born.watch, self._closing, (self._timeout, poison))
            )
            self._latency = self._make_latency()
        except BaseException:
            born.close()
            self._exchange.release()
            self._exchange.membership.close()
            retire()
            raise
        self._exchange.membership.forget = self._path.close
        # a buffer that is dropped without close() returns its memory as well; its job hears of it later (`retire`)
        self._finalizer = weakref.finalize(self, return_all, self._path, born, self._exchange)
        self._finalizer.atexit = False
        self._closed = False

    def dispatch(
        self,
        x: Payload,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        is_token_in_rank: torch.Tensor | None = None,
        handle: Handle | None = None,
        layout: str = "rank",
        expert_alignment: int = 1,
        timeout: float | None = None,
        num_sms: int | None = None,
        async_op: bool = False,
        previous_event: object = None,
        sync: bool = True,
        use_fp8: bool = False,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int | None = None,
        return_hook: bool = False,
    ) -> Dispatched:
        """Send each token to the ranks that own its experts. Collective.

        Args:
            x: `[num_tokens, hidden]` bfloat16, float16, float32 or float64, no wider than the buffer's dtype; or a
                pair (float8_e4m3fn `[num_tokens, hidden]`, scales `[num_tokens, hidden / 128]` float32 or
                `[num_tokens, hidden / 512]` packed int32), scales with any strides. Not modified; may be reused on
                return (GPU: by work behind the call). On GPUs rows lie in one piece and begin at multiples of 16 bytes.
            topk_idx: `[num_tokens, num_topk]` int64 expert ids, -1 for none. An expert that stands twice in a row
                counts twice.
            topk_weights: `[num_tokens, num_topk]` float32 (or float64 beside a float64 x).
            is_token_in_rank: `[num_tokens, num_ranks]` bool, routing without experts (rank layout only).
            handle: of an earlier dispatch: the same rows travel again, no counts are exchanged; give no routing.
                Layout and alignment are the handle's.
            layout: "rank": one row per (source rank, token), in this order. "expert": one row per (local expert,
                source rank, token, k), each expert's block padded with zero rows to `expert_alignment`.
            expert_alignment: 1 ... 4096 rows.
            timeout: seconds to wait for a silent peer.
            num_sms: multiprocessors of the GPU to use; None for the default.
            async_op: run on the buffer's own stream, behind the current one, or behind `previous_event`; wait for
                `.event` before the results are used.
            previous_event: an `.event`, or a `torch.cuda.Event`, for which the call waits first.
            sync: False: the host does not wait for the counts, so results have as many rows as may come (ids of the
                others are -1, their values undefined) and `handle.recv_counts` tells how many there are. Needed while
                a CUDA graph is recorded. On the CPU results have their exact size all the same.
            use_fp8, round_scale, use_ue8m0: latency mode: quantise x on the way, with float32 scales per 128 channels,
                powers of two, packed four to an int32.
            active_ranks: latency mode: `[num_ranks or more]` int32, 1 = active, read and written: a rank that is 0, or
                does not come in time, is left out as a whole. Without it a rank that does not come is an error.
            timeout_us: `timeout` in microseconds, latency mode only.
            return_hook: latency mode: only send; `.hook()` receives.

        Returns:
            `Dispatched`. Its `x` lives as long as the tensor does; with `num_slots` of them alive, further results
            are ordinary copies.

        Raises:
            InvalidArgument: an argument is wrong (the peers raise `MismatchError`), or the routing needs more rows
                than there is room for (on every rank, before any row moves).
            MismatchError: the ranks made different calls, or a peer's call was refused. Same text on all ranks.
            StaleHandleError: the handle is of another buffer or epoch.
            CommTimeoutError: a peer did not come in time.
            RankFailedError: a peer has died. The next call runs without it; on GPUs once all survivors have called
                `sync`.
            EvictedError: the others have gone on without this rank.
            InvalidState, ForkError, AbortedError: closed, re-entered, forked, or closed by another thread meanwhile.
        """
        run = RunOptions(num_sms, async_op, previous_event, sync)
        how, waits = (
            Quantisation(use_fp8, round_scale, use_ue8m0),
            Waits(active_ranks, timeout_us, timeout, return_hook),
        )

        def work(deadline: float) -> Dispatched:
            with self._lanes.lane(check_run(run)) as lane:
                if self._latency is not None:
                    check_only_in("throughput", {"is_token_in_rank": is_token_in_rank, "handle": handle})
                    check_only_in("throughput", {"layout": layout != "rank", "expert_alignment": expert_alignment != 1})
                    return self._hooked(self._latency.dispatch(x, topk_idx, topk_weights, how, waits, lane, run))
                if not (use_fp8 is round_scale is use_ue8m0 is False) or waits.are_given:
                    check_only_in("latency", {**how._asdict(), **waits._replace(timeout=None)._asdict()})
                known = None if handle is None else check_handle(handle, self._id, self._exchange.epoch)
                call = check_dispatch(
                    self.config,
                    check_payload(x, self.config),
                    topk_idx,
                    topk_weights,
                    is_token_in_rank,
                    known,
                    layout,
                    expert_alignment,
                    self._members,
                )
                return self._rows.dispatch(call, deadline, lane, run)

        return self._call(OP_DISPATCH, timeout, work)

    def combine(
        self,
        y: torch.Tensor,
        handle: Handle | LatencyHandle,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
        order: CombineOrder | None = None,
        timeout: float | None = None,
        num_sms: int | None = None,
        async_op: bool = False,
        previous_event: object = None,
        partial_dtype: torch.dtype | None = None,
        active_ranks: torch.Tensor | None = None,
        timeout_us: int | None = None,
        return_hook: bool = False,
    ) -> Combined:
        """Bring expert outputs back to the tokens' ranks and sum them. Collective.

        Args:
            y: `[num_recv, hidden]`, a row for each row of the dispatch. Rank layout: the caller has weighted and
                summed its local experts. Expert layout: plain expert outputs; epee multiplies by the weights of the
                dispatch (one if it had none). Memory from `combine_input` is not copied; on GPUs nor is the `x` of a
                dispatch.
            handle: of the dispatch.
            topk_weights: to be sent back: `[num_recv, num_topk]` (rank layout), `[num_recv]` (expert layout).
            bias: one or two `[num_tokens, hidden]`, of y's dtype or float32, added before the rounding.
            out: `[num_tokens, hidden]` of y's dtype, written instead of new memory; may be a bias, must not share
                memory with y.
            order: of the additions; None for epee's own, which is the fastest.
            timeout: seconds to wait for a silent peer.
            num_sms, async_op, previous_event: as in `dispatch`.
            partial_dtype: latency mode: what each rank's sum is rounded to before it crosses, bfloat16 (default) or
                float32. There y is padded like the dispatch's result, epee multiplies by the weights, and
                `topk_weights`, `[num_tokens, num_topk]` of this rank's tokens, replaces those of the dispatch.
            active_ranks, timeout_us, return_hook: as in `dispatch`.

        Returns:
            `Combined`: for each token the sum over the ranks, ascending, in float32 (float64 for float64), rounded
            once; exact zeros for tokens without expert.

        Raises:
            As `dispatch`; `out` is not written when an error is raised. On GPUs nobody waits for a combine: what goes
            wrong on the way is raised by the next call, or by `check`, and `out` is then undefined.
        """
        run = RunOptions(num_sms, async_op, previous_event)
        waits = Waits(active_ranks, timeout_us, timeout, return_hook)

        def work(deadline: float) -> Combined:
            with self._lanes.lane(check_run(run)) as lane:
                if self._latency is not None:
                    check_only_in("throughput", {"bias": bias, "order": order})
                    partial = partial_dtype or torch.bfloat16
                    return self._hooked(self._latency.combine(y, handle, topk_weights, partial, out, waits, lane, run))
                if partial_dtype is not None or waits.are_given:
                    check_only_in("latency", {"partial_dtype": partial_dtype, **waits._replace(timeout=None)._asdict()})
                known = check_handle(handle, self._id, self._exchange.epoch)
                call = check_combine(self.config, y, known, topk_weights, bias, out, order, self._members)
                return self._rows.combine(call, deadline, lane, run)

        return self._call(OP_COMBINE, timeout, work)

    def all_gather_bytes(self, data: bytes, timeout: float | None = None) -> list[bytes]:
        """Give every rank the bytes of all ranks. Collective; also a barrier of the ranks' host threads.

        For what callers of this buffer must agree on between two calls, without the process group.

        Args:
            data: equally long on all ranks.
            timeout: seconds to wait for a silent peer.

        Returns:
            One byte string per rank, in rank order.

        Raises:
            As `dispatch`.
        """

        def work(deadline: float) -> list[bytes]:
            if not isinstance(data, bytes):
                raise InvalidArgument(f"data must be bytes, got {type(data).__name__}")
            return self._control.all_gather_bytes(data, deadline)

        return self._call(OP_GATHER, timeout, work)

    @property
    def epoch(self) -> int:
        """The epoch in which the last call ran; handles of other epochs are stale. 0 for the only rank of a group."""
        return self._exchange.epoch

    def refuse(self, error: Exception, timeout: float | None = None) -> None:
        """Take part in the peers' next call only to tell them that this rank cannot make it; they raise at once.

        On GPUs, and in latency mode, that call must be a dispatch, a combine or (throughput) a barrier.

        For callers of this buffer that find something wrong with their own arguments, before they raise `error`.

        Args:
            error: its text becomes part of the peers' `MismatchError`.
            timeout: seconds to wait for peers that are still in an earlier call.
        """
        op = OP_DISPATCH if self.config.is_cuda or self.config.is_latency else OP_GATHER
        self._alone(lambda: self._refuse(op, error, time.monotonic() + check_timeout(timeout, self._timeout)))

    def check(self) -> None:
        """Raise what has gone wrong on this rank's GPU since the last call. Local; does not wait for the GPU.

        Every call does so when it starts. Synchronise first to be sure of what has been launched.
        """
        self._alone(self._path.check)

    def join(self) -> None:
        """Let the current stream wait for all work of this buffer on other streams. Local.

        Buffers that are used in turn, on several streams, share the GPU better when each is joined before the next is
        used: while calls of several buffers may overlap, each of them takes only part of the multiprocessors.
        """
        self._alone(self._path.join)

    def sync(self, active_ranks: torch.Tensor | None = None, timeout: float | None = None) -> torch.Tensor:
        """Agree with the other ranks on who takes part. Collective for all ranks that live; a barrier of their hosts.

        Latency mode: ranks that come are in, whoever had counted them out; ranks that are dead, or do not come in time,
        are not. All go on from the same call, in a new epoch; older handles are stale. No call may be waiting for its
        hook. On a group of the backend "epee" it takes in processes that took the places of lost ranks and are making
        this buffer. On GPUs it waits for the GPU, and graphs serve on.

        Throughput mode on GPUs: ranks that come are in. It waits for the GPU, a new epoch begins, and older handles are
        stale, in graphs as well. Processes that took the places of lost ranks come in as in latency mode, unless memory
        is lent by cudaIpc (docs/limits.md); graphs with dispatches of their own serve on.

        Throughput mode on CPUs: with a mask on all ranks, ranks that come are in, those that were put out before as
        well; who does not come is put out of this buffer and stays in its group. A new epoch begins with the next call;
        steps that were begun are over. Without a mask it is a call like others: its end tells the members of the
        present epoch, and silent ranks are the affair of `on_stall`.

        Args:
            active_ranks: this rank's mask; whom it counts out is not waited for long. The agreed one is written into
                it.
            timeout: seconds to wait for a silent rank.

        Returns:
            `[num_ranks]` int32 on the CPU, 1 = takes part; equal on all of them.

        Raises:
            NoQuorumError: too few ranks came to decide, or the others agreed without this one.
            InvalidState: a hook has not been called, or a graph is recorded.
            MismatchError: throughput mode on CPUs: a rank that is counted on makes another call.
            As `dispatch`, in throughput mode on CPUs without a mask.
        """
        latency, path = self._latency, self._path
        if latency is not None:
            return self._alone(
                lambda: latency.sync(active_ranks, time.monotonic() + check_timeout(timeout, self._timeout))
            )
        if isinstance(path, CudaPath):
            how = check_options(self.config, active_ranks, None, timeout, False, False, self._timeout)
            return self._alone(lambda: path.sync(how.active_ranks, time.monotonic() + how.timeout_s))

        if active_ranks is not None:
            wait = check_options(self.config, active_ranks, None, timeout, False, False, self._timeout)
            return self._alone(lambda: self._agree(wait))

        def work(deadline: float) -> torch.Tensor:
            self._meet(deadline)
            return mask_of(self._exchange.members, self.num_ranks)

        return self._call(OP_GATHER, timeout, work)

    def _agree(self, how: LatencyOptions) -> torch.Tensor:
        """Run `sync` on a lane."""
        assert how.active_ranks is not None
        counted = sum(1 << rank for rank, mark in enumerate(how.active_ranks[: self.num_ranks].tolist()) if mark)
        deadline = time.monotonic() + how.timeout_s
        with refused_alike(self._control, deadline):
            agreed = self._exchange.membership.agree(counted, deadline)
        mask = mask_of(agreed.ranks, self.num_ranks)
        how.active_ranks[: self.num_ranks] = mask
        self._exchange.membership.note_agreed(agreed)  # last: who is interrupted before it gets the same again
        return mask

    def combine_input(self, handle: Handle | LatencyHandle, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory for `y` that `combine` need not copy. Local.

        Args:
            handle: of the dispatch whose outputs will be written.
            dtype: of y, the buffer's by default.

        Returns:
            `[num_recv, hidden]` (latency mode: padded), uninitialised. Do not write into it after the combine: peers
            may still read it. Ordinary memory when all slots are in use.
        """

        def work() -> torch.Tensor:
            if self._latency is not None:
                return self._latency.combine_input(handle, dtype)
            kind = self.config.dtype if dtype is None else dtype
            if kind not in PAYLOAD_DTYPES or kind.itemsize > self.config.dtype.itemsize:
                raise InvalidArgument(f"dtype must be a payload no wider than {self.config.dtype}, got {kind}")
            return self._rows.combine_input(check_handle(handle, self._id, self._exchange.epoch), kind)

        return self._alone(work)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that this rank maps for others: its inbox and the arenas made so far."""
        if self._closed:
            return 0
        return self._exchange.membership.inbox_bytes + self._path.nbytes

    @property
    def max_num_sms(self) -> int:
        """Multiprocessors of this rank's GPU, the most that `num_sms` can be; 0 on the CPU, where it means nothing."""
        return self._path.max_num_sms

    @property
    def takes_replacements(self) -> bool:
        """Whether a process that takes a lost rank's place comes in: in `sync` (latency mode, GPUs), or in a call."""
        if isinstance(self._path, (LatencyCpuPath, LatencyCudaPath)):
            return self._path.takes_replacements
        return self._exchange.membership.takes_replacements

    @property
    def num_copied_results(self) -> int:
        """Dispatches whose result had to be copied because `num_slots` results were still alive."""
        return self._path.num_copied

    def _end_waits(self) -> None:
        self._path.abort()

    def _give_back(self) -> None:
        self._finalizer()
        retire()

    _platform_of = staticmethod(platform_of)

    @property
    def _rows(self) -> CpuPath | CudaPath:
        """The path of throughput mode."""
        assert not isinstance(self._path, (LatencyCpuPath, LatencyCudaPath))
        return self._path

    def _make_latency(self) -> LatencyCalls | None:
        if not isinstance(self._path, (LatencyCpuPath, LatencyCudaPath)):
            return None
        return LatencyCalls(self.config, self._path, self._exchange, self._id, self._timeout)

    def _hooked(self, result: _Latent) -> _Latent:
        """Let one hook run at a time, as calls do."""
        hook = result.hook
        if hook is not None:
            result.hook = lambda: self._alone(hook)
        return result
