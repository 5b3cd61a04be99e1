"""The campaign of groups over hosts: ranks and whole hosts are killed at every point of every operation.

    python -m tests.hosts.campaign --kills 300 --host-kills 60 --seed 1

Rounds, kill points and checks are those of `tests/survive`; the ranks say that they are on several hosts (loopback
addresses, `tests/loopback.py`). Every survivor's history is checked against closed forms and the others'. Prints what
was covered and how long the survivors took from a kill to the call that met it; the exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from epee.view.protocol.quorum import has_quorum
from epee.view.transport.directory import remove_stale
from tests.harness import DEAD, Pool, collect
from tests.loopback import settle
from tests.survive import kill_points
from tests.survive.campaign import first_without, leaks
from tests.survive.histories import ALL_OPS, Entry, check_histories
from tests.survive.rounds import LONG, KillRound, kill_round

ROUND_S = 60.0
MODES = ("raise", "mask")
PLACEMENTS = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 0, 0, 1))
THREE_HOSTS = ((0, 0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 0))


class HostsRound(NamedTuple):
    """A round of kills, and on which host each rank is."""

    spec: KillRound
    placement: tuple[int, ...]


def on_host(rank: int, folder: str, spec: KillRound, placement: Sequence[int]) -> list[Entry]:
    """Make the calls of a kill round as a rank of a host."""
    settle(placement[rank])
    return kill_round(rank, folder, spec)


def kill_rounds(seed: int, placements: Sequence[tuple[int, ...]] = PLACEMENTS[:2]) -> Iterator[HostsRound]:
    """Yield every (operation x kill point x victim x mode) in random order, and again, with other lengths."""
    dice = random.Random(seed)
    for lap in itertools.count():
        rounds = []
        for op, victim, mode, placement in itertools.product(ALL_OPS, range(4), MODES, placements):
            length = dice.choice((1, 100, LONG)) if lap else 1
            for point in kill_points.POINTS:
                rounds.append(HostsRound(KillRound(op, {victim: (point, 3)}, 4, mode, length), placement))
            for point in kill_points.AGREE_POINTS:
                first = dice.choice([rank for rank in range(4) if rank != victim])
                victims = {first: (dice.choice(("before_send", "after_tag")), 3), victim: (point, 0)}
                rounds.append(HostsRound(KillRound(op, victims, 4, mode, length), placement))
        dice.shuffle(rounds)
        yield from rounds


def host_kill_rounds(seed: int, placements: Sequence[tuple[int, ...]] = PLACEMENTS) -> Iterator[HostsRound]:
    """Yield rounds in which all ranks of a host die, each at a point of its own."""
    dice = random.Random(seed)
    while True:
        placement = dice.choice(placements)
        host = dice.randrange(1 + max(placement))
        ranks = [rank for rank in range(4) if placement[rank] == host]
        victims = {rank: (dice.choice(kill_points.POINTS), dice.choice((3, 3, 3, 4))) for rank in ranks}
        op, mode = dice.choice(ALL_OPS), dice.choice(MODES)
        found = HostsRound(KillRound(op, victims, 4, mode, dice.choice((1, 1, 100, LONG))), placement)
        if not is_outvoted(found) or dice.random() < 0.1:  # these take seconds
            yield found


def play(pool: Pool, what: HostsRound) -> tuple[list[float], int]:
    """Run one round and check it; return the survivors' times in ms, and how many points were not on the way."""
    spec, placement = what
    workers = pool.hire(spec.num_ranks)
    try:
        with pool.folder() as folder:
            for rank, worker in enumerate(workers):
                worker.start(on_host, rank, folder, spec, placement, timeout_s=ROUND_S)
            results = collect(workers, set(spec.victims), ROUND_S)
            records = {rank: kill_points.read_record(f"{folder}/kill{rank}") for rank in spec.victims}
    finally:
        pool.release(workers)
    histories: list[list[Entry]] = [result for result in results if result != DEAD]
    if not is_outvoted(what):
        _check_that_it_goes_on(what, histories)
    else:
        _check_that_it_stops(what, histories)
    alive = {placement[rank] for rank in range(spec.num_ranks) if rank not in spec.victims}
    num_stale = remove_stale(Path(pool.runtime_folder))  # as the next job on that host does
    assert num_stale <= len(set(placement) - alive), f"{num_stale} folders of jobs are stale, of hosts {alive} too"
    left = leaks(pool)
    assert not left, f"left behind: {left}"
    times = []
    for victim, (when_ns, _) in records.items():
        found = [first_without(history, victim) for history in histories]
        times += [(entry.ended_ns - when_ns) / 1e6 for entry in found if entry is not None and entry.ended_ns > when_ns]
    return times, sum(not hit for _, hit in records.values())


