"""Calls are ranges of a profiler, and ask it whether it runs at all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import epee
from epee.ep.gpu import ranges


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
    monkeypatch.setattr(ranges, "label", None)  # would raise
    buffer.dispatch(torch.ones(3, 64, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64))


def test_a_pair_is_named_by_its_values() -> None:
    pair = torch.zeros(2, 128, dtype=torch.float8_e4m3fn), torch.zeros(2, 1)
    assert ranges.label("dispatch", ("", pair)) == "epee.str.dispatch [2, 128] float8_e4m3fn, 264 bytes"
    assert ranges.label("dispatch", ("", "no tensor")) == "epee.str.dispatch"
