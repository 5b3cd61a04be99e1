"""The mirror of a remote rank: what its frames may store there, and that nothing of a wrong one is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from epee.engine.outbox import CELL_WORDS, PeerRegions, outbox_layout
from epee.engine.replication.links import LinkReader
from epee.engine.replication.mirror import Mirror
from epee.errors import ProtocolError
from epee.link.frames import BEGIN, END, FETCH, NO_WORD, PIECES, WRITE, Frame, pack_pieces
from epee.memory.shared import SharedRegion

STAGING_BYTES = 1 << 16


@pytest.fixture
def peer_regions() -> Iterator[PeerRegions]:
    """Rank 0's memory and the mirror of rank 1, in a group of two."""
    nbytes = outbox_layout(2, STAGING_BYTES).nbytes
    regions = [SharedRegion.create(nbytes, name, only_owner_writes=True) for name in ("outbox0", "mirror1")]
    found = PeerRegions(0, regions, STAGING_BYTES, 1, 2)
    yield found
    found.close()


class Asked:
    """A keeper that has asked rank 1 in epoch 4 and nobody else; it keeps what comes of that."""

    def __init__(self, peer_regions: PeerRegions) -> None:
        self.mirror = Mirror(1, peer_regions.regions[1], peer_regions)
        self.fetches: list[tuple[int, int, int]] = []

    def opened(self, ear: LinkReader, source: int, epoch: int) -> Mirror | None:
        return self.mirror if (source, epoch) == (1, 4) else None

    def ended(self, ear: LinkReader, source: int, epoch: int) -> Mirror | None:
        return self.mirror if epoch == 4 else None

    def fetched(self, peer: int, source: int, epoch: int) -> None:
        self.fetches.append((peer, source, epoch))


def frame_of(pieces: list[tuple[int, bytes]], word: int, value: int, note: int = 0) -> tuple[Frame, memoryview]:
    payload = pack_pieces(pieces)
    return Frame(PIECES, len(payload), len(pieces), word, value, note), memoryview(payload)


def heard(
    peer_regions: PeerRegions,
    pieces: list[tuple[int, bytes]],
    word: int,
    value: int,
    note: int = 0,
    about: tuple[int, int] = (1, 4),
) -> Asked:
    """Hear an answer that begins, about a rank and an epoch, and a frame of it."""
    keeper: Any = Asked(peer_regions)
    ear = LinkReader(1, peer_regions, keeper, keeper)
    try:
        ear.apply(Frame(BEGIN, 0, about[0], NO_WORD, about[1]), memoryview(b""))
        ear.apply(*frame_of(pieces, word, value, note))
    finally:
        ear.close()
        keeper.mirror.close()
    return keeper


def test_pieces_are_stored_where_they_belong_and_the_word_with_them(peer_regions: PeerRegions) -> None:
    first, second = 8 * peer_regions.first_cell, peer_regions.payload_bytes - 7
    heard(peer_regions, [(first, b"8 bytes!"), (second, b"7 bytes")], peer_regions.first_cell + CELL_WORDS, 77, 5)
    assert peer_regions.bytes_at(1, first, 8) == b"8 bytes!"
    assert peer_regions.bytes_at(1, second, 7) == b"7 bytes"
    assert peer_regions.words[1][peer_regions.first_cell + CELL_WORDS] == 77
    assert peer_regions.words[1][0] == peer_regions.words[1][1] == 5


@pytest.mark.parametrize("wrong", ["before", "behind", "across the end", "word"])
def test_nothing_is_stored_where_one_piece_or_the_word_is_wrong(peer_regions: PeerRegions, wrong: str) -> None:
    first, end = 8 * peer_regions.first_cell, peer_regions.payload_bytes
    places = {"before": first - 8, "behind": end + 64, "across the end": end - 4, "word": first + 64}
    word = 1 if wrong == "word" else NO_WORD
    with pytest.raises(ProtocolError):
        heard(peer_regions, [(first, b"8 bytes!"), (places[wrong], b"8 bytes?")], word, 77, 5)
    assert peer_regions.bytes_at(1, first, 8) == bytes(8)
    assert peer_regions.words[1][0] == 0


def test_an_answer_that_is_not_wanted_goes_nowhere(peer_regions: PeerRegions) -> None:
    first = 8 * peer_regions.first_cell
    heard(peer_regions, [(first, b"8 bytes!")], peer_regions.first_cell, 77, 5, about=(1, 3))
    assert peer_regions.bytes_at(1, first, 8) == bytes(8)
    assert peer_regions.words[1][0] == 0


def test_what_was_not_asked_for_ends_the_connection(peer_regions: PeerRegions) -> None:
    keeper: Any = Asked(peer_regions)
    ear = LinkReader(1, peer_regions, keeper, keeper)
    for frame, payload in (
        frame_of([(8 * peer_regions.first_cell, b"8 bytes!")], NO_WORD, 0),
        (Frame(WRITE, 0, 0, 0, 1), b""),
    ):
        with pytest.raises(ProtocolError):
            ear.apply(frame, memoryview(payload))
    with pytest.raises(ProtocolError):
        ear.place(Frame(WRITE, 8, 8 * peer_regions.first_cell, NO_WORD, 0))
    ear.apply(Frame(BEGIN, 0, 1, NO_WORD, 4), memoryview(b""))
    ear.apply(Frame(END, 0, 1, NO_WORD, 5), memoryview(b""))  # of another question: from here on nothing is expected
    with pytest.raises(ProtocolError):
        ear.apply(*frame_of([(8 * peer_regions.first_cell, b"8 bytes!")], NO_WORD, 0))
    ear.apply(Frame(FETCH, 0, 0, NO_WORD, 9), memoryview(b""))
    assert keeper.fetches == [(1, 0, 9)]
    assert peer_regions.bytes_at(1, 8 * peer_regions.first_cell, 8) == bytes(8)
    ear.close()
    keeper.mirror.close()
