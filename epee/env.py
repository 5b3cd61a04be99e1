"""The one table of environment variables that epee reads.

Every variable has a name, a type, a default and a sentence; `get` parses and checks it, and names it when its value is
bad. No other module of the package reads the environment (a test compares the table with the sources).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import InvalidArgument, expected

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Variable:
    """One row of the table: `parse` turns the text into the value or raises `ValueError` with the rule."""

    name: str
    default: object
    parse: Callable[[str], object]
    doc: str


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


def _switch(text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true"):
        raise ValueError("must be 0, 1, false or true")
    return text.lower() in ("1", "true")


def _positive_seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError("must be a number of seconds above 0")
    return value


def _positive_bytes(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError("must be a number of bytes above 0")
    return value


def _log_level(text: str) -> str:
    if text not in ("info", "debug"):
        raise ValueError("must be info or debug")
    return text


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("must be a number of at least 0")
    return value


def _engine(text: str) -> str:
    if text not in ("tcp", "nixl"):
        raise ValueError("must be tcp or nixl")
    return text


def _way_to_share(text: str) -> str:
    if text not in ("pidfd", "scm", "ipc"):
        raise ValueError("must be pidfd, scm or ipc")
    return text


MAX_CPUS = 1 << 16  # numbers below it; no machine has more


def cpu_list(text: str) -> tuple[int, ...]:
    """Return the numbers in a list of CPUs as the kernel writes it: "0-3,8"; raises `ValueError` for any other text."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if (
            not first.isdecimal()
            or not last.isdecimal()
            or len(part) > 11
            or not 0 <= int(last) - int(first) < MAX_CPUS
        ):
            raise ValueError("must be a list of CPUs such as 0-3,8")
        numbers += range(int(first), int(last) + 1)
    return tuple(numbers)


TABLE: tuple[Variable, ...] = (
    Variable(
        "EPEE_TIMEOUT_S",
        "",
        _positive_seconds,
        "How long a call waits for a silent peer where neither it nor its group or buffer names a time-out; by default "
        "the `timeout` of `init_process_group`.",
    ),
    Variable(
        "EPEE_POISON",
        False,
        _flag,
        "1 fills receive memory with 0xFF before each use: stale rows show as NaN.",
    ),
    Variable(
        "EPEE_JIT_CACHE_DIR",
        "",
        str,
        "Folder of compiled kernels; by default `epee` in the user's cache folder.",
    ),
    Variable(
        "XDG_CACHE_HOME",
        "~/.cache",
        str,
        "The user's cache folder.",
    ),
    Variable(
        "EPEE_JIT_CACHE_BYTES",
        256 << 20,
        _positive_bytes,
        "Largest size of all compiled kernels; those used least recently are deleted.",
    ),
    Variable(
        "EPEE_JIT_COMPILE",
        True,
        _flag,
        "0 refuses to compile: a kernel that is not cached is an error.",
    ),
    Variable(
        "EPEE_STAGING_BYTES",
        16 << 20,
        _positive_bytes,
        "Size of each of a process group's four staging buffers: what a call moves without a private copy.",
    ),
    Variable(
        "EPEE_CUDA_SHARE",
        "",
        _way_to_share,
        "Forces one way to lend GPU memory: pidfd, scm or ipc; by default the first that works.",
    ),
    Variable(
        "EPEE_RUNTIME_DIR",
        "",
        str,
        "Folder in which joiners find this machine's jobs; by default `epee-UID` among the temporary files, or in "
        "/dev/shm.",
    ),
    Variable(
        "EPEE_TOKEN_FILE",
        "",
        str,
        "File of 32 bytes, readable by this user only, that is the secret of the job; by default rank 0 makes one.",
    ),
    Variable(
        "EPEE_REQUIRE_TOKEN_FILE",
        False,
        _flag,
        "1 refuses groups over several hosts whose token would go through the store: all ranks need EPEE_TOKEN_FILE.",
    ),
    Variable(
        "EPEE_LINK",
        "tcp",
        _engine,
        "Transport between hosts: tcp, or nixl (NIXL over UCX, with the extra `nixl`); the same on all ranks.",
    ),
    Variable(
        "EPEE_LINK_MAC",
        False,
        _flag,
        "1 authenticates payloads between hosts as well as headers, at 0.6 GB/s of a core; the same on all ranks.",
    ),
    Variable(
        "EPEE_PROXY_CPUS",
        "",
        cpu_list,
        "CPUs of this machine's proxies, as 0-3,8, one per process in turn; by default those of the NUMA node of the "
        "GPU's nearest NIC, or of the GPU.",
    ),
    Variable(
        "EPEE_HOST_IP",
        "",
        str,
        "Address under which ranks of other hosts reach this process; by default that of the route to the rendezvous.",
    ),
    Variable(
        "EPEE_OVER_HOSTS",
        False,
        _flag,
        "1 on all ranks: groups of one host are made as groups over several, so that other hosts can join.",
    ),
    Variable(
        "EPEE_HOST_TIMEOUT_S",
        10.0,
        _positive_seconds,
        "Seconds of silence of all processes of a host after which it is lost; the same on all ranks.",
    ),
    Variable(
        "EPEE_HOST_KEY",
        "",
        str,
        "For trials, with EPEE_TEST=1: ranks with different keys are separate hosts and share no memory.",
    ),
    Variable(
        "EPEE_TEST",
        False,
        _flag,
        "1 allows EPEE_HOST_KEY.",
    ),
    Variable(
        "EPEE_LOG",
        "",
        _log_level,
        "info or debug: epee's log goes to stderr, with rank and process; by default the program's logging decides.",
    ),
    Variable(
        "EPEE_AS_DEEP_EP",
        False,
        _flag,
        "1 makes `import deep_ep` find epee; set by `python -m epee.compat`.",
    ),
    Variable(
        "EPEE_AS_MOONCAKE",
        False,
        _flag,
        "1 makes `import mooncake` find epee; set by `python -m epee.compat`.",
    ),
    Variable(
        "MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE",
        True,
        _switch,
        "Mooncake's: `auto_deactivate_on_failure` of groups of its backends that are made without options.",
    ),
    Variable(
        "MOONCAKE_PG_AUTO_SYNC_ON_FAILURE",
        "",
        _switch,
        "Mooncake's: `auto_sync_on_failure` of such groups; by default as above. 1 with 0 above is refused.",
    ),
    Variable("MASTER_ADDR", "", str, "Set by torchrun; with MASTER_PORT it names the job for joiners."),
    Variable("MASTER_PORT", "", str, "See MASTER_ADDR."),
    Variable("WORLD_SIZE", 1, _count, "Hosts of a test script of DeepEP's (`deep_ep.utils.envs.init_dist`)."),
    Variable(
        "UCX_MODULES",
        "",
        str,
        "UCX's, with EPEE_LINK=nixl; unset and without EFA devices epee sets ^efa: processes with that module may "
        "crash at their end.",
    ),
    Variable("RANK", 0, _count, "Which of these hosts this is."),
)

