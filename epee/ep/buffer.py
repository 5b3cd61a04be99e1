"""`Buffer`: dispatch tokens to the ranks that own their experts, combine the results back.

This file is the public interface: it checks arguments and hands the call to the path of the buffer's device
(`throughput/cpu.py`, `throughput/gpu_path.py`); `base.py` has the part shared with `latency/buffer.py`. A call whose
arguments are refused still takes part in the exchange, as a refusal (`attempt.py`), so that the peers raise at once
instead of waiting, and the call numbers of all ranks stay in step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from ..errors import InvalidArgument, UnsupportedError
from ..gpu.payload import PAYLOAD_DTYPES
from ..gpu.platform import Platform
from ..link.topology import Topology
from ..profiling import ranged
from ..untraced import untraced_methods
from ..values import shown
from .attempt import CallAttempt, CallsAgain
from .base import SharedBuffer
from .checks import (
    CombineCall,
    DispatchCall,
    GivenRouting,
    carries_gradient,
    check_combine,
    check_dispatch,
    check_handle,
    check_run,
    warn_of_gradients,
)
from .config import BufferConfig
from .handle import Combined, Dispatched, Handle, Payload
from .members.bootstrap import group_of, size_of
from .members.header import OP_COMBINE, OP_DISPATCH
from .paths import Making, Path, PathOverHosts
from .plans import BY_TOPK, CheckedCalls, KnownPlans
from .streams import RunOptions
from .throughput.cpu import CpuPath
from .throughput.gpu_hosts_path import CudaPathOverHosts, check_over_hosts
from .throughput.gpu_path import CudaPath, throughput_config

if TYPE_CHECKING:
    from ..view.group import GroupInView
    from .throughput.hosts.path import HostsPath

DispatchLike: TypeAlias = "Callable[[Payload, torch.Tensor, torch.Tensor], Dispatched | None]"


@untraced_methods
class Buffer(SharedBuffer):
    """Shared memory of the ranks of a group, through which tokens travel to experts and back.

    Construction is collective: all ranks of `group` make their buffer together, with equal arguments.

    Args:
        group: any c10d process group of the ranks (gloo, nccl ...), None for the default group. Used now, never in
            a call. A replacement in a group of the backend "epee" takes part in the buffer that runs.
        num_experts: over all ranks, a multiple of the number of ranks. Rank r owns `num_experts / num_ranks`
            experts, starting at r times that.
        hidden: elements of a row, a multiple of 8 (of 16 for FP8 pairs).
        num_topk: columns of `topk_idx`, 1 ... 32.
        max_tokens_per_rank: most tokens that one rank dispatches in a call.
        dtype: widest payload: bfloat16, float16, float32 or float64. Narrower ones and FP8 pairs fit as well.
        device: None or "cpu", or the GPU of this rank ("cuda" for the current one); the ranks are on CPUs or on GPUs.
        num_slots: results, and combine inputs, of each layout that may live in the arena at once (on GPUs both
            together).
        max_recv_rows: rows that a call can receive; None for `num_ranks * max_tokens_per_rank` in the rank layout
            (the worst case) and `1.5 * max_tokens_per_rank * num_topk` in the expert layout. Padding of the expert
            layout, `num_local_experts * (expert_alignment - 1)` rows, is always added.
        timeout: seconds that a call waits for a silent peer by default. None: the group's `op_timeout`, else
            EPEE_TIMEOUT_S, else torch's `timeout` of the group.
        fault_mode, on_stall: on CPUs: the effect of a lost rank ("raise" an error, or "mask": calls continue without
            it), and the handling of one that is silent until the timeout ("error", "evict", "wait"). None: the group's,
            on the backend "epee"; else "raise", and "error" ("evict" in mode "mask").
        wide_partials: over several hosts: what one host has summed for a token travels in float32, twice the bytes of
            bfloat16, and a combine rounds once in all. Changes nothing on one host.

    Memory: on CPUs each layout gets an arena at its first use, `2 * num_slots + 2` slots of `rows` rows; docs/buffer.md
    has the formula. That is address space: pages are taken when they are first written, and slots are reused lowest
    first. On GPUs `num_slots + 1` slots of the rank layout are taken at construction, and two of the expert layout at
    its first combine; `of_sizes` serves calls of other sizes out of the same memory.

    After an error the buffer stays usable. When ranks die, are voted out or leave, calls on CPU tensors continue
    without them, on groups of the backend "epee" also with their replacements; calls on GPUs do so after `sync`
    (docs/buffer.md).

    `LatencyBuffer` is for small batches.

    Over several hosts (docs/hosts.md): a token crosses the network once for each host that it goes to, and comes back
    as one sum per host. After the loss of a rank all ranks raise, or with `fault_mode="mask"` go on. On GPUs a part
    of it exists (docs/limits.md): other calls raise `UnsupportedError`, and a loss ends the buffer.

    Raises:
        InvalidArgument: a rule above is broken (the peers raise `MismatchError`).
        MismatchError: the ranks disagree; the same text on all of them.
        UnsupportedError: not Linux on x86-64, or a device, or options on GPUs of several hosts, not served yet.
        ResourceError: no memory, descriptors or permission.
    """

    _rows: CpuPath | CudaPath | HostsPath
    _gpu: CudaPath | None = None  # the same, if calls may be cached
    again: CallsAgain | None = None
    _check_dispatch: Callable[..., DispatchCall]
    _check_combine: Callable[..., CombineCall]

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
        fault_mode: str | None = None,
        on_stall: str | None = None,
        wide_partials: bool = False,
    ) -> None:
        members = group_of(group)
        sizes = num_experts, hidden, num_topk, max_tokens_per_rank
        config = BufferConfig(size_of(members), *sizes, dtype, num_slots, 0 if max_recv_rows is None else max_recv_rows)
        config = replace(config, wide_partials=wide_partials is True)
        refusal = None
        if not isinstance(wide_partials, bool):
            refusal = InvalidArgument(f"wide_partials must be True or False, got {shown(wide_partials)}")
        if max_recv_rows == 0:
            refusal = InvalidArgument("max_recv_rows must be None or an int of at least 1, got 0")
        super().__init__(members, config, device, timeout, fault_mode, on_stall, refusal)

    @classmethod
    def of_bytes(
        cls,
        group: dist.ProcessGroup | None,
        room_bytes: int,
        expert_bytes: int = 0,
        *,
        device: torch.device | str,
        num_slots: int = 2,
        timeout: float | None = None,
    ) -> Buffer:
        """Make a GPU buffer from bytes alone, for calls of several shapes by `of_sizes`. Collective.

        Its own shape is the smallest there is, and not meant for calls.

        Args:
            group, device, num_slots, timeout: as of `Buffer`.
            room_bytes: of all slots, `num_slots + 1`, together.
            expert_bytes: of the two slots from which expert-layout rows are pulled; 0: these are lent at the first
                combine of that layout, and whenever one needs larger ones. Both collective.

        Raises:
            EpeeError: the errors of `Buffer`.
        """
        self = cls.__new__(cls)
        members = group_of(group)
        num_ranks = size_of(members)
        sizes = num_ranks, 8, 1, 1, torch.bfloat16, num_slots, 0
        config = BufferConfig(num_ranks, *sizes, room_bytes=room_bytes, room_expert_bytes=expert_bytes)
        refusal = None
        if not room_bytes:
            refusal = InvalidArgument(f"room_bytes must be an int of at least 1, got {shown(room_bytes)}")
        SharedBuffer.__init__(self, members, config, device, timeout, refusal=refusal)
        return self

    def of_sizes(
        self,
        *,
        num_experts: int,
        hidden: int,
        num_topk: int,
        max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        max_recv_rows: int | None = None,
    ) -> Buffer:
        """Return a buffer for calls of other sizes over the memory of this one, which is on a GPU. Local.

        Both take part in the same sequence of calls: calls of one wait for those of the other. All ranks make each call
        by buffers of equal sizes; a handle serves the buffer whose dispatch made it. Slots are shared, results of one
        stay as they are while the other is used. Closing one closes all; without close, the memory lives as long as the
        last of them.

        Args:
            num_experts, hidden, num_topk, max_tokens_per_rank, dtype, max_recv_rows: as of `Buffer`.

        Raises:
            InvalidArgument: a rule of `Buffer` is broken, or a slot has no room for such calls (`fits`).
            UnsupportedError: this buffer is on CPUs.
            InvalidState: closed.
        """
        sizes = num_experts, hidden, num_topk, max_tokens_per_rank, dtype
        if max_recv_rows == 0:
            raise InvalidArgument("max_recv_rows must be None or an int of at least 1, got 0")
        config = BufferConfig(self.num_ranks, *sizes, max_recv_rows=0 if max_recv_rows is None else max_recv_rows)
        with self._turns.queue(), self._turns:
            path = self._gpu_path()
            config = self._like_mine(config)
            config.check()
            other = self._beside(config)
            other._rows = other._gpu = path.of_sizes(config, other._id)
            other._find_again(other._gpu)
            return other

    def fits(self, config: BufferConfig) -> bool:
        """Return whether `of_sizes` has room for calls of these sizes. Local; raises as `slot_bytes_for`."""
        return self.slot_bytes_for(self._like_mine(config)) <= self._gpu_path().slot_bytes

    @staticmethod
    def slot_bytes_for(config: BufferConfig) -> int:
        """Return the bytes of a slot on a GPU that calls of these sizes need; `num_slots + 1` of them are a room.

        Raises:
            InvalidArgument: no buffer on GPUs can be made for them.
        """
        config.check()
        sizes = throughput_config(replace(config, room_bytes=0, room_expert_bytes=0), 0)
        sizes.check()
        return sizes.needed_slot_bytes

    @staticmethod
    def expert_slot_bytes_for(config: BufferConfig, expert_alignment: int = 1) -> int:
        """Return the bytes of a slot for rows of the expert layout that such calls need; two of them are a room.

        Raises:
            EpeeError: the errors of `slot_bytes_for`.
        """
        config.check()
        sizes = throughput_config(replace(config, room_bytes=0, room_expert_bytes=0), 0)
        return sizes.expert_slot_bytes(expert_alignment)

    def _gpu_path(self) -> CudaPath:
        if self._gpu is None:
            raise UnsupportedError("a buffer on CPUs serves calls of one shape; make another one for other sizes")
        return self._gpu

    def _like_mine(self, config: BufferConfig) -> BufferConfig:
        """Return other sizes with what this buffer was made with."""
        mine = self.config
        return replace(
            mine,
            num_experts=config.num_experts,
            hidden=config.hidden,
            num_topk=config.num_topk,
            max_tokens_per_rank=config.max_tokens_per_rank,
            dtype=config.dtype,
            max_recv_rows=config.max_recv_rows,
        )

    def _on_gpu(self, config: BufferConfig, platform: Platform) -> BufferConfig:
        share = "descriptors" if platform.keeps_addresses else "cudaIpc"
        config = replace(config, path="cuda", device=platform.device, share=share)
        islands = self._topology.hosts if config.num_hosts > 1 else ()
        throughput_config(config, self.rank, islands).check()
        return config

    def _over_hosts(self, config: BufferConfig, topology: Topology, is_on_gpu: bool) -> BufferConfig:
        if is_on_gpu:
            check_over_hosts(config)
        return replace(config, num_hosts=topology.num_hosts)

    def _make_path_over_hosts(self, topology: Topology, job_handle: GroupInView, poison: bool) -> PathOverHosts:
        from .members.exchange import HostsExchange
        from .throughput.hosts.path import HostsPath

        exchange = self._exchange
        assert isinstance(exchange, HostsExchange)

        self._check_on_cpu()
        self._rows = HostsPath(exchange, self._id, topology, job_handle, poison)
        return self._rows

    def _make_path(self, making: Making, platform: Platform | None, poison: bool) -> Path:
        if platform is None:
            self._check_on_cpu()
            self._rows = CpuPath(making, poison)
        elif making.islands:
            self._rows = self._gpu = over_hosts = CudaPathOverHosts(making, platform, self._timeout)
            over_hosts.set_poison(poison)
            self._remember_checks()
        else:
            self._rows = self._gpu = gpu = CudaPath(making, platform, self._timeout)
            gpu.set_poison(poison)
            self._find_again(gpu)
        return self._rows

    def _check_on_cpu(self) -> None:
        """Check all arguments of each call."""
        self._check_dispatch = partial(check_dispatch, self.config)
        self._check_combine = partial(check_combine, self.config)

    def _remember_checks(self) -> CheckedCalls:
        """Check arguments once for calls with equal cache keys."""
        self._checked = checked = CheckedCalls(self.config)
        self._check_dispatch, self._check_combine = checked.dispatch, checked.combine
        return checked

    def _find_again(self, path: CudaPath) -> None:
        """Enable the fast path for cached calls."""
        checked = self._remember_checks()
        self._known = known = KnownPlans(path.shape, checked, self._exchange, self._id)
        calls = partial(path.dispatch_again, known), partial(path.combine_again, known)
        self.again = CallsAgain(self._turns, self._exchange, path, self._call_streams, self._timeout, *calls)

    def dispatches_like(
        self,
        x: Payload,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        how: tuple[str, int],
        num_sms: int | None,
        sync: bool,
    ) -> DispatchLike | None:
        """Return a function for dispatches that equal one that has been made, which skips the comparison of the
        tensors; None if that is not possible: on CPUs, or for this call.

        Args:
            x, topk_idx, topk_weights, num_sms, sync: of that call.
            how: its layout and alignment.

        Returns:
            A function that makes a call, given x, topk_idx and topk_weights with the properties of these; it returns
            None without side effects if the call must take the ordinary path. Raises as `dispatch`.
        """
        if self._gpu is None or self.again is None:
            return None
        plan = self._known.dispatch(x, topk_idx, topk_weights, BY_TOPK, how, num_sms, sync)
        return None if plan is None else partial(self.again.make, OP_DISPATCH, self._gpu.dispatch_like, plan)

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
        capacity: int | None = None,
        timeout: float | None = None,
        num_sms: int | None = None,
        async_op: bool = False,
        previous_event: object = None,
        sync: bool = True,
    ) -> Dispatched:
        """Send each token to the ranks that own its experts. Collective.

        Args:
            x: `[num_tokens, hidden]` bfloat16, float16, float32 or float64, no wider than the buffer's dtype; or a
                pair (float8_e4m3fn `[num_tokens, hidden]`, scales `[num_tokens, 1 ... hidden / 16]` float32 or int32,
                1023 at most, with any strides): scales of any block size travel as bytes. Not modified; may be reused
                on return (GPU: by work after the call). On GPUs rows are contiguous and begin at multiples of 16
                bytes.
            topk_idx: `[num_tokens, num_topk]` int64 expert ids, -1 for none. An expert that occurs twice in a row
                counts twice.
            topk_weights: `[num_tokens, num_topk]` float32 (or float64 beside a float64 x).
            is_token_in_rank: `[num_tokens, num_ranks]` bool, routing without experts (rank layout only).
            handle: of an earlier dispatch: the same rows travel again, and on one host no counts; give no routing.
                Layout and alignment are the handle's.
            layout: "rank": one row per (source rank, token), in this order. "expert": one row per (local expert,
                source rank, token, k), each expert's block padded with zero rows to `expert_alignment`.
            expert_alignment: 1 ... 4096 rows.
            capacity: the most rows that a rank receives, equal on all ranks; rank layout only, not with a handle. Rows
                beyond it, in (source rank, token) order, are dropped: they are not sent, and in combines, and cached
                dispatches by the handle, it is as if their tokens had not gone to that rank. `num_dropped` of the
                result and `lost_weight` of a combine give their number and weight.
            timeout: seconds to wait for a silent peer; those that come last have as long again for their rows.
            num_sms: multiprocessors of the GPU to use; None for the default.
            async_op: run on the buffer's own stream, after the current one, or after `previous_event`; wait for
                `.event` before the results are used.
            previous_event: an `.event`, or a `torch.cuda.Event`, for which the call waits first.
            sync: False: the CPU does not wait for the counts, so results have the maximum number of rows (`capacity` at
                most; ids of the others are -1, their values undefined) and `handle.recv_counts` gives the number of
                rows. Needed while a CUDA graph is recorded. On the CPU results have their exact size all the same.

        Returns:
            `Dispatched`. Its `x` lives as long as the tensor does; with `num_slots` of them alive, further results
            are ordinary copies.

        Raises:
            InvalidArgument: an argument is wrong (the peers raise `MismatchError`), or the routing needs more rows
                than there is room for (on every rank, before any row moves).
            UnsupportedError: `capacity` in the expert layout.
            MismatchError: the ranks made different calls, or a peer's call was refused. Same text on all ranks.
            StaleHandleError: the handle is of another buffer or epoch.
            CommTimeoutError: a peer was silent until the timeout.
            RankFailedError: a peer has died. The next call runs without it; on GPUs once all survivors have called
                `sync`.
            EvictedError: the others have continued without this rank.
            InvalidState, ForkError, AbortedError: closed, re-entered, forked, or closed by another thread meanwhile.
        """
        cached = None if timeout is not None else self.again
        if cached is not None and not carries_gradient(x, topk_weights):  # otherwise the ordinary path, which warns
            others = is_token_in_rank, handle, capacity
            given = x, topk_idx, topk_weights, others, layout, expert_alignment, num_sms, sync
            found = None
            if async_op is True:
                found = cached.dispatch_async(previous_event, *given)
            elif async_op is False and previous_event is None:
                found = cached.dispatch(*given)
            if found is not None:
                return found
        routing = GivenRouting(topk_idx, is_token_in_rank, handle, capacity)
        run = RunOptions(num_sms, async_op, previous_event, sync)
        return self._dispatch(x, routing, (topk_weights, layout, expert_alignment), run, timeout)

    @ranged
    def _dispatch(
        self, x: Payload, routing: GivenRouting, others: tuple[Any, Any, Any], run: RunOptions, timeout: float | None
    ) -> Dispatched:
        """Run a dispatch by the ordinary path: check it, enter its epoch, notify the peers if it is refused."""
        with self._turns.queue(), self._turns:
            attempt = CallAttempt(self._exchange, self._path, OP_DISPATCH, timeout, self._timeout)
            while True:
                with attempt as deadline, self._call_streams.call_stream(check_run(run)) as call_stream:
                    if carries_gradient(x, others[0]):
                        warn_of_gradients("Buffer.dispatch")
                    if routing.handle is not None:
                        check_handle(routing.handle, self._id, self._exchange.epoch)
                    members = self._exchange.reduced_members
                    call = self._check_dispatch(x, routing, others, members)
                    return self._rows.dispatch(call, deadline, call_stream, run)

    def combine(
        self,
        y: torch.Tensor,
        handle: Handle,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
        timeout: float | None = None,
        num_sms: int | None = None,
        async_op: bool = False,
        previous_event: object = None,
    ) -> Combined:
        """Bring expert outputs back to the tokens' ranks and sum them. Collective.

        Args:
            y: `[num_recv, hidden]`, a row for each row of the dispatch; of one with `sync=False` on GPUs it may be cut
                to the rows that came, for which the CPU then waits (not in a graph). Rank layout: the caller has
                weighted and summed its local experts. Expert layout: plain expert outputs; epee multiplies by the
                weights of the dispatch (one if it had none). Memory from `combine_input` is not copied; on GPUs nor is
                the `x` of a dispatch.
            handle: of the dispatch.
            topk_weights: to be sent back: `[num_recv, num_topk]` (rank layout), `[num_recv]` (expert layout).
            bias: one or two `[num_tokens, hidden]`, of y's dtype or float32, added before the rounding.
            out: `[num_tokens, hidden]` of y's dtype, written instead of new memory; may be a bias, must not share
                memory with y.
            timeout: seconds to wait for a silent peer.
            num_sms, async_op, previous_event: as in `dispatch`.

        Returns:
            `Combined`: for each token the sum over the ranks, ascending, in float32 (float64 for float64), rounded
            once; exact zeros for tokens without expert.

        Raises:
            EpeeError: the errors of `dispatch`; `out` is not written when an error is raised. On GPUs the CPU does not
                wait for a combine: an error during it is raised by the next call, or by `check`, and `out` is then
                undefined.
        """
        cached = self.again if timeout is None and bias is None and out is None else None
        if cached is not None and not carries_gradient(y, topk_weights):  # otherwise the ordinary path, which warns
            found = None
            if async_op is True:
                found = cached.combine_async(previous_event, y, handle, topk_weights, num_sms)
            elif async_op is False and previous_event is None:
                found = cached.combine(y, handle, topk_weights, num_sms)
            if found is not None:
                return found
        run = RunOptions(num_sms, async_op, previous_event)
        return self._combine(y, handle, (topk_weights, bias, out), run, timeout)

    @ranged
    def _combine(
        self, y: torch.Tensor, handle: Handle, others: tuple[Any, Any, Any], run: RunOptions, timeout: float | None
    ) -> Combined:
        """Run a combine by the ordinary path, as `_dispatch`."""
        topk_weights, bias, _ = others
        with self._turns.queue(), self._turns:
            attempt = CallAttempt(self._exchange, self._path, OP_COMBINE, timeout, self._timeout)
            while True:
                with attempt as deadline, self._call_streams.call_stream(check_run(run)) as call_stream:
                    if carries_gradient(y, topk_weights, bias):
                        warn_of_gradients("Buffer.combine")
                    known = check_handle(handle, self._id, self._exchange.epoch)
                    members = self._exchange.reduced_members
                    call = self._check_combine(y, known, others, members)
                    return self._rows.combine(call, deadline, call_stream, run)

    def combine_input(self, handle: Handle, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory for `y` that `combine` need not copy. Local.

        Args:
            handle: of the dispatch whose outputs will be written.
            dtype: of y, the buffer's by default.

        Returns:
            `[num_recv, hidden]`, uninitialised. Do not write into it after the combine: peers
            may still read it. Ordinary memory when all slots are in use.
        """

        with self._turns.queue(), self._turns:
            kind = self.config.dtype if dtype is None else dtype
            if kind not in PAYLOAD_DTYPES or kind.itemsize > self.config.dtype.itemsize:
                raise InvalidArgument(f"dtype must be a payload no wider than {self.config.dtype}, got {kind}")
            return self._rows.combine_input(check_handle(handle, self._id, self._exchange.epoch), kind)

    @property
    def num_copied_results(self) -> int:
        """Dispatches whose result had to be copied because `num_slots` results were still alive."""
        return self._path.num_copied
