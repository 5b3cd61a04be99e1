"""A process takes a dead rank's place in a latency buffer over the emulated GPU: the tests of the CPU path."""

from __future__ import annotations

from typing import Any

import pytest

from epee.ep.latency import gpu_path as latency_gpu_path
from tests.csrc.emulated import has_compiler
from tests.csrc.test_latency_buffer_emulated import emulated
from tests.ep import test_latency_rejoin as cpu_tests
from tests.harness import DEAD, run_mortal

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


def far_ahead(slot: int, num_processes: int, folder: str) -> Any:
    latency_gpu_path.TAG_JUMP = 16  # less than the dead was ahead
    return emulated(slot, num_processes, cpu_tests.far_ahead, folder)


def test_words_that_the_dead_wrote_of_later_calls_are_not_believed() -> None:
    assert run_mortal(far_ahead, 4, dead={2}, timeout_s=200) == ["ok", "ok", DEAD, "ok"]
