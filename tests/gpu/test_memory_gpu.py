"""GPU memory lent between two processes in each of the three ways, and what the doctor says, on real GPUs.

One GPU is enough: both processes then use it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from epee.errors import EpeeError, UnsupportedError
from epee.memory.cuda import BLOB_BYTES, CudaRegion
from tests.csrc.emulated import all_gather_bytes
from tests.harness import RankFailure, run_ranks
from tests.memory.test_cuda_region import forbid_pidfd_getfd

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(120)]
WAYS = ["pidfd", "scm", "ipc"]
NUM_ROWS = 1 << 18


def _device(rank: int) -> int:
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    return device


NUM_LOOKS = 6


def _free(device: int) -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(device)[0]


def _share(rank: int, num_ranks: int, way: str) -> list[Any]:
    os.environ["EPEE_CUDA_SHARE"] = way
    device = _device(rank)
    region = CudaRegion.create(3 << 20, device)
    is_zero = not region.tensor(torch.uint8, 0, (region.nbytes,)).any()
    mine = region.tensor(torch.int64, 4096, (NUM_ROWS,))
    mine.copy_(torch.arange(NUM_ROWS, device="cuda") + 10**6 * rank)
    torch.cuda.synchronize()
    blobs = all_gather_bytes(region.blob)
    other = 1 - rank
    peer = CudaRegion.attach(blobs[other], device)
    seen = peer.tensor(torch.int64, 4096, (NUM_ROWS,))
    is_right = bool((seen == torch.arange(NUM_ROWS, device="cuda") + 10**6 * other).all())
    torch.cuda.synchronize()
    all_gather_bytes(b"read")
    seen[7::2] = -5  # a kernel on our GPU stores into the peer's memory
    torch.cuda.synchronize()
    all_gather_bytes(b"written")
    is_written = bool((mine[7::2] == -5).all()) and int(mine[8]) == 10**6 * rank + 8
    peer.close()  # `seen` keeps the mapping
    is_kept = int(seen[8]) == 10**6 * other + 8
    del seen
    again = CudaRegion.attach(blobs[other], device)
    is_again = int(again.tensor(torch.int64, 4096, (NUM_ROWS,))[9]) == -5
    again.close()
    all_gather_bytes(b"done")
    is_current = torch.cuda.current_device() == device
    region.close()
    del mine
    return [is_zero, is_right, is_written, is_kept, is_again, is_current, str(again.ways.name)]


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.smoke("pidfd")] if way == "pidfd" else []) for way in WAYS]
)
def test_two_processes_share_memory_both_ways(way: str) -> None:
    for result in run_ranks(_share, 2, way, timeout_s=100):
        assert result == [True] * 6 + [way.upper()]


def _share_under_seccomp(rank: int, num_ranks: int) -> list[Any]:
    forbid_pidfd_getfd()
    device = _device(rank)
    region = CudaRegion.create(1 << 20, device)
    region.tensor(torch.int32, 0, (1,)).fill_(rank + 10)
    torch.cuda.synchronize()
    blobs = all_gather_bytes(region.blob)
    peer = CudaRegion.attach(blobs[1 - rank], device)
    result = [str(peer.ways.name), int(peer.tensor(torch.int32, 0, (1,))[0])]
    all_gather_bytes(b"done")
    return result


def test_a_forbidden_pidfd_falls_back_to_the_socket() -> None:
    assert run_ranks(_share_under_seccomp, 2, timeout_s=100) == [["SCM", 11], ["SCM", 10]]


def _no_leak(rank: int, num_ranks: int, way: str) -> list[int]:
    """Create, attach, close many times; return how many bytes of GPU memory and descriptors that cost."""
    os.environ["EPEE_CUDA_SHARE"] = way
    device = _device(rank)

    def turn() -> None:
        region = CudaRegion.create(64 << 20, device)
        peer = CudaRegion.attach(all_gather_bytes(region.blob)[1 - rank], device)
        peer.tensor(torch.uint8, 0, (4,)).fill_(1)
        torch.cuda.synchronize()
        peer.close()
        all_gather_bytes(b"detached")
        region.close()

    def five_turns() -> tuple[int, int]:
        all_gather_bytes(b"before")
        free, fds = _free(device), len(os.listdir("/proc/self/fd"))
        all_gather_bytes(b"measured")
        for _ in range(5):
            turn()
        all_gather_bytes(b"after")
        return free - _free(device), len(os.listdir("/proc/self/fd")) - fds

    turn()
    found = [
        five_turns() for _ in range(NUM_LOOKS)
    ]  # the GPU's other programs come and go: what is lost, is lost each time
    return [min(num_bytes for num_bytes, _ in found), max(num_fds for _, num_fds in found)]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_of_closed_regions(way: str) -> None:
    for num_bytes, num_fds in run_ranks(_no_leak, 2, way, timeout_s=100):
        assert num_bytes < 64 << 20  # one of the ten regions would be as much
        assert num_fds == 0


def _wrong_claims(rank: int, num_ranks: int, way: str) -> list[str]:
    os.environ["EPEE_CUDA_SHARE"] = way
    device = _device(rank)
    region = CudaRegion.create(1 << 20, device)
    blob = all_gather_bytes(region.blob)[1 - rank]
    errors = []
    late = blob[:16] + bytes([blob[16] ^ 1]) + blob[17:]
    larger = blob[:32] + (1 << 30).to_bytes(8, "little") + blob[40:]
    cookie = blob[:40] + bytes([blob[40] ^ 1]) + blob[41:]
    for data in (late, larger, cookie):
        try:
            CudaRegion.attach(data, device)
            errors.append("accepted")
        except EpeeError as error:
            errors.append(type(error).__name__)
    CudaRegion.attach(blob, device).close()
    all_gather_bytes(b"done")
    if int(torch.ones(4, device="cuda").sum()) != 4:
        errors.append("the context is broken")
    return errors


@pytest.mark.parametrize("way", WAYS)
def test_wrong_claims_are_refused_and_the_context_lives_on(way: str) -> None:
    larger = "ProtocolError" if way == "ipc" else "ResourceError"
    for errors in run_ranks(_wrong_claims, 2, way, timeout_s=100):
        assert errors == ["OwnerEndedError", larger, "ProtocolError"]


def _survive(rank: int, num_ranks: int, way: str) -> None:
    os.environ["EPEE_CUDA_SHARE"] = way
    device = _device(rank)
    region = CudaRegion.create(1 << 20, device)
    blobs = all_gather_bytes(region.blob + os.getpid().to_bytes(8, "little"))
    if rank == 1:
        signal.pause()
    peer = CudaRegion.attach(blobs[1][:BLOB_BYTES], device)
    os.kill(int.from_bytes(blobs[1][BLOB_BYTES:], "little"), signal.SIGKILL)
    memory = peer.tensor(torch.float32, 0, (1000,))
    for value in range(50):
        memory.fill_(value)
        torch.cuda.synchronize()
    is_there = bool((memory == 49).all())
    del memory
    peer.close()
    if is_there and int(torch.ones(4, device="cuda").sum()) == 4:
        raise AssertionError("the survivor is healthy")  # the only way past the harness, which reports the killed rank


@pytest.mark.parametrize("way", WAYS)
def test_memory_of_a_killed_peer_stays_usable(way: str) -> None:
    with pytest.raises(RankFailure, match="the survivor is healthy"):
        run_ranks(_survive, 2, way, timeout_s=60)


def _alone(rank: int, num_ranks: int) -> list[Any]:
    device = _device(rank)
    with_fd = CudaRegion.create(1 << 20, device)
    with_fd.tensor(torch.int32, 0, (1,)).fill_(5)
    same = CudaRegion.attach(with_fd.blob, device)
    result: list[Any] = [int(same.tensor(torch.int32, 0, (1,))[0])]
    os.environ["EPEE_CUDA_SHARE"] = "ipc"
    try:
        CudaRegion.attach(CudaRegion.create(1 << 20, device).blob, device)
    except UnsupportedError as error:
        result.append(str(error))
    return result


def test_a_process_attaches_to_its_own_memory() -> None:
    ((seen, refusal),) = run_ranks(_alone, 1, timeout_s=60)
    assert seen == 5
    assert "in its own process" in refusal


def test_the_doctor_describes_the_gpus() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "epee", "doctor", "--json"],
        capture_output=True, text=True, timeout=110, cwd=root, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    found = {row["name"]: row for row in report["findings"]}
    assert done.returncode == 0
    assert report["works_on_gpu"], [row for row in report["findings"] if row["verdict"] != "ok"]
    for device in range(torch.cuda.device_count()):
        assert torch.cuda.get_device_name(device) in found[f"GPU {device}"]["value"]
        assert "MiB free, can be lent by pidfd" in found[f"memory of GPU {device}"]["value"]
        assert f"links of GPU {device}" in found
    assert "another process reached GPU 0's memory" in found["lending"]["value"]
    assert found["driver"]["verdict"] == "ok"
