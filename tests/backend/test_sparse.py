"""all_reduce of sparse COO tensors beside dense sums, and DDP over sparse embeddings beside gloo."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import epee
from epee.backend import staging
from epee.backend.collectives.sparse.all_reduce import SparseReduction
from tests.harness import run_ranks
from tests.hosts import run_on_loopbacks

from . import cases
from .cases import Op, reduced, values
from .test_staging import LateDevice, OnGpu, _plain, on_gpu

# dense shape, sparse dimensions, most entries; with 64 KiB of staging memory one round, one piece, and halves
SHAPES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((10, 4), 1, 6), ((7,), 1, 3), ((5, 6, 2), 2, 9), ((4, 3), 2, 0), ((3, 0), 1, 2), ((0, 4), 1, 0),
    ((1 << 33, 3), 1, 5), ((2_000, 8), 1, 1_500), ((9_000, 33), 1, 4_000),
)  # fmt: skip


def sparse(
    rank: int, shape: tuple[int, ...], num_sparse: int, most: int, dtype: torch.dtype, salt: int
) -> torch.Tensor:
    """Return a rank's tensor: other numbers of entries on other ranks, places twice, none on some ranks."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    count = 0 if (rank + salt) % 4 == 3 else max(0, most - 2 * rank)
    indices = torch.stack(
        [torch.randint(0, max(1, size), (count,), generator=generator) for size in shape[:num_sparse]]
    )
    entries = values(rank, (count, *shape[num_sparse:]), dtype, salt)
    return torch.sparse_coo_tensor(indices, entries, shape, check_invariants=True)


def check(got: torch.Tensor, parts: list[torch.Tensor], op: Any, what: str) -> None:
    """Compare with the dense sum, bit for bit, where that can be held."""
    assert got.layout is torch.sparse_coo
    assert got.is_coalesced(), what
    assert got.shape == parts[0].shape
    if got.numel() > 1 << 20:
        places = sorted({tuple(place) for part in parts for place in part._indices().t().tolist()})
        assert got.indices().t().tolist() == [list(place) for place in places]
        return
    wanted = reduced([part.coalesce().to_dense() for part in parts], op)
    cases.same(got.to_dense(), wanted, what)


def sums(rank: int, num_ranks: int, dtypes: tuple[torch.dtype, ...], members: tuple[int, ...] | None = None) -> None:
    members = tuple(range(num_ranks)) if members is None else members
    group: Any = dist.group.WORLD
    salt = cases.salts()
    for shape, num_sparse, most in SHAPES:
        for dtype in dtypes:
            for op in (Op.SUM, Op.AVG):
                s, what = salt(), f"{op} {dtype} {shape}"
                parts = [sparse(r, shape, num_sparse, most, dtype, s) for r in range(num_ranks)]
                x = parts[rank].clone()
                options = torch._C._distributed_c10d.AllreduceOptions()
                options.reduceOp = op  # type: ignore[assignment]
                options.asyncOp = s % 2 == 0
                group.allreduce([x], options).wait()  # dist.all_reduce views complex tensors as real ones, if dense
                check(x, [parts[r] for r in members], op, what)


def run(rank: int, num_ranks: int, folder: str, fault_mode: str, dtypes: tuple[torch.dtype, ...]) -> None:
    cases.init(rank, num_ranks, folder, staging_bytes=64 << 10, fault_mode=fault_mode)
    sums(rank, num_ranks, dtypes)


@pytest.mark.parametrize(
    ("num_ranks", "fault_mode", "dtypes"),
    [
        (1, "raise", (torch.float32,)), (2, "raise", (torch.float32, torch.bfloat16, torch.int8)),
        (3, "mask", (torch.float64, torch.float16, torch.complex64)), (4, "raise", (torch.int64, torch.float32)),
    ],
)  # fmt: skip
def test_sums_and_means_have_the_bits_of_dense_ones(
    num_ranks: int, fault_mode: str, dtypes: tuple[torch.dtype, ...], tmp_path: Path
) -> None:
    run_ranks(run, num_ranks, str(tmp_path), fault_mode, dtypes, backend=None)


def over_hosts(rank: int, num_ranks: int) -> None:
    sums(rank, num_ranks, (torch.float32,))


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 2)])
def test_sums_over_hosts_have_the_same_bits(placement: tuple[int, ...]) -> None:
    run_on_loopbacks(over_hosts, placement, timeout_s=80)


def survivors(rank: int, num_ranks: int, folder: str) -> None:
    cases.init(rank, num_ranks, folder, fault_mode="mask", staging_bytes=64 << 10)
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sums(rank, num_ranks, (torch.float32,), (0, 2))


