"""The program about growth in docs/backend.md does what the page says."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from tests.forked import Script
from tests.ports import free_port

PAGE = Path(__file__).parents[2] / "docs" / "backend.md"


def test_the_program_about_growth_runs(tmp_path: Path) -> None:
    found = re.search(r"```python \(tests/survive/test_grow_docs.py\)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    script = tmp_path / "grow.py"
    script.write_text(found[1])
    port = str(free_port())

    def launch(rank: int, world_size: int, joins: int) -> Script:
        mine = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "JOINS": str(joins)}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "EPEE_RUNTIME_DIR": str(tmp_path / "run")}
        return processes.enter_context(Script(script, os.environ | where | mine))

    with contextlib.ExitStack() as processes:
        ranks = [launch(rank, 2, 0) for rank in range(2)]
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob("run/job-*/home")):  # the group is there
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ranks += [launch(rank, 4, 1) for rank in (2, 3)]
        told = [process.communicate(timeout=45)[0] for process in ranks]
    assert told == [f"rank {rank}: 4 of 4, world size {4 if rank > 1 else 2}\n" for rank in range(4)]
