"""Tagged 64-bit words in shared memory, by which ranks of one host signal that data is complete.

Writers and readers: each word has one writer and one reader. The writer stores its data, then the tag, then wakes the
word's futex. The reader waits until the word **equals** the tag it expects; tags never repeat within an epoch, so a
late or doubled store is never taken for a newer one. Equality requires that a writer never runs ahead of its reader by
more than the words it has; the protocols above say why that holds for them.

A crash between data and tag leaves the tag unset, so an incomplete message is never read.

Waiting costs little at first and nothing later: some hundred loads, then loads with `sched_yield` for about a
millisecond, then a timed futex. Python's `time.sleep(0)` would cost 69 us, a futex wake 0.6 us. The futex wait has a
timeout of its own, so a wake-up that is lost to a race (the reader went to sleep just as the writer checked) delays but
never hangs.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading

from ..errors import expected

SPIN_LOADS = 300
YIELD_S = 0.001  # how long to yield before sleeping in the kernel
SLEEP_S = 0.005  # longest sleep between two checks of the deadline and of the peers' health

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # shared futexes: the word lies in a mapping of several processes
_SYS_FUTEX = {"x86_64": 202, "AMD64": 202}.get(platform.machine(), 98)  # aarch64 is refused before this is used
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


def usable_cores() -> set[int]:
    """Return the cores that this thread may run on; all of the machine where a filter forbids the query."""
    try:
        return os.sched_getaffinity(0)
    except expected(OSError):
        return set(range(os.cpu_count() or 1))


EPOCH_BITS = 24
SEQ_BITS = 40


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SLEEP = _Timespec(int(SLEEP_S), int(SLEEP_S % 1 * 1e9))
_SLEEP_REF = ctypes.byref(_SLEEP)


def tag(epoch: int, seq: int) -> int:
    """Return the word that stands for call `seq` of view `epoch`: `(epoch mod 2^24) << 40 | (seq mod 2^40)`.

    `seq` counts from 1, so that no tag is zero, which is what fresh memory holds.
    """
    return (epoch & ((1 << EPOCH_BITS) - 1)) << SEQ_BITS | (seq & ((1 << SEQ_BITS) - 1))


def untag(word: int) -> tuple[int, int]:
    """Return (epoch, seq) of a tag, for messages."""
    return word >> SEQ_BITS, word & ((1 << SEQ_BITS) - 1)


_fence = threading.Lock()
_take, _give_back = _fence.acquire, _fence.release


def fence() -> None:
    """Make this thread's stores visible before its later loads.

    Taking a lock is one locked instruction. Should an interrupt leave ours taken, or another thread hold it, a fresh
    one does the same.
    """
    if _take(False):
        _give_back()
    else:
        threading.Lock().acquire(False)


def futex_wake(address: int) -> None:
    """Wake the threads that sleep on the 32-bit word at `address`; costs 0.6 us when there are none."""
    _syscall(_SYS_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, 1 << 20, None, None, 0)


def futex_sleep(address: int, seen: int) -> None:
    """Sleep until the 32-bit word at `address` differs from `seen`, a wake comes, or `SLEEP_S` has passed."""
    _syscall(
        _SYS_FUTEX,
        ctypes.c_void_p(address),
        _FUTEX_WAIT,
        ctypes.c_uint(seen & 0xFFFFFFFF),
        _SLEEP_REF,
        None,
        0,
    )


def futex_error() -> str:
    """Try a wake on a private word; return the system's error, or "" when futexes work."""
    word = ctypes.c_uint32(0)
    if _syscall(_SYS_FUTEX, ctypes.byref(word), _FUTEX_WAKE, 1, None, None, 0) >= 0:
        return ""
    return os.strerror(ctypes.get_errno())
