"""`epee bench bad-connects`: what 1000 wrong connections a second at a rank's control socket do to healthy calls.

Two ranks make all_reduce calls of 1 KiB back to back. For some seconds nobody disturbs them; for as long a third
process of the same user, which has no token, connects to rank 0's socket a thousand times a second, sends 200 random
bytes each time and hangs up; both again in turns. A time is rank 0's for a block of 50 calls, by 50. The goal is at
most twice the quiet median, and no change of the view.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from . import common

NAME = "bad-connects"
RATE_HZ = 1000
BLOCK = 50
FORMULAS = {
    "time": "rank 0: seconds of a block of 50 calls / 50",
    "ratio": "median during the attack / median of the quiet time",
}

_RANK = f"""
import json, os, sys, time
import torch, torch.distributed as dist
import epee
rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("epee", store=dist.FileStore(store, 2), rank=rank, world_size=2)
x, stop = torch.zeros(256), torch.zeros(1)
print(json.dumps("ready"), flush=True)
told = []
while not stop.item():
    begin = time.perf_counter()
    for _ in range({BLOCK}):
        dist.all_reduce(x)
    if rank == 0:
        told.append([time.monotonic(), (time.perf_counter() - begin) / {BLOCK}])
    stop.fill_(float(rank == 0 and os.path.exists(sys.argv[3])))
    dist.all_reduce(stop)
group = dist.group.WORLD
print(json.dumps([told, group.epoch, dict(group._engine.membership.runtime.dropped())]), flush=True)
dist.destroy_process_group()
"""


def attack(path: str, until: float) -> int:
    """Connect `RATE_HZ` times a second and send garbage until `until` (monotonic); return how often it came in."""
    count, due = 0, time.monotonic()
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY)
    short = f"/proc/self/fd/{folder}/{Path(path).name}"  # a socket's address has room for 107 letters
    while time.monotonic() < until:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(0.2)
            connection.connect(short)
            connection.send(secrets.token_bytes(200))
            count += 1
        except (BlockingIOError, BrokenPipeError, ConnectionError, TimeoutError):
            pass  # its queue is full, or it has hung up first: that is its right
        finally:
            connection.close()
        due += 1 / RATE_HZ
        time.sleep(max(0.0, due - time.monotonic()))
    os.close(folder)
    return count


def measure(seconds: float, turns: int) -> dict[str, Any]:
    """Run the ranks and the attacks; return the numbers."""
    with tempfile.TemporaryDirectory() as folder:
        runtime = Path(folder) / "run"
        runtime.mkdir(mode=0o700)
        stop = Path(folder) / "stop"
        env = os.environ | {"EPEE_RUNTIME_DIR": str(runtime)}
        args = [sys.executable, "-c", _RANK]
        ranks = [
            subprocess.Popen(
                [*args, str(rank), f"{folder}/store", str(stop)], stdout=subprocess.PIPE, text=True, env=env
            )
            for rank in range(2)
        ]
        try:
            return _measure(ranks, runtime, seconds, turns, stop)
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()  # closes its output, too


def _measure(ranks: list[Any], runtime: Path, seconds: float, turns: int, stop: Path) -> dict[str, Any]:
    for rank in ranks:
        if json.loads(rank.stdout.readline()) != "ready":
            raise common.RankError("a rank did not start")
    target = next(str(path) for path in runtime.glob("job-*/0-*"))
    spans: list[tuple[float, float, bool]] = []
    num_connects = 0
    for turn in range(2 * turns):
        begin = time.monotonic()
        is_attack = turn % 2 == 1
        if is_attack:
            num_connects += attack(target, begin + seconds)
        else:
            time.sleep(seconds)
        spans.append((begin, time.monotonic(), is_attack))
    stop.touch()
    told, epoch, dropped = json.loads(ranks[0].stdout.readline())
    values: dict[bool, list[float]] = {False: [], True: []}
    partly: dict[bool, list[float]] = {False: [], True: []}  # blocks that have ended in such a span, and begun before
    for when, value in told:
        for begin, until, is_attack in spans:
            if begin < when < until:
                (values if begin + value * BLOCK < when else partly)[is_attack].append(value * 1e6)
    quiet, loud = (statistics.median(values[which] or partly[which]) for which in (False, True))
    return {
        "quiet_us": round(quiet, 1),
        "attacked_us": round(loud, 1),
        "ratio": round(loud / quiet, 2),
        "connects": num_connects,
        "connects_per_s": round(num_connects / (seconds * turns)),
        "dropped": dropped,
        "epoch": epoch,
        "blocks": len(told),
    }


def main(
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of a quiet time and of an attack.")] = 5.0,
    turns: Annotated[int, typer.Option(min=1, help="Attacks.")] = 2,
    json_to: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Measure calls while strangers knock at the control socket."""
    facts = common.machine()
    result = measure(seconds, turns)
    rows = [(key, str(value)) for key, value in result.items()]
    common.print_table("wrong connections at the control socket", ("what", "value"), rows, [common.machine_line(facts)])
    if json_to is not None:
        common.write_json(json_to, {"machine": facts, "formulas": FORMULAS, **result})


if __name__ == "__main__":
    typer.run(main)
