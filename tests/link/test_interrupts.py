"""Exceptions from signal handlers before every line of streams, sockets and pollers: afterwards all goes on right.

A signal handler runs between instructions where the interpreter looks for signals: behind calls and at loops. A trace
function raises before lines, which are finer, but also in two places where no handler can run: at the end of a `with`
and on the way from a `finally` to its first call. Those lines are left out.
"""

from __future__ import annotations

import contextlib
import linecache
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import epee.link
from epee.link.frames import ASK, NO_WORD, PIECES, TELL, WRITE, Frame, FrameOpener, FrameSealer
from epee.link.stream import Instream, Outstream

from .pairs import BOUND_S, KEY_A, End, Memory, Pipe, num_open, pattern, tcp_links

_FOLDER = str(Path(epee.link.__file__).parent)
_BETWEEN_CALLS = ("with self.lock:", "if held:", "self.lock.release()")


class Interrupt:
    """Runs code and raises `TimeoutError`, an `OSError`, before its `at`-th line in these modules of `epee.link`."""

    def __init__(self, at: int, *modules: str) -> None:
        self.left = at
        self.where = "not interrupted"
        self._files = tuple(f"{_FOLDER}/{module}.py" for module in modules)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in self._files:
            return None
        if event == "line" and linecache.getline(name, frame.f_lineno).strip() not in _BETWEEN_CALLS:
            self.left -= 1
            if self.left == 0:
                self.where = f"{Path(name).name}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                raise TimeoutError("raised by a signal handler")
        return self._trace

    def run(self, call: Callable[[], object]) -> bool:
        """True when the call was interrupted."""
        is_armed = self.left > 0
        sys.settrace(self._trace if is_armed else None)
        try:
            call()
        except TimeoutError:
            return True
        finally:
            sys.settrace(None)
        assert self.left > 0 or not is_armed, f"the exception was swallowed: {self.where}"
        return False


def without_repeats(found: list[Any]) -> list[Any]:
    """Return the list without elements that are equal to the one before: a frame may be applied twice."""
    return [one for k, one in enumerate(found) if not k or one != found[k - 1]]


FRAMES = ((WRITE, 100, 0), (WRITE, 0, NO_WORD), (ASK, 32, NO_WORD), (WRITE, 40_000, 3), (TELL, 16, NO_WORD))
FRAMES += ((PIECES, 60, 2), (WRITE, 17_000, NO_WORD), (WRITE, 8, 4), (WRITE, 0, 5))


@pytest.mark.parametrize("covers", [False, True], ids=["headers", "payloads too"])
def test_a_transfer_goes_on_after_an_interrupt_before_any_line_of_a_stream(covers: bool) -> None:
    at, was_interrupted = 0, True
    while was_interrupted:
        at += 1
        pipe = Pipe(random.Random(at), room=30_000)
        out, memory = Outstream(FrameSealer(KEY_A, covers)), Memory(60_000)
        into = Instream(FrameOpener(KEY_A, covers), memory)
        interrupt, was_interrupted = Interrupt(at, "stream", "frames"), False
        expected, words, others, start = bytearray(memory.bytes), [], [], 0

        def step(call: Callable[..., object], *args: object, interrupt: Interrupt = interrupt) -> bool:
            with contextlib.suppress(BlockingIOError):
                return interrupt.run(lambda: call(*args))
            return False

        for value, (kind, size, word) in enumerate(FRAMES, 1):
            payload, before = pattern(size, value), len(out)
            expected[start : start + size] = payload if kind == WRITE else expected[start : start + size]
            frame = Frame(kind, size, start if kind == WRITE else 0, word, value)
            if step(out.put, frame, payload):
                was_interrupted = True
                assert len(out) in (before, before + 1)
                if len(out) == before:
                    out.put(frame, payload)
            start += size + 100 if kind == WRITE else 0
            words += [(word, value, None)] if kind == WRITE and word != NO_WORD else []
            others += [(kind, value, payload)] if kind != WRITE else []
        turns = 0
        while out or pipe.data:
            was_interrupted |= step(out.send, pipe.sendmsg) if out else False
            was_interrupted |= step(into.receive, pipe.recv_into)
            turns += 1
            assert turns < 10_000, interrupt.where
        while step(into.receive, pipe.recv_into):  # what was broken off at the very end
            was_interrupted = True
        with contextlib.suppress(BlockingIOError):
            into.receive(pipe.recv_into)
        assert memory.bytes == expected, interrupt.where
        assert memory.is_sound, interrupt.where
        assert without_repeats(memory.seen) == words, interrupt.where
        assert without_repeats(memory.others) == others, interrupt.where
    assert at > 300


