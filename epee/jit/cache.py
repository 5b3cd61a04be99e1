"""Compiled kernels on disk, one file per content hash, written so that nobody else's file is ever loaded.

    <folder>/<key>.cubin      32 bytes SHA-256 of the rest, then the cubin

The folder is ours (owner is the effective user, nobody else may write, neither it nor its parent is a symbolic link),
or it is not used and a private temporary folder serves this process. An entry is opened without following links,
checked for owner and mode, and its hash is compared; anything else counts as absent and is compiled again. Entries
are written to a temporary file, synced and renamed, so two jobs at once, or a crash, leave whole files only. When the
folder grows over its cap, the entries that were used least recently go.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path

from .. import env

_log = logging.getLogger(__name__)
_HASH_BYTES = 32
_STALE_S = 3600.0  # no write of a kernel takes as long


def cache_key(source: str, options: tuple[str, ...], version: str) -> str:
    """Return the name of a compiled text: SHA-256 over all that decides the result."""
    digest = hashlib.sha256()
    for part in (source, *options, version):
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


class CubinCache:
    """A folder of cubins. Never raises for what it finds on disk: a cache that cannot be used only costs time."""

    def __init__(self, folder: Path | None = None, cap_bytes: int | None = None) -> None:
        """Use `folder` (default: `EPEE_JIT_CACHE_DIR`, else the user's cache folder), at most `cap_bytes` large."""
        self.cap_bytes = env.get_int("EPEE_JIT_CACHE_BYTES") if cap_bytes is None else cap_bytes
        self.folder = default_folder() if folder is None else Path(os.path.abspath(folder))
        reason = _why_unusable(self.folder)
        if reason:
            private = Path(tempfile.mkdtemp(prefix="epee-jit-"))
            _log.warning("not using the kernel cache %s: %s; compiling into %s instead", self.folder, reason, private)
            weakref.finalize(self, _remove, private, os.getpid())  # at the latest when the process ends
            self.folder = private

    def load(self, key: str) -> bytes | None:
        """Return the cubin stored under `key`, or None when there is none that can be trusted."""
        path = self.folder / f"{key}.cubin"
        try:
            raw = _read(path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            _log.warning("cannot read %s: %s; compiling again", path, exc)
            return None
        if raw is None:
            _log.warning("%s is not a file of this user alone; compiling again", path)
            return None
        if hashlib.sha256(raw[_HASH_BYTES:]).digest() != raw[:_HASH_BYTES]:
            _log.warning("%s is damaged; compiling again", path)
            return None
        return raw[_HASH_BYTES:]

    def store(self, key: str, cubin: bytes) -> None:
        """Keep `cubin` under `key`; a full or read-only disk is logged and otherwise ignored."""
        temporary = None
        try:
            fd, temporary = tempfile.mkstemp(dir=self.folder, prefix=".new-")
            with os.fdopen(fd, "wb") as file:
                file.write(hashlib.sha256(cubin).digest() + cubin)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / f"{key}.cubin")
            self._trim()
        except OSError as exc:
            _log.warning("cannot keep a compiled kernel in %s: %s", self.folder, exc)
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)

    def _trim(self) -> None:
        entries = []
        for path in self.folder.glob(".new-*"):  # left by a writer that was killed
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.lstat().st_mtime > _STALE_S:
                    path.unlink()
        for path in self.folder.glob("*.cubin"):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue  # another job trimmed it
            entries.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.cap_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def default_folder() -> Path:
    """Return the folder that the environment names for compiled kernels, absolute; it may not exist yet."""
    named = env.get("EPEE_JIT_CACHE_DIR")
    folder = Path(str(named)) if named else Path(str(env.get("XDG_CACHE_HOME"))) / "epee"
    return Path(os.path.abspath(folder.expanduser()))


def _read(path: Path) -> bytes | None:
    """Return a file's bytes, or None when it is not ours alone; marks it as used."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not _is_ours(os.fstat(fd)):
            return None
        with contextlib.suppress(OSError):  # a read-only disk keeps no times of use
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


def _why_unusable(folder: Path) -> str:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        return why_not_ours(folder)
    except OSError as exc:
        return str(exc)


def why_not_ours(folder: Path) -> str:
    """Return why compiled kernels in an existing folder cannot be trusted, or "" when they can."""
    for path in (folder, folder.parent):
        if path.is_symlink():
            return f"{path} is a symbolic link"
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is not a folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""
