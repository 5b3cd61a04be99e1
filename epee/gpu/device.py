"""What one buffer has of a GPU, whatever its calls are: loaded kernels, words in pinned memory, the order of its calls.

Data path: none. Kernels write reports and how long they have waited into pinned words, and read there whether they are
to give up and who is dead; the host looks at these words and never waits for them.

Protocol on the host: whatever a call puts on a stream runs behind everything that the buffer has put on any other.
Calls begin with `check`, and between two calls in quiet times nothing is done (`quiet_stream`).

A crash of a peer ends no wait by itself: somebody tells the kernels (`mark_dead`), or ends all waits (`abort`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence

from ..errors import CommTimeoutError, InvalidState
from .params import NEWS_WORDS, NUM_REPORTS, REPORT_WORDS
from .platform import Launcher, Platform
from .report import NO_REPORTS, KernelReport, take_oldest
from .share import Share

NUM_MAILBOXES = 16
HOST_GRACE_S = 10.0  # how much longer than the kernels the host waits for them
SPIN_S = 1e-3  # how long the host's wait for the GPU keeps the interpreter's lock from other threads
PAUSE_S = 2e-5  # for which it sleeps then, again and again


class GpuDevice:
    """A buffer's part of a GPU.

    Args:
        platform: the GPU.
        head: of the kernels' sources.
        kernels: files, and the kernels in them with their arguments.

    Attributes:
        platform: as above.
        kernels: by name.
        report: words into which kernels report.
        codes: of the reports, `NO_REPORTS` where there is none that nobody has read.
        share: of the multiprocessors.
        is_closed: nothing is launched any more.
    """

    def __init__(
        self, platform: Platform, head: str, kernels: Mapping[str, Mapping[str, type[ctypes.Structure]]]
    ) -> None:
        self.platform = platform
        self.kernels: dict[str, Launcher] = {}
        for path, params in kernels.items():
            self.kernels.update(platform.kernels(path, head, params))
        self.report = platform.host_words(NUM_REPORTS * REPORT_WORDS)
        self.codes = self.report.words[::REPORT_WORDS]
        self.news = platform.host_words(NEWS_WORDS)  # give up, who is dead, how long kernels have waited
        self.share = Share(platform.device, platform.limits.num_sms)
        self.is_closed = False
        self._last_stream: int | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether a CUDA graph has recorded calls."""
        return self.share.in_graphs

    @property
    def has_reports(self) -> bool:
        """Whether a kernel has reported something that nobody has read; costs a few loads of host memory."""
        return self.codes != NO_REPORTS

    def take_reports(self) -> list[KernelReport]:
        """Return what kernels have reported since the last look, the oldest first."""
        found = []
        while self.has_reports and (report := take_oldest(self.report.words)) is not None:
            found.append(report)
        return found

    # -- order of calls

    def require_open(self) -> None:
        """Raise where the buffer is closed."""
        if self.is_closed:
            raise InvalidState("the buffer is closed; make a new one")

    def quiet_stream(self) -> int | None:
        """Return the current stream where the start of a call would find nothing to do here, else None.

        That is: it is the stream of the last call and records no graph, nothing was reported, the buffer is open.
        """
        stream = self.platform.stream()
        is_quiet = (
            stream == self._last_stream
            and not self.platform.is_capturing()
            and self.codes == NO_REPORTS
            and not self.is_closed
        )
        return stream if is_quiet else None

    def follow(self, stream: int) -> None:
        """Let what comes on the current stream, the raw `stream`, run behind what the buffer has put on any other."""
        if stream != self._last_stream:
            if self._last_stream is not None:
                self.platform.wait(self.platform.mark(self._last_stream))
            self._last_stream = stream

    def drain(self, grace_s: float) -> None:
        """Wait for the kernels in flight; abort them when they take longer than `grace_s`."""
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
        """Leave the GPU to others. Idempotent; no kernel may be in flight."""
        if not self.is_closed:
            self.is_closed = True
            self.share.leave()

    # -- news for kernels

    def abort(self) -> None:
        """End every wait of the kernels in flight, from any thread; close the buffer afterwards."""
        self.news.words[0] = 1

    def mark_dead(self, ranks: Sequence[int]) -> None:
        """Say which ranks are dead: waits for them end, also in kernels in flight. Any thread, one at a time."""
        self.news.words[1] = sum(1 << rank for rank in ranks)

    def is_marked(self, rank: int) -> bool:
        """Tell whether kernels were told that a rank is dead."""
        return bool(self.news.words[1] >> rank & 1)

    def waiting(self) -> int:
        """Return a number that changes while a kernel that has waited for a millisecond goes on waiting. Any thread."""
        return self.news.words[2]


class Mailboxes:
    """Pinned words in which kernels answer, and the host's wait for them; used in turn.

    Args:
        platform: the GPU.
        num_words: of a mailbox.
    """

    def __init__(self, platform: Platform, num_words: int) -> None:
        made = platform.host_words(NUM_MAILBOXES * num_words)
        self._words, self._address, self._num_words = made.words, made.address, num_words
        self._owner = made  # of the memory
        self._next = 0

    def open(self) -> int:
        """Return the address of a cleared mailbox, to which kernels write."""
        at = self._next * self._num_words
        self._next = (self._next + 1) % NUM_MAILBOXES
        self._words[at] = 0
        return self._address + 8 * at

    def wait(self, address: int, num_words: int, timeout_s: float, interrupt: Callable[[], None]) -> list[int] | None:
        """Wait for a kernel's answer: its first 64-bit words as 32-bit words, or None when the call has failed.

        Who only polls starves the other threads, the one that tells of deaths among them: letting go of the lock for a
        moment wakes them up in vain, so this one sleeps. `interrupt` is called meanwhile, and may end the kernels.
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
