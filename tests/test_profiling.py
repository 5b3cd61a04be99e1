"""Calls are ranges of a profiler, and ask it whether it runs at all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import epee
from epee import profiling
from tests.harness import run_ranks


@pytest.fixture
def buffer() -> epee.Buffer:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made = epee.Buffer(num_experts=4, hidden=64, num_topk=2, max_tokens_per_rank=8)
        yield made  # type: ignore[misc]
        made.close()
    finally:
        dist.destroy_process_group()


def _names(buffer: epee.Buffer) -> list[str]:
    x, idx = torch.ones(3, 64, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        got = buffer.dispatch(x, idx)
        buffer.combine(got.x, got.handle)  # type: ignore[arg-type]
        buffer.barrier()
    return [event.name for event in profiler.events() if event.name.startswith("epee.")]


def test_a_profiler_sees_calls_with_shapes_and_bytes(buffer: epee.Buffer) -> None:
    assert _names(buffer) == [
        "epee.Buffer.dispatch [3, 64] bfloat16, 384 bytes",
        "epee.Buffer.combine [3, 64] bfloat16, 384 bytes",
        "epee.Buffer.barrier",
    ]


def test_without_a_profiler_no_range_is_opened(buffer: epee.Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "label", None)  # would raise
    buffer.dispatch(torch.ones(3, 64, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64))


def test_a_pair_is_named_by_its_values() -> None:
    pair = torch.zeros(2, 128, dtype=torch.float8_e4m3fn), torch.zeros(2, 1)
    assert profiling.label("dispatch", ("", pair)) == "epee.str.dispatch [2, 128] float8_e4m3fn, 264 bytes"
    assert profiling.label("dispatch", ("", "no tensor")) == "epee.str.dispatch"


def _collectives(rank: int, num_ranks: int) -> list[str]:
    x, parts = torch.ones(3), [torch.empty(3) for _ in range(num_ranks)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(x)
        dist.all_gather(parts, x)
        dist.broadcast(x, 0, async_op=True).wait()  # type: ignore[union-attr]
        dist.barrier()
        if rank:
            dist.recv(x, 0)
        else:
            dist.send(x, 1)
    return [event.name for event in profiler.events() if event.name.startswith("epee.")]


def test_collectives_and_messages_are_ranges() -> None:
    names = run_ranks(_collectives, 2, backend="epee")
    for rank, how in enumerate(("send", "recv")):
        assert names[rank] == [
            "epee.ProcessGroup.all_reduce [3] float32, 12 bytes",
            "epee.ProcessGroup.all_gather [3] float32, 24 bytes",
            "epee.ProcessGroup.broadcast [3] float32, 12 bytes",
            "epee.ProcessGroup.barrier",
            f"epee.ProcessGroup.{how} [3] float32, 12 bytes",
        ]


def _unseen(rank: int, num_ranks: int) -> None:
    profiling.label = None  # type: ignore[assignment]  # would raise
    dist.all_reduce(torch.ones(3))
    dist.barrier()


def test_without_a_profiler_collectives_open_no_range() -> None:
    run_ranks(_unseen, 2, backend="epee")
