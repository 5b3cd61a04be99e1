"""`scripts/compare`: what it takes for slower, and how it reads the benchmarks' reports."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import compare


def block(p10_us: float, median_us: float = 20.0) -> dict[str, dict[str, float]]:
    return {"all_reduce 2 ranks 4 B": {"p10_us": p10_us, "median_us": median_us}}


@pytest.mark.parametrize(
    ("before", "after", "is_slower"),
    [
        ([10.0, 10.0, 10.0], [10.4, 10.4, 10.4], False),  # within 5 %
        ([10.0, 10.0, 10.0], [10.9, 10.9, 10.9], False),  # within 1 us
        ([100.0, 100.0, 100.0], [106.0, 107.0, 106.0], True),
        ([100.0, 200.0, 100.0], [101.0, 202.0, 101.0], False),  # a noisy pair is compared with itself
        ([100.0, 100.0, 100.0], [300.0, 101.0, 101.0], False),  # one bad block is no verdict
        ([100.0, 100.0, 200.0], [150.0, 130.0, 100.0], False),  # most pairs met a bad phase, the best blocks are equal
    ],
)
def test_slower_is_above_both_bounds_in_most_pairs(before: list[float], after: list[float], is_slower: bool) -> None:
    (row,) = compare.compare([block(us) for us in before], [block(us) for us in after])
    assert row.is_slower is is_slower


def test_only_cases_of_both_checkouts_are_compared() -> None:
    more = {**block(10.0), "barrier 2 ranks 4 B": {"p10_us": 5.0, "median_us": 6.0}}
    assert [row.name for row in compare.compare([more], [block(10.0)])] == ["all_reduce 2 ranks 4 B"]


def test_reports_of_both_benchmarks_are_read() -> None:
    summary = {"p10_us": 1.0, "median_us": 2.0}
    rows: dict[str, Any] = {"rows": [{"op": "barrier", "num_ranks": 2, "bytes": 4, "epee": summary}]}
    results: dict[str, Any] = {
        "results": [{"operation": "dispatch", "shape": {"num_ranks": 2, "num_tokens": 64}, "epee": summary}]
    }
    assert compare.rows_of(rows) == {"barrier 2 ranks 4 B": summary}
    assert compare.rows_of(results) == {"dispatch num_ranks=2 num_tokens=64": summary}
