"""Masks, deaths and late ranks of the throughput kernels, run on the CPU."""

from __future__ import annotations

import pytest

from tests.csrc.emulated import has_compiler
from tests.csrc.throughput_survival import CHECKS, Death, expect_only_dead, killed, late_stores, replayed_before
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


@pytest.mark.parametrize("name", CHECKS)
def test_loss_is_told_and_survived(name: str) -> None:
    CHECKS[name]("emulated")


# kernel file, place of `common/stall.cuh`, layout and way of the rounds
PLACES = {
    "before its counts": ("layout", 11, "rank", ""),
    "before its counts, few tokens": ("few", 11, "rank", "few"),
    "in its rows": ("dispatch", 4, "rank", ""),
    "in its rows, few tokens": ("few", 4, "rank", "few"),
    "in its rows, expert layout": ("expert", 4, "expert", ""),
    "before a progress word": ("expert", 9, "expert", "async"),
    "between its last row and saying so": ("dispatch", 1, "rank", "async"),
    "before a combine": ("combine", 11, "rank", ""),
    "in copies for a combine": ("combine", 8, "rank", ""),
    "while it pulls": ("combine", 6, "expert", ""),
    "before it says that it has pulled": ("combine", 5, "rank", ""),
    "in a combine in order": ("order", 13, "rank", "order"),
}


@pytest.mark.parametrize("name", PLACES)
def test_death_at_any_place_is_told_and_survived(name: str) -> None:
    file, place, layout, way = PLACES[name]
    expect_only_dead(killed, 3, "emulated", layout, way, Death(0.3, file, place))


def test_late_rows_of_a_rank_that_was_left_out_reach_nothing_that_is_used() -> None:
    run_ranks(late_stores, 3, "emulated", timeout_s=200)


@pytest.mark.parametrize(
    ("first", "error"),
    [("dispatch", "NoneType"), ("barrier", "NoneType"), ("nothing", "NoneType"), ("refusal", "MismatchError")],
)
def test_graphs_that_were_replayed_before_a_view_was_entered_are_nothing_to_its_calls(first: str, error: str) -> None:
    others = error if first != "refusal" else "MismatchError"
    own = "NoneType" if first == "refusal" else error  # who refuses knows why
    assert run_ranks(replayed_before, 2, "emulated", first, timeout_s=200) == [others, own]
