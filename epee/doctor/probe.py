"""A child of `sharing.py`: lends a descriptor, or borrows one from a sibling. Standard library only, run by path.

    probe.py lend           prints "PID FD", and waits until its input ends
    probe.py borrow PID FD  prints one line per method: its name and "ok" or the system's error message

Two siblings of one parent have the same relation as two ranks under torchrun; a parent and its child do not, because
Yama lets a parent trace its children.
"""

import ctypes
import os
import sys

SYS_PIDFD_GETFD = 438
TEXT = b"epee doctor"


def lend() -> None:
    """Keep a memfd open for the sibling."""
    fd = os.memfd_create("epee-doctor", os.MFD_CLOEXEC)
    os.write(fd, TEXT)
    sys.stdout.write(f"{os.getpid()} {fd}\n")
    sys.stdout.flush()
    sys.stdin.read()


def borrow(pid: int, fd: int) -> None:
    """Open the sibling's memfd by each method."""
    for name, way in (("proc", _by_proc), ("pidfd_open", _by_pidfd), ("pidfd_getfd", _by_getfd)):
        try:
            said = way(pid, fd)
        except OSError as exc:
            said = exc.strerror or str(exc)
        sys.stdout.write(f"{name} {said}\n")


def _by_proc(pid: int, fd: int) -> str:
    return _read(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR))


def _by_pidfd(pid: int, fd: int) -> str:
    os.close(os.pidfd_open(pid))
    return "ok"


def _by_getfd(pid: int, fd: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    copied = libc.syscall(SYS_PIDFD_GETFD, pidfd, fd, 0)
    error = ctypes.get_errno()
    os.close(pidfd)
    if copied < 0:
        raise OSError(error, os.strerror(error))
    return _read(copied)


def _read(fd: int) -> str:
    try:
        text = os.pread(fd, 100, 0)
    finally:
        os.close(fd)
    return "ok" if text == TEXT else f"another file: {text!r}"


if __name__ == "__main__":
    if sys.argv[1] == "lend":
        lend()
    else:
        borrow(int(sys.argv[2]), int(sys.argv[3]))
