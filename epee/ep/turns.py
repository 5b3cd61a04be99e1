"""One call at a time on a buffer, on its device, and the end of the buffer.

Threads queue for the lock. A call from within a call (a signal handler, a callback) is refused. `close` may come from
any thread at any moment: it leaves a note that every wait looks at, so that a call in progress ends, and gives the
memory back once no call is in progress; from within a call, that call does it on its way out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import torch

from ..errors import AbortedError, ForkError, InvalidState
from .config import BufferConfig

_T = TypeVar("_T")
_Self = TypeVar("_Self", bound="Turns")


class Closing:
    """Whether somebody asked to close; apart from the buffer, so that nothing keeps a dropped buffer alive."""

    asked = False

    def check(self) -> None:
        """End a waiting call once the buffer is to be closed."""
        if self.asked:
            raise AbortedError("the buffer was closed while this call was waiting")


class Turns:
    """What takes calls one at a time; `Buffer` builds on it."""

    config: BufferConfig

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._closing = Closing()
        self._closed = True  # until everything is made
        self._pid = os.getpid()

    def close(self) -> None:
        """Return all memory, mappings and descriptors. Local, idempotent, never waits for peers.

        A call in progress in another thread ends with `AbortedError`. Tensors that the user still holds stay valid;
        handles do not.
        """
        self._closing.asked = True
        if self._pid == os.getpid() and self._owner not in (None, threading.get_ident()):
            self._end_waits()
        if self._pid != os.getpid():
            return  # a forked child: the mappings are the parent's business
        if self._owner == threading.get_ident():
            return  # called from a signal handler inside a call: that call ends and closes on its way out
        with self._lock:
            if not self._closed:
                self._closed = True
                self._give_back()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _end_waits(self) -> None:
        """End what a call in another thread waits for, where looking at the note is not enough."""
        raise NotImplementedError

    def _give_back(self) -> None:
        """Return all memory; called once."""
        raise NotImplementedError

    def _on_device(self, work: Callable[[], _T]) -> _T:
        """Do `work` while the buffer's GPU is the current one."""
        index = self.config.device.index
        if index is None or torch.cuda.current_device() == index:  # the CPU has no index here
            return work()
        with torch.cuda.device(index):
            return work()

    def _alone(self, work: Callable[[], _T]) -> _T:
        """Let one call in at a time; threads queue, a call from within a call is refused."""
        if os.getpid() != self._pid:
            raise ForkError(f"this buffer was made by process {self._pid} before a fork; make a new one in the child")
        me = threading.get_ident()
        if self._owner == me:
            raise InvalidState("a call on this buffer is in progress in this thread (signal handler or callback?)")
        try:
            with self._lock:
                if self._closed or self._closing.asked:
                    raise InvalidState("the buffer is closed; make a new one")
                self._owner = me
                try:
                    return self._on_device(work)
                finally:
                    self._owner = None
        finally:
            if self._closing.asked:
                self.close()
