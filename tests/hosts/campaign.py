"""The campaign of groups and buffers over hosts: ranks and hosts are killed, cut off and voted out, and all is checked.

    python -m tests.hosts.campaign --kills 300 --host-kills 60 --seed 1
    python -m tests.hosts.campaign --cuts 40 --one-way 20 --zombies 30
    python -m tests.hosts.campaign --ep-kills 200 --ep-host-kills 40 --soak 600

Here are the kills in groups: rounds, kill points and checks are those of `tests/survive`; the ranks say that they are
on several hosts (loopback addresses, `tests/loopback.py`). Every survivor's history is checked against closed forms and
the others'. Cuts (`cuts.py`) and the soak (`soak.py`) have hosts with networks of their own and need root, kills in
dispatch and combine (`ep_kills.py`) do not. Prints what was covered and the times (`bars.py`), and with `--json` keeps
them; the exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness import DEAD, Pool, collect
from tests.loopback import settle
from tests.survive import kill_points
from tests.survive.campaign import first_without
from tests.survive.histories import ALL_OPS, Entry
from tests.survive.rounds import LONG, KillRound, kill_round

from . import bars, cuts, ep_kills, replacements, soak
from .losses import check_leftovers, check_survivors, is_outvoted, is_whole_host, ranks_of

ROUND_S = 60.0
MODES = ("raise", "mask")
PLACEMENTS = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 0, 0, 1))
THREE_HOSTS = ((0, 0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 0))
SIX_RANKS = ((0, 0, 0, 1, 1, 1), (0, 0, 0, 0, 1, 1), (0, 0, 1, 1, 2, 2))


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
        for op, mode, placement in itertools.product(ALL_OPS, MODES, placements):
            num_ranks = len(placement)
            for victim in range(num_ranks):
                length = dice.choice((1, 100, LONG)) if lap else 1
                for point in kill_points.POINTS:
                    rounds.append(HostsRound(KillRound(op, {victim: (point, 3)}, num_ranks, mode, length), placement))
                for point in kill_points.AGREE_POINTS:
                    first = dice.choice([rank for rank in range(num_ranks) if rank != victim])
                    victims = {first: (dice.choice(("before_send", "after_tag")), 3), victim: (point, 0)}
                    rounds.append(HostsRound(KillRound(op, victims, num_ranks, mode, length), placement))
        dice.shuffle(rounds)
        yield from rounds


def host_kill_rounds(seed: int, placements: Sequence[tuple[int, ...]] = PLACEMENTS) -> Iterator[HostsRound]:
    """Yield rounds in which all ranks of a host die, each at a point of its own."""
    dice = random.Random(seed)
    while True:
        placement = dice.choice(placements)
        ranks = sorted(ranks_of(placement, dice.randrange(1 + max(placement))))
        victims = {rank: (dice.choice(kill_points.POINTS), dice.choice((3, 3, 3, 4))) for rank in ranks}
        op, mode, length = dice.choice(ALL_OPS), dice.choice(MODES), dice.choice((1, 1, 100, LONG))
        if not is_outvoted(placement, victims) or dice.random() < 0.1:  # these take seconds
            yield HostsRound(KillRound(op, victims, len(placement), mode, length), placement)


def play(pool: Pool, what: HostsRound) -> dict[str, Any]:
    """Run one round and check it; return the survivors' times in ms, and how many points were not on the way."""
    spec, placement = what
    workers = pool.hire(spec.num_ranks)
    try:
        with pool.folder() as folder:
            for rank, worker in enumerate(workers):
                worker.start(on_host, rank, folder, spec, placement, timeout_s=ROUND_S)
            results = collect(workers, set(spec.victims), ROUND_S)
            records = {rank: kill_points.read_record(f"{folder}/kill{rank}") for rank in spec.victims}
    except AssertionError:
        for worker in workers:
            worker.result = None  # one that was to die may live: not to be used again
        raise
    finally:
        pool.release(workers)
    histories: list[list[Entry]] = [result for result in results if result != DEAD]
    if is_stopped := is_outvoted(placement, spec.victims):
        is_stopped = _check_that_it_stops(what, histories)
    else:
        check_survivors(histories, 1 + max(placement), spec.num_ranks, set(spec.victims))
    check_leftovers(pool, placement, spec.victims)
    times = []
    for victim, (when_ns, _) in records.items() if not is_stopped else ():
        found = [first_without(history, victim) for history in histories]
        times += [(entry.ended_ns - when_ns) / 1e6 for entry in found if entry is not None and entry.ended_ns > when_ns]
    kind = "host killed" if is_whole_host(placement, spec.victims) else "process killed"
    return {
        "kills": len(spec.victims),
        "not_on_the_way": sum(not hit for _, hit in records.values()),
        "stopped": int(is_stopped),
        "times_ms": {kind: times},
        "covered": {f"{spec.op} {point} {rank} {spec.mode} {placement}" for rank, (point, _) in spec.victims.items()},
    }


