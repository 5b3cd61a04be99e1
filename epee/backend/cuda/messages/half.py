"""Messages of a group's CUDA backend: `send`, `recv` and their variants on CUDA tensors, from the call to its kernel.

Data path: a message's tensor becomes a range of memory (`Parcel`), one kernel moves it, or all of a batch
(`machine.py`), on a stream chosen by `streams.py`. The cpu launches and waits for no rank, except when the two ranks of
a pair meet (`meetings.py`: at the first message between two ranks in a group, and at the next one after a loss), and
for a receive from any source, whose source it must know.

Batches. torch makes the messages of a `batch_isend_irecv` one by one; they are collected, and launched as one kernel
with the last of them that goes from GPU to GPU (`batches.py` knows their number). A batch that is interrupted, because
a tensor is refused, has sent nothing. A wait for a message of an incomplete batch launches what has been collected. A
batch that matches an earlier one is queued with its first message (`again.py`); on the fast path a single message is
queued without the checks.

Failures: `losses.py`. A batch in which a peer is dead makes the others' messages if the group reports losses.

Strided tensors are copied: contents of a send before the call on the caller's stream, of a receive after it on the
message's. The allocator is notified of other streams (`record_stream`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ....arrays import writing
from ....engine import Engine
from ....engine.p2p.message import ANY
from ....engine.tensors import CARRIERS
from ....errors import InvalidArgument, PeerError, UnsupportedError
from ...work import DONE, is_loss
from ..interface import NOT_SERVED
from .again import ShortWay, ThreadsBatch
from .batches import MessageCaller, caller, is_below
from .losses import CLOSE_S, LostMessages
from .machine import Queued
from .meetings import Pairs, has_gpu, is_capturing
from .params import MAX_RANKS
from .streams import StreamPlace, Way
from .work import Letter, MessageEnd, letter_of


class Batch(ThreadsBatch):
    """The messages that a thread has collected.

    Attributes:
        letters: so far.
        lost: lost peers of the batch, if that is no failure of the other messages, and the reasons.
    """

    def __init__(self) -> None:
        super().__init__()
        self.letters: list[Letter] = []
        self.lost: dict[int, PeerError] = {}


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
        check, lost_by, await_end: as in `losses.py`.
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
            if is_below(made.frame, made.depth) or caller(tensor).frame is made.frame:
                work = made.take(tensor, peer)
                self._batch.made = None if made.is_over else made
                return work
        who = caller(tensor)
        if who.operations:
            work = self._short.post_batch(who)
        else:
            work = self._short.post_one(is_send, tensor, peer, tag, who.is_blocking)
        if work is not None:
            return work
        if self._is_closed or self._engine.members.group_size > MAX_RANKS:
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
            except PeerError as exc:
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
            except PeerError as exc:
                if not (self._pairs.is_masked and is_loss(exc)):
                    raise
        off = sorted(self._pairs.off)
        if off and not any(rank in self._pairs.met for rank in members):
            return NOT_SERVED
        if off:
            raise UnsupportedError(
                f"recv: some ranks send from GPU to GPU, others ({off}) through host memory, so a receive from any "
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
        end = MessageEnd(machine.platform, machine.device.codes, place.raw, mark, queued)
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
        ways = [(rank, is_send) for rank in range(MAX_RANKS) for is_send in (False, True)]
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
