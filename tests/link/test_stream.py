"""Streams: whatever the network cuts, memory is right bit for bit, and what is long goes straight to its place."""

from __future__ import annotations

import contextlib
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epee.errors import AuthError, EpeeError, ProtocolError
from epee.link import stream
from epee.link.frames import (
    ASK,
    HEADER_BYTES,
    MAX_PAYLOAD,
    NO_WORD,
    PIECES,
    TELL,
    TRAILER_BYTES,
    WRITE,
    Frame,
    FrameOpener,
    FrameSealer,
    pack_asked,
    pack_pieces,
    pack_told,
)
from epee.link.stream import BUFFER_BYTES, DIRECT_BYTES, Instream, Outstream

from .pairs import KEY_A, NUM_WORDS, Memory, Pipe, pattern

NBYTES = 3 << 20
SIZES = (0, 1, 7, 8, 64, 4096, DIRECT_BYTES - 1, DIRECT_BYTES, DIRECT_BYTES + 1, BUFFER_BYTES - HEADER_BYTES)
SIZES += (BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 200_000, MAX_PAYLOAD - 1, MAX_PAYLOAD)


class Way:
    """One direction: an outstream, a pipe, an instream, and what the memory at its end must look like."""

    def __init__(self, seed: int, covers: bool, nbytes: int = NBYTES, room: int = 1 << 20) -> None:
        self.choose = random.Random(seed)
        self.pipe = Pipe(self.choose, room)
        self.out = Outstream(FrameSealer(KEY_A, covers))
        self.memory = Memory(nbytes, look=lambda memory, frame: self.told[len(memory.seen)] == self._now(memory))
        self.into = Instream(FrameOpener(KEY_A, covers), self.memory)
        self.expected = bytearray(self.memory.bytes)
        self.told: list[int] = []  # per word that is written: a sum of the bytes that must be there before it
        self.words: list[tuple[int, int]] = []
        self.others: list[tuple[int, int, bytes]] = []
        self.places: list[tuple[int, int]] = []  # of these bytes

    def _now(self, memory: Memory) -> int:
        start, nbytes = self.places[len(memory.seen)]
        return hash(bytes(memory.bytes[start : start + nbytes]))

    def write(self, size: int, offset: int, word: int) -> None:
        payload = self.choose.randbytes(size)
        self.expected[offset : offset + size] = payload
        value = self.choose.randrange(1, 1 << 64)
        self.out.put(Frame(WRITE, size, offset, word, value, len(self.words)), payload)
        if word != NO_WORD:
            self.words.append((word, value))
            self.told.append(hash(payload))
            self.places.append((offset, size))

    def ask_or_tell(self, kind: int, size: int, number: int) -> None:
        payload = self.choose.randbytes(size)
        self.out.put(Frame(kind, size, 0, NO_WORD, number), payload)
        self.others.append((kind, number, payload))

    def step(self) -> bool:
        """Move something; False when both ends and the pipe are empty."""
        if self.out and (not self.pipe.data or self.choose.random() < 0.5):
            with contextlib.suppress(BlockingIOError):
                self.out.send(self.pipe.sendmsg)
        elif self.pipe.data:
            with contextlib.suppress(BlockingIOError):
                self.into.receive(self.pipe.recv_into)
        return bool(self.out or self.pipe.data)

    def check(self) -> None:
        assert self.memory.bytes == self.expected
        assert self.memory.is_sound
        assert [(word, value) for word, value, _ in self.memory.seen] == self.words
        assert all(is_behind for _, _, is_behind in self.memory.seen), "a word was seen before its bytes"
        assert self.memory.others == self.others
        last = dict(self.words)
        assert self.memory.words == [last.get(word, 0) for word in range(NUM_WORDS)]


