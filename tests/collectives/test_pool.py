"""Memory pools: what they hand out, and collectives that read tensors where they lie."""

from __future__ import annotations

import pytest
import torch

import epee
from epee.backend.cuda.pool import ALIGN, MemoryPool
from tests.collectives import pool_cases
from tests.csrc.emulated import EmulatedPlatform, has_compiler
from tests.harness import run_ranks

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with")
built = [pytest.mark.compiler, pytest.mark.timeout(240), needs_compiler]


class Waits(EmulatedPlatform):
    """Counts waits for the GPU."""

    num_waits = 0
    is_recording = False

    def synchronize(self) -> None:
        self.num_waits += 1

    def is_capturing(self) -> bool:
        return self.is_recording


@pytest.fixture
def pool() -> MemoryPool:
    return MemoryPool(Waits(), 8 * ALIGN - 7)


def test_tensors_lie_apart_and_keep_their_memory_until_they_are_gone(pool: MemoryPool) -> None:
    tensors = [pool.empty(ALIGN // 4 - 3).fill_(i) for i in range(8)]
    assert [bool((x == i).all()) for i, x in enumerate(tensors)] == [True] * 8
    assert all(pool.holds(x.data_ptr(), x.nbytes) and x.data_ptr() % ALIGN == pool.address % ALIGN for x in tensors)
    with pytest.raises(epee.ResourceError, match="no 4 contiguous bytes are left of 4096"):
        pool.empty(1)
    view = tensors.pop(3)[5:7]
    with pytest.raises(epee.ResourceError):
        pool.empty(1)
    del view
    assert pool.empty(2, 3, dtype=torch.float16).shape == (2, 3)


def test_memory_that_was_given_back_is_waited_for_before_it_is_handed_out_again(pool: MemoryPool) -> None:
    platform = pool._platform
    assert isinstance(platform, Waits)
    first, second = pool.empty(ALIGN), pool.empty(ALIGN - 1)
    del first
    assert platform.num_waits == 0
    platform.is_recording = True
    with pytest.raises(epee.InvalidState, match="allocate before the recording"):
        pool.empty(1)
    platform.is_recording = False
    fourth = pool.empty(ALIGN)
    assert platform.num_waits == 1
    del second, fourth
    assert pool.empty(2 * ALIGN).numel() == 2 * ALIGN, "pieces side by side are one again"


def test_sizes_of_nothing_and_below(pool: MemoryPool) -> None:
    assert pool.empty(0, 5).shape == (0, 5)
    with pytest.raises(epee.InvalidArgument, match="sizes >= 0"):
        pool.empty(-1)
    with pytest.raises(epee.ResourceError):
        pool.empty(1 << 40)


def test_no_memory_of_others_is_held(pool: MemoryPool) -> None:
    x = torch.empty(16, dtype=torch.float32)
    assert not pool.holds(x.data_ptr(), x.nbytes)
    y = pool.empty(16)
    assert not pool.holds(y.data_ptr() + 4, 4), "vectors of 16 bytes are read"
    assert not pool.holds(y.data_ptr(), 9 * ALIGN)


class TestGroups:
    pytestmark = built

    @pytest.mark.parametrize("num_ranks", [2, 3])
    def test_calls_in_pools_are_copy_free_and_others_are_as_right(self, num_ranks: int) -> None:
        run_ranks(pool_cases.copy_free, num_ranks, backend="epee", timeout_s=200)

    def test_survivors_of_a_kill_go_on_in_their_pools(self) -> None:
        run_ranks(pool_cases.killed, 3, backend="epee", timeout_s=200, dead=(2,))

    def test_a_rank_that_reads_too_late_has_an_error_and_no_result(self) -> None:
        first, second = run_ranks(pool_cases.late_reader, 2, backend="epee", timeout_s=100)
        assert first.startswith("CommTimeoutError")
        assert "has lost this call" in second

    def test_a_place_outside_of_a_pool_is_not_read(self) -> None:
        first, second = run_ranks(pool_cases.bad_place, 2, backend="epee", timeout_s=100)
        assert first.startswith("ProtocolError")
        assert "outside of its memory pool" in first
        assert second.startswith("CommTimeoutError")

    def test_no_pool_on_one_rank_is_an_error_on_all_and_may_be_mended(self) -> None:
        run_ranks(pool_cases.no_memory, 2, backend="epee", timeout_s=100)

    def test_a_pool_that_one_rank_cannot_map_leaves_calls_on_the_gpus_as_without_pools(self) -> None:
        run_ranks(pool_cases.unmapped, 3, backend="epee", timeout_s=100)

    def test_groups_of_mode_mask_have_none(self) -> None:
        run_ranks(refused_in_mask, 1, backend="epee", timeout_s=100)


def refused_in_mask(rank: int, num_ranks: int) -> None:
    """See there."""
    half = pool_cases.give_half(rank)
    half._policy = half._policy._replace(is_masked=True)
    with pytest.raises(epee.UnsupportedError, match='fault_mode="mask"'):
        half.memory_pool(1)
