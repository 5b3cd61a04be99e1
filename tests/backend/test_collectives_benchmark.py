"""The benchmark of the collectives runs, checks its results and writes what it promises to write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

for _name in ("typer", "rich", "matplotlib"):
    pytest.importorskip(_name, reason=f"the benchmark needs {_name}; the backend does not")

from benchmarks import all_reduce, collectives  # noqa: E402


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch 2.13 warns of its older names
def test_a_short_run_writes_table_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, picture = tmp_path / "out.json", tmp_path / "out.svg"
    collectives.main(ranks="2", sizes="4,100000", repeats=10, idle_s=0.0, json=numbers, plot_to=picture)
    report = json.loads(numbers.read_text())
    rows = {(row["op"], row["bytes"]): row for row in report["rows"]}
    assert len(rows) == 2 * (len(collectives.OPS) - 1) + 1
    assert rows["all_reduce", 4]["target"] == 12.0
    for row in rows.values():
        assert row["gloo"]["num_repeats"] == row["epee"]["num_repeats"] == 10
        assert row["epee"]["p10_us"] <= row["epee"]["median_us"]
    assert report["init_s"]["2"] > 0
    assert "<svg" in picture.read_text()
    assert "all_to_all" in capsys.readouterr().out


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(Exception, match="all_reduce, broadcast"):
        collectives.main(ops="all_reduce,juggle")


@pytest.mark.slow
def test_all_reduce_call_by_call_checks_and_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    all_reduce.main(json=tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["bytes"] for row in rows] == list(all_reduce.CALLS)
    for row in rows:
        assert len(row["speedups"]) == all_reduce.NUM_BLOCKS
        assert min(row["speedups"]) <= row["speedup"] + 0.1
        assert row["gloo_us"] > 0
        assert row["epee_us"] > 0
    assert "16777216" in capsys.readouterr().out
