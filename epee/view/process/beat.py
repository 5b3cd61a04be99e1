"""A heartbeat that needs neither the GIL nor any other part of Python: a timer of the C library counts in shared
memory.

Data path: POSIX `timer_create` with SIGEV_THREAD lets the C library call a function in a thread of its own at each
tick. The function is `sem_post`, its argument a process-shared semaphore in a memfd region: a number thus grows in
memory that others have mapped, however long Python code or a C call holds the GIL, and stops growing when the process
is stopped, frozen or starved. It needs no native code of ours, no helper process, no signal handler (decision 41 in
docs/decisions.md gives the alternatives).

Writers and readers: the C library writes, in the process that owns the beat; any process that attached the blob reads.
A value means nothing by itself, only whether it has changed since the last read. It proves life, never death: that
needs a pidfd.

Lifetime: one beat per process, made at first use and never unmapped, because a tick may be under way when the timer is
disarmed. It ticks while it has users. A forked child has no timer; it makes its own beat. (A fork that falls into a
tick, some microseconds each half second, may find the C library's own lock taken, and the child then waits for it in
vain: processes that use epee should be spawned, not forked.) A crash leaves nothing.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from typing import Any

from ...memory.host import HostRegion

logger = logging.getLogger("epee")

PERIOD_S = 0.5
_SIGEV_THREAD = 2
_CLOCK_MONOTONIC = 1
_SEMAPHORE_BYTES = 32  # sizeof(sem_t)


class _Event(ctypes.Structure):
    """struct sigevent, 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_byte * 32),
    )


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Interval(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = (("interval", _Time), ("first", _Time))


class Beat:
    """This process's heartbeat. Use `start` and `stop`, which count their users.

    Attributes:
        blob: lets other processes attach.
    """

    def __init__(self) -> None:
        """Make the semaphore and the timer, which does not tick yet.

        Where the system gives no timer the count stays 0, which readers take for "not known": a beat affects nothing
        but the wording of messages. Raises as `HostRegion.create`.
        """
        self._region = HostRegion.create(_SEMAPHORE_BYTES, "beat", only_owner_writes=True)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._region))  # nor may the end of the interpreter unmap it
        self.blob = self._region.blob
        self._num_users = 0
        self._arm: Any = None
        self._timer = ctypes.c_void_p()
        try:
            self._create_timer()
        except (OSError, AttributeError) as exc:
            logger.warning("no heartbeat (%s): messages will not tell a rank that is busy from one that is frozen", exc)

    def _create_timer(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        # glibc before 2.34 keeps its timers in a library of their own
        timers = libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)
        address = self._region.address
        libc.sem_init(ctypes.c_void_p(address), 1, 0)
        post = ctypes.cast(libc.sem_post, ctypes.c_void_p).value
        event = _Event(address, 0, _SIGEV_THREAD, post)
        if timers.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)) != 0:
            raise OSError(ctypes.get_errno(), "timer_create")
        self._arm = timers.timer_settime

    def start(self) -> None:
        """Tick from now on, until each user has called `stop`."""
        self._num_users += 1
        if self._num_users == 1:
            self._set(PERIOD_S, 1e-9)

    def stop(self) -> None:
        """Remove one user."""
        self._num_users -= 1
        if self._num_users == 0:
            self._set(0.0, 0.0)

    def _set(self, period_s: float, first_s: float) -> None:
        if self._arm is None:
            return
        interval = _Interval(_time(period_s), _time(first_s))
        self._arm(self._timer, 0, ctypes.byref(interval), None)


def _time(seconds: float) -> _Time:
    return _Time(int(seconds), round(seconds % 1 * 1e9))


class BeatView:
    """Another process's heartbeat."""

    def __init__(self, blob: bytes) -> None:
        """Map it; raises as `HostRegion.attach`."""
        self._region = HostRegion.attach(blob, is_writable=False)
        self._words = self._region.words(0, 1)

    @property
    def count(self) -> int:
        """Ticks so far, modulo 2^31; 0 where there is no timer. Only a change means something."""
        return self._words[0] & 0x7FFFFFFF

    def close(self) -> None:
        """Drop the mapping; idempotent."""
        self._words.release()
        self._region.close()


_lock = threading.Lock()
_beats: dict[int, Beat] = {}  # of this process, by its pid: a fork leaves the parent's here, which must not be used


def acquire() -> Beat:
    """Return this process's beat, ticking; pair it with `release`. Raises as `HostRegion.create`."""
    with _lock:
        beat = _beats.get(os.getpid())
        if beat is None:
            beat = _beats[os.getpid()] = Beat()
        beat.start()
        return beat


def release(beat: Beat) -> None:
    """Undo one `acquire`."""
    with _lock:
        beat.stop()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
