"""Separate networks for the demo's hosts, if this user may create them (root): else hosts are loopback addresses.

A host is a network namespace with one interface, `net0`; a router, one more namespace, joins them. Packets between two
hosts go through both their interfaces and the router, those within a host stay on its own loopback. Ranks enter the
namespace of their host before they open a socket; threads started later are in it, too.

    parent   starts a process in each namespace, which holds it, and connects them by `ip`; publishes them in a file
    rank     reads the file, enters

A namespace lives as long as a process in it. The holders end when their input is closed, so also when the parent dies
for any reason, and ranks end with the parent (`launch.py`): nothing is left, and no file names a namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ..errors import UnsupportedError

_FILE = "networks"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_STEP_S = 20.0  # of one command, on a very slow machine


@contextlib.contextmanager
def networks(num_hosts: int, folder: Path) -> Iterator[str]:
    """Create a network per host, published to the ranks in a file in `folder`; yields a description of the hosts."""
    if num_hosts == 1:
        yield ""
        return
    with contextlib.ExitStack() as holders:
        try:
            pids = _make(num_hosts, holders)
        except (OSError, subprocess.SubprocessError, UnsupportedError) as problem:
            why = problem if isinstance(problem, UnsupportedError) else f"no networks can be made here: {problem}"
            yield f"loopback addresses, as {why}"
            return
        (folder / _FILE).write_text(json.dumps(pids))
        yield "networks of their own, joined by a router"


def enter(host: int, folder: Path) -> str:
    """Enter the network of a host, if there is one; return the address of this rank's host."""
    path = folder / _FILE
    if not path.exists():
        return f"127.0.83.{1 + host}"
    pid = json.loads(path.read_text())[host]
    with open(f"/proc/{pid}/ns/net") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)  # `os.setns` exists from Python 3.12 on
        if libc.setns(namespace.fileno(), _NEW_NETWORK):
            error = ctypes.get_errno()
            raise OSError(error, f"setns: {os.strerror(error)}")
    return _address(host)


def _address(host: int, of_router: bool = False) -> str:
    return f"10.83.{host}.{1 if of_router else 2}"


def _make(num_hosts: int, holders: contextlib.ExitStack) -> list[int]:
    """Create and connect the namespaces; return the process that holds each host's."""
    if os.geteuid():
        raise UnsupportedError("only root may make networks")
    pids = [_hold(holders) for _ in range(num_hosts + 1)]
    router = pids.pop()
    for host, pid in enumerate(pids):
        down = f"down{host}"
        end, peer = ("net0", "netns", str(pid)), (down, "netns", str(router))
        _run("ip", "link", "add", *end, "type", "veth", "peer", "name", *peer)
        _run_in(pid, f"ip addr add {_address(host)}/24 dev net0", "ip link set net0 up", "ip link set lo up")
        _run_in(router, f"ip addr add {_address(host, True)}/24 dev {down}", f"ip link set {down} up")
        _run_in(pid, f"ip route add default via {_address(host, True)}")
    _run_in(router, "echo 1 > /proc/sys/net/ipv4/ip_forward")
    return pids


def _hold(holders: contextlib.ExitStack) -> int:
    """Start a process in a network of its own; return its pid when the network exists."""
    command = ["unshare", "--net", "cat"]
    holder = holders.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    holders.callback(holder.kill)  # before the context waits for its end
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.write(b"there\n")
    holder.stdin.flush()
    if not select.select([holder.stdout], [], [], _STEP_S)[0] or holder.stdout.readline() != b"there\n":
        raise UnsupportedError("no network namespace can be made here")
    return holder.pid


def _run_in(pid: int, *commands: str) -> None:
    """Run commands in the network of a process."""
    _run("nsenter", "--target", str(pid), "--net", "sh", "-ec", "; ".join(commands))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=_STEP_S, capture_output=True)
