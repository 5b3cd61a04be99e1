"""The folder of a job: a new process finds the others and the job's secret there, and no other user can read it.

    <runtime folder>/job-3-<key>-<host>-<job id>/   0700, ours; every process of the job holds a shared `flock` on it
        token                                0600, 32 random bytes, made by rank 0 (unless EPEE_TOKEN_FILE names one)
        home                                 0600, what a joiner must know of the first group, written by rank 0
        <slot>-<nonce>                       0600, the socket of one process

A job over several hosts has a folder on each of them, with the key of the host in its name and the same job id and
token. The first process on a host makes it (`enter`); the hosts may even share a file system.

Writers and readers: rank 0 makes the folder, each process its own socket; others only connect. Nothing is trusted for
its name: the folder and the runtime folder must belong to this user, be closed to all others and be no links, and so
must the token. Paths are opened once; everything below goes through that descriptor, so a folder that is exchanged
later does no harm.

Ordering: the folder is filled under another name and renamed when it is complete. A process that gets the exclusive
lock knows that no process of the job lives (the kernel drops a dead process's lock) and removes the folder; the last
process that leaves does so as well, and each new job removes the folders of dead jobs. A crash leaves the folder to
these. The lock works across PID namespaces, where a number in a file would not, and lies on the folder itself: it
cannot be lost while the folder exists, and systemd's cleaner of temporary files skips locked folders.

The folder serves discovery only. Log-outs and cleaners may remove it, so a running job does not need it: a known
process is reached through its own descriptor of its socket (`Door`), as its memory is, by `/proc/PID/fd/FD` and no
name. This works for members and for processes that wait to become one, costs nothing before there is something to send,
and a broken connection can be made again; permanent connections would not have these properties. Without the folder new
processes cannot find the job; nothing else is affected (`is_there`). The runtime folder lies among the temporary files
and not in XDG_RUNTIME_DIR, which is removed when the user logs out; in /dev/shm where no other temporary folder can be
written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ... import env
from ...descriptors import Descriptor
from ...errors import (
    AuthError,
    EpeeError,
    InvalidArgument,
    InvalidState,
    ProtocolError,
    ResourceError,
    expected,
    ignored,
    shortage,
)
from ..process.machine import KEY_DIGITS, own_host_key
from .auth import JOB_ID_BYTES, TOKEN_BYTES, Token
from .wire import MAX_MEMBERS, NONCE_BYTES

_JOB = re.compile(rf"job-3-([0-9a-f]{{16}})-([0-9a-f]{{{KEY_DIGITS}}})-([0-9a-f]{{{2 * JOB_ID_BYTES}}})")
_SOCKET = re.compile(rf"(\d{{1,3}})-([0-9a-f]{{{2 * NONCE_BYTES}}})")
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_UNFINISHED_S = 60.0  # an older incomplete folder was left by a process that died while it made it
MAX_HOME_BYTES = 1024
_NUM_TRIES = 20  # to open or make a folder that others make and remove
_NUM_NAMES = 16  # of a folder for jobs, where the first names are taken
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # the process lacks a resource: another folder is no remedy
_LOOK_S = 1.0  # how long a process may hold the exclusive lock to check whether the job lives


def runtime_folder() -> Path:
    """Return the folder that holds this user's new jobs, which exists then; see `runtime_folders`."""
    return next(runtime_folders())


def runtime_folders() -> Iterator[Path]:
    """Yield the folders that can hold this user's jobs, best first, each made just before it is yielded.

    It is EPEE_RUNTIME_DIR alone, where that is set. Else it is `epee-UID` among the temporary files, and in /dev/shm.
    Where that name is taken (another user's folder, one that is open to others, a link, a file) the next of
    `epee-UID-2`, `epee-UID-3` ... is used, so that other users cannot stop this one's jobs.

    Raises:
        AuthError: no name is left, and one is taken by something that is not ours alone.
        ResourceError: none can be made.
    """
    refusals: list[OSError] = []
    for paths in _candidates():
        for path in paths:
            try:
                path.mkdir(mode=0o700, exist_ok=True)
                os.close(_open_private(path))
            except expected(OSError) as exc:
                if exc.errno in _SHORT:
                    raise shortage(f"cannot make the folder {path}", exc) from exc
                refusals.append(exc)
            else:
                yield path.resolve()
                break
    first = next((exc for exc in refusals if isinstance(exc, EpeeError)), None)
    if first is not None:
        raise first
    told = f": {refusals[0]}" if refusals else " any more"
    raise ResourceError(
        f"cannot make a folder for jobs{told}; let EPEE_RUNTIME_DIR name one that can be written"
    ) from (refusals[0] if refusals else None)


