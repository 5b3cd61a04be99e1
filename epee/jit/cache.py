"""Compiled kernels on disk, one file per content hash, written so that a file of another user is never loaded.

    <folder>/<key>.cubin      32 bytes SHA-256 of key and cubin, then the cubin

The folder is ours (its owner is the effective user, no other user may write, neither it nor its parent is a symbolic
link, and no other user can replace it in its parent), or it is not used and a private temporary folder serves this
process. Missing folders on its path are made for this user alone. It is opened once and everything in it goes through
that descriptor, so a folder that is exchanged after the check does no harm. An entry is opened without following links,
checked for owner and mode, and its hash is compared; an entry that fails is ignored, and the kernel is compiled.
Entries are written to a temporary file, synced and renamed, so two jobs at once, or a crash, leave complete files only.
Who compiles a text holds a lock on a file named after its key meanwhile, which ends with the process (`claimed`).
When the folder grows over its cap, the least recently used entries are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from .. import env
from ..descriptors import Descriptor
from ..errors import expected, ignored

_log = logging.getLogger(__name__)
_HASH_BYTES = 32
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_STALE_S = 3600.0  # no write of a kernel takes as long


def cache_key(source: str, options: tuple[str, ...], version: str) -> str:
    """Return the name of a compiled text: SHA-256 over all inputs that determine the result."""
    digest = hashlib.sha256()
    for part in (source, *options, version):
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


class CubinCache:
    """A folder of cubins. Never raises because of files on disk: a cache that cannot be used only costs time."""

    def __init__(self, folder: Path | None = None, cap_bytes: int | None = None) -> None:
        """Use `folder` (default: `EPEE_JIT_CACHE_DIR`, else the user's cache folder), at most `cap_bytes` large."""
        self.cap_bytes = env.get_int("EPEE_JIT_CACHE_BYTES") if cap_bytes is None else cap_bytes
        self.folder = default_folder() if folder is None else Path(os.path.abspath(folder))
        try:
            self._fd = _make_and_open(self.folder)
        except expected(OSError) as exc:
            reason = exc.strerror if isinstance(exc, _NotOurs) else str(exc)
            private = Path(tempfile.mkdtemp(prefix="epee-jit-", dir=env.temporary_folders()[0]))
            _log.warning("not using the kernel cache %s: %s; compiling into %s instead", self.folder, reason, private)
            weakref.finalize(self, _remove, private, os.getpid())  # at the latest when the process ends
            self.folder = private
            self._fd = _make_and_open(private)
        weakref.finalize(self, os.close, self._fd)

    def load(self, key: str) -> bytes | None:
        """Return the cubin stored under `key`, or None when there is none that can be trusted."""
        path = self.folder / f"{key}.cubin"  # for messages
        try:
            raw = _read(path.name, self._fd)
        except expected(FileNotFoundError):
            return None
        except expected(OSError) as exc:
            _log.warning("cannot read %s: %s; compiling again", path, exc)
            return None
        if raw is None:
            _log.warning("%s is not a file of this user alone; compiling again", path)
            return None
        if _hash(key, raw[_HASH_BYTES:]) != raw[:_HASH_BYTES]:
            _log.warning("%s is damaged; compiling again", path)
            return None
        return raw[_HASH_BYTES:]

    def store(self, key: str, cubin: bytes) -> None:
        """Keep `cubin` under `key`; a full or read-only disk is logged and otherwise ignored."""
        temporary = f".new-{secrets.token_hex(8)}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=self._fd)
            with os.fdopen(fd, "wb") as file:
                file.write(_hash(key, cubin) + cubin)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, f"{key}.cubin", src_dir_fd=self._fd, dst_dir_fd=self._fd)
            self._trim()
        except expected(OSError) as exc:
            _log.warning("cannot keep a compiled kernel in %s: %s", self.folder, exc)
            with ignored(OSError):
                os.unlink(temporary, dir_fd=self._fd)

    @contextlib.contextmanager
    def claimed(self, key: str) -> Iterator[bool]:
        """Whether nobody else compiles the text of a key, so that this process may in the block.

        The file is removed by its holder. Who has opened it before, and locks it after that, finds the entry. True also
        where nothing can be locked: then a text may be compiled twice.
        """
        name, claim, is_held, is_mine = f".claim-{key[:32]}", None, False, True
        try:
            claim = Descriptor(os.open(name, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, dir_fd=self._fd))
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = True
        except expected(OSError) as exc:
            is_mine = not isinstance(exc, BlockingIOError)
        try:
            yield is_mine
        finally:
            if is_held:
                with ignored(OSError):
                    os.unlink(name, dir_fd=self._fd)
            if claim is not None:
                claim.close()

    def _trim(self) -> None:
        entries = []
        for name in os.listdir(self._fd):
            with ignored(FileNotFoundError):  # another job trimmed it
                status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                if name.endswith(".cubin"):
                    entries.append((status.st_mtime, status.st_size, name))
                elif name.startswith((".new-", ".claim-")) and time.time() - status.st_mtime > _STALE_S:
                    os.unlink(name, dir_fd=self._fd)  # left by a writer that was killed
        total = sum(size for _, size, _ in entries)
        for _, size, name in sorted(entries):
            if total <= self.cap_bytes:
                break
            with ignored(FileNotFoundError):
                os.unlink(name, dir_fd=self._fd)
            total -= size


def default_folder() -> Path:
    """Return the folder that the environment names for compiled kernels, absolute; it may not exist yet."""
    named = env.get("EPEE_JIT_CACHE_DIR")
    folder = Path(str(named)) if named else Path(str(env.get("XDG_CACHE_HOME"))) / "epee"
    return Path(os.path.abspath(folder.expanduser()))


def _hash(key: str, cubin: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + cubin).digest()


def _read(name: str, folder_fd: int) -> bytes | None:
    """Return a file's bytes, or None when it is not ours alone; marks it as used."""
    fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=folder_fd)
    try:
        if not _is_ours(os.fstat(fd)):
            return None
        with ignored(OSError):  # a read-only disk stores no times of use
            os.utime(fd)
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read()
    finally:
        os.close(fd)


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves its parent's folder alone
        shutil.rmtree(folder, ignore_errors=True)


class _NotOurs(OSError):
    """A folder cannot be trusted; `strerror` says why."""


def _make_and_open(folder: Path) -> int:
    """Return a descriptor of the folder, which is made if it does not exist; `OSError` when it cannot be used."""
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
    reason = why_not_ours(folder)
    if reason:
        raise _NotOurs(0, reason)
    with Descriptor(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)) as held:
        reason = _why_not_private(folder, os.fstat(held))  # it may differ from the one that was checked
        if reason:
            raise _NotOurs(0, reason)
    return held.keep()


def why_not_ours(folder: Path) -> str:
    """Return the reason for which compiled kernels in an existing folder cannot be trusted, or "" when they can."""
    for path in (folder, folder.parent):
        if path.is_symlink():
            return f"{path} is a symbolic link"
    return _why_not_private(folder, folder.lstat()) or _why_exchangeable(folder.parent)


def _why_not_private(folder: Path, status: os.stat_result) -> str:
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is not a folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _why_exchangeable(parent: Path) -> str:
    """Return the means by which another user could replace a folder in `parent`; "" when there are none."""
    status = parent.lstat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"its parent {parent} belongs to user {status.st_uid}"
    by_group = status.st_mode & 0o020 and status.st_gid != os.getegid()  # a user's own group often has no other member
    if (by_group or status.st_mode & 0o002) and not status.st_mode & stat.S_ISVTX:
        return f"others may write to its parent {parent} (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""
