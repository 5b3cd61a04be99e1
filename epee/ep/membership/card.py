"""The card of a rank in latency mode: what one process says of itself to the others, in memory of its own.

Who writes: the process that owns it, nobody else; the others map it to read only. So nothing that a process wrote which
has lost its rank can be taken for a word of its successor: that one has another card.

    hello   for which round of `agreement.py` it has come: number, its last call, whom it counts on, whom it expects
    known   [num_ranks]: which memory of each rank it has mapped (serial numbers)
    lent    serial number of its own memory, and what peers need to map it: blobs of the inbox and of the rows' memory
    closed  1 when its owner has closed the buffer
    table   blob of the table of decisions, lent through a descriptor of this process

Order: hello's number is stored last, and is 0 while the rest changes. `lent` and `known` change only under the table's
lock (`rejoin.py`), or before anybody has the card; the serial is 0 while the blobs change.

A crash leaves the card as it was: readable by those who have mapped it, and not believed, because its owner is dead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...errors import ProtocolError
from ...memory.host import BLOB_BYTES, HostRegion
from ...memory.layout import Field, Layout

MASK_WORDS = 6
_BLOB_WORDS = -(-BLOB_BYTES // 8)
_MOST_MEMORY_BYTES = 512  # of the blob of the rows' memory
_MASK, _EXPECTED, _HELLO_WORDS = 2, 2 + MASK_WORDS, 2 + 2 * MASK_WORDS


class Lent(NamedTuple):
    """What a rank lends.

    Attributes:
        serial: tells this memory from all other.
        inbox: blob of its inbox (`control/inbox.py`).
        memory: blob of the memory for rows: a host region's, or that of GPU memory.
    """

    serial: int
    inbox: bytes
    memory: bytes


def new_serial() -> int:
    """Return a serial number: random, not 0."""
    return int.from_bytes(os.urandom(8), "little") | 1


def bits_of(mask: Sequence[bool]) -> list[int]:
    """Return a mask of ranks in words of 64 bits."""
    words = [0] * MASK_WORDS
    for rank, is_set in enumerate(mask):
        words[rank // 64] |= int(is_set) << rank % 64
    return words


def bit_of(words: Sequence[int], rank: int) -> bool:
    """Return whether a rank is in a mask."""
    return bool(words[rank // 64] >> rank % 64 & 1)


def _layout(num_ranks: int) -> Layout:
    return Layout(
        Field("hello", torch.int64, (_HELLO_WORDS,)),
        Field("known", torch.int64, (num_ranks,)),
        Field("lent", torch.int64, (2 + _BLOB_WORDS + _MOST_MEMORY_BYTES // 8,)),
        Field("table", torch.int64, (_BLOB_WORDS,)),
        Field("closed", torch.int64, ()),
    )


class Card:
    """One rank's card.

    Args:
        region: own or, attached, a peer's.
        num_ranks: of the buffer.
    """

    def __init__(self, region: HostRegion, num_ranks: int) -> None:
        layout = _layout(num_ranks)
        if region.nbytes < layout.nbytes:
            raise ProtocolError(f"process {region.owner_pid} lends {region.nbytes} bytes as its card; too few")
        self._region = region
        self._num_ranks = num_ranks
        self._words = region.words(0, layout.nbytes // 8)
        self._hello, self._known = layout.offset("hello") // 8, layout.offset("known") // 8
        self._lent, self._table = layout.offset("lent") // 8, layout.offset("table") // 8
        self._closed = layout.offset("closed") // 8
        self._pid = os.getpid()

    @classmethod
    def make(cls, num_ranks: int, rank: int) -> Card:
        """Make this rank's card; raises as `HostRegion.create`."""
        name = f"card-{rank}-{os.getpid()}"
        return cls(HostRegion.create(_layout(num_ranks).nbytes, name, only_owner_writes=True), num_ranks)

    @classmethod
    def attach(cls, blob: bytes, num_ranks: int) -> Card:
        """Map a peer's card; raises as `HostRegion.attach`."""
        return cls(HostRegion.attach(blob, is_writable=False), num_ranks)

    @property
    def blob(self) -> bytes:
        """What peers need to map it."""
        return self._region.blob

    @property
    def process(self) -> tuple[int, int]:
        """Number and start time of its owner."""
        return self._region.owner_pid, self._region.owner_start_time

    # -- hello

    def say_hello(self, number: int, seq: int, active: Sequence[bool], expected: Sequence[bool]) -> None:
        """Come to round `number`. Only the owner."""
        words, at = self._words, self._hello
        words[at] = 0  # not for any round while the rest changes
        words[at + 1] = seq
        words[at + _MASK : at + _EXPECTED] = memoryview(b"".join(_raw(bits_of(active)))).cast("Q")
        self.expect(expected)
        words[at] = number

    def expect(self, expected: Sequence[bool]) -> None:
        """Say who should come that has not been in before. Only the owner."""
        for index, word in enumerate(bits_of(expected)):
            self._words[self._hello + _EXPECTED + index] = word

    def take_back(self) -> None:
        """Come to no round. Only the owner."""
        self._words[self._hello] = 0

    def has_come(self, number: int) -> bool:
        """Whether the rank has come to round `number`."""
        return self._words[self._hello] == number

    @property
    def seq(self) -> int:
        """The last call that the rank has begun, as it said with its hello."""
        return self._words[self._hello + 1]

    def active(self) -> list[int]:
        """Whom the rank counts on, as a mask."""
        return self._words[self._hello + _MASK : self._hello + _EXPECTED].tolist()

    def expected(self) -> list[int]:
        """Who should come, as a mask."""
        return self._words[self._hello + _EXPECTED : self._hello + _HELLO_WORDS].tolist()

    # -- memory

    def known(self) -> list[int]:
        """The serial numbers of what the rank has mapped, by rank; 0 for none."""
        return self._words[self._known : self._known + self._num_ranks].tolist()

    def set_known(self, rank: int, serial: int) -> None:
        """Note which memory of `rank` is mapped. Only the owner."""
        self._words[self._known + rank] = serial

    @property
    def serial(self) -> int:
        """Of the memory that the rank lends; 0 when it does not yet."""
        return self._words[self._lent]

    def lend(self, lent: Lent) -> None:
        """Show what peers may map. Only the owner."""
        words, at = self._words, self._lent
        assert len(lent.memory) <= _MOST_MEMORY_BYTES
        assert len(lent.inbox) in (0, BLOB_BYTES)
        words[at] = 0
        words[at + 1] = len(lent.inbox) << 32 | len(lent.memory)
        raw = lent.inbox.ljust(8 * _BLOB_WORDS, b"\0") + lent.memory.ljust(_MOST_MEMORY_BYTES, b"\0")
        words[at + 2 : at + 2 + len(raw) // 8] = memoryview(raw).cast("Q")
        words[at] = lent.serial

    def lent(self) -> Lent | None:
        """Return a copy of what the rank lends, None while it changes.

        Raises:
            ProtocolError: it cannot be right.
        """
        words, at = self._words, self._lent
        serial, lengths = words[at], words[at + 1]
        raw = bytes(words[at + 2 : at + 2 + _BLOB_WORDS + _MOST_MEMORY_BYTES // 8])
        if not serial or words[at] != serial:
            return None
        num_inbox, num_memory = lengths >> 32, lengths & 0xFFFFFFFF
        if num_inbox not in (0, BLOB_BYTES) or num_memory > _MOST_MEMORY_BYTES:
            raise ProtocolError(f"process {self.process[0]} lends blobs of {num_inbox} and {num_memory} bytes")
        first = 8 * _BLOB_WORDS
        return Lent(serial, raw[:num_inbox], raw[first : first + num_memory])

    def lend_table(self, blob: bytes) -> None:
        """Show how to get at the table of decisions. Only the owner, before anybody has the card."""
        self._words[self._table : self._table + _BLOB_WORDS] = memoryview(blob.ljust(8 * _BLOB_WORDS, b"\0")).cast("Q")

    def table(self) -> bytes:
        """Return the blob of the table of decisions."""
        return bytes(self._words[self._table : self._table + _BLOB_WORDS])[:BLOB_BYTES]

    @property
    def is_closed(self) -> bool:
        """Whether its owner has closed the buffer."""
        return self._words[self._closed] != 0

    def say_closed(self) -> None:
        """Say that the buffer is closed. Only the owner; nothing in a forked child, where it is the parent's."""
        if os.getpid() == self._pid == self.process[0]:
            self._words[self._closed] = 1

    def close(self) -> None:
        """Drop the mapping; idempotent."""
        self._words.release()
        self._region.close()


def _raw(words: Sequence[int]) -> list[bytes]:
    return [word.to_bytes(8, "little") for word in words]
