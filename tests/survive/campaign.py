"""The campaign: real processes, real SIGKILL and SIGSTOP, as many as asked for; every history is checked.

    python -m tests.survive.campaign --kills 1000 --falls 50 --zombies 200 --rejoins 500 --flips 20000 --soak 1200

Prints a table and writes JSON and a histogram. A violation is printed, counted and kept with what reproduces it; the
exit status is then 1. Workers live from round to round (`tests/harness/pool.py`); only those
that were killed are replaced.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.harness import DEAD, Pool, collect

from . import buffer_kills, kill_points, report
from .flips import flip_round
from .histories import ALL_OPS, COLLECTIVES, Entry, check_histories
from .living import live_for
from .rounds import LONG, NUM_ZOMBIE_CALLS, ZOMBIE, KillRound, beside_a_zombie, kill_round, zombie

ROUND_S = 40.0
NUM_RANKS = 4
NUM_ZOMBIE_RANKS = 3
ZOMBIES_AT_ONCE = 4
VICTIMS = (0, 2, 3)  # the first (root and coordinator), one in the middle, the last
MODES = ("raise", "mask")


def kill_rounds(seed: int) -> Iterator[KillRound]:
    """Yield every (operation x kill point x victim x mode) once, in random order, then again, with other lengths."""
    dice = random.Random(seed)
    for lap in itertools.count():
        rounds = []
        for op, victim, mode in itertools.product(ALL_OPS, VICTIMS, MODES):
            length = dice.choice((1, 100, LONG)) if lap else 1
            for point in kill_points.POINTS:
                rounds.append(KillRound(op, {victim: (point, 3)}, NUM_RANKS, mode, length))
            for point in kill_points.AGREE_POINTS:
                first = dice.choice([rank for rank in range(NUM_RANKS) if rank != victim])
                victims = {first: (dice.choice(("before_send", "after_tag")), 3), victim: (point, 0)}
                rounds.append(KillRound(op, victims, NUM_RANKS, mode, length))
        dice.shuffle(rounds)
        yield from rounds


def falls(seed: int) -> Iterator[KillRound]:
    """Yield rounds of eight ranks of which seven die one after the other, or two at a time."""
    dice = random.Random(seed)
    for i in itertools.count():
        ranks = dice.sample(range(8), 7)
        number = 2
        victims = {}
        for rank in ranks:
            victims[rank] = (dice.choice(kill_points.POINTS), number)
            number += dice.random() < 0.8
        yield KillRound(dice.choice(COLLECTIVES), victims, 8, MODES[i % 2], 1)


def play(pool: Pool, spec: KillRound) -> tuple[list[list[Entry]], dict[int, tuple[int, bool]]]:
    """Run one round and check it; return the survivors' histories and per victim (moment in ns, was it on the way)."""
    workers = pool.hire(spec.num_ranks)
    try:
        with pool.folder() as folder:
            for rank, worker in enumerate(workers):
                worker.start(kill_round, rank, folder, spec, timeout_s=ROUND_S)
            results = collect(workers, set(spec.victims), ROUND_S)
            records = {rank: kill_points.read_record(f"{folder}/kill{rank}") for rank in spec.victims}
    finally:
        pool.release(workers)
    histories: list[list[Entry]] = [result for result in results if result != DEAD]
    check_histories(histories, spec.num_ranks, set(spec.victims))
    for history in histories:
        assert history[-1].status == "ok", f"the group does not work at the end: {history[-1]}"
    return histories, records


def run_kill_round(pool: Pool, spec: KillRound) -> dict[str, Any]:
    """Run one round, check it, and return the latencies and whether the points were on the way."""
    histories, records = play(pool, spec)
    latencies = []
    for victim, (when_ns, _) in records.items():
        for history in histories:
            ended = first_without(history, victim)
            if ended is not None and ended.ended_ns > when_ns:
                latencies.append((ended.ended_ns - when_ns) / 1e6)
    return {"latencies_ms": latencies, "hit": {rank: record[1] for rank, record in records.items()}}


def first_without(history: list[Entry], victim: int) -> Entry | None:
    """Return the call that met the loss of `victim`."""
    for entry in history:
        if victim in entry.ranks or (entry.contributors and victim not in entry.contributors):
            return entry
    return None


class ZombieRound:
    """Stop rank 1 in a call, replace it, make 100 calls, wake it. Several rounds can run at once: they mostly wait."""

    def __init__(self, pool: Pool, op: str, point: str, seed: int) -> None:
        self._pool = pool
        self._workers = workers = pool.hire(NUM_ZOMBIE_RANKS + 1)
        self._folder = pool.folder()
        folder, victim = self._folder.name, workers[ZOMBIE]
        victim.start(zombie, folder, NUM_ZOMBIE_RANKS, op, point, seed, timeout_s=ROUND_S)
        for rank, position in ((0, 0), (2, 2), (ZOMBIE, 3)):
            args = (rank, folder, NUM_ZOMBIE_RANKS, op, position == 3, victim.pid)
            workers[position].start(beside_a_zombie, *args, timeout_s=ROUND_S)

    def finish(self) -> dict[str, Any]:
        """Wait for the end and check all of it."""
        try:
            results = collect(self._workers, set(), ROUND_S)
        finally:
            self._workers[ZOMBIE].result = None  # its methods are patched: not to be used again
            self._pool.release(self._workers)
            self._folder.cleanup()
        histories = [results[0], results[2], results[3]]
        assert all(len(history) == NUM_ZOMBIE_CALLS + 10 for history in histories)
        check_histories(histories, NUM_ZOMBIE_RANKS, set())
        assert all(entry.contributors == (0, 1, 2) for entry in histories[0]), "somebody is missing"
        assert results[ZOMBIE][-1].status == "EvictedError"
        return {}


