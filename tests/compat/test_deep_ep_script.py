"""A script that was written for `deep_ep` runs on epee, unchanged, on real processes."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import epee.compat.deep_ep
from tests.harness import run_ranks

SCRIPT = Path(__file__).parent / "script_for_deep_ep.py"


def _run_script(rank: int, num_ranks: int) -> bool:
    sys.modules["deep_ep"] = epee.compat.deep_ep
    names = runpy.run_path(str(SCRIPT), run_name="__main__")
    return names["deep_ep"] is epee.compat.deep_ep


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_script_for_deep_ep_runs(num_ranks: int) -> None:
    assert "epee" not in SCRIPT.read_text().split('"""')[2]
    assert run_ranks(_run_script, num_ranks) == [True] * num_ranks
