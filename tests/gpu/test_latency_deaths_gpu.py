"""A hundred deaths in one run of a latency buffer on real GPUs.

Two ranks live through all of it, a third one is killed at a random moment of a random call, and replaced. Ranks may
share a GPU. Run with `-s` to see how long the survivors' calls took to end; nothing here asserts a time.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import epee
from epee.reference import latency as oracle
from tests.csrc.latency_cases import same
from tests.csrc.latency_deaths import device_of, run_deaths
from tests.ep.latency_cases import Shape, expert_outputs, inputs
from tests.ep.test_latency_rejoin import end, lose, make_buffer, start
from tests.harness import DEAD, run_mortal
from tests.survive import stages

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(580)]

NUM_KILLS = int(os.environ.get("EPEE_TEST_KILLS", "105"))


def test_a_rank_dies_and_is_replaced_a_hundred_times() -> None:
    found = run_deaths("cuda", NUM_KILLS, seed=7, num_spares=6, timeout_s=560)
    print(f"\n{NUM_KILLS} kills: {found}")
    assert sum(map(len, [*found.in_flight.values(), *found.later.values()])) == 2 * NUM_KILLS


SHAPE = Shape(num_experts=12, hidden=512, num_topk=2, max_tokens=8)
NUM_TOKENS = (8, 5)


class Recorded:
    """A dispatch and a combine recorded in a graph, with the memory that they read."""

    def __init__(self, buffer: epee.LatencyBuffer, mask: torch.Tensor) -> None:
        self.buffer, self.mask = buffer, mask
        count, device = NUM_TOKENS[buffer.rank], mask.device
        self.x = torch.zeros(count, SHAPE.hidden, dtype=torch.bfloat16, device=device)
        self.idx = torch.full((count, SHAPE.num_topk), -1, dtype=torch.int64, device=device)
        self.weights = torch.zeros(count, SHAPE.num_topk, device=device)
        rows = SHAPE.num_experts // 2, 2 * SHAPE.max_tokens, SHAPE.hidden
        self.y = torch.zeros(*rows, dtype=torch.bfloat16, device=device)
        self.graph = torch.cuda.CUDAGraph()
        ways: dict[str, Any] = {"active_ranks": mask, "timeout_us": 40_000_000}
        with torch.cuda.graph(self.graph):
            self.d: Any = buffer.dispatch(self.x, self.idx, self.weights, **ways)
            self.c: Any = buffer.combine(self.y, self.d.handle, **ways)

    def replay(self, seed: int, alive: list[bool]) -> None:
        """Replay it with other rows; compares every bit."""
        rank, got = self.buffer.rank, [alive] * 2
        given = inputs(SHAPE, NUM_TOKENS, seed)
        packed = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens, got=got)
        outputs = expert_outputs(packed, seed)
        for to, source in ((self.x, given[rank].x), (self.idx, given[rank].topk_idx), (self.y, outputs[rank])):
            to.copy_(source)
        self.weights.copy_(given[rank].topk_weights)
        torch.cuda.synchronize()
        self.graph.replay()
        torch.cuda.synchronize()
        want = packed[rank]
        same(self.d.got.cpu(), want.got, f"seed {seed}: got")
        same(self.d.num_tokens_per_expert.cpu(), want.num_tokens_per_expert, f"seed {seed}: counts")
        for expert, rows in enumerate(want.num_tokens_per_expert.tolist()):
            same(self.d.x.cpu()[expert, :rows], want.x[expert, :rows], f"seed {seed}: rows of expert {expert}")
        same(self.c.x.cpu(), oracle.combine(given, packed, outputs, got=got)[rank], f"seed {seed}: combine")
        self.buffer.check()


def _graph(slot: int, num_processes: int, folder: str) -> list[int]:
    """Processes 0 and 1 are the ranks, 2 takes the place of 1; rank 0 replays one graph through all of it."""
    rank = 1 if slot == 2 else slot
    device = device_of(rank)
    torch.cuda.set_device(device)
    torch.ones(1, device=device)
    if slot == 2:
        stages.wait_for(folder, "lost", 100)
    group = start(rank, 2, folder, joins=slot == 2)
    sizes = {"num_experts": SHAPE.num_experts, "max_tokens_per_rank": SHAPE.max_tokens}
    buffer = make_buffer(group, device=device, **sizes)
    mask = torch.ones(2, dtype=torch.int32, device=device)
    recorded = Recorded(buffer, mask)
    if slot != 2:
        for seed in range(3):
            recorded.replay(seed, [True, True])
        if slot == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for seed in range(3, 6):
            recorded.replay(seed, [True, False])
        assert mask.tolist() == [1, 0]
        lose(group, folder, 1, "lost")
        assert buffer.sync(mask).tolist() == [1, 1]
    for seed in range(6, 12):
        recorded.replay(seed, [True, True])
    end(buffer, folder)
    return mask.tolist()


def test_a_graph_recorded_before_a_replacement_serves_on() -> None:
    assert run_mortal(_graph, 3, dead={1}, timeout_s=200) == [[1, 1], DEAD, [1, 1]]
