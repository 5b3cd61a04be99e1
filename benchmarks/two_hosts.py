"""Ranks on two hosts of one machine, for benchmarks: each host a network, PID and mount namespace, a veth between them.

    benchmark            two processes (`unshare ... python -m benchmarks.two_hosts`), one per host, and the veth
    process of a host    the interface of its end, then its ranks
    rank                 a group of gloo over all ranks, and the function that is measured

Where namespaces cannot be made (no root) a host is a loopback address and a key of its own (`EPEE_HOST_KEY`, which
epee takes in tests only), so its ranks share no memory with the other host's.

Namespaces have no names: they live as long as a process in them, and the veth as long as its ends. A host's process
ends when its input is closed, so nothing is left even when the benchmark itself is killed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing as mp
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import common

ROOT = Path(__file__).resolve().parent.parent
NUM_HOSTS = 2
VETH_ADDRESSES = ("10.77.0.1", "10.77.0.2")
LOOPBACK_ADDRESSES = ("127.0.77.1", "127.0.77.2")
INTERFACES = ("epeeA", "epeeB")  # one in each namespace
_ALONE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_START_S, _CALL_S, _END_S = 60.0, 120.0, 5.0


@dataclass(frozen=True)
class Setting:
    """What the processes of a run are told.

    Attributes:
        ranks_per_host: on each of the two hosts.
        has_network: hosts are namespaces with a veth between them; else loopback addresses.
        is_realtime: ranks run under SCHED_RR, priority 1: before all that is not realtime.
        function: "module:name" of what each rank calls, as `function(place, *args)`.
        args: for it, as JSON takes them.
        timeout_s: for the whole run.
    """

    ranks_per_host: int
    has_network: bool
    is_realtime: bool
    function: str
    args: list[Any]
    timeout_s: float


@dataclass(frozen=True)
class Place:
    """Where a rank is, as the measured function sees it.

    Attributes:
        partner: the rank at the same position on the other host.
        address: of this rank's host.
        interface: towards the other host; its counters are this host's.
        store: of the group, for what ranks tell each other beside it.
    """

    rank: int
    num_ranks: int
    partner: int
    address: str
    interface: str
    barrier: common.SpinBarrier
    store: Any


def can_make_hosts() -> bool:
    """Return whether this user may make namespaces and interfaces in them."""
    command = [*_ALONE, "ip", "link", "add", "name", INTERFACES[0], "type", "veth", "peer", "name", INTERFACES[1]]
    try:
        return subprocess.run(command, capture_output=True, timeout=_START_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def run(setting: Setting) -> list[Any]:
    """Call the function on all ranks of two new hosts; return the results in rank order. All is gone afterwards.

    Raises:
        RankError: a rank raised, died, or the run took longer than its time.
    """
    deadline = time.monotonic() + setting.timeout_s
    num_ranks = NUM_HOSTS * setting.ranks_per_host
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends, _ends_by_sigterm():
        (Path(folder) / "barrier").write_bytes(bytes(8 * common._WORD_STRIDE * num_ranks))
        (Path(folder) / "setting.json").write_text(json.dumps(asdict(setting)))
        hosts: list[subprocess.Popen[bytes]] = []
        for number in range(NUM_HOSTS):
            hosts.append(_start(folder, number, setting.has_network))
            ends.callback(_end, hosts[-1])
        for host in hosts:
            _await_word(host, deadline)
        if setting.has_network:
            _join(hosts)
        for host in hosts:
            assert host.stdin is not None
            host.stdin.write(b"go\n")
            host.stdin.flush()
        _await_ranks(hosts, Path(folder), deadline)
        results = [Path(folder) / f"result{rank}" for rank in range(num_ranks)]
        missing = [rank for rank, path in enumerate(results) if not path.exists()]
        if missing:
            raise common.RankError(f"ranks {missing} ended without a result")
        return [json.loads(path.read_text()) for path in results]


@contextlib.contextmanager
def _ends_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block like an interrupt, so that it cleans up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(folder: str, host: int, has_network: bool) -> subprocess.Popen[bytes]:
    runtime = Path(folder) / f"host{host}"
    runtime.mkdir(mode=0o700)
    added = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": "1",
        "EPEE_RUNTIME_DIR": str(runtime),
        "EPEE_HOST_IP": (VETH_ADDRESSES if has_network else LOOPBACK_ADDRESSES)[host],
        "GLOO_SOCKET_IFNAME": INTERFACES[host] if has_network else "lo",
    }
    if not has_network:
        added |= {"EPEE_TEST": "1", "EPEE_HOST_KEY": f"host{host}"}
    command = [*(_ALONE if has_network else ()), sys.executable, "-m", __spec__.name, folder, str(host)]
    return subprocess.Popen(
        command,
        env=os.environ | added,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _end(host: subprocess.Popen[bytes]) -> None:
    """End a host's process and all that it started: its session."""
    assert host.stdin is not None
    with contextlib.suppress(OSError):
        host.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        host.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(host.pid, signal.SIGKILL)
    host.wait()
    assert host.stdout is not None
    host.stdout.close()


