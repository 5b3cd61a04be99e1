"""The process group that torch sees: it checks arguments, makes plans and hands them to the engine.

torch calls these methods from Python (`dist.*`) and from C++ (functional collectives, DDP). Names: torch up to 2.11
calls `_allgather_base`, `_reduce_scatter_base`, `alltoall_base` and the `*_into_tensor_coalesced` forms, later versions
`all_gather_single` and similar names; both sets are here, one implementation each. Every method returns a Work, never
None: a C++ caller would crash on it.

The state of a group's view, and the return of ranks, are calls of epee's own (`view_calls.py`).

Device dispatch is in one place (`group.py`): a collective on a GPU's tensors is made there (`backend/cuda`). A call
that is not made there, and any other call for which `tensors.carrier_of` raises `NeedsStaging`, is run on copies of its
tensors in cpu memory (`staging.py`). Calls on CPU tensors pay next to nothing for that.

A call whose arguments are refused here raises `InvalidArgument`, and its sequence number is used up all the same: the
peers get a `MismatchError` with the reason, so no rank waits for a call that does not come. A profiler sees each call
as a range.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from .. import env
from ..arrays import real_tensors
from ..engine import (
    BoundedStore,
    Engine,
    EngineOptions,
    LatestOfThread,
    Place,
    alone,
    attempt,
    close_at_exit,
    come_in,
    create_engine,
    find_place,
    is_newcomer,
    join_engine,
    joins_job,
    leave_note,
    meeting_place,
    own_job,
    place_of,
)
from ..engine.membership.call_outcome import LOSS
from ..engine.membership.members import TooShort, fitted
from ..engine.membership.sizes import Mask
from ..engine.operation import timeout_of
from ..engine.outbox import PeerRegions
from ..engine.p2p.message import ANY, Message
from ..engine.plan import Make
from ..engine.signature import DTYPE_CODE, OP_CODE
from ..engine.signature import pack as pack_signature
from ..engine.tensors import NeedsStaging, carrier_of, source, target
from ..errors import EpeeError, InvalidArgument, PeerError, RankFailedError, UnsupportedError, expected, named
from ..profiling import is_profiling, range_of
from ..untraced import untraced_methods
from ..values import MAX_S, longest, seconds
from ..view.label import group_label
from ..view.runtime import begin_group, end_group
from .collectives import arguments as calls
from .cuda import make_calls, make_messages
from .cuda.interface import NOT_SERVED, is_on_gpu
from .options import BackendOptions
from .staging import Staging
from .view_calls import CallsOfView
from .view_calls import check_peer as check_peer_in_view
from .work import DONE, Ended, Work, is_loss

if TYPE_CHECKING:
    from .cuda.half import DeviceHalf
    from .cuda.messages.half import MessageHalf


_Method = TypeVar("_Method", bound=Callable[..., Any])


def collective(name: str) -> Callable[[_Method], _Method]:
    """Notify the peers when the arguments of a collective are refused."""

    def decorate(method: _Method) -> _Method:
        """Return `method` with that, and with the path of tensors on a GPU."""

        @functools.wraps(method)
        def entered(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            """Call it, as a range of a profiler if one runs."""
            if not is_profiling():
                return call(self, args, kwargs)
            with range_of(name, (self, *args)):
                return call(self, args, kwargs)

        def call(self: ProcessGroup, args: Any, kwargs: Any) -> Any:
            """Call it; not as `*args`, which costs 0.1 us for each function that passes them on."""
            seq = self._engine.seq
            if self._on_device is not None and is_on_gpu(args):
                with real_tensors():
                    done = self._on_device.run(method.__name__, args, kwargs)
                if done is not NOT_SERVED:
                    self._engine.latest.op = None  # a meeting of the GPUs' CPU sides is a call of the engine, too
                    return done
            try:
                done = method(self, *args, **kwargs)
                self._engine.latest.op = None
                return done
            except NeedsStaging:
                pass  # below, where a further error is not one during this one
            except expected(InvalidArgument, UnsupportedError) as exc:
                self._engine.refuse(name, exc)
                raise
            except expected(EpeeError) as exc:
                is_told = isinstance(exc, RankFailedError) and exc.op == LOSS  # instead of a call that had ended
                if isinstance(exc, RankFailedError) and self._engine.seq == seq and not is_told:  # its root is lost
                    self._engine.refuse(name, exc)  # else the call was issued: all ranks have counted it
                named(exc, self._engine.peer_regions.label.text)
                if self._engine.reports_losses and isinstance(exc, PeerError) and is_loss(exc):
                    return Ended(self._engine, exc)
                raise
            except expected(Exception) as exc:
                # numpy's or torch's own error about an argument, or no memory
                if self._engine.seq == seq:
                    self._engine.refuse(name, exc)
                self._engine.disown_latest(exc)
                raise
            except BaseException as exc:
                self._engine.disown_latest(exc)
                raise
            with real_tensors():
                return self._staging.run(name, lambda *there, **named: call(self, there, named), args, kwargs)

        return entered  # type: ignore[return-value]

    return decorate


_MAX_TAG = (1 << 63) - 1
_alive: set[ProcessGroup] = set()


_Base: Any = dist.ProcessGroup  # its annotations differ from version to version of torch


@untraced_methods
class ProcessGroup(CallsOfView, _Base):  # type: ignore[misc]
    """A group of the backend "epee". Made by `init_process_group("epee")` and `new_group`, not by users.

    Attributes:
        options: the `BackendOptions` in force.
        waits_for_streams: a barrier begins when the current stream of the current GPU has come to it.
    """

    waits_for_streams = False

    def __init__(
        self, dist_opts: Any, options: BackendOptions | None, default: Callable[[], BackendOptions] = BackendOptions
    ) -> None:
        rank, num_ranks = dist_opts.group_rank, dist_opts.group_size
        timeout_s = min(dist_opts.timeout.total_seconds(), MAX_S)  # `timedelta.max` means "for ever"
        super().__init__(rank, num_ranks)
        self._rank = rank
        self._num_ranks = num_ranks
        self._store = dist_opts.store
        self._ranks = list(dist_opts.global_ranks_in_group) or list(range(num_ranks))
        self._is_first = not dist_opts.global_ranks_in_group  # the default group
        self._birth_timeout_s, self._timeout_s, self._p2p_timeout_s = timeout_s, 0.0, 0.0
        self._default_timeout_s = _timeout_of_calls(dist_opts)
        self._group_name = str(getattr(dist_opts, "group_id", ""))
        self._group_desc = ""
        self._place: Place | None = None
        self._on_device: DeviceHalf | None = None
        self._messages: MessageHalf | None = None
        self._ends: list[Any] = []
        self._held: Any = None  # the job, where this group has no engine in it
        is_extension = getattr(options, "is_extension", False)
        with BoundedStore(self._store, timeout_s, rank) as store:
            if is_extension or (own_job() is None and is_newcomer(store, rank, num_ranks)):
                self.options = chosen = self._checked(options, default)
                if is_extension and chosen.joins_later:
                    self._begin(alone(rank, num_ranks, timeout_s, chosen.staging_bytes, chosen.mode), is_in=False)
                else:
                    self._begin(self._come_in(store, timeout_s, is_born=True))
            else:
                shared = meeting_place(store, dist_opts.global_ranks_in_group)
                self._begin(create_engine(shared, rank, num_ranks, timeout_s, lambda: self._choose(options, default)))
                if self._place is not None:
                    leave_note(store, self._place)
        begin_group(id(self))
        _alive.add(self)  # torch's C++ side would turn a collected group into a bare one

    def _choose(self, options: Any, default: Callable[[], BackendOptions]) -> EngineOptions:
        """Set the options in force, and return those of the engine."""
        self.options = chosen = self._checked(options, default)
        return EngineOptions(chosen.staging_bytes, chosen.mode)

    def _checked(self, options: Any, default: Callable[[], BackendOptions]) -> BackendOptions:
        """Return the options in force; they fit the group.

        Reads the environment, too: errors are reported to the others.
        """
        self._default_timeout_s = env.get_seconds("EPEE_TIMEOUT_S", self._default_timeout_s)
        return _checked(options, default, self._num_ranks)

    @property
    def own_timeout_s(self) -> float:
        """Seconds that the program has set for the calls of this group; 0 where it has set none."""
        return self._timeout_s or self.options.op_timeout_s

    def _begin(self, engine: Engine, is_in: bool = True) -> None:
        """Run calls on `engine` from now on; `is_in`: it takes part in the group, and does not work alone."""
        self._engine: Engine = engine
        self._engine.timeout_s = self.own_timeout_s or self._default_timeout_s
        self._engine.p2p_timeout_s = self._p2p_timeout_s
        self._engine.latest = LatestOfThread()
        self._show_name()
        if is_in:
            self._engine.membership.remember(self._store)
            self._engine.membership.local_state.note()  # ranks whose processes waited before the group was made
            self._place = place_of(engine, self.options.mode)
        self._engine.mask = _shared_mask(self.options, self._engine.members)
        if self._engine.mask.shows_at_once:
            self._engine.membership.show_losses()
        self._engine.reports_losses = self.options.reports_losses
        for old in self._ends:
            old.detach()  # of an engine before, which has been closed
        self._ends = [weakref.finalize(self, close_at_exit, self._engine)]  # a group lives until it is destroyed
        self._counts_present = self.options.counts_present
        self._staging = Staging(self._engine)
        if self._on_device is not None:
            self._on_device.close(False)
        self._on_device = make_calls(self._engine, self._rank, self._num_ranks, self.options)
        if self._on_device is not None:
            self._ends.append(weakref.finalize(self, self._on_device.close, False))
        if self._messages is not None:
            self._messages.close(False)
        check_peer = functools.partial(check_peer_in_view, self._engine, self._rank)
        self._messages = make_messages(self._engine, self._rank, self.options, self._store, check_peer)
        if self._messages is not None:
            self._ends.append(weakref.finalize(self, self._messages.close, False))

    # ---- torch's queries about a group

    def getRank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def getSize(self) -> int:
        """Return the number of ranks."""
        return self.size()

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks: that at creation, unless the options have it follow the ranks that take part."""
        engine = self._engine
        if not self._counts_present or self._place is None:
            return self._num_ranks
        size = engine.mask.told = engine.mask.span
        return size

    def _expected_size(self) -> int:
        """Return how many entries the lists of the next call have most likely; `fitted` accepts others, too."""
        engine = self._engine
        return self._num_ranks if self._place is None else engine.mask.told

    def name(self) -> str:
        """Return the backend's name."""
        return "epee"

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return "epee"

    def getGroupName(self) -> str:
        """Return the name that torch gave the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Keep the name that torch gives the group."""
        self._group_name = name
        self._show_name()

    def getGroupDesc(self) -> str:
        """Return the description that torch gave the group."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        """Keep the description that torch gives the group."""
        self._group_desc = desc
        self._show_name()

    def _show_name(self) -> None:
        """Use torch's name of the group in errors and hang reports."""
        self._engine.peer_regions.label.text = text = group_label(self._group_name, self._group_desc)
        self._engine.membership.call_it(text)

    def get_group_store(self) -> Any:
        """Return the store through which the group was made."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        """The CPU, once torch has registered the group.

        While it makes the group, torch 2.15 takes a list that is not empty as the sign that a backend in C++ is there
        for its flight recorder, and fails.
        """
        return [torch.device("cpu")] if self in dist.distributed_c10d._world.pg_map else []

    def _get_backend(self, device: Any) -> ProcessGroup:
        return self

    supports_splitting = False
    supports_coalescing = False

    def __reduce__(self) -> Any:
        raise UnsupportedError("a process group cannot be copied or pickled; make a new one with new_group")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long calls issued from now on wait for a silent peer."""
        self._engine.timeout_s = self._timeout_s = longest(timeout, "timeout")

    _set_default_timeout = set_timeout

    def set_p2p_timeout(self, timeout: timedelta) -> None:
        """Set how long sends and receives issued from now on wait for the other rank; collectives keep their timeout.

        Until it is called messages wait as long as collectives do.
        """
        seconds = timeout.total_seconds()
        if seconds <= 0:
            raise InvalidArgument(f"timeout must be above 0, got {timeout}")
        self._engine.p2p_timeout_s = self._p2p_timeout_s = seconds

    # ---- running plans

    def _go(
        self, make: Make, opts: Any, outputs: Any, reads: Any, writes: Any = None, is_blocking: bool = False
    ) -> Any:
        """Run or start a call; its Work shows `outputs`, which it writes, unless `writes` says otherwise."""
        tensors, given = (outputs if writes is None else writes, reads), make
        if self._counts_present:
            make = functools.partial(fitted, make, [self._expected_size()], self._engine.mask)
        try:
            if is_blocking or (opts is not None and not opts.asyncOp):
                self._engine.run(make, opts, tensors)
                return DONE
            return Work(self._engine, [self._engine.start(make, opts, tensors, is_noted=True)], outputs)
        except TooShort as exc:
            self._engine.membership.await_lost(exc, timeout_of(opts, self._engine.timeout_s))
        except expected(EpeeError) as exc:
            named(exc, self._engine.peer_regions.label.text)
            raise
        return self._go(given, opts, outputs, reads, writes, is_blocking)

    # ---- collectives

    @collective("broadcast")
    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Send `opts.rootRank`'s tensor to all ranks."""
        root = opts.rootRank if opts is not None else 0
        is_root = root == self._rank
        tensor = tensors[0] if len(tensors) == 1 else calls.one(tensors, "broadcast")
        sent, got = (tensors, ()) if is_root else ((), tensors)
        return self._go(lambda peer_regions: calls.broadcast(peer_regions, tensor, root), opts, tensors, sent, got)

    @collective("all_reduce")
    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Reduce in place on all ranks."""
        code = calls.reduction(opts.reduceOp) if opts is not None else 0
        tensor = tensors[0] if len(tensors) == 1 else calls.one(tensors, "all_reduce")
        return self._go(functools.partial(calls.all_reduce, tensor=tensor, op=code), opts, tensors, tensors)

    @collective("all_reduce_coalesced")
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Reduce several tensors of one dtype in place, as one call, all or none."""
        code = calls.reduction(opts.reduceOp) if opts is not None else 0
        calls.check_one_dtype(tensors)
        return self._go(
            lambda peer_regions: calls.all_reduce_coalesced(peer_regions, tensors, code), opts, tensors, tensors
        )

    @collective("reduce")
    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """Reduce into `opts.rootRank`'s tensor; the others keep theirs."""
        code = calls.reduction(opts.reduceOp)
        tensor = calls.one(tensors, "reduce")
        root = opts.rootRank  # now: a call may be planned again, and its caller may change `opts` for the next one
        got = tensors if root == self._rank else ()
        return self._go(
            lambda peer_regions: calls.all_reduce(peer_regions, tensor, code, root), opts, tensors, tensors, got
        )

    @collective("all_gather")
    def allgather(
        self, output_lists: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Send each rank's tensor to all ranks, one output tensor per rank."""
        tensor = calls.one(tensors, "all_gather")
        outputs = output_lists[0] if len(output_lists) == 1 else []
        return self._go(
            lambda peer_regions: calls.all_gather(peer_regions, outputs, tensor), opts, output_lists, tensors
        )

    @collective("all_gather")
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Send each rank's tensor to all ranks, one output tensor in rank order."""
        return self._go(
            lambda peer_regions: calls.all_gather_single(peer_regions, output, tensor), opts, [output], tensor
        )

    _allgather_base = all_gather_single

    @collective("all_gather_coalesced")
    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Make several `all_gather_single` calls of one dtype as one, all or none."""
        calls.check_one_dtype(inputs)
        return self._go(
            lambda peer_regions: calls.all_gather_coalesced(peer_regions, outputs, inputs), opts, outputs, inputs
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @collective("all_gather_coalesced")
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Make several `all_gather` calls as one: `output_lists[r][i]` gets rank r's `inputs[i]`.

        Done when it returns.
        """
        size = len(output_lists) if self._counts_present else self.num_slots
        if len(output_lists) != size or any(len(outs) != len(inputs) for outs in output_lists):
            raise InvalidArgument(f"all_gather_coalesced: outputs must be {size} lists of {len(inputs)} tensors")
        calls.check_one_dtype(inputs)
        make: Make = functools.partial(calls.all_gather_lists, output_lists=output_lists, inputs=inputs)
        return self._go(make, opts, output_lists, inputs, is_blocking=True)

    @collective("gather")
    def gather(self, output_lists: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """Send each rank's tensor to `opts.rootRank`."""
        outputs = output_lists[0] if output_lists else []
        tensor = calls.one(tensors, "gather")
        root = opts.rootRank
        return self._go(
            lambda peer_regions: calls.gather(peer_regions, outputs, tensor, root), opts, output_lists, tensors
        )

    @collective("scatter")
    def scatter(self, outputs: Sequence[torch.Tensor], input_lists: Sequence[Sequence[torch.Tensor]], opts: Any) -> Any:
        """Send tensor r of `opts.rootRank`'s list to rank r."""
        inputs = input_lists[0] if input_lists else []
        output = calls.one(outputs, "scatter")
        root = opts.rootRank
        return self._go(lambda peer_regions: calls.scatter(peer_regions, output, inputs, root), opts, outputs, inputs)

    @collective("reduce_scatter")
    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], input_lists: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Any:
        """Reduce all ranks' tensor r to rank r."""
        code = calls.reduction(opts.reduceOp) if opts is not None else 0
        inputs = input_lists[0] if len(input_lists) == 1 else []
        output = calls.one(outputs, "reduce_scatter")
        return self._go(
            lambda peer_regions: calls.reduce_scatter(peer_regions, output, inputs, code), opts, outputs, inputs
        )

    @collective("reduce_scatter")
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Reduce as `reduce_scatter` with one input that holds the segments in rank order."""
        code = calls.reduction(opts.reduceOp) if opts is not None else 0
        return self._go(
            lambda peer_regions: calls.reduce_scatter_single(peer_regions, output, tensor, code), opts, [output], tensor
        )

    _reduce_scatter_base = reduce_scatter_single

    @collective("reduce_scatter_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Make several `reduce_scatter_single` calls of one dtype as one, all or none."""
        code = calls.reduction(opts.reduceOp) if opts is not None else 0
        calls.check_one_dtype(inputs)
        return self._go(
            lambda peer_regions: calls.reduce_scatter_coalesced(peer_regions, outputs, inputs, code),
            opts,
            outputs,
            inputs,
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @collective("all_to_all")
    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Send tensor j of rank i to rank j's output i; sizes may differ."""
        return self._go(lambda peer_regions: calls.all_to_all(peer_regions, outputs, inputs), opts, outputs, inputs)

    @collective("all_to_all")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """Exchange as `all_to_all` with one tensor each way, split along dimension 0, evenly or by the given sizes."""
        splits = output_splits, input_splits
        return self._go(
            lambda peer_regions: calls.all_to_all_single(peer_regions, output, tensor, *splits), opts, [output], tensor
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks; with `waits_for_streams`, or a GPU in `opts`, behind the work of its current stream.

        Where collectives on CUDA tensors run on the GPUs, the streams meet there (`DeviceHalf.barrier`).
        """
        if self._on_device is not None and (self.waits_for_streams or (opts is not None and _names_gpu(opts))):
            done = self._on_device.barrier(opts)
            if done is not NOT_SERVED:
                return done
        if self.waits_for_streams:
            self._staging.await_stream("barrier")
        if not is_profiling():  # here, as `ranged` would make the shortest calls 2 % longer; so with messages
            return self._go(calls.barrier, opts, [], ())
        with range_of("barrier", (self,)):
            return self._go(calls.barrier, opts, [], ())

    # ---- point to point

    def send(self, tensors: Sequence[torch.Tensor], dst_rank: int, tag: int = 0) -> Work | Ended:
        """Send a tensor; done when the receiver has matched it."""
        tensor = tensors[0] if len(tensors) == 1 else calls.one(tensors, "send")
        if tensor.is_cuda and self._messages is not None:
            work: Any = self._on_gpus(True, tensor, dst_rank, tag)
            if work is not NOT_SERVED:
                return work
        try:
            carrier = carrier_of(tensor, "send: tensor")
        except NeedsStaging:
            with real_tensors():
                return self._staging.run("send", self.send, (tensors, dst_rank, tag), {})
        try:
            check_peer_in_view(self._engine, self._rank, dst_rank, "send")
        except expected(PeerError) as exc:
            return self._ended(exc)
        if tag:
            _check_tag(tag, "send")
        is_early = bool(self._engine.queue or self._engine.messages)
        signature = _P2P_PREFIX[carrier.code] | tensor.numel() << 23
        message = Message(True, dst_rank, tag, signature, source(tensor, carrier))
        message.tensors, message.is_early = ((), tensor), is_early
        return self._post(message, tensors)

    def _on_gpus(self, is_send: bool, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Make a message between GPUs, or return `NOT_SERVED`."""
        if tag:
            _check_tag(tag, "send" if is_send else "recv")
        assert self._messages is not None
        try:
            with real_tensors():
                if not is_profiling():
                    return self._messages.post(is_send, tensor, peer, tag)
                with range_of("send" if is_send else "recv", (self, tensor)):
                    return self._messages.post(is_send, tensor, peer, tag)
        except expected(PeerError) as exc:
            return self._ended(exc)

    def recv(self, tensors: Sequence[torch.Tensor], src_rank: int, tag: int = 0) -> Work | Ended:
        """Receive the oldest message of `src_rank` with this tag."""
        tensor = tensors[0] if len(tensors) == 1 else calls.one(tensors, "recv")
        if tensor.is_cuda and self._messages is not None:
            work: Any = self._on_gpus(False, tensor, src_rank, tag)
            if work is not NOT_SERVED:
                return work
        try:
            check_peer_in_view(self._engine, self._rank, src_rank, "recv")
        except expected(PeerError) as exc:
            return self._ended(exc)
        return self._recv(tensor, src_rank, tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Work | Ended:
        """Receive a message with this tag from any rank; `Work.source_rank()` returns the rank."""
        tensor = tensors[0] if len(tensors) == 1 else calls.one(tensors, "recv")
        if tensor.is_cuda and self._messages is not None:
            work: Any = self._on_gpus(False, tensor, ANY, tag)
            if work is not NOT_SERVED:
                return work
        return self._recv(tensor, ANY, tag)

    def _recv(self, tensor: torch.Tensor, src_rank: int, tag: int) -> Work | Ended:
        if tag:
            _check_tag(tag, "recv")
        try:
            carrier = carrier_of(tensor, "recv: tensor")
        except NeedsStaging:
            with real_tensors():
                return self._staging.run("recv", self._recv, (tensor, src_rank, tag), {})
        place = target(tensor, carrier, "recv: tensor")
        signature = _P2P_PREFIX[carrier.code] | tensor.numel() << 23
        message = Message(False, src_rank, tag, signature, place.array, place)
        message.tensors = (tensor, ())
        return self._post(message, [tensor])

    def _post(self, message: Message, tensors: Sequence[torch.Tensor]) -> Work | Ended:
        try:
            if not is_profiling():
                self._engine.post(message)
            else:
                with range_of("send" if message.is_send else "recv", (self, tensors)):
                    self._engine.post(message)
        except expected(PeerError) as exc:
            return self._ended(exc)
        try:
            return Work(self._engine, [message], tensors)
        except BaseException as exc:  # an interrupt: no thread will hold the request
            self._engine.take_back(message, exc)
            raise

    def _ended(self, error: PeerError) -> Ended:
        """Return the work of a message that a loss has ended, or raise the error."""
        named(error, self._engine.peer_regions.label.text)
        if self._engine.reports_losses and is_loss(error):
            return Ended(self._engine, error)
        raise error

    # ---- joining

    def join(self, timeout_s: float | None = None) -> None:
        """Join the running group, for a process that works alone, or that was excluded; returns when it is in.

        Nothing happens if it takes part already, which the other members confirm. Calls of this process that are open
        end with `AbortedError`.

        Args:
            timeout_s: how long to wait until a member calls `recover_ranks`; None: that of `init_process_group`.
        Raises:
            CommTimeoutError: no member has taken it in; it may call again.
            EvictedError: this process is out of the job, not of the group alone; start it again.
            InvalidState: there is no such group to join.
            SlotTakenError: another process has this rank.
        """
        limit_s = self._birth_timeout_s if timeout_s is None else seconds(timeout_s, "timeout_s")
        if self._place is not None and not self._is_out(limit_s):
            return
        before = self._engine
        if self._messages is not None:
            self._messages.close(False)  # members take this rank's words as empty from the moment at which it is in
        with BoundedStore(self._store, limit_s, self._rank) as store:
            engine = self._come_in(store, limit_s)
        before.close()
        self._begin(engine)

    def _come_in(self, store: BoundedStore, timeout_s: float, is_born: bool = False) -> Engine:
        """Take this process into the running group; `is_born`: others may wait for it, to make the group."""
        mode = self.options.mode
        if self._place is None and joins_job(store, self._is_first):
            return join_engine(store, self._rank, self._num_ranks, mode)
        place = self._place
        try:
            place = place or find_place(store, self._ranks, self._rank)
        except expected(InvalidArgument):
            if is_born:
                with attempt(meeting_place(store, self._ranks), self._rank, self._num_ranks):
                    raise  # and the error is reported to the others
            raise
        job = own_job()
        if self._place is not None and self._held is None and job is not None:
            job.retain()  # if no member takes it in now, it stays in the job, and may ask again
            self._held = job
        engine = come_in(place, self._num_ranks, timeout_s, mode, None if self._place is None else self._engine)
        self._let_go()
        return engine

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def _meet(self) -> None:
        """Make a call of all members."""
        options: Any = dist.BarrierOptions()
        options.asyncOp = False
        self.barrier(options)

    # ---- torch methods that are not possible, and ends

    def _start_coalescing(self, device: Any) -> None:
        """Collect the messages between GPUs that are made from now on."""
        self._require_messages(device).begin_batch()

    def _end_coalescing(self, device: Any) -> Any:
        """Make them as one; returns its work."""
        return self._require_messages(device).end_batch()

    def _require_messages(self, device: Any) -> MessageHalf:
        if self._messages is None or torch.device(device).type != "cuda":
            raise UnsupportedError(
                "coalescing by device exists for messages between CUDA tensors of one host only; use "
                "_coalescing_manager without a device, or batch_isend_irecv"
            )
        return self._messages

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Not available: torch offers it for gloo only. Every barrier of this backend names the missing ranks."""
        raise UnsupportedError("monitored_barrier is gloo's; barrier() of this backend names the silent ranks itself")

    def split_group(self, *args: Any, **kwargs: Any) -> None:
        """Not available: use `dist.new_group`."""
        raise UnsupportedError("split_group needs a backend written in C++; use dist.new_group(ranks)")

    splitGroup = split_group

    def shutdown(self) -> None:
        """Leave the group; waiters in other threads get `AbortedError`. Idempotent."""
        self._leave(False)

    def abort(self) -> None:
        """Leave the group as `shutdown`, and notify the peers that it was not planned. Idempotent."""
        self._leave(True)

    def _leave(self, is_aborted: bool) -> None:
        end_group(id(self))
        for half in (self._on_device, self._messages):
            if half is not None:
                half.close(is_aborted)
        self._engine.close(aborted=is_aborted)
        self._let_go()
        _alive.discard(self)


def _timeout_of_calls(dist_opts: Any) -> float:
    """Return torch's `timeout` for calls of a new group: that of `init_process_group` where `new_group` has none."""
    timeout = dist_opts.timeout
    if dist_opts.global_ranks_in_group and timeout == default_pg_timeout and dist.is_initialized():
        return float(getattr(dist.group.WORLD, "_birth_timeout_s", timeout.total_seconds()))
    return float(timeout.total_seconds())


def _checked(options: Any, default: Callable[[], BackendOptions], num_ranks: int) -> BackendOptions:
    """Return the options in force; they fit the group."""
    if options is not None and not isinstance(options, BackendOptions):
        raise InvalidArgument(f"pg_options must be epee.BackendOptions, got {type(options).__name__}")
    options = options if options is not None else default()
    options.check_group(num_ranks)
    return options


def _shared_mask(options: BackendOptions, members: PeerRegions) -> Mask:
    """Return the mask that the engine keeps up to date; it writes to the user's tensor if there is one."""
    tensor = options.active_ranks
    limit = options.max_group_size or members.group_size
    if tensor is not None:
        limit = tensor.numel()
    return Mask(limit, members.members, tensor, options.keeps_lost, options.shows_at_once)


def _names_gpu(opts: Any) -> bool:
    """Whether a barrier is asked for on a GPU: by `device_ids`, or by the `device_id` of the group."""
    return opts.device is not None and opts.device.type == "cuda"


def _check_tag(tag: int, name: str) -> None:
    if not 0 <= tag <= _MAX_TAG:
        raise InvalidArgument(f"{name}: tag must be a number >= 0, got {tag}")


_P2P_PREFIX = {code: pack_signature(OP_CODE["point_to_point"], code) for code in DTYPE_CODE.values()}  # without a count
