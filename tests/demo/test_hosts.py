"""The demo over two hosts: it learns what it learns on one, and says what crossed the network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from epee.demo import run
from epee.demo.settings import Settings
from epee.errors import InvalidArgument


def _trained(out: Path, num_hosts: int) -> dict[str, Any]:
    assert run.run(Settings(num_ranks=4, num_hosts=num_hosts, num_steps=3, out=str(out))) == run.OK
    found: dict[str, Any] = json.loads((out / "demo.json").read_text())
    return found


def test_two_hosts_learn_what_one_learns_and_less_crosses_than_once_per_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, apart = (_trained(tmp_path / str(num_hosts), num_hosts) for num_hosts in (1, 2))
    told = capsys.readouterr().out
    assert re.search(r"starting 4 rank\(s\) on 2 hosts \((networks of their own|loopback addresses)", told)
    found = re.search(r"between 2 hosts (\d+\.\d) MB \(once per rank: (\d+\.\d)\)", told)
    assert found is not None
    assert 0 < float(found[1]) < float(found[2])
    assert apart["check"]["passed"]
    # float32 rows are added up in another order: the same losses but for rounding
    for (_, _, one, _), (_, _, two, _) in zip(alone["steps"], apart["steps"], strict=True):
        assert abs(one - two) < 1e-3 * one
    assert alone["bytes_between_hosts"] == []


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"--hosts must be 1 \.\.\. 4"):
        Settings(num_ranks=4, num_hosts=5).check()
    with pytest.raises(InvalidArgument, match=r"--kill-host must be a host from 1 to 2 of --hosts, got 3"):
        Settings(num_ranks=4, num_hosts=3, killed_host=3).check()
    with pytest.raises(InvalidArgument, match="--stall needs --hosts 1"):
        Settings(num_ranks=4, num_hosts=3, victim=1, fault="stall").check()


def test_a_killed_host_is_all_its_ranks() -> None:
    settings = Settings(num_ranks=8, num_hosts=3, killed_host=1)
    settings.check()
    assert settings.victims == (3, 4, 5)


@pytest.mark.timeout(170)
def test_the_others_train_on_when_a_host_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(num_ranks=4, num_hosts=3, killed_host=1, num_steps=8, out=str(tmp_path))
    assert settings.victims == (2,)
    assert run.run(settings) == run.OK
    told = capsys.readouterr().out
    assert "rank 2 gets SIGKILL" in told
    assert "ranks [0, 1, 3] continue" in told
    result = json.loads((tmp_path / "demo.json").read_text())
    assert [event["what"] for event in result["events"]] == ["kill", "went on"]
    assert len(result["steps"]) == 8