def test_survivors_of_a_death_sum_their_own_entries(tmp_path: Path) -> None:
    run_ranks(survivors, 3, str(tmp_path), backend=None, dead=(1,))


def in_order(rank: int, num_ranks: int) -> None:
    x = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([1.0]), (4,), check_invariants=True)
    none = torch.zeros(4).to_sparse()
    dense = torch.ones(3)
    works: list[Any] = [dist.all_reduce(t, async_op=True) for t in (x, none, x, dense, x, none)]
    future = works[-2].get_future()
    for work in reversed(works):
        assert work.wait()
        assert work.is_success()
    assert future.wait()[0] is x
    assert works[0].result()[0] is x
    assert x.to_dense().tolist() == [num_ranks**2 if r < num_ranks else 0.0 for r in range(4)]
    assert none._nnz() == 0
    assert dense.tolist() == [num_ranks] * 3
    with torch.inference_mode():
        inside = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([1.0]), (4,), check_invariants=True)
        dist.all_reduce(x)
        work = dist.all_reduce(inside, async_op=True)
    assert work is not None
    work.wait()
    assert inside.to_dense()[:num_ranks].tolist() == [1.0] * num_ranks
    leaf = nn.Parameter(
        torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([2.0]), (4,), check_invariants=True)
    )
    dist.all_reduce(leaf)
    assert leaf.requires_grad
    assert leaf.detach().to_dense()[:num_ranks].tolist() == [2.0] * num_ranks
    with torch.profiler.profile():
        dist.all_reduce(x)


def test_calls_on_one_sparse_tensor_run_in_the_order_of_issue_in_every_mode_of_torch() -> None:
    run_ranks(in_order, 3, backend="epee")


def one_without_memory(rank: int, num_ranks: int) -> str:
    def eye() -> torch.Tensor:
        return torch.eye(3).to_sparse()

    real = SparseReduction._reduce

    def none_left(*args: Any) -> Any:
        raise MemoryError

    if rank == 1:
        SparseReduction._reduce = none_left  # type: ignore[assignment,method-assign]
    with pytest.raises((MemoryError, epee.EpeeError)) as caught:
        dist.all_reduce(x := eye())
    assert torch.equal(x.to_dense(), torch.eye(3))
    SparseReduction._reduce = real  # type: ignore[method-assign]
    dist.all_reduce(x)
    assert torch.equal(x.to_dense(), torch.eye(3) * num_ranks)
    return type(caught.value).__name__


def test_a_rank_without_memory_for_the_result_fails_the_call_on_all() -> None:
    first, second, third = run_ranks(one_without_memory, 3, backend="epee")
    assert second == "MemoryError"
    assert first == third == "CommTimeoutError"


def refusals(rank: int, num_ranks: int) -> list[str]:
    told = []

    def refused(call: Any, kind: Any = epee.InvalidArgument) -> None:
        with pytest.raises(kind) as caught:
            call()
        told.append(str(caught.value))

    def eye(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape or (3, 3), dtype=dtype).to_sparse(1 if len(shape) == 1 else 2)

    for op in (Op.MAX, Op.PRODUCT, Op.BAND, torch._C._distributed_c10d._make_nccl_premul_sum(2.0)):
        refused(lambda: dist.all_reduce(eye(), op=op))  # noqa: B023
    refused(lambda: dist.all_reduce(eye(dtype=torch.bool)))
    refused(lambda: dist.all_reduce(torch.eye(3).to_sparse_csr()))
    refused(lambda: dist.broadcast(eye(), 0))
    refused(lambda: dist.reduce(eye(), 0))
    refused(
        lambda: dist.all_reduce(
            torch.sparse_coo_tensor(torch.tensor([[7]]), torch.ones(1), (4,), check_invariants=False)
        )
    )
    alone = refused, lambda: dist.all_reduce(eye(), op=Op.MIN if rank else Op.SUM)
    alone[0](alone[1], epee.InvalidArgument if rank else epee.MismatchError)
    num_before = len(told)
    for mine in (
        lambda: eye(4, 2) if rank else eye(2, 4),
        lambda: eye(4, 2) if rank else eye(4, 3),
        lambda: torch.ones(4, 2).to_sparse(1 + rank),
        lambda: eye(4) if rank else torch.ones(4),
        lambda: eye(dtype=torch.float64 if rank else torch.float32),
    ):
        kept = mine()
        before = kept.to_dense()
        refused(lambda: dist.all_reduce(kept), epee.MismatchError)  # noqa: B023
        assert torch.equal(kept.to_dense(), before)
    refused(lambda: dist.all_reduce(eye(), op=Op.AVG if rank else Op.SUM), epee.MismatchError)
    dist.all_reduce(x := eye())
    assert torch.equal(x.to_dense(), torch.full((3, 3), float(num_ranks)))
    return [*told[:num_before], "|", *told[num_before:]]