_BY_NAME = {variable.name: variable for variable in TABLE}


def get(name: str) -> object:
    """Return the parsed value of `name`, or its default when it is unset or empty.

    Raises:
        InvalidArgument: the value breaks the variable's rule; the message names the variable.
    """
    variable = _BY_NAME[name]
    text = os.environ.get(name, "")
    if not text:
        return variable.default
    try:
        return variable.parse(text)
    except expected(ValueError) as exc:
        raise InvalidArgument(f"{name}: {exc}, got {text!r}; {variable.doc}") from exc


def get_float(name: str) -> float:
    """Return the variable as a float (see `get`)."""
    value = get(name)
    assert isinstance(value, float)
    return value


def get_seconds(name: str, default: float) -> float:
    """Return the variable as a number of seconds, or `default` where it is unset (see `get`)."""
    value = get(name)
    return value if isinstance(value, float) else default


def get_int(name: str) -> int:
    """Return the variable as an int (see `get`)."""
    value = get(name)
    assert isinstance(value, int)
    return value


def get_bool(name: str) -> bool:
    """Return the variable as a bool (see `get`)."""
    return bool(get(name))


def temporary_folders() -> list[str]:
    """Return the folders for temporary files, best first: the user's, if it is writable, and the one in memory.

    A container with a read-only root may have only the second one.
    """
    try:
        found = [tempfile.gettempdir()]
    except expected(OSError):  # none is writable
        found = []
    return [*found, SHARED_MEMORY]


def for_child(*python_path: Path) -> dict[str, str]:
    """Return this process's environment for a child, with `python_path` in front of its PYTHONPATH."""
    rest = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, python_path), rest]))}


def put(**values: str) -> None:
    """Set variables of this process, for later reads."""
    os.environ.update(values)


@contextmanager
def having(**values: str) -> Iterator[None]:
    """Set variables of this process for a block, for what other libraries read meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
