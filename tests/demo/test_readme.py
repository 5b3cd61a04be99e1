"""The loop under "When a rank dies" in the README is that of `examples/restart.py`, which does what the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "restart.py"


def test_the_loop_of_the_readme_is_that_of_the_example() -> None:
    shown = re.findall(
        r"<!-- tested: tests/demo/test_readme\.py -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    assert len(shown) == 1
    assert shown[0] in EXAMPLE.read_text()


@pytest.mark.timeout(240)
def test_a_killed_rank_is_started_again_and_gets_step_and_weights() -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "ROLE")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=230, env=environ, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 was killed, starting it again" in done.stdout
    begins = re.findall(r"rank (\d): begins at step (\d+)", done.stdout)
    assert sorted(rank for rank, step in begins if step == "0") == ["0", "1", "2"]
    later = [(rank, step) for rank, step in begins if step != "0"]
    assert sorted(rank for rank, _ in later) == ["0", "1", "2"]
    assert len({step for _, step in later}) == 1
    ends = re.findall(r"rank (\d): done, ranks \(0, 1, 2\), error (\d\.\d{4})", done.stdout)
    assert sorted(rank for rank, _ in ends) == ["0", "1", "2"]
    assert all(float(error) < 0.1 for _, error in ends)
