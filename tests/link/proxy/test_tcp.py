"""Chunks over a link: sizes, order, and what a partner may not do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epee.link.frames import ASK, BEGIN, END, FETCH, NO_WORD, PIECES, TELL, WRITE, FrameOpener, FrameSealer
from epee.link.proxy.peer import ProxyPeer
from epee.link.proxy.tcp import CREDIT, INTRODUCTION, ChunkIntroduction, ChunkSink, TcpTransport
from epee.link.proxy.words import CHUNKS, KINDS, ROWS, ProxyShape, chunk_word
from epee.link.seam import LinkLoss
from epee.link.tcp import TcpLink

from ..pairs import KEY_A, KEY_B, pattern, socket_pair, until

POISON = 0xA5
SHAPE = ProxyShape(1, 1, 4, 3 << 20, 1408, 1)
INTRODUCTION_HERE = ChunkIntroduction(0, 3, 100, 0, 1, 4, 3 << 20, 1408)


class Side:
    """One end: page, staging, machines and link."""

    def __init__(
        self, link: Callable[[ChunkSink], TcpLink], introduction: ChunkIntroduction, shape: ProxyShape = SHAPE
    ) -> None:
        self.shape = shape
        self.words = memoryview(bytearray(8 * shape.num_words)).cast("Q")
        self.out = memoryview(bytearray(shape.area_bytes))
        self.area = memoryview(bytearray([POISON]) * shape.area_bytes)
        self.machine = ProxyPeer(self.words, shape, 0, introduction.process, introduction.first, [0], 0)
        self.sink = ChunkSink(self.machine, self.area, shape, introduction)
        self.link = link(self.sink)
        self.transport = TcpTransport(self.link, self.out, shape)
        self.transport.introduce(introduction)

    def post(self, kind: int, chunk: int, data: bytes) -> None:
        at = self.shape.base(kind) + chunk % self.shape.slots(kind) * self.shape.size(kind)
        self.out[at : at + len(data)] = data
        self.words[self.shape.stream_words(0, kind)[0] + chunk % self.shape.slots(kind)] = chunk_word(chunk, len(data))

    def column(self, which: int, kind: int, chunk: int) -> int:
        return self.words[self.shape.stream_words(0, kind)[which] + chunk % self.shape.slots(kind)]

    def take(self, kind: int, chunk: int) -> None:
        self.words[self.shape.stream_words(0, kind)[3] + chunk % self.shape.slots(kind)] = chunk + 1

    def slot(self, kind: int, chunk: int, nbytes: int) -> memoryview:
        at = self.shape.base(kind) + chunk % self.shape.slots(kind) * self.shape.size(kind)
        return self.area[at : at + nbytes]


class Both:
    """Two ends over a connection of this process; `a` sends what the tests look at in `b`."""

    def __init__(
        self,
        covers: bool = False,
        first: ChunkIntroduction = INTRODUCTION_HERE,
        second: ChunkIntroduction = INTRODUCTION_HERE,
        shape: ProxyShape = SHAPE,
    ) -> None:
        ours, theirs = socket_pair()
        self.a = Side(
            lambda sink: TcpLink(1, ours, FrameSealer(KEY_A, covers), FrameOpener(KEY_B, covers), sink), first, shape
        )
        self.b = Side(
            lambda sink: TcpLink(0, theirs, FrameSealer(KEY_B, covers), FrameOpener(KEY_A, covers), sink), second, shape
        )

    def __enter__(self) -> Both:
        return self

    def __exit__(self, *_: object) -> None:
        self.a.link.close()
        self.b.link.close()

    def met(self) -> Both:
        until(lambda: self.pump() or (self.a.sink.is_met and self.b.sink.is_met))
        return self

    def pump(self) -> None:
        for side in (self.a, self.b):
            side.link.pump()
            side.machine.turn(side.transport)


@pytest.mark.parametrize("covers", [False, True], ids=["headers", "payloads too"])
@pytest.mark.parametrize("nbytes", [0, 16, 70_000, 1 << 20, (1 << 20) + 16, 3 << 20])
def test_a_chunk_of_any_size_arrives_before_its_word(nbytes: int, covers: bool) -> None:
    with Both(covers).met() as both:
        data = pattern(nbytes, 1)
        both.a.post(CHUNKS, 100, data)
        until(lambda: both.pump() or both.b.column(2, CHUNKS, 100))
        assert both.b.column(2, CHUNKS, 100) == chunk_word(100, nbytes)
        assert both.b.slot(CHUNKS, 100, nbytes) == data
        beyond = both.b.area[nbytes:].tobytes()
        assert beyond == bytes([POISON]) * len(beyond), "nothing beyond the chunk is touched"
        until(lambda: both.pump() or both.a.column(1, CHUNKS, 100) == 101)


def test_chunks_and_rows_pass_both_ways_and_more_of_them_than_there_are_slots() -> None:
    with Both().met() as both:
        sides = (both.a, both.b)
        sent = {(side, kind): 100 for side in sides for kind in KINDS}
        taken = dict(sent)

        def step() -> bool:
            both.pump()
            for side, other in (sides, sides[::-1]):
                for kind in KINDS:
                    chunk, count = sent[side, kind], SHAPE.slots(kind)
                    if chunk < 140 and (chunk < 100 + count or side.column(1, kind, chunk) == chunk - count + 1):
                        side.post(kind, chunk, pattern(16 * (chunk % 60), chunk + kind))
                        sent[side, kind] += 1
                    chunk = taken[other, kind]
                    nbytes = 16 * (chunk % 60)
                    if chunk < 140 and other.column(2, kind, chunk) == chunk_word(chunk, nbytes):
                        assert other.slot(kind, chunk, nbytes) == pattern(nbytes, chunk + kind)
                        other.take(kind, chunk)
                        taken[other, kind] += 1
            return all(each == 140 for each in taken.values())

        until(step)


def test_a_slot_is_not_freed_before_the_socket_has_its_bytes() -> None:
    with Both().met() as both:
        for chunk in range(100, 104):
            both.a.post(CHUNKS, chunk, pattern(3 << 20, chunk))
        both.a.machine.turn(both.a.transport)
        both.a.machine.turn(both.a.transport)
        assert both.a.link.is_stuck, "twelve MiB are more than a socket takes"
        assert both.a.column(1, CHUNKS, 103) == 0
        until(lambda: both.pump() or both.a.column(1, CHUNKS, 103) == 104)
        until(lambda: both.pump() or both.b.column(2, CHUNKS, 103))
        assert both.b.slot(CHUNKS, 103, 3 << 20) == pattern(3 << 20, 103)


@pytest.mark.parametrize("field", ChunkIntroduction._fields)
def test_ends_that_differ_do_not_serve_each_other(field: str, caplog: pytest.LogCaptureFixture) -> None:
    value = 1 if field == "engine" else getattr(INTRODUCTION_HERE, field) + 64
    other = INTRODUCTION_HERE._replace(**{field: value})
    with caplog.at_level("INFO", "epee"), Both(second=other) as both:
        until(lambda: both.a.link.pump() or both.b.link.pump() or (both.a.link.lost and both.b.link.lost))
        assert both.a.link.lost in (LinkLoss.DAMAGED, LinkLoss.RESET, LinkLoss.CLOSED)
        assert not both.a.sink.is_met
    assert f"{field} must be equal on all ranks" in caplog.text


def _frame(link: TcpLink, frame: tuple[int, ...], payload: bytes = b"") -> None:
    link._out.put((frame[0], len(payload), *frame[1:]), payload)
    link.flush()


FORGED = {
    "another slot": ((WRITE, SHAPE.slot_bytes, CHUNKS, chunk_word(101, 16), 0), b"x" * 16),
    "not from its beginning": ((WRITE, 16, CHUNKS, chunk_word(100, 16), 0), b"x" * 16),
    "the word of rows behind a chunk": ((WRITE, 0, ROWS, chunk_word(100, 16), 0), b"x" * 16),
    "a word that does not exist": ((WRITE, 0, 77, chunk_word(100, 16), 0), b"x" * 16),
    "a number that is not next": ((WRITE, 0, CHUNKS, chunk_word(104, 16), 0), b"x" * 16),
    "a size that is not the received one": ((WRITE, 0, CHUNKS, chunk_word(100, 32), 0), b"x" * 16),
    "unknown flags": ((WRITE, 0, CHUNKS, chunk_word(100, 16) | 8, 0), b"x" * 16),
    "more than a row": ((WRITE, SHAPE.base(ROWS), NO_WORD, 0, 0), b"x" * 1424),
    "behind the area": ((WRITE, SHAPE.area_bytes, NO_WORD, 0, 0), b"x" * 16),
    "far behind the area": ((WRITE, (1 << 64) - 16, NO_WORD, 0, 0), b"x" * 16),
    "credit for nothing": ((WRITE, 0, CREDIT + CHUNKS, 101, 0), b""),
    "credit with bytes": ((WRITE, 0, CREDIT + CHUNKS, 100, 0), b"x" * 16),
    "a second introduction": ((PIECES, 1, INTRODUCTION, 0, 0), b"\0" * 16),
    "a question": ((ASK, 0, NO_WORD, 1, 0), b"\0" * 16),
    "an answer": ((TELL, 0, NO_WORD, 1, 0), b"\0" * 8),
    "a fetch": ((FETCH, 0, NO_WORD, 1, 0), b""),
    "a beginning": ((BEGIN, 0, NO_WORD, 1, 0), b""),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_partner_that_does_what_it_may_not_loses_the_connection(forged: str) -> None:
    with Both().met() as both:
        _frame(both.a.link, *FORGED[forged])
        until(lambda: both.b.link.pump() or both.b.link.lost)
        assert both.b.link.lost is LinkLoss.DAMAGED
        assert all(both.b.column(2, kind, chunk) == 0 for kind in KINDS for chunk in range(4))
        beyond = both.b.area[16:].tobytes()
        assert beyond == bytes([POISON]) * len(beyond), "at most the slot that was next is touched"


def test_a_chunk_without_credit_is_refused() -> None:
    with Both().met() as both:
        for chunk in range(100, 104):
            _frame(both.a.link, (WRITE, chunk % 4 * SHAPE.slot_bytes, CHUNKS, chunk_word(chunk, 16), 0), b"x" * 16)
        until(lambda: both.b.link.pump() or both.b.column(2, CHUNKS, 103))
        _frame(both.a.link, (WRITE, 0, CHUNKS, chunk_word(104, 16), 0), b"y" * 16)
        until(lambda: both.b.link.pump() or both.b.link.lost)
        assert both.b.slot(CHUNKS, 100, 16) == b"x" * 16, "a kernel may be reading it"


@pytest.mark.parametrize("what", ["a chunk", "credit", "the end"])
def test_nothing_counts_before_the_introduction(what: str) -> None:
    ours, theirs = socket_pair()
    stranger = TcpLink(1, ours, FrameSealer(KEY_A, False), FrameOpener(KEY_B, False), ChunkSink.__new__(ChunkSink))
    side = Side(
        lambda sink: TcpLink(0, theirs, FrameSealer(KEY_B, False), FrameOpener(KEY_A, False), sink), INTRODUCTION_HERE
    )
    if what == "the end":
        stranger.say(END, 0, 0)
    else:
        word, data = (CHUNKS, b"x" * 16) if what == "a chunk" else (CREDIT, b"")
        stranger.write(0, data, word, chunk_word(100, 16), 0)
    until(lambda: side.link.pump() or side.link.lost)
    assert side.link.lost is LinkLoss.DAMAGED
    assert not side.sink.has_ended
    stranger.close()
    side.link.close()


def test_nothing_counts_after_the_end() -> None:
    with Both().met() as both:
        both.a.link.say(END, 0, 0)
        until(lambda: both.b.link.pump() or both.b.sink.has_ended)
        _frame(both.a.link, (WRITE, 0, CHUNKS, chunk_word(100, 16), 0), b"x" * 16)
        until(lambda: both.b.link.pump() or both.b.link.lost)
        assert both.b.column(2, CHUNKS, 100) == 0


def test_a_process_serves_no_rows_but_the_first() -> None:
    shape = ProxyShape(1, 1, 4, 4096, 64, 2)
    numbers = ChunkIntroduction(0, 0, 0, 1, 2, 4, 4096, 64)
    with Both(first=numbers, second=numbers, shape=shape).met() as both:
        _frame(both.a.link, (WRITE, shape.base(ROWS), ROWS, chunk_word(0, 64), 0), b"x" * 64)
        until(lambda: both.b.link.pump() or both.b.link.lost)
        assert both.b.column(2, ROWS, 0) == 0


def test_bytes_beside_an_engine_that_stores_them_are_refused() -> None:
    numbers = INTRODUCTION_HERE._replace(engine=1)
    with Both(first=numbers, second=numbers).met() as both:
        _frame(both.a.link, (WRITE, 0, CHUNKS, chunk_word(100, 32), 0))
        until(lambda: both.b.link.pump() or both.b.column(2, CHUNKS, 100))
        _frame(both.a.link, (WRITE, 2 * SHAPE.slot_bytes, CHUNKS, chunk_word(102, 32), 0))
        until(lambda: both.b.link.pump() or both.b.link.lost)
        assert both.b.column(2, CHUNKS, 102) == 0
    with Both(first=numbers, second=numbers).met() as both:
        _frame(both.a.link, (WRITE, 0, CHUNKS, chunk_word(100, 16), 0), b"x" * 16)
        until(lambda: both.b.link.pump() or both.b.link.lost)
        assert both.b.column(2, CHUNKS, 100) == 0


def test_something_for_a_partner_that_has_left_is_refused() -> None:
    with Both().met() as both:
        both.b.link.close()
        until(lambda: both.a.link.pump() or both.a.link.lost)
        assert not both.a.transport.is_refused
        both.a.post(CHUNKS, 100, b"x" * 16)
        both.a.machine.turn(both.a.transport)
        assert both.a.transport.is_refused
