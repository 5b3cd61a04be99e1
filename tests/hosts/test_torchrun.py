"""`torchrun --nnodes 2` as docs/hosts.md has it, and an example that knows nothing of hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

from .run import loopback_of

ROOT = Path(__file__).resolve().parents[2]
NUM_HOSTS, NUM_RANKS = 2, 4
PATIENCE_S = 100.0


@pytest.mark.timeout(150)
def test_an_example_runs_by_torchrun_on_two_hosts() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--rdzv-id", "job1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    command += ["--local-addr", "127.0.0.1", str(ROOT / "examples" / "first.py")]  # the name of this machine may not do
    own = {"EPEE_TEST": "1", "CUDA_VISIBLE_DEVICES": ""}
    agents = [
        subprocess.Popen(
            command,
            env={**os.environ, **own, "EPEE_HOST_KEY": f"torchrun {host}", "EPEE_HOST_IP": loopback_of(host)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in range(NUM_HOSTS)
    ]
    try:
        told = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # its ranks go with it
            agent.wait()
    assert [agent.returncode for agent in agents] == [0] * NUM_HOSTS, told
    ranks = [sorted(map(int, re.findall(r"rank (\d+): received", each))) for each in told]
    assert sorted(ranks) == [[0, 1], [2, 3]]
    assert any("a group over several hosts" in each for each in told)  # they did not take each other for one host
