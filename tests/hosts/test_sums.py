"""The order of sums over several hosts, beside an oracle written apart from the backend."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.backend.cases import reduce_scatter_single

from . import run_on_loopbacks

Op = dist.ReduceOp
COUNT = 70_001  # no multiple of anything
LARGE = 1_300_003
KINDS = [(torch.float32, "SUM"), (torch.bfloat16, "SUM"), (torch.float32, "PRODUCT"), (torch.int32, "MAX")]


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers whose sum depends on the order."""
    generator = torch.Generator(device="cpu").manual_seed(17 + rank)
    x = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu") * 3.0
    return x.to(dtype)


def combined(parts: list[torch.Tensor], name: str) -> torch.Tensor:
    """Reduce in order, halves in float32, rounded once."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    combine = {"SUM": torch.add, "PRODUCT": torch.mul, "MAX": torch.maximum}[name]
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = combine(total, part.to(wide))
    return total.to(parts[0].dtype)


def oracle(placement: tuple[int, ...], count: int, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return the reduction of everybody's values."""
    return by_hosts(placement, [values(rank, count, dtype) for rank in range(len(placement))], name)


def by_hosts(placement: tuple[int, ...], given: list[torch.Tensor], name: str) -> torch.Tensor:
    """Reduce inside each host, ranks ascending, then over hosts."""
    hosts: dict[int, list[torch.Tensor]] = {}
    for part, host in zip(given, placement, strict=True):
        hosts.setdefault(host, []).append(part)
    return combined([combined(parts, name) for parts in hosts.values()], name)


def sums(rank: int, num_ranks: int, placement: tuple[int, ...]) -> None:
    for count in (COUNT, LARGE):
        for dtype, name in KINDS:
            x = values(rank, count, dtype)
            dist.all_reduce(x, op=getattr(Op, name))
            want = oracle(placement, count, dtype, name)
            assert torch.equal(x, want), (dtype, name, count)
            y = values(rank, count, dtype)
            dist.reduce(y, 1, op=getattr(Op, name))
            assert torch.equal(y, want if rank == 1 else values(rank, count, dtype)), (dtype, name, count)
            rows = torch.stack([values(10 * peer + rank, count, dtype) for peer in range(num_ranks)])
            row = torch.empty(count, dtype=dtype, device="cpu")
            reduce_scatter_single(row, rows.view(-1), op=getattr(Op, name))
            given = [values(10 * rank + peer, count, dtype) for peer in range(num_ranks)]
            assert torch.equal(row, by_hosts(placement, given, name)), (dtype, name, count)
        factors = [1 / (3 + peer) for peer in range(num_ranks)]
        op = torch._C._distributed_c10d._make_nccl_premul_sum(factors[rank])
        x = values(rank, count, torch.float32)
        dist.all_reduce(x, op=op)
        given = [values(peer, count, torch.float32) * factors[peer] for peer in range(num_ranks)]
        assert torch.equal(x, by_hosts(placement, given, "SUM")), ("PREMUL_SUM", count)
        rows = torch.stack([values(10 * peer + rank, count, torch.float32) for peer in range(num_ranks)])
        row = torch.empty(count, dtype=torch.float32, device="cpu")
        reduce_scatter_single(row, rows.view(-1), op=op)
        given = [values(10 * rank + peer, count, torch.float32) * factors[peer] for peer in range(num_ranks)]
        assert torch.equal(row, by_hosts(placement, given, "SUM")), ("PREMUL_SUM of rows", count)
    mean = torch.full((COUNT,), float(rank), dtype=torch.float32, device="cpu")
    dist.all_reduce(mean, op=Op.AVG)
    assert torch.equal(mean, torch.full((COUNT,), (num_ranks - 1) / 2, dtype=torch.float32, device="cpu"))


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 0, 0, 1, 1)])
def test_sums_run_inside_hosts_first_and_then_over_hosts(placement: tuple[int, ...]) -> None:
    run_on_loopbacks(sums, placement, placement, timeout_s=80)
