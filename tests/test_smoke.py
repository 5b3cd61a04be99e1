"""`make smoke` is few GPU tests that together touch every part; that they do is checked here, without a GPU.

A smoke test names the parts that it touches. Which there are stands in the kernel tables and in `WHOLE`: a family of
kernels that is added needs a smoke test. What the kernels' cases claim is compared with what they launch in emulation.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from epee.ep.latency.gpu import params as latency_params
from epee.gpu import params as throughput_params
from epee.gpu.shapes import FEW_TOKENS
from tests.csrc.emulated import EmulatedPlatform, has_compiler
from tests.csrc.latency_cases import run_plan
from tests.csrc.throughput_cases import run_case
from tests.gpu import test_latency_gpu, test_throughput_gpu
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parent.parent
MOST_TESTS = 12  # some 3 s each behind half a minute of compiling, and all of it is to stay below 90 s
LEAST_SMS = 6  # with fewer, no dispatch is done by one kernel
WHOLE = {
    *("fp8", "graph", "death", "pidfd", "backend", "example", "mooncake.ep", "mooncake.pg"),
    *("deep_ep.Buffer", "deep_ep.low_latency", "deep_ep.ElasticBuffer"),
}
COLLECT = """
import json, sys
from pathlib import Path
import pytest
class Report:
    def pytest_collection_finish(self, session):
        rows = [
            (
                item.nodeid,
                [part for mark in item.iter_markers("smoke") for part in mark.args],
                max(mark.args[0] for mark in item.iter_markers("gpu")),
            )
            for item in session.items
        ]
        Path(sys.argv[1]).write_text(json.dumps(rows))
sys.exit(pytest.main(["--collect-only", "-q", "-m", "smoke", *sys.argv[2:]], plugins=[Report()]))
"""


class Smoke(NamedTuple):
    """A test of the set."""

    name: str
    parts: list[str]
    num_gpus: int


def part_of(path: str) -> str:
    """What a kernel file is called in a mark."""
    return path.removeprefix("kernels/").removesuffix(".cuh")


KERNELS = {part_of(path) for path in (*throughput_params.KERNELS, *latency_params.KERNELS)}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> list[Smoke]:
    """The tests that `make smoke` selects."""
    target = tmp_path_factory.mktemp("smoke") / "items.json"
    (command,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "-m smoke" in line]
    where = command.partition("-m smoke ")[2].split()
    subprocess.run([sys.executable, "-c", COLLECT, str(target), *where], cwd=ROOT, check=True, timeout=100)
    return [Smoke(*row) for row in json.loads(target.read_text())]


def test_every_part_has_a_smoke_test(smoke: list[Smoke]) -> None:
    assert {part for test in smoke for part in test.parts} == KERNELS | WHOLE
    assert all(test.parts for test in smoke)


def test_the_set_is_small_and_needs_two_gpus(smoke: list[Smoke]) -> None:
    assert len(smoke) <= MOST_TESTS
    assert max(test.num_gpus for test in smoke) == 2


def test_the_command_looks_where_all_smoke_tests_are(smoke: list[Smoke]) -> None:
    files = {test.name.partition("::")[0] for test in smoke}
    marked = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py") if "mark.smoke(" in path.read_text()}
    assert {str(path) for path in marked - {Path("tests/test_smoke.py")}} == files


def test_the_cases_are_of_the_kind_that_they_claim() -> None:
    cases = {name: test_throughput_gpu.CASES[name] for name in test_throughput_gpu.SMOKE}
    both, expert = cases.values()
    assert both.num_tokens[0] > FEW_TOKENS >= both.num_tokens[1]
    assert (both.layout, expert.layout, expert.payload) == ("rank", "expert", "fp8")
    rounds = test_latency_gpu.PLANS[test_latency_gpu.SMOKE].rounds
    assert {this.use_fp8 for this in rounds} == {this.is_wide for this in rounds} == {True, False}


def _launched(rank: int, num_ranks: int, run: Callable[..., Any], what: Any) -> set[str]:
    """The kernel files of which a rank launches something."""
    seen: set[str] = set()
    start, load = EmulatedPlatform.__init__, EmulatedPlatform.kernels

    def begin(self: EmulatedPlatform, num_sms: int, shared_bytes: int = 24 << 10) -> None:
        start(self, max(num_sms, LEAST_SMS), shared_bytes)

    def kernels(self: EmulatedPlatform, files: Any, head: str) -> Any:
        found: dict[str, Any] = {}
        for path, params in files.items():
            loaded = load(self, {path: params}, head)
            for kernel in loaded.values():
                kernel._function = _noted(kernel._function, functools.partial(seen.add, part_of(path)))
            found.update(loaded)
        return found

    EmulatedPlatform.__init__ = begin  # type: ignore[method-assign]
    EmulatedPlatform.kernels = kernels  # type: ignore[method-assign]
    run(rank, num_ranks, what, "emulated")
    return seen


def _noted(function: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any) -> None:
        note()
        function(*args)

    return call


@pytest.mark.compiler
@pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with")
@pytest.mark.timeout(240)  # it may be the first to build the kernels
@pytest.mark.parametrize("name", test_throughput_gpu.SMOKE)
def test_a_throughput_case_launches_the_kernels_that_it_claims(name: str) -> None:
    case = replace(test_throughput_gpu.CASES[name], hidden=128)
    launched = set().union(*run_ranks(_launched, 2, run_case, case, timeout_s=200))
    assert KERNELS & set(test_throughput_gpu.SMOKE[name].args) <= launched


@pytest.mark.compiler
@pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with")
@pytest.mark.timeout(240)
def test_the_latency_case_launches_the_kernels_that_it_claims() -> None:
    plan = test_latency_gpu.PLANS[test_latency_gpu.SMOKE]
    plan = replace(plan, rounds=tuple(replace(this, num_tokens=(3, 9)) for this in plan.rounds[:4]), max_tokens=16)
    launched = set().union(*run_ranks(_launched, 2, run_plan, plan, timeout_s=200))
    assert launched == {"latency/dispatch", "latency/combine"}
