"""The registry of a process: the buffers it has on a group, and what it lends to the others' epochs.

One small region per process and group, with a line for each buffer. Only the process itself writes it. The other
members read it, and find the region without being sent its name: among the descriptors of a process that the view
names, by the name of the memfd. So a process that joins needs neither the store nor a collective call to find the
running buffers, nor the others to find its own.

    header  magic, number of the newest buffer, blob of the region, numbers of buffers that were closed: n at index n
            modulo their number, so the last ones
    line    number of the buffer (0: none; with `CLOSED`: it was closed; with `DROPPED` as well: it was not closed, but
            the process has dropped it, which happens when it ends), the epoch for which it has arrived at sync, the
            ranks it counts on there, and the last number that its calls have used
            (`agreement.py`), view for which the inbox was made, blob of the inbox, words of the config

Order: a line's number is stored last when it is made (only the newest number in the header is stored after it), and
marked when it ends, after the closed number in the header. Another buffer may have the line then, so a reader checks
which buffer a line belongs to. The blob of an inbox is stored between two stores of the view it is for (0, then the
view), and a reader reads the view again after it has copied the blob. Each word is one store of the machine.

A crash leaves a line as it was; the memory stays readable to the processes that have mapped it. Everything read here
comes from a peer: a blob is checked by `SharedRegion.attach`, its owner against the process that the view names.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Sequence

from ...errors import EpeeError, ProtocolError, ResourceError, expected, shortage
from ...memory.claim import require_own
from ...memory.shared import BLOB_BYTES, HEADER_BYTES, SharedRegion
from ...memory.signals import futex_wake
from ...view.process.detector import is_leaving

logger = logging.getLogger("epee")

MAX_BUFFERS = 32  # of one group at the same time
_MAGIC = int.from_bytes(b"epeebuf2", "little")
_BLOB_WORDS = -(-BLOB_BYTES // 8)
_NEWEST, _OWN_BLOB = 1, 2
_LINE_WORDS = 64
_CLOSED_AT = _OWN_BLOB + _BLOB_WORDS
_NUM_CLOSED = _LINE_WORDS - _CLOSED_AT  # more than can be open at once
NUMBER, SYNC, COUNTED, USED, INBOX_VIEW, INBOX = range(6)
CONFIG = INBOX + _BLOB_WORDS
CLOSED = 1 << 62  # in the word of the number
DROPPED = 1 << 61  # the same
_NUM_WORDS = _LINE_WORDS * (1 + MAX_BUFFERS)
assert _NUM_CLOSED > MAX_BUFFERS


class Line:
    """The words of one buffer in one process's registry.

    Attributes:
        address: of the first word, for futex waits.
        owner_pid: of the process that owns the line.
    """

    def __init__(self, region: SharedRegion, index: int) -> None:
        self._region = region
        start = 8 * _LINE_WORDS * (1 + index)
        self.words = region.words(start, _LINE_WORDS)
        self.owner_pid = region.owner_pid
        self.address = region.address + start

    @property
    def number(self) -> int:
        """Number of the buffer; 0 when it is closed."""
        number = self.words[NUMBER]
        return 0 if number & CLOSED else number

    @property
    def is_free(self) -> bool:
        """Whether another buffer may have the line."""
        return self.number == 0

    def mark_closed(self, is_dropped: bool = False) -> None:
        """Report that the buffer is closed, or was dropped without that. Idempotent. Only the owner."""
        number = self.number
        if number:
            self._region.words(0, _LINE_WORDS)[_CLOSED_AT + number % _NUM_CLOSED] = number
            self.words[NUMBER] = (
                number | CLOSED | (DROPPED if is_dropped else 0)
            )  # last: a reader that finds the line closed finds the reason

    def come_to_sync(self, mark: int, counted: int, used: int = 0) -> None:
        """Publish that this rank has arrived at sync, and the ranks that it counts on. Only the owner.

        Args:
            mark: the epoch, shifted by 1, and whether its timeout has expired; 0: it has not arrived.
            counted: bits of ranks.
            used: the last number that its calls have used.
        """
        if self.words[COUNTED] != counted or self.words[SYNC] != mark:
            self.words[SYNC] = 0  # no reader may see its arrival together with an outdated `counted`
            self.words[COUNTED], self.words[USED] = counted, used
            self.words[SYNC] = mark

    def lend_inbox(self, view: int, blob: bytes) -> None:
        """Publish the blob of the inbox that this process has made for `view`. Only the owner."""
        self.words[INBOX_VIEW] = 0
        self.words[INBOX : INBOX + _BLOB_WORDS] = memoryview(blob.ljust(8 * _BLOB_WORDS, b"\0")).cast("Q")
        self.words[INBOX_VIEW] = view
        futex_wake(self.address + 8 * INBOX_VIEW)

    def inbox(self, view: int) -> bytes | None:
        """Return the blob of the inbox for `view`, None while there is none."""
        if self.words[INBOX_VIEW] != view:
            return None
        blob = bytes(self.words[INBOX : INBOX + _BLOB_WORDS])[:BLOB_BYTES]
        return blob if self.words[INBOX_VIEW] == view else None

    def config(self, count: int) -> tuple[int, ...]:
        """Return the first `count` words of the config."""
        return tuple(self.words[CONFIG : CONFIG + count])


class Registry:
    """The lines of this process or of another one.

    Attributes:
        lane: of the group.
        owner: process number and start time.
        had: own: numbers of the buffers that were opened.
    """

    def __init__(self, region: SharedRegion, lane: int) -> None:
        self.region = region
        self.lane = lane
        self.owner = (region.owner_pid, region.owner_start_time)
        self.had: set[int] = set()
        self._words = region.words(0, _LINE_WORDS)
        weakref.finalize(self, region.close).atexit = False

    @classmethod
    def make(cls, lane: int) -> Registry:
        """Make this process's registry for the group with `lane`; raises as `SharedRegion.create`."""
        region = SharedRegion.create(8 * _NUM_WORDS, name_of(lane), only_owner_writes=True)
        words = region.words(0, _LINE_WORDS)
        words[_OWN_BLOB : _OWN_BLOB + _BLOB_WORDS] = memoryview(region.blob.ljust(8 * _BLOB_WORDS, b"\0")).cast("Q")
        words[0] = _MAGIC
        words.release()
        return cls(region, lane)

    @property
    def newest(self) -> int:
        """The highest number of a buffer that this process has or had."""
        return self._words[_NEWEST]

    def open(self, number: int, config: Sequence[int]) -> Line:
        """Make the line of buffer `number`.

        Raises:
            ResourceError: too many buffers of the group are open.
        """
        lines = sorted((Line(self.region, index) for index in range(MAX_BUFFERS)), key=lambda line: line.words[NUMBER])
        for line in lines:  # those of the buffers that were closed last come last
            if line.is_free:
                line.words[NUMBER] = 0
                line.words[SYNC:CONFIG] = memoryview(bytes(8 * (CONFIG - SYNC))).cast("Q")
                for at, word in enumerate(config):
                    line.words[CONFIG + at] = word
                self.had.add(number)
                line.words[NUMBER] = number
                self._words[_NEWEST] = max(self.newest, number)
                return line
        raise ResourceError(f"a process has at most {MAX_BUFFERS} buffers of one group at a time; close some")

    def forget(self, number: int) -> None:
        """Remove all traces of buffer `number`, whose line is closed: this process did not take part in it."""
        self.had.discard(number)
        self._words[_CLOSED_AT + number % _NUM_CLOSED] = 0

    def numbers(self) -> dict[int, Line]:
        """Return the lines of the buffers that are open, by number."""
        lines = (Line(self.region, index) for index in range(MAX_BUFFERS))
        return {line.number: line for line in lines if line.number}

    def has_closed(self, number: int) -> bool:
        """Return whether the process had buffer `number` and has closed it.

        False for a process that has not made it yet, even if it has made later ones, and for one that closed it long
        ago.
        """
        return self._words[_CLOSED_AT + number % _NUM_CLOSED] == number


