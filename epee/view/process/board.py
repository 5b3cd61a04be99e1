"""The board of a process: memory that it alone writes and the others can read, also after its death.

    words: version of the state | decided epoch, has left | iterations of the agent thread | one row per group | the
           data that each group publishes | the name of each group or buffer
    two copies of the state: length, checksum, bytes

Writers: the agent thread writes the state, the epoch and its number of iterations; the thread that runs a group's calls
writes the group's row. Readers: agents that coordinate after the owner's death (the state), the owner's engines, which
sleep on the epoch's word, and processes that make a hang report (all of it).

Ordering: a state is written to the copy that is not shown, then the version word is raised, and its lowest bit says
which copy is shown (stores stay in order on x86-64, see `memory/shared.py`). A crash between two stores leaves the old
state; a crash within a copy touches only what no process reads. The checksum protects against stray stores of a broken
process; a reader that overlaps with a write reads again. Rows are for people: they are checked for range, not for
tearing. The data that a group publishes is opaque here; its length is written last.

The heartbeat of a process (`Beat`) lies in a region of its own beside the board.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import EpeeError, ProtocolError, ResourceError, expected, ignored
from ...memory.claim import require_own
from ...memory.shared import BLOB_BYTES, HEADER_BYTES, SharedRegion
from ...memory.signals import futex_sleep, futex_wake
from ..protocol.messages import BY_ITSELF, FOREVER, LEFT, BoardState
from ..transport.wire import EPOCH_LIMIT, GROUP_ID_LIMIT, MAX_MEMBERS, MAX_STATE_BYTES, decode_state, encode_state

logger = logging.getLogger("epee")

MAX_ROWS = 120  # groups beyond these work, but no hang report shows them
_WORDS_PER_LINE = 8
_MAGIC = int.from_bytes(b"epeebrd5", "little")
_MAGIC_WORD, _VERSION = 0, 1
_EPOCH, _LEFT = 8, 9  # a line of their own: engines sleep on the first
_TURNS = 16
_BLOB = 24  # a process that finds the memfd without knowing the blob reads it here
_ROWS = 64
_TOLD = _ROWS + MAX_ROWS * _WORDS_PER_LINE
_TOLD_WORDS = 16  # of a group: the number of bytes, then the bytes
MAX_TOLD_BYTES = 8 * (_TOLD_WORDS - 1)
_NAMES = _TOLD + MAX_ROWS * _TOLD_WORDS
_NAME_WORDS = 8  # of a row: the name of its group or buffer, for people; UTF-8, padded with zeros
NUM_WORDS = _NAMES + MAX_ROWS * _NAME_WORDS
_COPIES = 8 * NUM_WORDS
_HEAD = struct.Struct("<Q16s")
_COPY_BYTES = _HEAD.size + MAX_STATE_BYTES
_ROW = struct.Struct("<Q16sQQQQQ")  # group_id + 1, op, seq, epoch, slots waited for, since (ns), progress
PERIOD_S = 0.5  # of the heartbeat
_SIGEV_THREAD = 2
_CLOCK_MONOTONIC = 1
_SEMAPHORE_BYTES = 32  # sizeof(sem_t)
_NUM_LOOKS = 100
_MEMFD = "/memfd:epee-board"


class Row(NamedTuple):
    """The current activity of a group.

    Attributes:
        group_id: its id.
        op: name of the call that runs, cut at 16 letters; empty between calls.
        seq: number of the call.
        epoch: in which it runs.
        waits_for: slots, ascending.
        since_s: start of the call or of this wait, as `time.monotonic()` counts on this machine.
        progress: grows whenever something arrived.
        name: of the group or buffer, cut at 64 bytes; empty if it has not been set.
    """

    group_id: int
    op: str
    seq: int
    epoch: int
    waits_for: tuple[int, ...]
    since_s: float
    progress: int
    name: str = ""


class GroupRow:
    """The row in which an engine shows its activity; one thread at a time. A call costs a fraction of a microsecond."""

    def __init__(
        self,
        line: memoryview,
        group_id: int,
        told: memoryview | None = None,
        on_tell: Callable[[bytes], None] | None = None,
        name: memoryview | None = None,
    ) -> None:
        """Begin idle and without a name.

        Args:
            line: of the row.
            group_id: id of its group.
            told: memory for the data that the group publishes; None: it has no reader.
            on_tell: sends that data to other hosts.
            name: memory for the name; None: it has no reader.
        """
        self._line, self._group_id = line, group_id
        self._name = memoryview(bytearray(8 * _NAME_WORDS)) if name is None else name
        self.call_it("")
        self._on_tell: Callable[[bytes], None] | None = None  # an empty entry is nothing to report
        self._told = memoryview(bytearray(8 * _TOLD_WORDS)) if told is None else told
        self._progress = 0
        self.tell(b"")
        self._on_tell = on_tell
        self.idle()

    def show(self, op: bytes, seq: int, epoch: int, waits_for: int = 0) -> None:
        """Show that call `seq` named `op` (ASCII) runs in `epoch` and waits for a set of slots (bit i for slot i)."""
        self._progress += 1
        since_ns = time.monotonic_ns()
        _ROW.pack_into(self._line, 0, self._group_id + 1, op, seq, epoch, waits_for, since_ns, self._progress)

    def idle(self) -> None:
        """Show that no call runs."""
        self.show(b"", 0, 0)

    def tell(self, data: bytes) -> None:
        """Publish these bytes about this process's part in the group, at most `MAX_TOLD_BYTES`."""
        self._told[:8] = bytes(8)
        self._told[8 : 8 + len(data)] = data
        self._told[:8] = len(data).to_bytes(8, "little")
        if self._on_tell is not None:
            self._on_tell(data)

    def call_it(self, name: str) -> None:
        """Show the name of the group or buffer, for people."""
        data = name.encode()[: 8 * _NAME_WORDS]
        self._name[:] = data.ljust(8 * _NAME_WORDS, b"\0")

    def clear(self) -> None:
        """Free the row."""
        self._told[:8] = bytes(8)
        _ROW.pack_into(self._line, 0, 0, b"", 0, 0, 0, 0, 0)


