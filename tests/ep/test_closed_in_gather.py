"""A buffer is closed by another thread while `all_gather_bytes` waits for a rank: the error names the buffer."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from epee.engine import Engine
from epee.errors import AbortedError
from tests.ep.latency_cases import Shape, make
from tests.harness import run_ranks


def _closed(rank: int, num_ranks: int) -> None:
    buffer = make(Shape(), timeout=60.0)
    runs, waiting = Engine.run, threading.Event()

    def run(*args: object) -> object:
        waiting.set()
        return runs(*args)  # type: ignore[arg-type]

    if rank == 0:
        Engine.run = run  # type: ignore[method-assign, assignment]
        closer = threading.Thread(target=lambda: (waiting.wait(30.0), buffer.close()))
        closer.start()
        with pytest.raises(AbortedError, match="the buffer was closed while this call was waiting"):
            buffer.all_gather_bytes(b"x")
        closer.join()
        Engine.run = runs  # type: ignore[method-assign]
    dist.barrier()
    buffer.close()


def test_the_error_names_the_buffer_and_not_the_group() -> None:
    run_ranks(_closed, 2, backend="epee", timeout_s=90.0)
