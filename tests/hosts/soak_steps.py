"""What a rank does in a soak: groups call, buffers step, every result is checked, until a file says that it ends."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import epee
from tests.survive.buffer_rounds import make_buffer, make_step
from tests.survive.histories import ALL_OPS, check_histories
from tests.survive.rounds import LONG, exchange_all, one_call

from .machine import address_of

LONG_S = 90.0  # of calls: nobody is lost by a time-out
STEP_EVERY, STOP_EVERY = 4, 16
WARM = 200  # calls after which nothing may grow any more
SAMPLE_S = 2.0
LENGTHS = (1, 1, 100, LONG, 4 * LONG)


def resources() -> tuple[int, int, int]:
    """Return the numbers of descriptors and threads of this process, and its own resident KiB.

    Outboxes and mirrors, which are shared, are touched page by page as calls go round in them, up to their size.
    """
    gc.collect()
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), threading.active_count(), int(fields["RssAnon"].split()[0])


def live(rank: int, num_ranks: int, folder: str, placement: tuple[int, ...], seed: int) -> dict[str, Any]:
    """Make calls and steps; return how many, the epoch at the end, and what this process held at times."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own about names that both exist
    os.environ["EPEE_HOST_IP"] = address_of(placement[rank])
    store = dist.FileStore(f"{folder}/store", num_ranks)
    options = epee.BackendOptions(fault_mode="raise", op_timeout=LONG_S)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    group: Any = dist.group.WORLD
    told: dict[str, Any] = {"calls": 0, "steps": 0, "slowest_s": 0.0, "held": []}
    number, next_sample = 0, 0.0
    with make_buffer(group, timeout=LONG_S) as buffer:
        while number % STOP_EVERY or not _shall_stop(folder):
            number += 1
            dice, began = random.Random(1_000_003 * number + seed), time.monotonic()
            if number % STEP_EVERY == 0:
                step, _, got = make_step(buffer, number % 64, dice.choice(("rank", "expert")), is_fp8=number % 8 == 0)
                assert got == (1,) * num_ranks, (step, got)
                told["steps"] += 1
            else:
                op, length = dice.choice(ALL_OPS), dice.choice(LENGTHS)
                entry = one_call(group, op, length) if op != "send_recv" else exchange_all(group, number, length)
                assert entry.status == "ok", entry
                check_histories([[entry]], num_ranks, set())
                told["calls"] += 1
            told["slowest_s"] = max(told["slowest_s"], time.monotonic() - began)
            if number > WARM and time.monotonic() >= next_sample:
                told["held"].append(resources())
                next_sample = time.monotonic() + SAMPLE_S
        assert group.last_contributors() == tuple(range(num_ranks))
        told["epoch"] = group.epoch
    dist.destroy_process_group()
    return told


def _shall_stop(folder: str) -> bool:
    """Ask together whether to stop."""
    flag = torch.tensor([int((Path(folder) / "stop").exists())])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
