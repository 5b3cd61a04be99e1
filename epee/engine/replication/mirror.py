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

from ...errors import ProtocolError
from ...link.frames import NO_WORD
from ...memory.shared import HEADER_BYTES, SharedRegion
from ..outbox import CONSUMED, LIFE, VIEW, PeerRegions

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
