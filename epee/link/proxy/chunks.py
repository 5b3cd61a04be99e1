"""The two ends of a stream of chunks as state machines: the words of kernels on one side, an engine on the other.

Data path: a kernel fills a slot and stores `posted`; `ChunkSender.next_run` finds it and gives it to the engine, when
the receiver has room; when the engine has read the bytes, `finish` stores `freed`. At the other end the engine asks
`ChunkReceiver.admit` before it stores a byte of a peer's, and calls `arrive` when all bytes of a chunk are there:
`arrived` is stored. Kernels of the island store `taken`; `credit` finds it and returns the number to report to the
sender. Words and order: `words.py`.

One process of a proxy serves every `step`-th chunk of a stream. For it

    sender     done <= next <= taken by the peer + num_slots
    receiver   granted <= taken <= next <= granted + num_slots

A peer's claims are checked against this before they are used: the slot that it may write, the number, the size, the
credit. A kernel's words are checked, too: nonsense in them is an error, never an index.

Nothing here waits, and nothing moves bytes: the simulator of the tests (`tests/link/proxy/world.py`) and the proxy run
the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from typing import NamedTuple

from ...errors import ProtocolError
from .words import SIZE_BITS, parse_chunk_word

MAX_RUN = 8  # chunks that are given to an engine at once, where they lie side by side
Words = MutableSequence[int] | memoryview  # 64-bit words


class ChunkRun(NamedTuple):
    """Chunks of equal size in adjacent slots.

    Attributes:
        chunk, slot: of the first.
        num_chunks: how many there are.
        nbytes: of each.
        word: the chunk word of the first.
    """

    chunk: int
    slot: int
    num_chunks: int
    nbytes: int
    word: int

    def words(self) -> list[int]:
        """Return the chunk word of each."""
        return [self.word + (i << SIZE_BITS) for i in range(self.num_chunks)]


class ChunkSender:
    """The sending end of a stream, as one process serves it.

    Args:
        posted, freed: words, one per slot.
        slot_bytes: size of a slot.
        first: number of the first chunk of this process.
        step: of its chunk numbers.

    Attributes:
        next: the chunk that goes to the engine next.
        done: the chunk whose bytes the engine has to read next.
        taken: all chunks below have been taken by the peer's readers.
    """

    def __init__(self, posted: Words, freed: Words, slot_bytes: int, first: int, step: int) -> None:
        self._posted, self._freed = posted, freed
        self._slot_bytes, self._num_slots, self._step = slot_bytes, len(posted), step
        self.next = self.done = self.taken = first

    def next_run(self, most: int = MAX_RUN) -> ChunkRun | None:
        """Return the chunks that may be sent now, which count as given to the engine; None: there are none.

        Raises:
            ProtocolError: a word of the kernel announces what cannot be.
        """
        slot = self.next % self._num_slots
        word = self._posted[slot]
        if word >> SIZE_BITS != self.next + 1:
            if word >> SIZE_BITS > self.next + 1:
                raise ProtocolError(
                    f"a kernel has posted chunk {(word >> SIZE_BITS) - 1} in slot {slot}, where {self.next} is next"
                )
            return None
        room = self.room
        if room <= 0:
            return None
        nbytes = parse_chunk_word(word, self._slot_bytes).nbytes
        count = 1
        if self._step == 1:
            most = min(most, room, self._num_slots - slot)
            while count < most and self._posted[slot + count] == word + (count << SIZE_BITS):
                count += 1
        run = ChunkRun(self.next, slot, count, nbytes, word)
        self.next += count * self._step
        return run

    @property
    def has_posted(self) -> bool:
        """Whether a kernel has posted a chunk that was not given to the engine."""
        return self._posted[self.next % self._num_slots] >> SIZE_BITS == self.next + 1

    @property
    def room(self) -> int:
        """Number of chunks for which the peer has granted slots; may be 0 while chunks are posted."""
        return (self.taken + self._num_slots - self.next) // self._step

    def finish(self, count: int) -> None:
        """Record that the engine has read the bytes of the next `count` chunks: their slots may be filled again."""
        for _ in range(count):
            self._freed[self.done % self._num_slots] = self.done + 1
            self.done += self._step
        assert self.done <= self.next

    def hear_credit(self, taken: int) -> None:
        """Use the number that the peer reports: all chunks below are taken.

        Raises:
            ProtocolError: it is no chunk of this process, goes back, or is beyond what was sent.
        """
        if not self.taken <= taken <= self.next or (taken - self.taken) % self._step:
            raise ProtocolError(f"a peer reports chunks below {taken} as taken; {self.taken} ... {self.next} can be")
        self.taken = taken


class ChunkReceiver:
    """The receiving end of a stream, as one process serves it.

    Args:
        arrived: words, one per slot.
        taken: words by slot, then reader.
        slot_bytes: size of a slot.
        first, step: as of the sender.
        readers: the ranks of the island, by position, that take chunks.
        own: position of the rank that owns the page.

    Attributes:
        next: the chunk that comes next.
        taken: all chunks below have been taken by their readers, as far as is noticed.
        granted: as reported to the sender.
    """

    def __init__(
        self,
        arrived: Words,
        taken: Words,
        slot_bytes: int,
        first: int,
        step: int,
        readers: Iterable[int],
        own: int,
    ) -> None:
        self._arrived, self._taken_words = arrived, taken
        self._slot_bytes, self._num_slots, self._step = slot_bytes, len(arrived), step
        self._num_readers = len(taken) // len(arrived)
        self._readers, self._own = sorted(readers), own
        self._is_for_one = [False] * len(arrived)
        self._least = max(1, self._num_slots // step // 2) * step  # credit that is worth a message
        self.next = self.taken = self.granted = first

    def admit(self, slot: int, end: int) -> None:
        """Check that the peer may write the first `end` bytes of a slot now.

        Raises:
            ProtocolError: another slot is next, it still has readers, or it is smaller.
        """
        due = self.next % self._num_slots
        if slot != due or end > self._slot_bytes:
            raise ProtocolError(
                f"a peer writes {end} bytes into slot {slot}; slot {due} is next, and has {self._slot_bytes}"
            )
        if self.next - self._num_slots >= self.granted:
            raise ProtocolError(f"a peer sends chunk {self.next}, and only those below {self.granted} are taken")

    def arrive(self, word: int, nbytes: int) -> None:
        """Announce the next chunk, all of whose bytes have been stored.

        Args:
            word: the peer's chunk word.
            nbytes: as received.

        Raises:
            ProtocolError: the word does not fit.
        """
        slot = self.next % self._num_slots
        claim = parse_chunk_word(word, self._slot_bytes)
        if claim.chunk != self.next or claim.nbytes != nbytes:
            raise ProtocolError(
                f"a peer announces chunk {claim.chunk} of {claim.nbytes} bytes; {nbytes} bytes came, of {self.next}"
            )
        self.admit(slot, nbytes)
        self._is_for_one[slot] = claim.is_for_one
        self._arrived[slot] = word
        self.next += self._step

    def credit(self) -> int | None:
        """Return the number to report to the sender, which counts as reported: all chunks below are taken; None: not
        yet."""
        while self.taken < self.next and self._is_taken(self.taken):
            self.taken += self._step
        if self.taken - self.granted < self._least:
            return None
        self.granted = self.taken
        return self.granted

    def drop_reader(self, position: int) -> None:
        """Wait no more for a rank of the island, which is dead."""
        if position in self._readers:
            self._readers.remove(position)

    def _is_taken(self, chunk: int) -> bool:
        slot = chunk % self._num_slots
        readers = [self._own] if self._is_for_one[slot] else self._readers
        first = slot * self._num_readers
        return all(self._taken_words[first + reader] == chunk + 1 for reader in readers)
