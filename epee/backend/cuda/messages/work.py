"""A message on the GPUs from the call to its end: the memory moved, and the work, as streams and the cpu see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch

from ....arrays import require_memory
from ....engine import Engine
from ....engine.tensors import refuse_overlap
from ....errors import EpeeError
from ....gpu.device import GpuDevice
from ....gpu.event import Event
from ....gpu.platform import Platform
from ....untraced import untraced_methods
from ...work import WorkOfGroup
from ..work import DeviceWork
from .machine import ANY, Parcel, Queued
from .report import number_of


class Owner(Protocol):
    """The maker of messages."""

    engine: Engine

    def check(self) -> None:
        """Raise what kernels have reported."""

    def flush(self) -> None:
        """Queue the messages that a batch has collected so far."""

    def await_end(self, is_done: Callable[[], bool], name: str) -> None:
        """Block the cpu until a message's end, and raise its failure."""

    def is_dead(self, peer: int) -> bool:
        """Return whether kernels have been notified of the death of a rank."""

    def lost_by(self, peer: int, is_send: bool, queued: Queued) -> EpeeError | None:
        """Return why a message whose kernel has ended was lost, None if it was not."""


class MessageEnd:
    """The end of a launch, shared by all messages that it made.

    Args:
        platform: the GPU.
        device: with the reports of its kernels.
        stream: raw.
        mark: after the launch; None in a graph.
        queued: the launch.

    Attributes:
        joined: raw, the last stream that has waited for it: work on that stream is ordered after it.
    """

    __slots__ = ("_event", "device", "joined", "mark", "platform", "queued", "stream")

    def __init__(self, platform: Platform, device: GpuDevice, stream: int, mark: Any, queued: Queued) -> None:
        self.platform, self.device = platform, device
        self.stream, self.mark, self.queued = stream, mark, queued
        self._event: Event | None = None
        self.joined = stream

    @property
    def event(self) -> Event:
        """Return the end as epee's own event, created on demand."""
        if self._event is None:
            device = self.platform.device
            self._event = Event(device, self.stream, self.mark) if device.type == "cuda" else Event()
        return self._event

    def join(self, raw: int) -> None:
        """Make the current stream, `raw`, wait for the launch if it is not ordered after it already."""
        if self.mark is None:
            self.event.wait()
            return
        self.platform.wait(self.mark, raw)
        self.joined = raw


@untraced_methods
class MessageWork(DeviceWork):
    """A send or a receive, queued on a stream, or collected for a batch that is queued with its last.

    Args:
        owner: of the message.
        tensors: of the message.
        device: the GPU.
        peer, is_send: of the message.
        end: of its launch, None if it is collected.

    Attributes:
        engine: of the group.
    """

    def __init__(
        self,
        owner: Owner,
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        peer: int,
        is_send: bool,
        end: MessageEnd | None = None,
    ) -> None:
        WorkOfGroup.__init__(self)  # a message that is collected has no stream and no event yet
        self._owner, self._look, self._outputs, self._device = owner, owner.check, tensors, device
        self._peer, self._is_send, self._end = peer, is_send, end
        self._side = self._error = self._future = None
        self.engine = owner.engine

    def begin(self, end: MessageEnd) -> None:
        """Note that it is queued."""
        self._end = end

    @property
    def _event(self) -> Event:  # type: ignore[override]
        assert self._end is not None
        return self._end.event

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the message; the cpu waits, too, for a receive from any source, whose source
        it must know, with a timeout above 0, and in groups that report losses if the other rank is known to be dead:
        mask, size and epoch show the death when this returns.

        Raises:
            CommTimeoutError: the time has passed, the message continues. Else what kernels have reported; if the group
                reports losses, a loss is reported by `exception` only.
        """
        if self._end is None:
            self._owner.flush()
        end = self._end
        assert end is not None
        if end.queued.source is not None:
            self._owner.await_end(end.event.query, "recv")
        elif self.engine.reports_losses and end.mark is not None and self._owner.is_dead(self._peer):
            self._owner.await_end(end.event.query, "send" if self._is_send else "recv")
        elif timeout is None and end.device.codes == end.device.no_reports:
            raw = end.platform.stream()
            if raw != end.stream and raw != end.joined:
                end.join(raw)
            return True
        return super().wait(timeout)

    def _join(self) -> None:
        end = self._end
        assert end is not None
        raw = end.platform.stream()
        if raw not in (end.stream, end.joined):
            end.join(raw)

    def is_completed(self) -> bool:
        """True when the GPU has passed the message."""
        return self._end is not None and bool(self._end.event.query())

    def exception(self) -> BaseException | None:
        """Return the failure that `wait` has raised, or by which a message that has ended was lost."""
        if self._error is None and self._end is not None and self.is_completed():
            self._error = self._owner.lost_by(self._peer, self._is_send, self._end.queued)
        return self._error

    def is_success(self) -> bool:
        """True when the message has ended well here: the bytes of a send lie with the receiver."""
        return self.is_completed() and self.exception() is None

    def lost_ranks(self) -> set[int]:
        """Return the ranks because of which the message was lost; waits for the GPU.

        Raises:
            CommTimeoutError: the GPU has not passed it within twice the group's timeout.
        """
        self._await_passed("message")
        error = self.exception()
        known = {self._peer} if error is not None and self._peer != ANY else set()
        return {*getattr(error, "ranks", ())} or known

    def contributors(self) -> set[int]:
        """Return the ranks that are not lost; waits for the GPU."""
        return {*self.engine.peer_regions.members} - self.lost_ranks()

    def source_rank(self) -> int:
        """Return the rank that a receive from any source got its message from, -1 before, and for other messages."""
        source = None if self._end is None else self._end.queued.source
        return -1 if source is None else int(source.words[0]) - 1

    _source_rank = source_rank


class Letter(NamedTuple):
    """A message of a batch: the move, its work, the tensors kept alive, and what is copied back afterwards."""

    parcel: Parcel
    work: MessageWork
    kept: Sequence[torch.Tensor]
    back: tuple[torch.Tensor, torch.Tensor] | None


def letter_of(owner: Owner, device: torch.device, is_send: bool, tensor: torch.Tensor, peer: int, tag: int) -> Letter:
    """Return a message that is to be queued; a send's contents are copied now.

    Raises:
        InvalidArgument: a receive into memory that overlaps itself.
    """
    require_memory(tensor, "send: tensor" if is_send else "recv: tensor")
    plain, back = tensor.detach(), None
    if not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        if is_send:
            plain = plain.contiguous().resolve_conj().resolve_neg()
        else:
            refuse_overlap(tensor, "recv: tensor")
            scratch = torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
            plain, back = scratch, (plain, scratch)
    parcel = Parcel(is_send, peer, plain.data_ptr(), plain.nbytes, tag, number_of(plain.dtype))
    kept = [tensor] if plain.data_ptr() == tensor.data_ptr() else [tensor, plain]
    return Letter(parcel, MessageWork(owner, [tensor], device, peer, is_send), kept, back)
