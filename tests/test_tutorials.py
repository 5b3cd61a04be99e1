"""The programs of docs/tutorials run, by the commands of their pages or as these start them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.forked import Script
from tests.hosts.run import loopback_of
from tests.test_contract import run_as_torchrun_does

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "tutorials"
LIMIT_S = 250

pytestmark = pytest.mark.timeout(LIMIT_S + 40)

EXPECTED = {
    "moe_layer": r"rank {rank}: equal to a layer that has all experts",
    "training": r"rank {rank}: loss [\d.]+ -> [\d.]+, rows sent to each rank \[\d+, \d+\]",
    "decoding": r"rank {rank} on cpu: three steps are right",
    "gloo": r"rank {rank}: all_reduce .*the ranks disagree",
}


def run_command(*command: str) -> str:
    """Run a command on CPU tensors and return what it prints."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXPECTED)
def test_a_program_for_two_ranks_runs(name: str) -> None:
    output = run_as_torchrun_does(FOLDER / f"{name}.py")
    for rank in range(2):
        assert re.search(EXPECTED[name].format(rank=rank), output), output


def test_a_job_continues_after_a_kill() -> None:
    output = run_command(sys.executable, str(FOLDER / "kill.py"))
    assert "rank 1: joins at step 40 with weight 40\n" in output
    for rank in range(3):
        assert f"rank {rank}: done, weight 60, ranks (0, 1, 2)\n" in output
    assert re.search(r"rank 0 step 21: epoch 2, got \[1, 0, 1\], weight lost", output)


def test_a_program_for_deepep_runs_behind_the_launcher() -> None:
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    launcher = sys.executable, "-m", "epee.compat", "--deep-ep", "--"
    output = run_command(*launcher, sys.executable, *torchrun, str(FOLDER / "deepep.py"))
    for rank in range(2):
        assert re.search(rf"rank {rank}: received \d+ rows, by epee\.compat\.deep_ep", output), output


def test_a_program_runs_on_two_hosts() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "EPEE_TEST": "1"}
    shared |= {"CUDA_VISIBLE_DEVICES": "", "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def of_rank(rank: int) -> dict[str, str]:
        host = rank // 2
        return {"RANK": str(rank), "EPEE_HOST_KEY": f"tutorial {host}", "EPEE_HOST_IP": loopback_of(host)}

    with contextlib.ExitStack() as ends:
        ranks = [
            ends.enter_context(Script(FOLDER / "two_hosts.py", os.environ | shared | of_rank(rank)))
            for rank in range(4)
        ]
        outputs = [process.communicate(LIMIT_S)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0] * 4, outputs
    for rank, output in enumerate(outputs):
        assert f"rank {rank}: hosts ((0, 1), (2, 3)), sum 6, rows sent to hosts [" in output


def test_every_program_is_run_and_has_a_page() -> None:
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert names == {*EXPECTED, "kill", "deepep", "two_hosts"}
    shown = "".join(path.read_text() for path in (ROOT / "docs" / "tutorials").glob("*.md"))
    assert names == set(re.findall(r'--8<-- "examples/tutorials/(\w+)\.py', shown))
