"""`epee bench proxy`: chunks between the proxies of two ranks: half a round trip, and bytes a second.

The kernels of both ranks are played by this process, over loopback: it fills slots, stores words and polls. All bytes
of a first pass are checked. A ping is one chunk there and one back; a stream keeps all slots full in one direction, or
in both. The peer is a plain socket: the same bytes from one thread to another (`sendall` and `recv_into`, 1 MiB each),
without words, frames or credit. Each side has its own turn in every round, so both see the same machine.
"""

from __future__ import annotations

import os
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from epee.link.proxy.rank import Proxy, shape_for
from epee.link.proxy.words import CHUNKS, chunk_word
from epee.memory.claim import process_start_time
from epee.memory.shared import HEADER_BYTES
from epee.view.transport.auth import Token

from . import common

NAME = "proxy"
ISLANDS = ((0,), (1,))
SLOT_BYTES, ROW_BYTES = 1_851_392, 1408  # 128 records of 7168 BF16 elements
WAIT_S = 60.0
PIECE_BYTES = 1 << 20
FORMULAS = {
    "half_trip_us": "half of the time from the store of `posted` until the chunk that answers has arrived",
    "gbps": "bytes of all chunks in one direction / time until the last one is taken, 1e9 bytes a second",
}


class Stopped(RuntimeError):
    """A chunk did not come."""


class End:
    """One rank: its proxy, and its kernels' counts."""

    def __init__(self, proxy: Proxy, num_slots: int) -> None:
        self.proxy, self.num_slots = proxy, num_slots
        self.words = proxy.words
        self.memory = memoryview(proxy.staging.mapping)[HEADER_BYTES:]
        self.posted, self.freed, self.arrived, self.taken = proxy.shape.stream_words(0, CHUNKS)
        self.sent = self.received = 0

    def slot(self, offset: int, chunk: int, nbytes: int) -> memoryview:
        """Return the bytes of a chunk in an area."""
        at = offset + chunk % self.num_slots * SLOT_BYTES
        return self.memory[at : at + nbytes]

    def can_post(self) -> bool:
        """Return whether a slot is free."""
        chunk = self.sent - self.num_slots
        return chunk < 0 or self.words[self.freed + chunk % self.num_slots] == chunk + 1

    def post(self, nbytes: int, data: bytes = b"") -> None:
        """Fill a slot, or leave it as it is, and announce it."""
        if data:
            self.slot(self.proxy.shape.out_offset(0), self.sent, nbytes)[:] = data
        self.words[self.posted + self.sent % self.num_slots] = chunk_word(self.sent, nbytes)
        self.sent += 1

    def has_arrived(self, nbytes: int) -> bool:
        """Return whether the next chunk is there."""
        word = self.words[self.arrived + self.received % self.num_slots]
        return bool(word == chunk_word(self.received, nbytes))

    def take(self) -> None:
        """Let the slot of the next chunk be written again."""
        self.words[self.taken + self.received % self.num_slots] = self.received + 1
        self.received += 1


def until(is_so: Any, ends: Sequence[End]) -> None:
    """Poll; raise after a bound, or when a proxy has failed."""
    deadline = time.monotonic() + WAIT_S
    while True:
        for _ in range(200):
            if is_so():
                return
        for end in ends:
            end.proxy.check()
        if time.monotonic() > deadline:
            raise Stopped(f"a chunk did not come within {WAIT_S:.0f} s")
        os.sched_yield()


def check(ends: Sequence[End], nbytes: int) -> None:
    """Pass a chunk of random bytes through every slot, both ways; compare all of it."""
    for source, target in (ends, ends[::-1]):
        for _ in range(2 * source.num_slots):
            data = secrets.token_bytes(nbytes)
            until(source.can_post, ends)
            source.post(nbytes, data)
            source.proxy.wake()
            until(lambda target=target: target.has_arrived(nbytes), ends)
            found = target.slot(target.proxy.shape.in_offset(0), target.received, nbytes)
            if found != data:
                raise RuntimeError(f"a chunk of {nbytes} bytes did not arrive as it was sent")
            target.take()