class Board:
    """The owner's side.

    Attributes:
        blob: lets other processes of this user and machine attach.
    """

    def __init__(self, slot: int) -> None:
        """Make the board of `slot`, with no state on it; raises as `SharedRegion.create`."""
        self._region = SharedRegion.create(_COPIES + 2 * _COPY_BYTES, f"board{slot}", only_owner_writes=True)
        self._words = self._region.words(0, NUM_WORDS)
        self._words[_MAGIC_WORD] = _MAGIC
        self.blob = self._region.blob
        self._words[_BLOB : _BLOB + BLOB_BYTES // 8] = memoryview(self.blob).cast("Q")

    def write(self, state: BoardState) -> None:
        """Replace the state: every later read returns this one, whatever becomes of this process."""
        data = encode_state(state)
        version = self._words[_VERSION] + 1
        start = HEADER_BYTES + _COPIES + (version & 1) * _COPY_BYTES
        copy = _HEAD.pack(len(data), _checksum(version, data)) + data
        self._region.mapping[start : start + len(copy)] = copy
        self._words[_VERSION] = version

    def decide(self, epoch: int) -> None:
        """Show the epoch that is decided, and wake the engines that sleep on it."""
        self._words[_EPOCH] = epoch
        futex_wake(self._region.address + 8 * _EPOCH)

    def wake(self) -> None:
        """Wake the engines that sleep on the epoch, which is unchanged."""
        futex_wake(self._region.address + 8 * _EPOCH)

    def await_change(self, epoch: int) -> None:
        """Sleep some milliseconds, less if the decided epoch is another than `epoch` or changes."""
        futex_sleep(self._region.address + 8 * _EPOCH, epoch)

    def turn(self) -> None:
        """Count an iteration of the agent thread: proof that Python code runs in this process."""
        self._words[_TURNS] += 1

    def leave(self, cause: str = LEFT) -> None:
        """Report that this process has left (LEFT), or ends without having left (EXITED), and writes nothing more."""
        self._words[_LEFT] = 1 + BY_ITSELF.index(cause)

    def row(self, group_id: int, on_tell: Callable[[bytes], None] | None = None) -> GroupRow:
        """Return a free row for group `group_id`; one without readers when all are taken."""
        for number in range(MAX_ROWS):
            at = _ROWS + number * _WORDS_PER_LINE
            if self._words[at] == 0:
                line, place = self._words[at : at + _WORDS_PER_LINE], _TOLD + number * _TOLD_WORDS
                told, start = self._words[place : place + _TOLD_WORDS], _NAMES + number * _NAME_WORDS
                name = self._words[start : start + _NAME_WORDS]
                return GroupRow(line.cast("B"), group_id, told.cast("B"), on_tell, name.cast("B"))
        return GroupRow(memoryview(bytearray(_ROW.size)), group_id, None, on_tell)

    def close(self) -> None:
        """Drop this process's hold; idempotent. Other processes keep what they attached."""
        self._words.release()
        self._region.close()


class BoardView:
    """The board of another process. Everything read from it is checked."""

    def __init__(self, region: SharedRegion) -> None:
        """Open the board in `region`.

        Raises:
            ProtocolError: there is none.
        """
        self._region = region
        if region.nbytes < _COPIES + 2 * _COPY_BYTES:
            raise ProtocolError(f"process {region.owner_pid}'s region is too small for a board; one version of epee?")
        self._words = region.words(0, NUM_WORDS)
        if self._words[_MAGIC_WORD] != _MAGIC:
            raise ProtocolError(f"process {region.owner_pid}'s region is no board; do the ranks run one version?")

    @classmethod
    def attach(cls, blob: bytes) -> BoardView:
        """Map the board that `blob` describes; raises `ProtocolError`, `ResourceError` (see `SharedRegion.attach`)."""
        region = SharedRegion.attach(blob, is_writable=False)
        try:
            return cls(region)
        except expected(ProtocolError):
            region.close()
            raise

    @property
    def owner(self) -> tuple[int, int]:
        """Pid and start time of the process whose board this is."""
        return self._region.owner_pid, self._region.owner_start_time

    def read(self) -> BoardState | None:
        """Return the state, None if none was ever written.

        Raises:
            ProtocolError: the bytes are damaged.
            ResourceError: the owner lives and writes faster than they can be read.
        """
        for _ in range(_NUM_LOOKS):
            version = self._words[_VERSION]
            if version == 0:
                return None
            start = HEADER_BYTES + _COPIES + (version & 1) * _COPY_BYTES
            mapping = self._region.mapping
            length, checksum = _HEAD.unpack_from(mapping, start)
            data = mapping[start + _HEAD.size : start + _HEAD.size + min(length, MAX_STATE_BYTES)]
            if self._words[_VERSION] == version:
                if checksum != _checksum(version, data) or length > MAX_STATE_BYTES:
                    raise ProtocolError(f"the board of process {self._region.owner_pid} is damaged; it was not used")
                return decode_state(data)
        raise ResourceError(f"process {self._region.owner_pid} writes its board faster than it can be read")

    @property
    def has_left(self) -> bool:
        """True when its owner has reported that it leaves, or ends."""
        return bool(self.end)

    @property
    def end(self) -> str:
        """LEFT or EXITED, as its owner has reported; "" when it has not."""
        word = self._words[_LEFT]
        return BY_ITSELF[word - 1] if 0 < word <= len(BY_ITSELF) else ""

    @property
    def epoch(self) -> int:
        """The decided epoch."""
        return self._words[_EPOCH]

    @property
    def turns(self) -> int:
        """The number of iterations of its agent thread."""
        return self._words[_TURNS]

    def rows(self) -> list[Row]:
        """Return the activities of the groups; an invalid row is left out."""
        rows = []
        for number in range(MAX_ROWS):
            at = _ROWS + number * _WORDS_PER_LINE
            group_id, op, seq, epoch, mask, since_ns, progress = _ROW.unpack(
                bytes(self._words[at : at + _WORDS_PER_LINE])
            )
            name = op.rstrip(b"\0")
            is_possible = 0 < group_id <= GROUP_ID_LIMIT and name.isascii() and seq <= FOREVER and epoch <= EPOCH_LIMIT
            if is_possible:
                slots = tuple(slot for slot in range(MAX_MEMBERS) if mask >> slot & 1)
                start = _NAMES + number * _NAME_WORDS
                raw = bytes(self._words[start : start + _NAME_WORDS]).rstrip(b"\0")
                called = _printable(raw.decode("utf-8", "ignore"))
                rows.append(
                    Row(group_id - 1, _printable(name.decode()), seq, epoch, slots, since_ns / 1e9, progress, called)
                )
        return rows

    def told(self, group_id: int) -> bytes:
        """Return the data that its owner publishes about its part in a group; empty if it has none."""
        for number in range(MAX_ROWS):
            if self._words[_ROWS + number * _WORDS_PER_LINE] == group_id + 1:
                place = _TOLD + number * _TOLD_WORDS
                data = bytes(self._words[place : place + _TOLD_WORDS])
                return data[8 : 8 + min(int.from_bytes(data[:8], "little"), MAX_TOLD_BYTES)]
        return b""

    def close(self) -> None:
        """Drop the mapping; idempotent."""
        self._words.release()
        self._region.close()


def find_board(pid: int) -> BoardView:
    """Attach the board of a process of this user that is known by its pid alone.

    Raises:
        AuthError: it is another user's.
        ResourceError: there is no such process, or it has no board.
    """
    require_own(pid)
    folder = Path(f"/proc/{pid}/fd")
    try:
        for name in os.listdir(folder):
            with ignored(FileNotFoundError):  # closed meanwhile
                if not os.readlink(folder / name).startswith(_MEMFD):
                    continue
                fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    blob = os.pread(fd, BLOB_BYTES, HEADER_BYTES + 8 * _BLOB)
                finally:
                    os.close(fd)
                return BoardView.attach(blob)
    except expected(OSError) as exc:
        if isinstance(exc, EpeeError):
            raise
        raise ResourceError(f"cannot look into process {pid}: {exc}; it must be yours and alive") from exc
    raise ResourceError(f"process {pid} is no rank of a job of epee; give the PID of a rank, not of its launcher")


def read_board_of(pid: int) -> BoardState | None:
    """Return the state on the board of process `pid`; raises as `find_board` and `BoardView.read`."""
    view = find_board(pid)
    try:
        return view.read()
    finally:
        view.close()


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _checksum(version: int, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16, salt=struct.pack("<Q", version)).digest()


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
    """This process's heartbeat, which needs neither the GIL nor any other part of Python.

    A timer of the C library counts in shared memory. Use `start` and `stop`, which count their users.

    Data path: POSIX `timer_create` with SIGEV_THREAD lets the C library call a function in a thread of its own at each
    tick. The function is `sem_post`, its argument a process-shared semaphore in a memfd region: a number thus grows in
    memory that others have mapped, however long Python code or a C call holds the GIL, and stops growing when the
    process is stopped, frozen or starved. It needs no native code of ours, no helper process, no signal handler
    (decision 41 in docs/decisions.md gives the alternatives).

    Writers and readers: the C library writes, in the process that owns the beat; any process that attached the blob
    reads. A value means nothing by itself, only whether it has changed since the last read. It proves life, never
    death: that needs a pidfd.

    Lifetime: one beat per process, made at first use and never unmapped, because a tick may be under way when the timer
    is disarmed. It ticks while it has users. A forked child has no timer; it makes its own beat. (A fork that falls
    into a tick, some microseconds each half second, may find the C library's own lock taken, and the child then waits
    for it in vain: processes that use epee should be spawned, not forked.) A crash leaves nothing.

    Attributes:
        blob: lets other processes attach.
    """

    def __init__(self) -> None:
        """Make the semaphore and the timer, which does not tick yet.

        Where the system gives no timer the count stays 0, which readers take for "not known": a beat affects nothing
        but the wording of messages. Raises as `SharedRegion.create`.
        """
        self._region = SharedRegion.create(_SEMAPHORE_BYTES, "beat", only_owner_writes=True)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._region))  # nor may the end of the interpreter unmap it
        self.blob = self._region.blob
        self._num_users = 0
        self._arm: Any = None
        self._timer = ctypes.c_void_p()
        try:
            self._create_timer()
        except expected(OSError, AttributeError) as exc:
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
        """Map it; raises as `SharedRegion.attach`."""
        self._region = SharedRegion.attach(blob, is_writable=False)
        self._words = self._region.words(0, 1)

    @property
    def count(self) -> int:
        """Ticks so far, modulo 2^31; 0 where there is no timer. Only a change means something."""
        return self._words[0] & 0x7FFFFFFF

    def close(self) -> None:
        """Drop the mapping; idempotent."""
        self._words.release()
        self._region.close()


_beat_lock = threading.RLock()  # a garbage collection under it may end a dropped buffer, and its job
_beats: dict[int, Beat] = {}  # of this process, by its pid: a fork leaves the parent's here, which must not be used


def acquire_beat() -> Beat:
    """Return this process's beat, ticking; pair it with `release_beat`. Raises as `SharedRegion.create`."""
    with _beat_lock:
        beat = _beats.get(os.getpid())
        if beat is None:
            beat = _beats[os.getpid()] = Beat()
        beat.start()
        return beat


def release_beat(beat: Beat) -> None:
    """Undo one `acquire_beat`."""
    with _beat_lock:
        beat.stop()


def _renew_lock() -> None:
    global _beat_lock
    _beat_lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
