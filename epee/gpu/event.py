"""The end of a call as an event that streams or the cpu can wait for.

A CPU call returns when it is done, so its event is `DONE`. A GPU call returns when its work is on a stream; another
stream that uses the results waits for the event. The event is recorded directly after the call if requested
(`async_op`), else when it is first used: later than needed, but correct.
"""

from __future__ import annotations

import torch

from ..errors import InvalidArgument
from ..torch_private import CudaEvent, current_index, current_raw_stream

_MOST_STREAMS = 64  # whose objects are kept
_current: dict[tuple[int, int], torch.cuda.Stream] = {}  # torch's objects by GPU and raw handle


def current_stream(index: int | None = None) -> torch.cuda.Stream:
    """Return the current stream of a GPU, by default of the current one, as torch, which makes an object each time.

    That takes torch longer than recording an event.
    """
    if index is None:
        index = current_index()
    key = index, current_raw_stream(index)
    stream = _current.get(key)
    if stream is None:
        if len(_current) >= _MOST_STREAMS:
            _current.clear()
        stream = _current[key] = torch.cuda.current_stream(index)
    return stream


def recorded_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event after the present work on a stream."""
    # torch's own class, without its Python around making and recording one, which takes twice as long as these
    event: torch.cuda.Event = CudaEvent.__new__(torch.cuda.Event)
    CudaEvent.record(event, stream)
    return event


def wait_on(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
    """Make later work on a stream wait for an event."""
    CudaEvent.wait(event, stream)


def stream_of(raw: int, device: torch.device) -> torch.cuda.Stream:
    """Return the stream behind a raw handle. (`ExternalStream(0)` would be a new stream, not the default one.)"""
    return torch.cuda.ExternalStream(raw, device=device) if raw else torch.cuda.default_stream(device)


class Event:
    """The end of a call.

    Args:
        device: the GPU that runs the call; None when the call is done already.
        stream: raw handle of the stream that the work is on.
        recorded: a CUDA event after that work, if there is one.
    """

    __slots__ = ("__weakref__", "_device", "_recorded", "_stream")

    def __init__(
        self, device: torch.device | None = None, stream: int = 0, recorded: torch.cuda.Event | None = None
    ) -> None:
        self._device = device
        self._stream = stream
        self._recorded = recorded

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make `stream` (None: the current one) wait for the call; the cpu does not wait."""
        recorded = self.recorded()
        if recorded is not None:
            index = None if self._device is None else self._device.index
            wait_on(current_stream(index) if stream is None else stream, recorded)

    def synchronize(self) -> None:
        """Block the cpu until the call is done."""
        recorded = self.recorded()
        if recorded is not None:
            recorded.synchronize()

    def query(self) -> bool:
        """Whether the call is done."""
        recorded = self.recorded()
        return recorded is None or recorded.query()

    def recorded(self) -> torch.cuda.Event | None:
        """Return the CUDA event, None when the call is done already."""
        if self._recorded is None and self._device is not None:
            self._recorded = recorded_on(stream_of(self._stream, self._device))
        return self._recorded


DONE = Event()


def check_event(event: object) -> Event | torch.cuda.Event | None:
    """Return a `previous_event`.

    Raises:
        InvalidArgument: it is neither an epee event, nor a CUDA event, nor None.
    """
    if event is None or isinstance(event, (Event, torch.cuda.Event)):
        return event
    raise InvalidArgument(
        f"previous_event must be the .event of a call, a torch.cuda.Event or None, got {type(event).__name__}"
    )