def fill(way: Way, sizes: list[int]) -> None:
    """Queue frames of these sizes: writes at places of their own or on top of others, questions and answers between."""
    for number, size in enumerate(sizes):
        kind = way.choose.random()
        if kind < 0.15:
            way.ask_or_tell(way.choose.choice((ASK, TELL)), min(size, 40_000), number)
        else:
            offset = way.choose.randint(0, len(way.expected) - size)
            way.write(size, offset, NO_WORD if kind < 0.3 else way.choose.randrange(NUM_WORDS))


def run(way: Way) -> None:
    steps = 0
    while way.step():
        steps += 1
        assert steps < 2_000_000
    way.check()


@pytest.mark.parametrize("covers", [False, True], ids=["headers", "payloads too"])
@pytest.mark.parametrize("seed", range(6))
def test_frames_of_all_sizes_arrive_through_any_cuts(seed: int, covers: bool) -> None:
    way = Way(seed, covers)
    sizes = [way.choose.choice(SIZES) for _ in range(25)] + list(SIZES[:-4])
    way.choose.shuffle(sizes)
    fill(way, sizes)
    run(way)


@settings(max_examples=60)
@given(st.integers(0, 1 << 30), st.booleans(), st.lists(st.integers(0, 20_000), min_size=1, max_size=40))
def test_any_frames_arrive_through_any_cuts(seed: int, covers: bool, sizes: list[int]) -> None:
    way = Way(seed, covers, nbytes=40_000, room=30_000)
    fill(way, sizes)
    run(way)


@pytest.mark.parametrize("covers", [False, True], ids=["headers", "payloads too"])
def test_frames_that_are_queued_while_others_move_arrive(covers: bool) -> None:
    way = Way(11, covers, nbytes=100_000, room=50_000)
    for _ in range(300):
        fill(way, [way.choose.choice((0, 5, 500, 30_000))])
        for _ in range(way.choose.randrange(12)):
            way.step()
    run(way)


def test_one_byte_at_a_time() -> None:
    way = Way(12, True, nbytes=500)
    fill(way, [0, 100, 1, 0, 333, 17])
    way.pipe._cut = lambda most: min(most, 1)
    run(way)


# ---- copies


def test_a_long_payload_goes_straight_to_its_place() -> None:
    way = Way(13, False)
    way.pipe._cut = lambda most: most
    way.pipe._room = 8 << 20
    for k in range(3):
        way.write(MAX_PAYLOAD, k * MAX_PAYLOAD, k)
    run(way)
    straight = sum(len(place) for place in way.pipe.given if way.memory.holds(place))
    assert straight >= 3 * (MAX_PAYLOAD - BUFFER_BYTES)
    assert sum(len(place) for place in way.pipe.given) == 3 * (MAX_PAYLOAD + HEADER_BYTES)


def test_a_payload_that_must_be_checked_does_not_touch_its_place_before() -> None:
    way = Way(14, True)
    way.write(MAX_PAYLOAD, 0, 0)
    with contextlib.suppress(BlockingIOError):
        way.pipe._room = 8 << 20
        way.pipe._cut = lambda most: most
        way.out.send(way.pipe.sendmsg)
    way.pipe.data[-TRAILER_BYTES - 1] ^= 1
    before = bytes(way.memory.bytes)
    with pytest.raises(AuthError):
        feed(way, b"")
    assert bytes(way.memory.bytes) == before
    assert way.memory.seen == []


@pytest.mark.parametrize("kind", [ASK, TELL, PIECES])
@pytest.mark.parametrize("byte", [0, 17, -1])
def test_a_forged_payload_that_decides_something_is_found_without_proved_tensors(kind: int, byte: int) -> None:
    way = Way(15, covers=False)
    payload = {ASK: pack_asked([(1, 2)] * 3), TELL: pack_told([5, 6, 7]), PIECES: pack_pieces([(0, b"a"), (64, b"b")])}
    way.out.put(Frame(kind, len(payload[kind]), 2, NO_WORD, 9), payload[kind])
    way.out.send(way.pipe.sendmsg)
    end = HEADER_BYTES + len(payload[kind])
    way.pipe.data[HEADER_BYTES + byte if byte >= 0 else end + byte] ^= 1
    before = bytes(way.memory.bytes)
    with pytest.raises(AuthError, match="payload of frame 0"):
        feed(way, b"")
    assert bytes(way.memory.bytes) == before
    assert way.memory.others == way.memory.seen == []


