"""A process of the proxy of a rank: serves one connection to each partner until its rank ends it, or ends.

    rank    makes page and staging (memfds), starts the process with them, sends requests (`setup.py`)
    here    one loop: bytes that sockets have or take, then a turn of each partner (`peer.py`); no thread, no lock

The loop polls while there is work, and for `BUSY_S` after. Then it sleeps `NAP_S` at a time, after `LONG_IDLE_S`
`LONG_NAP_S`: a kernel cannot wake it, so this is the longest time for which posted chunks wait. A byte of a partner or
a request ends a sleep at once, and so does the rank (`Proxy.wake`): the process stores ASLEEP, then checks all words
once more before it sleeps; the rank writes to the eventfd when it finds ASLEEP after it has stored a word. So either
the process sees the word, or the rank sees ASLEEP.

Ends, each of which is noticed at once in a sleep and within a turn otherwise:

    the rank dies            its pidfd, or the end of the socket of requests: the process exits
    the rank, or another     ABORT is set: the process exits
    process, fails
    a partner's connection   its bit in LOST; an orderly end of the partner (END) is none, unless something was posted
    ends                     to it
    a rank of the island     taken out of the readers that are waited for
    dies
    an error here            ABORT, and `failed` with the text, which the rank puts into its error

Death of this process at any line: its sockets close, so partners set LOST; the rank's watch of its pidfd sets ABORT.
Words and slots that it leaves incomplete are described in `words.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from ...errors import CommTimeoutError, EpeeError, InvalidArgument, ProtocolError, UnsupportedError, expected, ignored
from ...memory.signals import fence
from ...view.process.detector import is_readable, open_process
from ...view.transport.auth import Identity, Token
from ...view.transport.wire import NONCE_BYTES
from ..address import listen
from ..frames import END, FrameOpener, FrameSealer
from ..meeting import Connected, Meeting
from ..nixl.agent import NixlAgent
from ..tcp import TcpLink, set_up
from .nixl import NixlTransport
from .peer import ProxyPeer
from .setup import ProxyEndpoint, ProxySetup, parse_endpoint, parse_setup, receive_message, send_message
from .tcp import ENGINES, ChunkIntroduction, ChunkSink, TcpTransport
from .words import ABORT, ASLEEP, KINDS, LOST, PROXY_FAILED, SERVING

logger = logging.getLogger("epee")

BUSY_S, NAP_S = 0.01, 50e-6
LONG_IDLE_S, LONG_NAP_S = 1.0, 0.001
SETUP_S = 30.0  # for the rank to send the setup
FLUSH_S, CLOSE_S = 3.0, 2.0  # of an orderly end: for what is queued to go out (twice), for the partners to close
_SEALS = 0x2 | 0x4  # F_SEAL_SHRINK | F_SEAL_GROW: nobody can take the pages away
_F_GET_SEALS = 1034


class RankEnded(Exception):
    """The rank has ended, or wants its proxy to."""


class ServedPartner:
    """One partner with its connection: link, machines, transport.

    Attributes:
        is_closed: its connection has ended, and was closed.
        is_reported: its loss is in LOST.
    """

    def __init__(self, index: int, link: TcpLink, sink: ChunkSink, machine: ProxyPeer, transport: TcpTransport) -> None:
        self.index, self.link, self.sink, self.machine, self.transport = index, link, sink, machine, transport
        self.fd = link.fd
        self.is_closed = self.is_reported = False

    @property
    def is_lost(self) -> bool:
        """True when the connection has ended and something is missed."""
        return self.transport.is_refused or (self.link.lost is not None and not self.sink.has_ended)


class ProxyProcess:
    """The loop and its state.

    Args:
        control: the socket to the rank.
        setup: of this process.
    """

    def __init__(self, control: socket.socket, setup: ProxySetup) -> None:
        self._control, self._setup, self._shape = control, setup, setup.sizes
        if setup.cpus:
            _run_on(setup.cpus)
        self._words = _mapped(setup.page, 8 * self._shape.num_words).cast("Q")
        self._staging = _mapped(setup.staging, self._shape.staging_bytes)
        self._first_word = self._shape.process_words(setup.process)
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._partners: list[ServedPartner] = []
        self._readers = set(range(len(setup.island)))
        self._listener: socket.socket | None = None
        self._nonce = b""
        self._is_ending = False
        self._agent: NixlAgent | None = None
        self._watch(control.fileno(), self._handle_request)
        self._watch(setup.wake, lambda: os.eventfd_read(setup.wake))
        self._rank_fd = open_process(*setup.island[setup.own])
        if self._rank_fd < 0:
            raise RankEnded
        for position, process in enumerate(setup.island):
            self._watch_process(position, process)

    # ---- the loop

    def serve(self) -> None:
        """Serve until the rank ends it; raises `RankEnded` where the rank has died."""
        idle_since = 0.0
        while not self._is_ending:
            if self._turn():
                idle_since = 0.0
                continue
            now = time.monotonic()
            idle_since = idle_since or now
            if now - idle_since < BUSY_S:
                os.sched_yield()
            else:
                self._sleep(NAP_S if now - idle_since < LONG_IDLE_S else LONG_NAP_S)

    def _turn(self) -> bool:
        """Do what can be done now; return whether that was anything."""
        if self._words[ABORT]:
            raise RankEnded
        has_moved = False
        if self._agent is not None:
            with ignored(ConnectionError):  # seen by the transports
                self._agent.progress()
        for fd, _ in self._poll.poll(0):
            handle = self._handlers.get(fd)
            if handle is not None:
                handle()
                has_moved = True
        for partner in self._partners:
            if partner.link.is_stuck:
                has_moved |= partner.link.pump()
            has_moved |= partner.machine.turn(partner.transport)
            if partner.link.lost is not None or partner.transport.is_refused:
                self._note_end(partner)
        return has_moved

    def _sleep(self, nap_s: float) -> None:
        self._words[self._first_word + ASLEEP] = 1
        fence()
        if not self._turn():  # not in epoll_wait, whose time-outs are whole milliseconds
            select.select([self._poll], [], [], nap_s)
        self._words[self._first_word + ASLEEP] = 0

    def _watch(self, fd: int, handle: Callable[[], object]) -> None:
        self._handlers[fd] = handle
        self._poll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            with ignored(OSError):
                self._poll.unregister(fd)

    def abort(self) -> None:
        """Announce that the proxy has failed, unless a reason is announced already."""
        self._words[ABORT] = self._words[ABORT] or PROXY_FAILED

    # ---- partners

    def _note_end(self, partner: ServedPartner) -> None:
        """Close a connection that has ended, and report a loss."""
        if not partner.is_closed:
            partner.is_closed = True
            self._close(partner)
        if partner.is_lost and not partner.is_reported:
            partner.is_reported = True
            self._words[self._first_word + LOST] |= 1 << partner.index
            logger.info("proxy of rank %d: partner %d is lost", self._setup.rank, partner.link.peer)

    def _close(self, partner: ServedPartner) -> None:
        self._unwatch(partner.fd)
        partner.link.close()
        partner.transport.close()

    def _drop_partners(self) -> None:
        """Close all connections: no byte of them is stored after this."""
        for partner in self._partners:
            self._close(partner)
        self._partners.clear()
        if self._agent is not None:
            self._agent.leave(self)
            self._agent = None
        self._words[self._first_word + SERVING] = 0

    def _watch_process(self, position: int, process: tuple[int, int]) -> None:
        fd = self._rank_fd if position == self._setup.own else open_process(*process)
        if fd < 0:
            self._readers.discard(position)
            return
        self._watch(fd, lambda: self._reader_ended(position, fd))

    def _reader_ended(self, position: int, fd: int) -> None:
        if position == self._setup.own:
            raise RankEnded
        self._unwatch(fd)
        os.close(fd)
        self._readers.discard(position)
        for partner in self._partners:
            partner.machine.drop_reader(position)

    # ---- requests

    def _handle_request(self) -> None:
        try:
            message = receive_message(self._control)
        except expected(EOFError, ConnectionError) as exc:
            raise RankEnded from exc
        do = message.get("do")
        try:
            if do == "offer":
                answer = self._offer()
            elif do == "meet":
                answer = self._meet(message)
            elif do == "end":
                answer = self._end()
            else:
                raise ProtocolError(f"a rank asks its proxy for {do!r}, which it does not know")
        except expected(EpeeError, OSError) as exc:
            ranks = exc.ranks if isinstance(exc, CommTimeoutError) else ()
            answer = {"error": type(exc).__name__, "text": str(exc), "ranks": list(ranks)}
        self._answer({**answer, "number": message.get("number")})

    def _answer(self, answer: dict[str, Any]) -> None:
        try:
            send_message(self._control, answer)
        except expected(ConnectionError) as exc:
            raise RankEnded from exc

    def _offer(self) -> dict[str, Any]:
        if self._listener is not None:
            self._listener.close()
        address = self._setup.address
        self._listener = listen(address)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        return {"endpoint": ProxyEndpoint(address, int(self._listener.getsockname()[1]), self._nonce).fields()}

    def _meet(self, message: dict[str, Any]) -> dict[str, Any]:
        self._drop_partners()
        self._words[self._first_word + LOST] = 0  # not at the end: neighbours may still ask why it has come
        listener, self._listener = self._listener, None
        if listener is None:
            raise ProtocolError("a proxy is to meet its partners before it has offered an endpoint")
        if self._setup.engine == "nixl":
            if NixlAgent.num_made:
                listener.close()
                raise UnsupportedError("a proxy over NIXL serves one epoch; make another for the next one")
            self._agent = NixlAgent()
            self._agent.join(self)
        deadline = time.monotonic() + float(message["timeout_s"])
        token, job_id = Token(bytes.fromhex(message["token"])), bytes.fromhex(message["job"])
        wanted = {int(rank): parse_endpoint(fields).partner(int(rank)) for rank, fields in message["partners"]}
        me = Identity(self._setup.rank, 0, self._nonce)
        met = Meeting(token, job_id, me, wanted, listener).run(deadline, self._check)
        epoch, first = int(message["epoch"]), int(message["first"])
        shape = self._shape
        introduction = ChunkIntroduction(
            ENGINES.index(self._setup.engine),
            epoch,
            first,
            self._setup.process,
            shape.num_processes,
            shape.num_slots,
            shape.slot_bytes,
            shape.row_bytes,
        )
        try:
            for rank, connected in met.items():
                self._partners.append(self._served(rank, connected, introduction))
            self._introduce(introduction, deadline)
        except BaseException:
            self._drop_partners()
            for connected in met.values():
                connected.connection.close()
            raise
        self._words[self._first_word + SERVING] = epoch + 1
        return {"met": sorted(met)}

    def _served(self, rank: int, met: Connected, introduction: ChunkIntroduction) -> ServedPartner:
        setup, shape = self._setup, self._shape
        index, covers = setup.partners.index(rank), setup.covers_payloads
        machine = ProxyPeer(self._words, shape, index, setup.process, introduction.first, self._readers, setup.own)
        out, into = shape.out_offset(index), shape.in_offset(index)
        sink = ChunkSink(machine, self._staging[into : into + shape.area_bytes], shape, introduction)
        set_up(met.connection)
        sealer, opener = FrameSealer(met.out_key, covers), FrameOpener(met.in_key, covers)
        link = TcpLink(rank, met.connection, sealer, opener, sink)
        memory = self._staging[out : out + shape.area_bytes]
        transport = TcpTransport(link, memory, shape)
        if self._agent is not None:
            base = ctypes.addressof(ctypes.c_char.from_buffer(self._staging))
            transport = NixlTransport(link, memory, shape, self._agent, base + out, base + into)
        self._watch(link.fd, link.pump)
        return ServedPartner(index, link, sink, machine, transport)

    def _introduce(self, introduction: ChunkIntroduction, deadline: float) -> None:
        """Swap introductions with all partners."""
        for partner in self._partners:
            partner.transport.introduce(introduction)
        while True:
            self._check()
            waiting = [partner for partner in self._partners if not partner.sink.is_met]
            if not waiting:
                return
            for partner in waiting:
                partner.link.pump()
                if partner.link.lost is not None:
                    raise ProtocolError(
                        f"rank {partner.link.peer} and this proxy cannot serve each other: {partner.link.lost.value}; "
                        "sizes, EPEE_LINK, EPEE_LINK_MAC and the version of epee must be equal on all ranks"
                    )
                if partner.sink.is_met:
                    partner.transport.meet(partner.sink.details)
            if self._agent is not None:
                self._agent.progress()
            if time.monotonic() > deadline:
                ranks = [partner.link.peer for partner in waiting]
                raise CommTimeoutError(f"no introduction of the proxies of rank(s) {ranks} in time", ranks)
            time.sleep(0.001)

    def _check(self) -> None:
        """Raise `RankEnded` where the rank has ended; for waits outside of the loop."""
        if is_readable(self._rank_fd) or self._words[ABORT]:
            raise RankEnded

    def _end(self) -> dict[str, Any]:
        """End all connections in order: partners learn that nothing more comes, and close theirs.

        First of all what kernels have posted is sent: a call may have ended here whose chunks the partners wait for.
        """
        self._is_ending = True
        living = [partner for partner in self._partners if not partner.is_closed]
        self._pump_until(living, _has_sent_all, FLUSH_S, is_sending=True)
        for partner in living:
            partner.link.say(END, self._setup.rank, 0)
        self._pump_until(living, lambda partner: partner.link.is_flushed, FLUSH_S)
        for partner in living:
            partner.link.finish()
        self._pump_until(living, lambda partner: False, CLOSE_S)
        self._drop_partners()
        return {"ended": True}

    def _pump_until(
        self,
        partners: list[ServedPartner],
        is_done: Callable[[ServedPartner], bool],
        limit_s: float,
        is_sending: bool = False,
    ) -> None:
        """Move what is under way, and new chunks if `is_sending`, until all partners are done or lost."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self._check()
            if self._agent is not None:
                with ignored(ConnectionError):
                    self._agent.progress()
            has_moved, is_waiting = False, False
            for partner in partners:
                has_moved |= partner.link.pump()
                if is_sending:
                    has_moved |= partner.machine.turn(partner.transport)
                for kind in KINDS if not is_sending else ():
                    has_moved |= partner.transport.num_read(kind) > 0
                is_over = partner.link.lost is not None or partner.transport.is_refused or is_done(partner)
                is_waiting |= not is_over
            if not is_waiting:
                return
            if not has_moved:
                time.sleep(0.001)


