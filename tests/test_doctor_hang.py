"""`epee doctor --pid`: a real job hangs, one rank stopped or holding the GIL; the report says who waits for whom."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from epee.cli.main import app, main
from epee.doctor import hang
from epee.view.protocol.messages import Decision, Member
from epee.view.report import JobReport, RankReport, look_at_job
from tests import harness
from tests.forked import Command

NUM_RANKS, VICTIM = 3, 2
PATIENCE_S = 40.0


def waiting_rank(rank: int, num_ranks: int, folder: str, trouble: str) -> None:
    """Make two calls together; then the victim gets into trouble instead of making the third."""
    x = torch.ones(4)
    for _ in range(2):
        dist.all_reduce(x)
    (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
    if rank == VICTIM and trouble == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == VICTIM and trouble == "busy":
        ctypes.PyDLL(None).usleep(int(PATIENCE_S * 1e6))  # PyDLL keeps the GIL
    dist.all_reduce(x)


@contextmanager
def hanging_job(trouble: str) -> Iterator[list[int]]:
    """Yield the pids of three ranks of which the last is in `trouble`; all are ended afterwards."""
    with (
        tempfile.TemporaryDirectory() as folder,
        harness.started(waiting_rank, NUM_RANKS, folder, trouble, timeout_s=PATIENCE_S, backend="epee"),
    ):
        files = [Path(folder) / f"pid{rank}" for rank in range(NUM_RANKS)]
        deadline = time.monotonic() + PATIENCE_S
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.01)
        yield [int(file.read_text()) for file in files]


def look_until(pid: int, is_there: Callable[[JobReport], bool]) -> JobReport:
    """Look until the ranks have come to where they hang."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        report = hang.look(pid)
        if is_there(report):
            return report
        assert time.monotonic() < deadline, str(report)


def waits(report: JobReport) -> dict[int, Any]:
    return {rank.slot: row for rank in report.ranks for row in rank.rows if row.op}


@pytest.mark.parametrize("trouble", ["stopped", "busy"])
def test_the_rank_for_which_all_wait_is_named(trouble: str) -> None:
    with hanging_job(trouble) as pids:
        asked = VICTIM if trouble == "stopped" else 0  # any rank will do, also the one that cannot answer
        report = look_until(pids[asked], lambda seen: len(waits(seen)) == 2 and seen.ranks[VICTIM].health == trouble)
        assert [rank.pid for rank in report.ranks] == pids
        assert [report.ranks[rank].health for rank in (0, 1)] == ["running", "running"]
        rows = waits(report)
        assert sorted(rows) == [0, 1]
        for row in rows.values():
            assert (row.op, row.seq, row.epoch, row.waits_for) == ("all_reduce", 3, 1, (VICTIM,))
        text = hang.as_text(report)
        assert text.count(f"all_reduce seq 3 epoch 1, waits for {VICTIM} since ") == 2
        assert f"rank {VICTIM} is {trouble}: " in text


def test_the_line_goes_when_the_call_has_ended() -> None:
    """What a rank waited for does not stay on its board."""
    with hanging_job("stopped") as pids:
        before = look_until(pids[0], lambda seen: len(waits(seen)) == 2)
        again = look_at_job(pids[0], look_s=0.0)  # the same wait: since when does not move
        assert {slot: row.since_s for slot, row in waits(again).items()} == {
            slot: row.since_s for slot, row in waits(before).items()
        }
        os.kill(pids[VICTIM], signal.SIGCONT)
        deadline = time.monotonic() + PATIENCE_S
        while any(Path(f"/proc/{pid}").exists() and pid_state(pid) not in "ZX" for pid in pids):
            assert time.monotonic() < deadline, "the ranks did not end"
            time.sleep(0.01)


def pid_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def lagging_rank(rank: int, num_ranks: int) -> list[list[str]]:
    """Rank 1 comes late; afterwards both look at themselves."""
    x = torch.ones(1)
    dist.all_reduce(x)
    if rank == 1:
        deadline = time.monotonic() + PATIENCE_S
        while not waits(look_at_job(os.getpid(), look_s=0.0)):
            assert time.monotonic() < deadline, "rank 0 is not seen waiting"
    dist.all_reduce(x)
    report = look_at_job(os.getpid(), look_s=0.0)
    dist.barrier()
    return [[row.op for row in seen.rows] for seen in report.ranks if seen.slot == rank]


def test_a_call_that_has_ended_leaves_an_idle_line() -> None:
    for rows in harness.run_ranks(lagging_rank, 2, backend="epee"):
        assert rows == [[""]]


def test_the_command_prints_text_and_json() -> None:
    with hanging_job("stopped") as pids:
        look_until(pids[0], lambda seen: len(waits(seen)) == 2)
        with Command(["doctor", "--pid", str(pids[0]), "--json"], Path.cwd()) as outside:
            output, _ = outside.communicate(PATIENCE_S)
            assert outside.returncode == 0
        told = json.loads(output)
        assert [rank["health"] for rank in told["ranks"]] == ["running", "running", "stopped"]
        assert [len(rank["calls"]) for rank in told["ranks"]] == [1, 1, 0]
        assert told["ranks"][0]["calls"][0]["waits_for"] == [VICTIM]
        assert told["suspects"] == [f"rank {VICTIM} is stopped: SIGSTOP or a debugger; `kill -CONT` lets it go on"]
        shown = CliRunner().invoke(app, ["doctor", "--pid", str(pids[1])])
        assert shown.exit_code == 0
        assert f"waits for {VICTIM}" in shown.output


def test_a_process_without_a_job_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        monkeypatch.setattr(sys, "argv", ["epee", "doctor", "--pid", str(stranger.pid)])
        try:
            with pytest.raises(SystemExit) as caught:
                main()
        finally:
            stranger.kill()
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert "is no rank of a job of epee" in error
    assert error.count("\n") == 1


def test_a_rank_that_runs_and_is_waited_for_is_a_suspect() -> None:
    from epee.view.process.board import Row

    def rank(slot: int, *rows: Row) -> RankReport:
        return RankReport(slot, 1, 100 + slot, "running", 1, rows)

    members = tuple(Member(slot, 1, bytes(16), b"") for slot in range(3))
    row = Row(7, "all_reduce", 4, 1, (1, 2), 10.0, 3)
    other = Row(7, "broadcast", 4, 1, (), 11.0, 3)
    report = JobReport(Decision(1, members), (rank(0, row), rank(1, other), rank(2)), 12.0)
    assert hang.suspects(report) == [
        "rank 1 is waited for and runs: it is in broadcast seq 4 itself",
        "rank 2 is waited for and runs: it computes, or waits elsewhere; `py-spy dump --pid 102` shows where",
    ]
    assert json.loads(hang.as_json(report))["ranks"][0]["calls"][0]["waits_s"] == 2.0

    # Two ranks that wait for each other: in one call a message may be on its way, in two calls none will come.
    apart = "ranks 0, 1 are in different calls and wait for each other: make all ranks call in the same order"
    for answer, told in (
        (Row(7, "all_reduce", 4, 1, (0,), 11.0, 3), []),
        (Row(9, "dispatch", 4, 1, (0,), 11.0, 3), [apart]),
    ):
        mutual = hang.suspects(JobReport(Decision(1, members), (rank(0, row), rank(1, answer), rank(2)), 12.0))
        assert [line for line in mutual if "each other" in line] == told
    assert hang.as_text(JobReport(Decision(1, members), (rank(0),), 12.0)).endswith("nobody waits for long")
