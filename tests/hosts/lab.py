"""The process that holds the network between the hosts and is the parent of their first processes.

It lives in network namespaces that have no names: they end with the processes in them, and these with the lab, which
dies with the server of the harness, which dies with the test. So nothing can be left over, and the labs of several test
processes do not see each other: each may use the same addresses.

On wire "veth" every host has one end of a pair, the other one is a port of a bridge here. On wire "tun" every host has
a TUN device, and the lab moves the packets (`relay.py`). Commands come over the connection; its end ends the lab.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from . import machine, namespaces
from .relay import QUEUE, Link, Relay

_LOOK_S = 1.0
_BRIDGE = "br0"


class Plan(NamedTuple):
    """What to build."""

    num_hosts: int
    wire: str
    mtu: int
    seed: int


def main(connection: Connection, plan: Plan, controls: list[socket.socket]) -> None:
    """Build the hosts of `plan`, answer with the numbers of their first processes, and do what is asked for."""
    namespaces.die_with_parent()
    pids: list[int] = []
    try:
        lab = Lab(plan, connection)
        for control in controls:
            pids.append(lab.add(len(pids), control, controls))
        lab.connect()
    except OSError as exc:
        connection.send(("error", str(exc)))
    else:
        for control in controls:
            control.close()
        connection.send(("ok", pids))
        lab.serve()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)


class Lab:
    """The hosts and what connects them, seen from the middle."""

    def __init__(self, plan: Plan, connection: Connection) -> None:
        self._plan = plan
        self._connection = connection
        if os.geteuid() != 0:
            raise PermissionError("only root may make hosts")
        self._pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
        namespaces.unshare(namespaces.NEW_NETWORK)
        self._network = os.open("/proc/self/ns/net", os.O_RDONLY)
        self._devices: dict[int, int] = {}
        if plan.wire == "veth":
            namespaces.ip(f"link add {_BRIDGE} type bridge forward_delay 0", f"link set {_BRIDGE} mtu {plan.mtu} up")

    def add(self, host: int, control: socket.socket, controls: list[socket.socket]) -> int:
        """Make a host and return the number of its first process."""
        namespaces.unshare(namespaces.NEW_NETWORK)
        self._make_interface(host)
        namespaces.unshare(namespaces.NEW_PIDS)
        pid = os.fork()
        if pid == 0:
            for other in controls:
                if other is not control:
                    other.close()
            self._connection.close()
            for descriptor in (self._pids, self._network, *self._devices.values()):
                os.close(descriptor)
            machine.main(control, host, self._plan.num_hosts)
        namespaces.enter(self._pids, namespaces.NEW_PIDS)
        namespaces.enter(self._network, namespaces.NEW_NETWORK)
        return pid

    def _make_interface(self, host: int) -> None:
        """Give the network namespace that the lab is in for the moment its loopback and its one interface."""
        _switch_ipv6_off()  # its own talk would be counted as bytes of the test's
        name, mtu = machine.INTERFACE, self._plan.mtu
        if self._plan.wire == "veth":
            home = f"/proc/{os.getpid()}/fd/{self._network}"
            # A number that no port has: the kernel puts off news of a pair whose ends have the same one, for a second.
            made = [f"link add {name} index 1000 mtu {mtu} type veth peer name {_port(host)} netns {home}"]
        else:
            self._devices[host] = namespaces.open_tun(name)
            made = [f"link set {name} mtu {mtu} txqueuelen {QUEUE}"]
        namespaces.ip(
            *made, f"addr add {machine.address_of(host)}/24 dev {name}", f"link set {name} up", "link set lo up"
        )

    def connect(self) -> None:
        """Plug all hosts in."""
        if self._plan.wire == "veth":
            hosts = range(self._plan.num_hosts)
            namespaces.ip(*(f"link set {_port(h)} mtu {self._plan.mtu} master {_BRIDGE} up" for h in hosts))

    def serve(self) -> None:
        """Move packets and obey, until the test closes its end of the connection."""
        hosts = range(self._plan.num_hosts)
        relay = Relay(self._devices, {machine.address_of(host): host for host in hosts}, self._plan.seed)
        sources = {device: host for host, device in self._devices.items()}
        poll = select.epoll()
        for descriptor in (self._connection.fileno(), *sources):
            poll.register(descriptor, select.EPOLLIN)
        while True:
            for descriptor, _ in poll.poll(relay.wait_s(_LOOK_S)):
                if descriptor in sources:
                    relay.move(sources[descriptor])
                elif not self._obey(relay):
                    return
            relay.deliver()

    def _obey(self, relay: Relay) -> bool:
        """Do one command and answer; false: there are no more."""
        try:
            name, *args = self._connection.recv()
        except EOFError:
            return False
        relay.move_all()
        try:
            _COMMANDS[name](relay, *args)
        except OSError as exc:
            self._connection.send(("error", str(exc)))
        else:
            self._connection.send(("ok", None))
        return True


def _port(host: int) -> str:
    """Return the name of the lab's end of a pair."""
    return f"port{host}"


def _switch_ipv6_off() -> None:
    for which in ("all", "default"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without it
            Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6").write_text("1")


def _set_plugged(relay: Relay, host: int, is_plugged: bool) -> None:
    if not relay.devices:
        namespaces.ip(f"link set {_port(host)} {'up' if is_plugged else 'down'}")
    elif is_plugged:
        relay.unplugged.discard(host)
    else:
        relay.unplugged.add(host)


def _set_link(relay: Relay, src: int, dst: int, link: Link) -> None:
    relay.links[src, dst] = link


_COMMANDS: dict[str, Any] = {"plug": _set_plugged, "link": _set_link}