def test_the_callers_memory_is_given_to_the_socket_as_it_is() -> None:
    out = Outstream(FrameSealer(KEY_A, False))
    payload = memoryview(bytearray(300_000))
    out.put(Frame(WRITE, 300_000, 0, 0, 1), payload)
    given_: list[memoryview] = []

    def take(buffers: list[object]) -> int:
        views = [memoryview(buffer) for buffer in buffers]
        given_.extend(view for view in views if view.obj is payload.obj)
        return min(70_000, sum(map(len, views)))

    out.send(take)
    assert len(given_) >= 4
    assert not out


# ---- growth


def test_nothing_grows_with_what_has_passed() -> None:
    way = Way(15, True, nbytes=100_000)
    for _ in range(400):
        fill(way, [way.choose.choice((0, 3, 2_000, 60_000))])
        while way.step():
            pass
        assert len(way.out._counts) <= 3
        assert len(way.into._counts) <= 3
        assert not way.out._queue
        assert len(way.into._scratch) <= 60_000
        assert len(way.into._buffer) == BUFFER_BYTES
    way.check()


def test_counts_do_not_grow_in_one_long_send_or_while_the_socket_is_full() -> None:
    way = Way(16, False)
    way.pipe._cut = lambda most: min(most, 100)
    way.write(200_000, 0, 1)
    longest = 0

    def take(buffers: list[object]) -> int:
        nonlocal longest
        longest = max(longest, len(way.out._counts))
        return way.pipe.sendmsg(buffers)

    def full(_: object) -> int:
        raise BlockingIOError

    way.out.send(take)
    for _ in range(100):
        with pytest.raises(BlockingIOError):
            way.into.receive(full)
    assert longest <= 2
    assert len(way.into._counts) <= 2
    while way.pipe.data:
        way.into.receive(way.pipe.recv_into)
    assert len(way.into._counts) <= 3
    way.check()


def test_one_send_gives_a_bounded_number_of_buffers() -> None:
    out = Outstream(FrameSealer(KEY_A, True))
    for number in range(500):
        out.put(Frame(WRITE, 10, 0, 0, number), bytes(10))
    most = 0

    def take(buffers: list[object]) -> int:
        nonlocal most
        most = max(most, len(buffers))
        return sum(len(memoryview(buffer)) for buffer in buffers)

    out.send(take)
    assert most <= stream.MAX_VIEWS + 2


# ---- what is wrong on the way


def bytes_of(way: Way) -> list[bytes]:
    return [b"".join(bytes(part) for part in parts) for _, _, _, parts in way.out._queue]


def feed(way: Way, data: bytes) -> None:
    """Give bytes to the instream until they are used up, in pieces."""
    way.pipe.data += data
    while way.pipe.data:
        with contextlib.suppress(BlockingIOError):
            way.into.receive(way.pipe.recv_into)


@pytest.mark.parametrize("covers", [False, True], ids=["headers", "payloads too"])
@pytest.mark.parametrize("kind", ["repeated", "left out", "swapped", "inserted"])
def test_frames_before_the_wrong_one_count_and_none_behind(kind: str, covers: bool) -> None:
    way = Way(17, covers, nbytes=5000)
    for number in range(6):
        way.write(500, 500 * number, number)
    parts = bytes_of(way)
    wrong = {
        "repeated": [*parts[:3], parts[2], *parts[3:]],
        "left out": [*parts[:3], *parts[4:]],
        "swapped": [*parts[:3], parts[4], parts[3], parts[5]],
        "inserted": [*parts[:3], bytes(64), *parts[3:]],
    }[kind]
    with pytest.raises((AuthError, ProtocolError)):
        feed(way, b"".join(wrong))
    assert [(word, value) for word, value, _ in way.memory.seen] == way.words[:3]
    assert way.memory.bytes[:1500] == way.expected[:1500]
    assert bytes(way.memory.bytes[1500:]) == bytes([0xA5]) * 3500