def _has_sent_all(partner: ServedPartner) -> bool:
    """Return whether all that kernels have posted for a partner has left."""
    return not partner.machine.has_posted and partner.transport.is_flushed


def _mapped(memory: tuple[int, int, int], nbytes: int) -> memoryview:
    """Map a file that the rank has made, and return its usable bytes."""
    fd, size, first = memory
    if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != size or first + nbytes > size:
        raise ProtocolError(f"descriptor {fd} is no sealed memory of {size} bytes, {nbytes} of them usable")
    return memoryview(mmap.mmap(fd, size))[first : first + nbytes]


def _run_on(cpus: tuple[int, ...]) -> None:
    try:
        os.sched_setaffinity(0, cpus)
    except expected(OSError) as exc:
        raise InvalidArgument(
            f"EPEE_PROXY_CPUS must name CPUs that this process may use, got {', '.join(map(str, cpus))}: {exc}"
        ) from exc


def main(fd: int) -> int:
    """Run a process of a proxy; `fd` is its end of the socket to the rank. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which ends its proxy
    control = socket.socket(fileno=fd)
    control.settimeout(SETUP_S)
    process: ProxyProcess | None = None
    try:
        process = ProxyProcess(control, parse_setup(receive_message(control)))
        send_message(control, {"ready": os.getpid()})
        process.serve()
    except (RankEnded, EOFError, ConnectionError):
        return 0
    except Exception as exc:  # noqa: BLE001 - the rank reports it: nobody else could
        if process is not None:
            process.abort()
        with contextlib.suppress(OSError):
            send_message(control, {"failed": f"{type(exc).__name__}: {exc}", "error": type(exc).__name__})
        return 1
    return 0
