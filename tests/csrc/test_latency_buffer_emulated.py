"""`epee.LatencyBuffer` over the emulated GPU: the tests of the CPU path, and what only a GPU path has."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
import epee.errors
from epee.errors import CommTimeoutError
from epee.gpu.platform import Platform
from epee.reference import latency as oracle
from tests.csrc.emulated import EmulatedPlatform, has_compiler
from tests.ep import test_latency_buffer as cpu_tests
from tests.ep.latency_cases import (
    Shape,
    bits,
    check_dispatched,
    check_round,
    combine,
    dispatch,
    expert_outputs,
    inputs,
    make,
)
from tests.harness import DEAD, run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


class EmulatedLatencyBuffer(epee.LatencyBuffer):
    """A GPU buffer without a GPU, with room for a few tokens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "device": "cuda"})

    @staticmethod
    def _platform_of(device: torch.device | str | None) -> Platform | None:
        return EmulatedPlatform(shared_bytes=64 << 10)


def emulated(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run a rank's function with `epee.LatencyBuffer` on the emulated GPU."""
    epee.LatencyBuffer = EmulatedLatencyBuffer  # type: ignore[misc]
    return function(rank, num_ranks, *args)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_way_to_call_gives_the_oracles_rows(num_ranks: int) -> None:
    run_ranks(emulated, num_ranks, cpu_tests._combinations, timeout_s=200)


def test_weights_of_either_call_and_partials_of_either_type() -> None:
    run_ranks(emulated, 4, cpu_tests._weights_and_partials, timeout_s=200)


SHAPE = Shape(num_experts=6, hidden=512, num_topk=2, max_tokens=6)


def _lost(rank: int, num_ranks: int) -> list[int] | None:
    """Rank 2 ends; with a mask the others go on and know what is lost, without it is an error; then they agree."""
    buffer = make(SHAPE, timeout=300.0)  # a wait of that length fails the test by its own time-out
    given = inputs(SHAPE, [6, 3, 5], 1)
    dispatch(buffer, given[rank])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    mask = torch.ones(3, dtype=torch.int32)
    got = dispatch(buffer, given[rank], active_ranks=mask)
    want = oracle.dispatch(given, 6, 6, got=[[True, True, False]] * 3)
    check_dispatched(got, want[rank])
    outputs = expert_outputs(want, 1)
    back = combine(buffer, outputs[rank], got, active_ranks=mask)
    sums = oracle.combine(given, want, outputs, got=[[True, True, False]] * 3)
    assert torch.equal(bits(back.x), bits(sums[rank]))
    assert torch.equal(back.lost_weight, oracle.lost_weight(given[rank], 2, [True, True, False]))
    with pytest.raises(epee.errors.RankFailedError, match="rank 2 is dead"):
        dispatch(buffer, given[rank])
    agreed = buffer.sync(mask)
    assert mask.tolist() == agreed.tolist() == [1, 1, 0]
    got = dispatch(buffer, given[rank], active_ranks=mask)
    check_dispatched(got, want[rank])
    buffer.close()
    return agreed.tolist()


def test_survivors_of_a_kill_go_on_and_agree() -> None:
    assert run_ranks(emulated, 3, _lost, timeout_s=200, dead={2}) == [[1, 1, 0], [1, 1, 0], DEAD]


def _told_early(rank: int, num_ranks: int) -> str:
    """Rank 1 is dead, but its pidfd does not say so: what a call without a mask raises names it all the same."""
    buffer = make(SHAPE, timeout=300.0)
    given = inputs(SHAPE, [6, 3], 1)
    dispatch(buffer, given[rank])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    path: Any = buffer._path
    path._watch.dead = tuple  # a process with memory on a GPU takes long to end

    def twice() -> None:  # what the kernels report may be found by the next call
        for _ in range(2):
            dispatch(buffer, given[rank])

    is_named = r"rank 1(: its process has ended| is dead)"  # by who hears of it first: the lane of the view, or kernels
    with pytest.raises(epee.errors.RankFailedError, match=is_named) as caught:
        twice()
    assert caught.value.ranks == (1,)
    with pytest.raises(epee.errors.RankFailedError, match=is_named):
        dispatch(buffer, given[rank])
    buffer.close()
    return caught.value.cause


def test_a_death_that_only_kernels_were_told_of_is_named() -> None:
    cause, dead = run_ranks(emulated, 2, _told_early, timeout_s=200, dead={1})
    assert (cause[-5:], dead) == ("ended", DEAD)


def _refused(rank: int, num_ranks: int) -> str:
    """A bad argument on one rank: everybody hears of it, and goes on."""
    with make(SHAPE, timeout=30.0) as buffer:
        given = inputs(SHAPE, [4, 4], 2)
        error = ""
        try:
            dispatch(buffer, given[rank], use_ue8m0=rank == 0)
        except epee.errors.EpeeError as caught:
            error = type(caught).__name__
        check_round(buffer, SHAPE, [4, 4], 3)
        return error


def test_bad_argument_of_one_rank_is_an_error_on_all() -> None:
    assert run_ranks(emulated, 2, _refused, timeout_s=100) == ["InvalidArgument", "MismatchError"]


def _late(rank: int, num_ranks: int) -> list[str]:
    """An MoE model of four layers, whose steps are made again after an error; rank 0 comes too late to one combine."""
    store, said = dist.distributed_c10d._get_default_store(), []
    with make(SHAPE, timeout=4.0) as buffer:
        idx = torch.tensor([[0, SHAPE.num_experts - 1]])  # one expert on each rank; weights 1
        layer = 1
        for attempt in range(8):
            if layer > 4:
                break
            try:
                d = buffer.dispatch(torch.ones(1, SHAPE.hidden, dtype=torch.bfloat16), idx, torch.ones(1, 2))
                if rank == 0 and attempt == 1:
                    store.wait(["timed out"])
                out = buffer.combine((d.x.float() * layer).bfloat16(), d.handle).x[0, 0].item()  # type: ignore[union-attr]
                buffer.check()
                said.append("right" if out == 2 * layer else f"layer {layer}: {out}")
                layer += 1
            except epee.EpeeError as error:
                said.append(f"{type(error).__name__}: {error}")
                store.set("timed out", "")
                if not isinstance(error, CommTimeoutError):  # and the ranks agree on the layer to be made again
                    assert buffer.sync(timeout=30).tolist() == [1, 1]
                    layer = min(part[0] for part in buffer.all_gather_bytes(bytes([layer])))
    return said


def test_a_call_that_has_timed_out_here_and_not_there_gives_nobody_wrong_results() -> None:
    late, other = run_ranks(emulated, 2, _late, timeout_s=200)
    assert [text.split(":")[0] for text in late] == ["right", "right", "MismatchError", *["right"] * 3]
    assert [text.split(":")[0] for text in other] == ["right", "CommTimeoutError", "InvalidState", *["right"] * 3]
    assert "call buffer.sync() on all ranks" in other[2]
