"""Frames: what is said arrives as it was said, in its turn, from who holds the key; everything else is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epee.errors import AuthError, ProtocolError
from epee.link import frames
from epee.link.frames import (
    ASK,
    HEADER_BYTES,
    MAX_ASKED,
    MAX_PAYLOAD,
    NO_WORD,
    PIECES,
    TELL,
    TRAILER_BYTES,
    WRITE,
    Frame,
    FrameOpener,
    FrameSealer,
)

from .pairs import KEY_A, KEY_B, pattern

WORD = st.integers(0, (1 << 64) - 1)
FLIPS = 20_000


def sealed(frame: Frame, number: int, payload: bytes, covers: bool, key: bytes = KEY_A) -> list[bytes]:
    return [bytes(part) for part in FrameSealer(key, covers).seal(frame, number, payload)]


def forged(*fields: int) -> bytes:
    """A header with any fields, and the right MAC: what a peer of another version could say, no stranger."""
    body = frames._HEADER.pack(*fields)
    return body + frames.hashlib.blake2b(body, key=KEY_A, digest_size=16).digest()


@given(
    st.sampled_from([WRITE, ASK, TELL, PIECES]), WORD, WORD, WORD, WORD, WORD, st.binary(max_size=300), st.booleans()
)
def test_what_is_sealed_is_opened(
    kind: int, offset: int, word: int, value: int, note: int, number: int, payload: bytes, covers: bool
) -> None:
    frame = Frame(kind, len(payload), offset, word, value, note)
    head, *rest = sealed(frame, number, payload, covers)
    assert len(head) == HEADER_BYTES
    opener = FrameOpener(KEY_A, covers)
    assert opener.open(head, number) == frame
    assert rest[:1] == ([payload] if payload else [])
    assert [len(part) for part in rest[1:]] == ([TRAILER_BYTES] if payload and (covers or kind != WRITE) else [])
    if rest[1:]:
        opener.check(payload, rest[1], number)


def test_the_longest_payload_passes() -> None:
    payload = bytes(MAX_PAYLOAD)
    head, body, trailer = sealed(Frame(WRITE, MAX_PAYLOAD, 0, NO_WORD, 0), 7, payload, True)
    opener = FrameOpener(KEY_A, True)
    assert opener.open(head, 7).nbytes == MAX_PAYLOAD
    opener.check(body, trailer, 7)


@pytest.mark.parametrize(
    "fields",
    [
        (0, 0, 0, 8, 0, 0, 0, 0, 5),
        (5, 0, 0, 8, 0, 0, 0, 0, 5),
        (255, 0, 0, 8, 0, 0, 0, 0, 5),
        (WRITE, 2, 0, 8, 0, 0, 0, 0, 5),
        (WRITE, 255, 0, 8, 0, 0, 0, 0, 5),
        (WRITE, 1, 0, 8, 0, 0, 0, 0, 5),  # a trailer that was not agreed on
        (WRITE, 0, 1, 8, 0, 0, 0, 0, 5),
        (WRITE, 0, 65535, 8, 0, 0, 0, 0, 5),
        (WRITE, 0, 0, MAX_PAYLOAD + 1, 0, 0, 0, 0, 5),
        (WRITE, 0, 0, (1 << 32) - 1, 0, 0, 0, 0, 5),
        (WRITE, 0, 0, 8, 0, 0, 0, 0, 4),
        (WRITE, 0, 0, 8, 0, 0, 0, 0, 6),
        (WRITE, 0, 0, 8, 0, 0, 0, 0, (1 << 64) - 1),
    ],
)
def test_a_field_that_no_frame_has_is_refused_though_the_mac_is_right(fields: tuple[int, ...]) -> None:
    opener = FrameOpener(KEY_A, False)
    assert opener.open(forged(WRITE, 0, 0, 8, 0, 0, 0, 0, 5), 5) == Frame(WRITE, 8, 0, 0, 0)
    with pytest.raises(ProtocolError):
        opener.open(forged(*fields), 5)


def flipped(data: bytes, choose: random.Random) -> bytes:
    """Return the data with one bit changed, or some, or a part of it overwritten."""
    changed = bytearray(data)
    kind = choose.random()
    if kind < 0.8:
        for _ in range(1 if kind < 0.5 else choose.randint(2, 40)):
            changed[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    else:
        start = choose.randrange(len(data))
        end = choose.randint(start, len(data))
        changed[start:end] = choose.randbytes(end - start)
    return bytes(changed)


def test_no_changed_header_is_accepted() -> None:
    choose = random.Random(1)
    payload = pattern(100, 1)
    for number in range(FLIPS):
        covers = bool(number & 1)
        head = sealed(Frame(WRITE, 100, 64 * number, number % 9, number), number, payload, covers)[0]
        changed = flipped(head, choose)
        opener = FrameOpener(KEY_A, covers)
        if changed == head:  # some flips undo each other
            assert opener.open(changed, number).value == number
            continue
        with pytest.raises((AuthError, ProtocolError)):
            opener.open(changed, number)


def test_no_changed_payload_or_trailer_is_accepted_where_both_sides_have_trailers() -> None:
    choose = random.Random(2)
    opener = FrameOpener(KEY_A, True)
    for number in range(FLIPS):
        payload = choose.randbytes(choose.randint(1, 200))
        _, body, trailer = sealed(Frame(WRITE, len(payload), 0, NO_WORD, 0), number, payload, True)
        changed = flipped(body + trailer, choose)
        if changed == body + trailer:
            opener.check(changed[: len(body)], changed[len(body) :], number)
            continue
        with pytest.raises(AuthError):
            opener.check(changed[: len(body)], changed[len(body) :], number)


@pytest.mark.parametrize("kept", [0, 1, 15, 16, 17, 47, 48, 63])
def test_a_header_that_was_cut_is_refused(kept: int) -> None:
    head = sealed(Frame(WRITE, 0, 0, 3, 4), 0, b"", False)[0]
    with pytest.raises((AuthError, ProtocolError)):
        FrameOpener(KEY_A, False).open(head[:kept], 0)


def test_a_frame_that_is_repeated_left_out_or_swapped_is_refused() -> None:
    heads = [sealed(Frame(WRITE, 0, 0, 3, number), number, b"", False)[0] for number in range(4)]
    opener = FrameOpener(KEY_A, False)
    for turn in range(4):
        for came in range(4):
            if came == turn:
                assert opener.open(heads[came], turn).value == turn
                continue
            with pytest.raises(ProtocolError, match=f"frame {turn} of a link"):
                opener.open(heads[came], turn)


def test_a_payload_of_another_frame_is_refused() -> None:
    frame = Frame(WRITE, 4, 0, NO_WORD, 0)
    parts = [sealed(frame, number, payload, True) for number, payload in enumerate((b"left", b"left", b"rite"))]
    opener = FrameOpener(KEY_A, True)
    opener.check(b"left", parts[0][2], 0)
    for payload, trailer, number in ((b"left", parts[0][2], 1), (b"left", parts[2][2], 2), (b"rite", parts[1][2], 1)):
        with pytest.raises(AuthError, match=f"payload of frame {number}"):
            opener.check(payload, trailer, number)


def test_the_key_of_another_direction_or_connection_opens_nothing() -> None:
    head, body, trailer = sealed(Frame(WRITE, 3, 0, 1, 2), 0, b"abc", True)
    for key in (KEY_B, bytes(32), KEY_A[::-1][:31] + b"x"):
        opener = FrameOpener(key, True)
        with pytest.raises(AuthError):
            opener.open(head, 0)
        with pytest.raises(AuthError):
            opener.check(body, trailer, 0)


def test_the_mac_of_a_header_is_none_of_a_payload() -> None:
    """Whoever could choose a payload must not get the MAC of a header for it."""
    body = frames._HEADER.pack(WRITE, 0, 0, 0, 0, 3, 4, 0, 9)
    number = frames._NUMBER.unpack(body[:8])[0]
    mac = FrameSealer(KEY_A, True).payload_mac(number, body[8:])
    with pytest.raises(AuthError):
        FrameOpener(KEY_A, False).open(body + mac, 9)


@pytest.mark.parametrize("sender_covers", [True, False])
def test_trailers_on_one_side_only_are_refused_with_the_reason(sender_covers: bool) -> None:
    head = sealed(Frame(WRITE, 3, 0, 1, 2), 0, b"abc", sender_covers)[0]
    with pytest.raises(ProtocolError, match="EPEE_LINK_MAC must be equal on all ranks"):
        FrameOpener(KEY_A, not sender_covers).open(head, 0)


@given(st.lists(st.tuples(WORD, WORD), min_size=1, max_size=MAX_ASKED))
def test_what_is_asked_and_told_arrives(words: list[tuple[int, int]]) -> None:
    assert frames.parse_asked(frames.pack_asked(words)) == words
    values = [value for _, value in words]
    assert frames.parse_told(frames.pack_told(values)) == tuple(values)


@pytest.mark.parametrize("parse", [frames.parse_asked, frames.parse_told])
@pytest.mark.parametrize("nbytes", [0, 1, 7, 9, 15, 17, 16 * MAX_ASKED + 1, 16 * MAX_ASKED + 16, MAX_PAYLOAD])
def test_a_question_or_answer_of_another_size_is_refused(parse: Any, nbytes: int) -> None:
    with pytest.raises(ProtocolError, match="words"):
        parse(bytes(nbytes))


@given(st.binary(max_size=HEADER_BYTES * 2))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises((AuthError, ProtocolError)):
        FrameOpener(KEY_A, False).open(garbage, 0)


@given(st.lists(st.tuples(WORD, st.binary(max_size=100)), min_size=1, max_size=frames.MAX_PIECES))
def test_pieces_arrive(pieces: list[tuple[int, bytes]]) -> None:
    found = frames.parse_pieces(memoryview(frames.pack_pieces(pieces)), len(pieces))
    assert [(offset, bytes(data)) for offset, data in found] == pieces


@pytest.mark.parametrize("num_pieces", [0, 1, 3, frames.MAX_PIECES + 1, (1 << 64) - 1])
def test_another_number_of_pieces_is_refused(num_pieces: int) -> None:
    payload = memoryview(frames.pack_pieces([(0, b"one"), (64, b"another")]))
    with pytest.raises(ProtocolError):
        frames.parse_pieces(payload, num_pieces)


@pytest.mark.parametrize("cut", [1, 7, 32])
def test_pieces_of_another_length_are_refused(cut: int) -> None:
    payload = frames.pack_pieces([(0, b"one"), (64, b"another")])
    for wrong in (payload[:-cut], payload + bytes(cut)):
        with pytest.raises(ProtocolError):
            frames.parse_pieces(memoryview(wrong), 2)
