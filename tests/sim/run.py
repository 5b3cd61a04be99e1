"""Run seeds: what a run ends with, and a fingerprint by which two runs of one seed can be compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

from .history import Record, Violation
from .mutants import make_world
from .plan import make_plan


class Outcome(NamedTuple):
    """The end of a run: what is wrong, how much happened, and what was recorded."""

    seed: int
    violations: tuple[Violation, ...]
    num_events: int
    num_decisions: int
    records: tuple[Record, ...]

    def fingerprint(self) -> str:
        """Return a digest of everything that was recorded, times included."""
        digest = blake2b(digest_size=16)
        for record in self.records:
            digest.update(record.pack())
        digest.update(repr((self.num_events, self.num_decisions, self.violations)).encode())
        return digest.hexdigest()


def run_seed(seed: int, mutant: str = "", trace: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed to its end.

    Args:
        seed: everything follows from it.
        mutant: a key of `mutants.MUTANTS`: run with that mistake.
        trace: called with a line of text for everything that happens.
    """
    world = make_world(make_plan(seed), mutant, trace)
    violations = tuple(world.run())
    return Outcome(seed, violations, world.count, len(world.decisions) - 1, tuple(world.records()))


def first_bad(seeds: range, mutant: str = "") -> Outcome | None:
    """Return the first run of `seeds` that breaks a rule; None when there is none."""
    for seed in seeds:
        outcome = run_seed(seed, mutant)
        if outcome.violations:
            return outcome
    return None
