"""The mirror of a remote rank: what its frames may store there, and that nothing of a wrong one is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from epee.engine.outbox import CELL_WORDS, Outboxes, outbox_layout
from epee.engine.replication.mirror import LinkReader, Mirror
from epee.errors import ProtocolError
from epee.link.frames import BEGIN, END, FETCH, NO_WORD, PIECES, WRITE, Frame, pack_pieces
from epee.memory.shared import SharedRegion

STAGING_BYTES = 1 << 16


@pytest.fixture
def box() -> Iterator[Outboxes]:
    """Rank 0's memory and the mirror of rank 1, in a group of two."""
    nbytes = outbox_layout(2, STAGING_BYTES).nbytes
    regions = [SharedRegion.create(nbytes, name, only_owner_writes=True) for name in ("outbox0", "mirror1")]
    found = Outboxes(0, regions, STAGING_BYTES, 1, 2)
    yield found
    found.close()


class Asked:
    """A keeper that has asked rank 1 in epoch 4 and nobody else; it keeps what comes of that."""

    def __init__(self, box: Outboxes) -> None:
        self.mirror = Mirror(1, box.regions[1], box)
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
    box: Outboxes,
    pieces: list[tuple[int, bytes]],
    word: int,
    value: int,
    note: int = 0,
    about: tuple[int, int] = (1, 4),
) -> Asked:
    """Hear an answer that begins, about a rank and an epoch, and a frame of it."""
    keeper: Any = Asked(box)
    ear = LinkReader(1, box, keeper, keeper)
    try:
        ear.apply(Frame(BEGIN, 0, about[0], NO_WORD, about[1]), memoryview(b""))
        ear.apply(*frame_of(pieces, word, value, note))
    finally:
        ear.close()
        keeper.mirror.close()
    return keeper


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


def test_an_answer_that_is_not_wanted_goes_nowhere(box: Outboxes) -> None:
    first = 8 * box.first_cell
    heard(box, [(first, b"8 bytes!")], box.first_cell, 77, 5, about=(1, 3))
    assert box.bytes_at(1, first, 8) == bytes(8)
    assert box.words[1][0] == 0


def test_what_was_not_asked_for_ends_the_connection(box: Outboxes) -> None:
    keeper: Any = Asked(box)
    ear = LinkReader(1, box, keeper, keeper)
    for frame, payload in (frame_of([(8 * box.first_cell, b"8 bytes!")], NO_WORD, 0), (Frame(WRITE, 0, 0, 0, 1), b"")):
        with pytest.raises(ProtocolError):
            ear.apply(frame, memoryview(payload))
    with pytest.raises(ProtocolError):
        ear.place(Frame(WRITE, 8, 8 * box.first_cell, NO_WORD, 0))
    ear.apply(Frame(BEGIN, 0, 1, NO_WORD, 4), memoryview(b""))
    ear.apply(Frame(END, 0, 1, NO_WORD, 5), memoryview(b""))  # of another question: from here on nothing is expected
    with pytest.raises(ProtocolError):
        ear.apply(*frame_of([(8 * box.first_cell, b"8 bytes!")], NO_WORD, 0))
    ear.apply(Frame(FETCH, 0, 0, NO_WORD, 9), memoryview(b""))
    assert keeper.fetches == [(1, 0, 9)]
    assert box.bytes_at(1, 8 * box.first_cell, 8) == bytes(8)
    ear.close()
    keeper.mirror.close()
