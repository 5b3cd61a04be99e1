"""The programs of docs/tutorials run, by the commands of their pages or as these start them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.forked import Script
from tests.hosts.run import loopback_of

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "tutorials"
TRAIN = ROOT / "examples" / "train.py"  # the README names it, too
LIMIT_S = 250

pytestmark = pytest.mark.timeout(LIMIT_S + 40)

EXPECTED = {
    "moe_layer": r"rank {rank}: equal to a layer that has all experts",
    "train": r"rank {rank}: loss [\d.]+ -> [\d.]+, rows sent to each rank \[\d+, \d+\]",
    "own_layer": r"rank {rank}: loss [\d.]+ -> [\d.]+",
    "decoding": r"rank {rank} on cpu: three steps are right",
    "gloo": r"rank {rank}: all_reduce .*the ranks disagree",
}


def run_command(*command: str) -> str:
    """Run a command on CPU tensors and return what it prints."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks that a failed launcher has left
        process.wait()
    assert process.returncode == 0, output
    return output


def program_of(name: str) -> Path:
    """Return the file of a tutorial's program."""
    return TRAIN if name == TRAIN.stem else FOLDER / f"{name}.py"


def run_ranks_of(name: str, each: list[dict[str, str]]) -> list[str]:
    """Run a program in forked processes with the environment that torchrun gives them; return what each prints."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": str(len(each)), "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    shared |= {"CUDA_VISIBLE_DEVICES": "", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with contextlib.ExitStack() as ends:
        ranks = [
            ends.enter_context(Script(program_of(name), os.environ | shared | {"RANK": str(rank)} | own))
            for rank, own in enumerate(each)
        ]
        outputs = [process.communicate(LIMIT_S)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0] * len(each), outputs
    return outputs


@pytest.mark.parametrize("name", EXPECTED)
def test_a_program_for_two_ranks_runs(name: str) -> None:
    for rank, output in enumerate(run_ranks_of(name, [{}, {}])):
        assert re.search(EXPECTED[name].format(rank=rank), output), output


def test_a_job_continues_after_a_kill() -> None:
    output = run_command(sys.executable, str(FOLDER / "kill.py"))
    assert "rank 1: joins at step 40 with weight 40" in output
    for rank in range(3):
        assert f"rank {rank}: done, weight 60, ranks (0, 1, 2)" in output
    assert re.search(r"rank 0 step 21: epoch 2, got \[1, 0, 1\], weight lost", output)


def test_a_step_survives_a_kill_between_its_dispatch_and_its_combine(tmp_path: Path) -> None:
    """One survivor has begun the combine and the other has not, so both get `StaleHandleError` and dispatch again."""
    text, kill, sent = (FOLDER / "kill.py").read_text(), "os.kill(os.getpid(), signal.SIGKILL)", 'layout="expert")\n'
    assert (text.count(kill), text.count(sent)) == (1, 1)
    between = f"""
        if state[0] == 20 and dist.get_rank() == 1:
            while len(os.listdir({str(tmp_path)!r})) < 3:  # the program, and a file of each survivor
                time.sleep(0.01)
            {kill}
        if state[0] == 20 and dist.get_rank() != 1:
            open(os.path.join({str(tmp_path)!r}, str(dist.get_rank())), "w").close()
            time.sleep(2 * dist.get_rank())  # rank 2 comes when rank 0 has met the loss
"""
    program = tmp_path / "kill_in_step.py"
    program.write_text(text.replace(kill, "pass").replace(sent, sent + between))
    output = run_command(sys.executable, str(program))
    assert "rank 1: joins at step 40 with weight 40" in output
    for rank in range(3):
        assert f"rank {rank}: done, weight 60, ranks (0, 1, 2)" in output
    for rank in (0, 2):
        assert f"rank {rank}: dispatches again, in epoch 2" in output
        assert f"rank {rank} step 21: epoch 2, got [1, 0, 1], weight lost" in output


def test_a_program_for_deepep_runs_behind_the_launcher() -> None:
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    launcher = sys.executable, "-m", "epee.compat", "--deep-ep", "--"
    output = run_command(*launcher, sys.executable, *torchrun, str(FOLDER / "deepep.py"))
    for rank in range(2):
        assert re.search(rf"rank {rank}: received \d+ rows, by epee\.compat\.deep_ep", output), output


def test_a_program_runs_on_two_hosts() -> None:
    hosts = [
        {"EPEE_TEST": "1", "EPEE_HOST_KEY": f"tutorial {host}", "EPEE_HOST_IP": loopback_of(host)}
        for host in (0, 0, 1, 1)
    ]
    for rank, output in enumerate(run_ranks_of("two_hosts", hosts)):
        assert f"rank {rank}: hosts ((0, 1), (2, 3)), sum 6, rows sent to hosts [" in output


def test_every_program_is_run_and_has_a_page() -> None:
    names = {path.stem for path in [*FOLDER.glob("*.py"), TRAIN]}
    assert names == {*EXPECTED, "kill", "deepep", "two_hosts"}
    shown = "".join(path.read_text() for path in (ROOT / "docs" / "tutorials").glob("*.md"))
    assert names == set(re.findall(r'--8<-- "examples/(?:tutorials/)?(\w+)\.py', shown))
