"""The common part of `Buffer` and `LatencyBuffer`: construction, closing, and the calls that move no rows.

Construction is collective and has three rounds: the ranks compare their arguments, make an engine (`members/birth.py`),
and the path of the device attaches the peers' memory. A rank that refuses its arguments takes
part in the first round as a refusal. A crash in any of them is a death in a group; a rank that has not come that far is
named.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from .. import env
from ..errors import EpeeError, InvalidArgument, UnsupportedError, expected
from ..gpu.platform import Platform
from ..gpu.turns import Closing, Turns, on_gpu
from ..link.topology import Topology, one_host
from ..profiling import ranged
from ..untraced import untraced_methods
from ..view.label import label_of
from ..view.process.detector import DeathWatch
from .attempt import CallAttempt, refuse
from .checks import check_mask, check_timeout
from .config import BufferConfig
from .handle import mask_of, new_buffer_id
from .job import job_handle_of
from .making import fits
from .members.bootstrap import link_address, on_several_hosts, size_of, timeout_of, topology_of
from .members.bootstrap import refuse as refuse_birth
from .members.header import OP_DISPATCH, OP_GATHER, OP_SYNC
from .members.rows import RowExchange
from .paths import Making, Path, PathOverHosts, platform_of, return_all, with_policy
from .streams import CallStreams

if TYPE_CHECKING:
    from ..view.group import GroupInView
    from .members.direct import DirectExchange
    from .members.epoch_members import MemberExchange
    from .members.exchange import HostsExchange
    from .members.notices import BufferNotice, OnOneHost

_Self = TypeVar("_Self", bound="SharedBuffer")


@untraced_methods
class SharedBuffer:
    """Memory shared by the ranks of a group, one call at a time; `Buffer` and `LatencyBuffer` move rows through it.

    Args:
        group: of the ranks.
        config: what the buffer is made for, as given by the caller.
        device: as given by the caller.
        timeout: seconds that a call waits for a silent peer by default. None: the group's `op_timeout`, else
            EPEE_TIMEOUT_S, else torch's `timeout` of the group.
        fault_mode, on_stall: as given by the caller.
        refusal: the error in the arguments, if one is known already.

    Attributes:
        config: what the buffer is made for.
        rank, num_ranks: of the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: BufferConfig,
        device: torch.device | str | None,
        timeout: float | None,
        fault_mode: str | None = None,
        on_stall: str | None = None,
        refusal: EpeeError | None = None,
    ) -> None:
        self._topology = topology_of(group, size_of(group))
        self._turns = Turns()
        self._whole: SharedBuffer | None = None  # the buffer that owns the memory; None: this one does
        self._id = new_buffer_id()
        self.rank, self.num_ranks, self.config = group.rank(), size_of(group), config
        job_handle = job_handle_of(group, self.num_ranks)
        self._turns.label.text = f"{type(self).__name__} of {label_of(group)}"
        self._timeout, poison, platform, alone = 0.0, False, None, None
        try:
            if refusal is not None:
                raise refusal
            config.check()
            self._timeout = check_timeout(timeout, timeout_of(group))
            poison = env.get_bool("EPEE_POISON")
            platform = self._platform_of(device)
            alone = _running_on_one_host(group, job_handle, config, platform is not None, self._timeout)
            if alone is not None:
                self._topology = one_host(self.rank, self.num_ranks)  # even if the group is on several hosts by now
            if self._topology.num_hosts > 1:
                self.config = self._over_hosts(self.config, self._topology, platform is not None)
            if platform is not None:
                self.config = self._on_gpu(self.config, platform)
            elif config.room_bytes and not config.is_latency:
                raise UnsupportedError("a room for calls of several shapes is memory of a GPU; pass device='cuda'")
            self.config = with_policy(self.config, job_handle, fault_mode, on_stall)
        except expected(Exception) as error:  # raised by `refuse_birth`, after the peers have been notified of it
            told = error if isinstance(error, EpeeError) else InvalidArgument(f"{type(error).__name__}: {error}")
            refuse_birth(group, self.config, told)
        if alone is not None:
            # no rank is notified: the others are in that buffer's calls
            alone.require_here(type(self).__name__, self.rank)
        closing = self._turns.closing
        self._exchange: RowExchange
        running = None if alone is not None else _running_over_hosts(group, job_handle, self.config, self._timeout)
        if running is not None:
            self.config = replace(self.config, num_hosts=running.num_hosts)
        spans = running is not None or self._topology.num_hosts > 1
        watch = DeathWatch()
        if not spans:
            self._exchange = _exchange_here(group, job_handle, self.config, self._timeout, closing, alone, watch)
        else:
            self._exchange = _exchange_over_hosts(group, self.config, self._timeout, closing, running)
        try:
            self._call_streams = CallStreams(self.config.device)
            with on_gpu(self.config.device.index):
                self._path: Path
                if not spans or platform is not None:
                    making = Making(self.config, self.rank, self._exchange, self._id, watch, closing)
                    if spans:
                        making = making._replace(islands=self._topology.hosts, address=link_address(group))
                    self._path = self._make_path(making, platform, poison)
                else:
                    self._path = path = self._make_path_over_hosts(self._topology, job_handle, poison)
                    if running is not None:
                        path.come_in(time.monotonic() + self._timeout)
        except BaseException:
            watch.close()
            self._exchange.release()
            self._exchange.membership.close()
            raise
        self._exchange.membership.forget = self._path.close
        self._show_name(group)
        # a buffer dropped without close() returns its memory as well
        finalizer = weakref.finalize(self, return_all, self._path, watch, self._exchange, is_dropped=True)
        finalizer.atexit = False
        self._turns.open(self.config.device.index, self._path.abort, partial(_give_back, finalizer))

    def _show_name(self, group: dist.ProcessGroup) -> None:
        """Number the buffer among those of its group, alike on all ranks, for errors and hang reports."""
        membership = self._exchange.membership
        if not membership.number:
            return  # over several hosts
        self._turns.label.text = text = f"{type(self).__name__} {membership.number} of {label_of(group)}"
        membership.call_it(text)

    _platform_of = staticmethod(platform_of)

    @property
    def whole(self: _Self) -> _Self:
        """The buffer that owns the memory of this one; this buffer if it has its own."""
        return cast(_Self, self._whole or self)

    @property
    def is_recorded(self) -> bool:
        """Whether a CUDA graph has recorded calls in this memory."""
        return self._path.is_recorded

    def _beside(self: _Self, config: BufferConfig) -> _Self:
        """Return another object over the same memory, with handles of its own.

        Calls of both run one at a time, and closing one closes all. Without close, the memory is freed when the last of
        them is deleted: the first one lives as long as the others.
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.config, other._id, other._whole = config, new_buffer_id(), self.whole
        return other

    def _on_gpu(self, config: BufferConfig, platform: Platform) -> BufferConfig:
        """Return the config of a buffer on a GPU; raises `InvalidArgument` for what its kernels cannot do."""
        raise NotImplementedError

    def _over_hosts(self, config: BufferConfig, topology: Topology, is_on_gpu: bool) -> BufferConfig:
        """Return the config of a buffer over several hosts; raises `UnsupportedError` if the buffer needs a single
        host.
        """
        raise on_several_hosts(f"a {type(self).__name__}", topology.hosts)

    def _make_path_over_hosts(self, topology: Topology, job_handle: GroupInView, poison: bool) -> PathOverHosts:
        """Make the path that moves the rows between hosts. Local."""
        raise NotImplementedError

    def _make_path(self, making: Making, platform: Platform | None, poison: bool) -> Path:
        """Make the path that moves the rows. Collective."""
        raise NotImplementedError

    def close(self) -> None:
        """Free all memory, mappings and descriptors. Local, idempotent, never waits for peers.

        A call in progress in another thread ends with `AbortedError`. Tensors that the user still holds stay valid;
        handles do not.
        """
        self._turns.close()

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        """Return this buffer: the copy of an object that uses a buffer uses the same one."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise, because a buffer cannot be pickled."""
        raise UnsupportedError(
            f"a {type(self).__name__} cannot be pickled or saved: it is memory shared with other processes. "
            "Save the state_dict() of the module that uses it, one file for each rank, and make buffer and module anew"
        )

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @ranged
    def barrier(self, timeout: float | None = None) -> None:
        """Let all ranks meet. Collective.

        `Buffer` on GPUs: the streams meet: work that a rank's current stream runs after the barrier runs when all
        ranks' streams have reached it, with their writes done. One kernel; the CPU waits for no rank, so an error (as
        of a combine) is raised by the next call or by `check`. Otherwise, and on GPUs of several hosts, where the CPU
        first waits for its current stream, the ranks' CPU threads meet.

        Args:
            timeout: seconds to wait for a silent peer.

        Raises:
            EpeeError: the errors of `dispatch`.
        """
        with self._turns.queue(), self._turns:
            if timeout is None and self._path.barrier_again(self._timeout):
                return None
            attempt = CallAttempt(self._exchange, self._path, self._path.barrier_op, timeout, self._timeout)
            while True:
                with attempt as deadline:
                    return self._path.barrier(deadline)

    def all_gather_bytes(self, data: bytes, timeout: float | None = None) -> list[bytes]:
        """Give every rank the bytes of all ranks. Collective; also a barrier of the ranks' CPU threads.

        For data that callers of this buffer must agree on between two calls, without the process group.

        Args:
            data: equally long on all ranks.
            timeout: seconds to wait for a silent peer.

        Returns:
            One byte string per rank, in rank order.

        Raises:
            EpeeError: the errors of `dispatch`.
        """
        with self._turns.queue(), self._turns:
            attempt = CallAttempt(self._exchange, self._path, OP_GATHER, timeout, self._timeout)
            while True:
                with attempt as deadline:
                    if not isinstance(data, bytes):
                        raise InvalidArgument(f"data must be bytes, got {type(data).__name__}")
                    return self._exchange.all_gather_bytes(data, deadline)

    def sync(self, active_ranks: torch.Tensor | None = None, timeout: float | None = None) -> torch.Tensor:
        """Agree with the other ranks on the members. Collective for all living ranks; a barrier of their CPU threads.

        Ranks that arrive are members, even if others had excluded them; ranks that are dead, or do not arrive in time,
        are not. All continue from the same call, in a new epoch; older handles are stale.

        `LatencyBuffer`: no call may be waiting for its hook. On a group of the backend "epee" it admits processes that
        have replaced lost ranks and are making this buffer. On GPUs it waits for the GPU, and graphs stay usable.

        `Buffer` on GPUs: as there, and it waits for the GPU; older handles are stale in graphs as well. Processes that
        have replaced lost ranks are admitted unless memory is lent by cudaIpc (docs/limits.md); graphs with dispatches
        of their own stay usable.

        `Buffer` on CPUs: with a mask on all ranks, ranks that arrive are members, those that were excluded before as
        well; a rank that does not arrive is excluded from this buffer and stays in its group. A new epoch begins with
        the next call; steps that were begun are over. Without a mask it is a call like others: its end returns the
        members of the current epoch, and silent ranks are handled by `on_stall`.

        Over several hosts (CPUs): no living rank is excluded, whatever the masks say, and processes that have replaced
        lost ranks are admitted, from any host. One that is in the group and not in the buffer is awaited until the
        timeout; then the others continue without it. Losses are raised if there is no mask (`Buffer`).

        Args:
            active_ranks: this rank's mask, `[num_ranks or more]` int32; a rank that it excludes is not awaited for
                long. The agreed mask is written into it.
            timeout: seconds to wait for a silent rank.

        Returns:
            `[num_ranks]` int32 on the CPU, 1 = takes part; equal on all of them.

        Raises:
            NoQuorumError: too few ranks arrived to decide, or the others agreed without this one.
            InvalidState: a hook has not been called, or a graph is recorded.
            MismatchError: `Buffer` on CPUs: a rank that is counted on makes another call.
            EpeeError: the errors of `dispatch`, for `Buffer` on CPUs without a mask.
        """
        with self._turns.queue(), self._turns:
            if active_ranks is not None or self.config.is_synced:
                mask = check_mask(self.config, active_ranks)
                return self._path.sync(mask, time.monotonic() + check_timeout(timeout, self._timeout))
            attempt = CallAttempt(self._exchange, self._path, OP_SYNC, timeout, self._timeout)
            while True:
                with attempt as deadline:
                    if self.config.num_hosts > 1:
                        return self._path.sync(None, deadline)
                    self._exchange.all_gather_bytes(b"", deadline, OP_SYNC)
                    return mask_of(self._exchange.members, self.num_ranks)

    def refuse(self, error: Exception, timeout: float | None = None) -> None:
        """Take part in the peers' next call only to report that this rank cannot make it; they raise at once.

        On GPUs, and of a `LatencyBuffer`, that call must be a dispatch, a combine or (`Buffer`) a barrier.

        For callers of this buffer that find an error in their own arguments, before they raise `error`.

        Args:
            error: its text becomes part of the peers' `MismatchError`.
            timeout: seconds to wait for peers that are still in an earlier call.
        """
        op = OP_DISPATCH if self.config.is_synced else OP_GATHER
        with self._turns.queue(), self._turns:
            deadline = time.monotonic() + check_timeout(timeout, self._timeout)
            refuse(self._exchange, self._path, op, error, deadline, self._timeout)

    def check(self) -> None:
        """Raise errors on this rank's GPU since the last call. Local; does not wait for the GPU.

        Every call does so when it starts. Synchronise first to include everything that has been launched.
        """
        with self._turns.queue(), self._turns:
            self._path.check()

    def join(self) -> None:
        """Make the current stream wait for all work of this buffer on other streams. Local.

        Buffers used in alternation, on several streams, share the GPU better when each is joined before the next is
        used: while calls of several buffers may overlap, each of them takes only part of the multiprocessors.
        """
        with self._turns.queue(), self._turns:
            self._path.join()

    @property
    def epoch(self) -> int:
        """The epoch in which the last call ran; handles of other epochs are stale."""
        return self._exchange.epoch

    @property
    def num_announced(self) -> int:
        """Calls with rows, refused ones included, that this rank has announced; alike on all members."""
        return self._path.num_announced(OP_DISPATCH)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that this rank maps for others: its outbox and what calls have made so far."""
        if self._turns.is_closed:
            return 0
        return self._exchange.membership.lent_bytes + self._path.nbytes

    @property
    def max_num_sms(self) -> int:
        """Multiprocessors of this rank's GPU, the maximum of `num_sms`; 0 on the CPU, where `num_sms` has no effect."""
        return self._path.max_num_sms

    @property
    def takes_replacements(self) -> bool:
        """Whether a process that replaces a lost rank is admitted: in a call, or in `sync` (`LatencyBuffer`, GPUs)."""
        return self._path.takes_replacements


