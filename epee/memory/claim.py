"""The record that opens every blob, and its verification: the claims of a region, for cpu and GPU memory.

Data path: the owner of a region packs a `Claim` and passes the bytes to its peers through any store. A peer parses
them, checks every number against its own limits, and makes sure that the process which has this pid now is the one that
made the claim, and of this process's own user: before it takes a descriptor from that process, and once more
afterwards, because a pid may be reused in between. The kernel alone would not suffice: it lets root open all users'
descriptors. Only "there is no such process" means that it has ended: where the kernel does not answer (no descriptor is
left, access is forbidden) no process is taken for dead. The cookie is random and also lies at the start of the region's
memory, so a descriptor that was closed and reused is detected once the memory is mapped.

A crash leaves nothing here: the bytes are plain, and a late reader learns that the owner has ended. An owner may also
end at any moment while a peer opens its memory. Each step then fails in a way of its own (no such descriptor, a refused
connection, another start time, an error of the GPU's driver), and some fail while the process is still ending: the
kernel closes its descriptors before it reports that the process has ended. `naming_death` wraps all those steps and
turns the exceptions they raise into `OwnerEndedError`, once the owner is proved dead.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import AuthError, EpeeError, ProtocolError, ResourceError, expected, shortage

_CLAIM = struct.Struct("<8sqqqq16s")
CLAIM_BYTES = _CLAIM.size
COOKIE_BYTES = 16
MAX_REGION_BYTES = 1 << 46
_INT_LIMIT = 1 << 31  # pids and descriptors are C ints; a larger number would wrap in a system call
DYING_S = 5.0  # the longest wait until all threads of a dying process have released its memory


class OwnerEndedError(ResourceError):
    """The process whose memory was to be opened has ended.

    Attributes:
        pid: of the process.
        start_time: when it started, in clock ticks since boot.
    """

    def __init__(self, pid: int, start_time: int) -> None:
        super().__init__(f"process {pid} has ended, or runs in another PID namespace; its memory is out of reach")
        self.pid = pid
        self.start_time = start_time


class Claim(NamedTuple):
    """The fixed part of a blob.

    Attributes:
        magic: kind and version of the region, 8 bytes.
        pid: the process that owns it.
        start_time: when that process started, in clock ticks since boot.
        fd: its descriptor of the memory in that process; 0 where no descriptor is used.
        nbytes: size of the whole mapping, header included.
        cookie: random bytes that the memory starts with.
    """

    magic: bytes
    pid: int
    start_time: int
    fd: int
    nbytes: int
    cookie: bytes

    def pack(self) -> bytes:
        """Return the `CLAIM_BYTES` bytes that `parse_claim` reads."""
        return _CLAIM.pack(*self)


def process_start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot, or -1 when it has ended or never was.

    A process that has ended and that its parent has not yet waited for still has its pid and start time, but no memory:
    it has ended.

    Raises:
        ResourceError: the kernel does not answer: no descriptor or memory is left, or access is forbidden.
    """
    fields = _stat_of(pid)
    return -1 if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def started_at(pid: int) -> int:
    """Like `process_start_time`, but a process that its parent has not waited for has its start time still."""
    fields = _stat_of(pid)
    return int(fields[19]) if fields else -1


def has_ended(pid: int, start_time: int) -> bool:
    """Return whether process `pid`, started at `start_time`, is known to have ended: False where it is unknown."""
    try:
        return process_start_time(pid) != start_time
    except expected(ResourceError):
        return False


