"""A barrier of ranks that does not break when one of them dies right after it.

Data path: each rank writes its key into the store of the default group, then waits until it has seen all the others'.
Nobody is asked for anything afterwards, so who is through may be gone at once; `dist.barrier()` does not promise that.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


def meet(name: str, rank: int, num_ranks: int) -> None:
    """Wait until all ranks have come to the point `name`, which is good for one meeting per run."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}/{rank}", "here")
    store.wait([f"{name}/{other}" for other in range(num_ranks)], TIMEOUT)
