"""What runs in a process of the harness: a loop over tasks, and the group that a task may be given."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests import defaults

from .values import portable

_PR_SET_PDEATHSIG = 1
_connection: list[Connection] = []  # of the process that this is

defaults.install_if_asked()  # here, so that the server has it before it forks and before it imports a test


class Task(NamedTuple):
    """A call for a process to make. After the last one it ends."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    timeout_s: float
    is_last: bool


def tell(value: Any) -> None:
    """Send a value from a task to who started it while the task goes on."""
    _connection[0].send(("told", value))


def main(connection: Connection) -> None:
    """Do one task after the other. The process dies with the server, which dies with the tests."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.freeze()  # a collection over all of torch holds the GIL for half a second, for ten times that on a busy machine
    torch.set_num_threads(1)
    _connection.append(connection)
    goes_on = True
    while goes_on:
        try:
            task: Task = connection.recv()
        except EOFError:
            break
        goes_on = _do(task, connection) and not task.is_last
    connection.close()
    os._exit(0)  # what a rank does at interpreter exit has its own tests; here it would only cost time


def _do(task: Task, connection: Connection) -> bool:
    """Do a task and answer; true: it did not raise."""
    faulthandler.dump_traceback_later(max(1.0, task.timeout_s - 2.0), exit=False)
    try:
        answer = ("ok", portable(task.function(*task.args)))
    except BaseException:  # noqa: BLE001 - the test shows it, whatever it is
        answer = ("error", traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(answer)
    return answer[0] == "ok"


def at_place(rank: int, call: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `call` as it is made on a host of its own, where the test says that ranks have places.

    `EPEE_TEST_PLACEMENT` of the test's process has the host of each rank, again and again: "01" is two hosts in turns.
    """
    placement = os.environ.get("EPEE_TEST_PLACEMENT", "")
    return (_on_loopback, int(placement[rank % len(placement)]), *call) if placement else call


def _on_loopback(host: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function where `host` is this process's host, as far as epee can tell."""
    os.environ.update(EPEE_TEST="1", EPEE_HOST_KEY=str(host), EPEE_HOST_IP=f"127.0.77.{host + 1}")
    return function(*args)


def with_group(backend: str, path: str, function: Callable[..., Any], rank: int, num_ranks: int, *args: Any) -> Any:
    """Call `function(rank, num_ranks, *args)` with a default process group that is destroyed afterwards."""
    return in_group(backend, dist.FileStore(path, num_ranks), function, rank, num_ranks, *args)


def in_group(
    backend: str, store: dist.Store, function: Callable[..., Any], rank: int, num_ranks: int, *args: Any
) -> Any:
    """Do what `with_group` does, with any store."""
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    if backend == "gloo":
        dist.barrier()  # its ranks connect one by one: none may be done and gone before the last has all connections
    result = function(rank, num_ranks, *args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result
