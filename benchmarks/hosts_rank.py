"""What each rank of `epee bench hosts` does: check, then time the sides in turns, and count bytes: epee, epee over NIXL
where that is installed, gloo, raw TCP.

In a block a side makes its calls back to back, and rank 0 reads the clock around each; the sides change places from
block to block. *raw* is a socket between each pair of ranks at the same position on the two hosts, in Python, that
polls and yields: the bytes that the operation must move, both ways at once (of send_recv there and back), and nothing
else. So it is what is left when there is no library.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import epee  # noqa: F401 - registers the backend
from epee.link.nixl.library import why_missing

from .two_hosts import Place

WARM_UP = 3
UCX = {"UCX_TLS": "tcp,self", "UCX_MODULES": "^efa"}  # what there is on the way between the hosts of one machine
_FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
_BUFFER_BYTES = 4 << 20
_WAIT_S = 60.0


class Raw:
    """A socket to the partner on the other host, and nothing between it and the clock."""

    def __init__(self, place: Place) -> None:
        is_first = place.rank < place.partner
        key = f"raw/{min(place.rank, place.partner)}"
        if is_first:
            with socket.create_server((place.address, 0)) as listener:
                listener.settimeout(_WAIT_S)
                place.store.set(key, f"{place.address} {listener.getsockname()[1]}")
                self._socket, _ = listener.accept()
        else:
            address, port = place.store.get(key).decode().split()
            self._socket = socket.create_connection((address, int(port)), timeout=_WAIT_S)
        self._is_first = is_first
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def exchange(self, out: memoryview, into: memoryview) -> None:
        """Send and receive at once until both are done."""
        sent = got = 0
        until = time.monotonic() + _WAIT_S
        while sent < len(out) or got < len(into):
            moved = 0
            try:
                if sent < len(out):
                    moved = self._socket.send(out[sent:])
                    sent += moved
            except BlockingIOError:
                pass
            try:
                if got < len(into):
                    count = self._socket.recv_into(into[got:])
                    if not count:
                        raise ConnectionResetError("the partner has gone")
                    got += count
                    moved += count
            except BlockingIOError:
                pass
            if not moved:
                os.sched_yield()
                if time.monotonic() > until:
                    raise TimeoutError(f"raw TCP: {got} of {len(into)} bytes after {_WAIT_S:.0f} s")

    def trip(self, out: memoryview, into: memoryview) -> None:
        """Go to the partner and back."""
        nothing = memoryview(b"")
        for is_mine in (self._is_first, not self._is_first):
            if is_mine:
                self.exchange(out, nothing)
            else:
                self.exchange(nothing, into)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class Case:
    """One operation of one size on one group: `call` makes it, `check` compares it with its closed form."""

    def __init__(self, op: str, nbytes: int, place: Place, group: Any) -> None:
        self._place, self._group = place, group
        self._count = count = max(1, nbytes // 4)
        if op == "all_to_all":
            self._x = torch.zeros(count * place.num_ranks, **_FLOAT)
            self._out = torch.zeros(count * place.num_ranks, **_FLOAT)
        else:
            self._x = torch.zeros(count, **_FLOAT)
        self.call: Callable[[], object] = getattr(self, f"_{op}")
        self.check: Callable[[], None] = getattr(self, f"_check_{op}")

    def _all_to_all(self) -> object:
        return dist.all_to_all_single(self._out, self._x, group=self._group)

    def _check_all_to_all(self) -> None:
        ranks = torch.arange(self._place.num_ranks, **_FLOAT).repeat_interleave(self._count)
        within = torch.arange(self._count, **_FLOAT).remainder(97).repeat(self._place.num_ranks)
        self._x.copy_(1000 * ranks + 100 * self._place.rank + within)
        self.call()
        assert torch.equal(self._out, 1000 * self._place.rank + 100 * ranks + within)

    def _all_reduce(self) -> object:
        return dist.all_reduce(self._x, group=self._group)

    def _check_all_reduce(self) -> None:
        ramp = torch.arange(self._count, **_FLOAT).remainder(97)
        self._x.copy_(ramp * (self._place.rank + 1))
        self.call()
        num_ranks = self._place.num_ranks
        assert torch.equal(self._x, ramp * (num_ranks * (num_ranks + 1) // 2))
        self._x.zero_()  # sums of zeros stay zero however often the call is repeated

    def _send_recv(self) -> None:
        place = self._place
        for is_mine in (place.rank < place.partner, place.rank > place.partner):
            if is_mine:
                dist.send(self._x, place.partner, group=self._group)
            else:
                dist.recv(self._x, place.partner, group=self._group)

    def _check_send_recv(self) -> None:
        place = self._place
        self._x.fill_(place.rank + 3)
        self.call()
        assert bool((self._x == min(place.rank, place.partner) + 3).all())


def bytes_out(interface: str) -> int:
    """Return how many bytes an interface of this rank's network has sent so far."""
    with open("/proc/net/dev") as table:
        for line in table:
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                return int(counters.split()[8])
    raise LookupError(interface)


def block(place: Place, call: Callable[[], object], num_calls: int) -> tuple[float, float]:
    """Return the median time of a call on this rank in seconds, and the bytes per call that left this host."""
    before = bytes_out(place.interface)  # rank 0 reads it before any rank can begin
    place.barrier.wait()
    taken = []
    for _ in range(WARM_UP + num_calls):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    place.barrier.wait()
    sent = bytes_out(place.interface) - before
    return statistics.median(taken[WARM_UP:]), sent / len(taken)


def measure(place: Place, rows: list[tuple[str, int, int, int]], num_blocks: int) -> list[dict[str, Any]]:
    """Run on every rank: per row the seconds of each block and the bytes per call, by side.

    Args:
        rows: operation, bytes, calls in a block, bytes that raw TCP sends each way on this rank.
    """
    groups = {"gloo": dist.group.WORLD, "epee": dist.new_group(backend="epee")}
    if not why_missing():
        os.environ.update(UCX | {"EPEE_LINK": "nixl"})
        groups["nixl"] = dist.new_group(backend="epee")
        os.environ["EPEE_LINK"] = "tcp"
    sides = (*groups, "raw")
    raw = Raw(place)
    measured = []
    for op, nbytes, num_calls, raw_bytes in rows:
        cases = {side: Case(op, nbytes, place, group) for side, group in groups.items()}
        out, into = (memoryview(bytearray(b"\x55") * raw_bytes) for _ in range(2))  # pages that exist, as tensors' do
        move = raw.trip if op == "send_recv" else raw.exchange
        calls = {side: case.call for side, case in cases.items()}
        calls["raw"] = lambda move=move, out=out, into=into: move(out, into)
        row: dict[str, Any] = {"seconds": {side: [] for side in sides}, "sent": {side: [] for side in sides}}
        for case in cases.values():
            case.check()
        for idx in range(num_blocks):
            for position in range(len(sides)):
                side = sides[(idx + position) % len(sides)]
                seconds, sent = block(place, calls[side], num_calls)
                row["seconds"][side].append(seconds)
                row["sent"][side].append(sent)
        for case in cases.values():
            case.check()
        measured.append(row)
    raw.close()
    for side in list(groups)[1:]:
        dist.destroy_process_group(groups[side])
    return measured
