"""Failures of the collectives with the kernels on the CPU."""

from __future__ import annotations

import pytest

from tests.csrc.collective_failures import CASES, WAYS, gone_on, left_out, root_left_out, silent, stopped
from tests.csrc.emulated import has_compiler
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


@pytest.mark.parametrize(("op", "way"), CASES)
def test_silent_rank_is_named_by_those_who_wait_for_it(op: str, way: str) -> None:
    results = run_ranks(silent, 3, op, WAYS[way], timeout_s=200)
    named = [result for result in results[:2] if result[1] == (2,)]
    assert named, results  # one of them may have failed by the other's failure only
    assert all(name == "CommTimeoutError" for name, _, _ in results[:2])
    assert any("expected=" in text and "got=" in text for _, _, text in named)


@pytest.mark.parametrize(
    ("op", "way", "num_ranks"), [(*case, 3) for case in CASES] + [("all_reduce", way, 4) for way in WAYS]
)
def test_rank_outside_the_view_is_left_out(op: str, way: str, num_ranks: int) -> None:
    run_ranks(left_out, num_ranks, op, WAYS[way], timeout_s=200)


def test_broadcast_of_a_rank_outside_the_view_fails_at_once() -> None:
    results = run_ranks(root_left_out, 3, timeout_s=200)
    assert results[:2] == [("CommTimeoutError", (2,))] * 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["abort", "dead"])
def test_host_ends_waits_in_flight(how: str, way: str) -> None:
    name, ranks, _ = run_ranks(stopped, 2, how, WAYS[way], timeout_s=50)[0]
    assert (name, ranks) == (("AbortedError", ()) if how == "abort" else ("CommTimeoutError", (1,)))


def test_peer_that_went_on_ends_the_wait_for_it() -> None:
    results = run_ranks(gone_on, 2, timeout_s=50)
    assert results[0] == "CommTimeoutError"
    assert "given the call up" in results[1]
