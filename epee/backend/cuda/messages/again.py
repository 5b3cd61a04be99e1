"""Fast path of messages: a single message without the checks, or a batch that matches an earlier one.

torch makes the messages of a `batch_isend_irecv` one by one, each by a method of the group. The first of them finds the
whole list on the stack (`batches.py`). If the batch matches an earlier one (the same ends, tags, dtypes, sizes, in the
same order) all of it is queued at once, and the messages after the first one only take their work. So such a batch is
made or not made as a whole, also if an interrupt comes between two messages.

A plan is made when a cache key comes for the second time, from the result of the ordinary path, checks included. What a
key does not hold (dead ranks, another view, other blocks, a graph, reports) is checked each time. At most `MAX_PLANS`
are kept, then the cache starts empty.

Functions on the path of a message are long here, since each call of another function adds to its time.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ....engine.tensors import CARRIERS
from ....errors import InvalidState
from ....gpu.report import NO_REPORTS
from ...work import DONE
from .batches import MessageCaller
from .machine import Messages, Parcel, ReadyBatch
from .meetings import Pairs
from .params import OPS_INSIDE
from .report import number_of
from .streams import Way
from .work import MessageEnd, MessageWork, Owner

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


class ThreadsBatch(threading.local):
    """The part of a thread's batch that the fast path uses.

    Attributes:
        expected: number of messages to come in a batch of torch's; else 0.
        is_open: `begin_batch` was called, and `end_batch` not yet.
        look: key of a batch of torch's that no plan was found for.
        made: a batch that was queued with its first message, until all have taken their work.
    """

    def __init__(self) -> None:
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
        except NO_KEY:
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

    def __init__(self, owner: Owner, pairs: Pairs, batch: ThreadsBatch, lock: threading.RLock) -> None:
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
        if device.codes != NO_REPORTS or device.news.words[1] & peers or machine.platform.is_capturing():
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
        end = MessageEnd(platform, machine.device.codes, place.raw, mark, queued)
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
        end, device = MessageEnd(platform, machine.device.codes, place.raw, mark, queued), platform.device
        works: list[MessageWork] = []
        for (peer, is_send), operation in zip(known.ends, who.operations, strict=True):
            tensor = operation.tensor
            if place.side is not None:
                tensor.record_stream(place.side)
            works.append(MessageWork(self._owner, [tensor], device, peer, is_send, end))
        if len(works) > 1:
            self._batch.made = MadeBatch(who, works)
        return works[0]
