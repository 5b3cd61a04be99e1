"""`Hosts`: several hosts and the network between them, for as long as a `with` block; and whether they can be made."""

from __future__ import annotations

import contextlib
import functools
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.harness import Worker, server

from . import lab, machine
from .process import Machine
from .relay import Link

_ANSWER_S = 60.0


class HostsError(RuntimeError):
    """The hosts cannot be made, or the lab cannot do what it is asked for; the message has the kernel's reason."""


class Hosts:
    """Hosts 0 to `num_hosts` - 1, each with one interface; nothing of them is left when the block ends.

    On wire "veth" packets go from kernel to kernel. On "tun" a process moves them and does with them what `set_link`
    says (90 MB/s with an `mtu` of 1500, twelve times that with 65000); losses come from `seed`. Neither has IPv6.
    """

    def __init__(self, num_hosts: int, wire: str = "veth", mtu: int = 1500, seed: int = 0) -> None:
        if wire not in ("veth", "tun"):
            raise ValueError(f"wire must be veth or tun, got {wire!r}")
        self.num_hosts = num_hosts
        self.wire = wire
        self._plan = lab.Plan(num_hosts, wire, mtu, seed)
        self._ends = contextlib.ExitStack()
        self._machines: list[Machine] = []

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as undo:
            undo.callback(self._ends.close)
            self._build()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ends.close()

    def _build(self) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(self.num_hosts)]
        with contextlib.ExitStack() as theirs:
            for ours, control in pairs:
                self._ends.enter_context(ours)
                theirs.enter_context(control)
            process, self._lab = server.fork(lab.main, self._plan, [control for _, control in pairs])
        self._ends.callback(_end_lab, process, self._lab)
        for (ours, _), pid in zip(pairs, _answer(self._lab), strict=True):
            self._machines.append(Machine(ours, pid))
            self._ends.callback(self._machines[-1].close)
        for ours, _ in pairs:
            ours.settimeout(_ANSWER_S)
            said = ours.recv(4096)
            if said != machine.READY:
                raise HostsError(said.decode() or "the first process of a host died without a word")

    def _ask(self, *command: Any) -> None:
        self._lab.send(command)
        _answer(self._lab)

    def worker(self, host: int) -> Worker:
        """Return a new process on `host` that does tasks; it is ended with the block at the latest."""
        made = self._machines[host].worker()
        self._ends.callback(made.close)
        return made

    def address(self, host: int) -> str:
        """Return the one address of a host beside its own loopback."""
        return machine.address_of(host)

    def counters(self, host: int) -> tuple[int, int]:
        """Return how many bytes the interface of a host has received and sent, headers included."""
        return interface_bytes(f"/proc/{self._machines[host].pid}/net/dev")

    def processes(self, host: int) -> list[int]:
        """Return the numbers, as the test sees them, of all living processes of a host; its first one is among them."""
        return self._machines[host].processes()

    def kill(self, host: int) -> None:
        """Kill all processes of a host and return when they are gone. Peers hear of it from its kernel, which lives.

        For a power cut, that nobody hears of, `cut` the host before.
        """
        self._machines[host].kill()

    def stop(self, host: int) -> None:
        """Stop all processes of a host and return when each stands still; its kernel goes on answering."""
        self._machines[host].stop()

    def cont(self, host: int) -> None:
        """Let the processes of a host go on."""
        self._machines[host].cont()

    def cut(self, host: int) -> None:
        """Pull a host's plug out of the network: packets from it and to it are lost, and nobody is told."""
        self._ask("plug", host, False)

    def heal(self, host: int) -> None:
        """Put the plug in again."""
        self._ask("plug", host, True)

    def set_link(self, src: int, dst: int, *, delay_s: float = 0.0, loss: float = 0.0, is_cut: bool = False) -> None:
        """Say what happens from now on to packets from `src` to `dst`, only that way. Needs wire "tun"."""
        if self.wire != "tun":
            raise ValueError(f'set_link needs wire "tun", these hosts have {self.wire!r}')
        self._ask("link", src, dst, Link(delay_s, loss, is_cut))


@functools.cache
def can_make_hosts(wire: str = "veth") -> str:
    """Return why this user cannot make hosts on this machine; "" if that works, which is tried."""
    try:
        with Hosts(1, wire):
            return ""
    except HostsError as exc:
        return str(exc)


def interface_bytes(path: str = "/proc/self/net/dev") -> tuple[int, int]:
    """Return how many bytes a host's interface has received and sent; by default that of the host one is on."""
    for line in Path(path).read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == machine.INTERFACE:
            return int(numbers.split()[0]), int(numbers.split()[8])
    raise OSError(f"{path} knows no {machine.INTERFACE}")


def _answer(connection: Connection) -> Any:
    """Take the lab's answer.

    Raises:
        HostsError: it could not do what it was asked for.
        EOFError: it died; its stack went to stderr.
        TimeoutError: it is silent.
    """
    if not connection.poll(_ANSWER_S):
        raise TimeoutError(f"the lab does not answer within {_ANSWER_S} s")
    kind, value = connection.recv()
    if kind == "error":
        raise HostsError(value)
    return value


def _end_lab(process: Any, connection: Connection) -> None:
    """End the lab, which ends what is left of the hosts."""
    connection.close()
    process.join(5)
    process.kill()
    process.join()
    process.close()
