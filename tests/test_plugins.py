"""Plugins of pytest that happen to be installed beside those of the suite, and warn when pytest begins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = """
import warnings

def pytest_configure(config):
    warnings.warn("benchmarks are disabled beside xdist")
"""


def test_pytest_benchmark_beside_xdist_ends_no_run(tmp_path: Path) -> None:
    info = tmp_path / "site" / "pytest_benchmark-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest-benchmark\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nbenchmark = stands_for_benchmark\n")
    (info.parent / "stands_for_benchmark.py").write_text(PLUGIN)
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-n", "1", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(info.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(tmp_path / "test_one.py")],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
