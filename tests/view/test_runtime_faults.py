"""Random faults on real processes: whatever is killed, stopped, joined or left in whatever order, there is one history.

A step may have several faults, with pauses that let one fall into the agreement about the one before; it ends when all
who should be in the view have the same one. A seed names a run; its faults are the same each time, the interleaving is
not.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.view.runtime_processes import EVICT, LANE, Group, Rank, group, same_history, settle

MAX_RANKS = 6


class Chaos:
    """A group under fire."""

    def __init__(self, job: Group, rng: random.Random) -> None:
        self.job, self.rng = job, rng
        self.ranks = {rank.slot: rank for rank in job.born(rng.randrange(2, 6))}

    def some(self, count: int) -> list[int]:
        return self.rng.sample(sorted(self.ranks), count)

    def pause(self) -> None:
        time.sleep(self.rng.choice((0, 0, 0.002, 0.01, 0.03)))

    def kill(self) -> None:
        """Kill one to all but one, with pauses in which the others begin to agree."""
        for slot in self.some(self.rng.randrange(1, len(self.ranks))):
            self.ranks.pop(slot).signal(signal.SIGKILL)
            self.pause()

    def kill_lowest(self) -> None:
        """Kill the coordinator, then its successor."""
        for slot in sorted(self.ranks)[: min(2, len(self.ranks) - 1)]:
            self.ranks.pop(slot).signal(signal.SIGKILL)
            self.pause()

    def join(self) -> None:
        for slot in [slot for slot in range(MAX_RANKS) if slot not in self.ranks][: self.rng.randrange(1, 3)]:
            new = self.job.joiner(slot)
            new.ask("join", 20.0)
            self.ranks[slot] = new

    def replace_at_once(self) -> None:
        """A process is restarted faster than its death can be seen."""
        (slot,) = self.some(1)
        self.ranks[slot].signal(signal.SIGKILL)
        new = self.job.joiner(slot)
        new.ask("join", 20.0)
        self.ranks[slot] = new

    def kill_while_joining(self) -> None:
        """Members, or the joiner, die while it is taken in."""
        slot = next((slot for slot in range(MAX_RANKS) if slot not in self.ranks), None)
        if slot is None:
            return
        new = self.job.joiner(slot)
        new.tell("join", 20.0)
        self.pause()
        if self.rng.random() < 0.3:
            new.signal(signal.SIGKILL)
            return
        if len(self.ranks) > 1:
            self.kill()
        new.answer()
        self.ranks[slot] = new

    def leave(self) -> None:
        (slot,) = self.some(1)
        self.ranks.pop(slot).ask("call", "leave")

    def stop(self) -> None:
        """Stop a minority until it is voted out; its members learn it when they wake up."""
        victims = {slot: self.ranks[slot] for slot in self.some(self.rng.randrange(1, (len(self.ranks) + 1) // 2))}
        for rank in victims.values():
            rank.signal(signal.SIGSTOP)
        live = [rank for slot, rank in self.ranks.items() if slot not in victims]
        self._accuse_until_voted_out(live, set(victims))
        for slot, rank in victims.items():
            del self.ranks[slot]
            rank.signal(signal.SIGCONT)
            deadline = time.monotonic() + 20
            while rank.ask("error") != "EvictedError":
                assert time.monotonic() < deadline, "a zombie does not learn that it was voted out"
                time.sleep(0.01)

    def _accuse_until_voted_out(self, live: list[Rank], victims: set[int]) -> None:
        deadline = time.monotonic() + 25
        while True:
            for rank in live:
                for slot in victims:
                    rank.ask("call", "accuse", slot, LANE, 5, 1 << 40)
            views = [rank.ask("call", "view") for rank in live]
            if all(victims.isdisjoint({member.slot for member in view.members}) for view in views):
                return
            assert time.monotonic() < deadline, "the stopped are not voted out"
            time.sleep(0.05)

    def step(self) -> None:
        faults: list[Callable[[], None]] = [self.join, self.kill_while_joining]
        if len(self.ranks) > 1:
            faults += [self.kill, self.kill_lowest, self.replace_at_once, self.leave]
        if len(self.ranks) > 2:
            faults += [self.stop]
        self.rng.choice(faults)()
        settle(list(self.ranks.values()), set(self.ranks))

    def check(self) -> None:
        ranks = list(self.ranks.values())
        same_history(ranks)
        assert not any(rank.ask("lane_facts")[0] for rank in ranks), "no group_id stays frozen"


def run_seed(folder: Path, seed: int, num_faults: int) -> None:
    """Run one seed; an assertion says what went wrong."""
    with group(folder, EVICT) as job:
        chaos = Chaos(job, random.Random(seed))
        for _ in range(num_faults):
            chaos.step()
        chaos.check()


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_leave_one_history(tmp_path: Path, seed: int) -> None:
    run_seed(tmp_path / "run", seed, 12)
