"""The messages between the ranks of a `LatencyBuffer` on CPUs, and their order: tags, freed slots, exclusions.

Calls are numbered; call n uses slot `n % num_slots`. A rank's message of a call becomes visible with its tag, which is
stored last, after the header and the payload; the readers wait for exactly this tag, read, and free the slot when their
receive phase is over, whether everything arrived or not (`freed`). A source writes its message of call n only after its
readers have freed call `n - num_slots`.

Two wires decide where the words are. Ranks of one host push (`one_host/path.py`): a message lies in the memory of its
reader. Ranks of several hosts pull (`../hosts/latency/wire.py`): a message lies in its writer's memory, and in the
mirrors of it on other hosts.

A rank that waits in an earlier call for another one is not silent: the timeout for it starts when its own wait ends;
otherwise one missing rank would make the ranks that waited for it in vain seem late to the others.

A call without a mask ends in the same way on all ranks: a rank that has all messages checks whether a peer has aborted
the call before it continues, and a rank that aborts completes the call after all if a peer has all of its messages
(`ends`, `latency/aborts.py`). A rank announces that it has begun a call before it sends anything, so while that
word is missing no rank has all messages, and none will.

`cut` notifies a rank that a peer excludes it, so that it need not wait for the timeout to find out. It names the call:
a rank that has not begun the next one yet may include this rank again there, so its message is awaited.

A `sync` begins an epoch: calls are numbered from 1, and tags name the epoch.

A crash leaves a message without its tag, which no rank reads. Every word comes from a peer: it is copied before it is
checked and used.
"""

from __future__ import annotations

import math
import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from ...errors import ProtocolError
from ...memory.signals import SEQ_BITS, SLEEP_S, SPIN_LOADS, YIELD_S, fence, futex_sleep, futex_wake, tag, untag
from ..config import MAX_LATENCY_TOKENS, BufferConfig
from ..throughput.placement import Ints
from .aborts import EndWords
from .region import HEAD_WORDS, REASON_BYTES, RegionWords

OP_NAMES = ("none", "dispatch", "combine")
LATENCY_DISPATCH, LATENCY_COMBINE = 1, 2


class SectionHeader(NamedTuple):
    """The words before a section: the source's description of its message. The first five must be equal on all ranks.

    Attributes:
        op: `LATENCY_DISPATCH` or `LATENCY_COMBINE`.
        kind: of the rows: 0 bfloat16, 1 FP8, 2 FP8 with rounded scales, 3 with packed ones; combine: 4 bfloat16, 5
            float32.
        handle: combine: the call that made the handle; 0 in dispatch.
        with_weights: combine: 1 when weights are sent first.
        refused: 1 when the rank cannot make this call; the reason follows.
        num_rows: rows in the section.
        had: combine: 1 when the source had this rank's tokens in its dispatch. Over several hosts a bit for each rank,
            in a dispatch of those that it is for.
        sizes: a code of the call's sizes (`SectionCut.code`).
    """

    op: int
    kind: int
    handle: int
    with_weights: int
    sizes: int = 0
    refused: int = 0
    num_rows: int = 0
    had: int = 0


NUM_AGREED = 5
HEAD_NAMES = tuple(SectionHeader.__annotations__)
_HEAD = struct.Struct(f"{len(HEAD_NAMES)}Q{REASON_BYTES}s")
assert 8 + _HEAD.size == 8 * HEAD_WORDS
_LIMITS = ((1, 2), (0, 5), (0, 1 << SEQ_BITS), (0, 1), (0, 1 << 32), (0, 1))


class Timeouts(NamedTuple):
    """The wait limits of a phase.

    Attributes:
        deadline: `time.monotonic()` value.
        timeout_s: seconds that a peer has after it stopped waiting for others.
    """

    deadline: float
    timeout_s: float