def run_flips(pool: Pool, num_calls: int, seed: int, states: bool) -> dict[str, Any]:
    """Make calls with a flipped bit each among three ranks: in headers, or in state words."""
    num_ranks = 3
    workers = pool.hire(num_ranks)
    try:
        with pool.folder() as folder:
            for rank, worker in enumerate(workers):
                worker.start(flip_round, rank, folder, num_ranks, num_calls, seed, states, timeout_s=60 + num_calls)
            results = collect(workers, set(), 60.0 + num_calls)
    finally:
        for worker in workers:
            worker.result = None
        pool.release(workers)
    wrong = [text for result in results for text in result["wrong"]]
    assert not wrong, f"{len(wrong)} wrong results, the first: {wrong[0]}"
    assert all(result["members"] == num_ranks for result in results), "a flip changed the view"
    counts: dict[str, int] = {}
    for result in results:
        for key, count in result["counts"].items():
            counts[key] = counts.get(key, 0) + count
    return {"outcomes": counts}


class Campaign:
    """Runs parts, keeps numbers and violations."""

    def __init__(self, pool: Pool, is_loud: bool = True) -> None:
        self.pool = pool
        self.is_loud = is_loud
        self.results: dict[str, dict[str, Any]] = {}
        self.violations: list[dict[str, str]] = []

    def attempt(
        self, part: str, what: object, run: Callable[[], dict[str, Any]], is_last: bool = True
    ) -> dict[str, Any] | None:
        """Run one round; a violation is kept, not raised. `is_last`: no other round runs, so nothing may be left."""
        try:
            told = run()
            left = leaks(self.pool) if is_last else []
            assert not left, f"left behind: {left}"
            return told
        except AssertionError as exc:
            self.violations.append({"part": part, "what": repr(what), "error": str(exc)[:6000]})
            print(f"VIOLATION in {part}: {what}\n{str(exc)[:3000]}\n", flush=True)
            return None

    def kills(self, part: str, rounds: Iterator[KillRound], num_kills: int, until: float) -> None:
        """Run kill rounds until there were `num_kills` kills, or it is `until`."""
        result = self.results.setdefault(
            part, {"kills": 0, "rounds": 0, "not_on_the_way": 0, "latencies_ms": [], "loads": [], "covered": {}}
        )
        began = time.monotonic()
        while result["kills"] < num_kills and time.time() < until:
            spec = next(rounds)
            told = self.attempt(part, spec, lambda spec=spec: run_kill_round(self.pool, spec))  # type: ignore[misc]
            result["rounds"] += 1
            result["kills"] += len(spec.victims)
            if told is not None:
                result["latencies_ms"] += told["latencies_ms"]
                result["loads"] += [os.getloadavg()[0]] * len(told["latencies_ms"])
                result["not_on_the_way"] += sum(not hit for hit in told["hit"].values())
                for rank, (point, _) in spec.victims.items():
                    key = f"{spec.op} {point} {rank} {spec.mode}"
                    result["covered"][key] = result["covered"].get(key, 0) + 1
            if self.is_loud and result["rounds"] % 50 == 0:
                print(f"{part}: {result['kills']} kills, {len(self.violations)} violations", flush=True)
        result["seconds"] = time.monotonic() - began

    def zombies(self, number: int, until: float, seed: int) -> None:
        """Run zombie rounds, `number` at most."""
        result = self.results.setdefault("zombies", {"rounds": 0, "right": 0})
        dice, began = random.Random(seed), time.monotonic()
        while result["rounds"] < number and time.time() < until:
            batch = []
            for _ in range(min(ZOMBIES_AT_ONCE, number - result["rounds"])):
                args = (dice.choice(COLLECTIVES), dice.choice(kill_points.POINTS), dice.randrange(1 << 30))
                batch.append((args, ZombieRound(self.pool, *args)))
            for args, playing in batch:
                told = self.attempt("zombies", args, playing.finish, is_last=playing is batch[-1][1])
                result["rounds"] += 1
                result["right"] += told is not None
        result["seconds"] = time.monotonic() - began

    def flips(self, number: int, until: float, seed: int, states: bool = False) -> None:
        """Flip `number` bits, in groups that live for 500 calls."""
        part = "flips of state words" if states else "flips"
        result = self.results.setdefault(part, {"flips": 0, "outcomes": {}})
        began = time.monotonic()
        while result["flips"] < number and time.time() < until:
            num_calls = min(500, number - result["flips"])
            told = self.attempt(part, seed, lambda n=num_calls, s=seed: run_flips(self.pool, n, s, states))  # type: ignore[misc]
            result["flips"] += num_calls
            seed += 1
            for key, count in (told or {"outcomes": {}})["outcomes"].items():
                result["outcomes"][key] = result["outcomes"].get(key, 0) + count
        result["seconds"] = time.monotonic() - began

    def buffer_kills(self, number: int, until: float, seed: int) -> None:
        """Kill ranks with buffers of every kind, beside calls and syncs."""
        result = self.results.setdefault("buffers", {"kills": 0, "abandoned": 0})
        began = time.monotonic()
        for i in itertools.count(seed):
            if result["kills"] + result["abandoned"] >= number or time.time() > until:
                break
            spec = buffer_kills.draw(i)
            kills = self.attempt("buffers", spec, lambda spec=spec: {"kills": buffer_kills.play(self.pool, spec)})  # type: ignore[misc]
            _add(result, kills or {"abandoned": len(spec.victims)})
        result["seconds"] = time.monotonic() - began

    def rejoins(self, number: int, until: float, seed: int) -> None:
        """Kill and replace, 25 times in the life of a group."""
        result = self.results.setdefault("rejoins", {"rejoins": 0, "kills": 0, "calls": {}, "abandoned": 0})
        began = time.monotonic()
        for i in itertools.count():
            if result["rejoins"] + result["abandoned"] >= number or time.time() > until:
                break
            goal = min(25, number - result["rejoins"] - result["abandoned"])
            args = {"mode": MODES[i % 2], "num_ranks": 3, "rejoins": goal, "seed": seed + i}
            told = self.attempt("rejoins", args, lambda args=args: live_for(self.pool, **args))  # type: ignore[misc]
            _add(result, told or {"abandoned": goal})
        result["seconds"] = time.monotonic() - began

    def soak(self, seconds: float, until: float, seed: int, mtbf_s: float = 0.5) -> None:
        """Kill at random moments, members and joiners, on the average every `mtbf_s`; groups live for a minute."""
        result = self.results.setdefault("soak", {"rejoins": 0, "kills": 0, "calls": {}})
        began = time.monotonic()
        for i in itertools.count():
            left = min(seconds - (time.monotonic() - began), until - time.time())
            if left <= 0:
                break
            args = {
                "mode": MODES[i % 2],
                "num_ranks": 4,
                "seconds": min(60.0, left),
                "mtbf_s": mtbf_s,
                "seed": seed + i,
            }
            told = self.attempt("soak", args, lambda args=args: live_for(self.pool, **args))  # type: ignore[misc]
            _add(result, told or {})
        result["seconds"] = time.monotonic() - began


