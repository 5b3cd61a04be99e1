"""PREMUL_SUM on CPU tensors: each rank's values times its own factor, summed; beside closed forms and a dense model."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import epee
from tests.harness import run_ranks

from . import cases
from .cases import COMPLEX, FLOATS, HALVES, Placed, values

Op = dist.ReduceOp
FACTORS = (1 / 3, -2.5, 1e-3, 7.0)  # of the ranks
SHAPES: tuple[tuple[int, ...], ...] = (
    (5,),
    (0,),
    (70_001,),
    (12, 30),
)  # with 64 KiB of staging memory one step, two steps and halves used again
premul: Callable[[Any], Any] = torch._C._distributed_c10d._make_nccl_premul_sum


def scaled(part: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in float32 or wider and round once to the dtype."""
    if part.dtype in HALVES:
        return (part.float() * factor).to(part.dtype)
    return torch.view_as_complex(torch.view_as_real(part) * factor) if part.is_complex() else part * factor


def expected(num_ranks: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int) -> torch.Tensor:
    """Return the sum over all ranks of what `values` gives, times the factors."""
    return cases.reduced([scaled(values(r, shape, dtype, salt), FACTORS[r]) for r in range(num_ranks)], Op.SUM)


def opts(kind: str, op: Any) -> Any:
    options = getattr(torch._C._distributed_c10d, kind)()
    options.reduceOp = op
    options.asyncOp = False
    return options


def sums(rank: int, num_ranks: int, folder: str, fault_mode: str, dtypes: tuple[torch.dtype, ...]) -> None:
    cases.init(rank, num_ranks, folder, staging_bytes=64 << 10, fault_mode=fault_mode)
    every_sum(rank, num_ranks, dtypes)


def every_sum(rank: int, num_ranks: int, dtypes: tuple[torch.dtype, ...]) -> None:
    group: Any = dist.group.WORLD
    op, salt = premul(FACTORS[rank]), cases.salts()
    for dtype in dtypes:
        for shape in SHAPES:
            for strided in (False, True):
                what = f"{dtype} {shape} strided={strided}"
                s = salt()
                x = Placed(values(rank, shape, dtype, s), strided)
                if strided:
                    assert dist.all_reduce(x.tensor, op=op, async_op=True).wait()
                else:
                    dist.all_reduce(x.tensor, op=op)
                x.check(expected(num_ranks, shape, dtype, s), f"all_reduce {what}")

                root = s % num_ranks
                x = Placed(mine := values(rank, shape, dtype, s), strided)
                dist.reduce(x.tensor, root, op=op)
                x.check(expected(num_ranks, shape, dtype, s) if rank == root else mine, f"reduce {what}")

                given = [Placed(values(rank, shape, dtype, s + 100 + dst), strided) for dst in range(num_ranks)]
                out = Placed(torch.zeros(shape, dtype=dtype), strided)
                dist.reduce_scatter(out.tensor, [part.tensor for part in given], op=op)
                out.check(expected(num_ranks, shape, dtype, s + 100 + rank), f"reduce_scatter {what}")
                for dst, part in enumerate(given):
                    part.check(values(rank, shape, dtype, s + 100 + dst), f"input of reduce_scatter {what}")

                whole = torch.cat([part.tensor for part in given])
                kept = whole.clone()
                single = Placed(torch.zeros(shape, dtype=dtype), strided)
                group._reduce_scatter_base(single.tensor, whole, opts("ReduceScatterOptions", op))
                single.check(expected(num_ranks, shape, dtype, s + 100 + rank), f"reduce_scatter_single {what}")
                cases.same(whole, kept, f"input of reduce_scatter_single {what}")
        s = salt()
        many = [values(rank, shape, dtype, s + 7 * i) for i, shape in enumerate(SHAPES)]
        group.allreduce_coalesced(many, opts("AllreduceCoalescedOptions", op))
        for i, (shape, got) in enumerate(zip(SHAPES, many, strict=True)):
            cases.same(got, expected(num_ranks, shape, dtype, s + 7 * i), f"all_reduce_coalesced {dtype} {shape}")
        parts = [values(rank, (num_ranks * n,), dtype, s + n) for n in (3, 500)]
        outs = [torch.zeros(n, dtype=dtype) for n in (3, 500)]
        group.reduce_scatter_tensor_coalesced(outs, parts, opts("ReduceScatterOptions", op))
        for n, got in zip((3, 500), outs, strict=True):
            wanted = expected(num_ranks, (num_ranks * n,), dtype, s + n)[rank * n : (rank + 1) * n]
            cases.same(got, wanted, f"reduce_scatter_coalesced {dtype} {n}")


@pytest.mark.parametrize("dtypes", [FLOATS[:2], FLOATS[2:], COMPLEX], ids=("halves", "floats", "complex"))
@pytest.mark.parametrize(("num_ranks", "fault_mode"), [(3, "raise"), (2, "mask")])
def test_every_reduction_multiplies_by_the_factor_of_each_rank_first(
    num_ranks: int, fault_mode: str, dtypes: tuple[torch.dtype, ...], tmp_path: Path
) -> None:
    run_ranks(sums, num_ranks, str(tmp_path), fault_mode, dtypes, backend=None)


