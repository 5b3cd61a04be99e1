"""`Buffer` on real GPUs: the same bits as the reference, rounds at random, graphs, two buffers, two streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epee.ep.throughput.gpu.types import CombineOptions, DispatchOptions
from tests.csrc.throughput_cases import Case, check_case, expect_equal, inputs_of, make_buffer
from tests.csrc.throughput_stress import STALL_ONE_IN, stress
from tests.harness import run_ranks

pytestmark = [pytest.mark.timeout(300)]

# Pairwise over what the kernels branch on; the large ones are what a model would send.
CASES = {
    "one rank": Case((4096,), hidden=2048, num_local_experts=32, num_topk=8),
    "one rank, float16": Case((17,), dtype="float16", payload="float16", hidden=7176, num_topk=1),
    "one rank, experts anywhere": Case((128,), hidden=7168, num_local_experts=256, num_topk=8, is_permuted=True),
    "two ranks, experts anywhere": Case((700, 40), hidden=2048, num_local_experts=16, num_topk=4, is_permuted=True),
    "two ranks, expert, experts anywhere": Case((300, 40), layout="expert", expert_alignment=16, hidden=2048,
                                                num_local_experts=16, num_topk=4, is_permuted=True),
    "two ranks": Case((17, 300), hidden=7168, num_topk=4, num_bias=1),
    "two ranks, float32": Case((129, 64), dtype="float32", payload="float32", hidden=7176, num_topk=9,
                               num_local_experts=8, num_bias=2),
    "two ranks, fp8": Case((500, 3), payload="fp8", hidden=7168, num_topk=8, num_local_experts=8),
    "two ranks, expert": Case((300, 200), layout="expert", expert_alignment=128, hidden=2048, num_topk=8,
                              num_local_experts=16),
    "two ranks, two kernels and one": Case((700, 40), hidden=2048, num_topk=4, num_bias=1),
    "two ranks, expert, fp8": Case((300, 40), layout="expert", expert_alignment=16, hidden=2048, num_topk=4,
                                   payload="fp8"),
    "two ranks, expert, one expert": Case((700, 300), layout="expert", routing="one expert", expert_alignment=128,
                                          hidden=2048, num_sms=8),
    "two ranks, expert, many senders": Case((129, 1), layout="expert", hidden=7168, num_topk=8, num_local_experts=16,
                                            num_sms=100),
    "two ranks, expert, wide rows": Case((200, 90), dtype="float32", payload="float32", hidden=7176, num_topk=4,
                                         layout="expert", expert_alignment=8, num_sms=2),
    "two ranks, repeats": Case((64, 33), routing="repeats", hidden=128, num_local_experts=1, num_topk=8),
    "four ranks": Case((4096, 1, 0, 17), hidden=2048, num_topk=8, num_local_experts=64),
    "four ranks, model": Case((512, 512, 512, 512), hidden=7168, num_topk=8, num_local_experts=64, num_bias=1,
                              is_bias_wide=True),
    "four ranks, float16": Case((40, 41, 42, 43), dtype="float16", payload="float16", hidden=7176, num_topk=4),
    "four ranks, float32, expert": Case((40, 0, 42, 43), dtype="float32", payload="float32", hidden=7176, num_topk=4,
                                        layout="expert", expert_alignment=8),
    "four ranks, wide float32": Case((9, 10, 11, 12), dtype="float32", payload="float32", hidden=16384, num_topk=32,
                                     num_local_experts=16),
    "four ranks, mask": Case((400, 300, 200, 100), routing="mask", with_weights=False, hidden=7168),
    "four ranks, expert": Case((512, 300, 7, 128), layout="expert", expert_alignment=128, hidden=7168, num_topk=8,
                               num_local_experts=16),
    "four ranks, expert, fp8": Case((512, 300, 7, 128), layout="expert", expert_alignment=128, hidden=7168, num_topk=8,
                                    num_local_experts=16, payload="fp8"),
    "four ranks, one expert": Case((300, 300, 300, 300), routing="one expert", hidden=2048, num_topk=8, num_sms=8),
    "four ranks, nowhere": Case((30, 30, 30, 30), routing="nowhere"),
    "four ranks, no tokens": Case((0, 0, 0, 0)),
    "four ranks, one SM": Case((70, 80, 90, 100), hidden=128, num_sms=1),
    "four ranks, all SMs": Case((70, 80, 90, 100), hidden=7168, num_sms=132),
}  # fmt: skip
# Rank 0 of the first one has too many tokens for the one kernel that rank 1 uses.
SMOKE = {
    "two ranks, two kernels and one": pytest.mark.smoke(
        "throughput/layout", "throughput/dispatch", "throughput/few", "throughput/combine", "barrier"
    ),
    "two ranks, expert, fp8": pytest.mark.smoke("throughput/expert", "fp8"),
}


def _marks(name: str, case: Case) -> list[pytest.MarkDecorator]:
    return [pytest.mark.gpu(case.num_ranks), *([SMOKE[name]] if name in SMOKE else [])]


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name, case)) for name, case in CASES.items()])
def test_same_bits_as_reference(name: str) -> None:
    check_case(CASES[name], "cuda", timeout_s=280)


@pytest.mark.gpu(1)
def test_random_rounds_of_one_rank() -> None:
    run_ranks(stress, 1, "cuda", 500, 11, 0, timeout_s=200)


@pytest.mark.gpu(2)
def test_random_rounds_of_two_ranks() -> None:
    run_ranks(stress, 2, "cuda", 1000, 12, STALL_ONE_IN, timeout_s=200)


@pytest.mark.gpu(4)
@pytest.mark.parametrize("stall_one_in", [0, STALL_ONE_IN])
def test_five_thousand_random_rounds(stall_one_in: int) -> None:
    run_ranks(stress, 4, "cuda", 5000, 13 + stall_one_in, stall_one_in, timeout_s=280)


def _graph(rank: int, num_ranks: int) -> Any:
    torch.cuda.set_device(rank)
    case = Case((33,) * num_ranks, hidden=2048, num_topk=4)
    buffer = make_buffer(case, rank, "cuda")
    x = torch.zeros(33, 2048, device="cuda", dtype=torch.bfloat16)
    idx = torch.full((33, 4), -1, device="cuda")
    out = torch.empty_like(x)
    options = DispatchOptions(sync=False, timeout_s=10.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d = buffer.dispatch(x, None, idx, None, None, options)
        buffer.combine(d.x, d.handle, None, (), out, CombineOptions(timeout_s=10.0))
    tails = []
    for seed in range(20):
        given = inputs_of(Case((33,) * num_ranks, hidden=2048, num_topk=4, seed=seed), rank)
        assert isinstance(given.x, torch.Tensor)
        assert given.topk_idx is not None
        x.copy_(given.x)
        idx.copy_(given.topk_idx)
        graph.replay()
        torch.cuda.synchronize()
        there = torch.stack([(idx // 4 == dst).logical_and(idx >= 0).any(1) for dst in range(num_ranks)]).sum(0)
        acc = torch.zeros_like(x, dtype=torch.float32)
        for count in range(num_ranks):
            acc = torch.where((there > count)[:, None], acc + x.float(), acc)
        expect_equal(out + 0.0, acc.to(torch.bfloat16) + 0.0, f"replay {seed}")
        rows = int(d.handle.recv_info[2])
        assert d.topk_idx is not None
        tails.append(bool((d.topk_idx[rows:] == -1).all()) and bool((d.topk_idx[:rows] >= 0).any(1).all()))
    buffer.check()
    return tails


@pytest.mark.gpu(2)
def test_graph_replays_with_new_routing() -> None:
    for tails in run_ranks(_graph, min(4, torch.cuda.device_count()), timeout_s=200):
        assert all(tails)


def _two_buffers(rank: int, num_ranks: int) -> bool:
    torch.cuda.set_device(rank)
    case = Case((200,) * num_ranks, hidden=2048, num_topk=4)
    buffers = [make_buffer(case, rank, "cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    given = inputs_of(case, rank)
    assert isinstance(given.x, torch.Tensor)
    assert given.topk_idx is not None
    x, idx = given.x.cuda(), given.topk_idx.cuda()
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        for buffer, stream in zip(buffers, streams, strict=True):
            with torch.cuda.stream(stream):
                d = buffer.dispatch(x, None, idx, None, None, DispatchOptions(sync=False, timeout_s=10.0))
                results.append(buffer.combine(d.x, d.handle, None, (), None, CombineOptions(timeout_s=10.0))[0])
    torch.cuda.synchronize()
    for buffer in buffers:
        buffer.check()
    return all(torch.equal(result, results[0]) for result in results)


@pytest.mark.gpu(2)
def test_two_buffers_on_two_streams() -> None:
    assert all(run_ranks(_two_buffers, min(4, torch.cuda.device_count()), timeout_s=200))