def name_of(lane: int) -> str:
    """Return the name of the memfds of a group's registries."""
    return f"buffers-{lane:x}"


def find(lane: int, pid: int, start_time: int) -> Registry | None:
    """Return the registry of another process for a group, None when it has none (yet), is dying or no longer lives.

    Raises:
        ProtocolError: there is something of that name which cannot be right.
        ResourceError: the system forbids to read it.
    """
    wanted = f"/memfd:epee-{name_of(lane)}"
    folder = f"/proc/{pid}/fd"
    try:
        entries = os.listdir(folder)
    except expected(FileNotFoundError, ProcessLookupError):
        return None
    except expected(OSError) as exc:
        if isinstance(exc, PermissionError) and is_leaving(pid, start_time):
            return None  # the folder of a process without memory is root's
        raise ResourceError(f"cannot look into {folder}: {exc}; the ranks must run as one user, dumpable") from exc
    for entry in entries:
        path = f"{folder}/{entry}"
        try:
            if os.readlink(path).split(" ")[0] == wanted:
                found = _attach(path, pid, start_time, lane)
                if found is not None:
                    return found
        except expected(OSError) as exc:
            if _is_shortage(exc):
                raise shortage(f"cannot look at {path}", exc) from exc
            # closed meanwhile
    return None


def _is_shortage(exc: BaseException | None) -> bool:
    """Return whether this process lacks descriptors or memory, whatever others do."""
    return isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _attach(path: str, pid: int, start_time: int, lane: int) -> Registry | None:
    """Map the registry of a descriptor; None if it is not this process's own, or is just being made or closed."""
    try:
        require_own(pid)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            raw = os.pread(fd, 8 * (_OWN_BLOB + _BLOB_WORDS), HEADER_BYTES)
        finally:
            os.close(fd)
        if int.from_bytes(raw[:8], "little") != _MAGIC:
            return None  # just being made
        region = SharedRegion.attach(raw[8 * _OWN_BLOB :][:BLOB_BYTES], is_writable=False)
    except expected(EpeeError) as exc:  # it has just ended, or closed it; a rank that waits for it has a timeout
        if _is_shortage(exc.__cause__):
            raise  # this process's own
        logger.info("the list of buffers of process %d cannot be used: %s", pid, exc)
        return None
    if (region.owner_pid, region.owner_start_time) != (pid, start_time):
        region.close()
        return None  # another process's, which this one was just mapping
    if region.nbytes < 8 * _NUM_WORDS:
        region.close()
        raise ProtocolError(f"the list of buffers of process {pid} has {region.nbytes} bytes; another version of epee?")
    return Registry(region, lane)