def _candidates() -> list[list[Path]]:
    """Return the paths of `runtime_folders`, grouped by parent folder, whether they exist or not."""
    named = str(env.get("EPEE_RUNTIME_DIR"))
    if named:
        return [[Path(named)]]
    own = f"epee-{os.geteuid()}"
    names = [own, *(f"{own}-{number}" for number in range(2, 1 + _NUM_NAMES))]
    return [[Path(base) / name for name in names] for base in env.temporary_folders()]


def _existing_folders() -> Iterator[Path]:
    """Yield the folders that hold jobs of this user now, including those that are full."""
    if env.get("EPEE_RUNTIME_DIR"):
        yield runtime_folder()
        return
    for path in (path for paths in _candidates() for path in paths):
        with ignored(OSError):  # it does not exist, or is not ours
            os.close(_open_private(path))
            yield path.resolve()


def job_key(name: str) -> str:
    """Return the part of a job's folder name that encodes `name`, by which a joiner finds it without a store."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def socket_name(slot: int, nonce: bytes) -> str:
    """Return the name of a process's socket in the folder of its job."""
    return f"{slot}-{nonce.hex()}"


def job_id_of(path: str) -> bytes:
    """Return the job id from the path of a job's folder on any host; `ProtocolError` if it is no such path."""
    match = _JOB.fullmatch(Path(path).name)
    if match is None:
        raise ProtocolError(f"{path!r} is not the folder of a job; does another job use this store?")
    return bytes.fromhex(match[3])


def find_jobs(name: str | None = None) -> list[Path]:
    """Return the folders on this host of this user's living jobs made as `name` (any, if None), the youngest first."""
    found, host = [], own_host_key()
    for path in (path for folder in _existing_folders() for path in folder.iterdir()):
        match = _JOB.fullmatch(path.name)
        if match is None or match[2] != host or (name is not None and match[1] != job_key(name)):
            continue
        with ignored(OSError):  # it is being removed, or is not ours
            if not _visit(path, is_removed=False):
                found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


class Door:
    """A process's listening socket, and the descriptor by which others find it when its name has been removed.

    Attributes:
        listener: non-blocking.
        name: in the folder of the job.
        fd: of the socket's file; -1 when closed.
    """

    def __init__(self, listener: socket.socket, name: str, fd: int) -> None:
        self.listener = listener
        self.name = name
        self.fd = fd

    def close(self) -> None:
        """Close both; idempotent."""
        self.listener.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def connect_door(pid: int, fd: int) -> socket.socket:
    """Return a non-blocking socket connected to the `Door` with descriptor `fd` in process `pid`, or raise `OSError`.

    The pid may belong to another process by now: the handshake shows that (`auth.py`).
    """
    return _connect(f"/proc/{pid}/fd/{fd}")