def _add(result: dict[str, Any], told: dict[str, Any]) -> None:
    for key, value in told.items():
        if key == "calls":
            for status, count in value.items():
                result["calls"][status] = result["calls"].get(status, 0) + count
        elif isinstance(value, int):
            result[key] = result.get(key, 0) + value


def leaks(pool: Pool) -> list[str]:
    """Return what a round has left: folders of jobs, shared memory that has a name."""
    left = [f"job folder {name}" for name in os.listdir(pool.runtime_folder)]
    return left + [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "epee" in name]


def main() -> int:
    """Parse the command line, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, help_text in (
        ("kills", "SIGKILLs at every point of every operation"),
        ("buffer-kills", "SIGKILLs at random moments in ranks with buffers"),
        ("falls", "runs of 8 ranks -> 1"),
        ("zombies", "SIGSTOPs with a replacement"),
        ("rejoins", "kill-and-replace rounds"),
        ("flips", "header bit flips"),
        ("state-flips", "bit flips in state words"),
        ("soak", "seconds of kills at random moments"),
        ("seed", "of all choices"),
    ):
        parser.add_argument(f"--{name}", type=int, default=0, help=help_text)
    parser.add_argument("--mtbf", type=float, default=0.5, help="mean seconds between two kills of the soak")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no further round after this time")
    parser.add_argument("--out", default="", help="write OUT.json and OUT.png")
    args = parser.parse_args()
    until = time.time() + args.limit_s
    with Pool() as pool:
        campaign = Campaign(pool)
        if args.kills:
            campaign.kills("kills", kill_rounds(args.seed), args.kills, until)
        if args.buffer_kills:
            campaign.buffer_kills(args.buffer_kills, until, args.seed)
        if args.falls:
            campaign.kills("8 -> 1", falls(args.seed), 7 * args.falls, until)
        if args.zombies:
            campaign.zombies(args.zombies, until, args.seed)
        if args.rejoins:
            campaign.rejoins(args.rejoins, until, args.seed)
        if args.flips:
            campaign.flips(args.flips, until, args.seed)
        if args.state_flips:
            campaign.flips(args.state_flips, until, args.seed, True)
        if args.soak:
            campaign.soak(args.soak, until, args.seed, args.mtbf)
    told = report.summary(campaign.results, campaign.violations, sys.argv[1:])
    report.show(told)
    if args.out:
        report.write(told, campaign.results, Path(args.out))
    return 1 if campaign.violations else 0


if __name__ == "__main__":
    sys.exit(main())
