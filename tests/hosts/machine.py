"""What runs as process 1 of a host: it forks the host's ranks and takes note of their ends.

The process that forks it has put it into the host's network and PID namespaces already. Here it gets the rest: mounts
(its own /proc, and empty /dev/shm and /run, where the runtime folder is), host name, System V memory. When it dies, the
kernel ends all processes of the host; it dies with the lab (`lab.py`), and ends when the test has closed its socket.

Words on the socket, each one message. From the test: FORK with the descriptor of a connection. To the test: "ready" or
what went wrong; STARTED with a pidfd; ENDED. A process is named by its number inside the host.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from tests.harness import rank

from . import namespaces

FORK, STARTED, ENDED = b"f", b"s", b"e"
WORD = struct.Struct("!cii")  # kind, process, exit code
READY = b"ready"
INTERFACE = "eth0"
RUNTIME_FOLDER = "/run/epee"
_LOOK_S = 1.0


def address_of(host: int) -> str:
    """Return the address of a host in the network of its lab."""
    return f"10.77.0.{host + 1}"


def main(control: socket.socket, host: int, num_hosts: int) -> None:
    """Be process 1 of host `host`; does not return."""
    try:
        namespaces.die_with_parent()
        try:
            _settle(host, num_hosts)
        except OSError as exc:
            control.send(f"host {host}: {exc}".encode())
        else:
            control.send(READY)
            _serve(control)
    finally:
        os._exit(0)


def _settle(host: int, num_hosts: int) -> None:
    """Make of this process a host of its own."""
    namespaces.unshare(namespaces.NEW_MOUNTS | namespaces.NEW_HOSTNAME | namespaces.NEW_IPC)
    namespaces.keep_mounts_private()
    namespaces.mount("proc", "/proc")
    for folder in ("/dev/shm", "/run"):
        namespaces.mount("tmpfs", folder)
    Path("/run/hosts").write_text(_names(num_hosts))
    namespaces.put_over("/run/hosts", "/etc/hosts")
    socket.sethostname(f"host{host}")
    for folder in (RUNTIME_FOLDER, "/run/tmp"):
        Path(folder).mkdir(mode=0o700)
    tempfile.tempdir = "/run/tmp"
    os.environ.update(EPEE_RUNTIME_DIR=RUNTIME_FOLDER, TMPDIR="/run/tmp", GLOO_SOCKET_IFNAME=INTERFACE)


def _names(num_hosts: int) -> str:
    """Return /etc/hosts: nobody else can be asked for a name. Stores of torch ask for the IPv6 form of an address."""
    lines = ["127.0.0.1 localhost"]
    for host in range(num_hosts):
        lines += [f"{address_of(host)} host{host}", f"::ffff:{address_of(host)} host{host}-as-ipv6"]
    return "\n".join([*lines, ""])


def _serve(control: socket.socket) -> None:
    """Fork what the test asks for and tell it of ends, until it has closed the socket."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    both = [control.fileno(), woken]
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    ranks: set[int] = set()
    while True:
        ready, _, _ = select.select(both, [], [], _LOOK_S)
        if woken in ready:
            os.read(woken, 4096)
        _reap(control, ranks)
        if control.fileno() in ready:
            word, descriptors, _, _ = socket.recv_fds(control, WORD.size, 1)
            if not word:
                return
            ranks.add(_start(control, descriptors[0], (woken, wake)))


def _reap(control: socket.socket, ranks: set[int]) -> None:
    """Take the ends of all children, those of processes that have lost their parent among them; tell of ranks."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in ranks:
            ranks.discard(pid)
            control.send(WORD.pack(ENDED, pid, os.waitstatus_to_exitcode(status)))


def _start(control: socket.socket, connection: int, ours: tuple[int, int]) -> int:
    """Fork a process that does tasks of the harness, send the test its pidfd and return its number."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            for descriptor in ours:
                os.close(descriptor)
            rank.main(Connection(connection))
        finally:
            os._exit(1)  # it never comes here; if it did, it would be a second process 1
    os.close(connection)
    pidfd = os.pidfd_open(pid)
    socket.send_fds(control, [WORD.pack(STARTED, pid, 0)], [pidfd])
    os.close(pidfd)
    return pid
