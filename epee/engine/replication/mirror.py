"""The mirror of an outbox: the state of a rank of another host, kept in the memory of this one.

The gateway of the rank on this host (`topology.Roles`) makes the mirror and alone writes it; all ranks here map it for
reading and find in it what they would find in the outbox itself, a little later. So a rank writes only memory that it
made, here as on one host, and every wait for a fact that stays true (a tag is there, a count is at least so much) works
on a mirror unchanged. A fact that does not stay true is read remotely (`remote_reads.py`).

Data path: a gateway asks the answering rank (FETCH). The answer, between BEGIN and END, is the whole state of the
source (`snapshot.py`); if the source itself answers, its frames follow from then on, in the order in which it writes.
Each frame is checked before a byte is stored: it must lie in the cells, channels or payload of the outbox, its word
must be one that peers read. The payload goes straight into the mirror, the word behind it, then the sleepers on the
word are woken, as `outbox.publish_word` does. The source of a mirror cannot be forged: frames of a source are accepted
only on the link on which it was asked for, the answer to an older question is dropped.

A gateway that dies leaves a mirror that no longer changes, readable as long as a process maps it. The next gateway
makes a new mirror, requests everything again, and announces it to the ranks of its host only when all has come
(`links.py`): so everything that was found in the old one is in the new one, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ProtocolError
from ...link.frames import (
    ASK,
    BEGIN,
    END,
    FETCH,
    NO_WORD,
    PIECES,
    TELL,
    WRITE,
    Frame,
    parse_asked,
    parse_pieces,
    parse_told,
)
from ...link.poller import Links
from ...memory.shared import HEADER_BYTES, SharedRegion
from ...memory.signals import fence, futex_wake
from ..outbox import BELL, CONSUMED, CONSUMED_TOO, LANE_WORDS, LIFE, SLEEPERS, VIEW, PeerRegions

if TYPE_CHECKING:
    from .links import GroupLinks

FROM_BIRTH = 1  # MADE of a mirror that all ranks of the host have mapped at creation, in whatever epoch that was


class Mirror:
    """The memory that this rank keeps of a rank of another host.

    Args:
        source: the rank.
        region: the memory, signed as the source's.
        peer_regions: the outboxes of the group, for their layout.
        is_from_birth: all ranks of this host have mapped it when the group was made.

    Attributes:
        is_whole: an answer has come to its end once.
        is_from_birth: as the argument.
    """

    def __init__(
        self, source: int, region: SharedRegion, peer_regions: PeerRegions, is_from_birth: bool = False
    ) -> None:
        self.is_from_birth = is_from_birth
        self.source = source
        self.region = region
        self.is_whole = False
        self.words = region.words(0, len(peer_regions.own))
        self.bytes = memoryview(region.mapping)[HEADER_BYTES : HEADER_BYTES + peer_regions.payload_bytes]
        self._first_word, self._end_word = peer_regions.first_cell, len(self.words)
        self._first_byte, self._end_byte = 8 * peer_regions.first_cell, peer_regions.payload_bytes

    def checked(self, offset: int, nbytes: int, word: int) -> memoryview:
        """Return the bytes at an offset where its source may write, and a word behind them."""
        end = offset + nbytes
        word_ok = self._first_word <= word < self._end_word or word in (NO_WORD, CONSUMED, LIFE, VIEW)
        place_ok = not nbytes or self._first_byte <= offset <= end <= self._end_byte
        if not word_ok or not place_ok:
            raise ProtocolError(
                f"{nbytes} bytes at {offset} and word {word} of rank {self.source}'s mirror, which nobody may write; "
                "the connection ends"
            )
        return self.bytes[offset:end]

    def close(self) -> None:
        """Release the memory; the region is the caller's."""
        self.words.release()
        self.bytes.release()