def factors(rank: int, num_ranks: int) -> None:
    for factor in (
        torch.tensor([0.25]), torch.tensor(0.25, dtype=torch.float64), torch.full((1, 1), 0.25, dtype=torch.bfloat16),
        torch.tensor([1.0, 0.25])[1:], nn.Parameter(torch.tensor(0.25)),
    ):  # fmt: skip
        x = torch.full((3,), 4.0)
        dist.all_reduce(x, op=premul(factor))
        assert x.tolist() == [num_ranks] * 3
    dist.all_reduce(x, op=premul(torch.tensor(2)))
    assert x.tolist() == [2 * num_ranks**2] * 3
    dist.all_reduce(x := torch.tensor([1.0, -0.0, float("inf")]), op=premul(0.0))
    assert x[:2].tolist() == [0.0, 0.0]
    assert x[2].isnan()
    changing = torch.tensor([0.5])
    work = dist.all_reduce(x := torch.ones(2), op=premul(changing), async_op=True)
    changing.fill_(100.0)
    work.wait()
    assert x.tolist() == [0.5 * num_ranks] * 2


def test_a_factor_is_a_number_or_a_tensor_of_one_read_when_the_call_is_issued() -> None:
    run_ranks(factors, 2, backend="epee")


def survivors(rank: int, num_ranks: int, folder: str) -> None:
    cases.init(rank, num_ranks, folder, fault_mode="mask")
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for is_async in (False, True):
        x = torch.full((3,), 4.0)
        work = dist.all_reduce(x, op=premul(FACTORS[rank]), async_op=is_async)
        if work is not None:
            work.wait()
        wanted = torch.tensor(4.0) * FACTORS[0] + torch.tensor(4.0) * FACTORS[2]
        assert x.tolist() == [wanted.item()] * 3
    group: Any = dist.group.WORLD
    assert group.last_contributors() == (0, 2)


def test_survivors_of_a_death_sum_their_own_products(tmp_path: Path) -> None:
    run_ranks(survivors, 3, str(tmp_path), backend=None, dead=(1,))


def refusals(rank: int, num_ranks: int) -> None:
    for dtype in (torch.int32, torch.bool, torch.uint16):
        with pytest.raises(epee.InvalidArgument, match="PREMUL_SUM does not exist for"):
            dist.all_reduce(torch.ones(2).to(dtype), op=premul(0.5))
    kept = torch.ones(2, dtype=torch.float64 if rank else torch.int64)
    with pytest.raises(epee.MismatchError if rank else epee.InvalidArgument, match="PREMUL_SUM does not exist for"):
        dist.all_reduce(kept, op=premul(0.5))  # one rank alone: the other hears why
    for factor in (torch.tensor(1j), torch.tensor(True), torch.tensor([0.5]).to_sparse(), torch.ones(1, device="meta")):
        with pytest.raises(epee.InvalidArgument, match="the factor must be a real number"):
            dist.reduce_scatter_tensor(torch.ones(1), torch.ones(num_ranks), op=premul(factor))
    with pytest.raises(epee.MismatchError, match=r"PREMUL_SUM, 2 elements.*SUM, 2 elements|SUM, 2.*PREMUL_SUM, 2"):
        dist.all_reduce(torch.ones(2), op=premul(1.0) if rank else Op.SUM)
    assert kept.tolist() == [1, 1]
    dist.all_reduce(x := torch.ones(2), op=premul(2.0 + rank))
    assert x.tolist() == [5.0] * 2


def test_dtypes_and_factors_that_cannot_be_multiplied_are_refused_on_all_ranks() -> None:
    run_ranks(refusals, 2, backend="epee")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))


def gradients(rank: int, wrapped: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full gradients of a batch of this rank."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    (wrapped(x) - x).square().sum().backward()
    found: dict[str, Any] = {name: p.grad for name, p in wrapped.named_parameters()}
    return {name: grad.full_tensor() for name, grad in found.items()}


def dense(num_ranks: int) -> dict[str, torch.Tensor]:
    """Return the sums of all ranks' gradients of the plain model."""
    plain = net()
    for rank in range(num_ranks):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
        (plain(x) - x).square().sum().backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def fsdp2(rank: int, num_ranks: int, factor: float, reduce_dtype: torch.dtype, shards: int, as_titan: bool) -> None:
    warnings.simplefilter("ignore")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if shards == num_ranks:
        mesh = init_device_mesh("cpu", (num_ranks,))
    else:
        mesh = init_device_mesh("cpu", (num_ranks // shards, shards), mesh_dim_names=("copies", "shards"))
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    wrapped = net()
    for layer in wrapped:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(wrapped, mesh=mesh, mp_policy=policy)
    for module in wrapped.modules() if as_titan else [*wrapped, wrapped]:
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
    tolerance = 2e-2 if reduce_dtype in HALVES else 1e-5
    wanted = dense(num_ranks)
    for name, got in gradients(rank, wrapped).items():
        torch.testing.assert_close(
            got, wanted[name] / factor, rtol=tolerance, atol=tolerance * float(wanted[name].abs().max()), msg=name
        )


@pytest.mark.parametrize(
    ("factor", "reduce_dtype", "shards", "as_titan"),
    [
        (1.0, torch.float32, 2, True), (3.5, torch.float32, 2, False), (1.0, torch.bfloat16, 2, True),
        (6.0, torch.bfloat16, 2, False), (1.0, torch.float16, 2, True), (5.0, torch.float32, 4, False),
    ],
)  # fmt: skip
def test_fsdp2_divides_gradients_by_the_factor_that_is_set(
    factor: float, reduce_dtype: torch.dtype, shards: int, as_titan: bool
) -> None:
    num_ranks = 4 if (factor, shards) in ((3.5, 2), (5.0, 4)) else 2
    run_ranks(fsdp2, num_ranks, factor, reduce_dtype, shards, as_titan, backend="epee")
