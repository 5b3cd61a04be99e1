"""`epee doctor --pid` of a rank whose group runs on several hosts: how far all ranks are, as one host knows them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from epee.cli.main import app
from epee.doctor import hang
from epee.engine.replication import report
from epee.engine.replication.report import Progress, look_at_groups
from tests import harness
from tests.loopback import world

PLACEMENT = (0, 1, 1)
VICTIM = 2
PATIENCE_S = 50.0


def waiting_rank(rank: int, num_ranks: int, folder: str) -> None:
    """Make two calls together; then the victim stops instead of making the third."""
    with world(rank, PLACEMENT, folder):
        x = torch.ones(4, device="cpu")
        for _ in range(2):
            dist.all_reduce(x)
        (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
        if rank == VICTIM:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(x)


@contextmanager
def hanging_group() -> Iterator[list[int]]:
    """Yield the pids of three ranks on two hosts, of which the last is stopped; all are ended afterwards."""
    with (
        TemporaryDirectory() as folder,
        harness.started(waiting_rank, len(PLACEMENT), folder, timeout_s=PATIENCE_S, backend=None),
    ):
        files = [Path(folder) / f"pid{rank}" for rank in range(len(PLACEMENT))]
        deadline = time.monotonic() + PATIENCE_S
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.01)
        yield [int(file.read_text()) for file in files]


def look_until(pid: int, is_there: Callable[[tuple[Progress, ...]], bool]) -> tuple[Progress, ...]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        (group,) = look_at_groups(pid)
        if is_there(group):
            return group
        assert time.monotonic() < deadline, str(group)
        time.sleep(0.05)


def is_stuck(group: tuple[Progress, ...]) -> bool:
    """Both others wait in the call behind those that the victim has made."""
    done = group[VICTIM].num_made
    return all(rank.num_ended == done and rank.op == "all_reduce" for rank in group[:VICTIM])


def test_the_rank_that_is_behind_is_named_on_each_host() -> None:
    with hanging_group() as pids:
        here = look_until(pids[1], lambda group: is_stuck(group) and group[VICTIM].health == "stopped")
        done = here[0].num_ended
        assert here == (
            Progress(0, 0, "elsewhere", done, done + 1, "all_reduce", here[0].gateway),
            Progress(1, pids[1], "running", done, done + 1, "all_reduce"),
            Progress(2, pids[2], "stopped", done, done, ""),
        )
        assert here[0].gateway == pids[1]
        assert look_until(pids[VICTIM], is_stuck) == here  # any rank of the host will do
        there = look_until(pids[0], is_stuck)
        assert [rank.health for rank in there] == ["running", "elsewhere", "elsewhere"]
        assert there[VICTIM].num_made == done
        assert there[VICTIM].num_ended <= done  # that it has ended the last one it may not have told any more
        line = f"rank 2 has not made all_reduce seq {done + 1}, for which 0, 1 wait: "
        assert hang.suspects_over_hosts(here) == [f"{line}SIGSTOP or a debugger; `kill -CONT` lets it go on"]
        assert hang.suspects_over_hosts(there) == [f"{line}it runs on another host, look there"]
        shown = CliRunner().invoke(app, ["doctor", "--pid", str(pids[1])])
        assert shown.exit_code == 0
        assert f"rank 2 (process {pids[2]}): stopped, {done} calls ended" in shown.output
        assert f"rank 0: elsewhere, {done} calls ended, in all_reduce seq {done + 1}" in shown.output
        assert "run this on each host" in shown.output
        assert "\nrank 0: elsewhere\n" in shown.output
        assert re.search(r"group default_pg: all_reduce seq \d+ epoch 1, waits for 2 since ", shown.output)
        told = json.loads(CliRunner().invoke(app, ["doctor", "--pid", str(pids[0]), "--json"]).output)
        assert [rank["num_made"] for rank in told["groups_over_hosts"][0]["ranks"]] == [done + 1, done + 1, done]
        assert [rank["health"] for rank in told["ranks"]] == ["running", "elsewhere", "elsewhere"]
        assert "rank 2 is waited for: it runs on another host, look there" in told["suspects"]


def test_a_dead_rank_is_seen() -> None:
    with hanging_group() as pids:
        look_until(pids[1], is_stuck)
        os.kill(pids[0], signal.SIGSTOP)  # so that nobody gives the group up meanwhile
        os.kill(pids[1], signal.SIGSTOP)
        os.kill(pids[VICTIM], signal.SIGKILL)
        seen = look_until(pids[1], lambda group: group[VICTIM].health == "dead")
        assert seen[VICTIM] == Progress(VICTIM, 0, "dead", -1, -1, "")
        *_, last = hang.suspects_over_hosts(seen)
        assert last.startswith("rank 2 has not made all_reduce seq ")
        assert last.endswith(" for which 0, 1 wait: its process has ended")
        shown = CliRunner().invoke(app, ["doctor", "--pid", str(pids[1])])
        assert "rank 2: dead, how far it was is not known" in shown.output


def test_a_rank_that_ends_while_its_memory_is_read_is_dead_without_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with hanging_group() as pids:
        look_until(pids[1], is_stuck)
        monkeypatch.setattr(report, "process_state", lambda pid: "Z" if pid == pids[VICTIM] else "S")
        (group,) = look_at_groups(pids[1])
        assert group[VICTIM] == Progress(VICTIM, 0, "dead", -1, -1, "")
        assert [rank.health for rank in group[:VICTIM]] == ["elsewhere", "running"]


def test_a_process_without_a_group_has_none() -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            assert look_at_groups(stranger.pid) == []
        finally:
            stranger.kill()


@pytest.mark.parametrize(
    ("group", "lines"),
    [
        ([Progress(0, 1, "running", 4, 4, ""), Progress(1, 0, "elsewhere", 4, 4, "")], []),
        ([Progress(0, 1, "running", 4, 5, "barrier"), Progress(1, 0, "left", 4, 4, "")], []),
        ([Progress(0, 1, "running", 4, 7, "barrier"), Progress(1, 0, "elsewhere", 3, 5, "barrier")], []),
        ([Progress(0, 1, "running", 4, 4, ""), Progress(1, 0, "unknown", 3, 3, "")],
         ["rank 1 is unknown: the process of this host that hears of it has ended"]),
        ([Progress(0, 1, "running", 4, 7, "barrier"), Progress(1, 0, "elsewhere", 4, 5, "barrier"),
          Progress(2, 0, "elsewhere", 2, 3, "broadcast")],
         ["rank 2 has not made barrier seq 5, for which 0, 1 wait: it runs on another host, look there"]),
        ([Progress(0, 1, "running", 4, 5, "barrier"), Progress(1, 2, "running", 4, 4, ""),
          Progress(2, 0, "elsewhere", 3, 4, "barrier", 2), Progress(3, 0, "elsewhere", 4, 4, "", 1)],
         ["rank 1 has not made barrier seq 5, for which 0 wait: it computes, or waits elsewhere",
          "rank 2 has not made barrier seq 5, for which 0 wait: or it has, and this host hears of it through rank 1, "
          "which stands still",
          "rank 3 has not made barrier seq 5, for which 0 wait: it runs on another host, look there"]),
    ],
)  # fmt: skip
def test_who_is_behind(group: list[Progress], lines: list[str]) -> None:
    assert hang.suspects_over_hosts(group) == lines