def _running_over_hosts(
    group: dist.ProcessGroup, job_handle: GroupInView, config: BufferConfig, timeout_s: float
) -> BufferNotice | None:
    """Return the buffer over hosts that this process has to join; None if there is none, or if it is no joiner."""
    if not job_handle.is_joiner or not job_handle.spans or config.is_cuda:
        return None
    from .members.notices import find_running

    return find_running(group, job_handle, config, timeout_s)


def _running_on_one_host(
    group: dist.ProcessGroup, job_handle: GroupInView, config: BufferConfig, is_cuda: bool, timeout_s: float
) -> OnOneHost | None:
    """Return the buffer of one host that this process would join; None if there is none, or if it is no joiner."""
    if not job_handle.is_joiner or not job_handle.spans:
        return None
    from .members.notices import find_on_one_host

    return find_on_one_host(group, job_handle, config, is_cuda, timeout_s)


def _running_here(
    group: dist.ProcessGroup, job_handle: GroupInView, config: BufferConfig, timeout_s: float, alone: OnOneHost | None
) -> BufferNotice | None:
    """Return the buffer of this host that this process has to join, if any.

    Raises:
        UnsupportedError: there is one, which admits no process. As `find_running`.
    """
    from .members.notices import find_running

    if alone is not None:
        running = alone.notice if fits(alone.notice.words, alone.rank, config, group.rank()) else None
    else:
        running = None if job_handle.spans else find_running(group, job_handle, config, timeout_s)
    if running is not None and not config.takes_replacements:
        raise UnsupportedError(
            "Buffer: a buffer of the group runs whose memory is lent by cudaIpc, which cannot be mapped where a lost "
            "rank's was: this process cannot take part; close that buffer on all ranks and make it again with this "
            "one, or leave EPEE_CUDA_SHARE unset on all of them"
        )
    return running


