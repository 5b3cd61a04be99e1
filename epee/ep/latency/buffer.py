"""`LatencyBuffer`: dispatch and combine of small batches, padded results, send and receive phases, masks of lost ranks.

This file is the public interface: it has arguments checked (`plans.py`, `checks.py`) and hands the call to the path of
the buffer's device (`cpu.py`, `gpu_path.py`); `../base.py` has the part shared with `Buffer`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ...gpu.platform import Platform
from ...link.topology import Topology
from ...profiling import ranged
from ...untraced import untraced_methods
from ..attempt import CallAttempt, CallsAgain
from ..base import SharedBuffer
from ..checks import carries_gradient, warn_of_gradients
from ..config import BufferConfig
from ..job import job_handle_of
from ..members.bootstrap import group_of, on_several_hosts, size_of, timeout_of
from ..members.header import OP_COMBINE, OP_DISPATCH
from ..paths import Making, Path, PathOverHosts
from .checks import check_latency_handle, check_run_options, check_wait
from .cpu import LatencyCalls
from .gpu.shapes import gpu_room_bytes, latency_config
from .gpu_path import LatencyCudaPath
from .one_host.path import LatencyCpuPath
from .plans import LatencyPlans
from .region import room_bytes
from .types import CallSizes, LatencyCombined, LatencyDispatched, LatencyHandle

if TYPE_CHECKING:
    from ...view.group import GroupInView

_Latent = TypeVar("_Latent", LatencyDispatched, LatencyCombined)


@untraced_methods
class LatencyBuffer(SharedBuffer):
    """Shared memory of the ranks of a group for small batches (docs/low-latency.md).

    Results are padded, `[num_local_experts, num_ranks * max_tokens_per_rank, hidden]`; a call can be split into a send
    and a receive phase; masks of lost ranks let calls continue without them. Rows are bfloat16, or FP8 made of them.

    Construction is collective: all ranks of `group` make their buffer together, with equal arguments.

    Args:
        group: any c10d process group of the ranks (gloo, nccl ...), None for the default group. Used now, never in
            a call. A replacement in a group of the backend "epee" takes part in the buffer that runs.
        num_experts: over all ranks, a multiple of the number of ranks. Rank r owns `num_experts / num_ranks`
            experts, starting at r times that.
        hidden: elements of a row, a multiple of 8 (of 128 for FP8).
        num_topk: columns of `topk_idx`, 1 ... 32.
        max_tokens_per_rank: most tokens that one rank dispatches in a call.
        device: None or "cpu", or the GPU of this rank ("cuda" for the current one); the ranks are on CPUs or on GPUs.
        num_slots: calls that may be sent and not yet received, at least 2.
        timeout: seconds that a call waits for a silent peer by default. None: the group's `op_timeout`, else
            EPEE_TIMEOUT_S, else torch's `timeout` of the group.

    After an error the buffer stays usable. `sync` brings the ranks together again; calls without a mask need all of
    them.

    Attributes:
        again: makes cached calls (`attempt.py`); None on CPUs.

    Raises:
        EpeeError: the errors of `Buffer`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_experts: int,
        hidden: int,
        num_topk: int,
        max_tokens_per_rank: int,
        device: torch.device | str | None = None,
        num_slots: int = 2,
        timeout: float | None = None,
    ) -> None:
        members = group_of(group)
        sizes = num_experts, hidden, num_topk, max_tokens_per_rank
        config = BufferConfig(size_of(members), *sizes, torch.bfloat16, num_slots, is_latency=True)
        super().__init__(members, config, device, timeout)

    def _on_gpu(self, config: BufferConfig, platform: Platform) -> BufferConfig:
        config = replace(config, path="cuda", device=platform.device)
        latency_config(config, self.rank).check()
        return config

    def _make_path(self, making: Making, platform: Platform | None, poison: bool) -> Path:
        self._rows: LatencyCalls | LatencyCudaPath
        if platform is None:
            self._rows = LatencyCpuPath(making, poison, time.monotonic() + self._timeout)
        else:
            self._rows = LatencyCudaPath(making, platform, self._timeout)
            self._rows.set_poison(poison)
        self._make_plans(self.config)
        return self._rows

    def _over_hosts(self, config: BufferConfig, topology: Topology, is_on_gpu: bool) -> BufferConfig:
        if is_on_gpu:
            raise on_several_hosts("a LatencyBuffer on GPUs", topology.hosts)
        return replace(config, num_hosts=topology.num_hosts)

    def _make_path_over_hosts(self, topology: Topology, job_handle: GroupInView, poison: bool) -> PathOverHosts:
        from ..members.exchange import HostsExchange
        from .hosts.path import LatencyHostsPath

        exchange = self._exchange
        assert isinstance(exchange, HostsExchange)

        self._rows = path = LatencyHostsPath(exchange, topology, job_handle, poison, self._turns.closing)
        self._make_plans(self.config)
        return path

    def _make_plans(self, config: BufferConfig) -> None:
        sizes = CallSizes(self._id, config, self._rows.take_sizes(config))
        self._plans = known = LatencyPlans(sizes)
        self.again: CallsAgain | None = None
        path = self._rows
        if isinstance(path, LatencyCudaPath):
            calls = partial(path.dispatch_again, known), partial(path.combine_again, known)
            self.again = CallsAgain(self._turns, self._exchange, path, self._call_streams, self._timeout, *calls)

    @classmethod
    def of_bytes(
        cls,
        group: dist.ProcessGroup | None,
        nbytes: int,
        *,
        device: torch.device | str | None = None,
        num_slots: int = 2,
        timeout: float | None = None,
    ) -> LatencyBuffer:
        """Return a buffer whose memory, so many bytes, serves calls of all sizes that fit (`of_sizes`). Collective.

        It makes no calls itself. For programs that know the sizes of their calls only when they make them.

        Args:
            group, device, num_slots, timeout: as of a buffer.
            nbytes: of memory that each rank lends; `bytes_for` returns the bytes for given sizes.

        Raises:
            EpeeError: the errors of a buffer.
        """
        members = group_of(group)
        made = cls.__new__(cls)
        SharedBuffer.__init__(made, members, _whole_config(size_of(members), nbytes, num_slots), device, timeout)
        return made

    @classmethod
    def awaited_bytes(cls, group: dist.ProcessGroup, device: torch.device | None, nbytes: int) -> int:
        """Return the bytes of the others' running buffer that a process which replaces a lost rank would join.

        Making one of so many (`of_bytes`) then waits until they `sync`. Local.

        Args:
            group, device: as of a buffer.
            nbytes: that are looked for first.

        Returns:
            0 if there is none, or this process replaces no rank.
        """
        path = "cpu" if cls._platform_of(device) is None else "cuda"
        config = replace(_whole_config(size_of(group), nbytes, 2), path=path)
        job_handle = job_handle_of(group, config.num_ranks)
        from ..members.notices import awaited_room

        return awaited_room(group, job_handle, config, timeout_of(group))

    def of_sizes(self, *, num_experts: int, hidden: int, num_topk: int, max_tokens_per_rank: int) -> LatencyBuffer:
        """Return a buffer for calls of other sizes in the memory of this one. Local.

        The two share everything but their handles: calls run one after another, `sync`, `check` and `close` are for
        both. All ranks make the same calls of the same sizes in the same order, as always.

        Args:
            num_experts, hidden, num_topk, max_tokens_per_rank: as of a buffer.

        Raises:
            InvalidArgument: they are wrong, or need more memory than there is; the text says how much.
        """
        config = replace(
            self.config,
            num_experts=num_experts,
            hidden=hidden,
            num_topk=num_topk,
            max_tokens_per_rank=max_tokens_per_rank,
        )
        with self._turns.queue(), self._turns:
            config.check()
            other = self._beside(config)
            other._make_plans(config)
            return other

    @staticmethod
    def bytes_for(
        num_ranks: int, num_experts: int, hidden: int, num_topk: int, max_tokens_per_rank: int, num_slots: int = 2
    ) -> int:
        """Return the bytes of memory in which calls of such sizes fit, on CPUs and on GPUs; arguments as of a buffer.

        Raises:
            InvalidArgument: no buffer can be made for such sizes.
        """
        sizes = num_experts, hidden, num_topk, max_tokens_per_rank
        config = BufferConfig(num_ranks, *sizes, torch.bfloat16, num_slots, is_latency=True)
        config.check()
        return max(room_bytes(config), gpu_room_bytes(config))

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        use_fp8: bool = False,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        active_ranks: torch.Tensor | None = None,
        timeout: float | None = None,
        timeout_us: int | None = None,
        return_hook: bool = False,
        num_sms: int | None = None,
        async_op: bool = False,
        previous_event: object = None,
    ) -> LatencyDispatched:
        """Send each token to the ranks that own its experts. Collective.

        Args:
            x: `[num_tokens, hidden]` bfloat16. Not modified; may be reused on return (GPU: by work after the call). On
                GPUs rows are contiguous and begin at multiples of 16 bytes.
            topk_idx: `[num_tokens, num_topk]` int64 expert ids, -1 for none. An expert that occurs twice in a row
                counts twice.
            topk_weights: `[num_tokens, num_topk]` float32, None for ones.
            use_fp8, round_scale, use_ue8m0: quantise x on the way, with float32 scales per 128 channels, powers of
                two, packed four to an int32.
            active_ranks: `[num_ranks or more]` int32, 1 = active, read and written: a rank that is 0, or is silent
                until the timeout, is excluded as a whole. Without it a silent rank is an error.
            timeout: seconds to wait for a silent peer; `timeout_us` the same in microseconds.
            return_hook: only send; `.hook()` receives.
            num_sms: multiprocessors of the GPU to use; None for the default.
            async_op: run on the buffer's own stream, after the current one, or after `previous_event`; wait for
                `.event` before the results are used.
            previous_event: an `.event`, or a `torch.cuda.Event`, for which the call waits first.

        Returns:
            `LatencyDispatched`.

        Raises:
            EpeeError: the errors of `Buffer.dispatch`.
        """
        cached = None if timeout is not None or timeout_us is not None or num_sms is not None else self.again
        if cached is not None and not carries_gradient(x, topk_weights):
            given = x, topk_idx, topk_weights, active_ranks, use_fp8, round_scale, use_ue8m0, return_hook, False
            found = None
            if async_op is True and return_hook is False:
                found = cached.dispatch_async(previous_event, *given)
            elif async_op is False and previous_event is None:
                found = cached.dispatch(*given)
            if found is not None:
                return found if found.hook is None else self.hooked(found)
        return self._dispatch(
            x,
            (topk_idx, topk_weights, active_ranks),
            (return_hook, use_fp8, round_scale, use_ue8m0),
            (timeout, timeout_us),
            (num_sms, async_op, previous_event),
        )

    @ranged
    def _dispatch(
        self,
        x: torch.Tensor,
        others: tuple[Any, Any, Any],
        flags: tuple[Any, Any, Any, Any],
        timeouts: tuple[float | None, int | None],
        run: tuple[Any, Any, Any],
    ) -> LatencyDispatched:
        """Run a dispatch by the ordinary path: check it, enter its epoch, notify the peers if it is refused."""
        with self._turns.queue(), self._turns:
            attempt = CallAttempt(self._exchange, self._path, OP_DISPATCH, timeouts[0], self._timeout)
            while True:
                with attempt, self._call_streams.call_stream(check_run_options(*run)) as call_stream:
                    if carries_gradient(x, others[1]):
                        warn_of_gradients("LatencyBuffer.dispatch")
                    timeout_s = check_wait(timeouts[1], timeouts[0], self._timeout)
                    call = self._plans.dispatch((x, *others), flags, run[1], timeout_s)
                    result = self._rows.dispatch(call, call_stream)
                    return self.hooked(result)

    def combine(
        self,
        y: torch.Tensor,
        handle: LatencyHandle,
        *,
        topk_weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        partial_dtype: torch.dtype | None = None,
        active_ranks: torch.Tensor | None = None,
        timeout: float | None = None,
        timeout_us: int | None = None,
        return_hook: bool = False,
        num_sms: int | None = None,
        async_op: bool = False,
        previous_event: object = None,
    ) -> LatencyCombined:
        """Bring expert outputs back to the tokens' ranks and sum them, multiplied by the weights. Collective.

        Args:
            y: `[num_local_experts, num_ranks * max_tokens_per_rank, hidden]` bfloat16, padded like the dispatch's
                result. Memory from `combine_input` is not copied.
            handle: of the dispatch.
            topk_weights: `[num_tokens, num_topk]` of this rank's tokens, replaces those of the dispatch.
            out: `[num_tokens, hidden]` bfloat16, written instead of new memory.
            partial_dtype: the dtype of each rank's sum before it is sent, bfloat16 (None) or float32.
            active_ranks, timeout, timeout_us, return_hook, num_sms, async_op, previous_event: as in `dispatch`.

        Returns:
            `LatencyCombined`: for each token the sum over the ranks that are in `got`, ascending, in float32, rounded
            once; exact zeros for tokens without expert.

        Raises:
            EpeeError: the errors of `Buffer.combine`.
        """
        cached = None if timeout is not None or timeout_us is not None or num_sms is not None else self.again
        if cached is not None and not carries_gradient(y, topk_weights):
            given = y, handle, topk_weights, out, partial_dtype, active_ranks, return_hook
            found = None
            if async_op is True and return_hook is False:
                found = cached.combine_async(previous_event, *given)
            elif async_op is False and previous_event is None:
                found = cached.combine(*given)
            if found is not None:
                return found if found.hook is None else self.hooked(found)
        return self._combine(
            y,
            handle,
            (topk_weights, out, active_ranks, partial_dtype),
            return_hook,
            (timeout, timeout_us),
            (num_sms, async_op, previous_event),
        )

    @ranged
    def _combine(
        self,
        y: torch.Tensor,
        handle: LatencyHandle,
        others: tuple[Any, Any, Any, Any],
        return_hook: object,
        timeouts: tuple[float | None, int | None],
        run: tuple[Any, Any, Any],
    ) -> LatencyCombined:
        """Run a combine by the ordinary path, as `_dispatch`."""
        with self._turns.queue(), self._turns:
            attempt = CallAttempt(self._exchange, self._path, OP_COMBINE, timeouts[0], self._timeout)
            while True:
                with attempt, self._call_streams.call_stream(check_run_options(*run)) as call_stream:
                    if carries_gradient(y, others[0]):
                        warn_of_gradients("LatencyBuffer.combine")
                    known = check_latency_handle(handle, self._id, self._exchange.epoch)
                    timeout_s = check_wait(timeouts[1], timeouts[0], self._timeout)
                    call = self._plans.combine(known, (y, *others), return_hook, run[1], timeout_s)
                    result = self._rows.combine(call, call_stream)
                    return self.hooked(result)

    def combine_input(self, handle: LatencyHandle) -> torch.Tensor:
        """Return memory for `y` that `combine` need not copy. Local.

        Args:
            handle: of the dispatch whose outputs will be written.

        Returns:
            `[num_local_experts, num_ranks * max_tokens_per_rank, hidden]` bfloat16, uninitialised. Do not write into it
            after the combine: peers may still read it.
        """
        with self._turns.queue(), self._turns:
            check_latency_handle(handle, self._id, self._exchange.epoch)
            return self._rows.combine_input(self.config)

    def hooked(self, result: _Latent) -> _Latent:
        """Return a result of `again` whose hook, if it has one, runs as calls do: one at a time."""
        receive = result.hook
        if receive is None:
            return result
        again = self.again

        def hook() -> None:
            """Run the receive phase as a call of this buffer: after the others, one at a time."""
            if again is None or not again.receive(receive):
                with self._turns.queue(), self._turns:
                    receive()

        result.hook = hook
        return result


def _whole_config(num_ranks: int, nbytes: int, num_slots: int) -> BufferConfig:
    """Return the config of memory for calls of all sizes: the smallest possible ones, which no call has."""
    smallest = num_ranks, 8, 1, 1
    return BufferConfig(num_ranks, *smallest, torch.bfloat16, num_slots, is_latency=True, room_bytes=nbytes)
