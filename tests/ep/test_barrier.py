"""`Buffer.barrier`: nobody comes through before all have come, on each kind of buffer; it is a call like any other."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

import epee
from epee.errors import CommTimeoutError, InvalidArgument, InvalidState
from tests.csrc.emulated import has_compiler
from tests.csrc.emulated_buffer import emulated
from tests.harness import run_ranks

KINDS = {"throughput": epee.Buffer, "latency": epee.LatencyBuffer}


def _make(kind: str) -> epee.Buffer | epee.LatencyBuffer:
    return KINDS[kind](num_experts=6, hidden=16, num_topk=1, max_tokens_per_rank=2, timeout=20.0)


def _rounds(rank: int, num_ranks: int, kind: str) -> int:
    """Count how often this rank came through a barrier that another had not reached."""
    store, num_early = dist.distributed_c10d._get_default_store(), 0
    with _make(kind) as buffer:
        for i in range(20):
            if i % num_ranks == rank:
                time.sleep(0.005)
            store.add(f"reached {i}", 1)
            buffer.barrier()
            num_early += store.add(f"reached {i}", 0) != num_ranks
        buffer.all_gather_bytes(b"done")
    return num_early


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_early_on_cpus(kind: str) -> None:
    assert run_ranks(_rounds, 3, kind) == [0, 0, 0]


def _errors(rank: int, num_ranks: int) -> list[str]:
    seen = []
    buffer = _make("throughput")

    def barrier(timeout: float | None) -> None:
        buffer.barrier(timeout)
        buffer.check()  # on GPUs the host has not waited

    with pytest.raises(InvalidArgument if rank else epee.MismatchError) as refused:
        barrier(-1.0 if rank else None)
    seen.append(str(refused.value))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["given up"])
    try:
        barrier(0.3)
    except CommTimeoutError as error:
        seen.append(str(error))
    if rank == 0:
        store.set("given up", "")
    buffer.barrier()
    dist.barrier()
    buffer.close()
    with pytest.raises(InvalidState):
        buffer.barrier()
    return seen


def _check_errors(seen: list[Any]) -> None:
    (told, silent), (mine, *_) = seen
    assert "timeout must" in mine
    assert "rank 1 refused" in told
    assert told.startswith("barrier")
    assert silent.startswith("barrier")
    assert mine[:60] in told
    assert "rank 1" in silent


@pytest.mark.compiler
@pytest.mark.timeout(240)
@pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with")
def test_a_refused_and_a_late_rank_are_named_on_gpus() -> None:
    _check_errors(run_ranks(emulated, 2, _errors, timeout_s=200))


def test_a_refused_and_a_late_rank_are_named_on_cpus() -> None:
    _check_errors(run_ranks(_errors, 2))


def _unlike(rank: int, num_ranks: int, kind: str) -> list[str]:
    """What a rank is told that barriers while the other gathers bytes, or syncs."""
    told = []
    with _make(kind) as buffer:
        for other in (lambda: buffer.all_gather_bytes(b""), buffer.sync):
            with pytest.raises(epee.MismatchError) as refused:
                (buffer.barrier if rank == 0 else other)()
            told.append(str(refused.value))
            dist.barrier()
            buffer.sync()
        buffer.barrier()
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_a_barrier_is_no_other_call(kind: str) -> None:
    for gathers, syncs in run_ranks(_unlike, 2, kind):
        assert "rank 0 has barrier, rank 1 has all_gather_bytes" in gathers
        told = {"throughput": "rank 0 has barrier, rank 1 has sync", "latency": "all ranks must call sync"}
        assert told[kind] in syncs
        assert "all_gather_bytes" not in syncs
