"""`run_on_hosts` and `run_on_loopbacks`: a call on each rank of a group whose ranks have places.

A placement has the host of each rank: (0, 0, 1, 1) is two hosts with two ranks each, (0, 1, 0, 1) the same in turns.
The store of a group is a process of its own on the host of rank 0, as torchrun's agent is one, so it outlives ranks.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.harness import Worker, collect
from tests.harness import rank as process

from .hosts import Hosts

_STORE_TIMEOUT = timedelta(seconds=60)
_START_S = 60.0
_GRACE_S = 20.0
_store: list[dist.TCPStore] = []  # of the process that this is


def num_hosts_of(placement: Sequence[int]) -> int:
    """Return how many hosts a placement needs; each has a rank."""
    num_hosts = max(placement) + 1
    if set(placement) != set(range(num_hosts)):
        raise ValueError(f"each host from 0 to {num_hosts - 1} must have a rank, got {tuple(placement)}")
    return num_hosts


def _serve_store(address: str) -> int:
    """Keep a store in this process and return its port."""
    _store.append(dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT))
    return int(_store[0].port)


def _on_rank(
    env: Mapping[str, str],
    backend: str | None,
    store_at: tuple[str, int] | None,
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    *args: Any,
) -> Any:
    """Call `function(rank, num_ranks, *args)` with the environment and the group that it shall have."""
    os.environ.update(env)
    if backend is None or store_at is None:
        return function(rank, num_ranks, *args)
    store = dist.TCPStore(*store_at, is_master=False, timeout=_STORE_TIMEOUT)
    return process.in_group(backend, store, function, rank, num_ranks, *args)


def _start_all(
    workers: Sequence[Worker],
    envs: Sequence[Mapping[str, str]],
    keeper: tuple[Worker, str] | None,
    backend: str | None,
    timeout_s: float,
    call: tuple[Any, ...],
) -> None:
    """Start `call` = (function, *args) on all ranks; `keeper` is the process of the store, and its address."""
    store_at = None
    if keeper is not None:
        keeper[0].start(_serve_store, keeper[1])
        (port,) = collect([keeper[0]], (), _START_S)
        store_at = (keeper[1], port)
    function, *args = call
    for rank, worker in enumerate(workers):
        given = (envs[rank], backend, store_at, function, rank, len(workers), *args)
        worker.start(_on_rank, *given, timeout_s=timeout_s, is_last=True)


@contextlib.contextmanager
def started_on_hosts(
    hosts: Hosts,
    function: Callable[..., Any],
    placement: Sequence[int],
    *args: Any,
    timeout_s: float = 60.0,
    backend: str | None = "epee",
    env: Mapping[str, str] | None = None,
) -> Iterator[list[Worker]]:
    """Yield workers that do `function(rank, num_ranks, *args)` on hosts; they are ended with the block.

    `function` must be importable (a module-level function). With `backend`, there is a default process group during the
    call. `env` is for all ranks.
    """
    with contextlib.ExitStack() as ends:
        keeper = None
        if backend is not None:
            keeper = (hosts.worker(placement[0]), hosts.address(placement[0]))
            ends.callback(keeper[0].close)
        workers = [hosts.worker(host) for host in placement]
        for worker in workers:
            ends.callback(worker.close)
        _start_all(workers, [env or {}] * len(workers), keeper, backend, timeout_s, (function, *args))
        yield workers


def run_on_hosts(
    function: Callable[..., Any],
    placement: Sequence[int],
    *args: Any,
    timeout_s: float = 60.0,
    backend: str | None = "epee",
    wire: str = "veth",
    env: Mapping[str, str] | None = None,
    dead: Collection[int] = (),
) -> list[Any]:
    """Call `function(rank, num_ranks, *args)` on each rank at its host and return the results in rank order.

    With `backend`, the default process group is initialised before the call and destroyed after it. A rank that raises,
    dies or does not answer in `timeout_s` fails the test, but `dead` must die by SIGKILL; `DEAD` is their result.
    """
    with (
        Hosts(num_hosts_of(placement), wire) as hosts,
        started_on_hosts(hosts, function, placement, *args, timeout_s=timeout_s, backend=backend, env=env) as workers,
    ):
        return collect(workers, dead, timeout_s, _GRACE_S)


def run_on_loopbacks(
    function: Callable[..., Any],
    placement: Sequence[int],
    *args: Any,
    timeout_s: float = 60.0,
    backend: str | None = "epee",
    env: Mapping[str, str] | None = None,
    dead: Collection[int] = (),
) -> list[Any]:
    """Do what `run_on_hosts` does without rights: a host is a loopback address and what the environment says.

    EPEE_TEST=1 and EPEE_HOST_KEY make epee take ranks with different keys for ranks of different hosts, which share no
    memory; EPEE_HOST_IP is the host's address, EPEE_RUNTIME_DIR its own folder. The processes see each other.
    """
    num_hosts = num_hosts_of(placement)
    with tempfile.TemporaryDirectory(prefix="epee-hosts-") as folder, contextlib.ExitStack() as ends:
        for host in range(num_hosts):
            (Path(folder) / str(host)).mkdir(mode=0o700)
        envs = [{**_env_of(host, folder), **(env or {})} for host in placement]
        workers = [Worker() for _ in placement]
        keeper = None if backend is None else (Worker(), loopback_of(placement[0]))
        for worker in (*workers, *(keeper[:1] if keeper else ())):
            ends.callback(worker.close)
        _start_all(workers, envs, keeper, backend, timeout_s, (function, *args))
        return collect(workers, dead, timeout_s, _GRACE_S)


def loopback_of(host: int) -> str:
    """Return the address that stands for a host on the loopback interface."""
    return f"127.0.77.{host + 1}"


def _env_of(host: int, folder: str) -> dict[str, str]:
    return {
        "EPEE_TEST": "1",
        "EPEE_HOST_KEY": str(host),
        "EPEE_HOST_IP": loopback_of(host),
        "EPEE_RUNTIME_DIR": str(Path(folder) / str(host)),
    }
