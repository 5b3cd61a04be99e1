"""`python -m tests.sim --seeds A:B [--jobs N] [--mutant NAME]` runs seeds, `--replay SEED` shows what happens in one.

Ranges of seeds have subjects: from 0 one host, from 2^30 calls that can do without who is lost, from 2^31 several
hosts, from 3 x 2^30 newcomers over hosts, from 2^32 calls with a root, from 5 x 2^30 such calls, several open at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context

from .mutants import MUTANTS
from .plan import make_plan
from .run import Outcome, run_seed


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", metavar="A:B", help="run the seeds from A up to B - 1")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="in so many processes")
    parser.add_argument("--mutant", default="", choices=["", *MUTANTS], help="run with this mistake in the protocol")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed twice and print what happens")
    parser.add_argument("--stop-after", type=int, default=10, metavar="N", help="stop after N seeds that break a rule")
    return parser.parse_args(argv)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()  # a long run may be cut


def _report(outcome: Outcome) -> None:
    for violation in outcome.violations[:3]:
        _say(f"seed {outcome.seed}: {violation.rule}: {violation.text}")


def _replay(seed: int, mutant: str) -> int:
    _say(str(make_plan(seed)))
    first = run_seed(seed, mutant, _say)
    _say("--- records")
    for record in sorted(first.records, key=lambda record: record.time_s):
        _say(str(record))
    second = run_seed(seed, mutant)
    _report(first)
    same = first.fingerprint() == second.fingerprint()
    _say(f"fingerprint {first.fingerprint()}, a second run is {'the same' if same else 'DIFFERENT'}")
    return int(bool(first.violations) or not same)


def _run_short(mutant: str, seed: int) -> Outcome:
    """Run a seed in a process of its own; what it recorded stays there."""
    return run_seed(seed, mutant)._replace(records=())


def _outcomes(seeds: range, mutant: str, jobs: int) -> Iterator[Outcome]:
    if jobs == 1:
        yield from (run_seed(seed, mutant) for seed in seeds)
        return
    with get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(partial(_run_short, mutant), seeds, chunksize=20)


def _run(seeds: range, mutant: str, stop_after: int, jobs: int) -> int:
    began = last = time.monotonic()
    num_bad = num_events = num_decisions = num_seeds = 0
    for outcome in _outcomes(seeds, mutant, jobs):
        num_seeds += 1
        num_events += outcome.num_events
        num_decisions += outcome.num_decisions
        if outcome.violations:
            num_bad += 1
            _report(outcome)
            if num_bad >= stop_after:
                break
        if time.monotonic() - last > 30.0:
            last = time.monotonic()
            clean = f"{num_seeds - num_bad} of {num_seeds} seeds clean"
            _say(f"... up to seed {outcome.seed}: {clean}, {num_bad} bad, {num_seeds / (last - began):.0f}/s")
    seconds = time.monotonic() - began
    _say(
        f"{num_seeds} seeds in {seconds:.1f} s ({num_seeds / seconds:.0f}/s), {num_events} events, "
        f"{num_decisions} decisions, {num_bad} seeds with violations"
    )
    return int(bool(num_bad))


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for; 0 when nothing is wrong."""
    args = _parse(argv)
    if args.replay is not None:
        return _replay(args.replay, args.mutant)
    start, _, stop = args.seeds.partition(":")
    return _run(range(int(start), int(stop or int(start) + 1)), args.mutant, args.stop_after, args.jobs)


if __name__ == "__main__":
    raise SystemExit(main())
