"""The mirror of a remote rank: what its frames may store there, and that nothing of a wrong one is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from epee.backend.hosts.mirror import Ear
from epee.backend.outbox import CELL_WORDS, Outboxes, outbox_layout
from epee.errors import ProtocolError
from epee.link.frames import NO_WORD, PIECES, Frame, pack_pieces
from epee.memory.host import HostRegion

STAGING_BYTES = 1 << 16


@pytest.fixture
def box() -> Iterator[Outboxes]:
    """Rank 0's memory and the mirror of rank 1, in a group of two."""
    nbytes = outbox_layout(2, STAGING_BYTES).nbytes
    regions = [HostRegion.create(nbytes, name, only_owner_writes=True) for name in ("outbox0", "mirror1")]
    found = Outboxes(0, regions, STAGING_BYTES, 1, 2)
    yield found
    found.close()


def heard(box: Outboxes, pieces: list[tuple[int, bytes]], word: int, value: int, note: int = 0) -> None:
    ear = Ear(1, box.regions[1])
    ear.attach(box, (0,))
    payload = pack_pieces(pieces)
    try:
        ear.apply(Frame(PIECES, len(payload), len(pieces), word, value, note), memoryview(payload))
    finally:
        ear.close()


def test_pieces_are_stored_where_they_belong_and_the_word_with_them(box: Outboxes) -> None:
    first, second = 8 * box.first_cell, box.payload_bytes - 7
    heard(box, [(first, b"8 bytes!"), (second, b"7 bytes")], box.first_cell + CELL_WORDS, 77, 5)
    assert box.bytes_at(1, first, 8) == b"8 bytes!"
    assert box.bytes_at(1, second, 7) == b"7 bytes"
    assert box.words[1][box.first_cell + CELL_WORDS] == 77
    assert box.words[1][0] == box.words[1][1] == 5


@pytest.mark.parametrize("wrong", ["before", "behind", "across the end", "word"])
def test_nothing_is_stored_where_one_piece_or_the_word_is_wrong(box: Outboxes, wrong: str) -> None:
    first, end = 8 * box.first_cell, box.payload_bytes
    places = {"before": first - 8, "behind": end + 64, "across the end": end - 4, "word": first + 64}
    word = 1 if wrong == "word" else NO_WORD
    with pytest.raises(ProtocolError):
        heard(box, [(first, b"8 bytes!"), (places[wrong], b"8 bytes?")], word, 77, 5)
    assert box.bytes_at(1, first, 8) == bytes(8)
    assert box.words[1][0] == 0
