"""Ranks of this machine as ranks of several hosts: each says which host it runs on, and listens at a loopback address.

They could share memory and do not: `EPEE_HOST_KEY` makes them hosts of their own. No namespaces, no root; the network
is the loopback interface.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from tests.harness import run_ranks

TIMEOUT_S = 30.0


def settle(host: int) -> None:
    """Let this process be one of host number `host`."""
    os.environ.update(EPEE_TEST="1", EPEE_HOST_KEY=str(host), EPEE_HOST_IP=f"127.0.77.{1 + host}")


@contextmanager
def world(
    rank: int, placement: Sequence[int], folder: str, backend: str = "epee", options: Any = None
) -> Iterator[Any]:
    """Make the default group, rank r on host `placement[r]`, and yield it."""
    settle(placement[rank])
    store = f"file://{Path(folder) / 'store'}"
    timeout = timedelta(seconds=TIMEOUT_S)
    kind: dict[str, Any] = {} if options is None else {"pg_options": options}
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=len(placement), timeout=timeout, **kind)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _ranked(
    rank: int,
    num_ranks: int,
    function: Callable[..., Any],
    placement: Sequence[int],
    folder: str,
    backend: str,
    args: Any,
) -> Any:
    with world(rank, placement, folder, backend) as group:
        return function(group, *args)


def run_hosts(
    function: Callable[..., Any], placement: Sequence[int], *args: Any, backend: str = "epee", timeout_s: float = 60.0
) -> list[Any]:
    """Call `function(group, *args)` on each rank of a group, rank r on host `placement[r]`; return their results."""
    with TemporaryDirectory() as folder:
        return run_ranks(
            _ranked, len(placement), function, placement, folder, backend, args, backend=None, timeout_s=timeout_s
        )
