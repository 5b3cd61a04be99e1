"""Groups over hosts of which a rank dies while they are made: the others are told, long before the time-out."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from epee.backend.bootstrap import birth
from epee.errors import PeerError, ResourceError
from tests.harness import DEAD

from . import run_on_loopbacks

PATIENCE_S = 60.0


def made_with_a_death(rank: int, num_ranks: int, folder: str, victim: int, point: str) -> str:
    """Return what a rank is told, whose group cannot be made."""
    if rank == victim:
        setattr(birth, point, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
    store = dist.FileStore(f"{folder}/store", num_ranks)
    began = time.monotonic()
    with pytest.raises((PeerError, ResourceError)) as caught:  # the latter where its memory was to be mapped
        dist.init_process_group(
            "epee", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=PATIENCE_S)
        )
    assert time.monotonic() - began < PATIENCE_S - 10, "it was told by the time-out"
    return str(caught.value)


@pytest.mark.parametrize("point", ["link", "await_all"])
@pytest.mark.parametrize(
    ("placement", "victim"), [((0, 0, 1, 1), 3), ((0, 0, 1, 1), 0), ((0, 0, 1), 2), ((0, 1, 2), 1)]
)
def test_a_death_on_the_way_is_told_on_all_hosts(
    tmp_path: Path, placement: tuple[int, ...], victim: int, point: str
) -> None:
    args = str(tmp_path), victim, point
    told = run_on_loopbacks(made_with_a_death, placement, *args, backend=None, dead={victim}, timeout_s=PATIENCE_S + 20)
    assert told[victim] == DEAD
    assert all("died while the group was made" in words or "has ended" in words for words in told if words != DEAD)
