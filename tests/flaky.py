"""Run tests several times while their ranks are stopped (`tests/shake.py`), and list those that did not pass always.

    scripts/flaky 5 tests/survive -k buffer      arguments behind the number are pytest's; none: the whole suite

Each run writes its outcomes as pytest's JUnit file, which is read when the run is over; a run that wrote none, or that
pytest ended otherwise than by tests that fail, counts as one that failed. A test that was skipped in some runs and ran
in others is listed, too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import shake

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
NO_REPORT = "(a whole run)"  # in place of a test's name


def outcomes_of(report: Path) -> dict[str, tuple[str, str]]:
    """Return the outcome of each test of a JUnit file, and the first line of its message."""
    found: dict[str, tuple[str, str]] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome, message = PASSED, ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, message = FAILED, child.get("message") or ""
            elif child.tag == "skipped":
                outcome = SKIPPED
        if found.get(name, ("", ""))[0] != FAILED:  # a failure of its teardown has an entry of its own
            found[name] = outcome, message.partition("\n")[0]
    return found


def unsteady(runs: Sequence[Mapping[str, tuple[str, str]]]) -> dict[str, tuple[Counter[str], str]]:
    """Return the tests that failed, or had several outcomes: name -> outcomes with their numbers, last message."""
    counts: dict[str, Counter[str]] = {}
    messages: dict[str, str] = {}
    for run in runs:
        for name, (outcome, message) in run.items():
            counts.setdefault(name, Counter())[outcome] += 1
            if outcome == FAILED:
                messages[name] = message
    return {
        name: (outcomes, messages.get(name, ""))
        for name, outcomes in sorted(counts.items())
        if outcomes[FAILED] or len(outcomes) > 1
    }


def run_once(arguments: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Run the tests once under `shake`; return their outcomes."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        code = shake.main([f"--junitxml={report}", *arguments])
        if not report.exists() or code not in (0, 1):
            return {NO_REPORT: (FAILED, f"pytest ended with {code}")}
        return outcomes_of(report)


def main(arguments: Sequence[str]) -> int:
    """Run as asked and print the list; returns 1 if it has an entry."""
    parser = argparse.ArgumentParser(prog="scripts/flaky", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=int, help="how often, at least once")
    parser.add_argument("pytest", nargs=argparse.REMAINDER, help="arguments of pytest")
    given = parser.parse_args(arguments)
    if given.runs < 1:
        parser.error(f"runs must be at least 1, got {given.runs}")
    runs = []
    for number in range(1, given.runs + 1):
        print(f"==> run {number} of {given.runs}", flush=True)
        runs.append(run_once(given.pytest))
    found = unsteady(runs)
    for name, (outcomes, message) in found.items():
        numbers = ", ".join(f"{outcome} {count}" for outcome, count in sorted(outcomes.items()))
        print(f"{name}: {numbers}" + (f"; {message}" if message else ""))
    print(f"{len(found)} of {len(set().union(*runs))} tests did not pass or skip in all of {given.runs} runs")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
