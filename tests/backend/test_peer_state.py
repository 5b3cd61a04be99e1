"""The collective membership calls of a group (`get_peer_state`, `get_num_synced_ranks`) around a death."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import epee
from tests.harness import DEAD, run_mortal
from tests.survive import stages


def _first_question(rank: int, num_ranks: int, folder: str, question: str) -> Any:
    """Rank 1 dies between two calls; the first call of the others afterwards is the question."""
    options = epee.BackendOptions(fault_mode="mask", op_timeout=60.0)
    store = dist.FileStore(str(Path(folder) / "store"), -1)
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    group: Any = dist.group.WORLD
    dist.barrier()
    if rank == 1:
        stages.meet(folder, "through", rank, range(num_ranks))
        os.kill(os.getpid(), signal.SIGKILL)
    stages.meet(folder, "through", rank, range(num_ranks))
    if question == "state":
        return group.get_peer_state([2, 1, 0, 3])
    return group.get_num_synced_ranks()


@pytest.mark.parametrize(("question", "answer"), [("state", [True, False, True, False]), ("number", 2)])
def test_the_first_call_after_a_death_does_not_count_the_dead_rank(question: str, answer: object) -> None:
    assert run_mortal(_first_question, 3, question, dead={1}, timeout_s=60) == [answer, DEAD, answer]
