"""The GPU state of one buffer, independent of its calls: loaded kernels, pinned words, order of its calls.

Data path: none. Kernels write reports and the time of their waits into pinned words, and read there whether to abort
and which ranks are dead. The cpu reads these words and never waits for them.

Protocol on the cpu: whatever a call puts on a stream runs after everything that the buffer has put on any other stream.
Calls begin with `check`; on the fast path nothing is done between two calls (`quiet_stream`).

A crash of a peer ends no wait by itself: `mark_dead` notifies the kernels, or `abort` ends all waits.

`Share` limits the multiprocessors of a buffer while other buffers of this process use the same GPU. Blocks of a call
wait for other ranks and keep their multiprocessor meanwhile. So two buffers in use at once could starve each other: on
one GPU all multiprocessors belong to one, on the other GPU to the other, and both wait. On one stream this cannot
happen, as the kernels run one after another. So a buffer that finds others on other streams (or in graphs, which may be
replayed anywhere) takes so little that all of them but the widest fit together and leave `RESERVE` multiprocessors.
Then the widest buffer always finds that many, which is enough for all its blocks one after the other: only blocks that
already run wait for other ranks (see the kernels). It ends, and so do the others.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from ..errors import CommTimeoutError, InvalidState, ResourceError
from .params import NEWS_WORDS, NUM_REPORTS, REPORT_WORDS
from .platform import Launcher, Platform
from .report import NO_REPORTS, KernelReport, take_oldest

RESERVE = 26  # the sending blocks of a default call, plus two


class Share:
    """One buffer's share of a GPU.

    Attributes:
        stream: of its last call, None before the first.
        width: the most multiprocessors that its kernels have taken at once.
        in_graphs: whether a graph has recorded its kernels.
        num_changes: changes of any input of `limit`, in this process.
        seen: `num_changes` when `limit` read it last. While it is the same, `limit` would return the same for the same
            stream. The end of a buffer is not counted: this one may then take more, and does so later.
    """

    num_changes: ClassVar[int] = 0

    def __init__(self, device: torch.device, num_sms: int) -> None:
        self._stream: int | None = None
        self.width = 0
        self._in_graphs = False
        self._num_sms = num_sms
        self.seen = -1
        self._asked: tuple[int, bool] | None = None  # at the last call of `limit`, and its answer
        self._answer = num_sms, True
        with _lock:
            self._all = _shares.setdefault(str(device), {})
            self._all[id(self)] = weakref.ref(self)
        _note_change()
        weakref.finalize(self, self._all.pop, id(self), None)

    @property
    def stream(self) -> int | None:
        """Stream of the last call, None before the first."""
        return self._stream

    @stream.setter
    def stream(self, stream: int | None) -> None:
        if stream != self._stream:
            self._stream = stream
            _note_change()

    def widen(self, width: int) -> None:
        """Note that kernels have taken more multiprocessors at once than before."""
        self.width = width
        _note_change()

    @property
    def in_graphs(self) -> bool:
        """Whether a graph has recorded the buffer's kernels."""
        return self._in_graphs

    @in_graphs.setter
    def in_graphs(self, in_graphs: bool) -> None:
        if in_graphs != self._in_graphs:
            self._in_graphs = in_graphs
            _note_change()

    def still(self, stream: int) -> tuple[int, bool] | None:
        """Return the last result of `limit` if it would be the same for an eager call on `stream`, the stream of the
        last launch; else None."""
        is_same = self.seen == Share.num_changes and self._stream == stream
        return self._answer if is_same and self._asked == (stream, False) else None

    def limit(self, stream: int, is_capturing: bool) -> tuple[int, bool]:
        """Return how many multiprocessors a call on `stream` may take, and whether it has the GPU to itself.

        Raises:
            ResourceError: too many buffers are in use at once.
        """
        asked = stream, is_capturing
        if self.seen == Share.num_changes and asked == self._asked:
            return self._answer
        seen = Share.num_changes  # before the reads below: a change meanwhile is read by the next call
        answer = self._look(stream, is_capturing)
        self._answer, self._asked, self.seen = answer, asked, seen
        return answer

    def _look(self, stream: int, is_capturing: bool) -> tuple[int, bool]:
        if len(self._all) == 1:
            return self._num_sms, True
        with _lock:
            others = [share for ref in list(self._all.values()) if (share := ref()) is not None and share is not self]
        widths = [
            min(other.width, self._num_sms)
            for other in others
            if other.width and (is_capturing or other.in_graphs or other.stream != stream)
        ]
        return width_beside(widths, self._num_sms), not widths

    def leave(self) -> None:
        """Note that the buffer is closed."""
        with _lock:
            self._all.pop(id(self), None)
        _note_change()


