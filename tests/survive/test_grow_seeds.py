"""Growth and recovery in the words of the seeds: a joiner that knows a larger world size, survivors that poll.

Nobody declares how far the group may grow.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.compat.mooncake import ep, pg
from tests.harness import run_mortal

from . import stages
from .growing import every_operation, ring, total


def start(rank: int, world_size: int, folder: str, is_extension: bool) -> Any:
    store = dist.FileStore(str(Path(folder) / "store"), -1)
    mask = torch.ones((world_size,), dtype=torch.int32)
    options = ep.MooncakeBackendOptions(mask, is_extension) if is_extension else ep.MooncakeBackendOptions(mask)
    dist.init_process_group("mooncake-cpu", store=store, rank=rank, world_size=world_size, pg_options=options)
    return dist.group.WORLD, mask


def poll(question: Any) -> int:
    """Work on until all members hear the awaited answer, which they do at the same operation."""
    steps = 0
    deadline = time.monotonic() + 30
    while not question():
        assert time.monotonic() < deadline
        assert total() == dist.get_world_size()
        steps += 1
    return steps


def seeds(slot: int, num_processes: int, folder: str) -> Any:
    """2 -> 4 with processes 2 and 3; process 3 dies and process 4 replaces it."""
    rank = {4: 3}.get(slot, slot)
    if slot >= 2:
        stages.wait_for(folder, "born" if slot < 4 else "lost", 60.0)
    backend, mask = start(rank, 4 if slot >= 2 else 2, folder, slot >= 2)
    steps = []
    if slot < 2:
        assert total() == 2
        stages.reach(folder, "born")
        steps.append(poll(lambda: pg.get_num_synced_ranks(backend) == 4))
        pg.extend_group_size_to(backend, 4)
        assert mask.tolist() == [1, 1], "the tensor that was given is as long as it was"
    if slot < 4:
        assert pg.get_active_ranks(backend).tolist() == [1, 1, 1, 1]
        assert total() == 4
        every_operation(backend, [0, 1, 2, 3])
        if slot == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        while total() == 4:
            pass
        assert pg.get_active_ranks(backend).tolist() == [1, 1, 1, 0]
        stages.reach(folder, "lost")
        while not pg.get_peer_state(backend, [3])[0]:
            assert total() == 3
        answer = pg.recover_ranks(backend, [3])
        assert answer.status is pg.ProposalStatus.Applied
    sums = [total() for _ in range(3)]
    every_operation(backend, [0, 1, 2, 3])
    ring(backend, [0, 1, 2, 3])
    assert pg.get_active_ranks(backend).tolist() == [1, 1, 1, 1]
    if slot >= 2:
        assert mask.tolist() == [1, 1, 1, 1]
    return steps, sums, pg.get_current_epoch(backend), dist.get_world_size()


def test_the_seeds_protocol() -> None:
    results = run_mortal(seeds, 5, dead={3}, timeout_s=90)
    alive = [results[slot] for slot in (0, 1, 2, 4)]
    assert [sums for _, sums, _, _ in alive] == [[4] * 3] * 4
    assert len({epoch for _, _, epoch, _ in alive}) == 1
    assert alive[0][0] == alive[1][0], "all members saw the newcomers at the same operation"
    assert [size for _, _, _, size in alive] == [4] * 4


def nobody_comes(slot: int, num_processes: int, folder: str) -> None:
    backend, _ = start(slot, 2, folder, False)
    with pytest.raises(ValueError, match="no process waits for rank 2"):
        pg.extend_group_size_to(backend, 3)
    assert pg.get_num_synced_ranks(backend) == 2
    every_operation(backend, [0, 1])


def test_a_rank_for_which_nobody_waits_is_an_error_at_once() -> None:
    run_mortal(nobody_comes, 2, dead=set(), timeout_s=40)
