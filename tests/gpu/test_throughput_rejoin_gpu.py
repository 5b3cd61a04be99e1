"""A process takes a lost rank's place in a throughput buffer on real GPUs, which ranks may share; graphs serve on."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch

import epee
from epee import reference
from epee.errors import RankFailedError
from tests.csrc import throughput_rejoin
from tests.csrc.survival_buffer_cases import CASE, case_for, check_round, until_lost
from tests.csrc.throughput_cases import Case, device_of, expect_equal, expert_output, inputs_of, seen_by
from tests.csrc.throughput_rejoin import addresses, begin, die, end, make, mask_of, without
from tests.ep.test_latency_rejoin import lose
from tests.gpu.test_survival_gpu import on_gpu
from tests.harness import DEAD, run_mortal
from tests.survive import stages

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]


def run_on_gpu(slot: int, num_processes: int, folder: str, name: str, *args: Any) -> Any:
    return on_gpu(slot, num_processes, getattr(throughput_rejoin, name), folder, *args)


def share(by_descriptors: bool) -> None:
    """Let this process lend memory by descriptors or by cudaIpc."""
    os.environ["EPEE_CUDA_SHARE"] = "" if by_descriptors else "ipc"


@pytest.mark.parametrize("victims", [(1,), (0, 0, 1)], ids=str)
def test_after_a_replacement_the_results_are_those_of_a_fresh_job(victims: tuple[int, ...]) -> None:
    throughput_rejoin.check_replaced(run_on_gpu, victims, timeout_s=250)


def test_a_newcomer_that_dies_when_it_has_mapped_the_others_disturbs_nobody() -> None:
    results = run_mortal(run_on_gpu, 5, "dies_halfway", "mapped", dead={1, 3}, timeout_s=250)
    assert results == ["ok", DEAD, "ok", DEAD, "ok"]


def test_memory_that_could_not_be_mapped_is_mapped_at_the_next_call() -> None:
    assert run_mortal(run_on_gpu, 4, "attaches_late", 1, dead={1}, timeout_s=250) == ["ok", DEAD, "ok", "ok"]


def test_a_newcomer_comes_in_while_another_rank_is_lost() -> None:
    results = run_mortal(run_on_gpu, 6, "two_after_each_other", dead={1, 3}, timeout_s=250)
    assert results == ["ok", DEAD, "ok", DEAD, "ok", "ok"]


def test_who_was_away_maps_the_newcomer_when_it_comes_back() -> None:
    results = run_mortal(run_on_gpu, 5, "away_meanwhile", dead={1}, timeout_s=250)
    assert results == ["ok", DEAD, "ok", "ok", "ok"]


def test_what_a_replaced_zombie_may_write_is_not_lent_before_it_has_ended() -> None:
    assert run_mortal(run_on_gpu, 4, "zombie", dead={1}, timeout_s=200) == ["ok", DEAD, "ok", "ok"]


@pytest.mark.parametrize("theirs", [False, True])
def test_a_newcomer_is_refused_where_memory_is_lent_by_cuda_ipc(theirs: bool) -> None:
    results = run_mortal(run_on_gpu, 4, "refused", share, theirs, dead={1}, timeout_s=250)
    assert results == ["ok", DEAD, "ok", "ok"]


class Recorded:
    """A dispatch and a combine recorded in a graph, with the memory that they read; or the same calls without one."""

    def __init__(self, buffer: epee.Buffer, case: Case) -> None:
        self.buffer, self.case = buffer, case
        device, given = buffer.config.device, inputs_of(case, buffer.rank)
        assert isinstance(given.x, torch.Tensor)
        assert given.topk_idx is not None
        assert given.topk_weights is not None
        self.inputs = tuple(part.to(device) for part in (given.x, given.topk_idx, given.topk_weights))
        self.out = torch.empty_like(self.inputs[0])
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.call(False)

    def call(self, sync: bool) -> None:
        """Make the two calls."""
        x, idx, weights = self.inputs
        ways: dict[str, Any] = {"layout": self.case.layout, "expert_alignment": self.case.expert_alignment}
        d = self.buffer.dispatch(x, idx, weights, sync=sync, timeout=40.0, **ways)
        assert isinstance(d.x, torch.Tensor)
        y = expert_output(d.x, self.buffer.rank, self.case)
        self.buffer.combine(y, d.handle, out=self.out, timeout=40.0)

    def play(self, seed: int, members: Collection[int], is_replay: bool = True) -> None:
        """Run it with other rows, as a graph or not; compares every bit."""
        this, rank = replace(self.case, seed=seed), self.buffer.rank
        given = inputs_of(this, rank)
        for to, source in zip(self.inputs, (given.x, given.topk_idx, given.topk_weights), strict=True):
            assert isinstance(source, torch.Tensor)
            to.copy_(source)
        if is_replay:
            self.graph.replay()
        else:
            self.call(True)
        torch.cuda.synchronize()
        self.buffer.check()
        _, inputs = seen_by(this, members)
        ways: dict[str, Any] = {"layout": this.layout, "expert_alignment": this.expert_alignment}
        want = reference.dispatch(inputs, this.num_experts, **ways)
        ys = [expert_output(there.x, src, this) for src, there in enumerate(want)]  # type: ignore[arg-type]
        expect_equal(self.out.cpu(), reference.combine(inputs, want, ys)[rank], f"seed {seed}")


def _graph(slot: int, num_processes: int, folder: str, layout: str) -> str:
    """Processes 0, 1, 2 are the ranks, 3 takes the place of 1; ranks 0 and 2 replay one graph through all of it."""
    num_ranks, victim = 3, 1
    torch.cuda.set_device(device_of(victim if slot >= num_ranks else slot))
    group, rank = begin(slot, num_ranks, folder, [victim])
    buffer = make(num_ranks, num_slots=4, device="cuda")
    case = case_for(num_ranks, replace(CASE, num_bias=0), layout, 1)
    if slot < num_ranks:
        everybody, survivors = range(num_ranks), without(num_ranks, victim)
        check_round(buffer, case, everybody)
        recorded = Recorded(buffer, case)
        for seed in range(3):
            recorded.play(seed, everybody)
        stages.meet(folder, "made", rank, everybody)
        if slot == victim:
            die()
        assert isinstance(until_lost(lambda: recorded.play(3, everybody)), RankFailedError)
        assert buffer.sync().tolist() == mask_of(num_ranks, survivors)
        for seed in range(4, 7):
            recorded.play(seed, survivors)
        before = addresses(buffer)
        lose(group, folder, victim, "lost 1")
        assert buffer.sync().tolist() == [1] * num_ranks
        if layout == "expert":
            check_round(buffer, case, range(num_ranks))  # the first behind a sync is not a graph's
        assert addresses(buffer) == before
    else:
        if layout == "expert":
            check_round(buffer, case, range(num_ranks))
        recorded = Recorded(buffer, case)
    for seed in range(10, 20):
        recorded.play(seed, range(num_ranks), is_replay=slot != 3 or seed % 2 == 0)
    check_round(buffer, case, range(num_ranks))
    recorded.graph.reset()
    return end(buffer, folder)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_a_graph_recorded_before_a_replacement_serves_on(layout: str) -> None:
    assert run_mortal(_graph, 4, layout, dead={1}, timeout_s=250) == ["ok", DEAD, "ok", "ok"]
