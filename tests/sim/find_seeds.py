"""`python -m tests.sim.find_seeds [MUTANT ...]`: write the first seeds that show mistakes to seeds.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.sim.lane import PULL_SEEDS
from tests.sim.mutants import MUTANTS
from tests.sim.run import first_bad

SAVED = Path(__file__).parent / "seeds.json"
LIMIT = 25_000


def find(names: list[str]) -> None:
    """Search for the first seed of every mutant named and keep it."""
    for name in names:
        bad = first_bad(range(LIMIT), name) or first_bad(range(PULL_SEEDS, PULL_SEEDS + LIMIT), name)
        saved = json.loads(SAVED.read_text())
        saved["mutants"][name] = bad.seed if bad is not None else None
        SAVED.write_text(json.dumps(saved, indent=2) + "\n")
        print(name, saved["mutants"][name])


if __name__ == "__main__":
    find(sys.argv[1:] or list(MUTANTS))
