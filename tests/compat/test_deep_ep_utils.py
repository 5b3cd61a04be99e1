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


def _quantised(num_tokens: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows in FP8, their scales (powers of two), and what these stand for."""
    x = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(hidden))
    stored, scales = math.per_token_cast_to_fp8(x, round_scale=True)
    wide = stored.float() * scales.repeat_interleave(128, 1)[:, :hidden]
    return stored, scales, wide.to(torch.bfloat16)


@pytest.mark.parametrize("hidden", [128, 200, 512, 640, 1024])
def test_a_cast_back_takes_scales_of_any_shape(hidden: int) -> None:
    stored, scales, want = _quantised(6, hidden)
    blocks = scales.shape[1]
    by_column = scales.t().contiguous().t()  # as low-latency calls return them
    wide = torch.zeros(6, blocks + 3)
    wide[:, :blocks] = scales
    shapes = [scales, scales.view(-1), scales[:, :, None], scales.view(6, 1, blocks), scales.view(3, 2, -1), by_column]
    for given in (*shapes, wide[:, :blocks], scales.double(), scales.view(1, -1)):
        assert torch.equal(math.per_token_cast_back(stored, given), want), list(given.shape)
    assert torch.equal(math.per_token_cast_back(stored.t().contiguous().t(), scales), want)


@pytest.mark.parametrize("hidden", [128, 512, 640, 1024])
def test_a_cast_back_takes_packed_scales_of_any_shape(hidden: int) -> None:
    stored, scales, want = _quantised(8, hidden)
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
    filled = torch.nn.functional.pad(exponents, (0, -exponents.shape[1] % 4), value=7)
    rows = filled.view(torch.int32)  # each row in words of its own
    dense = exponents.reshape(-1).view(torch.int32)  # one word after the other
    for given in (rows, rows.t().contiguous().t(), rows[:, :, None], rows.reshape(-1), dense, dense.view(2, -1)):
        assert torch.equal(math.per_token_cast_back(stored, given), want), list(given.shape)
    assert torch.equal(math.per_token_cast_back(stored, rows.view(torch.uint32)), want)


def test_a_cast_back_takes_one_scale_for_each_row() -> None:
    stored = torch.randn(4, 384).to(torch.float8_e4m3fn)
    scales = torch.tensor([0.5, 1.0, 2.0, 4.0])
    want = (stored.float() * scales[:, None]).bfloat16()
    words = torch.tensor([126, 127, 128, 129], dtype=torch.uint8).view(torch.int32)
    for given in (scales, scales[:, None], scales[:, None, None], words):
        assert torch.equal(math.per_token_cast_back(stored, given), want)


def test_a_cast_back_takes_rows_of_any_number_of_dimensions() -> None:
    stored, scales, want = _quantised(6, 256)
    for shape in ((2, 3, 256), (6, 1, 256), (1, 2, 3, 256)):
        got = math.per_token_cast_back(stored.view(shape), scales.view(*shape[:-1], 2))
        assert torch.equal(got, want.view(shape))
    by_expert = torch.tensor([0.5, 2.0])
    got = math.per_token_cast_back(stored.view(2, 3, 256), by_expert)
    assert torch.equal(got, (stored.view(2, 3, 256).float() * by_expert[:, None, None]).bfloat16())
    assert math.per_token_cast_back(stored[:0], scales[:0]).shape == (0, 256)
    assert math.per_token_cast_back(stored[:, :0], scales).shape == (6, 0)
    assert torch.equal(math.per_token_cast_back(stored[:1, :128], scales[0, 0]), want[:1, :128])


@pytest.mark.parametrize("shape", [(6, 3), (5, 2), (7,), (0,)])
def test_a_cast_back_refuses_scales_that_do_not_fit(shape: tuple[int, ...]) -> None:
    stored = torch.zeros(6, 256, dtype=torch.float8_e4m3fn)
    with pytest.raises(InvalidArgument, match=r"x_scales must hold 2 scales for each of 6 rows"):
        math.per_token_cast_back(stored, torch.ones(shape))
    with pytest.raises(InvalidArgument, match=r"x_fp8 must be \[num_tokens, hidden\]"):
        math.per_token_cast_back(stored[0], torch.ones(2))


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.float64],
)
def test_a_tensor_of_any_dtype_and_place_has_a_sum(dtype: torch.dtype) -> None:
    values = torch.arange(21).remainder(3).to(dtype)
    for part in (values[:5], values[:0], values.view(3, 7)[:, ::2], values[3], values.view(7, 3).t()):
        again = torch.empty(part.numel() + 1, dtype=dtype)[1:]
        again.copy_(part.reshape(-1))
        assert math.hash_tensor(part) == math.hash_tensor(again)
    words = torch.tensor([1, 2, 1 << 30], dtype=torch.int32)
    assert math.hash_tensor(words.view(torch.uint8)) == math.hash_tensor(words) == 3 + (1 << 30)
    assert math.hash_tensors(None, words, [words, None]) == 0


def test_small_arithmetic_takes_what_has_no_elements_and_tensors() -> None:
    assert math.calc_diff(torch.zeros(0, 3), torch.zeros(0, 3)) == 0
    assert math.safe_div(torch.tensor([0.0, 4.0]), torch.tensor([1.0, 2.0])).tolist() == [0, 2]
    with pytest.raises(ZeroDivisionError):
        math.safe_div(1, 0)
    ids = torch.tensor([[1, 1, 0, -1], [2, -1, 2, 2]], dtype=torch.int32)
    math.inplace_unique(ids, 3)
    assert ids.tolist() == [[1, 0, -1, -1], [2, -1, -1, -1]]


@pytest.mark.parametrize(("num_ranks", "num_topk"), [(2, 6), (2, 8), (4, 8)])
def test_even_scores_fill_all_ranks(num_ranks: int, num_topk: int) -> None:
    scores = gate.get_unbalanced_scores(20, 8, num_ranks, num_topk, 1.0, True)
    ranks = scores.topk(num_topk, dim=1)[1] // (8 // num_ranks)
    assert bool((torch.nn.functional.one_hot(ranks, num_ranks).amax(1) == 1).all())


def test_a_ratio_below_one_is_an_even_one_where_scores_are_random() -> None:
    assert gate.get_unbalanced_scores(8, 8, 2, 2, 0.5, False).shape == (8, 8)
    assert gate.map_unbalanced_ratio_to_factor(8, 8, 2, 2, 0.5) == 1
    assert gate.get_unbalanced_scores(0, 8, 2, 2, 1.0, True).shape == (0, 8)


def _references_without_tokens(rank: int, num_ranks: int) -> None:
    x, idx = torch.zeros(0, 8, requires_grad=True), torch.zeros(0, 2, dtype=torch.int32)
    rows, local, weights, src, counts = refs.dispatch((x, x[:, :1]), idx, idx.float(), 0, 4)
    assert isinstance(rows, tuple)
    assert weights is not None
    assert [len(part) for part in (*rows, local, weights, src)] == [0] * 5
    assert counts.tolist() == [0] * num_ranks


def test_references_take_no_tokens_at_all() -> None:
    run_ranks(_references_without_tokens, 2)
