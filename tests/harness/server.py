"""The server that all processes of the tests are forked from: what it has imported, no rank needs to import.

A fork costs 0.025 s of processor time. Importing torch costs seconds, what `dist.init_process_group("epee")` imports
0.2 s, a test's own module with pytest and hypothesis as much again, and all that in every rank.
"""

from __future__ import annotations

import functools
import multiprocessing as mp
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

# torch's optimizers import torch._dynamo at their first use; epee's backend comes in with the first group.
_ALWAYS = ("torch", "torch.distributed", "torch._dynamo", "numpy", "pytest", "hypothesis", "epee")
_USED = ("epee.backend.group", "epee.ep.buffer", "tests.harness.rank")
_LAST = "tests.harness.huge_pages"


@functools.cache
def context() -> ForkServerContext:
    """Name the server's modules before its first fork, whoever forks: of the tests, those that are imported by now."""
    made = mp.get_context("forkserver")
    tests = [name for name in sys.modules if name.startswith("tests.")]
    made.set_forkserver_preload([*_ALWAYS, *_USED, *tests, _LAST])
    return made


def fork(main: Callable[..., None], *args: Any) -> tuple[ForkServerProcess, Connection]:
    """Start a process that calls `main(connection, *args)`; return it and the other end of its connection."""
    ours, theirs = context().Pipe()
    process = context().Process(target=main, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours
