"""The tables of docs/performance.md and of the README say what the raw files in benchmarks/results say."""

from __future__ import annotations

import re

import pytest

from benchmarks import page


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.name)
def test_tables_are_those_of_the_raw_files(path: page.Path) -> None:
    text = path.read_text()
    assert text == page.written(text), "write it anew: python -m benchmarks.page"


def test_every_table_has_its_place() -> None:
    names = [found[2] for path in page.PAGES for found in page.MARKED.finditer(path.read_text())]
    assert sorted(names) == sorted(page.TABLES)


def test_the_raw_files_that_the_page_names_exist() -> None:
    names = re.findall(r"`(\w[\w*]+\.json)`", page.PAGES[0].read_text().replace("--json ", ""))
    assert len(names) >= 8
    assert [name for name in names if not list(page.RESULTS.glob(name))] == []
