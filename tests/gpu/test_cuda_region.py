"""GPU memory lent between processes: attach, detach, wrong claims, a killed owner."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from epee.errors import EpeeError
from epee.memory.cuda import BLOB_BYTES, CudaRegion
from tests.csrc.emulated import all_gather_bytes
from tests.harness import RankFailure, run_ranks

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(120)]


def _lend(rank: int, num_ranks: int) -> Any:
    torch.cuda.set_device(rank)
    region = CudaRegion.create(3 << 20, rank)
    mine = region.tensor(torch.int64, 4096, (1000,))
    mine.copy_(torch.arange(1000) + 1000 * rank)
    torch.cuda.synchronize()
    blobs = all_gather_bytes(region.blob)
    peer = CudaRegion.attach(blobs[1 - rank], rank)
    seen = peer.tensor(torch.int64, 4096, (1000,))
    is_right = bool((seen.cpu() == torch.arange(1000) + 1000 * (1 - rank)).all())
    all_gather_bytes(b"read")
    seen[7] = -5
    torch.cuda.synchronize()
    all_gather_bytes(b"written")
    is_written = int(mine[7]) == -5
    peer.close()
    region.close()
    del peer
    return is_right, is_written, int(seen[8]) == 1000 * (1 - rank) + 8, int(mine[9]) == 1000 * rank + 9


def test_peers_read_and_write_and_tensors_outlive_the_region() -> None:
    for results in run_ranks(_lend, 2, timeout_s=100):
        assert all(results)


def _wrong_claims(rank: int, num_ranks: int) -> list[str]:
    torch.cuda.set_device(rank)
    region = CudaRegion.create(1 << 20, rank)
    blobs = all_gather_bytes(region.blob)
    blob = blobs[1 - rank]
    errors = []
    late = blob[:16] + bytes([blob[16] ^ 1]) + blob[17:]
    wrong_cookie = blob[:40] + bytes([blob[40] ^ 1]) + blob[41:]
    for data in (late, wrong_cookie):
        try:
            CudaRegion.attach(data, rank)
        except EpeeError as error:
            errors.append(f"{type(error).__name__}: {error}")
    CudaRegion.attach(blob, rank).close()
    all_gather_bytes(b"done")
    return errors


def test_start_time_and_cookie_are_checked() -> None:
    for late, cookie in run_ranks(_wrong_claims, 2, timeout_s=100):
        assert late.startswith("OwnerEndedError") and "has ended" in late  # noqa: PT018
        assert cookie.startswith("ProtocolError") and "cookie differs" in cookie  # noqa: PT018


def _survive(rank: int, num_ranks: int) -> bool:
    torch.cuda.set_device(rank)
    region = CudaRegion.create(1 << 20, rank)
    blobs = all_gather_bytes(region.blob + os.getpid().to_bytes(8, "little"))
    if rank == 1:
        signal.pause()
    peer = CudaRegion.attach(blobs[1][:BLOB_BYTES], rank)
    os.kill(int.from_bytes(blobs[1][BLOB_BYTES:], "little"), signal.SIGKILL)
    memory = peer.tensor(torch.float32, 0, (1000,))
    for value in range(50):
        memory.fill_(value)
        torch.cuda.synchronize()
    is_there = bool((memory == 49).all())
    del memory
    peer.close()
    if not (is_there and int(torch.ones(4, device="cuda").sum()) == 4):
        raise AssertionError("the survivor's context is broken")
    raise AssertionError("the survivor is healthy")  # the only way past the harness, which reports the killed rank


def test_memory_of_a_killed_peer_stays_usable() -> None:
    with pytest.raises(RankFailure, match="the survivor is healthy"):
        run_ranks(_survive, 2, timeout_s=60)