def _check_that_it_stops(what: HostsRound, histories: list[list[Entry]]) -> bool:
    """See that who is outvoted has no results from some call on; false: it goes on, the deaths were told in time."""
    kinds = {entry.status for history in histories for entry in history}
    if "NoQuorumError" not in kinds:
        check_survivors(histories, 1 + max(what.placement), what.spec.num_ranks, set(what.spec.victims))
        return False
    for history in histories:
        first = next(i for i, entry in enumerate(history) if entry.status == "NoQuorumError")
        assert all(entry.status in ("ok", "RankFailedError") for entry in history[:first]), history
        assert all(entry.status in ("NoQuorumError", "CommTimeoutError") for entry in history[first:]), history
    return True


def run(
    name: str,
    rounds: Iterator[Any],
    play_one: Callable[[Any], dict[str, Any]],
    goal: tuple[str, float],
    until: float,
) -> dict[str, Any]:
    """Run rounds until what they tell adds up to a goal, or it is `until`; a violation is kept, and counts as one."""
    what_counts, number = goal
    told: dict[str, Any] = {"rounds": 0, what_counts: 0, "violations": [], "times_ms": {}, "covered": set()}
    while told[what_counts] < number and time.time() < until:
        what = next(rounds)
        told["rounds"] += 1
        try:
            found = play_one(what)
        except AssertionError as exc:
            told["violations"].append((what, str(exc)))
            told[what_counts] += what_counts != "rounds"
            print(f"VIOLATION in {name}: {what}\n{str(exc)[:6000]}\n", flush=True)
            continue
        for kind, times in found.pop("times_ms", {}).items():
            told["times_ms"].setdefault(kind, []).extend(times)
        told["covered"] |= found.pop("covered", set())
        for key, value in found.items():
            told[key] = told.get(key, 0) + value
        if told["rounds"] % 20 == 0:
            print(f"{name}: {told['rounds']} rounds, {len(told['violations'])} violations", flush=True)
    return told


def main() -> int:
    """Parse the command line, run, report."""
    args = _parse()
    placements = SIX_RANKS if args.six else THREE_HOSTS if args.three else PLACEMENTS
    few = placements if args.six or args.three else PLACEMENTS[:2]
    suffix = ", six ranks" if args.six else ", three hosts" if args.three else ""
    until, parts = time.time() + args.limit_s, {}
    machine = bars.facts()

    def part(name: str, number: float, what: str, rounds: Iterator[Any], play_one: Any) -> None:
        if number:
            began = time.monotonic()
            told = run(name, rounds, play_one, (what, number), until)
            parts[name] = bars.summary(told, sys.argv[1:], time.monotonic() - began)

    with Pool() as pool:

        def kill(what: HostsRound) -> dict[str, Any]:
            return play(pool, what)

        def ep_kill(what: ep_kills.EpRound) -> dict[str, Any]:
            return ep_kills.play(pool, what)

        part("kills" + suffix, args.kills, "kills", kill_rounds(args.seed, few), kill)
        part("host kills" + suffix, args.host_kills, "rounds", host_kill_rounds(args.seed, placements), kill)
        part("ep kills", args.ep_kills, "kills", ep_kills.rounds(args.seed, False), ep_kill)
        part("ep host kills", args.ep_host_kills, "rounds", ep_kills.rounds(args.seed, True), ep_kill)
    for name, number in (("cut", args.cuts), ("one way", args.one_way), ("zombie", args.zombies)):
        part(cuts.NAMES[name], number, "rounds", cuts.rounds(args.seed, name), cuts.play)
    part("replacements", args.replacements, "replacements", replacements.rounds(args.seed), replacements.play)
    part("soak", args.soak, "soak_s", soak.rounds(args.seed, args.soak), soak.play)
    bars.show(parts, machine)
    if args.json:
        bars.write(parts, machine, Path(args.json))
    return int(any(told["violations"] for told in parts.values()))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in (
        ("kills", "SIGKILLs at every point of every operation"),
        ("host-kills", "whole hosts"),
        ("ep-kills", "SIGKILLs in dispatch and combine, of both classes of buffers"),
        ("ep-host-kills", "whole hosts, in dispatch and combine"),
        ("cuts", "hosts that are cut off from all others"),
        ("one-way", "cuts in one direction"),
        ("zombies", "hosts that are cut or stopped, voted out, and come back"),
        ("replacements", "deaths and replacements, on any host"),
        ("soak", "seconds over a network that loses and delays"),
        ("seed", "of all choices"),
    ):
        parser.add_argument(f"--{name}", type=int, default=0, help=text)
    parser.add_argument("--three", action="store_true", help="kills in groups on three hosts, not two")
    parser.add_argument("--six", action="store_true", help="kills in groups of six ranks: 3 + 3, 4 + 2, 2 + 2 + 2")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no further round after this time")
    parser.add_argument("--json", nargs="?", const=str(bars.RESULTS), help=f"keep the numbers ({bars.RESULTS.name})")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
