"""The owner of a group that lives with deaths: kills, replaces, stops, compares the logs."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from tests.harness import DEAD, Pool, Worker, collect, take_until

from .histories import ALL_OPS
from .rounds import LOG, live

JOIN_S = 40.0


def live_for(
    pool: Pool,
    mode: str,
    num_ranks: int,
    seed: int,
    seconds: float = 1e9,
    rejoins: int = 1 << 60,
    mtbf_s: float = 0.0,
) -> dict[str, Any]:
    """Kill and replace for `seconds` or until `rejoins` replacements came in; return what was counted.

    Without `mtbf_s` each kill waits until the group is whole and the last rank is spared, to see whether it grows. With
    it, kills come at random moments and hit anybody, as long as one member remains.

    Raises:
        AssertionError: a result was wrong, a rank failed or was voted out, logs differ, or a joiner did not come in.
    """
    with pool.folder() as folder:
        group = _Group(pool, folder, mode, num_ranks, seed)
        try:
            group.start()
            end = time.monotonic() + seconds
            while time.monotonic() < end and group.num_rejoins < rejoins:
                if mtbf_s:
                    group.strike(group.dice.expovariate(1 / mtbf_s))
                else:
                    group.replace_one()
            results = group.stop()
            num_entries = compare_logs(folder)
        finally:
            pool.release(list(group.workers.values()))
    calls: dict[str, int] = {}
    for result in results:
        for status, count in result["counts"].items():
            if status != "epoch":
                calls[status] = calls.get(status, 0) + count
    if not mtbf_s and rejoins > 3:
        spared = results[-1]
        first, last = spared["first"], spared["last"]  # descriptors: connections come and go, some per peer
        assert first[1:] == last[1:], f"rank {num_ranks - 1} grew: {first} -> {last}"
        assert last[0] <= first[0] + 4 * num_ranks, f"rank {num_ranks - 1} grew: {first} -> {last}"
    return {"kills": group.num_kills, "rejoins": group.num_rejoins, "calls": calls, "log_entries": num_entries}


class _Group:
    """The processes of one group, by rank."""

    def __init__(self, pool: Pool, folder: str, mode: str, num_ranks: int, seed: int) -> None:
        self.dice = random.Random(seed)
        self.num_kills = self.num_rejoins = 0
        self.workers: dict[int, Worker] = {}
        self._strike_at = 0.0
        self._pool, self._folder, self._mode, self._num_ranks, self._seed = pool, folder, mode, num_ranks, seed

    def start(self) -> None:
        """Start the founders."""
        for rank in range(self._num_ranks):
            self._launch(rank, False)
        self._until(lambda: all(self._is_in(rank) for rank in self.workers), "birth")

    def replace_one(self) -> None:
        """Kill a rank other than the last at a random moment; wait until another one has its place."""
        rank = self.dice.randrange(self._num_ranks - 1)
        end = time.monotonic() + self.dice.random() * 0.02
        self._until(lambda: time.monotonic() >= end, "a moment", end - time.monotonic(), False)
        self._kill(rank)
        self._launch(rank, True)
        self._until(lambda: self._is_in(rank), f"rank {rank} to come in again")
        self.num_rejoins += 1

    def strike(self, pause_s: float) -> None:
        """Kill anybody `pause_s` after the strike before, if another member is left; a replacement starts at once."""
        now = time.monotonic()
        self._strike_at = max(now, (self._strike_at or now) + pause_s)  # what a strike costs does not delay the next
        self._until(lambda: False, "a moment", self._strike_at - now, False)
        members = [rank for rank in self.workers if self._is_in(rank)]
        targets = [rank for rank in self.workers if set(members) - {rank}]
        if not targets:
            return
        rank = self.dice.choice(targets)
        self.num_rejoins += self._is_in(rank) and self.workers[rank].tag is True
        self._kill(rank)
        self._launch(rank, True)

    def stop(self) -> list[Any]:
        """Let the group become whole, end it, and return what the ranks say."""
        self._until(lambda: all(self._is_in(rank) for rank in self.workers), "the group to be whole")
        (Path(self._folder) / "stop").touch()
        return collect([self.workers[rank] for rank in range(self._num_ranks)], set(), JOIN_S)

    def _launch(self, rank: int, joins: bool) -> None:
        worker = self._pool.hire(1)[0]
        worker.tag = joins
        self.workers[rank] = worker
        worker.start(live, rank, self._num_ranks, self._folder, self._mode, joins, self._seed, timeout_s=600.0)

    def _is_in(self, rank: int) -> bool:
        return any(told[0] == "joined" for told in self.workers[rank].told)

    def _kill(self, rank: int) -> None:
        worker = self.workers[rank]
        os.kill(worker.pid, signal.SIGKILL)
        take_until([worker], lambda: False, 10.0)
        kind, value = worker.result or ("silent", "it did not die")
        assert kind == DEAD, f"rank {rank} ended before it was killed: {kind}: {value}"
        self._pool.release([worker])
        self.num_kills += 1

    def _until(self, condition: Any, what: str, timeout_s: float = JOIN_S, must: bool = True) -> None:
        """Take what the workers say; nobody may end of its own accord."""

        def ended() -> list[str]:
            return [f"rank {rank}: {w.result[1]}" for rank, w in self.workers.items() if w.result is not None]

        came = take_until(list(self.workers.values()), lambda: bool(ended()) or condition(), timeout_s)
        if ended():
            for rank, worker in self.workers.items():
                if worker.result is None and self._is_in(rank):
                    os.kill(worker.pid, signal.SIGUSR1)  # its stacks go to stderr
            take_until(list(self.workers.values()), lambda: False, 3.0)
            raise AssertionError("a rank ended: " + "\n".join(ended()))
        assert came or not must, (
            f"waited {timeout_s} s for {what}; in are {[r for r in self.workers if self._is_in(r)]}"
        )


def compare_logs(folder: str) -> int:
    """Compare what all processes, the dead included, say about each call; return how many entries there were."""
    seen: dict[int, tuple[Any, str]] = {}
    num_entries = 0
    for path in sorted(Path(folder).glob("log-*")):
        raw = path.read_bytes()
        for entry in LOG.iter_unpack(raw[: len(raw) // LOG.size * LOG.size]):
            seq, told = entry[0], entry[1:]
            other, who = seen.setdefault(seq, (told, path.name))
            if other != told:
                what = f"call {seq} ({ALL_OPS[told[0]]}): {path.name} says {told}, {who} says {other}"
                raise AssertionError(f"{what}\n{_failures(folder, seq)}")
            num_entries += 1
    return num_entries


def _failures(folder: str, seq: int) -> str:
    """Return what ranks said about call `seq` where it failed."""
    found = []
    for path in sorted(Path(folder).glob("failed-*")):
        found += [f"{path.name}: {line}" for line in path.read_text().splitlines() if line.startswith(f"{seq} ")]
    return "\n".join(found)
