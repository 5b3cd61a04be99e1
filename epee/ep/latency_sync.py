"""How the ranks of a latency buffer agree on who takes part: one decision per round, in memory that outlives its owner.

Each rank judges its peers alone while calls run, so masks may differ. `Agreement.sync` makes them equal again:

1. A rank says hello for the round after the last decided one: its call number and whom it counts on, then the round.
2. It waits until all members that are not dead have said hello, or the time is over. A rank that everybody present
   counts out is waited for only shortly.
3. Whoever comes first takes a file lock, looks again whether the round is decided, and if not writes the decision: the
   ranks that said hello and live, and the highest of their call numbers, from which all of them go on.

All of this lies in the region of rank 0, which stays mapped when that process has ended; the kernel drops the lock of a
holder that dies, and the next one looks again. So there is one decision per round. It needs more than half of the last
decided members that are not proved dead, or exactly half with the lowest of them: those who were cut off cannot decide
alone, and learn it (`NoQuorumError`).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import CommTimeoutError, NoQuorumError, ProtocolError, context
from ..memory.signals import futex_sleep, futex_wake
from .latency_wire import NUM_DECISIONS, Wire

_GRACE_S = 0.05  # how long a rank is waited for that everybody present counts out
_MASK_WORDS = 6
MOST_RANKS = 64 * _MASK_WORDS


class Decision(NamedTuple):
    """What a round decided.

    Attributes:
        members: for each rank whether it takes part.
        seq: the call after which all of them go on.
    """

    members: list[bool]
    seq: int


class Agreement:
    """Decides in rounds who takes part.

    Args:
        wire: of the buffer.
        lock_fd: a descriptor of rank 0's region, closed by `close`.
    """

    def __init__(self, wire: Wire, lock_fd: int) -> None:
        self._wire = wire
        self._lock_fd = lock_fd
        self._num_ranks = wire.config.num_ranks
        self._members = [True] * self._num_ranks  # as decided last

    def sync(self, active: Sequence[bool], deadline: float) -> Decision:
        """Take part in rounds until one has this rank.

        Args:
            active: whom this rank counts on.
            deadline: `time.monotonic()` value.

        Raises:
            NoQuorumError: those who came are too few to decide, or the others decided without this rank.
            CommTimeoutError: the rank that decides does not get on.
        """
        wire, table = self._wire, self._wire.regions[0]
        started = time.monotonic()
        while True:
            before = table.words[table.at("round")]
            if before:
                self._members = self._read(before).members
            try:
                self._say_hello(active, before + 1)
                self._wait(before, started, deadline)
                if table.words[table.at("round")] == before:
                    self._decide(before, deadline)
            except BaseException:
                table.words[table.at("hello", wire.rank)] = 0  # nobody is to count on this rank any more
                raise
            decision = self._read(before + 1)
            if decision.members[wire.rank]:
                return decision
            if time.monotonic() > deadline:
                where = context("sync", rank=wire.rank, seq=wire.seq, elapsed=time.monotonic() - started)
                raise NoQuorumError(
                    f"{where}: the other ranks agreed without this one, which came too late; call sync again when "
                    "they do",
                    [rank for rank, is_member in enumerate(decision.members) if not is_member],
                    "sync",
                )

    def close(self) -> None:
        """Close the lock's descriptor; idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _say_hello(self, active: Sequence[bool], number: int) -> None:
        wire, table = self._wire, self._wire.regions[0]
        index = table.at("hello", wire.rank)
        table.words[index] = 0  # not for any round while the rest changes
        table.words[index + 1] = wire.seq
        for word, bits in enumerate(_bits(active)):
            table.words[index + 2 + word] = bits
        table.words[index] = number
        futex_wake(table.address + 8 * table.at("round"))

    def _present(self, number: int) -> list[bool]:
        table = self._wire.regions[0]
        dead = self._wire.watch.dead()
        said = [table.words[table.at("hello", rank)] == number for rank in range(self._num_ranks)]
        return [has_said and rank not in dead for rank, has_said in enumerate(said)]

    def _missing(self, number: int) -> tuple[list[int], list[int]]:
        """Return the living members that have not said hello: those whom somebody counts on, and the others."""
        table = self._wire.regions[0]
        present = self._present(number)
        dead = self._wire.watch.dead()
        wanted = [False] * self._num_ranks
        for rank in range(self._num_ranks):
            if present[rank]:
                words = [table.words[table.at("hello", rank) + 2 + word] for word in range(_MASK_WORDS)]
                wanted = [known or _bit(words, peer) for peer, known in enumerate(wanted)]
        away = [r for r in range(self._num_ranks) if self._members[r] and not present[r] and r not in dead]
        return [rank for rank in away if wanted[rank]], [rank for rank in away if not wanted[rank]]

    def _wait(self, before: int, started: float, deadline: float) -> None:
        """Wait until everybody has come who may, the round is decided, or the time is over."""
        table = self._wire.regions[0]
        index = table.at("round")
        while table.words[index] == before:
            needed, others = self._missing(before + 1)
            now = time.monotonic()
            if now > deadline or not (needed or (others and now < started + _GRACE_S)):
                return
            self._wire.interrupt()
            if now < started + 0.001:
                os.sched_yield()
            else:
                futex_sleep(table.address + 8 * index, before)

    def _decide(self, before: int, deadline: float) -> None:
        """Write the decision of the round after `before`, unless somebody else does.

        Raises:
            NoQuorumError: too few have come.
            CommTimeoutError: the lock's holder does not get on.
        """
        table = self._wire.regions[0]
        self._lock(deadline)
        try:
            if table.words[table.at("round")] != before:
                return
            present = self._present(before + 1)
            try:
                self._check_quorum(present)
            except NoQuorumError:  # taken back under the lock, so that no decision can have it
                table.words[table.at("hello", self._wire.rank)] = 0
                raise
            came = [rank for rank, is_there in enumerate(present) if is_there]
            index = table.at("decided", (before + 1) % NUM_DECISIONS)
            table.words[index] = 0
            table.words[index + 1] = max(table.words[table.at("hello", rank) + 1] for rank in came)
            for word, bits in enumerate(_bits(present)):
                table.words[index + 2 + word] = bits
            table.words[index] = before + 1
            table.words[table.at("round")] = before + 1
            futex_wake(table.address + 8 * table.at("round"))
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def _lock(self, deadline: float) -> None:
        at_least = time.monotonic() + 0.1  # a time-out that is over leaves time enough for a lock that is free
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > max(deadline, at_least):
                    where = context("sync", rank=self._wire.rank, seq=self._wire.seq)
                    raise CommTimeoutError(
                        f"{where}: another rank is about to decide and does not get on (stopped?); call sync again"
                    ) from None
                self._wire.interrupt()
                time.sleep(0.0005)
            else:
                return

    def _check_quorum(self, present: Sequence[bool]) -> None:
        dead = self._wire.watch.dead()
        living = [rank for rank in range(self._num_ranks) if self._members[rank] and rank not in dead]
        came = [rank for rank in living if present[rank]]
        if 2 * len(came) > len(living) or (came and 2 * len(came) == len(living) and came[0] == living[0]):
            return
        where = context("sync", rank=self._wire.rank, seq=self._wire.seq)
        away = [rank for rank in living if not present[rank]]
        raise NoQuorumError(
            f"{where}: only ranks {came} of {living} came, too few to decide; call sync again when the others are back",
            away,
            "sync",
            cause="silent",
        )

    def _read(self, number: int) -> Decision:
        table = self._wire.regions[0]
        index = table.at("decided", number % NUM_DECISIONS)
        copy = [table.words[index + word] for word in range(2 + _MASK_WORDS)]
        if copy[0] != number or table.words[index] != number:
            raise ProtocolError(f"sync: decision {number} is gone; this rank was away for more than {NUM_DECISIONS}")
        return Decision([_bit(copy[2:], rank) for rank in range(self._num_ranks)], copy[1])


def _bits(mask: Sequence[bool]) -> list[int]:
    words = [0] * _MASK_WORDS
    for rank, is_set in enumerate(mask):
        words[rank // 64] |= int(is_set) << rank % 64
    return words


def _bit(words: Sequence[int], rank: int) -> bool:
    return bool(words[rank // 64] >> rank % 64 & 1)
