"""The simulator: seeds hold, mistakes are found, a seed replays bit for bit.

`seeds.json` keeps, per mistake (`tests/sim/mutants.py`), the first seed that shows it, and seeds that once showed a
mistake of our own. They belong to the generator in `tests/sim/plan.py`: when that changes,
`python -m tests.sim.find_seeds` finds new ones.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from epee.engine.replication.loss_resolution import Gate
from epee.view.protocol.messages import Decision
from epee.view.protocol.outcome import Course
from tests.sim.__main__ import main
from tests.sim.history import DIED, DONE, EVICTED, NO_QUORUM, OK, ROOTLESS, SHOWN
from tests.sim.kinds import PULL_SEEDS
from tests.sim.lane import Engine
from tests.sim.mutants import MUTANTS, make_world
from tests.sim.plan import GATE_SEEDS, HOST_SEEDS, JOIN, OVERLAP_SEEDS, ROOT_SEEDS, make_plan
from tests.sim.run import Outcome, first_bad, run_seed

SAVED = json.loads((Path(__file__).parent / "seeds.json").read_text())
CHUNK = 250
NUM_SEEDS = int(os.environ.get("EPEE_TEST_SEEDS", "5000"))  # fewer for a quick look
QUICK = min(NUM_SEEDS, 2 * CHUNK)
PULL_STARTS = [
    PULL_SEEDS,
    *(pytest.param(PULL_SEEDS + at, marks=pytest.mark.slow) for at in range(CHUNK, 5 * CHUNK, CHUNK)),
]
HOST_STARTS = [
    HOST_SEEDS,
    *(pytest.param(HOST_SEEDS + at, marks=pytest.mark.slow) for at in range(CHUNK, NUM_SEEDS // 2, CHUNK)),
]
GATE_STARTS = [
    GATE_SEEDS,
    *(pytest.param(GATE_SEEDS + at, marks=pytest.mark.slow) for at in range(CHUNK, NUM_SEEDS // 2, CHUNK)),
]
ROOT_STARTS = [
    ROOT_SEEDS,
    *(pytest.param(ROOT_SEEDS + at, marks=pytest.mark.slow) for at in range(CHUNK, NUM_SEEDS // 2, CHUNK)),
]
OVERLAP_STARTS = [
    OVERLAP_SEEDS,
    *(pytest.param(OVERLAP_SEEDS + at, marks=pytest.mark.slow) for at in range(CHUNK, NUM_SEEDS // 2, CHUNK)),
]
STARTS = [*range(0, QUICK, CHUNK), *PULL_STARTS, *HOST_STARTS, *GATE_STARTS, *ROOT_STARTS, *OVERLAP_STARTS]
SLOW_STARTS = [pytest.param(start, marks=pytest.mark.slow) for start in range(QUICK, NUM_SEEDS, CHUNK)]


@pytest.mark.parametrize("start", [*STARTS, *SLOW_STARTS])
def test_no_rule_is_broken(start: int) -> None:
    bad = first_bad(range(start, start + CHUNK))
    assert bad is None, f"python -m tests.sim --replay {bad.seed}: {bad.violations[0]}"


@pytest.mark.parametrize("seed", SAVED["regressions"])
def test_no_rule_is_broken_where_one_was(seed: int) -> None:
    assert run_seed(seed).violations == ()


def test_every_mistake_is_found_within_twenty_five_thousand_seeds() -> None:
    assert set(SAVED["mutants"]) == set(MUTANTS)
    assert [name for name, seed in SAVED["mutants"].items() if seed % PULL_SEEDS > 25_000] == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_is_found(mutant: str) -> None:
    seed = SAVED["mutants"][mutant]
    assert run_seed(seed, mutant).violations, f"python -m tests.sim.find_seeds {mutant} finds another seed"
    assert run_seed(seed).violations == ()


@pytest.mark.parametrize("seed", [3, 20, 53])
def test_a_seed_replays_bit_for_bit(seed: int) -> None:
    first, second = run_seed(seed), run_seed(seed, trace=lambda line: None)
    assert first.records
    assert first.fingerprint() == second.fingerprint()
    assert first.fingerprint() != run_seed(seed + 1).fingerprint()


def test_runs_do_what_they_are_for() -> None:
    """Decisions are made, calls fail and run again, processes join: where nothing happens nothing is proved."""
    outcomes = [run_seed(seed) for seed in range(100)]
    assert sum(outcome.num_decisions for outcome in outcomes) > 50
    statuses = {record.status for outcome in outcomes for record in outcome.records}
    assert statuses >= {1, 2, 3, 4, 5}
    assert any(record.incarnation > 1 for outcome in outcomes for record in outcome.records)


def test_runs_over_hosts_do_what_they_are_for() -> None:
    """Hosts are lost, zombies voted out, deaths told, and what the dead have left is cut."""
    outcomes = [run_seed(seed) for seed in range(HOST_SEEDS, HOST_SEEDS + 100)]
    assert sum(outcome.num_decisions for outcome in outcomes) > 50
    kinds = {record.kind for outcome in outcomes for record in outcome.records}
    assert {EVICTED, NO_QUORUM, DIED} <= kinds


def test_runs_with_newcomers_over_hosts_do_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views with newcomers wait for what lost ranks have said, and for others; some of these are lost meanwhile."""
    seen: Counter[str] = Counter()
    is_open, hear = Gate.is_open, Gate.hear

    def opens(self: Gate, offers: Any) -> bool:
        found = is_open(self, offers)
        seen["unsettled"] += bool(self._loss_resolution.unsettled)
        seen["late"] += bool(self.late)
        seen["open"] += found
        return found

    def hears(self: Gate, decision: Decision) -> None:
        before = len(self._staying)
        hear(self, decision)
        seen["lost meanwhile"] += len(self._staying) < before

    monkeypatch.setattr(Gate, "is_open", opens)
    monkeypatch.setattr(Gate, "hear", hears)
    outcomes = [run_seed(seed) for seed in range(GATE_SEEDS, GATE_SEEDS + 100)]
    assert seen["open"] > 100
    assert min(seen["unsettled"], seen["late"], seen["lost meanwhile"]) > 10, seen
    newcomers = {(outcome.seed, *who) for outcome in outcomes for who in _completed(outcome) if who[1] > 1}
    assert len(newcomers) > 50


