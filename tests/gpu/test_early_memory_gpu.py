"""Memory that DeepEP's constructor makes, on real GPUs: first calls in a graph, a death before them, sizes that change.

Ranks share a GPU where there are fewer GPUs than ranks.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee.compat.deep_ep as deep_ep
from epee.errors import InvalidArgument, RankFailedError
from epee.reference import latency as oracle
from tests.compat.test_deep_ep_low_latency import check_rows
from tests.compat.test_early_memory import ALIVE, BIG, hint
from tests.ep.latency_cases import Shape, bits, expert_outputs, inputs
from tests.gpu.test_compat_gpu import on_cpu, own_gpu
from tests.harness import DEAD, run_ranks

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(120)]

SMALL = Shape(num_experts=8, hidden=512, num_topk=3, max_tokens=4)
MIDDLE = Shape(num_experts=16, hidden=256, num_topk=2, max_tokens=40)


def make(rank: int, num_ranks: int, **options: Any) -> tuple[Any, torch.device]:
    """Make DeepEP's buffer from the bytes that it names for the largest sizes; nobody has made a call."""
    device = own_gpu(rank)
    buffer = deep_ep.Buffer(dist.group.WORLD, num_rdma_bytes=hint(BIG, num_ranks), low_latency_mode=True, **options)
    return buffer, device


def call(buffer: Any, device: torch.device, shape: Shape, seed: int, got: list[bool]) -> None:
    """One dispatch and combine, compared with the oracle."""
    given = inputs(shape, [shape.max_tokens] * len(got), seed)
    mask = [got] * len(got)
    packed = oracle.dispatch(given, shape.num_experts, shape.max_tokens, use_fp8=False, got=mask)
    mine = given[buffer.rank]
    x, idx, weights = (part.to(device) for part in (mine.x, mine.topk_idx, mine.topk_weights))
    recv_x, counts, handle, _, _ = buffer.low_latency_dispatch(
        x, idx, shape.max_tokens, shape.num_experts, use_fp8=False
    )
    check_rows(on_cpu(recv_x), counts.cpu(), packed[buffer.rank])
    outputs = expert_outputs(packed, seed)
    combined, _, _ = buffer.low_latency_combine(outputs[buffer.rank].to(device), idx, weights, handle)
    wanted = oracle.combine(given, packed, outputs, got=mask)[buffer.rank]
    assert torch.equal(bits(combined.cpu()), bits(wanted))


