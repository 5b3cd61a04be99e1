"""`epee bench ep` on tiny shapes: it runs, checks both sides, and writes what it says. No time is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import common, ep_cpu


def _cli(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(ep_cpu.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_report_has_every_operation_of_both_sides(tmp_path: Path, num_ranks: int) -> None:
    shape = ["--tokens", "5", "--hidden", "16", "--topk", "2", "--experts", "6"]
    done = _cli("--ranks", str(num_ranks), *shape, "--repeats", "50", "--json", str(tmp_path / "one" / "ep.json"))
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "one" / "ep.json").read_text())
    operations = [result["operation"] for result in report["results"]]
    assert operations == ["dispatch", "dispatch, handle", "combine", "combine in place", "combine, gloo sums wide"]
    for result in report["results"]:
        for side in ("epee", "gloo"):
            assert result[side]["num_repeats"] == 50
            assert 0 < result[side]["p10_us"] <= result[side]["median_us"] <= result[side]["p99_us"]
        ratio = result["gloo"]["median_us"] / result["epee"]["median_us"]
        assert result["speedup"] == pytest.approx(ratio, abs=0.006)  # printed with two digits
    assert {"time", "logical_gbps", "wire_gbps"} <= set(report["formulas"])
    assert {"cpu", "num_cores", "torch", "python", "kernel", "epee"} <= set(report["machine"])
    assert "combine in place" in done.output


def test_out_takes_a_folder(tmp_path: Path) -> None:
    done = _cli("--ranks", "1", "--tokens", "2", "--hidden", "8", "--repeats", "50", "--out", str(tmp_path / "here"))
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "here" / "ep.json").read_text())["benchmark"] == ep_cpu.NAME


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--experts", "33"], "33"),
        (["--dtype", "int8"], "int8"),
        (["--hidden", "12"], "12"),
        (["--topk", "8", "--experts", "4"], "8"),
        (["--repeats", "49"], "50"),
    ],
)
def test_impossible_shapes_are_refused(arguments: list[str], says: str) -> None:
    done = _cli(*arguments)
    assert done.exit_code == 2
    assert says in done.output


def test_wrong_results_are_never_measured() -> None:
    with pytest.raises(AssertionError, match="gloo: combine differs from the reference"):
        ep_cpu._require("gloo", "combine", torch.ones(3), torch.zeros(3))


def _raise(rank: int, num_ranks: int, barrier: common.SpinBarrier) -> None:
    if rank == 1:
        raise KeyError("on purpose")
    barrier.wait()


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(common.RankError, match=r"rank 1 raised:[\s\S]*on purpose"):
        common.run_ranks(_raise, 2, timeout_s=30)


def test_statistics_take_the_slowest_rank_of_each_round() -> None:
    fast = [1e-6 * number for number in range(1, 101)]
    slow = [0.0] * 99 + [1.0]
    summary = common.summarise([fast, slow])
    assert summary.median_us == pytest.approx(50.5)
    assert summary.p10_us == pytest.approx(10)
    assert summary.p99_us == pytest.approx(99)
    assert summary.num_repeats == 100