def _await_word(host: subprocess.Popen[bytes], deadline: float) -> None:
    """Wait until a host's process runs in its namespaces."""
    assert host.stdout is not None
    if not select.select([host.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise common.RankError("a host's process did not begin in time")
    if host.stdout.readline() != b"ready\n":
        raise common.RankError(f"a host's process ended at once, with status {host.wait(_END_S)}")


def _join(hosts: list[subprocess.Popen[bytes]]) -> None:
    """Make the veth, each end in the namespace of its host; no other namespace ever sees it."""
    end, peer = ([name, "netns", str(host.pid)] for name, host in zip(INTERFACES, hosts, strict=True))
    subprocess.run(["ip", "link", "add", *end, "type", "veth", "peer", "name", *peer], check=True, timeout=_START_S)


def _await_ranks(hosts: list[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    while any(host.poll() is None for host in hosts):
        told = sorted(folder.glob("error*"))
        if told:
            time.sleep(0.5)  # let the others say why, too
            raise common.RankError("\n".join(path.read_text() for path in sorted(folder.glob("error*"))))
        if any(host.poll() not in (None, 0) for host in hosts):
            break
        if time.monotonic() > deadline:
            raise common.RankError("the ranks were not done in time")
        time.sleep(0.1)
    if any(host.returncode for host in hosts):
        told = sorted(folder.glob("error*"))
        raise common.RankError("\n".join(path.read_text() for path in told) or "a rank died without a word")


# ---- the process of a host


def main(folder: str, host: int) -> int:
    """Set up this host's end of the network and run its ranks; return the exit status."""
    setting = Setting(**json.loads((Path(folder) / "setting.json").read_text()))
    print("ready", flush=True)
    if not select.select([sys.stdin], [], [], _START_S)[0] or sys.stdin.readline() != "go\n":
        return 1
    if setting.has_network:
        # UCX finds interfaces by /sys, which else would show those of the namespace that it was mounted in
        subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], check=True, timeout=_START_S)
        own = INTERFACES[host]
        for words in (f"addr add {VETH_ADDRESSES[host]}/24 dev {own}", f"link set {own} up", "link set lo up"):
            subprocess.run(["ip", *words.split()], check=True, timeout=_START_S)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "epee"])
    ranks = range(host * setting.ranks_per_host, (host + 1) * setting.ranks_per_host)
    processes = [context.Process(target=_rank_main, args=(folder, host, rank, setting)) for rank in ranks]
    try:
        for process in processes:
            process.start()
        return _watch(processes, setting.timeout_s)
    finally:
        for process in processes:
            process.kill()


def _watch(processes: list[Any], timeout_s: float) -> int:
    """Wait for the ranks; end when the benchmark has closed our input."""
    deadline = time.monotonic() + timeout_s
    left: dict[Any, Any] = {process.sentinel: process for process in processes}
    while left:
        ready = wait([sys.stdin.fileno(), *left], timeout=max(0.0, deadline - time.monotonic()))
        if not ready or sys.stdin.fileno() in ready:
            return 1
        for sentinel in ready:
            process = left.pop(sentinel)
            process.join()
            if process.exitcode:
                return 1
    return 0


def _rank_main(folder: str, host: int, rank: int, setting: Setting) -> None:
    torch.set_num_threads(1)
    if setting.is_realtime:  # before any thread is made: threads inherit it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    num_ranks = NUM_HOSTS * setting.ranks_per_host
    here = Path(folder)
    try:
        store = dist.FileStore(str(here / "store"), num_ranks)
        store.set_timeout(timedelta(seconds=_START_S))
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=_CALL_S)
        )
        place = Place(
            rank=rank,
            num_ranks=num_ranks,
            partner=(rank + setting.ranks_per_host) % num_ranks,
            address=os.environ["EPEE_HOST_IP"],
            interface=INTERFACES[host] if setting.has_network else "lo",
            barrier=common.SpinBarrier(str(here / "barrier"), rank, num_ranks, _CALL_S),
            store=store,
        )
        module, _, name = setting.function.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        result = function(place, *setting.args)
        (here / f"result{rank}").write_text(json.dumps(result))
        place.barrier.wait()  # nobody leaves while another one still reads
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - the benchmark shows it, whatever it is
        (here / f"error{rank}").write_text(f"rank {rank} raised:\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
