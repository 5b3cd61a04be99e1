"""All exceptions that epee raises, in one tree.

A message states name, rule, value and remedy; a run-time failure adds op, rank, peer, seq and elapsed time (`context`
below formats them, so that they always look the same). The classes also derive from the built-in exception that a
caller would expect (`ValueError`, `TimeoutError`, `PermissionError`), and from `RuntimeError` so that code written for
torch's own backends catches them.

    EpeeError (RuntimeError)
    ├── InvalidArgument (ValueError)       an argument breaks a rule
    ├── InvalidState                       the call does not fit the object's state
    │   └── SlotTakenError                 the rank is another process's
    ├── StaleHandleError                   a handle of another buffer or of an earlier epoch
    ├── MismatchError                      the ranks disagree; raised on all of them
    ├── UnsupportedError                   the feature does not exist here
    ├── CompileError                       a kernel did not compile
    ├── ResourceError                      the system refused memory, a descriptor or a permission
    ├── ProtocolError                      a peer or a file sent invalid data
    ├── AuthError (PermissionError)        a peer could not prove that it belongs to the job
    ├── CommTimeoutError (TimeoutError)    a peer that is not known to be dead stayed silent
    ├── AbortedError                       another thread ended the group or buffer
    ├── ForkError                          used in a forked child
    └── PeerError                          another rank cannot take part
        ├── RankFailedError                it is proved dead
        ├── EvictedError                   this process was evicted
        └── NoQuorumError                  too few members can be reached to agree on a view

All of them can be imported from `epee`. Names and fields are API.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)

_DOCTOR = "epee doctor --pid"


class EpeeError(RuntimeError):
    """Base of all exceptions that epee raises itself.

    Attributes:
        source: the group or buffer whose call failed, for example "group default_pg"; empty where none is known. It is
            part of the text.
    """

    source = ""

    def __str__(self) -> str:
        text = super().__str__()  # the arguments stay unchanged: pickling keeps them
        return f"{text} [{self.source}]" if self.source and f"[{self.source}]" not in text else text


class InvalidArgument(EpeeError, ValueError):
    """An argument breaks a rule; nothing was sent and the object works as before."""


class InvalidState(EpeeError):
    """The call does not fit the object's state: closed, re-entered, used twice."""


class SlotTakenError(InvalidState):
    """A process requested a rank that another process holds, or has just got."""


class StaleHandleError(EpeeError):
    """A handle of another buffer, of an earlier epoch or of a closed buffer."""


class MismatchError(EpeeError):
    """The ranks of one collective call disagree; raised on every one of them, all continue."""


class UnsupportedError(EpeeError):
    """The requested feature does not exist here; the message names the alternatives."""


class CompileError(EpeeError):
    """A kernel did not compile; carries the command and the log."""


class ResourceError(EpeeError):
    """The system refused memory, a file descriptor or a permission."""


class ProtocolError(EpeeError):
    """A peer or a file sent invalid data; it was not used."""


class AuthError(EpeeError, PermissionError):
    """A peer could not prove that it belongs to the job."""


