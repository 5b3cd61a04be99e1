"""The device half of a group's messages: `send`, `recv` and their kin on CUDA tensors, from the call to its kernel.

Data path: a message's tensor becomes a stretch of memory (`Parcel`), one kernel moves it, or all of a batch
(`machine.py`), on a stream that `streams.py` names. The host launches and waits for nobody, except where the hosts of a
pair meet (`meetings.py`: the first message between two ranks in a group, and the next one after a loss), and for a
receive from any source, which has to know who it was.

Batches. torch makes the messages of a `batch_isend_irecv` one by one; they are collected, and launched as one kernel
with the last of them that goes from GPU to GPU (`batches.py` knows how many there are). A batch that breaks off in the
middle, because a tensor is refused, has sent nothing. A wait for a message of a batch that is not complete launches
what there is.

Failures. Kernels report (`report.py`); the error is raised at the next touch of the host: a message, or the `wait` of
one. A pair that has lost a message makes none before its hosts have met. A death is told to the kernels by a thread
(`ep/gpu/death_notifier.py`); the engine hears of it by its own means.

Strided tensors are copied: contents of a send before the call on the caller's stream, of a receive behind it on the
message's. The allocator is told of other streams (`record_stream`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from ...backend.device.calls import NOT_SERVED
from ...backend.device.messages import CheckPeer
from ...backend.engine.engine import Engine
from ...backend.p2p.message import ANY
from ...backend.tensors import CARRIERS, refuse_overlap
from ...backend.work import DONE
from ...ep.gpu.report import NO_REPORTS, PEER_GAVE_UP, TIMEOUT, KernelReport
from ...errors import CommTimeoutError, EpeeError, InvalidArgument, UnsupportedError
from .batches import MessageCaller, caller
from .machine import Messages, Parcel, Queued
from .meetings import Pairs, has_gpu, is_capturing
from .params import MAX_RANKS
from .report import error_of, failed, number_of
from .streams import StreamPlace, Way
from .work import MessageWork

logger = logging.getLogger("epee")

CLOSE_S = 30.0  # how long the end of a group waits for kernels that wait for peers
NEWS_S = 0.1  # how long a host waits to hear of a death that is behind what a kernel has reported
NAP_S = 5e-5


class Letter(NamedTuple):
    """A message of a batch: what is moved, its work, the tensors that must live, and what is copied back then."""

    parcel: Parcel
    work: MessageWork
    kept: Sequence[torch.Tensor]
    back: tuple[torch.Tensor, torch.Tensor] | None


class Batch(threading.local):
    """What a thread collects.

    Attributes:
        letters: so far.
        expected: how many there will be, in a batch of torch's; else 0.
        is_open: `begin_batch` was called, and `end_batch` not yet.
    """

    def __init__(self) -> None:
        self.letters: list[Letter] = []
        self.expected = 0
        self.is_open = False


class MessageHalf:
    """See above; implements `backend.device.messages.DeviceMessages`.

    Args:
        engine: of the group.
        rank: this process's.
        staging_bytes: by which the memory is sized; equal on all ranks.
        store: of the group.
        check_peer: raises where a rank takes no part.
    """

    def __init__(self, engine: Engine, rank: int, staging_bytes: int, store: Any, check_peer: CheckPeer) -> None:
        self._engine, self._rank = engine, rank
        self._check_peer = check_peer
        self._pairs = Pairs(engine, rank, staging_bytes, store)
        self._batch = Batch()
        self._alive: deque[tuple[Callable[[], bool], Queued]] = deque()  # what kernels still read
        self._recorded: list[Queued] = []  # what graphs read
        self._lock = threading.RLock()
        self._is_closed = self._is_in_graphs = False

    # --- messages

    def post(self, is_send: bool, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Make a message, or return `NOT_SERVED`.

        Raises:
            InvalidArgument: the tensor, or a second GPU. InvalidState: a graph is being recorded, and the hosts would
                have to meet. RankFailedError, CommTimeoutError, MismatchError: an earlier message was lost; this one is
                not made. CommTimeoutError, RankFailedError: the peer does not come to its first message.
        """
        who = caller()
        if who.is_blocking and self._post_at_once(is_send, tensor, peer, tag):
            return DONE
        if self._is_closed or self._engine.members.group_size > MAX_RANKS:
            return NOT_SERVED
        if self._pairs.own_row is None and not has_gpu():
            return NOT_SERVED
        name = "send" if is_send else "recv"
        _require_fit(tensor, f"{name}: tensor")
        with self._lock:
            self.check()
            if peer == ANY:
                return self._receive_any(tensor, tag)
            if peer != self._rank:
                self._check_peer(peer, name)
            if not self._belongs(who):
                self._begin(who, tensor.device)
            if not self._pairs.meet([peer], tensor.device, name):
                return NOT_SERVED
            letter = self._letter(is_send, tensor, peer, tag)
            if self._batch.is_open or self._batch.expected:
                self._batch.letters.append(letter)
                if len(self._batch.letters) == self._batch.expected:
                    self.flush()
            else:
                self._launch([letter], None if who.is_blocking else (peer, is_send))
            return letter.work

    def _post_at_once(self, is_send: bool, tensor: torch.Tensor, peer: int, tag: int) -> bool:
        """Make a blocking message where nothing is to be looked at; False, and nothing has happened, where there is.

        That is: the pair has met, nothing was reported, no graph is recorded, the tensor is used as it is. What the
        message comes to is told at the next touch, as its `wait` could not know it yet.
        """
        pairs, machine = self._pairs, self._pairs.machine
        if peer not in pairs.met or machine is None or pairs.lost or pairs.epoch != self._engine.members.epoch:
            return False
        device, number = machine.device, _NUMBERS.get(tensor.dtype)
        if device.codes != NO_REPORTS or machine.platform.is_capturing() or self._batch.expected or self._batch.is_open:
            return False
        if number is None or tensor.get_device() != pairs.index or pairs.current() != pairs.index:
            return False
        if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return False
        with self._lock:
            if self._is_closed:
                return False
            assert pairs.streams is not None
            machine.timeout_s = self._engine.timeout_s
            raw = pairs.streams.here(peer, is_send)
            machine.run_one(Parcel(is_send, peer, tensor.data_ptr(), tensor.nbytes, tag, number), raw, False)
        return True

    def begin_batch(self) -> None:
        """Collect this thread's messages from now on."""
        self._batch.letters, self._batch.expected, self._batch.is_open = [], 0, True

    def end_batch(self) -> Any:
        """Make those that were collected as one kernel; returns their work."""
        works = [letter.work for letter in self._batch.letters]
        self._batch.is_open = False
        self.flush()
        return works[-1] if works else DONE

    def flush(self) -> None:
        """Queue what this thread's batch has collected so far."""
        letters, self._batch.letters, self._batch.expected = self._batch.letters, [], 0
        if letters:
            with self._lock:
                self._launch(letters, "batch")

    def _belongs(self, who: MessageCaller) -> bool:
        """Whether a message belongs to what is being collected, or nothing is."""
        if not who.operations:
            return self._batch.is_open or not self._batch.expected
        return self._batch.expected > 0 and any(map(_is_gpus, who.operations[: who.position]))

    def _begin(self, who: MessageCaller, device: torch.device) -> None:
        """Begin to collect what `who` makes; an earlier batch that was not completed was broken off.

        All pairs of a batch meet now, so that none waits behind the meeting of another.
        """
        peers = [op.group_peer for op in who.operations if _is_gpus(op)]
        self._batch.letters, self._batch.expected = [], 0
        for peer in peers:
            if peer != self._rank:
                self._check_peer(peer, "batch_isend_irecv")
        self._pairs.meet(peers, device, "batch_isend_irecv")
        self._batch.expected = sum(peer in self._pairs.met for peer in peers)

    def _letter(self, is_send: bool, tensor: torch.Tensor, peer: int, tag: int) -> Letter:
        plain, back = tensor.detach(), None
        if not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
            if is_send:
                plain = plain.contiguous().resolve_conj().resolve_neg()
            else:
                refuse_overlap(tensor, "recv: tensor")
                scratch = torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
                plain, back = scratch, (plain, scratch)
        parcel = Parcel(is_send, peer, plain.data_ptr(), plain.nbytes, tag, number_of(plain.dtype))
        kept = [tensor, plain]
        return Letter(parcel, MessageWork(self, [tensor], self._pairs.gpu), kept, back)

    def _launch(self, letters: Sequence[Letter], name: Any) -> None:
        """Queue letters as one kernel, on the caller's stream where `name` is None."""
        machine, streams = self._pairs.machine, self._pairs.streams
        assert machine is not None
        assert streams is not None
        machine.timeout_s = self._engine.timeout_s
        ways = {(letter.parcel.peer, letter.parcel.is_send) for letter in letters}
        with self._on_gpu(), streams.entered(name, ways) as place:
            queued = machine.run([letter.parcel for letter in letters], place.raw, place.side is not None)
            self._end(letters, ways, place, queued)

    def _receive_any(self, tensor: torch.Tensor, tag: int) -> Any:
        members = [rank for rank in self._engine.members.members if rank != self._rank]
        if is_capturing():
            raise UnsupportedError("recv: a graph cannot record a receive from any source; name the source")
        if not self._pairs.meet([*members, self._rank], tensor.device, "recv"):
            if not any(rank in self._pairs.met for rank in members):
                return NOT_SERVED
            raise UnsupportedError(
                f"recv: some ranks send from GPU to GPU, others ({sorted(self._pairs.off)}) through host memory, so a "
                "receive from any source cannot wait for all; name the source"
            )
        machine, streams = self._pairs.machine, self._pairs.streams
        assert machine is not None
        assert streams is not None
        machine.timeout_s = self._engine.timeout_s
        letter = self._letter(False, tensor, ANY, tag)
        ways = {(rank, False) for rank in self._pairs.met}
        with self._on_gpu(), streams.entered("any", ways) as place:
            self._end([letter], ways, place, machine.receive_any(letter.parcel, place.raw))
        return letter.work

    def _end(self, letters: Sequence[Letter], ways: Collection[Way], place: StreamPlace, queued: Queued) -> None:
        """Queue what comes behind a kernel, and note where the works stand."""
        machine, streams = self._pairs.machine, self._pairs.streams
        assert machine is not None
        assert streams is not None
        for letter in letters:
            if letter.back is not None:
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
        for letter in letters:
            letter.work.begin(place.raw, mark, queued)

    def _on_gpu(self) -> Any:
        pairs = self._pairs
        return contextlib.nullcontext() if pairs.current() == pairs.index else torch.cuda.device(pairs.gpu)

    # --- failures

    def check(self) -> None:
        """Raise what kernels have reported. Any thread."""
        machine = self._pairs.machine
        if machine is None or not machine.device.has_reports:
            return
        with self._lock:
            errors = [self._error_of(machine, report) for report in machine.reports()]
        for error in errors[1:]:
            logger.info("beside the failure that is raised now: %s", error)
        if errors:
            raise errors[0]

    def _error_of(self, machine: Messages, report: KernelReport) -> EpeeError:
        if report.peer >= MAX_RANKS:
            return error_of(report, self._rank)  # of a receive from any source: no pair has lost anything
        self._pairs.lost.add(report.peer)
        if report.code in (TIMEOUT, PEER_GAVE_UP):
            begun = time.monotonic()
            while time.monotonic() - begun < NEWS_S and not machine.device.is_marked(report.peer):
                time.sleep(1e-3)
            if machine.device.is_marked(report.peer):
                return failed(report, self._rank, report.peer)
        return error_of(report, self._rank)

    def await_end(self, is_done: Callable[[], bool], name: str) -> None:
        """Let the host wait for a message's end, and raise what became of it."""
        deadline = time.monotonic() + self._engine.timeout_s + CLOSE_S
        while not is_done():
            if time.monotonic() > deadline:
                raise CommTimeoutError(f"{name}: the GPU has not come to the message within the group's time-out")
            time.sleep(NAP_S)
        self.check()

    # --- end

    def close(self, is_aborted: bool) -> None:
        """End. Waits for the kernels in flight, or ends their waits if `is_aborted`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
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
        if not self._is_in_graphs:  # they have its addresses
            machine.close()


_NUMBERS = {dtype: number_of(dtype) for dtype in CARRIERS}


def _require_fit(tensor: torch.Tensor, name: str) -> None:
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"{name} must be a strided tensor, got {tensor.layout}; call .to_dense()")
    if tensor.dtype not in CARRIERS:
        raise InvalidArgument(f"{name} has dtype {tensor.dtype}, which cannot be communicated; convert it first")


def _is_gpus(operation: Any) -> bool:
    return bool(operation.tensor.is_cuda)
