"""The control messages between the ends of a NIXL link, over the connection on which they have met.

Frames of `link/frames.py`, under keys of their own, so each is authenticated, in order, and received once:

    introduction   first and once: the name of the agent here, the address of the ring that it has made for the peer,
                   and the data that the peer needs about its NIC (NIXL's metadata)
    counts         the progress of this end, as bytes of the streams: posted, done, freed

`posted` is sent before the bytes: a receiver whose memory a NIC cannot write by itself (UCX over TCP) must help to
store them. `done` follows them and says that they may be read. `freed` is the credit. A peer's values are checked here
and in `check` before use: counts only grow, and stay in the order and within the size that `ring.py` defines.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from ...errors import ProtocolError
from ..frames import NO_WORD, WRITE, Frame

MAX_INTRODUCTION = 64 << 10  # metadata of UCX are some hundred bytes for each device
_HEAD = struct.Struct("<4sHHQQ32s")  # mark, version, 0, address, size of the ring, name
_MARK, _VERSION = b"nixl", 1
_NAME = re.compile(r"[0-9a-f]{32}")


class Introduction(NamedTuple):
    """The data with which a peer's ring is reached.

    Attributes:
        name: of its agent.
        address: of the ring's first byte, there.
        nbytes: size of the ring.
        metadata: NIXL's.
    """

    name: str
    address: int
    nbytes: int
    metadata: bytes


class RingCounts(NamedTuple):
    """The progress of one end, in bytes: posted and done of what it sends, freed of what it has received."""

    posted: int = 0
    done: int = 0
    freed: int = 0


def pack_introduction(told: Introduction) -> bytes:
    """Return the payload of an introduction."""
    return _HEAD.pack(_MARK, _VERSION, 0, told.address, told.nbytes, told.name.encode()) + told.metadata


def parse_introduction(payload: bytes, nbytes: int) -> Introduction:
    """Return a peer's introduction with a ring of `nbytes` bytes; `ProtocolError` if it is invalid."""
    if not _HEAD.size < len(payload) <= MAX_INTRODUCTION:
        raise ProtocolError(f"an introduction has {_HEAD.size + 1} ... {MAX_INTRODUCTION} bytes, got {len(payload)}")
    mark, version, zero, address, told, raw = _HEAD.unpack_from(payload)
    if (mark, version, zero) != (_MARK, _VERSION, 0):
        raise ProtocolError(f"not an introduction of version {_VERSION}; do all hosts have one version of epee?")
    name = raw.decode("ascii", "replace")
    if not _NAME.fullmatch(name) or told != nbytes or not 0 < address <= (1 << 64) - nbytes:
        raise ProtocolError(f"an agent {name!r} with a ring of {told} bytes at {address:#x} cannot be: {nbytes} here")
    return Introduction(name, address, told, payload[_HEAD.size :])


class ControlSink:
    """The target of the frames of a peer; a `stream.FrameSink`.

    Attributes:
        introduction: as received; b"" before.
        counts: the last ones received.
    """

    def __init__(self) -> None:
        self.introduction = b""
        self.counts = RingCounts()
        self._incoming = bytearray()

    def place(self, frame: Frame) -> memoryview:
        """As `FrameSink.place`."""
        if frame.kind != WRITE or frame.word != NO_WORD or frame.nbytes > MAX_INTRODUCTION:
            raise ProtocolError(f"a frame of kind {frame.kind} with {frame.nbytes} bytes says nothing about a ring")
        if len(self._incoming) != frame.nbytes:
            self._incoming = bytearray(frame.nbytes)
        return memoryview(self._incoming)

    def apply(self, frame: Frame, payload: memoryview) -> None:
        """As `FrameSink.apply`."""
        if frame.kind != WRITE:
            raise ProtocolError(f"a frame of kind {frame.kind} says nothing about a ring")
        if frame.nbytes:
            if self.introduction not in (b"", payload):  # a repetition of the same: this was interrupted
                raise ProtocolError("a second introduction")
            self.introduction = bytes(payload)
            return
        told, before = RingCounts(frame.offset, frame.value, frame.note), self.counts
        if not self.introduction or told.done > told.posted or any(a < b for a, b in zip(told, before, strict=True)):
            raise ProtocolError(f"counts {tuple(told)} cannot follow {tuple(before)}")
        self.counts = told


def check(theirs: RingCounts, ours: RingCounts, nbytes: int) -> RingCounts:
    """Return a peer's counts if they fit those sent to it; else `ProtocolError`.

    Args:
        ours: as last sent.
        nbytes: size of a ring.
    """
    if theirs.posted > ours.freed + nbytes:
        raise ProtocolError(f"a peer has posted {theirs.posted} bytes, {ours.freed + nbytes} were free")
    if theirs.freed > ours.done:
        raise ProtocolError(f"a peer has freed {theirs.freed} bytes, {ours.done} are done")
    return theirs