def test_a_stream_with_a_flipped_bit_gives_right_frames_or_an_error() -> None:
    choose = random.Random(18)
    whole = Way(19, True, nbytes=4000)
    for number in range(8):
        whole.write(choose.choice((0, 1, 400)), 450 * number, number)
    data = b"".join(bytes_of(whole))
    for _ in range(2000):
        way = Way(choose.randrange(1 << 30), True, nbytes=4000)
        way.places, way.told = whole.places, whole.told
        changed = bytearray(data)
        changed[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        with pytest.raises(EpeeError) as caught:
            feed(way, bytes(changed))
        assert isinstance(caught.value, (AuthError, ProtocolError))
        got = [(word, value) for word, value, _ in way.memory.seen]
        assert got == whole.words[: len(got)]
        assert all(is_behind for _, _, is_behind in way.memory.seen)
        assert way.memory.is_sound


def test_a_stream_that_is_cut_off_shows_only_whole_frames() -> None:
    choose = random.Random(20)
    whole = Way(21, False, nbytes=100_000)
    for number in range(6):
        whole.write(choose.choice((0, 9, 16_000)), 16_000 * number, number)
    data = b"".join(bytes_of(whole))
    for _ in range(200):
        way = Way(choose.randrange(1 << 30), False, nbytes=100_000)
        way.places, way.told = whole.places, whole.told
        feed(way, data[: choose.randrange(len(data))])
        assert way.into.receive(lambda _: 0) == -1
        got = [(word, value) for word, value, _ in way.memory.seen]
        assert got == whole.words[: len(got)]
        assert len(got) < 6
        assert all(is_behind for _, _, is_behind in way.memory.seen)


@pytest.mark.parametrize("covers", [False, True], ids=["headers", "payloads too"])
@pytest.mark.parametrize(("offset", "size", "word"), [(4000, 100, 0), (1 << 63, 8, 0), (0, 8, NUM_WORDS)])
def test_a_place_that_the_sink_refuses_ends_the_stream(offset: int, size: int, word: int, covers: bool) -> None:
    way = Way(22, covers, nbytes=4050)
    way.out.put(Frame(WRITE, size, offset, word, 1), pattern(size, 1))
    with pytest.raises(ProtocolError):
        feed(way, b"".join(bytes_of(way)))
    assert bytes(way.memory.bytes) == bytes([0xA5]) * 4050
    assert way.memory.is_sound
    assert way.memory.words == [0] * NUM_WORDS


def test_payloads_are_let_go_when_they_are_out() -> None:
    out = Outstream(FrameSealer(KEY_A, False))
    payload = bytearray(100)
    references = sys.getrefcount(payload)
    out.put(Frame(WRITE, 100, 0, 0, 1), payload)
    out.send(lambda buffers: sum(map(len, buffers)))
    assert sys.getrefcount(payload) == references


def test_what_the_socket_has_taken_is_known_by_number() -> None:
    out = Outstream(FrameSealer(KEY_A, False))
    assert out.is_out(out.newest)
    taken: list[int] = []

    def take(buffers: list[memoryview]) -> int:
        if sum(taken) >= 150_000:
            raise BlockingIOError
        taken.append(min(100_000, sum(map(len, buffers))))
        return taken[-1]

    numbers = []
    for _ in range(2):
        out.put(Frame(WRITE, 100_000, 0, 0, 1), memoryview(bytearray(100_000)))
        numbers.append(out.newest)
    assert numbers[1] == numbers[0] + 1
    assert not out.is_out(numbers[0])
    with pytest.raises(BlockingIOError):
        out.send(take)
    assert [out.is_out(number) for number in numbers] == [True, False]
    taken.clear()
    out.send(take)
    assert out.is_out(numbers[1])
    assert out.newest == numbers[1]
