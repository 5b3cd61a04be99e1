"""Passing of a descriptor to other processes of this user over a unix socket (SCM_RIGHTS), where copying is forbidden.

Data path: the owner listens; a peer connects, presents the region's cookie, and gets one descriptor back. The owner's
side is a thread that sleeps until a peer connects; it lives as long as the region.

Access: the socket is bound in a private folder (0700) with mode 0600, opened as a path (`O_PATH`), and unlinked at
once, so there is no name that could be guessed, squatted or left behind. Peers connect through the owner's
`/proc/PID/fd/FD`, which the kernel allows to processes of the same user only. In addition both sides ask the kernel for
the other's identity (`SO_PEERCRED`): the owner requires its own user, the peer requires the pid of the claim, with the
claim's start time before and after. Any failure because the owner ends meanwhile is raised as its death.

Bounds: the owner gives each peer a second, the peer waits a few. A crash of either side ends the connection; a crash of
the owner closes the socket, and only a crash in the microseconds between bind and unlink could leave an empty folder.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import os
import select
import socket
import struct
import tempfile
import threading
import time

from .. import env
from ..descriptors import Descriptor
from ..errors import AuthError, ProtocolError, ResourceError, expected, shortage
from ..threads import BackgroundThread
from .claim import COOKIE_BYTES, Claim, naming_death, require_alive

PATIENCE_S = 5.0  # how long a peer waits for the owner
_SERVE_S = 1.0  # how long the owner waits for a peer that has connected
_PAUSE_S = 0.05
_ASK = b"epee-fd?"
_GIVEN = b"epee-fd!"
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_TIMEVAL = struct.Struct("ll")
_SOL_SOCKET, _KIND = socket.SOL_SOCKET, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC


class DescriptorServer:
    """Passes out copies of one descriptor until it is closed.

    Attributes:
        socket_fd: this process's descriptor through which peers find the socket.
    """

    def __init__(self, fd: int, cookie: bytes) -> None:
        """Listen for peers that present `cookie` and pass them `fd`, of which it takes a copy.

        Raises:
            ResourceError: no folder for temporary files, no descriptor or no thread is available.
        """
        self._pid = os.getpid()
        with contextlib.ExitStack() as undo:
            try:
                copy = os.dup(fd)
                undo.callback(os.close, copy)
                listener = undo.enter_context(socket.socket(socket.AF_UNIX, _KIND))
                self.socket_fd = _bind_unnamed(listener)
                undo.callback(os.close, self.socket_fd)
                listener.listen(64)
                self._stop, stopped = socket.socketpair()
                undo.enter_context(self._stop)
                undo.enter_context(stopped)
                self._thread = BackgroundThread(_serve, "epee-descriptors", (listener, stopped, copy, cookie))
                self._thread.begin("peers that want a descriptor")
            except expected(OSError) as exc:
                raise ResourceError(
                    f"cannot listen for peers that want a descriptor: {exc}; let TMPDIR name a folder that can be "
                    "written, or raise the limit on descriptors"
                ) from exc
            undo.pop_all()

    def close(self) -> None:
        """Stop serving, and wait for the thread; idempotent."""
        if self.socket_fd < 0:
            return
        os.close(self.socket_fd)
        self.socket_fd = -1
        if os.getpid() != self._pid:  # a forked child drops its copies; the server is its parent's
            self._stop.close()
            return
        self._stop.shutdown(socket.SHUT_RDWR)  # reaches the thread even if a forked child holds a copy
        self._stop.close()
        if threading.current_thread() is not self._thread:  # the garbage collector may run anywhere
            self._thread.join(2 * _SERVE_S + 1)


def _bind_unnamed(listener: socket.socket) -> int:
    """Bind a socket, remove its name, and return an `O_PATH` descriptor of it."""
    folder = tempfile.mkdtemp(prefix="epee-", dir=env.temporary_folders()[0])
    try:
        folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{folder_fd}/s")  # short, however long the folder's name is
            os.chmod("s", 0o600, dir_fd=folder_fd)
            return os.open("s", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink("s", dir_fd=folder_fd)
            os.close(folder_fd)
    finally:
        os.rmdir(folder)


def _serve(listener: socket.socket, stopped: socket.socket, fd: int, cookie: bytes) -> None:
    """Answer peers one by one until `stopped` hangs up; owns both sockets and `fd`."""
    with listener, stopped, contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        events = select.poll()
        events.register(listener, select.POLLIN)
        events.register(stopped, select.POLLIN)
        while True:
            ready = {number for number, _ in events.poll()}
            if stopped.fileno() in ready:
                return
            try:
                connection, _ = listener.accept()
            except expected(OSError):  # no descriptor left, most likely: do not spin, the peer may wait a little
                time.sleep(_PAUSE_S)
                continue
            # a peer that has closed or failed a check is not served; it sees the closed connection
            with contextlib.suppress(OSError), connection:
                _bound(connection, _SERVE_S)
                _answer(connection, fd, cookie)


def _answer(connection: socket.socket, fd: int, cookie: bytes) -> None:
    _, uid = _peer_of(connection)
    if uid != os.geteuid():
        return
    asked = connection.recv(len(_ASK) + COOKIE_BYTES + 1)
    if hmac.compare_digest(asked, _ASK + cookie):
        socket.send_fds(connection, [_GIVEN], [fd])


def fetch_descriptor(claim: Claim, socket_fd: int) -> int:
    """Get a copy of the descriptor that `claim` names from its owner's `DescriptorServer`.

    Args:
        claim: of the region.
        socket_fd: the owner's `DescriptorServer.socket_fd`.
    Raises:
        OwnerEndedError: the owner has ended.
        ResourceError: the owner has closed the region, or does not answer; or no descriptor is left here.
        AuthError: the owner is another user's process, or another process than the owner listens there.
        ProtocolError: the answer is not one descriptor.
    """
    with naming_death(claim):
        return _fetch(claim, socket_fd)


def _fetch(claim: Claim, socket_fd: int) -> int:
    require_alive(claim)
    try:
        made = socket.socket(socket.AF_UNIX, _KIND)
    except expected(OSError) as exc:
        raise shortage(f"no socket to ask process {claim.pid} for its descriptor", exc) from exc
    with made as connection:
        _bound(connection, PATIENCE_S)
        try:
            connection.connect(f"/proc/{claim.pid}/fd/{socket_fd}")
            pid, uid = _peer_of(connection)
            if pid != claim.pid or uid != os.geteuid():
                raise AuthError(
                    f"process {pid} of user {uid} answers for process {claim.pid} of user {os.geteuid()}; its "
                    "descriptor was not taken"
                )
            connection.sendall(_ASK + claim.cookie)
            held = _receive_one(connection, claim.pid)
        except expected(OSError) as exc:
            if isinstance(exc, AuthError):
                raise
            raise ResourceError(
                f"process {claim.pid} did not hand over its descriptor within {PATIENCE_S:.0f} s ({exc}); has it "
                "closed the region? the ranks must run as one user, dumpable, in one PID namespace"
            ) from exc
    with held:
        require_alive(claim)
    return held.keep()


def _receive_one(connection: socket.socket, pid: int) -> Descriptor:
    fds = array.array("i")
    room = socket.CMSG_SPACE(4 * fds.itemsize)  # for more than one, so that a second is seen and closed
    # not `socket.recv_fds`: it ignores its flags, and the copy would be inherited by children
    message, items, flags, _ = connection.recvmsg(len(_GIVEN) + 1, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in items:
        if (level, kind) == (_SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    held = [Descriptor(fd) for fd in fds]
    if not message and not fds:
        raise ProtocolError(f"process {pid} does not know the region; it was closed, or the blob is another's")
    if message == _GIVEN and not fds and flags & socket.MSG_CTRUNC:  # the kernel had no free descriptor number for it
        raise ResourceError(
            f"no descriptor is left here for the one that process {pid} has sent; raise the limit on descriptors "
            "(ulimit -n)"
        )
    if message != _GIVEN or len(fds) != 1 or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        raise ProtocolError(f"process {pid} sent {message!r} with {len(fds)} descriptors, not {_GIVEN!r} with one")
    return held[0]


def _bound(connection: socket.socket, seconds: float) -> None:
    """Bound every call on a blocking socket, `connect` with a full queue included."""
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(_SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(_SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end, from the kernel."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(_SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