def _exchange_here(
    group: dist.ProcessGroup,
    job_handle: GroupInView,
    config: BufferConfig,
    timeout_s: float,
    closing: Closing,
    alone: OnOneHost | None,
    watch: DeathWatch,
) -> DirectExchange | MemberExchange:
    """Make the engine of a buffer of one host, and its membership, or join one that runs. Collective.

    Args:
        watch: for the processes of the ranks of a buffer of GPUs.
        Others as of the buffer.

    Raises:
        As `create_here`, `find_running`, and the membership's `begin_first` and `join_running`.
    """
    from .members.birth import announcement, create_here, mode_of

    rank, mode, interrupt = group.rank(), mode_of(config), closing.check
    exchange: DirectExchange | MemberExchange
    if config.is_cuda:
        from .members.epoch_members import MemberExchange
        from .members.gpu_members import GpuMembers

        exchange = MemberExchange(config, rank, interrupt)
        handle = job_handle if config.takes_replacements else replace(job_handle, is_open=False)
        exchange.membership = GpuMembers(exchange, mode, handle, timeout_s, interrupt, watch)
    elif config.is_latency:
        from .latency.one_host.members import EpochMembers
        from .members.epoch_members import MemberExchange

        exchange = MemberExchange(config, rank, interrupt)
        exchange.membership = EpochMembers(exchange, mode, job_handle, timeout_s, interrupt)
    else:
        from .members.direct import BufferMembers, DirectExchange

        exchange = DirectExchange(config, rank, interrupt)
        exchange.membership = BufferMembers(exchange, mode, job_handle, timeout_s, interrupt)
    members = exchange.membership
    try:
        running = _running_here(group, job_handle, config, timeout_s, alone)
        if running is not None:
            members.join_running(group, running)
        else:
            engine, members.number = create_here(group, job_handle, config, timeout_s)
            members.begin_with(engine)
            exchange.tell = announcement(group, engine, config)
            members.begin_first(time.monotonic() + timeout_s)
    except BaseException:
        watch.close()
        exchange.release()
        members.close()
        raise
    return exchange


def _exchange_over_hosts(
    group: dist.ProcessGroup,
    config: BufferConfig,
    timeout_s: float,
    closing: Closing,
    running: BufferNotice | None = None,
) -> HostsExchange:
    """Make the engine of a buffer over several hosts. Collective; raises as `hosts.birth.create_over_hosts`.

    Args:
        group, config, timeout_s, closing: of the buffer.
        running: the buffer that this process joins, if any; then raises as `hosts.birth.come_into`.
    """
    from .members.birth import come_into, create_over_hosts, tell_of
    from .members.exchange import HostsExchange

    exchange = HostsExchange(config, group.rank(), closing.check)
    try:
        if running is None:
            engine = create_over_hosts(group, config, timeout_s)
        else:
            engine = come_into(job_handle_of(group, config.num_ranks), group.rank(), config, running, timeout_s)
        exchange.use(engine)
        if not config.is_cuda:  # such a buffer takes no process in
            exchange.take_back = tell_of(group, engine, config, running)
    except BaseException:
        exchange.release()
        raise
    return exchange


def _give_back(finalizer: weakref.finalize[..., SharedBuffer]) -> None:
    if (found := finalizer.detach()) is not None:
        _, give_back, args, _ = found
        give_back(*args)
