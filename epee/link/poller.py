"""All links of one group in one process: who moves their bytes, and when.

Whoever waits for a rank of another host pumps (`pump`): a look at an epoll, then at the sockets that have something. A
thread does it when nobody waits: what a peer sends is applied, and what the network has not taken yet goes out, while
this rank computes. Beside a caller that pumps the thread stands back, because two threads of one interpreter that both
wake for each packet cost more than the packet: it looks every `BACK_S` whether somebody has pumped since, and sits in
the epoll itself when nobody has. A caller that goes to sleep in the kernel says so (`rest`), and the thread takes over
at once.

One lock guards the links; who does not get it leaves the work to the thread that has it. A group that ends leaves the
links to the thread (`end`): others of this host may still need what comes through them, and what was written last must
go out. The thread is a daemon; at the end of the process it is waited for, for a bounded time.
"""

from __future__ import annotations

import atexit
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .tcp import TcpLink

BACK_S = 0.005
FLUSH_S = 5.0
LINGER_S = 10.0
IDLE_S = 1.0  # how long the thread sleeps in the kernel before it looks whether it is to end


class Links:
    """The links of a group.

    Args:
        links: one per peer.

    Attributes:
        lock: held by whoever writes to a link or pumps.
    """

    def __init__(self, links: Iterable[TcpLink]) -> None:
        self.links = {link.peer: link for link in links}
        self.lock: Any = threading.RLock()
        self._on_loss: Callable[[int], None]
        self._on_idle: Callable[[], None]
        self._poll = select.epoll()
        self._by_fd = {link.fd: link for link in self.links.values()}
        self._bell, self._ring = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll.register(self._bell, select.EPOLLIN | select.EPOLLET)
        self._pumped = 0.0
        self._turn = threading.Event()  # set: the thread may sit in the epoll
        self._is_closed = False
        self._linger: Callable[[], bool] | None = None
        self._on_closed: Callable[[], object] = int
        for fd in self._by_fd:
            self._poll.register(fd, select.EPOLLIN)
        self._writers: set[int] = set()
        self._is_broken_off = False  # an exception of a signal handler came between: all links are looked at next time
        self._thread = threading.Thread(target=self._main, name="epee-links", daemon=True)

    def start(self, on_loss: Callable[[int], None], on_idle: Callable[[], None]) -> None:
        """Begin to move bytes.

        Args:
            on_loss: called with the peer, the lock held, for each link that has ended.
            on_idle: called by the thread before it sleeps: to write what has waited for a reason to.
        """
        self._on_loss, self._on_idle = on_loss, on_idle
        self._turn.set()
        self._thread.start()

    # ---- who waits

    def pump(self) -> bool:
        """Move what can be moved now; return whether anything came. Never blocks."""
        self._pumped = time.monotonic()
        if not self.lock.acquire(False):
            return False
        try:
            return self._handle(self._poll.poll(0.0)) if not self._is_closed else False
        finally:
            self.lock.release()

    def rest(self) -> None:
        """Say that this caller sleeps now: the thread takes over."""
        self._pumped = 0.0
        self._turn.set()

    # ---- writing

    def write(self, peer: int, offset: int, data: Any, word: int, value: int, note: int) -> None:
        """As `Link.write`, to `peer`; nothing where the link has ended."""
        link = self.links[peer]
        with self.lock:
            if link.lost is None:
                self._is_broken_off = True
                link.write(offset, data, word, value, note)
                if not link.is_flushed or link.lost is not None:
                    self._wrote(link)
                self._is_broken_off = False

    def flush(self, peer: int) -> None:
        """Send what waits for a word (`tcp.CORK_BYTES`)."""
        link = self.links[peer]
        with self.lock:
            if link.lost is None:
                link.flush()
                self._wrote(link)

    def ask(self, peer: int, words: Sequence[tuple[int, int]], number: int) -> None:
        """As `Link.ask`, of `peer`."""
        with self.lock:
            link = self.links[peer]
            if link.lost is None:
                link.ask(words, number)
                self._wrote(link)

    def tell(self, peer: int, number: int, values: Sequence[int]) -> None:
        """As `Link.tell`, to `peer`."""
        with self.lock:
            link = self.links[peer]
            if link.lost is None:
                link.tell(number, values)
                self._wrote(link)

    def _wrote(self, link: TcpLink) -> None:
        """See to it that what the socket of a link has not taken goes out later. The lock is held."""
        if link.lost is not None:
            self._drop(link)
        elif not link.is_flushed and link.fd not in self._writers:
            self._writers.add(link.fd)
            self._poll.modify(link.fd, select.EPOLLIN | select.EPOLLOUT)

    # ---- moving

    def _handle(self, events: list[tuple[int, int]]) -> bool:
        came = False
        ready = list(self._by_fd) if self._is_broken_off else [fd for fd, _ in events]
        self._is_broken_off = True
        for fd in ready:
            link = self._by_fd.get(fd)
            if link is None:  # the bell, or a link that was dropped just now
                continue
            came |= link.pump()
            if link.lost is not None:
                self._drop(link)
            elif fd in self._writers and link.is_flushed:
                self._writers.discard(fd)
                self._poll.modify(fd, select.EPOLLIN)
        self._is_broken_off = False
        return came

    def _drop(self, link: TcpLink) -> None:
        """End a link that is lost: after this nothing of its peer is applied."""
        if link.fd not in self._by_fd:
            return
        self._poll.unregister(link.fd)
        self._writers.discard(link.fd)
        del self._by_fd[link.fd]
        link.close()
        self._on_loss(link.peer)

    def _main(self) -> None:
        while not self._is_closed:
            if self._linger is not None and self._linger():
                break
            if time.monotonic() - self._pumped < BACK_S:
                self._turn.clear()
                self._turn.wait(BACK_S)
                continue
            self._on_idle()
            try:
                events = self._poll.poll(IDLE_S if self._linger is None else 0.01)
            except ValueError:  # closed meanwhile
                return
            if self._is_closed:
                return
            if time.monotonic() - self._pumped < BACK_S:
                continue  # a caller does it
            with self.lock:
                if not self._is_closed:
                    self._handle(events)

        self._shut()

    # ---- the end

    def end(self, linger: Callable[[], bool], closed: Callable[[], object]) -> None:
        """Let the thread go on until `linger()` is true, or for `LINGER_S`, then send what is queued and close all.

        The caller does not wait; at the end of the process `await_ends` does. `closed` is called last.
        """
        until = time.monotonic() + LINGER_S
        self._on_closed = closed
        with self.lock:
            if self._is_closed or self._linger is not None:
                return
            _ending.append(self)
            self._linger = lambda: linger() or time.monotonic() > until
            os.write(self._ring, b"!")
        self.rest()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _shut(self) -> None:
        """Send what is queued, for `FLUSH_S` at most, and close everything; idempotent."""
        deadline = time.monotonic() + FLUSH_S
        while time.monotonic() < deadline and any(not (link.is_flushed or link.lost) for link in self.links.values()):
            with self.lock:
                self._handle(self._poll.poll(0.001))
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            for link in self.links.values():
                link.close()
            self._poll.close()
            os.close(self._bell)
            os.close(self._ring)
        self._on_closed()
        if self in _ending:
            _ending.remove(self)


_ending: list[Links] = []


def await_ends() -> None:
    """At the end of the process: wait for the links that still serve others, or send."""
    for links in list(_ending):
        links.join(LINGER_S + FLUSH_S)


atexit.register(await_ends)
os.register_at_fork(after_in_child=_ending.clear)
