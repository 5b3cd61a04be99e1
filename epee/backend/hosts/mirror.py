"""What a rank of another host says of itself, kept in the memory of this one: the mirror of its outbox.

Who writes, who reads: the gateway of the rank on this host (`link/topology.py`) makes the mirror and alone writes it;
all ranks here map it for reading and find in it what they would find in the outbox itself, a little later. So a rank
writes only memory that it made, here as on one host, and everything that waits for a fact which stays true (a tag is
there, a count is at least so much) works on a mirror unchanged. What does not stay true is asked for (`looks.py`).

Data path: frames of the rank arrive in the order in which it wrote (`link/frames.py`). The payload goes straight into
the mirror, the word behind it, then those who sleep on the word are woken, as `wake.publish_word` does. Each frame is
checked before a byte is stored: it must lie in the cells, lanes or payload of the outbox, its word must be one that
peers read; whose mirror it is nobody can change.

A gateway that dies leaves a mirror that stands still, readable as long as somebody maps it. Its ranks hear nothing more
of the remote ranks that it was the gateway of, so these count as lost as well (`watch.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ProtocolError
from ...link.frames import ASK, NO_WORD, PIECES, TELL, WRITE, Frame, parse_asked, parse_pieces, parse_told
from ...link.poller import Links
from ...memory.host import HEADER_BYTES, HostRegion
from ...memory.signals import fence, futex_wake
from ..outbox import BELL, CONSUMED, CONSUMED_TOO, LANE_WORDS, LIFE, LIFE_LOST, SLEEPERS, Outboxes, has_left


class Ear:
    """Where the frames of one remote rank go; a `link.stream.FrameSink`.

    Args:
        peer: the rank.
        mirror: the memory that this rank keeps of it; None where another rank is its gateway here, so that it has
            nothing to write.

    Attributes:
        asked: numbers of the questions that are open; no other answer is kept.
        told: answers (number -> values), until somebody takes them.
    """

    def __init__(self, peer: int, mirror: HostRegion | None) -> None:
        self.peer = peer
        self.asked: set[int] = set()
        self.told: dict[int, tuple[int, ...]] = {}
        self._mirror = mirror

    def attach(self, box: Outboxes, here: Sequence[int]) -> None:
        """Take the group's outboxes, and the ranks of this host; before the first frame."""
        self._box, self._here = box, frozenset(here)
        self._local_words = [box.words[rank] for rank in here]
        self._words, self._bytes = box.words[self.peer], memoryview(b"")
        self._lanes = box.lane_base[0]
        self._first_word, self._end_word = box.first_cell, len(self._words)
        self._first_byte, self._end_byte = 8 * box.first_cell, box.payload_bytes
        if self._mirror is not None:
            self._words = self._mirror.words(0, len(self._words))
            self._bytes = memoryview(self._mirror.mapping)[HEADER_BYTES : HEADER_BYTES + box.payload_bytes]

    def bind(self, links: Links) -> None:
        """Take the links, through which questions are answered."""
        self._links = links

    def place(self, frame: Frame) -> memoryview:
        """As `FrameSink.place`."""
        return self._checked(frame.offset, frame.nbytes, frame.word)

    def _checked(self, offset: int, nbytes: int, word: int) -> memoryview:
        """Return the bytes at a place of the mirror where the peer may write, and a word behind them."""
        end = offset + nbytes
        word_ok = self._first_word <= word < self._end_word or word in (NO_WORD, CONSUMED, LIFE)
        place_ok = not nbytes or self._first_byte <= offset <= end <= self._end_byte
        if self._mirror is None or not word_ok or not place_ok:
            raise ProtocolError(
                f"rank {self.peer} writes {nbytes} bytes at {offset} and word {word} of its mirror, which it must not; "
                "the connection ends"
            )
        return self._bytes[offset:end]

    def apply(self, frame: Frame, payload: memoryview) -> None:
        """As `FrameSink.apply`."""
        kind, _, offset, word, value, note = frame
        if kind in (WRITE, PIECES):
            if kind == PIECES:
                pieces = [(self._checked(at, len(data), word), data) for at, data in parse_pieces(payload, offset)]
                for place, data in pieces:
                    place[:] = data
            words = self._words
            if note > words[CONSUMED]:
                words[CONSUMED] = words[CONSUMED_TOO] = note
            if word != NO_WORD:
                words[word] = value
                self._wake(word)
        elif kind == ASK:
            self._answer(value, bytes(payload))
        elif kind == TELL and value in self.asked:
            self.told[value] = parse_told(bytes(payload))
            self.asked.discard(value)

    def close(self) -> None:
        """Let go of all memory; no frame comes any more."""
        self._local_words = []
        for view in (self._words, self._bytes):
            view.release()
        self._mirror = None

    def lose(self) -> None:
        """Note that nothing more will be heard of the rank, unless it has said goodbye, and wake who waits for it."""
        if self._mirror is not None and not has_left(self._words):
            self._words[LIFE] = LIFE_LOST
            self._wake(LIFE)

    def _wake(self, word: int) -> None:
        """Wake the ranks of this host that sleep on a word of the mirror, or on their BELL where a message came."""
        assert self._mirror is not None
        fence()
        for words in self._local_words:
            if words[SLEEPERS]:
                futex_wake(self._mirror.address + 8 * word)
                break
        if word >= self._lanes:
            rank = (word - self._lanes) // LANE_WORDS
            if rank in self._here and self._box.words[rank][BELL]:
                futex_wake(self._box.address[rank] + 8 * BELL)

    def _answer(self, number: int, payload: bytes) -> None:
        asked, box = parse_asked(payload), self._box
        for rank, word in asked:
            if rank not in self._here or word >= len(box.words[rank]):
                raise ProtocolError(f"rank {self.peer} asks for word {word} of rank {rank}; it must not")
        fence()  # what came before the question is stored, and seen, before these are loaded
        self._links.tell(self.peer, number, [box.words[rank][word] for rank, word in asked])
