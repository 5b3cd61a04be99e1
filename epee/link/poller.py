"""All links of one group in one process, and the threads that move their bytes.

A caller that waits for a rank of another host pumps (`pump`): it polls an epoll, then the sockets that are ready. A
thread does it when no caller waits: received data is applied, and what the network has not taken yet is sent, while
this rank computes. While a caller pumps the thread stands back, because two threads of one interpreter that both wake
for each packet cost more than the packet: it checks every `BACK_S` whether a caller has pumped since, and waits in the
epoll itself when none has. A caller that goes to sleep in the kernel announces it (`rest`), and the thread takes over
at once.

A group with changing membership makes and ends connections while it lives (`add`, `drop`). The thread handles that as
well (`attend`): a meeting that listens and calls, and the work of its owner in each round.

One lock guards the links; a thread that does not get it leaves the work to the holder. A group that ends leaves the
links to the thread (`end`): other ranks of this host may still need the data that comes through them, and the last
writes must be sent. The thread is a daemon; at the end of the process it is waited for, for a bounded time.

A signal handler may raise between any two lines here as well. The lock is therefore taken by one call in C whose result
is recorded by the same call; the polling setup of a link is repeated, whatever it was, when the links are next polled
(`_is_broken_off`); and a link that is lost stays in the table until its loss has been handled completely.

A forked child drops its copies of the sockets: a connection that a child keeps open would not end with its owner.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import ResourceError, ignored
from ..threads import BackgroundThread
from .meeting import Meeting
from .tcp import TcpLink

BACK_S = 0.005
STUCK_S = 0.0005  # the same while there is more to send
FLUSH_S = 5.0  # for what is queued to go out, and for the peers to close
CLOSE_S = 2.0  # of it, for the peers to close
LINGER_S = 10.0
HAND_OVER_S = 1.0
NAP_S, MAX_NAP_S = 0.0001, 0.002  # between polls that find nothing, while a link has something under way
REST_S = 0.00002  # the same between pumps of callers: else a writer would hardly get the lock
IDLE_S = 1.0  # how long the thread sleeps in the kernel before it checks whether it is to end
SOON_S = 0.01  # the same while there is something to be done soon


class Alarm:
    """An event for one waiting thread, which other threads set: the wake-up of the thread of the links.

    `threading.Event` is not suitable: it is written in Python around a lock, and an exception of a signal handler
    within `set` leaves that lock taken, for ever. Here each step is one call in C.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Wake the thread, now or when it next waits."""
        if self._queue.empty():
            self._queue.put(None)

    def clear(self) -> None:
        """Reset the event; by the waiting thread only."""
        with contextlib.suppress(queue.Empty):
            self._queue.get_nowait()

    def wait(self, timeout_s: float) -> None:
        """Wait until it is set; by the waiting thread only."""
        with contextlib.suppress(queue.Empty):
            self._queue.get(timeout=timeout_s)


class Links:
    """The links of a group.

    Args:
        links: one per peer.

    Attributes:
        lock: held by a thread that writes to a link or pumps.
    """

    def __init__(self, links: Iterable[TcpLink]) -> None:
        self.links = {link.peer: link for link in links}
        self.lock: Any = threading.RLock()
        self._on_loss: Callable[[int], object] = int
        self._on_idle: Callable[[], object] = int
        self._poll = select.epoll()
        self._by_fd = {link.fd: link for link in self.links.values()}
        self._bell, self._ring = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll.register(self._bell, select.EPOLLIN)  # only the thread reads the wake-ups
        self._meeting: Meeting | None = None
        self._on_turn: Callable[[], bool] = bool
        self._pumped = 0.0
        self._resting = 0.0  # pumps of callers before this time do nothing
        self._alarm = Alarm()  # set: the thread may wait in the epoll
        self._is_closed = False
        self._linger: Callable[[], bool] | None = None
        self._on_closed: Callable[[], object] = int
        for fd in self._by_fd:
            self._poll.register(fd, select.EPOLLIN)
        self._writers: set[int] = set()
        self._is_broken_off = False  # an exception of a signal handler interrupted it: all links are polled next time
        self._thread = BackgroundThread(self._main, "epee-links")
        _made.add(self)

    def start(self, on_loss: Callable[[int], None], on_idle: Callable[[], None]) -> None:
        """Begin to move bytes.

        Args:
            on_loss: called with the peer, the lock held, for each link that has ended.
            on_idle: called by the thread before it sleeps: to write deferred data.

        Raises:
            ResourceError: the system has no thread left; the links are closed.
        """
        self._on_loss, self._on_idle = on_loss, on_idle
        self._alarm.set()
        try:
            self._thread.begin("links between hosts")
        except ResourceError:
            self._close()
            raise

    def attend(self, meeting: Meeting, on_turn: Callable[[], bool]) -> None:
        """Let the thread do its owner's work, and step a meeting, which is closed with the links.

        Args:
            on_turn: called by the thread in each round, without the lock; True: there is more to be done soon.
        """
        self._meeting, self._on_turn = meeting, on_turn
        self._poll.register(meeting.fileno(), select.EPOLLIN)

    def ring(self) -> None:
        """Let the thread begin a round now, or within some milliseconds."""
        with self.lock, contextlib.suppress(BlockingIOError):  # enough wake-ups are queued
            if not self._is_closed:
                os.write(self._ring, b"!")
        self._alarm.set()

    def add(self, link: TcpLink) -> None:
        """Use a new link, which replaces the one with this peer, if there is one: after this no data of that is
        applied."""
        with self.lock:
            self.drop(link.peer)
            if self._is_closed:
                link.close()
                return
            self.links[link.peer] = link
            self._by_fd[link.fd] = link
            self._poll.register(link.fd, select.EPOLLIN)

    def drop(self, peer: int) -> None:
        """End the link with a peer, if there is one: after this no data that it has sent is applied."""
        with self.lock:
            link = self.links.pop(peer, None)
            if link is None:
                return
            if self._by_fd.pop(link.fd, None) is not None:
                with ignored(OSError):
                    self._poll.unregister(link.fd)
                self._writers.discard(link.fd)
            link.close()

    def has(self, peer: int) -> bool:
        """Return whether there is a link with a peer, as far as is known."""
        with self.lock:
            link = self.links.get(peer)
            return link is not None and link.lost is None

    # ---- waiting callers

    def let_go(self) -> None:
        """Release the lock if this thread still has it, though an exception has ended what it did with it.

        Python 3.10 may run a signal handler between the last line of a `with` block and its end; a debugger always may.
        """
        while self.lock._is_owned():
            self.lock.release()

    def pump(self) -> bool:
        """Move the data that can be moved now; return whether any was. Never blocks."""
        self._pumped = now = time.monotonic()
        held = False
        if now < self._resting:
            return False
        try:
            # taken and recorded without a call of Python's between, where an exception could separate the two
            (held,) = map(self.lock.acquire, (False,))
            if not held or self._is_closed:
                return False
            events = self._poll.poll(0.0)
            has_moved = self._handle(events) if events or self._is_broken_off else False
            if events and self._writers and not has_moved:
                self._resting = time.monotonic() + REST_S
            return has_moved
        finally:
            if held:
                self.lock.release()

    def rest(self) -> None:
        """Announce that this caller sleeps now: the thread takes over."""
        self._pumped = 0.0
        self._alarm.set()

    # ---- writing

    def write(self, peer: int, offset: int, data: Any, word: int, value: int, note: int) -> None:
        """As `Link.write`, to `peer`; nothing where the link has ended."""
        with self.lock:
            link = self.links.get(peer)
            if link is not None and link.lost is None:  # `_send` without its calls
                was, self._is_broken_off = self._is_broken_off, True
                link.write(offset, data, word, value, note)
                if link.is_stuck:
                    self._watch(link.fd, link)
                self._is_broken_off = was

    def write_pieces(self, peer: int, pieces: Sequence[tuple[int, bytes]], word: int, value: int, note: int) -> None:
        """As `Link.write_pieces`, to `peer`."""
        self._send(peer, "write_pieces", pieces, word, value, note)

    def newest(self, peer: int) -> int:
        """Return the number of the last frame written to `peer`."""
        with self.lock:
            link = self.links.get(peer)
            return -1 if link is None else link.newest

    def is_out(self, peer: int, number: int) -> bool:
        """Return whether the network has taken the frames to `peer` up to a number; true of a lost link."""
        with self.lock:
            link = self.links.get(peer)
            return link is None or link.lost is not None or link.is_out(number)

    def ask(self, peer: int, words: Sequence[tuple[int, int]], number: int) -> None:
        """As `Link.ask`, of `peer`."""
        self._send(peer, "ask", words, number)

    def tell(self, peer: int, number: int, values: Sequence[int]) -> None:
        """As `Link.tell`, to `peer`."""
        self._send(peer, "tell", number, values)

    def say(self, peer: int, kind: int, source: int, epoch: int) -> None:
        """As `Link.say`, to `peer`."""
        self._send(peer, "say", kind, source, epoch)

    def flush(self, peer: int) -> None:
        """Send the data that waits for a word (`tcp.CORK_BYTES`)."""
        self._send(peer, "flush")

    def _send(self, peer: int, put: str, *args: Any) -> None:
        with self.lock:
            link = self.links.get(peer)
            if link is not None and link.lost is None:
                was, self._is_broken_off = self._is_broken_off, True
                getattr(link, put)(*args)
                if link.is_stuck:
                    self._watch(link.fd, link)
                self._is_broken_off = was

    # ---- moving

    def _handle(self, events: list[tuple[int, int]]) -> bool:
        was, has_moved = self._is_broken_off, False
        if was:
            events = [(fd, 0) for fd in self._by_fd]
        self._is_broken_off = True
        for fd, _ in events:
            link = self._by_fd.get(fd)
            if link is None:  # the wake-up descriptor, the meeting, or a link that was dropped just now
                self._alarm.set()
                continue
            has_moved |= link.pump()
            if link.lost is not None:
                self._drop(fd, link)
            elif was or link.is_stuck != (fd in self._writers):
                self._watch(fd, link)
        self._is_broken_off = False
        return has_moved

    def _watch(self, fd: int, link: TcpLink) -> None:
        """Wake for received data and, while the socket of a link has not taken everything, for room. The lock is
        held."""
        if not link.is_stuck:
            self._poll.modify(fd, select.EPOLLIN)
            self._writers.discard(fd)
        elif fd not in self._writers or self._is_broken_off:
            self._poll.modify(fd, select.EPOLLIN | select.EPOLLOUT)
            self._writers.add(fd)
            self._alarm.set()  # the writer may have something else to do than to pump

    def _drop(self, fd: int, link: TcpLink) -> None:
        """End a link that is lost: after this no data of its peer is applied. Repeated when it was interrupted."""
        with ignored(OSError):  # it is not registered any more
            self._poll.unregister(fd)
        self._writers.discard(fd)
        link.close()
        if not link.is_finished:
            self._on_loss(link.peer)
        self._by_fd.pop(fd, None)

    def _main(self) -> None:
        try:
            self._serve()
        finally:
            self._shut()

    def _serve(self) -> None:
        nap_s = NAP_S
        while self._linger is None or not self._linger():
            is_busy = self._on_turn()
            back_s = STUCK_S if self._writers else BACK_S
            if time.monotonic() - self._pumped < back_s:
                self._alarm.clear()
                self._alarm.wait(back_s)
                continue
            self._on_idle()
            events = self._poll.poll(SOON_S if is_busy or self._linger is not None else IDLE_S)
            if any(fd == self._bell for fd, _ in events):
                os.read(self._bell, 4096)
            if time.monotonic() - self._pumped < STUCK_S:
                continue  # a caller pumps
            with self.lock:
                has_moved = self._handle(events)
            if has_moved or not events or not self._writers:
                nap_s = NAP_S
            else:  # an engine that must be polled; an idle socket causes no wake-up
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, MAX_NAP_S)

    # ---- the end

    def end(self, linger: Callable[[], bool], closed: Callable[[], object]) -> None:
        """Let the thread go on until `linger()` is true, or for `LINGER_S`, then send what is queued and close all.

        The caller waits only for data that would be lost with the process (`is_in_hand`), `HAND_OVER_S` at most: not
        every process gets to `await_ends`, which waits at its end. `closed` is called last.
        """
        self._hand_over()
        until = time.monotonic() + LINGER_S
        with self.lock:
            if self._is_closed or self._linger is not None:
                return
            self._on_closed = closed
            _ending.append(self)
            self._linger = lambda: linger() or time.monotonic() > until
            self.ring()
        self.rest()
        if self._thread.ident is None:
            self._shut()

    def _hand_over(self) -> None:
        deadline = time.monotonic() + HAND_OVER_S
        while any(link.is_in_hand for link in list(self.links.values())) and time.monotonic() < deadline:
            if not self.pump():
                os.sched_yield()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _shut(self) -> None:
        """Send what is queued and let the peers close, for `FLUSH_S` at most, then close everything; idempotent."""
        try:
            now = time.monotonic()
            deadline, closing = now + FLUSH_S, 0.0
            while self._by_fd and now < (closing or deadline):
                with self.lock:
                    for link in self._by_fd.values():
                        link.flush()
                        if link.is_flushed and not link.is_finished:
                            link.finish()
                    self._handle(self._poll.poll(0.001))
                now = time.monotonic()
                if not closing and all(link.is_finished for link in self._by_fd.values()):
                    closing = min(deadline, now + CLOSE_S)
        finally:
            self._close()

    def _close(self) -> None:
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            for link in self.links.values():
                link.close()
            self._by_fd.clear()
            self.links.clear()  # they hold references to objects that refer to this one
            self._close_descriptors()
        closed = self._on_closed
        self._on_loss = self._on_idle = self._on_closed = int
        self._on_turn = bool
        try:
            closed()
        finally:
            if self in _ending:
                _ending.remove(self)

    def _forget(self) -> None:
        """Drop the descriptors, in a forked child; nothing is sent to the peers."""
        if not self._is_closed:
            self._is_closed = True
            self.lock = threading.RLock()  # another thread may have held it
            for link in self.links.values():
                link.forget()
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
        self._poll.close()
        os.close(self._bell)
        os.close(self._ring)


_ending: list[Links] = []
_made: weakref.WeakSet[Links] = weakref.WeakSet()


def await_ends() -> None:
    """At the end of the process: wait for the links that still serve others, or send."""
    for links in list(_ending):
        links.join(LINGER_S + FLUSH_S)


def _forget_all() -> None:
    _ending.clear()
    for links in _made:
        links._forget()


atexit.register(await_ends)
os.register_at_fork(after_in_child=_forget_all)
