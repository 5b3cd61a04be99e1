"""System calls on namespaces and mounts, which `os` has from Python 3.12 on or not at all, and the `ip` command."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import struct
import subprocess
from typing import Any

NEW_MOUNTS = 0x00020000
NEW_HOSTNAME = 0x04000000
NEW_IPC = 0x08000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SYSTEM_FOLDERS = "/usr/sbin:/sbin:/usr/bin:/bin"  # a user's PATH often leaves the first two out


def _call(name: str, *args: Any) -> None:
    """Call a function of the C library that returns 0 or sets `errno`."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def unshare(kinds: int) -> None:
    """Leave the namespaces of these kinds for new ones; of `NEW_PIDS`, the next child is process 1."""
    _call("unshare", kinds)


def enter(descriptor: int, kind: int) -> None:
    """Enter a namespace that an open file of /proc/PID/ns stands for; of `NEW_PIDS`, the next children are in it."""
    _call("setns", descriptor, kind)


def keep_mounts_private() -> None:
    """Let no mount made from now on be seen outside this mount namespace."""
    _call("mount", None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)


def mount(kind: str, folder: str) -> None:
    """Mount a file system of its own ("proc", "tmpfs") over a folder."""
    _call("mount", kind.encode(), folder.encode(), kind.encode(), ctypes.c_ulong(0), None)


def put_over(source: str, target: str) -> None:
    """Show the file `source` in the place of the file `target`."""
    _call("mount", source.encode(), target.encode(), None, ctypes.c_ulong(_MS_BIND), None)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def open_tun(name: str) -> int:
    """Make a TUN device in the network namespace of the caller; it lives as long as the descriptor returned."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def ip(*lines: str) -> None:
    """Run lines of the `ip` command, without the word `ip`, in the network namespace of the caller.

    Raises:
        OSError: a line failed, or there is no such command.
    """
    command = shutil.which("ip", path=_SYSTEM_FOLDERS)
    if command is None:
        raise OSError("there is no `ip` command; install iproute2")
    done = subprocess.run(
        [command, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True, timeout=30, check=False
    )
    if done.returncode != 0:
        raise OSError(f"ip: {done.stderr.strip()} (of: {'; '.join(lines)})")
