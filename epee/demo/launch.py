"""Start of the ranks, their messages, and their end in every case.

Each rank has a pipe to the parent and writes messages into it; the last one reports how it ended. A thread in each rank
waits for the end of the parent, for any reason, and ends the rank: none outlives its parent. Ctrl-C reaches the parent
only: ranks are created with SIGINT blocked, and the parent kills them. They hold nothing that outlives a process
(memory is anonymous, sockets are closed by the kernel), so that is a clean end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple, cast

from ..errors import RankFailedError

# Imported once, before the ranks are forked. The optimiser imports torch._dynamo at its first use: 1.2 s a rank.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "numpy", "epee", "epee.demo.rank"]
_SILENT_DEATH_S = 0.5  # how long a death without a message may lag behind the peers' reports of it
_GRACE_S = 1.0
Message = dict[str, Any]
Send = Callable[[Message], None]


class _Rank(NamedTuple):
    number: int
    process: ForkServerProcess
    is_mortal: bool  # its death is no failure


class Ranks(AbstractContextManager["Ranks"]):
    """Processes that call `function(rank, send, *arguments)`, imported by its name; none is left after the block."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._ranks: dict[Connection, _Rank] = {}

    def start(self, number: int, *arguments: object, is_mortal: bool = False) -> None:
        """Start one rank."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(theirs, self._function, number, arguments), daemon=True)
        old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the rank and the fork server
        try:
            process.start()
            self._ranks[ours] = _Rank(number, process, is_mortal)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)
        theirs.close()

    def messages(self) -> Iterator[Message]:
        """Yield what the ranks send until all have finished.

        Raises:
            RankFailedError: a rank raised or died; `ranks` names it, `cause` holds its traceback.
        """
        finished: set[Connection] = set()
        report: RankFailedError | None = None
        while talking := self._ranks.keys() - finished:
            ready = wait(list(talking), None if report is None else _SILENT_DEATH_S)
            if not ready:  # no peer of the failed one died without a message: that would be the cause
                break
            for connection in cast("list[Connection]", ready):
                message = _receive(connection, self._ranks[connection])
                if isinstance(message, dict):
                    yield message
                else:
                    finished.add(connection)
                    report = report or message
        if report is not None:
            raise report

    def __exit__(self, kind: object, *_: object) -> None:
        for one in self._ranks.values():
            one.process.join(_GRACE_S if kind is None else 0)  # without an error it is about to exit
            one.process.kill()
            one.process.join()


def _main(connection: Connection, function: Callable[..., None], rank: int, arguments: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # if other code started the fork server
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        function(rank, connection.send, *arguments)
        connection.send(None)
    except BaseException as exc:  # noqa: BLE001 - whatever it was, the parent shows it
        connection.send(_failed(rank, f"{type(exc).__name__}: {exc}", traceback.format_exc()))
        os._exit(1)  # peers may be waiting for this rank: nothing may delay its exit


def _end_with_parent() -> None:
    cast(Any, multiprocessing.parent_process()).join()
    os._exit(1)


def _receive(connection: Connection, one: _Rank) -> Message | RankFailedError | None:
    """Return the next message of a rank, or, if there will be none, the error of its failure, if it has failed."""
    try:
        return cast("Message | RankFailedError | None", connection.recv())
    except (EOFError, ConnectionResetError):
        if one.is_mortal:
            return None
        one.process.join(_GRACE_S)
        code = one.process.exitcode
        how = f"ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        raise _failed(one.number, f"it died without a word ({how})", how) from None


def _failed(rank: int, error: str, cause: str) -> RankFailedError:
    return RankFailedError(f"rank {rank} failed: {error}", ranks=(rank,), op="demo", cause=cause)