class Full:
    """A socket that is full every second time, and takes little in between."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._num_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def sendmsg(self, buffers: list[Any], *more: Any) -> int:
        self._num_calls += 1
        if not self._num_calls % 2:
            raise BlockingIOError
        return self._connection.send(b"".join(map(bytes, buffers))[:9000])


class Two:
    """Two ends whose links are pumped by this thread alone; `a` is the one that is interrupted."""

    def __init__(self, is_full: bool = False) -> None:
        self.memory_a, self.memory_b = Memory(40_000), Memory(40_000)
        link_a, link_b = tcp_links(self.memory_a, self.memory_b)
        if is_full:
            link_a._socket = Full(link_a._socket)
        self.a, self.b = End(link_a), End(link_b)
        for end in (self.a, self.b):
            end.links._on_loss = end.lost.append

    def until(self, is_so: Callable[[], object]) -> None:
        deadline = time.monotonic() + BOUND_S
        while not is_so():
            self.a.links.pump()
            self.b.links.pump()
            assert time.monotonic() < deadline, "it did not come to be"

    def __enter__(self) -> Two:
        return self

    def __exit__(self, *_: object) -> None:
        self.a.links._close()
        self.b.links._close()


def test_what_was_written_goes_out_after_an_interrupt_before_any_line() -> None:
    """Nobody writes or asks again: the poller itself finishes what was begun."""
    opened = num_open()
    at, was_interrupted = 0, True
    data = pattern(30_000, 1)
    while was_interrupted:
        at += 1
        interrupt, was_interrupted = Interrupt(at, "stream", "tcp", "poller"), False
        with Two(is_full=True) as two:
            calls: list[Callable[[], object]] = [
                lambda two=two: two.a.links.write(1, 0, data, 1, 11, 1),
                two.a.links.pump,
                two.b.links.pump,
                lambda two=two: two.a.links.tell(1, 13, [5]),
                two.b.links.pump,
                two.a.links.pump,
                lambda two=two: two.a.links.ask(1, [(0, 1)], 12),  # nothing comes behind it
            ]
            for call in calls:
                was_interrupted |= interrupt.run(call)
                assert not two.a.links.lock._is_owned(), interrupt.where
                assert not two.b.links.lock._is_owned(), interrupt.where
            two.until(lambda two=two: two.a.link.is_flushed)
            queued = two.a.link._out._past[0] + 1
            two.until(lambda two=two, queued=queued: two.b.link._in._at[1] == queued)
            if two.memory_b.words[1]:
                assert two.memory_b.bytes[: len(data)] == data, interrupt.where
            two.a.links.write(1, 0, data, 2, 99, 1)
            two.until(lambda two=two: two.memory_b.words[2])
            assert two.memory_b.bytes[: len(data)] == data, interrupt.where
            assert not two.a.links._writers or not two.a.link.is_flushed, "it would wake for nothing"
            two.until(lambda two=two: not two.a.links._poll.poll(0.0) and not two.a.links._writers)
    assert at > 100
    assert num_open() == opened


@pytest.mark.parametrize("ends", ["closed", "garbage", "cannot write"])
def test_a_loss_is_told_after_an_interrupt_before_any_line(ends: str) -> None:
    opened = num_open()
    at, was_interrupted = 0, True
    while was_interrupted:
        at += 1
        interrupt, was_interrupted = Interrupt(at, "tcp", "poller"), False
        with Two() as two:
            two.b.links.write(0, 100, b"last words", 3, 33, 1)
            if ends == "garbage":
                two.b.link._socket.send(bytes(200))
            else:
                two.b.link.close()
            calls: list[Callable[[], object]] = [two.a.links.pump, two.a.links.pump]
            if ends == "cannot write":
                two.a.links.write(1, 0, b"x", NO_WORD, 0, 0)  # answered by a reset
                calls.insert(0, lambda two=two: two.a.links.write(1, 0, b"x", NO_WORD, 0, 0))
            for call in calls:
                was_interrupted |= interrupt.run(call)
                assert not two.a.links.lock._is_owned(), interrupt.where
            two.until(lambda two=two: two.a.lost)
            two.until(lambda two=two: not two.a.links._by_fd)
            assert set(two.a.lost) == {1}
            assert two.memory_a.words[3] == 33, f"{interrupt.where}: what came before the end counts"
            assert two.a.link.fd == -1
            assert not two.a.links.pump()
    assert at > 20
    assert num_open() == opened
