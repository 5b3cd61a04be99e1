"""The streams on which messages run, and their order.

Messages of one pair and direction run one after the other, in the order in which they were made: both ends count them.
All others may wait for their peers concurrently. So a message that the caller waits for at once runs on the caller's
stream; any other one runs after that stream's work, on a stream of its pair and direction, or of batches, and the
caller's continues. While a graph is recorded everything runs on the caller's stream, in the caller's order.

The next message of a pair and direction on another stream waits there, by an event, for the last one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Hashable, Iterator
from typing import Any, NamedTuple

import torch

from ....gpu.platform import Platform

Way = tuple[int, bool]  # a peer, and whether we send


class StreamPlace(NamedTuple):
    """The stream of a kernel: a raw stream, torch's object of it if it is one of ours, and whether in a graph."""

    raw: int
    side: torch.cuda.Stream | None
    is_recorded: bool


class _Side(NamedTuple):
    """A stream of ours; `begun` is recorded where its next kernel begins, and waited for before its next record."""

    stream: torch.cuda.Stream
    raw: int
    begun: torch.cuda.Event


class Streams:
    """The streams of one rank's messages.

    Args:
        platform: the GPU.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._own: dict[Hashable, _Side] = {}
        self._last: dict[Way, tuple[int, Any]] = {}

    @contextlib.contextmanager
    def entered(self, name: Hashable, ways: Collection[Way]) -> Iterator[StreamPlace]:
        """Let a kernel of these links be queued in the block; the current stream is that of the name, the caller's for
        None.

        What is queued in the block runs after the caller's stream, and after all that was queued for these links;
        `note` follows it.
        """
        if self._platform.is_capturing():
            yield StreamPlace(self._platform.stream(), None, True)
            return
        place = self.beside(name, ways)
        with contextlib.nullcontext() if place.side is None else torch.cuda.stream(place.side):
            yield place

    def beside(self, name: Hashable, ways: Collection[Way]) -> StreamPlace:
        """Return the stream of a name as `entered` does, for a launch with an explicit stream; no graph is recorded."""
        side, raw = self._own.get(name) or self._side(name), self._platform.stream()
        if side is not None:
            self._platform.order(raw, side.raw, side.begun)
            raw = side.raw
        last = self._last
        for way in ways:
            if way in last and last[way][0] != raw:
                self._follow(way, raw)
        return StreamPlace(raw, None if side is None else side.stream, False)

    def here(self, peer: int, is_send: bool) -> int:
        """Return the current stream, which records no graph, for a message that is waited for at once."""
        raw, way = self._platform.stream(), (peer, is_send)
        last = self._last.get(way)
        if last is None or last[0] != raw or last[1] is not None:
            self._follow(way, raw)
            self._last[way] = raw, None  # marked on demand: what follows it is the caller's
        return raw

    def _follow(self, way: Way, raw: int) -> None:
        last = self._last.get(way)
        if last is not None and last[0] != raw:
            self._platform.wait(self._mark(last), raw)

    def _mark(self, last: tuple[int, Any]) -> Any:
        return self._platform.mark(last[0]) if last[1] is None else last[1]

    def note(self, ways: Collection[Way], place: StreamPlace) -> Any:
        """Note that work of these links was queued; returns the mark after it, None in a graph."""
        if place.is_recorded:
            return None
        mark = self._platform.mark(place.raw)
        for way in ways:
            self._last[way] = place.raw, mark
        return mark

    def drain(self, ways: Collection[Way], grace_s: float) -> bool:
        """Block the cpu until the queued work of these links is done; False if it takes longer than `grace_s`."""
        deadline = time.monotonic() + grace_s
        for mark in [self._mark(self._last[way]) for way in ways if way in self._last]:
            while not self._platform.is_done(mark):
                if time.monotonic() > deadline:
                    return False
                time.sleep(1e-4)
        return True

    def _side(self, name: Hashable) -> _Side | None:
        device = self._platform.device
        if name is None or device.type != "cuda":
            return None
        side = self._own.get(name)
        if side is None:
            stream = torch.cuda.Stream(device)
            side = self._own[name] = _Side(stream, stream.cuda_stream, torch.cuda.Event())
        return side