def test_what_cannot_be_summed_is_refused_on_all_ranks_in_words() -> None:
    for told in run_ranks(refusals, 2, backend="epee"):
        cut = told.index("|")
        assert all("sparse tensors have SUM and AVG" in text for text in told[:4])
        assert "SUM does not exist for torch.bool" in told[4]
        assert all("strided tensor" in text for text in told[5:8])
        assert "indices must lie in the shape" in told[8]
        assert "sparse tensors have SUM and AVG" in told[9]
        shapes, sizes, dims, layouts, dtypes, ops = told[cut + 1 :]
        assert "different lists of shapes" in shapes
        assert "different lists of shapes" in dims
        assert "8 elements" in sizes
        assert "12 elements" in sizes
        assert "called all_reduce(SUM" in layouts
        assert "called sparse_all_reduce(SUM" in layouts
        assert "float64" in dtypes
        assert "sparse_all_reduce(AVG" in ops


class SparseDevice(LateDevice):
    """A device whose copies of sparse tensors to the host wait for its stream, as torch's do."""

    def cpu_like(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            return super().cpu_like(tensor)
        self.synchronize()
        parts = _plain(tensor._indices()).clone(), _plain(tensor._values()).clone()
        return torch.sparse_coo_tensor(*parts, tensor.shape, device="cpu", check_invariants=True)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: str = "caller") -> None:
        if destination.layout is torch.strided:
            return super().copy(destination, source, stream)
        self.streams[stream].append(lambda: destination.copy_(source))
        return None


def on_a_gpu(rank: int, num_ranks: int) -> None:
    staging._device = device = SparseDevice()

    def there(value: float) -> torch.Tensor:
        plain = torch.sparse_coo_tensor(torch.tensor([[rank, 3]]), torch.full((2,), value), (4,), check_invariants=True)
        return torch.Tensor._make_subclass(OnGpu, plain)

    def values_of(tensor: torch.Tensor) -> list[float]:
        device.synchronize()
        dense = torch.zeros(4)
        dense[_plain(tensor._indices())[0]] = _plain(tensor._values())
        return dense.tolist()

    dist.all_reduce(x := there(2.0))
    assert values_of(x) == [2.0] * num_ranks + [0.0] * (3 - num_ranks) + [2.0 * num_ranks]
    dense = on_gpu(torch.ones(2))
    y = there(1.0)
    works: list[Any] = [dist.all_reduce(t, async_op=True) for t in (y, y, dense)]
    futures = [work.get_future() for work in works]
    for work in works:
        work.wait()
    assert futures[0].wait()[0] is y
    assert values_of(y) == [num_ranks] * num_ranks + [0.0] * (3 - num_ranks) + [num_ranks**2]
    assert _plain(dense).tolist() == [num_ranks] * 2


def test_sparse_tensors_on_a_gpu_go_through_cpu_memory() -> None:
    run_ranks(on_a_gpu, 2, backend="epee")


class Net(nn.Module):
    """A model with sparse gradients of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 8, sparse=True)
        self.table = nn.Embedding(30, 8, sparse=True)
        self.linear = nn.Linear(8, 1)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        return self.linear(self.bag(idx) + self.table(idx[:, 0] % 30)).sum()


def ddp(rank: int, num_ranks: int) -> None:
    warnings.simplefilter("ignore")
    ours = dist.new_group(list(range(num_ranks)), backend="epee")
    found: list[list[torch.Tensor]] = []
    for group in (dist.group.WORLD, ours):
        torch.manual_seed(0)
        net = nn.parallel.DistributedDataParallel(Net(), process_group=group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + rank)
            optimizer.zero_grad()
            loss = net(torch.randint(0, 50, (5, 3), generator=generator))
            loss.backward()
            assert net.module.bag.weight.grad.is_sparse
            assert net.module.bag.weight.grad.is_coalesced()
            optimizer.step()
            losses.append(loss.detach())
        found.append([*losses, *(p.detach().clone() for p in net.parameters())])
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_ddp_over_sparse_embeddings_trains_as_with_gloo() -> None:
    run_ranks(ddp, 3, backend="gloo")
