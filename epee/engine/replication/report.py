"""The progress of each rank of a group over several hosts, read from outside on one of its hosts, without its help.

Data path: the mappings of one process (`/proc/PID/maps`) name the outboxes of its host's ranks and the mirrors of the
others. The process that holds such a memory open for writing is the rank that made it, or the gateway that keeps the
mirror; there the words are read: how many calls the rank has ended, whether it has made the next one. For a process the
report says whether it exists, and whether it is stopped. The boards of this host's ranks have more about these
(`view/report.py`); of ranks elsewhere nothing else is known here.

Each rank writes its outbox, gateways their mirrors. The caller reads them while the words change: this is for people. A
mirror has the data that this host has received, through a gateway that may be stopped. Messages from rank to rank are
not read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from ...errors import ResourceError, expected, ignored
from ...memory.claim import require_own
from ...memory.shared import HEADER_BYTES, process_start_time
from ...memory.signals import SEQ_BITS
from ...view.process.peers import process_state
from ..outbox import (
    ALIGN_BYTES,
    CELL_BYTES,
    CELL_WORDS,
    NUM_CELLS,
    OWNER,
    SIGNATURE,
    STATE_WORDS,
    TAG,
    consumed_of,
    has_exited,
    has_left,
    outbox_layout,
)
from ..signature import OPS

_NAME = re.compile(r"/memfd:epee-(outbox|mirror)(\d{1,3}) \(deleted\)")
_MAPPING = re.compile(rf"(?m)^\S+ \S+ \S+ \S+ (\d+) +{_NAME.pattern}$")
_CELLS = outbox_layout(1, ALIGN_BYTES).offset("cells")
_SEQ = (1 << SEQ_BITS) - 1


class Progress(NamedTuple):
    """The known progress of one rank.

    Attributes:
        rank: its number in the group.
        pid: its process; 0 for one of another host, or one that has ended.
        health: "running", "stopped" or "dead"; of another host "elsewhere"; "left" for a rank that has left in order;
            "unknown" if the gateway that receives from it is dead.
        num_ended: calls that have ended there; -1, as the next, if no process is left to read that from.
        num_made: calls that the rank has made, those included; they may be several beyond.
        op: the first of those that have not ended; "" where there is none.
        gateway: of a rank of another host, the process here that receives from it; else 0.
    """

    rank: int
    pid: int
    health: str
    num_ended: int
    num_made: int
    op: str
    gateway: int = 0


class _Memory(NamedTuple):
    """An outbox or a mirror that a process has mapped, and the descriptor through which it is open."""

    is_mirror: bool
    rank: int
    pid: int = 0
    path: str = ""


def look_at_groups(pid: int) -> list[tuple[Progress, ...]]:
    """Return the ranks of each group over several hosts that process `pid` is in, by rank; none: an empty list.

    Raises:
        AuthError: it is another user's process. ResourceError: it has ended, or may not be read.
    """
    require_own(pid)
    groups: dict[int, list[tuple[_Memory, bytes]]] = {}
    closed = []  # no process holds them open, or it has just ended
    for memory in _opened(_mapped(pid)):
        state = _read(memory, 0, 8 * STATE_WORDS)
        if len(state) < 8 * STATE_WORDS:
            closed.append(memory)
        else:
            group_id = memoryview(state).cast("Q")[OWNER + 2]  # words of `OutboxOwner`: nonce, nonce, group_id, slot
            groups.setdefault(group_id, []).append((memory, state))
    found = [
        [_progress(memory, state) for memory, state in group]
        for group in groups.values()
        if any(memory.is_mirror for memory, _ in group)
    ]
    if len(found) == 1:  # else the owner is not known
        found[0] += [Progress(one.rank, 0, "unknown" if one.is_mirror else "dead", -1, -1, "") for one in closed]
    return [tuple(sorted(group)) for group in found]


def _mapped(pid: int) -> dict[int, _Memory]:
    """Return the outboxes and mirrors that a process maps, by inode."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            text = maps.read()
    except expected(OSError) as exc:
        raise ResourceError(f"cannot look into process {pid}: {exc}; it must be yours and alive") from exc
    return {int(inode): _Memory(kind == "mirror", int(rank)) for inode, kind, rank in _MAPPING.findall(text)}


def _opened(mapped: dict[int, _Memory]) -> list[_Memory]:
    """Return the memories with the process that holds them open.

    Of several the oldest, as others were forked from it.
    """
    holders: dict[int, list[tuple[int, _Memory]]] = {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc")) if mapped else ()):
        for path, inode in _memories_of(pid):
            if inode in mapped:
                holder = mapped[inode]._replace(pid=pid, path=path)
                holders.setdefault(inode, []).append((process_start_time(pid), holder))
    return [min(holders[inode])[1] if inode in holders else memory for inode, memory in mapped.items()]


def _memories_of(pid: int) -> Iterator[tuple[str, int]]:
    """Yield path and inode of each outbox and mirror that a process of this user holds open for writing."""
    folder = f"/proc/{pid}/fd"
    with ignored(OSError):  # another user's, or it has just ended
        for name in os.listdir(folder) if os.stat(folder).st_uid == os.geteuid() else ():
            path = f"{folder}/{name}"
            with ignored(OSError):  # closed meanwhile
                is_writer = os.lstat(path).st_mode & stat.S_IWUSR  # the link shows how it was opened
                if is_writer and _NAME.fullmatch(os.readlink(path)):
                    yield path, os.stat(path).st_ino


def _read(memory: _Memory, offset: int, nbytes: int) -> bytes:
    """Return bytes of the memory as they are now; fewer if it no longer exists."""
    if not memory.path:
        return b""
    try:
        fd = os.open(memory.path, os.O_RDONLY | os.O_CLOEXEC)
    except expected(OSError):
        return b""
    try:
        return os.pread(fd, nbytes, HEADER_BYTES + offset)
    finally:
        os.close(fd)


def _progress(memory: _Memory, state: bytes) -> Progress:
    words = memoryview(state).cast("Q")
    num_ended = num_made = consumed_of(words)
    op = ""
    data = _read(memory, _CELLS, NUM_CELLS * CELL_BYTES)
    cells = memoryview(data[: len(data) & -8]).cast("Q")
    while len(cells) == NUM_CELLS * CELL_WORDS and num_made - num_ended < NUM_CELLS:
        cell = (num_made + 1) % NUM_CELLS * CELL_WORDS
        if cells[cell + TAG] & _SEQ != num_made + 1:
            break
        num_made += 1
        op = op or dict(enumerate(OPS)).get(cells[cell + SIGNATURE] & 63, "unknown")
    pid, gateway = (0, memory.pid) if memory.is_mirror else (memory.pid, 0)
    health = _health(memory, words)
    if health in ("dead", "unknown"):  # the process ended while its memory was read: the next report cannot open it
        return Progress(memory.rank, 0, health, -1, -1, "")
    return Progress(memory.rank, pid, health, num_ended, num_made, op, gateway)


def _health(memory: _Memory, words: memoryview) -> str:
    if has_left(words):
        return "dead" if has_exited(words) and not memory.is_mirror else "left"
    if memory.is_mirror:
        return "unknown" if process_state(memory.pid) in "XZ" else "elsewhere"
    letter = process_state(memory.pid)
    return "dead" if letter in "XZ" else "stopped" if letter in "Tt" else "running"
