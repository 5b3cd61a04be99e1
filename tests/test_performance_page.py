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


def test_tables_and_plots_are_written(tmp_path: page.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = tuple(tmp_path / path.name for path in page.PAGES)
    for path, copy in zip(page.PAGES, copies, strict=True):
        copy.write_text(page.MARKED.sub(r"\1old\n\4", path.read_text()))
    monkeypatch.setattr(page, "PAGES", copies)
    originals = [path.read_text() for path in (page.ROOT / "docs" / "performance.md", page.ROOT / "README.md")]
    page.main()
    assert [copy.read_text() for copy in copies] == originals
    assert [path.stat().st_size > 10_000 for path in sorted(tmp_path.glob("*.png"))] == [True, True]
