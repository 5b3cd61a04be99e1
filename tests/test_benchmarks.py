"""The benchmarks on CPUs that have no test elsewhere, each by its `main`, with tiny sizes. No time is judged."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

for _name in ("typer", "rich"):
    pytest.importorskip(_name, reason=f"the benchmarks need {_name}; the package does not")

import typer  # noqa: E402

from benchmarks import bad_connects, compare, ep_cpu, first_buffer, proxy, survive, sync, turns  # noqa: E402
from tests.csrc.cuda_stand_in import spawn_with  # noqa: E402
from tests.link.pairs import over_both  # noqa: E402

ROOT = Path(bad_connects.__file__).parents[1]


def call_main(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str, **constants: Any) -> None:
    """Call a benchmark's `main` with arguments of the command line; its ranks are processes of the harness."""
    spawn = spawn_with({module.__name__: constants})
    monkeypatch.setattr(module.mp, "spawn", lambda function, args, nprocs: spawn(function, args, nprocs))
    monkeypatch.setattr("sys.argv", [module.__name__, *arguments])
    module.main()


def test_first_buffer_prints_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call_main(first_buffer, monkeypatch, "--num-ranks=2", LIVES=1)
    assert capsys.readouterr().out.startswith("2 ranks: first ")


def test_sync_prints_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call_main(sync, monkeypatch, "--num-ranks=2", ROUNDS=2)
    assert capsys.readouterr().out.startswith("2 ranks, ms p50 / p90: sync ")


def test_bad_connects_writes_its_numbers(tmp_path: Path) -> None:
    bad_connects.main(seconds=3.0, turns=1, json_to=tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["connects"] > 0
    assert report["quiet_us"] > 0


@over_both
@pytest.mark.parametrize("processes", [1, 2])
def test_proxy_checks_its_bytes_and_writes_its_rows(tmp_path: Path, processes: int, engine: str) -> None:
    tiny = {"sizes": "16,70000", "pings": 2, "chunks": 4, "rounds": 1, "slots": 2}
    proxy.main(**tiny, processes=processes, engine=engine, json_to=tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["nbytes"] for row in report["rows"]] == [16, 70000]
    assert all(row[f"{way}_gbps"] > 0 for row in report["rows"] for way in ("one_way", "both_ways", "plain"))
    assert all(0 < row["half_trip_us"] <= row["half_trip_p99_us"] for row in report["rows"])


def test_proxy_notices_bytes_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    post = proxy.End.post

    def damaged(end: proxy.End, nbytes: int, data: bytes = b"") -> None:
        post(end, nbytes, bytes([data[0] ^ 1]) + data[1:])

    monkeypatch.setattr(proxy.End, "post", damaged)
    with pytest.raises(RuntimeError, match="did not arrive as it was sent"):
        proxy.main(sizes="64", pings=1, chunks=1, rounds=1, slots=2)


def _has_history() -> bool:
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not _has_history(), reason="needs a commit of the repository to compare with")
def test_survive_compares_with_a_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(survive, "CASES", (("barrier", 0, 2), ("all_reduce", 4, 2)))
    survive.main(ranks=2, rounds=3, against="HEAD", json_to=tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["op"] for row in rows] == ["barrier", "all_reduce"]


@pytest.mark.slow
def test_compare_runs_both_checkouts(capsys: pytest.CaptureFixture[str]) -> None:
    cases = "barrier,send_recv:4,all_reduce:1048576,all_to_all:64,dispatch:8,combine:8"
    with contextlib.suppress(typer.Exit):  # a case may be slower: no time is judged here
        compare.main(str(ROOT), blocks=2, args=cases)
    printed = capsys.readouterr().out
    assert all(case in printed for case in cases.split(","))


@pytest.mark.parametrize("case", ["none:4", "barrier:4", "all_reduce", "dispatch:-1"])
def test_turns_know_their_cases(case: str) -> None:
    with pytest.raises(ValueError, match=f"cases: '{case}' is none of barrier"):
        turns.measure([ROOT, ROOT], ["barrier", case], 1)


@pytest.mark.slow
def test_turns_print_a_line_per_checkout_and_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["turns", str(ROOT), str(ROOT), "--cases=barrier,broadcast:4", "--turns=1"])
    turns.main()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["barrier", "broadcast:4"] * 2


@pytest.mark.slow
def test_turns_of_a_checkout_whose_ranks_end_say_why() -> None:
    with pytest.raises(RuntimeError, match=r"rank . of checkout . ended with 1[\s\S]*max_tokens_per_rank"):
        turns.measure([ROOT, ROOT], ["dispatch:0"], 1)


@pytest.mark.slow
def test_dispatch_and_combine_between_hosts(tmp_path: Path) -> None:
    shape = {"ranks_per_host": 1, "num_tokens": 4, "hidden": 16, "num_topk": 2, "num_experts": 4}
    ep_cpu.ep_hosts.main(shape, num_steps=2, num_blocks=1, is_realtime=False, json=tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())["report"]
    assert min(report[f"{side}_us"] for side in ("epee", "flat", "gloo", "raw")) > 0


def test_every_benchmark_is_run_by_a_test() -> None:
    parts = {"common", "gpu", "two_hosts", "hosts_rank", "ep_hosts_rank", "survive_worker"}
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - parts
    calls = {name: (f"{name}.main", f'"benchmarks.{name}"', f"call_main({name},") for name in names}
    assert [name for name in names if not any(call in text for call in calls[name])] == []
