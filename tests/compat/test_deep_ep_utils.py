"""`deep_ep.utils`: what DeepEP's test scripts import beside the buffers, and that its references agree with them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee.compat.deep_ep as deep_ep
from epee.compat.deep_ep.utils import envs, gate, math, refs, testing
from epee.errors import InvalidArgument, InvalidState
from tests.harness import run_ranks
from tests.ports import free_port

NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_MAX = 8, 3, 128, 7


def _script(rank: int, num_ranks: int, port: int) -> None:
    """What a test script of DeepEP's does: set up, dispatch and combine against the references."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "1", "RANK": "0"}
    found, size, group = envs.init_dist(rank, num_ranks, seed=5)
    try:
        assert (found, size, group.size()) == (rank, num_ranks, num_ranks)
        assert torch.get_default_dtype() == torch.bfloat16
        assert (envs.get_local_seed(), envs.get_global_seed()) == (5 + rank, 5)
        envs.dist_print("seen once", once_in_node=True)
        scores = gate.get_unbalanced_scores(NUM_MAX - rank, NUM_EXPERTS, num_ranks, NUM_TOPK, 1.0, False)
        weights, idx = scores.topk(NUM_TOPK, dim=1)
        x = torch.randn(len(idx), HIDDEN, dtype=torch.bfloat16)
        pair = deep_ep.utils.per_token_cast_to_fp8(x)
        bias = torch.randn(len(idx), HIDDEN, dtype=torch.bfloat16), torch.randn(len(idx), HIDDEN, dtype=torch.bfloat16)
        for is_multiple in (True, False):
            buffer = deep_ep.ElasticBuffer(
                group, num_max_tokens_per_rank=NUM_MAX, allow_multiple_reduction=is_multiple
            )  # fmt: skip
            for given in (x, pair):
                got = buffer.dispatch(given, topk_idx=idx, topk_weights=weights, num_experts=NUM_EXPERTS)
                rows, local, ref_weights, src, counts = refs.dispatch(given, idx, weights, NUM_MAX, NUM_EXPERTS)
                for mine, wanted in zip(
                    got[0] if isinstance(given, tuple) else got[:1],
                    rows if isinstance(given, tuple) else (rows,),
                    strict=True,
                ):
                    assert torch.equal(mine.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
                assert torch.equal(got[1], local)
                assert torch.equal(got[2], torch.where(local >= 0, ref_weights, 0))
                assert torch.equal(got[3].recv_src_metadata[:, 0], src)
                assert got[3].psum_num_recv_tokens_per_scaleup_rank.tolist() == counts.cumsum(0).tolist()
            got = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=NUM_EXPERTS, do_expand=True)
            meta = got[3].recv_src_metadata
            y = refs.generate_pre_combine_data(meta[:, 0], NUM_MAX, NUM_TOPK, HIDDEN)
            expanded = torch.zeros(len(got[0]), HIDDEN, dtype=torch.bfloat16)
            is_there = meta[:, 2:] >= 0
            expanded[meta[:, 2:][is_there].to(torch.int64)] = y[is_there]
            mine = torch.arange(len(x), dtype=torch.int32) + rank * NUM_MAX
            of_mine = refs.generate_pre_combine_data(mine, NUM_MAX, NUM_TOPK, HIDDEN)
            for added in (None, bias[0], bias):
                wanted = refs.combine(of_mine, idx, 1, num_ranks, NUM_EXPERTS, added, is_multiple, False)
                assert torch.equal(buffer.combine(expanded, got[3], bias=added)[0], wanted)
        dist.barrier()
    finally:
        dist.destroy_process_group()
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_script_of_deep_ep_agrees_with_its_references(num_ranks: int) -> None:
    run_ranks(_script, num_ranks, free_port(), backend=None)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0])
