"""One partner of a rank, as one process of its proxy serves it: the four streams between the two, over one transport.

A turn gives the transport what kernels have posted, lets kernels fill slots whose bytes the transport has read, and
reports what the readers of this island have taken. The transport moves the bytes and calls back for what the partner
sends (`ProxyPeer.receiver`, `hear_credit`). Rows go first: kernels need them before they can take a chunk.

No wait, no clock, no socket: `transport` is TCP in the proxy (`tcp.py`) and a simulated network in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ...errors import ProtocolError
from .chunks import ChunkReceiver, ChunkRun, ChunkSender, Words
from .words import CHUNKS, ROWS, ProxyShape


class ChunkTransport(Protocol):
    """The bytes between two processes of proxies. A word is seen at the other end behind the bytes before it."""

    def send(self, kind: int, run: ChunkRun) -> None:
        """Send chunks out of their slots, which stay as they are until `num_read` counts them. Never blocks."""

    def num_read(self, kind: int) -> int:
        """Return how many chunks have been read since the last call; in the order in which they were given."""

    def credit(self, kind: int, taken: int) -> None:
        """Report to the partner that all chunks below a number are taken."""


class ProxyPeer:
    """One partner.

    Args:
        words: of the page, or a part of it that supports indices and slices.
        shape: its sizes.
        partner: index of the partner.
        process: index of this process of the proxy.
        first: the first number of the epoch.
        readers: positions of the living ranks of this island.
        own: position of this rank among them.
    """

    def __init__(
        self,
        words: Words,
        shape: ProxyShape,
        partner: int,
        process: int,
        first: int,
        readers: Iterable[int],
        own: int,
    ) -> None:
        readers = list(readers)
        self._streams: dict[int, tuple[ChunkSender, ChunkReceiver]] = {}
        for kind in (ROWS, CHUNKS) if process == 0 else (CHUNKS,):
            step = shape.num_processes if kind == CHUNKS else 1
            start = first + (process - first) % step
            count, size = shape.slots(kind), shape.size(kind)
            at = shape.stream_words(partner, kind)
            posted, freed, arrived = (words[i : i + count] for i in at[:3])
            taken = words[at[3] : at[3] + count * shape.num_readers]
            self._streams[kind] = (
                ChunkSender(posted, freed, size, start, step),
                ChunkReceiver(arrived, taken, size, start, step, readers, own),
            )

    def turn(self, transport: ChunkTransport) -> bool:
        """Do what can be done now; return whether that was anything.

        Raises:
            ProtocolError: a kernel of this rank has announced what cannot be.
        """
        has_moved = False
        for kind, (sender, receiver) in self._streams.items():
            num_read = transport.num_read(kind)
            if num_read:
                sender.finish(num_read)
            run = sender.next_run()
            if run is not None:
                transport.send(kind, run)
            taken = receiver.credit()
            if taken is not None:
                transport.credit(kind, taken)
            has_moved |= bool(num_read) or run is not None or taken is not None
        return has_moved

    @property
    def has_posted(self) -> bool:
        """Whether kernels of this rank have posted what was not given to the transport."""
        return any(sender.has_posted for sender, _ in self._streams.values())

    def receiver(self, kind: int) -> ChunkReceiver:
        """Return the receiving end of a stream.

        Raises:
            ProtocolError: this process serves none of this kind.
        """
        return self._stream(kind)[1]

    def hear_credit(self, kind: int, taken: int) -> None:
        """Use what the partner reports as taken; raises `ProtocolError` where it cannot be."""
        self._stream(kind)[0].hear_credit(taken)

    def drop_reader(self, position: int) -> None:
        """Wait no more for a rank of this island, which is dead."""
        for _, receiver in self._streams.values():
            receiver.drop_reader(position)

    def _stream(self, kind: int) -> tuple[ChunkSender, ChunkReceiver]:
        if kind not in self._streams:
            raise ProtocolError(f"a peer names a stream of kind {kind}, which this process does not serve")
        return self._streams[kind]
