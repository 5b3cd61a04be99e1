"""The table of decisions of a latency buffer: memory that belongs to no rank, so that it outlives each of them.

Rank 0 makes it when the buffer is made. Every member keeps a descriptor of its own on it and lends it to whoever comes
later (`Card.table`); the memory is there while anybody has it mapped.

    round    the number of the last decision
    decided  [NUM_DECISIONS]: number, the call after which all go on, epoch, members, and of each rank the process that
             took part last and the serial number of its memory then

Who writes: who has the lock (`flock` on a description of its own; the kernel drops the lock of a holder that dies).
Order: a decision's number is 0 while it changes; `round` is stored last. A crash of the holder before that store leaves
the round undecided, and the next one writes it anew. Decision 0, "all who made the buffer", is written by rank 0 before
anybody uses the table.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ...errors import CommTimeoutError, ProtocolError
from ...memory.host import HostRegion
from ...memory.layout import Field, Layout, align_up
from ...memory.signals import futex_sleep, futex_wake
from .card import MASK_WORDS, bit_of, bits_of

NUM_DECISIONS = 8
_HEAD_WORDS = 3 + MASK_WORDS
_LINE = 8  # words of a cache line
_PID_SHIFT = 40  # a start time has fewer bits: clock ticks since boot


class Decision(NamedTuple):
    """What a round decided.

    Attributes:
        number: of the round.
        seq: the call after which all members go on.
        epoch: the last round in which a rank's memory changed; 0 when none has.
        members: for each rank whether it takes part.
        processes: of each rank the process (`word_of`) that took part last.
        serials: of each rank the memory that it lent then.
    """

    number: int
    seq: int
    epoch: int
    members: list[bool]
    processes: list[int]
    serials: list[int]


def word_of(process: tuple[int, int]) -> int:
    """Return a process's number and start time as one word."""
    pid, start_time = process
    return pid << _PID_SHIFT | (start_time & ((1 << _PID_SHIFT) - 1))


def process_of_word(word: int) -> tuple[int, int]:
    """Return number and start time of the process that a word stands for."""
    return word >> _PID_SHIFT, word & ((1 << _PID_SHIFT) - 1)


def _layout(num_ranks: int) -> Layout:
    width = align_up(_HEAD_WORDS + 2 * num_ranks, _LINE)
    return Layout(
        Field("round", torch.int64, (_LINE,)),
        Field("decided", torch.int64, (NUM_DECISIONS, width)),
    )


class Table:
    """See above.

    Args:
        region: of the table, own or attached.
        num_ranks: of the buffer.
    """

    def __init__(self, region: HostRegion, num_ranks: int) -> None:
        layout = _layout(num_ranks)
        if region.nbytes < layout.nbytes:
            raise ProtocolError(f"process {region.owner_pid} lends {region.nbytes} bytes as the table; too few")
        self._region = region
        self._num_ranks = num_ranks
        self._words = region.words(0, layout.nbytes // 8)
        self._round = layout.offset("round") // 8
        self._decided = layout.offset("decided") // 8
        self._width = layout["decided"].shape[1]
        self._lock_fd = region.open_lock()
        self.blob = region.lend_again(self._lock_fd)  # through this process's descriptor

    @classmethod
    def make(cls, num_ranks: int) -> Table:
        """Make the table of a new buffer; raises as `HostRegion.create`."""
        return cls._of(HostRegion.create(_layout(num_ranks).nbytes, f"table-{os.getpid()}"), num_ranks)

    @classmethod
    def attach(cls, blob: bytes, num_ranks: int) -> Table:
        """Map a running buffer's table; raises as `HostRegion.attach`."""
        return cls._of(HostRegion.attach(blob), num_ranks)

    @classmethod
    def _of(cls, region: HostRegion, num_ranks: int) -> Table:
        try:
            return cls(region, num_ranks)
        except BaseException:
            region.close()
            raise

    @property
    def round(self) -> int:
        """The number of the last decision."""
        return self._words[self._round]

    def sleep(self, seen: int) -> None:
        """Sleep until the round is another than `seen`, somebody wakes the sleepers, or some milliseconds are over."""
        futex_sleep(self._region.address + 8 * self._round, seen)

    def wake(self) -> None:
        """Wake all who sleep."""
        futex_wake(self._region.address + 8 * self._round)

    @contextlib.contextmanager
    def locked(self, deadline: float, interrupt: Callable[[], None]) -> Iterator[None]:
        """Hold the lock.

        Raises:
            CommTimeoutError: its holder does not get on.
        """
        at_least = time.monotonic() + 0.1  # a time-out that is over leaves time enough for a lock that is free
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > max(deadline, at_least):
                    raise CommTimeoutError(
                        "sync: another rank holds the lock and does not get on (stopped?); call sync again"
                    ) from None
                interrupt()
                time.sleep(0.0005)
        try:
            yield
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def write(self, decision: Decision) -> None:
        """Make a decision the last one. Under the lock."""
        words, at = self._words, self._decided + decision.number % NUM_DECISIONS * self._width
        words[at] = 0
        values = [decision.seq, decision.epoch, *bits_of(decision.members), *decision.processes, *decision.serials]
        for index, value in enumerate(values):
            words[at + 1 + index] = value
        words[at] = decision.number
        words[self._round] = decision.number
        self.wake()

    def read(self, number: int) -> Decision:
        """Return decision `number`.

        Raises:
            ProtocolError: it is too long ago.
        """
        at = self._decided + number % NUM_DECISIONS * self._width
        copy = self._words[at : at + self._width].tolist()
        if copy[0] != number or self._words[at] != number:
            raise ProtocolError(f"sync: decision {number} is gone; this rank was away for more than {NUM_DECISIONS}")
        members = [bit_of(copy[3:], rank) for rank in range(self._num_ranks)]
        ends = _HEAD_WORDS + self._num_ranks, _HEAD_WORDS + 2 * self._num_ranks
        return Decision(number, copy[1], copy[2], members, copy[_HEAD_WORDS : ends[0]], copy[ends[0] : ends[1]])

    def close(self) -> None:
        """Drop the mapping and the descriptor; idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        self._words.release()
        self._region.close()