class LinkReader:
    """The reader of the frames of one link; a `link.stream.FrameSink`.

    Args:
        peer: the rank at its other end.
        peer_regions: the peer regions of the group.
        links: through which questions are answered.
        keeper: has the mirrors.

    Attributes:
        asked: numbers of the questions that are open; no other answer is kept.
        told: answers (number -> values), until they are taken.
    """

    def __init__(self, peer: int, peer_regions: PeerRegions, links: Links, keeper: GroupLinks) -> None:
        self.peer = peer
        self.asked: set[int] = set()
        self.told: dict[int, tuple[int, ...]] = {}
        self._peer_regions = peer_regions
        self._lanes = peer_regions.lane_base[0]
        self._links, self._keeper = links, keeper
        self._mirror: Mirror | None = None  # of the incoming frames
        self._is_void = False  # the incoming frames are not wanted
        self._void = bytearray()

    def place(self, frame: Frame) -> memoryview:
        """Implement `FrameSink.place`."""
        if self._is_void:
            if len(self._void) < frame.nbytes:
                self._void = bytearray(frame.nbytes)
            return memoryview(self._void)[: frame.nbytes]
        return self._wanted().checked(frame.offset, frame.nbytes, frame.word)

    def _wanted(self) -> Mirror:
        if self._mirror is None:
            raise ProtocolError(f"rank {self.peer} tells what it was not asked for; the connection ends")
        return self._mirror

    def apply(self, frame: Frame, payload: memoryview) -> None:
        """Implement `FrameSink.apply`."""
        kind, _, offset, word, value, note = frame
        if kind in (WRITE, PIECES):
            if self._is_void:
                return
            mirror = self._wanted()
            if kind == PIECES:
                pieces = [(mirror.checked(at, len(data), word), data) for at, data in parse_pieces(payload, offset)]
                for place, data in pieces:
                    place[:] = data
            words = mirror.words
            if note > words[CONSUMED]:
                words[CONSUMED] = words[CONSUMED_TOO] = note
            if word != NO_WORD:
                words[word] = value
                self._wake(mirror, word)
        elif kind == ASK:
            self._answer(value, bytes(payload))
        elif kind == TELL:
            if value in self.asked:
                self.told[value] = parse_told(bytes(payload))
                self.asked.discard(value)
        elif kind == FETCH:
            self._keeper.fetched(self.peer, offset, value)
        elif kind == BEGIN:
            self._mirror = self._keeper.opened(self, offset, value)
            self._is_void = self._mirror is None
        elif kind == END:
            self._mirror = self._keeper.ended(self, offset, value)
            self._is_void = False

    def forget(self, mirror: Mirror) -> None:
        """Stop writing a mirror: frames for it are dropped."""
        if self._mirror is mirror:
            self._mirror, self._is_void = None, True

    def close(self) -> None:
        """Release all memory; no frame comes any more."""
        self._mirror = None

    def _wake(self, mirror: Mirror, word: int) -> None:
        """Wake the ranks of this host that sleep on a word of the mirror, or on BELL where a message came."""
        fence()
        peer_regions = self._peer_regions
        for rank in peer_regions.here:
            if peer_regions.words[rank][SLEEPERS]:
                futex_wake(mirror.region.address + 8 * word)
                break
        if word >= self._lanes:
            rank = (word - self._lanes) // LANE_WORDS
            if rank in peer_regions.here and peer_regions.words[rank][BELL]:
                futex_wake(peer_regions.address[rank] + 8 * BELL)

    def _answer(self, number: int, payload: bytes) -> None:
        asked, peer_regions = parse_asked(payload), self._peer_regions
        for rank, word in asked:
            is_elsewhere = rank >= peer_regions.capacity or (
                rank < len(peer_regions.host_of) and rank not in peer_regions.here
            )
            if is_elsewhere or word >= len(peer_regions.own):
                raise ProtocolError(f"rank {self.peer} asks for word {word} of rank {rank}; it must not")
        fence()  # data before the question is stored, and visible, before these are loaded
        # of a rank that has just joined, and is not known to this rank yet, there is nothing
        self._links.tell(
            self.peer,
            number,
            [peer_regions.words[rank][word] if rank in peer_regions.here else 0 for rank, word in asked],
        )
