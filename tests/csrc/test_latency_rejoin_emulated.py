"""A process takes a dead rank's place in a latency buffer over the emulated GPU: the tests of the CPU path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epee.ep.latency import gpu_path as latency_gpu_path
from epee.ep.latency.gpu.core import LatencyCore, LatencyMemory
from epee.ep.latency.gpu.types import CoreOptions
from epee.ep.members.gpu_members import GpuMembers
from epee.errors import ResourceError
from tests.csrc.emulated import has_compiler
from tests.csrc.test_latency_buffer_emulated import emulated
from tests.ep import test_latency_rejoin as cpu_tests
from tests.ep.latency_cases import Shape, check_round, inputs, make
from tests.harness import DEAD, run_mortal, run_ranks
from tests.survive import stages

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


def replaced(slot: int, num_processes: int, folder: str, victims: tuple[int, ...]) -> Any:
    return emulated(slot, num_processes, cpu_tests.replaced, folder, victims)


def dies_halfway(slot: int, num_processes: int, folder: str, victim: int, point: str) -> Any:
    return emulated(slot, num_processes, cpu_tests.dies_halfway, folder, victim, point)


@pytest.mark.parametrize("victims", [(1,), (0, 0, 1)], ids=str)
def test_after_a_replacement_the_results_are_those_of_a_fresh_job(victims: tuple[int, ...]) -> None:
    cpu_tests.check_replaced(replaced, victims, timeout_s=200)


@pytest.mark.parametrize("point", ["its line", "hello", "decided", "offered"])
def test_a_newcomer_that_dies_on_the_way_disturbs_nobody_and_the_next_one_comes_in(point: str) -> None:
    cpu_tests.check_dies_halfway(dies_halfway, point, timeout_s=200)


def attach_once(slot: int, num_processes: int, folder: str) -> Any:
    """Rank 0 cannot map the newcomer's memory the first time: the next sync brings both together."""
    rank = 1 if slot == 3 else slot
    if slot == 3:
        stages.wait_for(folder, "lost")
    group = cpu_tests.start(rank, 3, folder, joins=slot == 3)
    if slot == 0:
        attach = LatencyMemory.attach_peer

        def fails(*args: Any) -> Any:
            LatencyMemory.attach_peer = attach  # type: ignore[method-assign]
            raise ResourceError("no descriptors")

        LatencyMemory.attach_peer = fails  # type: ignore[method-assign]
    buffer = cpu_tests.make_buffer(group)
    mask = torch.ones(3, dtype=torch.int32)
    if slot != 3:
        cpu_tests.rounds(buffer, 0, 2, active_ranks=mask)
        if slot == 1:
            cpu_tests.die()
        cpu_tests.masked_round(buffer, mask, 5, cpu_tests.without(3, 1))
        cpu_tests.lose(group, folder, 1, "lost")
        assert buffer.sync(mask).tolist() == [1, 1, 1]
    assert buffer.sync().tolist() == [1, 1, 1]
    mask.fill_(1)
    cpu_tests.rounds(buffer, 20, 26, active_ranks=mask)
    cpu_tests.end(buffer, folder)
    return mask.tolist()


def attach_once_emulated(slot: int, num_processes: int, folder: str) -> Any:
    return emulated(slot, num_processes, attach_once, folder)


def test_memory_that_could_not_be_mapped_is_mapped_at_the_next_sync() -> None:
    assert run_mortal(attach_once_emulated, 4, dead={1}, timeout_s=200) == [[1] * 3, DEAD, [1] * 3, [1] * 3]


def healthy(rank: int, num_ranks: int) -> int:
    with make(Shape()) as buffer:
        for _ in range(6):
            buffer.sync()
        return int(buffer._path.core.memory.tags())  # type: ignore[union-attr]


def test_numbers_of_calls_jump_only_where_somebody_is_new() -> None:
    """Some words have 32 bits of them: 2048 jumps, and an old word looks like one of a later call."""
    ends = run_ranks(emulated, 2, healthy, timeout_s=200)
    assert ends[0] == ends[1] < 2 * latency_gpu_path.TAG_JUMP


def far_ahead(slot: int, num_processes: int, folder: str) -> Any:
    latency_gpu_path.TAG_JUMP = 16  # less than the dead was ahead
    return emulated(slot, num_processes, cpu_tests.far_ahead, folder)


def test_words_that_the_dead_wrote_of_later_calls_are_not_believed() -> None:
    assert run_mortal(far_ahead, 4, dead={2}, timeout_s=200) == ["ok", "ok", DEAD, "ok"]


def broken_off(rank: int, num_ranks: int) -> bool:
    """An error takes rank 1 out of its preparations for an epoch, behind what it has stored: it prepares again."""
    with make(Shape()) as buffer:
        works = LatencyCore.set_view

        def fails(core: LatencyCore, *args: Any) -> None:
            LatencyCore.set_view = works  # type: ignore[method-assign]
            works(core, *args)
            raise KeyboardInterrupt

        if rank == 1:
            LatencyCore.set_view = fails  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                buffer.sync()
        else:
            assert buffer.sync().tolist() == [1, 1]
        for seed in range(4):
            check_round(buffer, Shape(), (4, 3), seed)
        return True


def test_preparations_for_an_epoch_that_were_broken_off_are_made_again() -> None:
    assert run_ranks(emulated, 2, broken_off, timeout_s=200) == [True, True]


def replays_before_it_enters(rank: int, num_ranks: int) -> list[list[int]]:
    """Rank 1 cannot enter in its sync, for want of descriptors; a graph that it replays then reaches nobody."""
    masks = []
    with make(Shape()) as buffer:
        check_round(buffer, Shape(), (4, 3), 1)
        if rank == 1:
            works = GpuMembers._second_call

            def fails(*args: Any) -> Any:
                GpuMembers._second_call = works  # type: ignore[method-assign]
                raise ResourceError("no descriptors")

            GpuMembers._second_call = fails  # type: ignore[method-assign]
            with pytest.raises(ResourceError, match="no descriptors"):
                buffer.sync()
            core: LatencyCore = buffer._path.core  # type: ignore[union-attr, assignment]
            counted, given = core.num_calls, inputs(Shape(), (4, 3), 2)[rank]
            plan = core.plans.dispatch(len(given.x), given.x.stride(0) * 2, CoreOptions(40.0))
            for _ in range(3):
                mask = torch.ones(num_ranks, dtype=torch.int32)
                core.dispatch(plan, given.x, given.topk_idx, given.topk_weights, mask)
                masks.append(mask.tolist())
            core.num_calls = counted  # the host does not count them
        else:
            assert buffer.sync().tolist() == [1, 1]
        for seed in range(6):
            check_round(buffer, Shape(), (4, 3), seed)
    return masks


def test_a_graph_that_is_replayed_before_its_rank_has_entered_reaches_nobody() -> None:
    assert run_ranks(emulated, 2, replays_before_it_enters, timeout_s=200) == [[], [[0, 1]] * 3]
