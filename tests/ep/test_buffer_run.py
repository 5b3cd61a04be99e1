"""How a call runs (`async_op`, `previous_event`, `num_sms`, `sync`) has a meaning on the CPU as well; CPUs and GPUs do
not mix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import epee
from epee.gpu.event import DONE, Event
from tests.csrc.emulated import has_compiler
from tests.csrc.emulated_buffer import EmulatedBuffer
from tests.ep import gpu_buffer_cases
from tests.ep.gpu_buffer_cases import make, tokens
from tests.harness import run_ranks


def test_calls_with_events_give_the_same_on_the_cpu() -> None:
    run_ranks(gpu_buffer_cases.events, 2)


def _without_sync(rank: int, num_ranks: int) -> None:
    with make(num_ranks) as buffer:
        x, idx, weights = tokens(buffer, 7)
        want = buffer.dispatch(x, idx, weights)
        got = buffer.dispatch(x, idx, weights, sync=False)
        assert isinstance(got.x, torch.Tensor)
        assert isinstance(want.x, torch.Tensor)
        assert torch.equal(got.x, want.x)
        assert got.num_tokens_per_expert == want.num_tokens_per_expert
        assert got.handle.recv_counts.tolist() == [len(want.x), *want.num_tokens_per_expert]
        assert got.event is DONE
        assert got.event.query()
        buffer.check()
        assert buffer.max_num_sms == 0


def test_without_cpu_sync_results_are_exact_on_the_cpu_all_the_same() -> None:
    run_ranks(_without_sync, 2)


def _bad_run(rank: int, num_ranks: int) -> list[str]:
    seen = []
    with make(num_ranks) as buffer:
        x, idx, _ = tokens(buffer, 3)
        for options in ({"num_sms": -1}, {"num_sms": True}, {"async_op": None}, {"previous_event": 3}, {"sync": 0}):
            bad: Any = options if rank == 1 else {}
            with pytest.raises(epee.InvalidArgument if rank == 1 else epee.MismatchError) as caught:
                buffer.dispatch(x, idx, **bad)
            seen.append(str(caught.value))
        buffer.dispatch(x, idx)
    return seen


def test_a_bad_way_to_run_is_refused_by_name() -> None:
    peer, here = run_ranks(_bad_run, 2)
    names = ("num_sms", "num_sms", "async_op", "previous_event", "sync")
    for name, mine, told in zip(names, here, peer, strict=True):
        assert mine.startswith(f"{name} must be")
        assert mine[:80] in told


def test_an_event_of_a_call_that_is_done_waits_for_nothing() -> None:
    for event in (DONE, Event()):
        event.wait()
        event.synchronize()
        assert event.query()
        assert event.recorded() is None


def _mixed(rank: int, num_ranks: int) -> str:
    if rank == 1:
        epee.Buffer = EmulatedBuffer  # type: ignore[misc]
    with pytest.raises(epee.MismatchError) as caught:
        make(num_ranks)
    return str(caught.value)


@pytest.mark.compiler
@pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with")
def test_cpus_and_gpus_do_not_mix() -> None:
    texts = run_ranks(_mixed, 2)
    assert texts[0] == texts[1]
    assert "ranks disagree about device: rank 0 has cpu, rank 1 has cuda" in texts[0]