def test_runs_with_roots_do_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots are lost, on one host and over several; some hear of two losses at once; some call with different roots."""
    seen: Counter[str] = Counter()
    ends, differ = Course.ended_on_the_way, Engine._roots_differ

    def ended(self: Course, seq: int, epoch: int) -> None:
        seen["two losses heard of"] += any(turn.epoch > epoch for turn in self.turns)
        ends(self, seq, epoch)

    def roots_differ(self: Engine, *args: Any) -> bool:
        found = differ(self, *args)
        seen["two roots"] += found
        return found

    monkeypatch.setattr(Course, "ended_on_the_way", ended)
    monkeypatch.setattr(Engine, "_roots_differ", roots_differ)
    plans = [make_plan(seed) for seed in range(ROOT_SEEDS, ROOT_SEEDS + 200)]
    outcomes = [run_seed(plan.seed) for plan in plans]
    assert min(seen["two losses heard of"], seen["two roots"]) > 5, seen
    for is_over_hosts in (False, True):
        runs = [run for run, plan in zip(outcomes, plans, strict=True) if bool(plan.hosts) == is_over_hosts]
        assert sum(any(record.status == ROOTLESS for record in run.records) for run in runs) > 10
        assert sum(any(record.kind == SHOWN for record in run.records) for run in runs) > 10


def _completed(outcome: Outcome) -> set[tuple[int, int]]:
    """Return who has completed a call: slot, incarnation."""
    return {(r.slot, r.incarnation) for r in outcome.records if (r.kind, r.status) == (DONE, OK)}


def test_who_is_accused_too_soon_is_voted_out_without_a_cause() -> None:
    """Also where newcomers come: those are excused who are in calls that their accuser does not see, nobody else."""
    hasty = [make_plan(seed)._replace(op_timeout_s=0.01) for seed in range(HOST_SEEDS, HOST_SEEDS + 150)]
    worlds = [make_world(plan) for plan in hasty if plan.is_calm() and any(f.kind == JOIN for f in plan.faults)]
    assert any(violation.rule == "V-7" for world in worlds for violation in world.run())


def test_the_command_line_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:20"]) == 0
    assert "0 seeds with violations" in capsys.readouterr().out
    seed = SAVED["mutants"]["TagFirst"]
    assert main(["--seeds", f"{seed}:{seed + 1}", "--mutant", "TagFirst"]) == 1
    assert f"seed {seed}: C-" in capsys.readouterr().out
    assert main(["--replay", str(seed)]) == 0
    assert "a second run is the same" in capsys.readouterr().out