class Wire(ABC):
    """Numbers the calls, posts this rank's messages and waits for the peers'.

    Args:
        config: of the buffer.
        rank: this rank.
        ended: returns the ranks from which nothing more will arrive.
        interrupt: called while waiting; raises to end the wait.
        show: called while waiting with the call's name and number and the awaited ranks, for hang reports.
        epoch: returns the epoch, which goes into every tag.

    Attributes:
        seq: the last call that was begun in the epoch, from 1.
        op: name of the call whose phase is under way.
    """

    _max_had = 1  # the largest `SectionHeader.had`

    def __init__(
        self,
        config: BufferConfig,
        rank: int,
        ended: Callable[[], Collection[int]],
        interrupt: Callable[[], None],
        show: Callable[[str, int, list[int]], None],
        epoch: Callable[[], int],
    ) -> None:
        self.config = config
        self.rank = rank
        self.seq = 0
        self.ended = ended
        self.interrupt = interrupt
        self.op = ""
        self._show = show
        self._epoch = epoch
        self._open: set[int] = set()  # slots whose receive phase is still to come

    @property
    @abstractmethod
    def regions(self) -> Sequence[RegionWords]:
        """The words of all ranks, as they can be read here, by rank."""

    def restart(self) -> None:
        """Begin an epoch, with call 1. No call is under way."""
        self.seq = 0
        self._open.clear()

    # -- slots

    def is_free(self) -> bool:
        """Whether the next call has a slot: its last user has received."""
        return (self.seq + 1) % self.config.num_slots not in self._open

    @property
    def num_open(self) -> int:
        """Calls that were sent and not received."""
        return len(self._open)

    def begin(self) -> int:
        """Start the next call; returns its number."""
        self.seq += 1
        self._open.add(self.slot(self.seq))
        return self.seq

    def slot(self, seq: int) -> int:
        """Return the slot of a call."""
        return seq % self.config.num_slots

    def free(self, seq: int) -> None:
        """End a call's receive phase: peers may write the next call of this slot."""
        slot = self.slot(seq)
        own = self.regions[self.rank]
        index = own.at("freed", slot)
        own.words[index] = tag(self._epoch(), seq)
        futex_wake(own.address + 8 * index)
        self._open.discard(slot)

    # -- how a call without a mask ends

    def say_begun(self, seq: int) -> None:
        """Announce that this rank takes part in a call, before it sends anything of it."""
        own = self.regions[self.rank]
        own.words[own.at("ends", self.slot(seq))] = tag(self._epoch(), seq)
        fence()  # before the check for ranks that have aborted the call

    def end_words(self, seq: int) -> EndWords:
        """Return the words by which the ranks agree on how a call ends."""
        line = self.regions[self.rank].at("ends", self.slot(seq))
        words = {rank: region.words for rank, region in enumerate(self.regions)}
        return EndWords(self.rank, words, line)

    def is_aborted(self, seq: int) -> bool:
        """Whether a peer has aborted the call."""
        return bool(self.end_words(seq).aborted_by(tag(self._epoch(), seq)))

    # -- exclusion of ranks

    @abstractmethod
    def set_cut(self, active: Sequence[bool], seq: int) -> None:
        """Notify peers that they are excluded up to call `seq`, or included again.

        Between two phases only: what was sent has its tag.
        """

    @abstractmethod
    def is_cut_by(self, peer: int, seq: int) -> bool:
        """Whether `peer` has announced that it sends nothing here in call `seq`."""

    # -- waiting

    @abstractmethod
    def _at(self, field: str, src: int, seq: int) -> tuple[RegionWords, int]:
        """Return where the tag of a peer's message ("head") or of its weights ("early") can be read here."""

    def has_room(self, dst: int, seq: int, timeouts: Timeouts) -> bool:
        """Wait until `dst` has freed what call `seq` will overwrite."""
        region = self.regions[dst]
        index = region.at("freed", self.slot(seq))
        return self._wait(region, index, lambda word: self._is_freed(word, seq), dst, seq, timeouts)

    def _is_freed(self, word: int, seq: int) -> bool:
        """Return whether a rank's word says that it has freed what call `seq` will overwrite, or a later one."""
        last = seq - self.config.num_slots
        found, done = untag(word)
        return last <= 0 or (done >= last and found == self._epoch())

    def has_come(self, src: int, seq: int, timeouts: Timeouts, field: str = "head") -> bool:
        """Wait until the message of `src` in call `seq` (or, `field="early"`, its weights) can be read here.

        Returns False if it did not arrive in time, or if `src` is dead or has cut this rank off. Waiting for weights
        also ends when the rest has arrived.
        """
        want = tag(self._epoch(), seq)
        region, index = self._at(field, src, seq)
        _, head = self._at("head", src, seq)

        def is_there(word: int) -> bool:
            """Return whether the awaited tag is there, or that of the whole message."""
            return word == want or region.words[head] == want

        return self._wait(region, index, is_there, src, seq, timeouts)

    def is_here(self, src: int, seq: int) -> bool:
        """Whether the message of a peer has arrived."""
        region, index = self._at("head", src, seq)
        return region.words[index] == tag(self._epoch(), seq)

    def is_early(self, src: int, seq: int) -> bool:
        """Whether the weights that `src` sends ahead of a combine have arrived."""
        region, index = self._at("early", src, seq)
        return region.words[index] == tag(self._epoch(), seq)

    def _wait(
        self, region: RegionWords, index: int, is_there: Callable[[int], bool], peer: int, seq: int, timeouts: Timeouts
    ) -> bool:
        if self._poll(region.words, index, is_there, timeouts):
            return True
        try:
            return self._sleep(region, index, is_there, peer, seq, timeouts)
        finally:
            self._say_waiting(seq, time.monotonic())

    def _poll(self, words: memoryview, index: int, is_there: Callable[[int], bool], timeouts: Timeouts) -> bool:
        """Poll a word for about a millisecond."""
        for _ in range(SPIN_LOADS):
            if is_there(words[index]):
                return True
        yield_until = min(time.monotonic() + YIELD_S, timeouts.deadline)
        while time.monotonic() < yield_until:
            if is_there(words[index]):
                return True
            os.sched_yield()
        return False

    def _sleep(
        self, region: RegionWords, index: int, is_there: Callable[[int], bool], peer: int, seq: int, timeouts: Timeouts
    ) -> bool:
        words = region.words
        until = timeouts.deadline
        limit = until + self.config.num_ranks * timeouts.timeout_s
        self._say_waiting(seq, until)
        while True:
            seen = words[index]
            if is_there(seen):
                return True
            self.interrupt()
            self._show(self.op, seq, [peer])
            now = time.monotonic()
            if peer in self.ended() or self.is_cut_by(peer, seq) or self.is_aborted(seq):
                return is_there(words[index])  # what was stored before it died counts
            if now > until:
                later = min(self._waits_until(peer, seq) + timeouts.timeout_s, limit)
                if later <= now:
                    return is_there(words[index])
                until = later
                self._say_waiting(seq, until)
            if until - now < 2 * SLEEP_S:
                self.nap(min(until - now, 0.0005))  # the futex sleeps longer than that
            else:
                self._doze(region.address + 8 * index, seen)

    def nap(self, seconds: float) -> None:
        """Sleep unconditionally."""
        time.sleep(seconds)

    def _doze(self, address: int, seen: int) -> None:
        """Sleep on a word, for `SLEEP_S` at most."""
        futex_sleep(address, seen)

    def _say_waiting(self, seq: int, until: float) -> None:
        """Publish until when this rank waits; at the end of the wait, when that was."""
        own = self.regions[self.rank]
        index = own.at("waiting")
        own.words[index + 1] = int(until * 1e6)
        own.words[index] = seq

    def _waits_until(self, peer: int, seq: int) -> float:
        """Return until when a peer waits for others, or has waited, in call `seq` or before; else minus infinity."""
        region = self.regions[peer]
        index = region.at("waiting")
        call, until_us = region.words[index], region.words[index + 1]
        return until_us / 1e6 if 0 < call <= seq else -math.inf

    # -- messages

    @abstractmethod
    def post(self, dst: int, seq: int, head: SectionHeader, reason: bytes = b"") -> None:
        """Store a header and, last, the tag: the rest of the message has been written."""

    @abstractmethod
    def is_posted(self, dst: int, seq: int) -> bool:
        """Whether this rank's message of call `seq` has been posted for `dst`."""

    def head_of(self, src: int, seq: int) -> tuple[SectionHeader, str]:
        """Return the checked header of an arrived message, and the reason of a refusal.

        Raises:
            ProtocolError: it cannot be right.
        """
        region, index = self._at("head", src, seq)
        *fields, reason = _HEAD.unpack(bytes(region.words[index + 1 : index + HEAD_WORDS]))
        head = SectionHeader(*fields)
        limits = (*_LIMITS, (0, MAX_LATENCY_TOKENS), (0, self._max_had))
        for name, value, (low, high) in zip(HEAD_NAMES, head, limits, strict=True):
            if not low <= value <= high:
                raise ProtocolError(f"rank {src}: {name} must be {low} ... {high}, got {value}; memory is corrupt")
        return head, reason.rstrip(b"\0").decode("utf-8", "replace")

    @abstractmethod
    def close(self) -> None:
        """Drop all views."""


def pack_head(head: SectionHeader, reason: bytes = b"") -> memoryview:
    """Return the words after the tag: a header, and a refusal's reason."""
    return memoryview(_HEAD.pack(*head, reason[:REASON_BYTES])).cast("Q")


def checked_tokens(tokens: Ints, num_rows: int, src: int, max_tokens: int) -> Ints:
    """Return the tokens named by a peer, which ascend.

    Raises:
        ProtocolError: they cannot be right.
    """
    bounds = np.concatenate([[-1], tokens, [max_tokens]])
    if len(tokens) < num_rows or (np.diff(bounds) <= 0).any():
        raise ProtocolError(f"rank {src} names tokens that cannot be; memory is corrupt")
    return tokens