def is_outvoted(what: HostsRound) -> bool:
    """Return whether the victims whose hosts are lost may outvote who is left: nobody knows whether they are dead."""
    spec, placement = what
    left = {rank for rank in range(spec.num_ranks) if rank not in spec.victims}
    told = {rank for rank in spec.victims if placement[rank] in {placement[other] for other in left}}
    return not has_quorum(range(spec.num_ranks), told, left)


def _check_that_it_stops(what: HostsRound, histories: list[list[Entry]]) -> None:
    """See that who is outvoted has no results from some call on, or goes on: the deaths may have been told in time."""
    kinds = {entry.status for history in histories for entry in history}
    if "NoQuorumError" not in kinds:
        _check_that_it_goes_on(what, histories)
        return
    for history in histories:
        first = next(i for i, entry in enumerate(history) if entry.status == "NoQuorumError")
        assert all(entry.status in ("ok", "RankFailedError") for entry in history[:first]), history
        assert all(entry.status in ("NoQuorumError", "CommTimeoutError") for entry in history[first:]), history


def _check_that_it_goes_on(what: HostsRound, histories: list[list[Entry]]) -> None:
    spec, placement = what
    if max(placement) < 2 or not any("lost with its host" in entry.text for history in histories for entry in history):
        check_histories(histories, spec.num_ranks, set(spec.victims))  # else one host may have what another lacks
    for history in histories:
        assert history[-1].status == "ok", f"the group does not work at the end: {history[-1]}"


def run(pool: Pool, rounds: Iterator[HostsRound], num_kills: int, until: float, is_loud: bool = True) -> dict[str, Any]:
    """Run rounds until there were so many kills; return what came of it."""
    told: dict[str, Any] = {"kills": 0, "rounds": 0, "not_on_the_way": 0, "times_ms": [], "violations": []}
    while told["kills"] < num_kills and time.time() < until:
        what = next(rounds)
        try:
            times, num_missed = play(pool, what)
            told["times_ms"] += times
            told["not_on_the_way"] += num_missed
        except AssertionError as exc:
            told["violations"].append((what, str(exc)[:4000]))
            print(f"VIOLATION in {what}\n{str(exc)[:3000]}\n", flush=True)
        told["rounds"] += 1
        told["kills"] += len(what.spec.victims)
        if is_loud and told["rounds"] % 20 == 0:
            print(f"{told['kills']} kills, {len(told['violations'])} violations", flush=True)
    return told


def show(name: str, told: dict[str, Any]) -> None:
    """Print what came of a part."""
    print(
        f"{name}: {told['kills']} kills in {told['rounds']} rounds, {told['not_on_the_way']} points not on the way, "
        f"{len(told['violations'])} violations"
    )
    times = sorted(told["times_ms"])
    if len(times) > 1:
        cuts = statistics.quantiles(times, n=100)
        print(f"  kill to done, ms: p50 {cuts[49]:.1f}, p99 {cuts[98]:.1f}, max {times[-1]:.1f} of {len(times)}")


def main() -> int:
    """Parse the command line, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=0, help="SIGKILLs at every point of every operation")
    parser.add_argument("--host-kills", type=int, default=0, help="whole hosts")
    parser.add_argument("--three", action="store_true", help="of three, not two")
    parser.add_argument("--seed", type=int, default=0, help="of all choices")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no further round after this time")
    args = parser.parse_args()
    few, many = (THREE_HOSTS, THREE_HOSTS) if args.three else (PLACEMENTS[:2], PLACEMENTS)
    until, parts = time.time() + args.limit_s, {}
    with Pool() as pool:
        if args.kills:
            parts["kills"] = run(pool, kill_rounds(args.seed, few), args.kills, until)
        if args.host_kills:
            parts["host kills"] = run(pool, host_kill_rounds(args.seed, many), 2 * args.host_kills, until)
    for name, told in parts.items():
        show(name, told)
    return int(any(told["violations"] for told in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
