"""A wire in the hands of the test: packets between the hosts' TUN devices, late, lost or held up as it says.

Data path: the kernel of a host writes a packet to its device; the relay reads it, looks up the link from that host to
the one whose address it carries, and writes it to the other device, at once or when its delay is over. A packet for
nobody, of another protocol than IPv4, or for a device that takes no more is dropped, as on a real wire.
"""

from __future__ import annotations

import heapq
import os
import random
import socket
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

_MAX_PACKET = 1 << 16
_BURST = 64  # packets of one device before the others have their turn
QUEUE = 10_000  # packets that a device keeps for the relay


class Link(NamedTuple):
    """What happens to packets from one host to another; the way back is another link."""

    delay_s: float = 0.0
    loss: float = 0.0
    is_cut: bool = False


class Relay:
    """The devices and the links between hosts. It has no thread: who owns it calls `move` and `deliver`."""

    def __init__(self, devices: Mapping[int, int], addresses: Mapping[str, int], seed: int) -> None:
        self.devices = dict(devices)
        self.links: dict[tuple[int, int], Link] = {}
        self.unplugged: set[int] = set()
        self._hosts = {socket.inet_aton(address): host for address, host in addresses.items()}
        self._random = random.Random(seed)
        self._late: list[tuple[float, int, int, bytes]] = []  # a heap: when, number of the packet, device, packet
        self._num_late = 0

    def wait_s(self, longest_s: float) -> float:
        """Return for how long nothing needs to be delivered."""
        return min(longest_s, max(0.0, self._late[0][0] - time.monotonic())) if self._late else longest_s

    def move_all(self) -> None:
        """Take what has been sent until now: the links may change after it."""
        for src in self.devices:
            self.move(src, QUEUE)

    def move(self, src: int, most: int = _BURST) -> None:
        """Take what host `src` sends, at most so many packets."""
        for _ in range(most):
            try:
                packet = os.read(self.devices[src], _MAX_PACKET)
            except OSError:  # nothing more, or the device is down
                return
            self._send(src, packet)

    def deliver(self) -> None:
        """Write the packets whose delay is over."""
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(self._late)
            _write(device, packet)

    def _send(self, src: int, packet: bytes) -> None:
        dst = self._hosts.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        if dst is None or _touches(self.unplugged, src, dst):
            return
        link = self.links.get((src, dst), Link())
        if link.is_cut or (link.loss and self._random.random() < link.loss):
            return
        if link.delay_s:
            self._num_late += 1
            due = time.monotonic() + link.delay_s
            heapq.heappush(self._late, (due, self._num_late, self.devices[dst], packet))
        else:
            _write(self.devices[dst], packet)


def _touches(hosts: Collection[int], src: int, dst: int) -> bool:
    return src in hosts or dst in hosts


def _write(device: int, packet: bytes) -> None:
    try:
        os.write(device, packet)
    except OSError:
        return  # its queue is full or it is down: the packet is lost
