"""A short campaign: kills at every point, 8 -> 1, zombies, replacements, bit flips. The long one is `campaign.py`."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import DEAD, Pool, collect, tell

from . import kill_points
from .campaign import Campaign, falls, kill_rounds
from .histories import ALL_OPS, COLLECTIVES, Entry, check_histories, contribution
from .rounds import KillRound

SEED = 20_001
FOREVER = 1e12


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as workers:
        yield workers


@pytest.fixture
def campaign(pool: Pool) -> Iterator[Campaign]:
    """Run what the test asks for; nothing may be wrong, nothing may be left."""
    found = Campaign(pool, is_loud=False)
    yield found
    assert not found.violations, found.violations[0]["error"]
    assert os.listdir(pool.runtime_folder) == []


@pytest.mark.timeout(150)
def test_kills_at_every_point_of_every_operation(campaign: Campaign) -> None:
    points = (*kill_points.POINTS, *kill_points.AGREE_POINTS)
    rounds = {}
    for spec in itertools.islice(kill_rounds(SEED), 660):  # every combination is in here
        point = next(point for point, _ in reversed(spec.victims.values()))
        place = (ALL_OPS.index(spec.op) + points.index(point)) % 2
        if place == 0 or point in kill_points.AGREE_POINTS:
            rounds.setdefault((spec.op if point in kill_points.POINTS else "", point), spec)
    assert {spec.op for spec in rounds.values()} >= set(ALL_OPS)
    assert {point for _, point in rounds} == set(points)
    campaign.kills("kills", itertools.chain(rounds.values(), kill_rounds(SEED)), 60, FOREVER)
    assert campaign.results["kills"]["kills"] >= 60


def test_eight_ranks_become_one(campaign: Campaign) -> None:
    campaign.kills("8 -> 1", falls(SEED), 3 * 7, FOREVER)
    assert campaign.results["8 -> 1"]["kills"] == 21


def test_zombies_find_their_place_taken(campaign: Campaign) -> None:
    campaign.zombies(10, FOREVER, SEED)
    assert campaign.results["zombies"] | {"seconds": 0} == {"rounds": 10, "right": 10, "seconds": 0}


def test_kill_and_replace(campaign: Campaign) -> None:
    campaign.rejoins(10, FOREVER, SEED)
    assert campaign.results["rejoins"]["rejoins"] == 10


def test_bit_flips_in_headers(campaign: Campaign) -> None:
    campaign.flips(500, FOREVER, SEED)
    outcomes = campaign.results["flips"]["outcomes"]
    assert outcomes["ok"] > 0
    assert outcomes["ProtocolError"] > 0
    assert sum(outcomes.values()) == 3 * 500


def test_bit_flips_in_state_words(campaign: Campaign) -> None:
    campaign.flips(200, FOREVER, SEED, states=True)
    outcomes = campaign.results["flips of state words"]["outcomes"]
    assert outcomes["ok"] > 0
    assert sum(outcomes.values()) == 3 * 200


def test_kills_at_random_moments(campaign: Campaign) -> None:
    campaign.soak(4.0, time.time() + 60, SEED, mtbf_s=0.4)
    assert campaign.results["soak"]["kills"] > 0


# ---- the checks themselves


def entry(**changes: object) -> Entry:
    right = Entry(3, "all_reduce", "ok", (), 2, (0, 2), [contribution(0, 3) + contribution(2, 3)], 0.0, 0)
    return right._replace(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"value": [contribution(0, 3)]},
        {"value": [1, 2]},
        {"contributors": (0,)},
        {"status": "CommTimeoutError", "ranks": (1,), "value": []},
        {"status": "RankFailedError", "ranks": (2,), "value": [contribution(0, 3)]},
        {"status": "RankFailedError", "ranks": (1,), "value": [0]},
    ],
)
def test_the_checker_finds(changes: dict[str, object]) -> None:
    check_histories([[entry()]], 3, {1})
    with pytest.raises(AssertionError):
        check_histories([[entry(**changes)]], 3, {1})


def test_the_checker_finds_survivors_that_disagree() -> None:
    other = entry(contributors=(0, 1, 2), value=[sum(contribution(rank, 3) for rank in range(3))], rank=2)
    with pytest.raises(AssertionError, match="disagree"):
        check_histories([[entry()], [other]], 3, {1})


def says_and_fails(text: str) -> None:
    tell(text)
    raise ValueError(text)


def test_a_worker_that_raises_fails_the_round(pool: Pool) -> None:
    workers = pool.hire(2)
    for worker in workers:
        worker.start(says_and_fails, "no")
    with pytest.raises(AssertionError, match="ValueError: no"):
        collect(workers, set(), 20.0)
    assert workers[0].told == ["no"]
    pool.release(workers)


def test_a_victim_that_lives_fails_the_round(pool: Pool) -> None:
    workers = pool.hire(1)
    workers[0].start(os.getpid)
    with pytest.raises(AssertionError, match="rank 0: lives on"):
        collect(workers, {0}, 20.0)
    pool.release(workers)


def test_a_record_names_the_moment(tmp_path: Path, pool: Pool) -> None:
    workers = pool.hire(1)
    began = time.monotonic_ns()
    workers[0].start(record_and_die, str(tmp_path / "kill"))
    assert collect(workers, {0}, 20.0) == [DEAD]
    pool.release(workers)
    when, hit = kill_points.read_record(str(tmp_path / "kill"))
    assert began < when < time.monotonic_ns()
    assert hit


def record_and_die(path: str) -> None:
    kill_points.record_to(path)
    kill_points.die()


def test_every_round_kills_what_it_says() -> None:
    for spec in itertools.islice(kill_rounds(SEED), 660):
        assert isinstance(spec, KillRound)
        assert set(spec.victims) < set(range(spec.num_ranks))
    assert len({(s.op, *s.victims.items(), s.mode) for s in itertools.islice(kill_rounds(SEED), 660)}) == 660
    assert set(COLLECTIVES) < set(ALL_OPS)
