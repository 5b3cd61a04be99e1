"""GPU buffers that are being made when a rank dies, on the emulated GPU: all survivors are told the same.

Rank 1 dies, rank 0 is ahead of it and rank 2 behind: what the one has seen of it, the other has not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import epee
from epee.ep.members.gpu_members import GpuMembers
from epee.ep.members.rows import RowExchange
from epee.errors import RankFailedError
from epee.memory.shared import process_start_time
from epee.view.process.detector import is_torn_down
from tests.csrc.emulated import EmulatedPlatform, has_compiler
from tests.csrc.emulated_buffer import emulated
from tests.csrc.test_latency_buffer_emulated import emulated as emulated_latency
from tests.harness import DEAD, run_mortal
from tests.survive import stages
from tests.survive.buffer_rounds import start

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
NUM_RANKS, VICTIM, BEHIND = 3, 1, 2


def make(group: Any, kind: str) -> epee.Buffer | epee.LatencyBuffer:
    make_one = epee.LatencyBuffer if kind == "latency" else epee.Buffer
    return make_one(group, num_experts=6, hidden=512, num_topk=2, max_tokens_per_rank=6, timeout=60.0)


def die(folder: str) -> None:
    """End this process when rank 0 has what it needs of it."""
    (Path(folder) / "victim").write_text(f"{os.getpid()} {process_start_time(os.getpid())}")
    stages.reach(folder, "dying")
    stages.wait_for(folder, "ahead")
    os.kill(os.getpid(), signal.SIGKILL)


def await_death(folder: str) -> None:
    """Return when the victim is dead, as /proc says: nobody waits for it."""
    stages.wait_for(folder, "dying")
    pid, started = map(int, (Path(folder) / "victim").read_text().split())
    while Path(f"/proc/{pid}").exists() and not is_torn_down(pid, started):
        os.sched_yield()


def between_first_epochs(rank: int, folder: str) -> None:
    """Rank 0 is in the first epoch with the victim, rank 2 comes too late for that."""
    begins = GpuMembers.begin_first

    def begin_first(members: GpuMembers, deadline: float) -> None:
        if rank == VICTIM:
            die(folder)
        if rank == BEHIND:
            await_death(folder)
        begins(members, deadline)
        stages.reach(folder, "ahead")

    GpuMembers.begin_first = begin_first  # type: ignore[method-assign]


def between_mappings(rank: int, folder: str) -> None:
    """All are in the first epoch; rank 0 has mapped the victim's memory on the GPU, rank 2 comes for it too late."""
    gather, attach = RowExchange.all_gather_bytes, EmulatedPlatform.attach
    attached: list[bytes] = []

    def all_gather_bytes(exchange: RowExchange, data: bytes, deadline: float) -> list[bytes]:
        parts = gather(exchange, data, deadline)
        if rank == VICTIM:
            die(folder)
        if rank == BEHIND:
            await_death(folder)
        return parts

    def attach_one(platform: EmulatedPlatform, blob: bytes) -> Any:
        region = attach(platform, blob)
        attached.append(blob)
        if len(attached) == NUM_RANKS - 1:
            stages.reach(folder, "ahead")
        return region

    RowExchange.all_gather_bytes = all_gather_bytes  # type: ignore[method-assign]
    EmulatedPlatform.attach = attach_one  # type: ignore[method-assign]


def before_a_gather(rank: int, folder: str) -> None:
    """All are in the first epoch, the victim has told nothing; rank 0 waits for it, rank 2 comes when it is dead."""
    gather = RowExchange.all_gather_bytes

    def all_gather_bytes(exchange: RowExchange, data: bytes, deadline: float) -> list[bytes]:
        stages.reach(folder, "ahead")
        if rank == VICTIM:
            die(folder)
        if rank == BEHIND:
            await_death(folder)
        return gather(exchange, data, deadline)

    RowExchange.all_gather_bytes = all_gather_bytes  # type: ignore[method-assign]


def dies(rank: int, num_ranks: int, folder: str, mode: str, point: str, backend: str, fault_mode: str) -> str:
    group = start(rank, num_ranks, folder, fault_mode, backend=backend, on_stall="error")
    globals()[point](rank, folder)
    with pytest.raises(RankFailedError, match=r"rank 1 is dead \(its process ended\)") as caught:
        make(group, mode)
    assert caught.value.ranks == (VICTIM,)
    assert caught.value.cause == "process ended"
    assert "new_group" in str(caught.value)
    stages.meet(folder, "told", rank, (0, BEHIND))
    return type(caught.value).__name__


def on_gpu(rank: int, num_ranks: int, folder: str, mode: str, *args: str) -> str:
    run: Callable[..., Any] = emulated_latency if mode == "latency" else emulated
    return run(rank, num_ranks, dies, folder, mode, *args)


@pytest.mark.parametrize(("backend", "fault_mode"), [("epee", "mask"), ("epee", "raise"), ("gloo", "mask")])
@pytest.mark.parametrize("mode", ["throughput", "latency"])
@pytest.mark.parametrize("point", ["between_first_epochs", "between_mappings", "before_a_gather"])
def test_all_survivors_are_told_of_a_death_while_a_buffer_is_made(
    point: str, mode: str, backend: str, fault_mode: str
) -> None:
    told = run_mortal(on_gpu, NUM_RANKS, mode, point, backend, fault_mode, dead={VICTIM}, timeout_s=200)
    assert told == ["RankFailedError", DEAD, "RankFailedError"]