def _stat_of(pid: int) -> list[bytes]:
    """Return the fields in /proc of a process, from its state on; empty when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except expected(FileNotFoundError, ProcessLookupError):
        return []
    except expected(OSError) as exc:
        raise shortage(f"cannot see whether process {pid} lives", exc) from exc
    return stat[stat.rindex(b")") + 2 :].split()  # the command's name may hold spaces and brackets


def is_torn_down(pid: int, start_time: int) -> bool:
    """Return whether process `pid`, started at `start_time`, has threads but no address space: it stores nothing.

    False also when the process does not exist any more; a pidfd shows that. One that its parent has not waited for
    counts.
    """
    try:
        if not _has_no_memory(f"/proc/{pid}/statm"):  # the leader's: non-zero unless the process is dying
            return False
        threads = set(os.listdir(f"/proc/{pid}/task"))
        if not all(_has_no_memory(f"/proc/{pid}/task/{thread}/statm") for thread in threads):
            return False
        # a thread that was not listed can only come from one that was, and would be listed by now
        return set(os.listdir(f"/proc/{pid}/task")) == threads and started_at(pid) == start_time
    except expected(OSError, ResourceError):
        return False


def is_leaving(pid: int, start_time: int) -> bool:
    """Return whether process `pid`, started at `start_time`, has ended, is dead, or has a first thread that is dying.

    `/proc/PID/fd` of such a process is empty or, since it then belongs to root, closed to others. No proof that it
    stores nothing any more: other threads may go on (`is_torn_down`).
    """
    try:
        return _has_no_memory(f"/proc/{pid}/statm") or started_at(pid) != start_time
    except expected(FileNotFoundError, ProcessLookupError):
        return True
    except expected(OSError, ResourceError):
        return False


def _has_no_memory(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 2) == b"0 "
    finally:
        os.close(fd)


def is_proved_dead(pid: int, start_time: int, wait_s: float = DYING_S) -> bool:
    """Return whether a process is dead; where it is dying, wait at most `wait_s` for the proof."""
    until = time.monotonic() + wait_s
    while not (has_ended(pid, start_time) or is_torn_down(pid, start_time)):
        if not is_leaving(pid, start_time) or time.monotonic() > until:
            return False
        time.sleep(1e-3)
    return True


@contextlib.contextmanager
def naming_death(claim: Claim) -> Iterator[None]:
    """Turn every error of the enclosed steps, which open the memory of `claim`, into its owner's death where it is
    dead.

    Raises:
        OwnerEndedError: a step failed, and the owner has ended; the cause is the error of the step.
    """
    try:
        yield
    except expected(OwnerEndedError):
        raise
    except expected(EpeeError, OSError) as exc:
        if claim.pid != os.getpid() and is_proved_dead(claim.pid, claim.start_time):
            raise OwnerEndedError(claim.pid, claim.start_time) from exc
        raise


def make_claim(magic: bytes, fd: int, nbytes: int) -> Claim:
    """Return a claim of this process with a fresh cookie."""
    pid = os.getpid()
    return Claim(magic, pid, process_start_time(pid), fd, nbytes, secrets.token_bytes(COOKIE_BYTES))


def parse_claim(data: bytes, magic: bytes, num_bytes: int, header_bytes: int, what: str) -> Claim:
    """Parse the claim at the start of a peer's blob.

    Args:
        data: the blob, from a peer.
        magic: the kind that is expected.
        num_bytes: size of such a blob.
        header_bytes: a region is larger than this.
        what: the kind in words, for messages.
    Raises:
        ProtocolError: a wrong length, another kind or version, or an invalid number.
    """
    if len(data) != num_bytes:
        raise ProtocolError(f"a {what} blob has {num_bytes} bytes, got {len(data)}; do the ranks run one version?")
    claim = Claim(*_CLAIM.unpack_from(data))
    if claim.magic != magic:
        raise ProtocolError(
            f"a {what} blob starts with {magic!r}, got {claim.magic!r}; do the ranks run one version, all on CPU or "
            "all on GPUs?"
        )
    is_possible = (
        0 < claim.pid < _INT_LIMIT
        and claim.start_time >= 0
        and 0 <= claim.fd < _INT_LIMIT
        and header_bytes < claim.nbytes < MAX_REGION_BYTES
        and claim.nbytes % mmap.PAGESIZE == 0
    )
    if not is_possible:
        raise ProtocolError(
            f"{what} blob out of range: pid={claim.pid}, start_time={claim.start_time}, fd={claim.fd}, "
            f"nbytes={claim.nbytes}"
        )
    return claim


def require_own(pid: int) -> None:
    """Make sure that process `pid` runs as this process's user.

    Raises:
        AuthError: it is another user's.
        ResourceError: it has ended, or the kernel does not answer.
    """
    try:
        user = os.stat(f"/proc/{pid}").st_uid
    except expected(FileNotFoundError, ProcessLookupError) as exc:
        raise ResourceError(f"process {pid} has ended; its memory is out of reach ({exc})") from exc
    except expected(OSError) as exc:
        raise shortage(f"cannot see whose process {pid} is", exc) from exc
    if user != os.geteuid():
        raise AuthError(
            f"process {pid} runs as user {user}, and memory is taken from processes of user {os.geteuid()} only; run "
            "all ranks as one user"
        )


def require_alive(claim: Claim) -> None:
    """Raise unless the claim's owner verifiably runs, in this PID namespace, as this user.

    It is called before a descriptor is taken from the owner, and once more before that descriptor is used.

    Raises:
        OwnerEndedError: the owner has ended; its number may be another process's by now.
        AuthError: it is another user's process.
        ResourceError: the kernel does not answer.
    """
    if process_start_time(claim.pid) != claim.start_time:
        raise OwnerEndedError(claim.pid, claim.start_time)
    require_own(claim.pid)