def _dies_first(rank: int, num_ranks: int) -> list[int]:
    buffer, device = make(rank, num_ranks, enable_shrink=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for seed, shape in enumerate((BIG, SMALL, MIDDLE)):
        call(buffer, device, shape, seed, ALIVE)
    with pytest.raises(InvalidArgument, match=r"need \d+ bytes of memory.*cannot be made when a rank is lost"):
        call(buffer, device, Shape(8, 8192, 6, 300), 9, ALIVE)
    call(buffer, device, SMALL, 5, ALIVE)
    status = torch.empty(num_ranks, dtype=torch.int32, device=device)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def test_a_rank_that_dies_before_the_first_call_is_masked() -> None:
    masked = [0, 1, 0, 0]
    assert run_ranks(_dies_first, 4, dead={1}) == [masked, DEAD, masked, masked]


def _sizes_change(rank: int, num_ranks: int) -> None:
    buffer, device = make(rank, num_ranks)
    before = buffer.runtime.nbytes
    assert before >= hint(BIG, num_ranks)
    for seed in range(60):
        shape = Shape(8, 8 * (1 + seed % 7), 1 + seed % 6, 1 + seed % 48)
        call(buffer, device, shape, seed, [True] * num_ranks)
    assert buffer.runtime.nbytes == before


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sizes_change_in_the_memory_that_was_given(num_ranks: int) -> None:
    run_ranks(_sizes_change, num_ranks)


def _first_in_a_graph(rank: int, num_ranks: int) -> None:
    """The first calls of two sizes are recorded, then replayed 50 times with other routings."""
    buffer, device = make(rank, num_ranks)
    graphs = []
    for shape in (BIG, SMALL):
        x = torch.zeros(shape.max_tokens, shape.hidden, dtype=torch.bfloat16, device=device)
        idx = torch.zeros(shape.max_tokens, shape.num_topk, dtype=torch.int64, device=device)
        weights = torch.zeros(shape.max_tokens, shape.num_topk, dtype=torch.float32, device=device)
        num_rows = num_ranks * shape.max_tokens
        y = torch.zeros(shape.num_experts // num_ranks, num_rows, shape.hidden, dtype=torch.bfloat16, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = buffer.low_latency_dispatch(x, idx, shape.max_tokens, shape.num_experts, use_fp8=False)
            back = buffer.low_latency_combine(y, idx, weights, got[2])[0]
        graphs.append((shape, graph, (x, idx, weights, y), (got, back)))
    for seed in range(100):
        shape, graph, (x, idx, weights, y), (got, back) = graphs[seed % 2]
        given = inputs(shape, [shape.max_tokens] * num_ranks, seed)
        packed = oracle.dispatch(given, shape.num_experts, shape.max_tokens, use_fp8=False)
        outputs = expert_outputs(packed, seed)
        for static, part in ((x, given[rank].x), (idx, given[rank].topk_idx), (weights, given[rank].topk_weights)):
            static.copy_(part)
        y.copy_(outputs[rank])
        graph.replay()
        check_rows(on_cpu(got[0]), got[1].cpu(), packed[rank])
        assert torch.equal(bits(back.cpu()), bits(oracle.combine(given, packed, outputs)[rank]))
    with (
        pytest.raises(InvalidArgument, match=r"need \d+ bytes .* while a CUDA graph is recorded"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        buffer.low_latency_dispatch(torch.zeros(1, 8192, dtype=torch.bfloat16, device=device), idx[:1], 400, 8)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_first_calls_are_recorded_in_graphs(num_ranks: int) -> None:
    run_ranks(_first_in_a_graph, num_ranks)


NUM_TOKENS, HIDDEN, NUM_EXPERTS, NUM_TOPK = 48, 256, 16, 4


def _routing(seed: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of whole numbers, which sums keep, and experts."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randint(-8, 8, (NUM_TOKENS, HIDDEN), generator=generator).to(torch.bfloat16)
    idx = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(NUM_TOPK, 1).indices
    return x, idx


def _times(idx: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """How many ranks each token goes to."""
    owners = idx // (NUM_EXPERTS // num_ranks)
    return torch.stack([(owners == rank).any(1) for rank in range(num_ranks)]).sum(0)[:, None]


def _normal_calls(version: int, num_ranks: int, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> Any:
    """Make a buffer of a version; return what dispatches and combines: the rows back, and counts read under capture."""
    if version == 1:
        v1: Any = deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=32 << 20)

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            per_rank, _, per_expert, is_in, _ = v1.get_dispatch_layout(idx, NUM_EXPERTS)
            got = v1.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=is_in,
                num_tokens_per_expert=per_expert,
                topk_idx=idx,
                topk_weights=weights,
                num_worst_tokens=num_ranks * NUM_TOKENS,
            )
            return v1.combine(got[0], got[4])[0], per_expert

        return step
    v2: Any = deep_ep.ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=NUM_TOKENS, hidden=HIDDEN, num_topk=NUM_TOPK, num_cpu_timeout_secs=30
    )

    def expand() -> tuple[torch.Tensor, torch.Tensor]:
        got = v2.dispatch(x, idx, weights, num_experts=NUM_EXPERTS, do_cpu_sync=False, do_expand=version == 3)
        return v2.combine(got[0], got[3])[0], got[3].psum_num_recv_tokens_per_expert

    return expand


def _normal_first_in_a_graph(rank: int, num_ranks: int, version: int) -> None:
    """The first calls of V1 (1), V2 (2) and V2 expanded (3) are recorded, then replayed 100 times."""
    device = own_gpu(rank)
    x = torch.zeros(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
    idx = torch.zeros(NUM_TOKENS, NUM_TOPK, dtype=torch.int64, device=device)
    weights = torch.ones(NUM_TOKENS, NUM_TOPK, dtype=torch.float32, device=device)
    step = _normal_calls(version, num_ranks, x, idx, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        back, counts = step()
    num_local = NUM_EXPERTS // num_ranks
    for seed in range(100):
        rows, experts = _routing(seed, rank)
        x.copy_(rows)
        idx.copy_(experts)
        graph.replay()
        times = NUM_TOPK if version == 3 else _times(experts, num_ranks)
        assert torch.equal(back.cpu().float(), rows.float() * times)
        if version == 1:
            want = torch.bincount(experts.flatten(), minlength=NUM_EXPERTS)
        else:
            everybody = torch.cat([_routing(seed, src)[1].flatten() for src in range(num_ranks)])
            received = torch.bincount(everybody, minlength=NUM_EXPERTS)
            want = received[rank * num_local : (rank + 1) * num_local].cumsum(0)
        assert torch.equal(counts.cpu().long(), want)


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_first_normal_calls_are_recorded_in_graphs(num_ranks: int, version: int) -> None:
    run_ranks(_normal_first_in_a_graph, num_ranks, version)


def _normal_dies_first(rank: int, num_ranks: int) -> str:
    device = own_gpu(rank)
    x = torch.zeros(3, 64, dtype=torch.bfloat16, device=device)
    idx, weights = torch.zeros(3, 1, dtype=torch.int64, device=device), torch.ones(3, 1, device=device)
    buffer: Any = deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=32 << 20)
    elastic: Any = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=64, hidden=64, num_topk=1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    per_rank, _, per_expert, is_in, _ = buffer.get_dispatch_layout(idx, 4)
    counts = {"num_tokens_per_rank": per_rank, "is_token_in_rank": is_in, "num_tokens_per_expert": per_expert}
    for call_first in (
        lambda: buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **counts),
        lambda: elastic.dispatch(x, idx, weights, num_experts=4),
    ):
        with pytest.raises(RankFailedError, match="make a new one") as caught:
            call_first()
        assert caught.value.ranks == (1,)
    return "ok"


def test_a_death_before_the_first_normal_call_is_told() -> None:
    assert run_ranks(_normal_dies_first, 2, dead={1}) == ["ok", DEAD]
