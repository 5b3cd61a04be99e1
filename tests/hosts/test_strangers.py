"""Strangers at the ports of a group that runs: its calls are right, and they leave nothing in its processes."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from epee.link.meeting import MAX_STRANGERS
from tests.link.test_meeting import flood

from . import run_on_loopbacks

NUM_PORTS = 2  # of a rank: of the group's links, and of the job
NUM_KEPT = 4 * MAX_STRANGERS  # what the strangers hold open of a port
NUM_CALLS = 400
PATIENCE_S = 20.0
GROWTH_KB = 16 << 10


def num_open() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def private_kb() -> int:
    """Return how much memory of its own this process has touched, in KiB."""
    found = re.search(r"Anonymous:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return int(found[1])


def own_ports() -> list[tuple[str, int]]:
    """Return the addresses at which this process listens over TCP."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # that of the list itself
            continue
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            found.append((".".join(str(byte) for byte in reversed(bytes.fromhex(address))), int(port, 16)))
    return found


def call_among_strangers(rank: int, num_ranks: int, says_something: bool) -> tuple[int, int, int]:
    """Make calls while 500 strangers a second come to this rank's ports; return descriptors before, among, after."""
    ports = own_ports()
    assert len(ports) == NUM_PORTS
    assert all(address.startswith("127.") for address, _ in ports)
    choose, stop = random.Random(rank), threading.Event()
    says = (lambda: choose.randbytes(200)) if says_something else bytes
    floods = [threading.Thread(target=flood, args=(port, stop, 250, says, NUM_KEPT)) for port in ports]
    x = torch.ones(1000, device="cpu")
    for _ in range(50):
        dist.all_reduce(x.fill_(1))
    before, touched = num_open(), private_kb()
    dist.barrier()
    for thread in floods:
        thread.start()
    among = 0
    try:
        for number in range(NUM_CALLS):
            dist.all_reduce(x.fill_(number))
            assert x.eq(num_ranks * number).all()
            among = max(among, num_open())
            time.sleep(0.005)
        assert private_kb() - touched < GROWTH_KB
    finally:
        stop.set()
        for thread in floods:
            thread.join()
    until = time.monotonic() + PATIENCE_S
    while num_open() > before:
        assert time.monotonic() < until, (num_open(), before)
        time.sleep(0.05)
    dist.barrier()
    return before, among, num_open()


@pytest.mark.parametrize("says_something", [True, False])
def test_strangers_at_the_ports_of_a_running_group_cost_nothing_that_stays(says_something: bool) -> None:
    for before, among, after in run_on_loopbacks(call_among_strangers, (0, 1), says_something, timeout_s=80):
        theirs = NUM_PORTS * (NUM_KEPT + 5)  # the strangers' ends are in this process, too
        assert among <= before + theirs + NUM_PORTS * (MAX_STRANGERS + 2)
        assert after <= before