def test_scores_are_as_uneven_as_they_are_asked_to_be(precise: bool, ratio: float) -> None:
    torch.manual_seed(1)
    num_tokens, num_experts, num_ranks = 4000, 32, 4
    scores = gate.get_unbalanced_scores(num_tokens, num_experts, num_ranks, 4, ratio, precise)
    assert scores.shape == (num_tokens, num_experts)
    ranks = scores.topk(4, dim=1)[1] // (num_experts // num_ranks)
    counts = torch.nn.functional.one_hot(ranks, num_ranks).amax(1).sum(0).double()
    # of some 2500 tokens a rank, drawn one by one: six deviations of the quotient are below a tenth
    assert abs(float(counts[0] / counts[1:].mean()) / ratio - 1) < (0.002 if precise else 0.1)
    assert not precise or counts[1:].max() - counts[1:].min() <= 2


def test_scores_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="ratio must be at least 1"):
        gate.get_unbalanced_scores(8, 8, 2, 2, 0.5, True)
    with pytest.raises(InvalidArgument, match="do not fit"):
        gate.get_unbalanced_scores(8, 4, 4, 4, 3.0, True)


def test_times_are_those_of_what_is_named(tmp_path: Any) -> None:
    a = torch.ones(64, 64)
    average, least, most = testing.bench(lambda: a @ a, num_warmups=1, num_tests=4)
    assert 0 < least <= average <= most
    path = str(tmp_path / "trace.json")
    one = testing.bench_kineto(lambda: a @ a, "aten::mm", num_tests=3, suppress_kineto_output=True, trace_path=path)
    assert one > 0
    assert os.path.getsize(path) > 0
    several = testing.bench_kineto(lambda: (a @ a, a @ a), ("aten::mm", "no such"), 3, num_kernels_per_period=2)
    assert [len(each) for each in several] == [2, 2]
    assert min(several[0]) > 0
    assert several[1] == [0.0, 0.0]


def test_output_is_suppressed_and_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")
    with testing.suppress_stdout_stderr():
        print("within")
        os.write(1, b"below\n")
    print("behind")
    with testing.empty_suppress():
        print("all the same")
    assert capfd.readouterr().out == "before\nbehind\nall the same\n"


def test_small_arithmetic() -> None:
    assert (math.ceil_div(7, 4), math.align(7, 4), math.safe_div(0, 0), math.safe_div(6, 3)) == (2, 8, 0, 2)
    x = torch.randn(5, 6)
    assert math.calc_diff(x, x) == pytest.approx(0, abs=1e-12)
    assert math.calc_diff(x, x + 1) > 1e-3
    ids = torch.tensor([[1, 1, 0, -1], [-1, -1, -1, -1], [2, 0, 2, 2]])
    math.inplace_unique(ids, 3)
    assert [sorted(row) for row in ids.tolist()] == [[-1, -1, 0, 1], [-1, -1, -1, -1], [-1, -1, 0, 2]]
    scores = math.create_grouped_scores(torch.ones(2, 6), torch.tensor([[0, 2], [1, 1]]), 3)
    assert scores.tolist() == [[1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0]]
    assert math.count_bytes(x, None, (x, [ids])) == 2 * x.nbytes + ids.nbytes
    assert math.hash_tensors(x, (x,)) == 0
    assert math.hash_tensor(torch.tensor([1, 2], dtype=torch.int32)) == 3


def test_torch_must_not_fill_new_memory() -> None:
    envs.check_torch_deterministic()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(InvalidState, match="fill_uninitialized_memory"):
            envs.check_torch_deterministic()
    finally:
        torch.use_deterministic_algorithms(False)


def test_this_machine_has_no_rdma() -> None:
    assert envs.get_rdma_gbs() == 0
    assert not envs.check_fast_rdma_atomic_support()
    envs.check_nvlink_connections(None)  # type: ignore[arg-type]
    assert envs.get_nvlink_gbs() == (0 if not torch.cuda.is_available() else pytest.approx(430))
