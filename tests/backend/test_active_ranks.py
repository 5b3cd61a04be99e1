"""The mask of active ranks: the user's tensor, `group.active_ranks()`, and when they learn of a loss."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.engine.membership.sizes import Mask
from epee.errors import PeerError
from tests.harness import DEAD, run_ranks
from tests.survive import stages

from . import cases
from .test_staging import OnGpu


def leaves(rank: int, num_ranks: int, folder: str, how: str, device: str = "cpu") -> list[int]:
    mask = torch.zeros(4, dtype=torch.int32)
    given = mask.as_subclass(OnGpu) if device == "a GPU's" else mask.to(device)
    mask = mask if device == "a GPU's" else given
    cases.init(rank, num_ranks, folder, active_ranks=given, max_group_size=4)
    group: Any = dist.group.WORLD
    assert mask.tolist() == [1, 1, 1, 0]
    dist.all_reduce(torch.ones(2))
    assert mask.tolist() == [1, 1, 1, 0]
    assert group.active_ranks().tolist() == [1, 1, 1]
    dist.barrier()
    if rank == 1:
        group.shutdown()
        return mask.tolist()
    x = torch.ones(3)
    if how == "asked":
        deadline = time.monotonic() + 20
        while group.active_ranks()[1] and time.monotonic() < deadline:
            time.sleep(0.005)
        assert group.active_ranks().tolist() == [1, 0, 1]
    elif how == "recv":
        with pytest.raises(PeerError):
            dist.recv(x, 1)
        deadline = time.monotonic() + 20  # a message sees at once that its peer has left, the view a moment later
        while group.active_ranks()[1] and time.monotonic() < deadline:
            time.sleep(0.005)
    else:
        call = {
            "sync": lambda: dist.all_reduce(x),
            "async": lambda: dist.all_reduce(x, async_op=True).wait(),
            "future": lambda: dist.all_reduce(x, async_op=True).get_future().wait(),  # the background thread meets it
        }[how]
        call()  # with a mask, the call goes on without the lost rank
        assert x.tolist() == [2.0] * 3
        assert group.last_contributors() == (0, 2)
        x.fill_(1.0)
    assert x.tolist() == [1.0] * 3
    seen = mask.tolist()
    stages.meet(folder, "seen", rank, (0, 2))  # who ends first gets a zero, too
    return seen


@pytest.mark.parametrize("how", ["sync", "async", "future", "recv", "asked"])
def test_a_rank_that_left_gets_its_zero_in_the_users_tensor(tmp_path: Path, how: str) -> None:
    told = run_ranks(leaves, 3, str(tmp_path), how, backend=None)
    assert told[0] == told[2] == [1, 0, 1, 0]


@pytest.mark.parametrize("how", ["sync", "future", "asked"])
def test_the_users_tensor_may_say_that_it_lies_on_a_gpu(tmp_path: Path, how: str) -> None:
    told = run_ranks(leaves, 3, str(tmp_path), how, "a GPU's", backend=None)
    assert told[0] == told[2] == [1, 0, 1, 0]


def test_a_mask_on_a_gpu_that_breaks_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    mask = Mask(2, (0, 1), torch.ones(2, dtype=torch.int32).as_subclass(Broken))
    mask[1] = 0
    mask[0] = 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert mask.first(2) == [0, 0]


class Broken(OnGpu):
    """A tensor on a GPU of which a kernel has failed."""

    def fill_(self, value: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def killed(rank: int, num_ranks: int, folder: str) -> list[int]:
    mask = torch.ones(3, dtype=torch.int32)
    cases.init(rank, num_ranks, folder, active_ranks=mask, timeout_s=300)  # not by a time-out
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 2
    seen = mask.tolist()
    stages.meet(folder, "seen", rank, (0, 1))  # who ends first gets a zero, too
    return seen


def test_a_killed_rank_gets_its_zero_in_the_users_tensor(tmp_path: Path) -> None:
    assert run_ranks(killed, 3, str(tmp_path), backend=None, dead={2}) == [[1, 1, 0], [1, 1, 0], DEAD]
