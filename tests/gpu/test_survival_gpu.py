"""`Buffer` on real GPUs goes on without ranks that die or are late; graphs replay into the view of their day."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import epee
from epee import reference
from epee.ep.throughput.gpu.types import CombineOptions, DispatchOptions
from epee.errors import MismatchError, ResourceError
from tests.csrc import survival_buffer_cases, throughput_survival
from tests.csrc.emulated import all_gather_bytes
from tests.csrc.throughput_cases import Case, device_of, expect_equal, expert_output, inputs_of, seen_by
from tests.harness import run_ranks

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(240)]


@pytest.mark.parametrize("name", throughput_survival.CHECKS)
def test_loss_is_told_and_survived(name: str) -> None:
    throughput_survival.CHECKS[name]("cuda")


def on_gpu(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run a rank's function with `epee.Buffer` on its GPU, which ranks may share."""
    torch.cuda.set_device(device_of(rank))
    plain = epee.Buffer

    class GpuBuffer(plain):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{"device": "cuda", **options})

    epee.Buffer = GpuBuffer  # type: ignore[misc]
    return function(rank, num_ranks, *args)


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("is_known", [True, False])
def test_survivors_of_a_kill_agree_and_go_on(layout: str, is_known: bool) -> None:
    throughput_survival.expect_only_dead(on_gpu, 3, survival_buffer_cases.lost, layout, is_known)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_late_rank_is_left_out_and_comes_back(layout: str) -> None:
    *others, last = run_ranks(on_gpu, 3, survival_buffer_cases.late, layout, timeout_s=200)
    assert others == ["", ""]
    told = ("EvictedError", "CommTimeoutError", "MismatchError")  # the latter before its agent has heard of it
    assert last in [f"{error} NoQuorumError" for error in told]


def _graph(rank: int, num_ranks: int) -> str:
    """A graph that was recorded among all ranks is replayed in two other views, each time with the reference's bits.

    Its own slot is haunted while a rank that was left out lives and may be behind: that is an error, not a wrong row.
    """
    core = throughput_survival.open_core(rank, num_ranks, "cuda")
    case = replace(throughput_survival.BASE, num_tokens=(20,) * num_ranks, with_weights=False)
    given = inputs_of(case, rank)
    assert isinstance(given.x, torch.Tensor)
    assert given.topk_idx is not None
    x, idx = given.x.cuda(), given.topk_idx.cuda()
    out = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d = core.dispatch(x, None, idx, None, None, DispatchOptions(sync=False, timeout_s=20.0))
        core.combine(expert_output(d.x, rank, case), d.handle, None, (), out, CombineOptions(timeout_s=20.0))
    _replay(core, case, graph, x, idx, out, range(num_ranks))
    left = list(range(num_ranks - 1))
    all_gather_bytes(b"all have left the last replay")
    if rank in left:
        throughput_survival.enter(core, left, 10_000)
        graph.replay()
        torch.cuda.synchronize()
        error = throughput_survival.error_of(core.check)
        assert isinstance(error, (ResourceError, MismatchError)), error  # each hears of the first that refuses
        core.machine.bury([num_ranks - 1])  # as if its process had ended
        throughput_survival.play_all(core, 3, 2, left)
        _replay(core, case, graph, x, idx, out, left)
    tag = max(throughput_survival.gather_int(core.machine.tags())) + 8
    throughput_survival.enter(core, range(num_ranks), tag)
    _replay(core, case, graph, x, idx, out, range(num_ranks))
    return "good"


def _replay(core: Any, case: Case, graph: Any, x: torch.Tensor, idx: torch.Tensor, out: torch.Tensor, who: Any) -> None:
    rank = core.config.rank
    for seed in range(5):
        this = replace(case, seed=seed)
        given = inputs_of(this, rank)
        assert isinstance(given.x, torch.Tensor)
        assert given.topk_idx is not None
        x.copy_(given.x)
        idx.copy_(given.topk_idx)
        graph.replay()
        torch.cuda.synchronize()
        core.check()
        _, inputs = seen_by(this, who)
        want = reference.dispatch(inputs, case.num_experts)
        ys = [expert_output(there.x, src, case) for src, there in enumerate(want)]  # type: ignore[arg-type]
        expect_equal(out.cpu(), reference.combine(inputs, want, ys)[rank], f"replay {seed} among {list(who)}")


def test_graph_replays_into_the_view_of_its_day() -> None:
    assert run_ranks(_graph, 3, timeout_s=200) == ["good"] * 3