class CommTimeoutError(EpeeError, TimeoutError):
    """A peer that is not known to be dead stayed silent for too long.

    The text of one that ends a call ends with the command that shows the state of all ranks. It may be run on this host
    while a process of the job lives; `--pid` takes any of them.

    Attributes:
        ranks: the silent ranks, ascending.
        pid: the process that raised it; 0 where there is no job to inspect yet.
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), *, has_job: bool | None = None) -> None:
        """`has_job`: whether there is a job to inspect; None: if there are silent ranks."""
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.pid = os.getpid() if has_job or (has_job is None and ranks) else 0

    def __str__(self) -> str:
        text = super().__str__()
        if not self.pid or _DOCTOR in text:
            return text
        return f"{text}; to see who waits for whom, run: {_DOCTOR} {self.pid}"


class AbortedError(EpeeError):
    """The call was ended by `abort()`, `close()` or `destroy_process_group()` in another thread."""


class ForkError(EpeeError):
    """The object was made before a fork and is used in the child."""


class PeerError(EpeeError):
    """Another rank cannot take part.

    Attributes:
        ranks: the ranks concerned, ascending.
        op: the operation that met the failure.
        seq: its sequence number in the group.
        epoch: the epoch of the view in which it ran.
        cause: the observed cause, in words.
    """

    def __init__(
        self,
        message: str,
        ranks: Sequence[int] = (),
        op: str = "",
        seq: int = -1,
        epoch: int = 0,
        cause: str = "",
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.op = op
        self.seq = seq
        self.epoch = epoch
        self.cause = cause


class RankFailedError(PeerError):
    """A rank is proved dead."""


class EvictedError(PeerError):
    """This process was evicted from the group; it may only come back by joining again."""


class NoQuorumError(PeerError):
    """This process cannot reach enough members to agree on a view."""


def is_own(exc: BaseException) -> bool:
    """Return whether an exception is an `EpeeError` that epee's own code has raised.

    Anything else that comes out of a call is an interrupt, of whatever class: an exception of a signal handler, which
    may be an `EpeeError` too, or a `MemoryError` or `RecursionError`.
    """
    return isinstance(exc, EpeeError) and not is_of_handler(exc)


def is_of_handler(exc: BaseException) -> bool:
    """Return whether an exception comes from a signal handler in Python, and not from the code that it interrupts.

    The frame of a handler stands in the traceback directly behind the interrupted frame, which is its argument. A
    `StopIteration` that a handler raises inside a generator leaves it as a `RuntimeError` (PEP 479).
    """
    found = [exc]
    if isinstance(exc, RuntimeError) and isinstance(exc.__cause__, StopIteration):
        found.append(exc.__cause__)
    return any(
        _is_handler(frame, interrupted)
        for one in found
        for (interrupted, _), (frame, _) in itertools.pairwise(traceback.walk_tb(one.__traceback__))
    )


def _is_handler(frame: FrameType, interrupted: FrameType) -> bool:
    code = frame.f_code
    if code.co_filename.startswith(_FOLDER):
        return False
    values = frame.f_locals
    for value in list(values.values()):
        if value is interrupted or (type(value) is tuple and any(each is interrupted for each in value)):
            return True
    if all(name in values for name in code.co_varnames[: code.co_argcount]):
        return False
    handlers = map(signal.getsignal, range(1, signal.NSIG))  # it has deleted arguments
    return any(getattr(handler, "__code__", None) is code for handler in handlers)


def expected(*kinds: type[_Error]) -> tuple[type[_Error], ...]:
    """Return the classes that an `except` clause names; none while the exception is a signal handler's.

    `except expected(OSError):` leaves a handler's `TimeoutError` to the caller of the interrupted call. The interpreter
    may raise a `RecursionError` at any line, so it is no `RuntimeError` here: it is expected only where it is named.
    """
    exc = sys.exc_info()[1]
    is_too_deep = isinstance(exc, RecursionError) and RecursionError not in kinds
    return () if is_too_deep or (exc is not None and is_of_handler(exc)) else kinds


@contextlib.contextmanager
def ignored(*kinds: type[BaseException]) -> Iterator[None]:
    """Suppress exceptions as `contextlib.suppress`, but not those of signal handlers."""
    try:
        yield
    except expected(*kinds):
        pass


_FOLDER = is_own.__code__.co_filename.removesuffix("errors.py")


def named(error: BaseException, source: str) -> None:
    """Record the group or buffer in the error of a call that failed between ranks, unless one is recorded already."""
    if isinstance(error, (MismatchError, CommTimeoutError, AbortedError, PeerError)) and not error.source:
        error.source = source


def context(op: str, **facts: object) -> str:
    """Format the values of a run-time failure: `dispatch (rank=0, peer=2, seq=17, waited 10.0 s)`.

    A float named `elapsed` is written as `waited ... s`; `None` values are left out.
    """
    parts = []
    for name, value in facts.items():
        if value is None:
            continue
        parts.append(f"waited {value:.1f} s" if name == "elapsed" else f"{name}={value}")
    return f"{op} ({', '.join(parts)})" if parts else op


_REMEDIES = {
    errno.EMFILE: "raise the limit on descriptors (ulimit -n)",
    errno.ENFILE: "the machine has no descriptor left (fs.file-max)",
    errno.ENOMEM: "free memory",
    errno.ENOSPC: "free memory",
    errno.EPERM: "the ranks must run as one user, dumpable, in one PID namespace",
    errno.EACCES: "the ranks must run as one user, dumpable, in one PID namespace",
}


_FILTERED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


def shortage(what: str, exc: OSError, system_call: str = "") -> ResourceError:
    """Return the error for a refusal of the system to this process; it names the refusal and a remedy.

    Args:
        what: the operation that is not possible.
        exc: the system's error.
        system_call: one that needs no permission, so that only a filter, or an old kernel, refuses it.
    """
    remedy = _REMEDIES.get(exc.errno or 0, "see what the system says of it")
    if system_call and exc.errno in _FILTERED:
        remedy = (
            f"a filter refuses the system call {system_call} (the seccomp profile of an old Docker, gVisor), or the "
            "kernel does not have it; allow it in the profile of the container"
        )
    return ResourceError(f"{what}: {exc}; {remedy}")
