"""`scripts/flaky` lists the tests that do not pass in every run, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import flaky

SUITE = """
from pathlib import Path

import pytest

COUNTER = Path(__file__).with_name("counter")


def number() -> int:
    return len(COUNTER.read_text()) if COUNTER.exists() else 0


def test_steady() -> None:
    pass


def test_skipped_always() -> None:
    pytest.skip("not here")


def test_fails_second() -> None:
    COUNTER.write_text("x" * (number() + 1))
    assert number() != 2, "the second time"


def test_runs_later() -> None:
    if number() == 1:
        pytest.skip("not yet")
"""


def test_unsteady_tests_are_listed_with_their_outcomes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    assert flaky.main(["3", str(suite)]) == 1
    lines = [line for line in capfd.readouterr().out.splitlines() if "::" in line and " passed " in line]
    assert len(lines) == 2
    assert lines[0].partition("::")[2] == "test_fails_second: failed 1, passed 2; AssertionError: the second time"
    assert lines[1].partition("::")[2] == "test_runs_later: passed 2, skipped 1"
    assert flaky.main(["1", str(suite), "-k", "steady or always"]) == 0


def test_a_run_without_outcomes_counts_as_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert flaky.main(["1", str(tmp_path / "nothing.py")]) == 1
    assert f"{flaky.NO_REPORT}: failed 1; pytest ended with 4" in capfd.readouterr().out


def test_no_runs_are_refused() -> None:
    with pytest.raises(SystemExit):
        flaky.main(["0"])
