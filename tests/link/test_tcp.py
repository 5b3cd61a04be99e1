"""One link over a real connection: order, full sockets, and every way in which it can end."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from epee.errors import ProtocolError
from epee.link import tcp
from epee.link.frames import MAX_PAYLOAD, NO_WORD, PIECES, WRITE, Frame, FrameOpener, FrameSealer
from epee.link.seam import LinkLoss
from epee.link.stream import SEND_BYTES
from epee.link.tcp import TcpLink

from .pairs import KEY_A, KEY_B, Memory, links_over, over_both, pattern, reset, socket_pair, until


class Ends:
    """Two links that this thread pumps."""

    def __init__(self, engine: str = "tcp", covers: bool = False, nbytes: int = 4 << 20) -> None:
        self.memory_a, self.memory_b = Memory(nbytes), Memory(nbytes, look=lambda memory, _: bytes(memory.bytes[:8]))
        self.a, self.b = links_over(engine, self.memory_a, self.memory_b, covers)
        if engine == "nixl":  # no write goes out before they have met
            until(lambda: self.pump() or (self.a._remote and self.b._remote))

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        self.a.close()
        self.b.close()
        assert self.memory_a.is_sound
        assert self.memory_b.is_sound

    def pump(self) -> None:
        self.a.pump()
        self.b.pump()


def lost(link: TcpLink) -> LinkLoss | None:
    """Pump until a link has ended; return why."""
    until(lambda: (link.pump() and link.lost) or link.lost)
    return link.lost


@over_both
@pytest.mark.parametrize("covers", [False, True], ids=["headers", "payloads too"])
@pytest.mark.parametrize("nbytes", [0, 1, 70_000, MAX_PAYLOAD, MAX_PAYLOAD + 1, 3 * MAX_PAYLOAD, 3 * MAX_PAYLOAD + 5])
def test_a_write_of_any_length_arrives_before_its_word(nbytes: int, covers: bool, engine: str) -> None:
    with Ends(engine, covers) as ends:
        data = memoryview(pattern(nbytes, 1))
        ends.memory_b._look = lambda memory, _: memory.bytes[5 : 5 + nbytes] == data
        ends.a.write(5, data, 3, 77, 9)
        until(lambda: ends.pump() or ends.memory_b.words[3])
        assert ends.memory_b.seen == [(3, 77, True)]
        assert ends.memory_b.note == 9
        assert ends.a.is_flushed


@over_both
def test_words_are_seen_in_order_and_behind_their_bytes(engine: str) -> None:
    with Ends(engine) as ends:
        for value in range(1, 3000):
            ends.a.write(0, value.to_bytes(8, "little"), value % 16, value, value)
            if not value % 7:
                ends.pump()
        until(lambda: ends.pump() or len(ends.memory_b.seen) == 2999)
        assert [value for _, value, _ in ends.memory_b.seen] == list(range(1, 3000))
        for _, value, before in ends.memory_b.seen:
            assert before == value.to_bytes(8, "little")


@over_both
def test_questions_and_answers_pass_both_ways(engine: str) -> None:
    with Ends(engine) as ends:
        ends.memory_b.on_ask = lambda number, _: ends.b.tell(number, [1, 2, 3])
        ends.a.write(0, b"x" * 8, 1, 5, 0)
        ends.a.ask([(1, 2), (3, 4)], 42)
        until(lambda: ends.pump() or ends.memory_a.others)
        kind, number, payload = ends.memory_a.others[0]
        assert (kind, number, payload) == (3, 42, b"".join(value.to_bytes(8, "little") for value in (1, 2, 3)))
        assert ends.memory_b.words[1] == 5


def test_a_peer_that_does_not_read_blocks_no_write_and_costs_no_copy() -> None:
    with Ends() as ends:
        data = memoryview(bytearray(pattern(1 << 20, 2)))
        for value in range(1, 41):
            ends.a.write(0, data, 1, value, 0)
        assert not ends.a.is_flushed
        held = [part for _, _, _, parts in ends.a._out._queue for part in parts]
        assert len(held) > 20
        assert all(memoryview(part).obj is data.obj for part in held if len(part) > 100)
        assert ends.a.pump() is False, "a full socket is no end"
        assert ends.a.lost is None
        until(lambda: ends.pump() or ends.memory_b.words[1] == 40)
        assert ends.a.is_flushed
        assert ends.memory_b.bytes[: 1 << 20] == data
        assert not ends.a._out._queue


@over_both
def test_memory_that_has_been_sent_is_let_go(engine: str) -> None:
    with Ends(engine) as ends:
        data = bytearray(3 << 20)
        references = sys.getrefcount(data)
        ends.a.write(0, memoryview(data), 1, 1, 0)
        until(lambda: ends.pump() or ends.memory_b.words[1])
        assert sys.getrefcount(data) == references


def test_one_pump_does_a_bounded_amount() -> None:
    with Ends() as ends:
        calls = 0
        connection = ends.b._socket

        class Endless:
            def recv_into(self, place: memoryview) -> int:
                nonlocal calls
                calls += 1
                return connection.recv_into(place)

            def __getattr__(self, name: str) -> object:
                return getattr(connection, name)

        ends.b._socket = Endless()
        data = memoryview(bytes(1 << 20))
        for value in range(1, 31):
            ends.a.write(0, data, 1, value, 0)
        while ends.memory_b.words[1] != 30:
            calls = 0
            ends.b.pump()
            assert calls <= tcp.MAX_READS
            ends.a.pump()


def test_one_write_gives_the_socket_a_bounded_amount() -> None:
    with Ends() as ends:
        given = []
        connection = ends.a._socket

        class Counted:
            def sendmsg(self, buffers: list[object], *more: object) -> int:
                given.append(sum(len(memoryview(buffer)) for buffer in buffers))
                return connection.sendmsg(buffers, *more)

            def __getattr__(self, name: str) -> object:
                return getattr(connection, name)

        ends.a._socket = Counted()
        ends.a.write(0, memoryview(bytes(4 << 20)), 1, 1, 0)
        assert sum(given) <= 2 * SEND_BYTES
        assert ends.a.is_stuck
        until(lambda: ends.pump() or ends.memory_b.words[1])
        assert max(given) <= SEND_BYTES
        assert not ends.a.is_stuck


@over_both
def test_pieces_go_out_at_once(engine: str) -> None:
    with Ends(engine) as ends:
        ends.a.write_pieces([(8, b"one"), (64, b"another")], 1, 5, 9)
        until(lambda: ends.pump() or ends.memory_b.others)
        kind, value, payload = ends.memory_b.others[0]
        assert (kind, value) == (PIECES, 5)
        assert payload.endswith(b"oneanother")


# ---- ends


@over_both
def test_a_peer_that_asks_and_does_not_read_loses_the_link(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setattr(tcp, "MAX_TELLS", 100)
    with Ends(engine) as ends:
        if engine == "tcp":  # what is full first of NIXL's is the ring
            ends.a._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
            ends.b._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        most = 0

        def answer(number: int, _: bytes) -> None:
            nonlocal most
            ends.a.tell(number, [1] * 512)
            most = max(most, len(ends.a._out))

        ends.memory_a.on_ask = answer
        numbers = iter(range(1, 1_000_000))

        def ask() -> None:
            for _ in range(20):
                ends.b.ask([(0, 1)], next(numbers))
                ends.a.pump()

        until(lambda: ask() or ends.a.lost)
        assert ends.a.lost is LinkLoss.DAMAGED
        assert 90 < most <= 101


@over_both
def test_a_peer_that_asks_and_reads_may_ask_on(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setattr(tcp, "MAX_TELLS", 10)
    with Ends(engine) as ends:
        ends.memory_a.on_ask = lambda number, _: ends.a.tell(number, [1])
        for number in range(1, 200):
            ends.b.ask([(0, 1)], number)
            until(lambda number=number: ends.pump() or len(ends.memory_b.others) == number)
        assert ends.a.lost is None
        assert len(ends.a._tells) <= 10


_WITH_SIGPIPE = """
import signal
from tests.link.pairs import Memory, tcp_links, until
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
a, b = tcp_links(Memory(100), Memory(100))
b.close()
until(lambda: a.write(0, b"x", 1, 1, 0) or a._mute)
until(lambda: a.pump() and a.lost or a.lost)
print(a.lost.name)
"""


def test_a_write_to_a_peer_that_has_gone_raises_no_signal() -> None:
    """A program may have given SIGPIPE its default back, which is death."""
    done = subprocess.run([sys.executable, "-c", _WITH_SIGPIPE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("RESET", "CLOSED")


@over_both
def test_a_peer_that_closes_is_lost_behind_what_it_said(engine: str) -> None:
    with Ends(engine) as ends:
        ends.b.write(0, b"goodbye!", 2, 1, 0)
        until(lambda: ends.pump() or ends.b.is_flushed)
        ends.b.close()
        assert lost(ends.a) is LinkLoss.CLOSED
        assert ends.memory_a.words[2] == 1
        assert ends.memory_a.bytes[:8] == b"goodbye!"


@over_both
def test_a_peer_that_is_killed_is_lost(engine: str) -> None:
    with Ends(engine) as ends:
        reset(ends.b._socket)
        assert lost(ends.a) is LinkLoss.RESET
        ends.a.write(0, b"x", NO_WORD, 0, 0)
        assert ends.a.lost is LinkLoss.RESET


def test_what_a_peer_said_before_it_left_counts_though_writes_to_it_fail() -> None:
    """A rank that says goodbye closes its socket with bytes of ours unread in it, so ours is reset."""
    with Ends() as ends:
        ends.a.write(0, b"progress", NO_WORD, 0, 7)  # never read
        ends.b.write(0, b"goodbye!", 2, 1, 0)
        until(lambda: ends.a._socket.recv(1, socket.MSG_PEEK))
        ends.b._socket.close()
        until(lambda: ends.a.write(0, b"x", NO_WORD, 0, 8) or ends.a._mute or ends.a.lost)
        assert lost(ends.a) is LinkLoss.RESET
        assert ends.memory_a.words[2] == 1, "the goodbye was there"


@over_both
def test_what_is_under_way_arrives_though_the_peer_writes_to_an_end_that_has_finished(engine: str) -> None:
    with Ends(engine) as ends:
        data = memoryview(pattern(4 << 20, 3))
        ends.b._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        ends.a.write(0, data, 2, 1, 0)
        until(lambda: ends.pump() or ends.a.is_flushed)
        ends.a.finish()
        for _ in range(50):
            ends.b.write(0, b"progress", NO_WORD, 0, 7)
            ends.a.pump()
        assert lost(ends.b) is LinkLoss.CLOSED
        assert ends.memory_b.words[2] == 1
        assert ends.memory_b.bytes == data
        ends.b.close()
        assert lost(ends.a) is LinkLoss.CLOSED
        assert ends.memory_a.note == 7, "what came late was applied, too"


@pytest.mark.parametrize("what", ["garbage", "repeated", "wrong key", "other version", "bad place", "trailers"])
def test_a_peer_that_sends_what_cannot_be_right_is_damaged_and_nothing_of_it_applied(what: str) -> None:
    memory = Memory(1000)
    ours, theirs = socket_pair()
    link = TcpLink(1, ours, FrameSealer(KEY_A, False), FrameOpener(KEY_B, False), memory)

    def frame(number: int, key: bytes = KEY_B, covers: bool = False, offset: int = 0) -> bytes:
        parts = FrameSealer(key, covers).seal(Frame(WRITE, 8, offset, 1, number + 1), number, b"evil" * 2)
        return b"".join(parts)

    theirs.sendall(
        {
            "garbage": bytes(range(256)) * 4,
            "repeated": frame(1),
            "wrong key": frame(0, KEY_A),
            "other version": frame(0)[::-1],
            "bad place": frame(0, offset=995),
            "trailers": frame(0, covers=True),
        }[what]
        + frame(1)
    )
    assert lost(link) is LinkLoss.DAMAGED
    assert bytes(memory.bytes) == bytes([0xA5]) * 1000
    assert memory.words == [0] * 16
    assert memory.seen == []
    link.close()
    theirs.close()


def test_a_wrong_payload_with_trailers_is_damage_and_stores_nothing() -> None:
    memory = Memory(1000)
    ours, theirs = socket_pair()
    link = TcpLink(1, ours, FrameSealer(KEY_A, True), FrameOpener(KEY_B, True), memory)
    data = bytearray(b"".join(FrameSealer(KEY_B, True).seal(Frame(WRITE, 8, 0, 1, 1), 0, b"abcdefgh")))
    data[64] ^= 1
    theirs.sendall(data)
    assert lost(link) is LinkLoss.DAMAGED
    assert bytes(memory.bytes) == bytes([0xA5]) * 1000
    link.close()
    theirs.close()


@over_both
def test_a_question_that_must_not_be_asked_is_damage(engine: str) -> None:
    with Ends(engine) as ends:

        def refuse(number: int, payload: bytes) -> None:
            raise ProtocolError("no")

        ends.memory_b.on_ask = refuse
        ends.a.ask([(0, 0)], 1)
        until(lambda: ends.pump() or ends.b.lost)
        assert lost(ends.b) is LinkLoss.DAMAGED


def test_nothing_is_applied_after_close() -> None:
    with Ends() as ends:
        ends.a.write(0, b"x" * 8, 1, 1, 0)
        until(lambda: ends.b._socket.recv(1, socket.MSG_PEEK))
        ends.b.close()
        ends.b.close()
        ends.b.pump()
        assert ends.b.fd == -1
        assert ends.memory_b.words == [0] * 16
        assert bytes(ends.memory_b.bytes[:8]) == bytes([0xA5]) * 8


@over_both
def test_the_end_of_a_link_is_no_exception_in_writes_and_pumps(engine: str) -> None:
    with Ends(engine) as ends:
        ends.b.close()
        for _ in range(200):
            ends.a.write(0, b"x" * 1000, 1, 1, 0)
            ends.a.ask([(0, 0)], 1)
            ends.a.tell(1, [2])
        assert lost(ends.a) in (LinkLoss.CLOSED, LinkLoss.RESET)
        ends.a.pump()
        ends.a.finish()


def test_the_options_of_a_socket() -> None:
    with Ends() as ends:
        connection = ends.a._socket
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert not connection.getblocking()
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert not connection.get_inheritable()
