"""What a region says of itself, and how far it is believed: the record that opens every blob, on host and GPU.

Data path: the owner of a region packs a `Claim` and gives the bytes to its peers through any store. A peer parses
them, checks every number against its own limits, and makes sure that the process which has this pid now is the one
that made the claim, and of this process's own user: before it takes a descriptor from that process, and again
afterwards, because a pid may change hands in between. The kernel alone would not do: it lets root open everybody's
descriptors. Only "there is no such process" means that it has ended: where the kernel does not say (no descriptor is
left, looking is forbidden) nobody is taken for dead. The cookie is random and also lies at the start of the region's
memory, so a descriptor that was closed and reused is found out once the memory is mapped.

A crash leaves nothing here: the bytes are plain, and whoever reads them late learns that the owner has ended.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from pathlib import Path
from typing import NamedTuple

from ..errors import AuthError, ProtocolError, ResourceError, shortage

_CLAIM = struct.Struct("<8sqqqq16s")
CLAIM_BYTES = _CLAIM.size
COOKIE_BYTES = 16
MAX_REGION_BYTES = 1 << 46
_INT_LIMIT = 1 << 31  # pids and descriptors are C ints; a larger number would wrap in a system call


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

    A process that has ended and that its parent has not yet waited for still has its pid and start time, but no
    memory: it has ended.

    Raises:
        ResourceError: the kernel does not say: no descriptor or memory is left, or looking is forbidden.
    """
    fields = _stat_of(pid)
    return -1 if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def started_at(pid: int) -> int:
    """Like `process_start_time`, but a process that its parent has not waited for has its start time still."""
    fields = _stat_of(pid)
    return int(fields[19]) if fields else -1


def has_ended(pid: int, start_time: int) -> bool:
    """Return whether process `pid`, started at `start_time`, is known to have ended: False where nobody says."""
    try:
        return process_start_time(pid) != start_time
    except ResourceError:
        return False


def _stat_of(pid: int) -> list[bytes]:
    """Return what /proc says of a process, from its state on; nothing when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    except OSError as exc:
        raise shortage(f"cannot see whether process {pid} lives", exc) from exc
    return stat[stat.rindex(b")") + 2 :].split()  # the command's name may hold spaces and brackets


def make_claim(magic: bytes, fd: int, nbytes: int) -> Claim:
    """Return a claim of this process with a fresh cookie."""
    pid = os.getpid()
    return Claim(magic, pid, process_start_time(pid), fd, nbytes, secrets.token_bytes(COOKIE_BYTES))


def parse_claim(data: bytes, magic: bytes, num_bytes: int, header_bytes: int, what: str) -> Claim:
    """Read the claim at the start of a peer's blob.

    Args:
        data: the blob, from a peer.
        magic: the kind that is expected.
        num_bytes: size of such a blob.
        header_bytes: a region is larger than this.
        what: the kind in words, for messages.
    Raises:
        ProtocolError: a wrong length, another kind or version, or a number that cannot be right.
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
        ResourceError: it has ended.
    """
    try:
        user = os.stat(f"/proc/{pid}").st_uid
    except OSError as exc:
        raise ResourceError(f"process {pid} has ended; its memory is out of reach ({exc})") from exc
    if user != os.geteuid():
        raise AuthError(
            f"process {pid} runs as user {user}, and memory is taken from processes of user {os.geteuid()} only; run "
            "all ranks as one user"
        )


def require_alive(claim: Claim) -> None:
    """Raise `ResourceError` unless the claim's owner runs, in this PID namespace, and the kernel says so.

    Raises:
        AuthError: it is another user's process.
    """
    if process_start_time(claim.pid) != claim.start_time:
        raise ResourceError(
            f"process {claim.pid} has ended, or runs in another PID namespace; its memory is out of reach"
        )
    require_own(claim.pid)


def require_unchanged(claim: Claim) -> None:
    """Raise `ProtocolError` when the owner's pid changed hands since `require_alive`, `AuthError` when its user did.

    Raises:
        ResourceError: the kernel does not say.
    """
    if process_start_time(claim.pid) != claim.start_time:
        raise ProtocolError(f"process {claim.pid} changed while its memory was being opened")
    require_own(claim.pid)
