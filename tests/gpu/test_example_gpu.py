"""The README's example for GPUs runs on them; `tests/test_contract.py` runs it on CPU tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(120)]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpu.py"


@pytest.mark.smoke("example")
def test_the_example_of_the_readme_runs_on_gpus() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "rank 0 on cuda:0" in done.stdout
    assert "rank 1 on cuda:1" in done.stdout
