"""What the tests of links share: two ends of a TCP connection, a sink that remembers, waits with a bound."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from epee.errors import ProtocolError
from epee.link.engine import LinkMaker
from epee.link.frames import NO_WORD, WRITE, Frame
from epee.link.meeting import Connected
from epee.link.poller import Links
from epee.link.tcp import TcpLink, set_up

BOUND_S = 20.0  # of every wait: far more than any takes
POISON = 0xA5
GUARD_BYTES = 64
NUM_WORDS = 16
over_both = pytest.mark.parametrize("engine", ["tcp", pytest.param("nixl", marks=pytest.mark.nixl)])
UCX = {"UCX_TLS": "tcp,self", "UCX_MODULES": "^efa", "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
os.environ.update({name: value for name, value in UCX.items() if name not in os.environ})  # before there is an agent
KEY_A, KEY_B = b"a" * 32, b"b" * 32  # of what each of two ends sends


class Memory:
    """A sink: `nbytes` bytes with poison before and behind them, words, and a log of what was applied.

    Attributes:
        seen: (word, value) in the order in which they were applied, with the bytes before it as `look` found them.
        others: the ASK and TELL frames with their payloads.
        direct: how many bytes a socket has put straight into `bytes`; see `counting`.
    """

    def __init__(self, nbytes: int, look: Callable[[Memory, Frame], object] | None = None) -> None:
        self._all = bytearray([POISON]) * (nbytes + 2 * GUARD_BYTES)
        self.bytes = memoryview(self._all)[GUARD_BYTES : GUARD_BYTES + nbytes]
        self.words = [0] * NUM_WORDS
        self.note = 0
        self.seen: list[tuple[int, int, object]] = []
        self.others: list[tuple[int, int, bytes]] = []
        self.on_ask: Callable[[int, bytes], object] = lambda number, payload: None
        self._look = look

    def place(self, frame: Frame) -> memoryview:
        if frame.offset + frame.nbytes > len(self.bytes) or (frame.word >= NUM_WORDS and frame.word != NO_WORD):
            raise ProtocolError("beyond the memory")
        return self.bytes[frame.offset : frame.offset + frame.nbytes]

    def apply(self, frame: Frame, payload: memoryview) -> None:
        self.note = max(self.note, frame.note)
        if frame.kind != WRITE:
            self.others.append((frame.kind, frame.value, bytes(payload)))
            self.on_ask(frame.value, bytes(payload))
        elif frame.word != NO_WORD:
            self.words[frame.word] = frame.value
            self.seen.append((frame.word, frame.value, self._look(self, frame) if self._look else None))

    @property
    def is_sound(self) -> bool:
        """True when nothing outside the memory was touched."""
        guard = bytes([POISON]) * GUARD_BYTES
        return self._all[:GUARD_BYTES] == guard == self._all[-GUARD_BYTES:]

    def holds(self, place: memoryview) -> bool:
        """Return whether a buffer is part of this memory."""
        return place.obj is self._all


class Pipe:
    """What a kernel does with a stream, in bytes: takes a part of what is given, gives a part of what is there."""

    def __init__(self, choose: random.Random, room: int = 1 << 20) -> None:
        self.data = bytearray()
        self._choose, self._room = choose, room
        self.given: list[memoryview] = []

    def sendmsg(self, buffers: list[object]) -> int:
        left = self._cut(self._room - len(self.data))
        if not left:
            raise BlockingIOError
        sent = 0
        for buffer in buffers:
            part = memoryview(buffer)[: left - sent]
            self.data += part
            sent += len(part)
        return sent

    def recv_into(self, place: memoryview) -> int:
        assert len(place)
        count = self._cut(min(len(place), len(self.data)))
        if not count:
            raise BlockingIOError
        place[:count] = self.data[:count]
        del self.data[:count]
        self.given.append(place[:count])
        return count

    def _cut(self, most: int) -> int:
        kind = self._choose.random()
        if most <= 0 or kind < 0.1:
            return 0
        if kind < 0.4:
            return self._choose.randint(1, min(most, 80))
        return most if kind < 0.7 else self._choose.randint(1, most)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a connection over 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    set_up(ours)
    set_up(theirs)
    return ours, theirs


def links_over(
    engine: str, sink_a: Memory, sink_b: Memory, covers_payloads: bool = False, peers: tuple[int, int] = (1, 0)
) -> tuple[TcpLink, TcpLink]:
    """Return the links of two ends to each other; what `a` sends goes to `sink_b`."""
    first, second = socket_pair()
    return (
        link_over(engine, peers[0], Connected(first, KEY_A, KEY_B), sink_a, covers_payloads),
        link_over(engine, peers[1], Connected(second, KEY_B, KEY_A), sink_b, covers_payloads),
    )


def link_over(engine: str, peer: int, met: Connected, sink: Memory, covers_payloads: bool = False) -> TcpLink:
    """Return the link of one end; one of NIXL has an agent of its own."""
    maker = LinkMaker(covers_payloads, engine)
    link = maker.make(peer, met, sink)
    maker.close()
    return link


def tcp_links(
    sink_a: Memory, sink_b: Memory, covers_payloads: bool = False, peers: tuple[int, int] = (1, 0)
) -> tuple[TcpLink, TcpLink]:
    """As `links_over`, over sockets."""
    return links_over("tcp", sink_a, sink_b, covers_payloads, peers)


class End:
    """`Links` with one link, the losses that were told, and how often `on_idle` was called."""

    def __init__(self, link: TcpLink) -> None:
        self.link, self.lost, self.idles = link, [], 0
        self.links = Links([link])

    def start(self) -> End:
        self.links.start(self.lost.append, self._idle)
        return self

    def _idle(self) -> None:
        self.idles += 1

    def end(self) -> None:
        self.links.end(lambda: True, int)


@contextlib.contextmanager
def two_ends(
    nbytes: int = 1 << 20, covers_payloads: bool = False, starts: bool = True, engine: str = "tcp"
) -> Iterator[tuple[End, End, Memory, Memory]]:
    """Yield two ends that are linked and the memory of each; both are ended with the block."""
    memory_a, memory_b = Memory(nbytes), Memory(nbytes)
    link_a, link_b = links_over(engine, memory_a, memory_b, covers_payloads)
    ends = End(link_a), End(link_b)
    if starts:
        for end in ends:
            end.start()
    try:
        yield *ends, memory_a, memory_b
    finally:
        for end in ends:
            end.end()
        for end in ends:
            end.links.join(BOUND_S)
    assert memory_a.is_sound
    assert memory_b.is_sound


def until(is_so: Callable[[], object], bound_s: float = BOUND_S) -> None:
    """Wait until something is so; fail after a bound."""
    deadline = time.monotonic() + bound_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.001)


def num_open() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def link_threads() -> list[threading.Thread]:
    """Return the threads of links that run."""
    return [thread for thread in threading.enumerate() if thread.name == "epee-links"]


def reset(connection: socket.socket) -> None:
    """Close a connection so that the peer gets a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def pattern(nbytes: int, seed: int) -> bytes:
    """Return bytes that differ from seed to seed."""
    return random.Random(seed).randbytes(nbytes)


@contextlib.contextmanager
def reaped(process: BaseProcess, ours: Connection) -> Iterator[None]:
    """End a process, and close this end of its pipe, whatever happens inside."""
    try:
        yield
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
