"""Mooncake's `ep.Buffer` over GPU buffers, without a GPU: kernels built by g++, real rank processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.compat.mooncake import ep, mask
from epee.ep.pool import latency as rooms
from tests.compat import test_early_memory as early
from tests.compat import test_mooncake_ep as on_cpu
from tests.compat import test_refusals as refusals
from tests.csrc.emulated import has_compiler
from tests.csrc.test_latency_buffer_emulated import EmulatedLatencyBuffer
from tests.harness import DEAD, run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


def _emulated(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run a rank's function with rooms on the emulated GPU."""
    rooms.LatencyBuffer = EmulatedLatencyBuffer  # type: ignore[misc]
    return function(rank, num_ranks, *args)


def test_who_does_not_meet_the_others_again_is_left_out(tmp_path: Path) -> None:
    told = run_ranks(_emulated, 4, on_cpu._away, str(tmp_path), backend="mooncake-cpu", timeout_s=200)
    assert told == [[1, 1, 1, 0]] * 3 + [[]]


def test_who_dies_before_the_first_call_is_masked() -> None:
    masked = [0, 1, 0, 0]
    assert run_ranks(_emulated, 4, early._dies_first, dead={1}, timeout_s=200) == [masked, DEAD, masked, masked]
    active = [1, 0, 1, 1]
    results = run_ranks(_emulated, 4, early._mooncake_dies_first, dead={1}, backend="mooncake-cpu", timeout_s=200)
    assert results == [active, DEAD, active, active]


def test_sizes_change_in_the_memory_that_was_given() -> None:
    run_ranks(_emulated, 2, early._sizes_change, timeout_s=200)


def _recorded(rank: int, num_ranks: int) -> None:
    """Calls without a mask may be recorded, the first one too: all find the same memory, which none writes here."""
    seen = []
    for name in ("dispatch", "combine"):
        method = getattr(EmulatedLatencyBuffer, name)

        def spied(self: Any, *args: Any, _method: Any = method, **options: Any) -> Any:
            seen.append((options["active_ranks"].data_ptr(), options["active_ranks"]._version))
            return _method(self, *args, **options)

        setattr(EmulatedLatencyBuffer, name, spied)
    buffer = ep.Buffer(dist.group.WORLD, ep.Buffer.get_ep_buffer_size_hint(4, 512, num_ranks, 8))
    rooms.is_capturing = mask.is_capturing = lambda: True
    try:
        on_cpu.a_round(buffer, None, 0, [True] * num_ranks)
    finally:
        rooms.is_capturing = mask.is_capturing = lambda: False
    on_cpu.a_round(buffer, None, 1, [True] * num_ranks)
    assert len(seen) == 4
    assert len({*seen}) == 1


def test_calls_without_a_mask_can_be_recorded() -> None:
    for backend in ("mooncake-cpu", "gloo"):
        run_ranks(_emulated, 2, _recorded, backend=backend, timeout_s=200)


def _recorded_growth(rank: int, num_ranks: int, num_tokens: int) -> None:
    """A call that needs more memory than there is cannot be recorded; it is no call, and makes it outside of a graph.

    `num_tokens`: for which the constructor is given memory; 0: the first call makes it.
    """
    large, everybody = replace(on_cpu.SHAPE, max_tokens=300), [True] * num_ranks
    buffer = ep.Buffer(
        dist.group.WORLD, num_tokens and ep.Buffer.get_ep_buffer_size_hint(num_tokens, 512, num_ranks, 8)
    )
    for shape in (large,) if num_tokens else (on_cpu.SHAPE, large):
        rooms.is_capturing = mask.is_capturing = lambda: True
        try:
            for _ in range(2):
                with pytest.raises(epee.InvalidArgument, match=r"need \d+ bytes of memory, which cannot be made while"):
                    on_cpu.a_round(buffer, None, 0, everybody, shape=shape)
            if num_tokens:
                on_cpu.a_round(buffer, None, 1, everybody)
        finally:
            rooms.is_capturing = mask.is_capturing = lambda: False
        on_cpu.a_round(buffer, None, 2, everybody, shape=shape)
    rooms.is_capturing = mask.is_capturing = lambda: True
    for shape in (on_cpu.SHAPE, large):
        on_cpu.a_round(buffer, None, 3, everybody, shape=shape)


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_memory_does_not_grow_in_a_recording(num_tokens: int) -> None:
    run_ranks(_emulated, 2, _recorded_growth, num_tokens, timeout_s=200)


def test_a_refusal_reaches_calls_that_grow() -> None:
    run_ranks(_emulated, 2, refusals.growth, (300, 600, 1000), timeout_s=200)


def test_a_mask_that_cannot_be_made_in_a_recording_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = mask.GroupMask(object(), 2, is_early=False)
    monkeypatch.setattr(mask, "is_capturing", lambda: True)
    with pytest.raises(epee.InvalidArgument, match=r"no mask on meta.*make one call before"):
        known.on(torch.device("meta"))


@pytest.mark.parametrize(("has_bytes", "meets"), [(True, False), (False, True)])
def test_a_second_buffer_of_one_rank_meets_the_others_that_update(has_bytes: bool, meets: bool) -> None:
    args = has_bytes, True, meets
    run_ranks(_emulated, 2, on_cpu._second, *args, backend="mooncake-cpu", timeout_s=200)