class JobDirectory:
    """A process's hold on the folder of its job. Make one with `create` or `open`.

    Attributes:
        path: of the folder, to be sent to other processes; it is no secret.
        host: key of the host that the folder is for.
        job_id: `JOB_ID_BYTES` random bytes, the same on all hosts of the job.
        token: the job's secret.
    """

    def __init__(self, path: Path, folder_fd: int) -> None:
        match = _JOB.fullmatch(path.name)
        if match is None:
            raise ProtocolError(f"{path} is not the folder of a job")
        self.path = path
        self.host = match[2]
        self.job_id = bytes.fromhex(match[3])
        self.token = _read_token(folder_fd)
        self._folder_fd = folder_fd  # holds the lock
        self._sockets: set[str] = set()

    @classmethod
    def create(cls, name: str = "") -> JobDirectory:
        """Make the folder of a new job, and remove those of jobs that have died.

        Args:
            name: shared by the processes of the job before they meet (address and port of the rendezvous).
        Raises:
            AuthError: the runtime folder is not ours alone.
            ResourceError: it cannot be written.
        """
        return cls._make(name, secrets.token_bytes(JOB_ID_BYTES), secrets.token_bytes(TOKEN_BYTES))

    @classmethod
    def enter(cls, name: str, job_id: bytes, secret: bytes) -> JobDirectory:
        """Open this host's folder of a job that was made on another host; make it if it does not exist.

        Args:
            name: as for `create`.
            job_id, secret: of the job, `JOB_ID_BYTES` and `TOKEN_BYTES` bytes; EPEE_TOKEN_FILE comes before `secret`.
        Raises:
            AuthError: as `create`; or the existing folder holds another secret.
            InvalidArgument: one of them is of another size.
            ResourceError: as `create`.
        """
        if len(job_id) != JOB_ID_BYTES:
            raise InvalidArgument(f"a job's id has {JOB_ID_BYTES} bytes, got {len(job_id)}")
        token = token_of_file() or Token(secret)
        own_name = _folder_name(name, job_id)
        for _ in range(_NUM_TRIES):
            for folder in _existing_folders():
                with ignored(ResourceError):  # no process has made it, or the last one has just left it
                    return cls.open(folder / own_name)._checked(token)
            with ignored(FileExistsError):  # another process was faster
                return cls._make(name, job_id, secret)._checked(token)
        raise ResourceError(
            f"the folder {own_name} is made and removed again and again; do the processes of its job keep ending?"
        )

    def _checked(self, token: Token) -> JobDirectory:
        if self.token.derive(b"same", b"") != token.derive(b"same", b""):
            self.forget()
            raise AuthError(f"{self.path} holds another secret than this job's; remove it or set EPEE_RUNTIME_DIR")
        return self

    @classmethod
    def _make(cls, name: str, job_id: bytes, secret: bytes) -> JobDirectory:
        """Make a folder in the first runtime folder that accepts it; `FileExistsError` where it exists already."""
        refusal: ResourceError | None = None
        try:
            for parent in runtime_folders():
                try:
                    return cls._make_in(parent, name, job_id, secret)
                except expected(ResourceError) as exc:  # the folder is full, or cannot be written any more
                    if getattr(exc.__cause__, "errno", 0) in _SHORT:
                        raise
                    refusal = refusal or exc
        except expected(ResourceError) as exc:
            raise refusal or exc from exc.__cause__
        raise AssertionError("`runtime_folders` raises where it yields no more")

    @classmethod
    def _make_in(cls, parent: Path, name: str, job_id: bytes, secret: bytes) -> JobDirectory:
        remove_stale(parent)
        path = parent / _folder_name(name, job_id)
        unfinished = parent / f"new-{secrets.token_hex(JOB_ID_BYTES)}"
        try:
            with contextlib.ExitStack() as undo:
                unfinished.mkdir(mode=0o700)
                undo.callback(shutil.rmtree, unfinished, ignore_errors=True)  # an exception may come after the rename
                folder_fd = _open_private(unfinished)
                undo.callback(os.close, folder_fd)
                _lock_shared(folder_fd)
                if env.get("EPEE_TOKEN_FILE"):
                    os.close(_make(folder_fd, "no-token", b""))  # a rename replaces an empty folder
                else:
                    os.close(_make(folder_fd, "token", secret))
                made = cls(path, folder_fd)  # reads the token, before others can find the folder
                try:
                    unfinished.rename(path)
                except expected(OSError) as exc:
                    if exc.errno in (errno.EEXIST, errno.ENOTEMPTY):
                        raise FileExistsError(exc.errno, "another process has made it") from exc
                    raise
                undo.pop_all()
                return made
        except expected(OSError) as exc:
            if isinstance(exc, EpeeError | FileExistsError):
                raise
            raise ResourceError(f"cannot make {path}: {exc}; let EPEE_RUNTIME_DIR name another folder") from exc

    @classmethod
    def open(cls, path: str | Path) -> JobDirectory:
        """Open the folder that `create` made in another process.

        Raises:
            AuthError: it is not ours alone, or its token is not.
            ProtocolError: it is no job's folder.
            ResourceError: it does not exist: the job has ended, or it was removed.
        """
        path = Path(path)
        with contextlib.ExitStack() as undo:
            try:
                folder_fd = _open_private(path)
                undo.callback(os.close, folder_fd)
                _lock_shared(folder_fd)
                if not _is_at(path, folder_fd):
                    raise FileNotFoundError(errno.ENOENT, "it was removed just now")
                opened = cls(path, folder_fd)
            except expected(OSError) as exc:
                if isinstance(exc, EpeeError):
                    raise
                if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    raise shortage(f"cannot open {path}", exc) from exc
                raise ResourceError(
                    f"the job has ended, or its folder {path} was removed ({exc.strerror}); start the job again"
                ) from exc
            undo.pop_all()
            return opened

    def is_there(self) -> bool:
        """Return whether others can still find the job: its folder is still at its path."""
        return _is_at(self.path, self._fd())

    def listen(self, slot: int, nonce: bytes, backlog: int) -> Door:
        """Return a listening socket with a name in the folder.

        Raises:
            ResourceError: no descriptor is left, or the folder was removed.
        """
        name = socket_name(slot, nonce)
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        except expected(OSError) as exc:
            raise shortage(f"cannot listen in {self.path}", exc) from exc
        try:
            listener.bind(self._address(name))
            self._sockets.add(name)
            os.chmod(name, 0o600, dir_fd=self._fd())  # no other user can enter the folder anyway
            listener.listen(backlog)
            fd = os.open(name, os.O_PATH | _FLAGS, dir_fd=self._fd())
        except expected(OSError) as exc:
            listener.close()
            raise ResourceError(f"cannot listen in {self.path}: {exc}; is the folder still there?") from exc
        return Door(listener, name, fd)

    def connect(self, name: str) -> socket.socket:
        """Return a non-blocking socket that is connected, or raise `OSError` at once (`EAGAIN`: its queue is full)."""
        if not _SOCKET.fullmatch(name):
            raise ProtocolError(f"{name!r} is no name of a socket in a job's folder")
        return _connect(self._address(name))

    def write_home(self, content: bytes) -> None:
        """Write a note of at most `MAX_HOME_BYTES` for later joiners; once per job.

        Raises:
            ResourceError: no descriptor or room is left, or the folder was removed.
        """
        if len(content) > MAX_HOME_BYTES:
            raise InvalidArgument(f"the note for joiners must have at most {MAX_HOME_BYTES} bytes, got {len(content)}")
        try:
            os.close(_make(self._fd(), "home.new", content))
            os.rename("home.new", "home", src_dir_fd=self._fd(), dst_dir_fd=self._fd())
        except expected(OSError) as exc:
            raise shortage(f"cannot leave a note for joiners in {self.path}", exc) from exc

    def read_home(self) -> bytes:
        """Return the note; empty when there is none. The reader has to check it.

        Raises:
            AuthError: the file is not this user's alone.
        """
        try:
            fd = os.open("home", os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=self._fd())
        except expected(FileNotFoundError):
            return b""
        try:
            _require_private(os.fstat(fd), self.path / "home")
            return os.read(fd, MAX_HOME_BYTES)
        finally:
            os.close(fd)

    def sockets(self) -> list[tuple[int, bytes, str]]:
        """Return (slot, nonce, name) of each socket in the folder, including those of dead processes; slots
        ascending."""
        found: list[tuple[int, bytes, str]] = []
        try:
            names = os.listdir(self._fd())
        except expected(FileNotFoundError):  # the folder was removed
            return found
        for name in names:
            match = _SOCKET.fullmatch(name)
            if match and int(match[1]) < MAX_MEMBERS:
                found.append((int(match[1]), bytes.fromhex(match[2]), name))
        return sorted(found)

    def remove(self, name: str) -> None:
        """Remove a socket from the folder: one's own, or that of a process that is proved dead."""
        if _SOCKET.fullmatch(name):
            with ignored(FileNotFoundError):
                os.unlink(name, dir_fd=self._fd())
            self._sockets.discard(name)

    def leave(self) -> None:
        """Remove one's own sockets; the last process of the job removes the folder. Idempotent."""
        if self._folder_fd < 0:
            return
        for name in list(self._sockets):
            self.remove(name)
        with ignored(OSError):  # another process still uses it, or the folder was removed meanwhile
            fcntl.flock(self._folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(self._folder_fd)
            self.path.rmdir()
        self.forget()

    def forget(self) -> None:
        """Close the descriptor only: for a forked child, to which the folder does not belong."""
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
        self._folder_fd = -1

    def _fd(self) -> int:
        if self._folder_fd < 0:
            raise InvalidState(f"the folder {self.path} was left")
        return self._folder_fd

    def _address(self, name: str) -> str:
        return f"/proc/self/fd/{self._fd()}/{name}"  # short enough for a socket, however long the path is


def _folder_name(name: str, job_id: bytes) -> str:
    return f"job-3-{job_key(name)}-{own_host_key()}-{job_id.hex()}"


def remove_stale(parent: Path) -> int:
    """Remove the folders in `parent` of jobs whose processes have all ended; return how many."""
    removed = 0
    for path in parent.iterdir():
        if _JOB.fullmatch(path.name) or path.name.startswith("new-"):
            with ignored(OSError):  # it is not ours, or another process removes it
                removed += _visit(path, is_removed=True)
    return removed


def _visit(path: Path, is_removed: bool) -> bool:
    """Return whether the job of `path` is dead; if so, remove its folder where `is_removed` is set."""
    with contextlib.ExitStack() as undo:
        folder_fd = _open_private(path)
        undo.callback(os.close, folder_fd)
        if path.name.startswith("new-") and time.time() - os.fstat(folder_fd).st_mtime < _UNFINISHED_S:
            return False
        try:
            fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if is_removed:
            _empty(folder_fd)
            path.rmdir()
        return True


def _lock_shared(folder_fd: int) -> None:
    """Hold the folder together with others; `OSError` while it is being removed."""
    deadline = time.monotonic() + _LOOK_S
    while True:
        try:
            fcntl.flock(folder_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:  # a process checks whether the job lives, which takes microseconds
            if time.monotonic() > deadline:
                raise
            os.sched_yield()


def _is_at(path: Path, folder_fd: int) -> bool:
    """Return whether `path` names the folder that is open as `folder_fd`."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(folder_fd))
    except expected(OSError):
        return False


def _connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _empty(folder_fd: int) -> None:
    """Remove the files that jobs put into their folders; other files stay, and then so does the folder."""
    for name in os.listdir(folder_fd):
        if name in ("token", "no-token", "home", "home.new") or _SOCKET.fullmatch(name):
            with ignored(FileNotFoundError):
                os.unlink(name, dir_fd=folder_fd)


def _open_private(path: Path) -> int:
    """Open a folder that belongs to this user and is closed to others; `AuthError` if it is another."""
    try:
        held = Descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS))
    except expected(NotADirectoryError, PermissionError) as exc:
        raise AuthError(f"{path} is a link, no folder, or another user's; remove it or set EPEE_RUNTIME_DIR") from exc
    with held:
        _require_private(os.fstat(held), path)
    return held.keep()


def _require_private(status: os.stat_result, path: Path) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        raise AuthError(
            f"{path} must belong to user {os.geteuid()} and be closed to others, but it is user {status.st_uid}'s with "
            f"mode {mode:04o}; change it, or set EPEE_RUNTIME_DIR"
        )


def _make(folder_fd: int, name: str, content: bytes) -> int:
    """Make a file that only this user can read, with `content`; return its descriptor."""
    with Descriptor(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=folder_fd)) as held:
        os.fchmod(held, 0o600)
        if os.write(held, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return held.keep()


def token_of_file() -> Token | None:
    """Return the token of EPEE_TOKEN_FILE; None where it names none.

    Raises:
        AuthError, InvalidArgument: it is no file of this user's alone, or of another size.
    """
    return _read_token(-1) if env.get("EPEE_TOKEN_FILE") else None


def _read_token(folder_fd: int) -> Token:
    """Read the job's token from EPEE_TOKEN_FILE or from its folder."""
    named = str(env.get("EPEE_TOKEN_FILE"))
    path = Path(named or "token")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=None if named else folder_fd)
    except expected(OSError) as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise shortage(f"cannot read the job's token {path}", exc) from exc
        raise AuthError(f"cannot read the job's token {path}: {exc}; it must be a file of this user, no link") from exc
    try:
        status = os.fstat(fd)
        _require_private(status, path)
        if not stat.S_ISREG(status.st_mode) or status.st_size != TOKEN_BYTES:
            raise InvalidArgument(f"the token {path} must be a file of {TOKEN_BYTES} bytes, got {status.st_size}")
        return Token(os.read(fd, TOKEN_BYTES))
    finally:
        os.close(fd)
