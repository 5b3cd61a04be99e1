"""A handle serves the buffer and the process that made it, and no other."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
import torch.distributed as dist

import epee
from tests.harness import run_ranks

HIDDEN = 16


def outcome(call: Any) -> str:
    """Return what a call ends with."""
    try:
        call()
    except Exception as exc:  # noqa: BLE001 - looked at by the test
        return f"{type(exc).__name__}: {exc}"
    return "no error"


def buffers() -> tuple[epee.Buffer, epee.LatencyBuffer]:
    group: Any = dist.group.WORLD
    shape = {"num_experts": 4, "num_topk": 1, "max_tokens_per_rank": 8}
    return epee.Buffer(group, hidden=HIDDEN, **shape), epee.LatencyBuffer(group, hidden=512, **shape)


def dispatched(rank: int) -> tuple[epee.Buffer, epee.LatencyBuffer, Any, Any, torch.Tensor]:
    buffer, latency = buffers()
    idx = torch.randint(0, 4, (6, 1), generator=torch.Generator().manual_seed(rank))
    x = torch.full((6, HIDDEN), 10.0 * (rank + 1), dtype=torch.bfloat16)
    got = buffer.dispatch(x, idx, torch.ones(6, 1), layout="expert")
    low = latency.dispatch(torch.ones(6, 512, dtype=torch.bfloat16), idx, torch.ones(6, 1))
    return buffer, latency, got, low, x


def pickled(rank: int, num_ranks: int) -> list[str]:
    _, _, got, low, _ = dispatched(rank)
    told = [outcome(lambda handle=handle: pickle.dumps(handle)) for handle in (got.handle, low.handle)]
    dist.barrier()
    return told


def test_a_handle_cannot_be_pickled() -> None:
    for told in run_ranks(pickled, 2):
        assert len(told) == 2
        assert all(text.startswith("UnsupportedError: a handle cannot be pickled") for text in told), told


def smuggled(rank: int, num_ranks: int) -> list[str]:
    """The fields of a handle, taken to another process one by one, as a pickle of an earlier version would."""
    buffer, latency, got, low, x = dispatched(rank)
    told = []
    for handle, use in (
        (got.handle, lambda other: buffer.combine(torch.zeros(other.num_recv, HIDDEN, dtype=torch.bfloat16), other)),
        (got.handle, lambda other: buffer.dispatch(x, handle=other)),
        (low.handle, lambda other: latency.combine(latency.combine_input(low.handle), other)),
    ):
        others: list[Any] = [None] * num_ranks
        dist.all_gather_object(others, dict(handle.__dict__))
        other = object.__new__(type(handle))
        other.__dict__.update(others[1 - rank])
        told.append(outcome(lambda use=use, other=other: use(other)))
    return told


def test_a_handle_of_another_process_is_refused() -> None:
    for told in run_ranks(smuggled, 2):
        assert [text.split(":")[0] for text in told] == ["StaleHandleError"] * 3, told


def copied(rank: int, num_ranks: int) -> None:
    buffer, _, got, _, x = dispatched(rank)
    for other in (copy.copy(got.handle), copy.deepcopy(got.handle)):
        assert torch.equal(buffer.combine(got.x, other).x, x)


def test_a_copy_of_a_handle_serves_as_the_handle_does() -> None:
    run_ranks(copied, 2)


def test_buffers_of_all_processes_have_numbers_of_their_own() -> None:
    numbers = [number for found in run_ranks(ids, 2) for number in found]
    assert len(set(numbers)) == len(numbers) == 4


def ids(rank: int, num_ranks: int) -> list[int]:
    _, _, got, low, _ = dispatched(rank)
    dist.barrier()
    return [got.handle.buffer_id, low.handle.buffer_id]
