"""Start the ranks, listen to them, and end them: all of them, always.

Protocol: each rank has one socket pair with the parent. The rank writes messages (JSON, one per send); the parent
writes nothing. When the parent goes, however it goes, the rank's end reads end-of-file and a watching thread ends the
rank at once, so no rank outlives its parent. The last message of a rank is `done` or `error`.

Ctrl-C reaches the parent only: ranks are born with SIGINT blocked. The parent then terminates them. They hold nothing
that outlives a process (memory is anonymous, sockets are closed by the kernel), so that is a clean end.

Which rank failed first: a failing rank reports before it dies, so its report comes before those of peers that missed
it. A rank that dies without a word (a signal) may be reported by its peers first; the parent therefore looks for such
a death before it believes an error report. One rank may be *mortal*: its death is no failure, and another process may
be started in its place.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple

from ..errors import RankFailedError

# Imported once, before the ranks are forked. The optimiser imports torch._dynamo at its first use: 1.2 s a rank.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "numpy", "epee", "epee.demo.rank"]
_SILENT_DEATH_S = 0.5  # how long a death without a word may lag behind the peers' reports of it
_GRACE_S = 1.0  # from SIGTERM to SIGKILL
Message = dict[str, Any]


class Replacement(NamedTuple):
    """What `on_message` returns to have a process started in the place of a lost one."""

    rank: int
    argument: Any


Send = Callable[[Message], None]
RankFunction = Callable[[int, Any, Send], None]


def run_ranks(
    function: RankFunction,
    num_ranks: int,
    argument: Any,
    on_message: Callable[[int, Message], Replacement | None],
    on_idle: Callable[[], None] = lambda: None,
    mortal: int | None = None,
) -> None:
    """Call `function(rank, argument, send)` in `num_ranks` processes and return when all have finished.

    Args:
        function: a module-level function, found again by name in the ranks.
        argument: handed to each rank.
        on_message: called here with (rank, message) for every message that a rank sends; it may ask for one more
            process, which calls `function(replacement.rank, replacement.argument, send)`.
        on_idle: called here at least ten times a second.
        mortal: a rank whose first process may die without a word.

    Raises:
        RankFailedError: a rank raised or died; `ranks` names it, `cause` holds its traceback. No rank is left running,
            whatever is raised, `KeyboardInterrupt` included.
    """
    ranks: list[Rank] = []
    first: list[Rank] = []

    def start(rank: int, its_argument: Any) -> Rank:
        with _interrupt_blocked():
            ranks.append(_start(function, rank, its_argument))
        return ranks[-1]

    try:
        for rank in range(num_ranks):
            first.append(start(rank, argument))
        _listen(first, on_message, on_idle, start, None if mortal is None else first[mortal].connection)
        for one in ranks:
            one.process.join(_GRACE_S)
    finally:
        _end(ranks)


class Rank(NamedTuple):
    """A process and the parent's end of the socket to it."""

    number: int
    process: ForkServerProcess
    connection: Connection


def _start(function: RankFunction, rank: int, argument: Any) -> Rank:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_rank_main, args=(function, rank, argument, theirs), name=f"rank {rank}", daemon=True
    )
    process.start()
    theirs.close()
    return Rank(rank, process, ours)


@contextmanager
def _interrupt_blocked() -> Iterator[None]:
    """Block SIGINT here; processes that are started meanwhile inherit that, the fork server included."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _rank_main(function: RankFunction, rank: int, argument: Any, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where the fork server was started by someone else
    threading.Thread(target=_end_with_parent, args=(connection.fileno(),), daemon=True).start()

    def send(message: Message) -> None:
        connection.send_bytes(json.dumps(message).encode())

    try:
        function(rank, argument, send)
        send({"kind": "done"})
    except BaseException as exc:  # noqa: BLE001 - whatever it was, the parent shows it
        send({"kind": "error", "error": f"{type(exc).__name__}: {exc}", "traceback": traceback.format_exc()})
        sys.stderr.flush()
        os._exit(1)  # peers may be waiting for this rank: nothing may hold it up on its way out


def _end_with_parent(fd: int) -> None:
    try:
        os.read(fd, 1)  # the parent never writes: this returns when it has gone
    except OSError:
        return  # our own end was closed: the rank is ending anyway
    os._exit(1)


def _listen(
    ranks: list[Rank],
    on_message: Callable[[int, Message], Replacement | None],
    on_idle: Callable[[], None],
    start: Callable[[int, Any], Rank],
    mortal: Connection | None,
) -> None:
    pending = {one.connection: one for one in ranks}
    while pending:
        for ready in wait(list(pending), timeout=0.1):
            assert isinstance(ready, Connection)
            one = pending[ready]
            message = _receive(ready)
            if message is None and ready is mortal:
                del pending[ready]
            elif message is None:
                raise _died(one)
            elif message["kind"] == "error":
                raise _blame(one, message, [other for other in pending.values() if other.connection is not mortal])
            elif message["kind"] == "done":
                del pending[ready]
            else:
                wanted = on_message(one.number, message)
                if wanted is not None:
                    another = start(wanted.rank, wanted.argument)
                    pending[another.connection] = another
        on_idle()


def _receive(connection: Connection) -> Message | None:
    """Return the next message, or None when the rank has gone."""
    try:
        message: Message = json.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return None
    return message


def _died(one: Rank) -> RankFailedError:
    one.process.join(_GRACE_S)
    code = one.process.exitcode
    how = f"ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    return RankFailedError(
        f"rank {one.number} failed: it died without a word ({how})", ranks=(one.number,), op="demo", cause=how
    )


def _blame(failed: Rank, message: Message, pending: list[Rank]) -> RankFailedError:
    """Return the error to show for a report of `failed`: the report, or the silent death of a peer behind it."""
    deadline = time.monotonic() + _SILENT_DEATH_S
    others = {other.connection: other for other in pending if other is not failed}
    while others and time.monotonic() < deadline:
        for ready in wait(list(others), timeout=0.05):
            assert isinstance(ready, Connection)
            later = _receive(ready)
            if later is None:
                return _died(others[ready])
            if later["kind"] in ("done", "error"):
                del others[ready]
    return RankFailedError(
        f"rank {failed.number} failed: {message['error']}",
        ranks=(failed.number,),
        op="demo",
        cause=message["traceback"],
    )


def _end(ranks: list[Rank]) -> None:
    for one in ranks:
        if one.process.is_alive():
            one.process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for _, process, connection in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        connection.close()
        process.close()
