"""The programs of backend.md and fault-tolerance.md run on two ranks; the tests that README.md here names exist."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.ports import free_port

PAGE = Path(__file__).parents[2] / "docs" / "backend.md"
PAGES = PAGE, PAGE.with_name("fault-tolerance.md")
TEXTS = [text for page in PAGES for text in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
PROGRAMS = [text for text in TEXTS if text.startswith(("import ", "from "))]  # else a part of one
TESTS = Path(__file__).with_name("README.md")
ROWS = [line for line in TESTS.read_text().splitlines() if re.search(r"`test_\w+\.py`", line)]


def program(rank: int, num_ranks: int, text: str, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    exec(compile(text, str(PAGE), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_every_program_of_the_page_runs_on_two_ranks(number: int) -> None:
    run_ranks(program, 2, PROGRAMS[number], free_port(), backend=None)


def test_the_pages_have_programs_and_rows() -> None:
    assert len(PROGRAMS) == 6
    assert len(ROWS) > 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row.split("|")[1])[:40])
def test_every_test_that_the_page_names_exists(row: str) -> None:
    text = row.rstrip(" |").split("|")[-1]
    source = ""
    for file, label, name in re.findall(r'`(test_\w+\.py)`|"([^"]+)"|`(\w+)`', text):
        if file:
            source = (Path(__file__).parent / file).read_text()
            continue
        where = f'"{label}": (' if label else name
        assert where in source, f"{label or name} is not in the file named before it"
