"""The `tcp` engine: one socket per link, driven by the thread that waits.

Data path: `write` seals a header and gives it to the socket together with the caller's memory (`sendmsg`, no copy);
what the socket does not take stays queued and is sent with the next pump. `pump` reads straight into the receiver's
memory where a payload is long (`stream.py`). Every error ends the link (`lost`); nothing raises here.

The end is found by reading. A socket that takes nothing more may still hold data that the peer sent before it left, and
that counts: a rank that has announced its end is not lost. A send that fails therefore only stops the sending. For the
same reason a link ends in two steps: `finish` announces that nothing more comes, the peer closes, then this side does;
a socket closed at once answers late data with a reset, which destroys what is still under way to the peer.

No TCP_USER_TIMEOUT: the kernel would declare a living reader dead that is stopped with a full window (measured: 2.3 s
after a stop, decision 59). Keepalive detects the loss of a peer's machine while nothing is under way.
The caller holds the lock of the links (`poller.py`) in every method.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..errors import EpeeError, ProtocolError, expected, ignored
from .frames import (
    ASK,
    MAX_PAYLOAD,
    NO_WORD,
    PIECES,
    TELL,
    WRITE,
    FrameOpener,
    FrameSealer,
    pack_asked,
    pack_pieces,
    pack_told,
)
from .seam import LinkLoss
from .stream import SEND_BYTES, FrameSink, Instream, Outstream

logger = logging.getLogger("epee")

SOCKET_BUFFER_BYTES = 4 << 20
CORK_BYTES = 64 << 10  # a shorter payload without a word waits for the word that announces it
MAX_CORKED = 8
MAX_TELLS = 4096  # limit of waiting answers, for a peer which asks and does not read
MAX_READS = 64  # of one pump: a peer that sends without end must not keep this process in it
KEEPALIVE_S, KEEPALIVE_PROBES = 1, 10
_NO_SIGNAL = ((), socket.MSG_NOSIGNAL)  # of `sendmsg`: a program may have restored the default action of SIGPIPE


def set_up(connection: socket.socket) -> None:
    """Set the options of a link's socket."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


class TcpLink:
    """A link over one socket; see `seam.Link`.

    Args:
        peer: rank of the other process.
        connection: connected, and past its handshake.
        sealer, opener: of the two directions.
        sink: the target of the peer's frames.

    Attributes:
        fd: of the socket; -1 once it is closed.
        is_finished: this side has announced that nothing more comes; an end of the link is no loss any more.
        is_stuck: there is more to send: the socket is full, or took enough for one round.
    """

    def __init__(
        self, peer: int, connection: socket.socket, sealer: FrameSealer, opener: FrameOpener, sink: FrameSink
    ) -> None:
        self.peer = peer
        self.fd = connection.fileno()
        self.lost: LinkLoss | None = None
        self.is_finished = False
        self.is_stuck = False
        self._tells: deque[int] = deque()  # numbers of answers that may not be sent yet
        self._mute: OSError | None = None  # reason for which the socket takes nothing more
        self._socket = connection
        self._out = Outstream(sealer, _NO_SIGNAL)
        self._in = Instream(opener, sink)

    @property
    def is_flushed(self) -> bool:
        """True when the socket has taken everything."""
        return not self._out

    @property
    def is_in_hand(self) -> bool:
        """True while written data would be lost with this process though there is room for it: never of a socket."""
        return False

    @property
    def newest(self) -> int:
        """Number of the frame that was written last."""
        return self._out.newest

    def is_out(self, number: int) -> bool:
        """Return whether the socket has taken a frame."""
        return self._out.is_out(number)

    def write(self, offset: int, data: Any, word: int, value: int, note: int) -> None:
        """As `Link.write`; long data go as several frames, the word behind the last."""
        nbytes, out = len(data), self._out
        while nbytes > MAX_PAYLOAD:
            out.put((WRITE, MAX_PAYLOAD, offset, NO_WORD, 0, note), data[:MAX_PAYLOAD])
            offset, data, nbytes = offset + MAX_PAYLOAD, data[MAX_PAYLOAD:], nbytes - MAX_PAYLOAD
        out.put((WRITE, nbytes, offset, word, value, note), data)
        if word != NO_WORD or not 0 < nbytes <= CORK_BYTES or len(out) > MAX_CORKED:
            self.flush()

    def write_pieces(self, pieces: Sequence[tuple[int, bytes]], word: int, value: int, note: int) -> None:
        """As `Link.write_pieces`."""
        payload = pack_pieces(pieces)
        self._out.put((PIECES, len(payload), len(pieces), word, value, note), payload)
        self.flush()

    def ask(self, words: Sequence[tuple[int, int]], number: int) -> None:
        """As `Link.ask`."""
        payload = pack_asked(words)
        self._out.put((ASK, len(payload), 0, NO_WORD, number, 0), payload)
        self.flush()

    def tell(self, number: int, values: Sequence[int]) -> None:
        """As `Link.tell`; a peer that keeps asking without reading the answers loses the link."""
        payload, tells, out = pack_told(values), self._tells, self._out
        while tells and tells[0] <= out.num_sent:
            tells.popleft()
        if len(tells) >= MAX_TELLS:
            self._lose(LinkLoss.DAMAGED, ProtocolError(f"{len(tells)} answers to its questions wait to be read"))
            return
        tells.append(out.put((TELL, len(payload), 0, NO_WORD, number, 0), payload))
        self.flush()

    def say(self, kind: int, source: int, epoch: int) -> None:
        """As `Link.say`."""
        self._out.put((kind, 0, source, NO_WORD, epoch, 0))
        self.flush()

    def flush(self) -> bool:
        """Give the socket what it takes, `SEND_BYTES` or so: received data is handled in between. False: it is full."""
        if self.lost is None and self._mute is None:
            try:
                self._out.send(self._socket.sendmsg, SEND_BYTES)
                self.is_stuck = bool(self._out)
                return True
            except BlockingIOError:
                self.is_stuck = True
            except expected(OSError) as exc:
                self._mute = exc  # the next `pump` reads what is still there, and finds the end
        return False

    def pump(self) -> bool:
        """As `Link.pump`."""
        came, has_sent = 0, bool(self._out or self.is_stuck) and self.flush()
        try:
            while self.lost is None and came < MAX_READS:
                more = self._in.receive(self._socket.recv_into)
                came += 1
                if more < 0:
                    self._lose(LinkLoss.CLOSED if self._mute is None else LinkLoss.RESET, self._mute)
                if more <= 0:
                    break
                if self.is_stuck:
                    self.flush()
        except BlockingIOError:
            if self._mute is not None:
                self._lose(LinkLoss.RESET, self._mute)
        except expected(EpeeError) as exc:  # before OSError: AuthError is both
            self._lose(LinkLoss.DAMAGED, exc)
        except expected(OSError) as exc:
            self._lose(LinkLoss.RESET, exc)
        return came > 0 or has_sent

    def finish(self) -> None:
        """Announce that nothing more comes, when everything is sent; the peer's data is still applied until it
        closes."""
        self.is_finished = True
        with ignored(OSError):  # the connection has ended
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the connection; idempotent."""
        self.fd = -1
        with ignored(OSError):  # it has ended; else the peer is notified, though a child holds a copy
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def forget(self) -> None:
        """Drop this process's copy of the socket, in a forked child: the connection is the parent's."""
        self.fd = -1
        self._socket.close()

    def _lose(self, loss: LinkLoss, exc: Exception | None) -> None:
        self.lost = loss
        logger.info("link to rank %d ended: %s%s", self.peer, loss.value, f" ({exc})" if exc else "")
