"""Serialisation of a buffer's calls on its device, and the end of the buffer.

Threads queue for the lock. A call from within a call (a signal handler, a callback) is refused. `close` may come from
any thread at any moment: it sets a flag that every wait checks, so that a call in progress ends, and frees the memory
once no call is in progress; from within a call, that call frees it at its end.

Interrupts (an exception from a signal handler) may come between any two steps, also when `__enter__` or `__exit__` has
been entered and has done nothing yet. So only the lock records which thread is in a call: `with` takes and releases it
by itself, and it knows its owner. Steps that an interrupted `__exit__` leaves undone are done later: a close that was
requested meanwhile by the next call or `close`; a GPU that was made the current one stays current.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import TracebackType

import torch

from ..arrays import without_modes
from ..errors import AbortedError, ForkError, InvalidState, named
from ..torch_private import current_index, num_dispatch_modes
from ..view.label import Label


class Closing:
    """Whether a close was requested; separate from the buffer, so that nothing keeps a dropped buffer alive."""

    asked = False

    def check(self) -> None:
        """End a waiting call once the buffer is to be closed."""
        if self.asked:
            raise AbortedError("the buffer was closed while this call was waiting")


_NOTHING = nullcontext()  # has no state, so all share it


def on_gpu(index: int | None) -> AbstractContextManager[object]:
    """Make a GPU the current one; None stands for the CPU."""
    if index is None or current_index() == index:
        return _NOTHING
    return torch.cuda.device(index)


class Turns:
    """The context manager that admits one call at a time: `with turns.queue(), turns:`.

    Attributes:
        closing: the flag.
        label: the buffer's name.
        is_closed: the memory is freed, or not yet allocated.
    """

    def __init__(self) -> None:
        self.closing = Closing()
        self.label = Label()
        self.is_closed = True  # until `open`
        self._lock = threading.RLock()  # knows its holder: no flag of ours that an interrupt could leave set
        self._pid = os.getpid()
        _forget_in_children()
        self._index: int | None = None
        self._gpu: AbstractContextManager[object] | None = None  # restores the thread's own current GPU
        self._modes: AbstractContextManager[object] | None = None  # restores the thread's dispatch modes

    def open(self, index: int | None, end_waits: Callable[[], None], give_back: Callable[[], None]) -> None:
        """Admit calls.

        Args:
            index: of the GPU that is the current one during a call.
            end_waits: ends the waits of a call in another thread, where checking `closing` is not enough.
            give_back: frees all memory; called once, by `close`. Neither may keep the buffer alive.
        """
        self._index, self._end_waits, self._give_back = index, end_waits, give_back
        self.is_closed = False

    def queue(self) -> AbstractContextManager[object]:
        """Return the lock of calls, to be held by `with`.

        Raises:
            ForkError: this is a child of the process that has made the buffer.
            InvalidState: this thread is in a call.
        """
        if os.getpid() != self._pid:
            raise ForkError(f"this buffer was made by process {self._pid} before a fork; make a new one in the child")
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as `threading.Condition` asks
            raise InvalidState("a call on this buffer is in progress in this thread (signal handler or callback?)")
        return self._lock

    def queue_here(self) -> AbstractContextManager[object] | None:
        """Return the lock of calls that `queue` returns; None if that raises, or if `with turns` has more to do.

        For calls that do the rest of `with turns` themselves: they check `closing` after taking the lock and at their
        end.
        """
        if _process() != self._pid or self._lock._is_owned():  # type: ignore[attr-defined]  # as in `queue`
            return None
        is_here = self._index is None or self._index == current_index()
        return self._lock if is_here and not num_dispatch_modes() else None

    def __enter__(self) -> None:
        if self.is_closed or self.closing.asked:
            self._close()
            raise InvalidState("the buffer is closed; make a new one")
        if self._index is not None and self._index != current_index():
            gpu = on_gpu(self._index)
            try:
                gpu.__enter__()
                self._gpu = gpu
            except BaseException:
                gpu.__exit__(None, None, None)
                raise
        if num_dispatch_modes():  # torch's operators copy rows; a mode would replace them (FakeTensorMode)
            modes = without_modes()
            modes.__enter__()
            self._modes = modes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            named(error, self.label.text)
        try:
            if self._modes is not None:
                modes, self._modes = self._modes, None
                modes.__exit__(kind, error, traceback)
            if self._gpu is not None:
                gpu, self._gpu = self._gpu, None
                gpu.__exit__(kind, error, traceback)
        finally:
            if self.closing.asked:
                self._close()

    def close(self) -> None:
        """Free all memory, at once or when the call in progress ends; idempotent, never waits for peers."""
        self.closing.asked = True
        if self._pid != os.getpid():
            return  # a forked child: the mappings belong to the parent
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as `threading.Condition` asks
            return  # called from a signal handler inside a call: that call closes at its end
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._end_waits()  # of a call that began before it could see the flag
        with self._lock:
            self._close()

    def _close(self) -> None:
        """Free all memory, once. With the lock held."""
        if not self.is_closed:
            self.is_closed = True
            self._give_back()


@cache
def _process() -> int:
    """Return the number of this process; cached, as the system call costs more than all else here."""
    return os.getpid()


@cache
def _forget_in_children() -> None:
    """Make forked children read their number anew."""
    os.register_at_fork(after_in_child=_process.cache_clear)
