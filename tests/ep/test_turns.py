"""`Turns`: interrupts and closes at any step, as a signal handler would bring them when a function is entered."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from epee.errors import InvalidState
from epee.gpu import turns as module
from epee.gpu.turns import Turns


def _open(give_back: Callable[[], None] = lambda: None) -> Turns:
    turns = Turns()
    turns.open(None, lambda: None, give_back)
    return turns


def _when_entered(name: str, act: Callable[[], None]) -> None:
    """Let `act` run once in this thread when a method of `Turns` is entered, before its first step."""
    code = getattr(Turns, name).__code__

    def trace(frame: object, event: str, arg: object) -> None:
        if event == "call" and frame.f_code is code:  # type: ignore[attr-defined]
            sys.settrace(None)
            act()

    sys.settrace(trace)


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_as_a_call_ends_leaves_the_buffer_usable() -> None:
    turns = _open()
    _when_entered("__exit__", _interrupt)
    with pytest.raises(KeyboardInterrupt), turns.queue(), turns:
        pass
    with turns.queue(), turns:
        pass


def test_an_interrupt_as_a_call_ends_leaves_the_buffer_closable() -> None:
    turns = _open()
    _when_entered("__exit__", _interrupt)
    with pytest.raises(KeyboardInterrupt), turns.queue(), turns:
        pass
    turns.close()
    assert turns.is_closed


def _ends(work: Callable[[], None]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


def test_close_from_a_handler_as_a_call_begins() -> None:
    turns = _open()

    def call() -> None:
        _when_entered("__enter__", turns.close)
        with pytest.raises(InvalidState, match="closed"), turns.queue(), turns:
            pass

    assert _ends(call)
    assert turns.is_closed


def test_close_from_a_handler_while_memory_is_given_back() -> None:
    turns = _open(lambda: turns.close())
    assert _ends(turns.close)


def test_an_interrupt_as_a_call_begins_leaves_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    class Gpu:
        def __enter__(self) -> None:
            current[0] = 1
            raise KeyboardInterrupt  # behind its last step

        def __exit__(self, *_: object) -> None:
            current[0] = 0

    monkeypatch.setattr(module, "on_gpu", lambda index: Gpu())
    monkeypatch.setattr(module, "current_index", lambda: 0)
    turns = Turns()
    turns.open(1, lambda: None, lambda: None)
    with pytest.raises(KeyboardInterrupt), turns.queue(), turns:
        pass
    assert current == [0]


def test_a_call_within_a_call_is_refused_and_one_of_another_thread_waits() -> None:
    turns, order = _open(), []
    with turns.queue(), turns:
        with pytest.raises(InvalidState, match="in progress in this thread"), turns.queue(), turns:
            pass

        def call() -> None:
            with turns.queue(), turns:
                order.append("other")

        thread = threading.Thread(target=call)
        thread.start()
        thread.join(0.2)
        order.append("this")
    thread.join(5)
    assert order == ["this", "other"]


def test_close_reaches_a_call_that_is_just_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, there, go = threading.Event(), threading.Event(), threading.Event()
    turns = Turns()

    def on_gpu(index: int | None) -> object:
        there.set()
        go.wait(5)
        return module.nullcontext()

    monkeypatch.setattr(module, "on_gpu", on_gpu)
    monkeypatch.setattr(module, "current_index", lambda: 1)
    turns.open(0, ended.set, lambda: None)

    def call() -> None:
        with turns.queue(), turns:
            ended.wait(10)  # a wait that does not look at the note

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    there.wait(5)
    closer = threading.Thread(target=turns.close, daemon=True)
    closer.start()
    closer.join(0.3)  # has looked at the owner
    go.set()
    closer.join(3)
    assert not closer.is_alive()