def _note_change() -> None:
    Share.num_changes += 1


_lock = threading.RLock()  # a garbage collection under it may end a dropped buffer
_shares: dict[str, dict[int, weakref.ref[Share]]] = {}


def width_beside(widths: Sequence[int], num_sms: int) -> int:
    """Return how many of `num_sms` multiprocessors a call may take beside others that take `widths`.

    Raises:
        ResourceError: less than two are left.
    """
    reserve = min(RESERVE, num_sms // 4)
    if sum(widths) + reserve <= num_sms:
        return num_sms
    left = num_sms - reserve - (sum(widths) - max(widths))
    if left < 2:
        raise ResourceError(
            f"{len(widths)} other buffers of this process use the GPU on other streams or in graphs and take {widths} "
            f"of its {num_sms} multiprocessors; use fewer at once, give them a smaller num_sms, or one stream"
        )
    return left


NUM_MAILBOXES = 16
HOST_GRACE_S = 10.0  # how much longer than the kernels the cpu waits for them
SPIN_S = 1e-3  # how long the cpu's wait for the GPU keeps the interpreter's lock from other threads
PAUSE_S = 2e-5  # length of each sleep after that


class GpuDevice:
    """One buffer's state on a GPU.

    Args:
        platform: the GPU.
        head: generated head of the kernels' sources.
        kernels: files, and the kernels in them with their arguments.
        num_reports: of the kernels (`kNumReports` in `head`).

    Attributes:
        platform: as above.
        kernels: by name.
        report: words into which kernels report.
        codes: of the reports; equal to `no_reports` if there is no unread one.
        share: of the multiprocessors.
        is_closed: nothing is launched any more.
    """

    def __init__(
        self,
        platform: Platform,
        head: str,
        kernels: Mapping[str, Mapping[str, type[ctypes.Structure]]],
        num_reports: int = NUM_REPORTS,
    ) -> None:
        self.platform = platform
        self.kernels: dict[str, Launcher] = dict(platform.kernels(kernels, head))
        self.report = platform.mapped_words(num_reports * REPORT_WORDS)
        self.codes = self.report.words[::REPORT_WORDS]
        self.no_reports = NO_REPORTS if num_reports == NUM_REPORTS else memoryview(bytes(8 * num_reports)).cast("Q")
        self.news = platform.mapped_words(NEWS_WORDS)  # abort flag, dead ranks, time of waiting kernels
        self.share = Share(platform.device, platform.limits.num_sms)
        self.is_closed = False
        self._last_stream: int | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether a CUDA graph has recorded calls."""
        return self.share.in_graphs

    @property
    def has_reports(self) -> bool:
        """Whether a kernel has an unread report; costs a few loads of cpu memory."""
        return self.codes != self.no_reports

    def take_reports(self) -> list[KernelReport]:
        """Return the kernel reports since the last call, the oldest first."""
        found = []
        while self.has_reports and (report := take_oldest(self.report.words)) is not None:
            found.append(report)
        return found

    # -- order of calls

    def require_open(self) -> None:
        """Raise if the buffer is closed."""
        if self.is_closed:
            raise InvalidState("the buffer is closed; make a new one")

    def quiet_stream(self) -> int | None:
        """Return the current stream if the fast path is allowed for the start of a call, else None.

        It is allowed if the stream is that of the last call and records no graph, nothing was reported, and the buffer
        is open.
        """
        stream = self.platform.stream()
        is_quiet = (
            stream == self._last_stream
            and not self.platform.is_capturing()
            and self.codes == self.no_reports
            and not self.is_closed
        )
        return stream if is_quiet else None

    def follow(self, stream: int) -> None:
        """Order later work on the current stream, the raw `stream`, after the buffer's work on any other stream."""
        if stream != self._last_stream:
            if self._last_stream is not None:
                self.platform.wait(self.platform.mark(self._last_stream))
            self._last_stream = stream

    def drain(self, grace_s: float) -> None:
        """Wait for the unfinished kernels; abort them if they take longer than `grace_s`."""
        if self.is_closed or self._last_stream is None or self.platform.is_capturing():
            return
        mark, deadline = self.platform.mark(self._last_stream), time.monotonic() + grace_s
        while not self.platform.is_done(mark):
            if time.monotonic() > deadline:
                self.abort()
                break
            time.sleep(1e-4)
        self.platform.synchronize()

    def close(self) -> None:
        """Release this buffer's share of the GPU. Idempotent; no kernel may be unfinished."""
        if not self.is_closed:
            self.is_closed = True
            self.share.leave()

    # -- notifications to kernels

    def abort(self) -> None:
        """End every wait of the running kernels, from any thread; close the buffer afterwards."""
        self.news.words[0] = 1

    def mark_dead(self, ranks: Sequence[int]) -> None:
        """Report the dead ranks to kernels: waits for them end, also in running kernels. Any thread, one at a time."""
        self.news.words[1] = sum(1 << rank for rank in ranks)

    def is_marked(self, rank: int) -> bool:
        """Whether a rank was reported dead to kernels."""
        return bool(self.news.words[1] >> rank & 1)

    def waiting(self) -> int:
        """Return a number that changes while a kernel waits and has waited for at least a millisecond. Any thread."""
        return self.news.words[2]


class Mailboxes:
    """Pinned words in which kernels answer, and the cpu's wait for them; used round-robin.

    Args:
        platform: the GPU.
        num_words: of a mailbox.
    """

    def __init__(self, platform: Platform, num_words: int) -> None:
        made = platform.mapped_words(NUM_MAILBOXES * num_words)
        self._words, self._address, self._num_words = made.words, made.address, num_words
        self._owner = made  # keeps the memory alive
        self._next = 0

    def open(self) -> int:
        """Return the address of a cleared mailbox for a kernel to write to."""
        at = self._next * self._num_words
        self._next = (self._next + 1) % NUM_MAILBOXES
        self._words[at] = 0
        return self._address + 8 * at

    def wait(self, address: int, num_words: int, timeout_s: float, interrupt: Callable[[], None]) -> list[int] | None:
        """Wait for a kernel's answer: its first 64-bit words as 32-bit words, or None when the call has failed.

        Pure polling would starve the other threads, including the one that reports deaths: releasing the lock for a
        moment is not enough for them to run, so this wait sleeps. `interrupt` is called meanwhile, and may end the
        kernels.
        """
        words = self._words
        mailbox = (address - self._address) >> 3
        started = 0.0
        while not words[mailbox]:
            for _ in range(1000):
                if words[mailbox]:
                    break
            else:
                interrupt()
                now = time.monotonic()
                started = started or now
                if now - started > timeout_s + HOST_GRACE_S:
                    told = f"dispatch: the GPU gave no answer for {timeout_s + HOST_GRACE_S:.1f} s"
                    raise CommTimeoutError(told, has_job=True)
                if now - started > SPIN_S:
                    time.sleep(PAUSE_S)
        if words[mailbox] != 1:
            return None
        return words[mailbox : mailbox + num_words].cast("B").cast("i").tolist()
