"""Files that take long to make and follow from their names: made once, whoever needs them first.

Several pytest processes and their ranks may ask at once: a lock for each file lets one of them make it, and it takes
its name when it is whole. They stay for the next run, so a name must be a hash of all that decides the content.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(tempfile.gettempdir()) / f"epee-tests-{os.getuid()}"


def is_made(name: str) -> bool:
    """Whether the file is there."""
    return (FOLDER / name).exists()


def made(name: str, make: Callable[[Path], object], is_awaited: bool = True) -> Path:
    """Return where the file `name` lies; `make(path)` has written it, now or earlier, here or elsewhere.

    Without `is_awaited` it may still be missing, when another process is making it.
    """
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    target = FOLDER / name
    if target.exists():
        return target
    with open(FOLDER / f"{name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if is_awaited else fcntl.LOCK_NB))
        except BlockingIOError:
            return target
        if not target.exists():
            temporary = FOLDER / f"{name}.{os.getpid()}"  # a process that is killed may leave a compiler writing to it
            make(temporary)
            temporary.rename(target)
    return target
