"""The programs of docs/training.md run on two ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.ports import free_port

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def _run(rank: int, num_ranks: int, number: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    exec(compile(PROGRAMS[number], str(PAGE), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_the_programs_of_the_page_run(number: int) -> None:
    run_ranks(_run, 2, number, free_port(), backend=None)


def test_the_page_shows_ddp_and_fsdp2() -> None:
    assert [name in text for text, name in zip(PROGRAMS, ("DistributedDataParallel(", "fully_shard("), strict=True)]
