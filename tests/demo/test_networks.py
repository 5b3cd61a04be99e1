"""The demo's hosts have networks of their own: what one listens at is not another's, and reached through the router."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from epee.demo import networks

TOOLS = ("ip", "nsenter", "unshare")
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, TOOLS)), reason=f"networks are made by root, with {', '.join(TOOLS)}"
)
LISTENS = """
import socket, sys
from pathlib import Path
from epee.demo.networks import enter
here = enter(0, Path(sys.argv[1]))
with socket.create_server((here, 0)) as server:
    print(*server.getsockname(), flush=True)
    server.settimeout(20)
    print(server.accept()[1][0], flush=True)
"""
CALLS = """
import socket, sys
from pathlib import Path
from epee.demo.networks import enter
enter(1, Path(sys.argv[1]))
socket.create_connection((sys.argv[2], int(sys.argv[3])), timeout=20).close()
"""


@needs_root
def test_hosts_are_in_networks_of_their_own(tmp_path: Path) -> None:
    with networks.networks(2, tmp_path) as told:
        assert told == "networks of their own, joined by a router"
        listening = subprocess.Popen(
            [sys.executable, "-c", LISTENS, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert listening.stdout is not None
            address, port = listening.stdout.readline().split()
            with pytest.raises(OSError, match=r"timed out|Errno"):  # nothing of it is in the test's own network
                socket.create_connection((address, int(port)), timeout=1.0)
            subprocess.run([sys.executable, "-c", CALLS, str(tmp_path), address, port], check=True, timeout=60)
            assert listening.communicate(timeout=60)[0].split() == ["10.83.1.2"]
        finally:
            listening.kill()
            listening.wait()


@needs_root
def test_nothing_is_left_of_them(tmp_path: Path) -> None:
    with networks.networks(3, tmp_path):
        holders = [int(pid) for pid in (tmp_path / "networks").read_text().strip("[]").split(",")]
        assert all(Path(f"/proc/{pid}").exists() for pid in holders)
    assert not any(Path(f"/proc/{pid}").exists() for pid in holders)


def test_without_root_hosts_are_loopback_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks.os, "geteuid", lambda: 1000)
    with networks.networks(2, tmp_path) as told:
        assert told == "loopback addresses, as only root may make networks"
        assert [networks.enter(host, tmp_path) for host in range(2)] == ["127.0.83.1", "127.0.83.2"]


def test_without_tools_hosts_are_loopback_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with networks.networks(2, tmp_path) as told:
        assert told.startswith("loopback addresses, as no networks can be made here: ")
        assert "unshare" in told


def test_one_host_needs_no_network(tmp_path: Path) -> None:
    with networks.networks(1, tmp_path) as told:
        assert told == ""
