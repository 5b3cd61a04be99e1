"""The methods by which a peer gets a descriptor of GPU memory, and the choice that an owner offers.

    pidfd   the peer copies the descriptor out of the owner's process (`pidfd_getfd`): nothing runs at the owner, but
            the peer needs the right to trace it (ptrace), which Yama and seccomp profiles may refuse
    scm     the owner passes it over a unix socket (`passing.py`): works without that right, costs a thread
    ipc     no descriptor at all: memory of `cudaMalloc` and a handle of the driver's

An owner offers pidfd, and scm as well where it can see that pidfd may be refused; ipc where the driver exports no
descriptors. The blob contains its offer; each peer takes the first method that works for it. `EPEE_CUDA_SHARE` forces
one, on owners and on peers.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
from pathlib import Path

from .. import env
from ..descriptors import Descriptor
from ..errors import InvalidState, ProtocolError, ResourceError, expected, shortage
from .claim import Claim, naming_death, require_alive
from .passing import fetch_descriptor

_SYS_PIDFD_GETFD = 438
_PR_GET_DUMPABLE = 3
_CAP_SYS_PTRACE = 1 << 19
_REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL)  # by permission, filter, or an old kernel
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"


class Way(enum.IntFlag):
    """Methods to lend GPU memory; a blob holds the sum of those that its owner offers."""

    PIDFD = 1
    SCM = 2
    IPC = 4


ALL_WAYS = Way.PIDFD | Way.SCM | Way.IPC


def names_of(ways: Way) -> str:
    """Return `pidfd and scm`, the words that `EPEE_CUDA_SHARE` takes."""
    return " and ".join(str(way.name).lower() for way in Way if way & ways)


def forced_way() -> Way | None:
    """Return the method that `EPEE_CUDA_SHARE` forces, or None."""
    name = str(env.get("EPEE_CUDA_SHARE"))
    return Way[name.upper()] if name else None


def ways_to_offer() -> Way:
    """Return the methods by which this process offers descriptors: pidfd, scm, or both where pidfd may be refused to
    peers."""
    forced = forced_way()
    if forced is not None:
        return forced
    return Way.PIDFD if why_pidfd_may_fail() == "" else Way.PIDFD | Way.SCM


def why_pidfd_may_fail(yama: str = _YAMA) -> str:
    """Return the reason for which peers of this user may not copy this process's descriptors, or "" when none is known.

    The peers' own system call filter is not visible from here; it is assumed to be like ours.
    """
    try:
        process = Descriptor(os.pidfd_open(os.getpid()))
    except expected(OSError) as exc:
        return f"pidfd_open is refused ({exc.strerror})"
    with process:
        try:
            Descriptor(copy_by_pidfd(process, process)).close()
        except expected(OSError) as exc:
            return f"pidfd_getfd is refused ({exc.strerror})"
    if ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) != 1:
        return "the process is not dumpable"
    scope = yama_scope(yama)
    if scope >= 3 or (scope >= 1 and not _may_trace_all()):
        return f"kernel.yama.ptrace_scope is {scope}"
    return ""


def yama_scope(path: str = _YAMA) -> int:
    """Return Yama's ptrace_scope (0: any process of the user, 1: descendants, 2: administrators, 3: nobody)."""
    try:
        return int(Path(path).read_text())
    except expected(OSError, ValueError):
        return 0  # a kernel without Yama


def _may_trace_all() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & _CAP_SYS_PTRACE)
    return False


def copy_by_pidfd(pidfd: int, fd: int) -> int:
    """Copy descriptor `fd` out of the process behind `pidfd`; close-on-exec. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    copied = int(libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0))
    if copied < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return copied


def choose(offered: Way, claim: Claim) -> Way:
    """Return the owner's methods to try here: all that it offers, or the one that `EPEE_CUDA_SHARE` forces."""
    forced = forced_way()
    if forced is None:
        return offered
    if not offered & forced:
        raise InvalidState(
            f"EPEE_CUDA_SHARE={names_of(forced)} here, but process {claim.pid} offers {names_of(offered)}; set it "
            "alike on all ranks"
        )
    return forced


def obtain_descriptor(claim: Claim, ways: Way, socket_fd: int) -> tuple[int, Way]:
    """Get a descriptor of the owner's memory.

    Args:
        claim: from the owner's blob.
        ways: to try; pidfd first.
        socket_fd: the owner's descriptor of its socket, where it has one.
    Returns:
        The descriptor, to be closed by the caller, and the method by which it came.
    Raises:
        OwnerEndedError: the owner has ended.
        ResourceError: every method is refused.
        ProtocolError: the owner has no such descriptor.
    """
    with naming_death(claim):
        return _obtain(claim, ways, socket_fd)


def _obtain(claim: Claim, ways: Way, socket_fd: int) -> tuple[int, Way]:
    require_alive(claim)
    if claim.pid == os.getpid():
        return _duplicate(claim), Way.PIDFD
    refusal = "not tried"
    if ways & Way.PIDFD:
        try:
            return _copy_from_owner(claim), Way.PIDFD
        except expected(OSError) as exc:
            if exc.errno == errno.EBADF:
                raise ProtocolError(
                    f"process {claim.pid} has no descriptor {claim.fd}; it closed the GPU region"
                ) from exc
            if exc.errno == errno.ESRCH:
                raise ResourceError(f"process {claim.pid} has ended; its GPU memory is out of reach") from exc
            if exc.errno not in _REFUSALS:
                raise ResourceError(f"cannot copy descriptor {claim.fd} of process {claim.pid}: {exc}") from exc
            refusal = str(exc.strerror)
    if ways & Way.SCM:
        return fetch_descriptor(claim, socket_fd), Way.SCM
    raise ResourceError(
        f"pidfd_getfd from process {claim.pid} is refused ({refusal}); set EPEE_CUDA_SHARE=scm on all ranks, or allow "
        "it: run the ranks as one user, with pidfd_getfd in the container's seccomp profile and "
        "kernel.yama.ptrace_scope=0"
    )


def _duplicate(claim: Claim) -> int:
    try:
        return os.dup(claim.fd)
    except expected(OSError) as exc:
        if exc.errno != errno.EBADF:
            raise shortage(f"cannot copy this process's descriptor {claim.fd}", exc) from exc
        raise ProtocolError(f"this process has no descriptor {claim.fd}; it closed the GPU region") from exc


def _copy_from_owner(claim: Claim) -> int:
    with Descriptor(os.pidfd_open(claim.pid)) as process:
        held = Descriptor(copy_by_pidfd(process, claim.fd))
    with held:
        require_alive(claim)
    return held.keep()
