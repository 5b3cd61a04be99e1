"""A process that runs out of descriptors, for tests."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def descriptors(num_free: int) -> Iterator[None]:
    """Leave this process `num_free` descriptors, all its threads together, until the block ends."""
    gc.collect()  # what is dropped within the block would give descriptors back
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + num_free + 2, hard))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(fillers[0]))
        assert len(fillers) > num_free, "the limit did not bite"
        for _ in range(num_free):
            os.close(fillers.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
