"""The mask of active ranks on a GPU, as Mooncake's programs have it: of the backend, and one tensor for both.

Ranks share a GPU where there are fewer GPUs than ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.compat.mooncake import ep, pg
from tests.backend.test_active_ranks import leaves
from tests.harness import run_ranks

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(180)]


@pytest.mark.parametrize("how", ["sync", "async", "future", "recv", "asked"])
def test_a_rank_that_left_gets_its_zero_in_the_users_tensor(tmp_path: Path, how: str) -> None:
    told = run_ranks(leaves, 3, str(tmp_path), how, "cuda", backend=None, timeout_s=120)
    assert told[0] == told[2] == [1, 0, 1, 0]


def _streams(rank: int, num_ranks: int, folder: str) -> list[int]:
    """The zero is seen by what the caller's stream does behind the call, without a wait of the host."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    mask = torch.ones(num_ranks, dtype=torch.int32, device=device)
    options = pg.MooncakeBackendOptions(mask)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("mooncake", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(2, device=device))
    if rank == 1:
        group.shutdown()
        return [1, 0, 1]
    with torch.cuda.stream(torch.cuda.Stream(device)):
        dist.all_reduce(torch.ones(2, device=device))
        seen = mask.clone()
    torch.cuda.synchronize()
    return seen.tolist()


def test_the_callers_stream_sees_the_change_behind_the_call(tmp_path: Path) -> None:
    assert run_ranks(_streams, 3, str(tmp_path), backend=None, timeout_s=120) == [[1, 0, 1]] * 3


def _one_tensor(rank: int, num_ranks: int, folder: str) -> list[int]:
    """Mooncake's programs give one tensor to the backend and to each call of the buffer."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    mask = torch.ones(num_ranks, dtype=torch.int32, device=device)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    options = pg.MooncakeBackendOptions(mask)
    dist.init_process_group("mooncake", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    buffer = ep.Buffer(dist.group.WORLD)
    x = torch.full((4, 512), rank + 1.0, dtype=torch.bfloat16, device=device)
    topk_idx = torch.tensor([[0], [1], [0], [1]], dtype=torch.int64, device=device)
    weights = torch.ones(4, 1, dtype=torch.float32, device=device)
    for given in (mask, None):
        got, _, handle, *_ = buffer.dispatch(x, topk_idx, given, 8, num_ranks, -1, use_fp8=False)
        assert isinstance(got, torch.Tensor)
        back, *_ = buffer.combine(got, topk_idx, weights, given, -1, handle)
        assert torch.equal(back, x)
    return mask.tolist()


@pytest.mark.smoke("mooncake.pg", "mooncake.ep")
def test_the_backend_and_the_buffer_may_have_one_mask(tmp_path: Path) -> None:
    assert run_ranks(_one_tensor, 2, str(tmp_path), backend=None, timeout_s=120) == [[1, 1]] * 2
