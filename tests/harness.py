"""Run a function on several ranks, each a real process, and get their results back.

Processes are forked from a server that has torch imported already (0.04 s for four ranks instead of 5 s). Every rank
gets a gloo group over a file store; a rank that raises sends its traceback, and the test fails with all of them.
Everything is bounded: ranks that do not answer in time are killed and named.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import defaults

_CONTEXT = mp.get_context("forkserver")
# torch's optimizers import torch._dynamo at their first use, 1.2 s for each rank
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "numpy", "epee", "tests.harness"])
defaults.install_if_asked()  # here, so that the server has it before it forks


class RankFailure(AssertionError):
    """One or more ranks raised or did not answer; the message holds their tracebacks."""


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 100.0,
    backend: str | None = "gloo",
) -> list[Any]:
    """Call `function(rank, num_ranks, *args)` on `num_ranks` processes and return their results in rank order.

    `function` must be importable (a module-level function). With `backend`, the default process group is initialised
    before the call and destroyed after it. A result that is a tensor is sent by value.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(function, rank, num_ranks, args, folder, backend, timeout_s) for rank in range(num_ranks)]
        try:
            return _collect(ranks, timeout_s)
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                process.close()
                connection.close()


def _start(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
    folder: str,
    backend: str | None,
    timeout_s: float,
) -> tuple[Any, Connection]:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(
        target=_rank_main,
        args=(theirs, function, rank, num_ranks, args, folder, backend, timeout_s),
        daemon=True,
    )
    process.start()
    theirs.close()
    return process, ours


def _rank_main(
    connection: Connection,
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
    folder: str,
    backend: str | None,
    timeout_s: float,
) -> None:
    faulthandler.dump_traceback_later(max(1.0, timeout_s - 2.0), exit=False)
    torch.set_num_threads(1)
    try:
        if backend is not None:
            store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
            dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
        result = function(rank, num_ranks, *args)
        if backend is not None and dist.is_initialized():
            dist.destroy_process_group()
        connection.send(("ok", _portable(result)))
    except BaseException:  # noqa: BLE001 - the parent shows it, whatever it is
        connection.send(("error", traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
        connection.close()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # what a rank does at interpreter exit has its own tests; here it would only cost time


def _portable(value: Any) -> Any:
    """Replace tensors by copies that travel by value: shared ones would need the sender to stay alive."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu()
        flat = torch.empty(raw.numel(), dtype=raw.dtype).copy_(raw.reshape(-1))
        return _Tensor(flat.view(torch.uint8).numpy().tobytes(), raw.dtype, tuple(raw.shape))
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_portable(item) for item in value)
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    return value


class _Tensor:
    def __init__(self, data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.data, self.dtype, self.shape = data, dtype, shape

    def restore(self) -> torch.Tensor:
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).view(self.shape)


def _restore(value: Any) -> Any:
    if isinstance(value, _Tensor):
        return value.restore()
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_restore(item) for item in value)
    if isinstance(value, dict):
        return {key: _restore(item) for key, item in value.items()}
    return value


def _collect(ranks: list[tuple[Any, Connection]], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    pending = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while pending and time.monotonic() < deadline:
        for connection in wait(list(pending), timeout=deadline - time.monotonic()):
            rank = pending.pop(connection)
            try:
                status, value = connection.recv()
            except EOFError:
                ranks[rank][0].join(5)
                errors[rank] = f"died without a word (exit code {ranks[rank][0].exitcode})"
                continue
            if status == "ok":
                results[rank] = _restore(value)
            else:
                errors[rank] = value
        if errors:  # the others may now wait for the failed rank: give them a moment, not the whole time-out
            deadline = min(deadline, time.monotonic() + 20)
    for rank in pending.values():
        errors.setdefault(rank, "did not answer in time (its stack went to stderr)")
    if errors:
        raise RankFailure("\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(errors.items())))
    return [results[rank] for rank in range(len(ranks))]
