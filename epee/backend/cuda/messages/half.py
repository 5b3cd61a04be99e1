"""Messages of a group's CUDA backend: `send`, `recv` and their variants on CUDA tensors, from the call to its kernel.

Data path: a message's tensor becomes a range of memory (`Parcel`), one kernel moves it, or all of a batch
(`machine.py`), on a stream chosen by `streams.py`. The cpu launches and waits for no rank, except when the two ranks of
a pair meet (`meetings.py`: at the first message between two ranks in a group, and at the next one after a loss), and
for a receive from any source, whose source it must know.

Batches. torch makes the messages of a `batch_isend_irecv` one by one; they are collected, and launched as one kernel
with the last of them that goes from GPU to GPU (`torch_private.py` knows their number). A batch that is interrupted,
because a tensor is refused, has sent nothing. A wait for a message of an incomplete batch launches what has been
collected.

Strided tensors are copied: contents of a send before the call on the caller's stream, of a receive after it on the
message's. The allocator is notified of other streams (`record_stream`).

Fast path (`ShortWay`): a single message without the checks, or a batch that matches an earlier one. The first message
of a batch finds the whole list on the stack (`torch_private.py`). If the batch matches an earlier one (the same ends,
tags, dtypes, sizes, in the same order) all of it is queued at once, and the messages after the first one only take
their work. So such a batch is made or not made as a whole, also if an interrupt comes between two messages. A plan is
made when a cache key comes for the second time, from the result of the ordinary path, checks included. What a key does
not hold (dead ranks, another view, other blocks, a graph, reports) is checked each time. At most `MAX_PLANS` are kept,
then the cache starts empty. Functions on the path of a message are long here, since each call of another function adds
to its time.

Lost messages (`LostMessages`). Kernels report (`report.py`); the error is raised at the next entry from the cpu: a
message, or the `wait` of one. A pair that has lost a message makes none before its ranks have met (`pairs.py`). A
thread reports a death to the kernels (`gpu/death_notifier.py`); the engine detects it by its own means. If the group
reports losses (mode "mask" under Mooncake's names) a message to or from a dead rank raises nothing: its work reports
that it was lost (`work.py`), and a batch makes the messages of the other peers. Only the survivor decides
(`csrc/kernels/message/batch.cuh`), so mode "mask" needs no more here, except that a death is reported when the dead
rank's memory is final.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ....arrays import writing
from ....engine import Engine
from ....engine.p2p.message import ANY
from ....engine.tensors import CARRIERS
from ....errors import (
    CommTimeoutError,
    EpeeError,
    InvalidArgument,
    InvalidState,
    PeerError,
    RankFailedError,
    UnsupportedError,
    expected,
    named,
)
from ....gpu.ranks import MAX_LOCAL
from ....gpu.report import PEER_GAVE_UP, TIMEOUT, KernelReport
from ....torch_private import MessageCaller, is_below, message_caller
from ...work import DONE, is_loss
from ..interface import NOT_SERVED
from .machine import Messages, Parcel, Queued, ReadyBatch
from .meetings import Pairs, has_gpu, is_capturing
from .params import OPS_INSIDE
from .report import error_of, failed, number_of
from .streams import StreamPlace, Way
from .work import Letter, MessageEnd, MessageWork, letter_of

MAX_PLANS = 256
NO_KEY = (AttributeError, TypeError, RuntimeError)  # raised for objects that are no tensors with their own memory
_STRIDED = torch.strided
_NUMBERS = {dtype: number_of(dtype) for dtype in CARRIERS}


class Likeness(NamedTuple):
    """The cache key of a batch, and the addresses of its tensors."""

    key: Hashable
    addresses: list[int]


class Known(NamedTuple):
    """A plan: its launcher, ends, those ranks as bits, and the view for which it was checked."""

    batch: ReadyBatch
    ends: list[Way]
    ways: frozenset[Way]
    peers: int
    epoch: int


class MadeBatch:
    """The works of a batch that was queued with its first message, for the later messages.

    Args:
        who: the caller that makes it.
        works: one for each message.

    Attributes:
        frame, depth: of the caller, as in `MessageCaller`.
        is_over: all messages have taken their work.
    """

    def __init__(self, who: MessageCaller, works: list[Any]) -> None:
        self.frame, self.depth, self._operations, self._works = who.frame, who.depth, who.operations, works
        self._next = 1  # the caller has taken the first one
        self.is_over = False

    def take(self, tensor: torch.Tensor, peer: int) -> Any:
        """Return the work of the next message.

        Raises:
            InvalidState: it is not the one of the list.
        """
        at = self._next
        if (
            at >= len(self._works)
            or self._operations[at].tensor is not tensor
            or self._operations[at].group_peer != peer
        ):
            raise InvalidState("batch_isend_irecv: its list of operations has changed meanwhile")
        self._next = at + 1
        self.is_over = self._next == len(self._works)
        return self._works[at]


class Batch(threading.local):
    """The messages that a thread has collected.

    Attributes:
        letters: so far.
        lost: lost peers of the batch, if that is no failure of the other messages, and the reasons.
        expected: number of messages to come in a batch of torch's; else 0.
        is_open: `begin_batch` was called, and `end_batch` not yet.
        look: key of a batch of torch's that no plan was found for.
        made: a batch that was queued with its first message, until all have taken their work.
    """

    def __init__(self) -> None:
        self.letters: list[Letter] = []
        self.lost: dict[int, PeerError] = {}
        self.expected = 0
        self.is_open = False
        self.look: Likeness | None = None
        self.made: MadeBatch | None = None


class KnownBatches:
    """The plans of one rank."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, Known | None] = {}

    def look(self, operations: Sequence[Any]) -> Likeness | None:
        """Return the key of a list of torch's operations; None if it is not one that a plan could be for."""
        key: list[Any] = []
        addresses = []
        try:
            for op in operations:
                x = op.tensor
                if x.layout is not _STRIDED or not x.is_contiguous() or x.is_neg():  # complex numbers have no plans
                    return None
                key += op.op, op.group_peer, op.tag, x.dtype, x.numel(), x.get_device(), type(x)
                addresses.append(x.data_ptr())
        except expected(*NO_KEY):
            return None
        return Likeness(tuple(key), addresses)

    def find(self, look: Likeness, machine: Messages, epoch: int) -> Known | None:
        """Return the plan for a key, None if there is none for these blocks and this view."""
        known = self._plans.get(look.key)
        if known is None or known.epoch != epoch or known.batch.plan is not machine.plan:
            return None
        return known

    def remember(
        self, look: Likeness, machine: Messages, epoch: int, parcels: Sequence[Parcel], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Note what was made for a key: one parcel for each operation, in their order."""
        is_as_it_came = [parcel.at for parcel in parcels] == look.addresses
        plain = _function_of(torch.Tensor), _function_of(torch.nn.Parameter)
        is_plain = all(_function_of(type(x)) in plain for x in tensors)
        if not is_as_it_came or not is_plain or len(parcels) > OPS_INSIDE or any(x.is_complex() for x in tensors):
            return
        if look.key not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[look.key] = None
            return
        ends = [(parcel.peer, parcel.is_send) for parcel in parcels]
        peers = sum(1 << peer for peer in {peer for peer, _ in ends})
        self._plans[look.key] = Known(machine.ready(parcels, True), ends, frozenset(ends), peers, epoch)


def _function_of(kind: type[torch.Tensor]) -> Any:
    """Return the function override of a tensor class: classes other than torch's own may change the call."""
    function: Any = kind.__torch_function__
    return getattr(function, "__func__", function)


class ShortWay:
    """Fast path of messages. Each `post...` returns None, without any effect, if the ordinary path is needed.

    Args:
        owner: of the messages.
        pairs: of this rank.
        batch: of the thread that calls.
        lock: of the pairs.
    """

    def __init__(self, owner: MessageHalf, pairs: Pairs, batch: Batch, lock: threading.RLock) -> None:
        self._owner, self._pairs, self._batch, self._lock = owner, pairs, batch, lock
        self._engine = owner.engine
        self._known = KnownBatches()
        self.remember = self._known.remember
        self._is_closed = False

    def close(self) -> None:
        """Make no more messages."""
        self._is_closed = True

    def _quiet(self, peers: int) -> Messages | None:
        """Return the machine if the fast path is allowed for pairs that have met, else None.

        It is allowed if nothing was reported or lost, none of these peers, as bits, is dead, the view is the one
        checked last, no graph is recorded, no batch is being collected, and the GPU is the current one.
        """
        pairs, batch = self._pairs, self._batch
        machine = pairs.machine
        if machine is None or pairs.lost or pairs.epoch != self._engine.members.epoch or self._is_closed:
            return None
        device = machine.device
        if device.codes != device.no_reports or device.news.words[1] & peers or machine.platform.is_capturing():
            return None
        if batch.expected or batch.is_open or pairs.current() != pairs.index:
            return None
        machine.timeout_s = self._engine.p2p_timeout_s or self._engine.timeout_s
        return machine

    def post_one(self, is_send: bool, tensor: torch.Tensor, peer: int, tag: int, is_blocking: bool) -> Any:
        """Make a single message, if its tensor is used as it is and its pair has met.

        A failure of a blocking one is raised at the next entry, as its `wait` could not know it yet.
        """
        number = _NUMBERS.get(tensor.dtype)
        if peer not in self._pairs.met or number is None or tensor.get_device() != self._pairs.index:
            return None
        if tensor.layout is not _STRIDED or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return None
        parcel = Parcel(is_send, peer, tensor.data_ptr(), tensor.nbytes, tag, number)
        with self._lock:
            machine, streams = self._quiet(1 << peer), self._pairs.streams
            if machine is None or streams is None:
                return None
            if is_blocking:
                machine.run_one(parcel, streams.here(peer, is_send), False)
                return DONE
            way = peer, is_send
            place = streams.beside(way, (way,))
            queued = machine.run_one(parcel, place.raw, place.side is not None)
            platform, mark = machine.platform, streams.note((way,), place)
        if place.side is not None:
            tensor.record_stream(place.side)
        end = MessageEnd(platform, machine.device, place.raw, mark, queued)
        return MessageWork(self._owner, [tensor], platform.device, peer, is_send, end)

    def post_batch(self, who: MessageCaller) -> MessageWork | None:
        """Make a whole batch that matches an earlier one, and return its first work."""
        if who.position:
            return None  # a batch begun on the ordinary path
        self._batch.look = None
        look = self._known.look(who.operations)
        if look is None:
            return None
        with self._lock:
            pairs = self._pairs
            machine, streams = pairs.machine, pairs.streams
            known = None if machine is None else self._known.find(look, machine, pairs.epoch)
            if known is None:
                self._batch.look = look
                return None
            machine = self._quiet(known.peers)
            if machine is None or streams is None:
                return None
            place = streams.beside("batch", known.ways)
            queued = known.batch.launch(look.addresses, place.raw)
            platform, mark = machine.platform, streams.note(known.ways, place)
        end, device = MessageEnd(platform, machine.device, place.raw, mark, queued), platform.device
        works: list[MessageWork] = []
        for (peer, is_send), operation in zip(known.ends, who.operations, strict=True):
            tensor = operation.tensor
            if place.side is not None:
                tensor.record_stream(place.side)
            works.append(MessageWork(self._owner, [tensor], device, peer, is_send, end))
        if len(works) > 1:
            self._batch.made = MadeBatch(who, works)
        return works[0]


logger = logging.getLogger("epee")

CLOSE_S = 30.0  # how much longer than the group's timeout the cpu waits for kernels
NEWS_S = 0.1  # how long the cpu waits for the notification of a death that caused a kernel's report
NAP_S = 5e-5


class LostMessages:
    """Errors of lost messages. Any thread.

    Args:
        engine: of the group.
        rank: this process's.
        pairs: of this rank.
        lock: of the pairs.
    """

    def __init__(self, engine: Engine, rank: int, pairs: Pairs, lock: threading.RLock) -> None:
        self._engine, self._rank, self._pairs, self._lock = engine, rank, pairs, lock

    def check(self) -> None:
        """Raise what kernels have reported. Any thread."""
        machine = self._pairs.machine
        if machine is None or not machine.device.has_reports:
            return
        with self._lock:
            errors = [self._error_of(machine, report) for report in machine.device.take_reports()]
        for error in errors:
            named(error, self._engine.peer_regions.label.text)
        if self._engine.reports_losses:
            for error in filter(is_loss, errors):
                logger.warning("%s", error)
                self._engine.membership.await_shown(getattr(error, "ranks", ()))
            errors = [error for error in errors if not is_loss(error)]
        for error in errors[1:]:
            logger.info("beside the failure that is raised now: %s", error)
        if errors:
            raise errors[0]

    def _error_of(self, machine: Messages, report: KernelReport) -> EpeeError:
        if report.peer >= MAX_LOCAL:
            return error_of(report, self._rank)  # a receive from any source: no pair has lost a message
        self._pairs.lost.add(report.peer)
        if report.code in (TIMEOUT, PEER_GAVE_UP):
            begun = time.monotonic()
            while time.monotonic() - begun < NEWS_S and not machine.device.is_marked(report.peer):
                time.sleep(1e-3)
            if machine.device.is_marked(report.peer):
                return failed(report, self._rank, report.peer)
        return error_of(report, self._rank)

    def lost_by(self, peer: int, is_send: bool, queued: Queued) -> EpeeError | None:
        """Return why a message whose kernel has ended was lost, None if it was not."""
        machine = self._pairs.machine
        if machine is None:
            return None
        is_any = queued.source is not None
        if queued.source is not None and queued.source.words[0]:
            return None
        if not is_any and not machine.is_lost(peer, is_send, queued.ticket):
            return None
        name, who = "send" if is_send else "recv", range(MAX_LOCAL) if is_any else (peer,)
        dead = [rank for rank in who if machine.device.is_marked(rank)]
        text = f"{name}: the message {'to' if is_send else 'from'} {'any rank' if is_any else f'rank {peer}'} was lost"
        if dead:
            self._engine.membership.await_shown(dead)
            return RankFailedError(f"{text}; dead: {dead}", dead, name, 0, cause="process ended")
        return CommTimeoutError(f"{text}, or one before it between the two", [] if is_any else [peer], has_job=True)

    def is_dead(self, peer: int) -> bool:
        """Return whether kernels have been notified of the death of a rank."""
        machine = self._pairs.machine
        return machine is not None and machine.device.is_marked(peer)

    def await_end(self, is_done: Callable[[], bool], name: str) -> None:
        """Block the cpu until a message's end, and raise its failure."""
        deadline = time.monotonic() + self._engine.timeout_s + CLOSE_S
        while not is_done():
            if time.monotonic() > deadline:
                told = f"{name}: the GPU has not come to the message within the group's time-out"
                raise CommTimeoutError(told, has_job=True)
            time.sleep(NAP_S)
        self.check()


class MessageHalf:
    """Messages of one group between CUDA tensors.

    Args:
        engine: of the group.
        rank: this process's.
        staging_bytes: determines the size of the memory; equal on all ranks.
        store: of the group.
        check_peer: raises if a rank takes no part.
        is_masked: mode "mask".

    Attributes:
        engine: of the group.
        check, lost_by, await_end, is_dead: as in `LostMessages`.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int,
        staging_bytes: int,
        store: Any,
        check_peer: Callable[[int, str], None],
        is_masked: bool = False,
    ) -> None:
        self.engine = self._engine = engine
        self._rank = rank
        self._check_peer = check_peer
        self._pairs = Pairs(engine, rank, staging_bytes, store, is_masked)
        self._batch = Batch()
        self._alive: deque[tuple[Callable[[], bool], Queued]] = deque()  # memory that kernels still read
        self._recorded: list[Queued] = []  # memory that graphs read
        self._lock = threading.RLock()
        self._losses = LostMessages(engine, rank, self._pairs, self._lock)
        self._short = ShortWay(self, self._pairs, self._batch, self._lock)
        self.check, self.lost_by, self.await_end = self._losses.check, self._losses.lost_by, self._losses.await_end
        self.is_dead = self._losses.is_dead
        self._is_closed = self._is_in_graphs = False

    # --- messages

    def post(self, is_send: bool, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Make a message, or return `NOT_SERVED`.

        Raises:
            InvalidArgument: the tensor, or a second GPU. InvalidState: a graph is being recorded, and the ranks would
                have to meet. RankFailedError, CommTimeoutError, MismatchError: an earlier message was lost; this one is
                not made. CommTimeoutError, RankFailedError: the peer does not reach its first message.
        """
        made = self._batch.made
        if made is not None:
            self._batch.made = None
            if is_below(made.frame, made.depth) or message_caller(tensor).frame is made.frame:
                work = made.take(tensor, peer)
                self._batch.made = None if made.is_over else made
                return work
        who = message_caller(tensor)
        if who.operations:
            work = self._short.post_batch(who)
        else:
            work = self._short.post_one(is_send, tensor, peer, tag, who.is_blocking)
        if work is not None:
            return work
        if self._is_closed or self._engine.members.group_size > MAX_LOCAL:
            return NOT_SERVED
        if self._pairs.own_row is None and not has_gpu():
            return NOT_SERVED
        _require_fit(tensor, f"{'send' if is_send else 'recv'}: tensor")
        with self._lock:
            self.check()
            self._pairs.renew(self.check)
            return self._post(who, is_send, tensor, peer, tag)

    def _post(self, who: MessageCaller, is_send: bool, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Make a message with all checks; see `post`."""
        name = "send" if is_send else "recv"
        if peer == ANY:
            return self._receive_any(tensor, tag)
        if not self._belongs(who):
            self._begin(who, tensor.device)
        if who.operations and peer in self._batch.lost:
            raise self._batch.lost[peer]
        if peer != self._rank:
            self._check_peer(peer, name)
        if not self._pairs.meet([peer], tensor.device, name):
            return NOT_SERVED
        letter = letter_of(self, self._pairs.gpu, is_send, tensor, peer, tag)
        if self._batch.is_open or self._batch.expected:
            self._batch.letters.append(letter)
            if len(self._batch.letters) == self._batch.expected:
                self.flush()
        else:
            self._launch([letter], None if who.is_blocking else (peer, is_send))
        return letter.work

    def begin_batch(self) -> None:
        """Collect this thread's messages from now on."""
        self._batch.letters, self._batch.expected, self._batch.is_open = [], 0, True
        self._batch.lost, self._batch.look = {}, None

    def end_batch(self) -> Any:
        """Make the collected messages as one kernel; returns their work."""
        works = [letter.work for letter in self._batch.letters]
        self._batch.is_open = False
        self.flush()
        return works[-1] if works else DONE

    def flush(self) -> None:
        """Queue the messages that this thread's batch has collected so far."""
        letters, self._batch.letters, expected = self._batch.letters, [], self._batch.expected
        look, self._batch.look, self._batch.expected = self._batch.look, None, 0
        if not letters:
            return
        with self._lock:
            self._launch(letters, "batch")
            machine = self._pairs.machine
            is_whole = look is not None and len(letters) == expected == len(look.addresses)
            if look is not None and machine is not None and is_whole and not machine.platform.is_capturing():
                parcels, tensors = [letter.parcel for letter in letters], [letter.kept[0] for letter in letters]
                self._short.remember(look, machine, self._pairs.epoch, parcels, tensors)

    def _belongs(self, who: MessageCaller) -> bool:
        """Whether a message belongs to the batch being collected, or none is being collected."""
        if not who.operations:
            return self._batch.is_open or not self._batch.expected
        return self._batch.expected > 0 and any(map(_is_gpus, who.operations[: who.position]))

    def _begin(self, who: MessageCaller, device: torch.device) -> None:
        """Begin to collect the messages of `who`; an earlier incomplete batch was interrupted.

        All pairs of a batch meet now, so that none waits behind the meeting of another.
        """
        self._batch.letters, self._batch.expected, self._batch.lost = [], 0, {}
        peers = [op.group_peer for op in who.operations[who.position :] if _is_gpus(op)]
        for peer in sorted({*peers}):
            try:
                if peer != self._rank:
                    self._check_peer(peer, "batch_isend_irecv")
                self._pairs.meet([peer], device, "batch_isend_irecv")
            except expected(PeerError) as exc:
                if not (self._engine.reports_losses and is_loss(exc)):
                    raise
                self._batch.lost[peer] = exc
        self._batch.expected = sum(peer in self._pairs.met and peer not in self._batch.lost for peer in peers)

    def _launch(self, letters: Sequence[Letter], name: Any) -> None:
        """Queue messages as one kernel, on the caller's stream if `name` is None."""
        machine, streams = self._pairs.gear
        machine.timeout_s = self._engine.p2p_timeout_s or self._engine.timeout_s
        ways = {(letter.parcel.peer, letter.parcel.is_send) for letter in letters}
        with self._on_gpu(), streams.entered(name, ways) as place:
            queued = machine.run([letter.parcel for letter in letters], place.raw, place.side is not None)
            self._end(letters, ways, place, queued)

    def _receive_any(self, tensor: torch.Tensor, tag: int) -> Any:
        members = [rank for rank in self._engine.members.members if rank != self._rank]
        if is_capturing():
            raise UnsupportedError("recv: a graph cannot record a receive from any source; name the source")
        for rank in [*members, self._rank]:
            try:
                self._pairs.meet([rank], tensor.device, "recv")
            except expected(PeerError) as exc:
                if not (self._pairs.is_masked and is_loss(exc)):
                    raise
        off = sorted(self._pairs.off)
        if off and not any(rank in self._pairs.met for rank in members):
            return NOT_SERVED
        if off:
            raise UnsupportedError(
                f"recv: some ranks send from GPU to GPU, others ({off}) through CPU memory, so a receive from any "
                "source cannot wait for all; name the source"
            )
        machine, streams = self._pairs.gear
        machine.timeout_s = self._engine.p2p_timeout_s or self._engine.timeout_s
        letter = letter_of(self, self._pairs.gpu, False, tensor, ANY, tag)
        ways = {(rank, False) for rank in self._pairs.met}
        with self._on_gpu(), streams.entered("any", ways) as place:
            self._end([letter], ways, place, machine.receive_any(letter.parcel, place.raw))
        return letter.work

    def _end(self, letters: Sequence[Letter], ways: Collection[Way], place: StreamPlace, queued: Queued) -> None:
        """Queue what follows a kernel, and note the end of the works."""
        machine, streams = self._pairs.gear
        for letter in letters:
            if letter.back is not None:
                with writing(letter.back[0]):
                    letter.back[0].copy_(letter.back[1])
            if place.side is not None:
                for tensor in letter.kept:
                    tensor.record_stream(place.side)
        mark = streams.note(ways, place)
        if place.is_recorded:
            self._is_in_graphs = True
            self._recorded.append(queued)
        elif queued.more is not None or queued.source is not None:
            is_done = functools.partial(machine.platform.is_done, mark)
            self._alive = deque((ended, kept) for ended, kept in self._alive if not ended())
            self._alive.append((is_done, queued))
        end = MessageEnd(machine.platform, machine.device, place.raw, mark, queued)
        for letter in letters:
            letter.work.begin(end)

    def _on_gpu(self) -> Any:
        pairs = self._pairs
        return contextlib.nullcontext() if pairs.current() == pairs.index else torch.cuda.device(pairs.gpu)

    # --- end

    def close(self, is_aborted: bool) -> None:
        """Close. Waits for the unfinished kernels, or ends their waits if `is_aborted`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._batch.made = None
        self._short.close()
        machine, streams = self._pairs.machine, self._pairs.streams
        self._pairs.stop()
        if machine is None or streams is None or machine.device.is_closed:
            return
        if is_aborted:
            machine.device.abort()
        ways = [(rank, is_send) for rank in range(MAX_LOCAL) for is_send in (False, True)]
        if not streams.drain(ways, min(self._engine.timeout_s, CLOSE_S)):
            machine.device.abort()
            streams.drain(ways, CLOSE_S)
        if not self._is_in_graphs:  # graphs have its addresses
            machine.close()


def _require_fit(tensor: torch.Tensor, name: str) -> None:
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"{name} must be a strided tensor, got {tensor.layout}; call .to_dense()")
    if tensor.dtype not in CARRIERS:
        raise InvalidArgument(f"{name} has dtype {tensor.dtype}, which cannot be communicated; convert it first")


def _is_gpus(operation: Any) -> bool:
    return bool(operation.tensor.is_cuda)