def ping(ends: Sequence[End], nbytes: int, count: int) -> list[float]:
    """Return half trips, in microseconds."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        for source, target in (ends, ends[::-1]):
            until(source.can_post, ends)
            source.post(nbytes)
            source.proxy.wake()
            until(lambda target=target: target.has_arrived(nbytes), ends)
            target.take()
        times.append((time.perf_counter() - begin) / 2 * 1e6)
    return times


def stream(ends: Sequence[End], nbytes: int, count: int, is_both: bool) -> float:
    """Return bytes a second of one direction, in 1e9."""
    pairs = [(ends[0], ends[1])] + ([(ends[1], ends[0])] if is_both else [])
    goals = [(source, target, source.sent + count, target.received + count) for source, target in pairs]
    for end in ends:
        end.proxy.wake()

    def step() -> bool:
        for source, target, last_sent, last_taken in goals:
            if source.sent < last_sent and source.can_post():
                source.post(nbytes)
            if target.received < last_taken and target.has_arrived(nbytes):
                target.take()
        return all(target.received == last for _, target, _, last in goals)

    begin = time.perf_counter()
    until(step, ends)
    return count * nbytes / (time.perf_counter() - begin) / 1e9


def plain(nbytes: int, count: int) -> float:
    """Return bytes a second, in 1e9, of a plain socket over loopback; both ends release the interpreter's lock."""
    total = nbytes * count

    def send(address: tuple[str, int]) -> None:
        data, left = memoryview(bytearray(PIECE_BYTES)), total
        with socket.create_connection(address, timeout=WAIT_S) as connection:
            while left:
                connection.sendall(data[: min(left, PIECE_BYTES)])
                left -= min(left, PIECE_BYTES)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        sender = threading.Thread(target=send, args=(server.getsockname(),))
        sender.start()
        connection, _ = server.accept()
    with connection:
        connection.settimeout(WAIT_S)
        room, left = memoryview(bytearray(PIECE_BYTES)), total
        begin = time.perf_counter()
        while left:
            count_now = connection.recv_into(room[: min(left, PIECE_BYTES)])
            if not count_now:
                raise Stopped("the plain socket has ended")
            left -= count_now
        seconds = time.perf_counter() - begin
    sender.join()
    return total / seconds / 1e9


def connected(num_slots: int, num_processes: int, engine: str) -> list[Proxy]:
    """Return two proxies that have met."""
    me = (os.getpid(), process_start_time(os.getpid()))
    made: list[Proxy] = []
    try:
        for rank in (0, 1):
            shape = shape_for(rank, ISLANDS, num_slots, SLOT_BYTES, ROW_BYTES, num_processes)
            made.append(Proxy(rank, ISLANDS, [me], shape, address="127.0.0.1", engine=engine))
        offers, token, job = [proxy.offer() for proxy in made], Token(secrets.token_bytes(32)), secrets.token_bytes(16)
        threads = [
            threading.Thread(target=made[i].meet, args=(0, 0, {1 - i: offers[1 - i]}, token, job, 30.0)) for i in (0, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if [proxy.epoch for proxy in made] != [0, 0]:
            raise RuntimeError("the proxies did not meet")
    except BaseException:
        for proxy in made:
            proxy.close()
        raise
    return made


def measure(
    sizes: Sequence[int],
    num_pings: int,
    num_chunks: int,
    num_rounds: int,
    num_slots: int,
    num_processes: int,
    engine: str,
) -> dict[str, Any]:
    """Return the numbers."""
    begin = time.perf_counter()
    made = connected(num_slots, num_processes, engine)
    start_s = time.perf_counter() - begin
    rows = []
    try:
        ends = [End(proxy, num_slots) for proxy in made]
        for nbytes in sizes:
            check(ends, nbytes)
            times: list[float] = []
            rates: dict[str, list[float]] = {"one_way": [], "both_ways": [], "plain": []}
            for _ in range(num_rounds):
                times += ping(ends, nbytes, num_pings)
                rates["one_way"].append(stream(ends, nbytes, num_chunks, False))
                rates["both_ways"].append(stream(ends, nbytes, num_chunks, True))
                rates["plain"].append(plain(nbytes, num_chunks))
            times.sort()
            row: dict[str, Any] = {"nbytes": nbytes, "half_trip_us": round(statistics.median(times), 1)}
            row["half_trip_p99_us"] = round(common.percentile(times, 99), 1)
            rows.append(row | {f"{name}_gbps": float(f"{statistics.median(each):.3g}") for name, each in rates.items()})
    finally:
        for proxy in made:
            proxy.close()
    return {
        "start_s": round(start_s, 2),
        "engine": engine,
        "processes": num_processes,
        "slots": num_slots,
        "rows": rows,
    }


def main(
    sizes: Annotated[str, typer.Option(help="Bytes of a chunk, multiples of 16.")] = "16,65536,262144,1851392",
    pings: Annotated[int, typer.Option(min=1, help="Round trips of a round.")] = 300,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of a stream.")] = 400,
    rounds: Annotated[int, typer.Option(min=1, help="How often all of it.")] = 5,
    slots: Annotated[int, typer.Option(min=1, help="Slots of a stream.")] = 8,
    processes: Annotated[int, typer.Option(min=1, help="Processes of a proxy, each with a connection.")] = 1,
    engine: Annotated[str, typer.Option(help="tcp, or nixl (the extra of that name).")] = "tcp",
    json_to: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Measure proxies of two ranks of this machine."""
    facts = common.machine()
    report = measure([int(size) for size in sizes.split(",")], pings, chunks, rounds, slots, processes, engine)
    columns = ("bytes", "half trip us p50", "p99", "one way GB/s", "both ways GB/s", "plain socket GB/s")
    rows = [tuple(map(str, row.values())) for row in report["rows"]]
    notes = [
        common.machine_line(facts),
        f"{engine}, {slots} slots, {processes} process(es) a proxy; started and met in {report['start_s']} s",
        "Kernels are played by one process over loopback; no GPU, no NIC.",
    ]
    common.print_table("chunks between two proxies", columns, rows, notes)
    if json_to is not None:
        common.write_json(json_to, {"machine": facts, "formulas": FORMULAS, **report})


if __name__ == "__main__":
    typer.run(main)
