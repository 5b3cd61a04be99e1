"""`python -m tests.sim.find_seeds [MUTANT ...]`: write early seeds that show mistakes to seeds.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.sim.kinds import PULL_SEEDS
from tests.sim.mutants import MUTANTS
from tests.sim.plan import GATE_SEEDS, HOST_SEEDS, OVERLAP_SEEDS, ROOT_SEEDS
from tests.sim.run import first_bad

SAVED = Path(__file__).parent / "seeds.json"
LIMIT, CHUNK = 25_000, 500
STARTS = (0, PULL_SEEDS, HOST_SEEDS, GATE_SEEDS, ROOT_SEEDS, OVERLAP_SEEDS)


def find(names: list[str]) -> None:
    """Search for the first seed of every mutant named and keep it."""
    for name in names:
        chunks = (range(start + at, start + at + CHUNK) for at in range(0, LIMIT, CHUNK) for start in STARTS)
        bad = next((bad for chunk in chunks if (bad := first_bad(chunk, name))), None)
        saved = json.loads(SAVED.read_text())
        saved["mutants"][name] = bad.seed if bad is not None else None
        SAVED.write_text(json.dumps(saved, indent=2) + "\n")
        print(name, saved["mutants"][name])


if __name__ == "__main__":
    find(sys.argv[1:] or list(MUTANTS))
