"""What the campaign over hosts draws, and that its checks find what must not be."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.survive.histories import Entry, contribution

from . import bars, campaign, cuts, ep_kills, soak
from .cut_steps import CutRound
from .losses import is_outvoted, is_whole_host, ranks_of, winners

ROUND = CutRound("zombie", (0, 0, 1, 1), 1, 0, "mask", 1, 6.0, 0.0, 0.0, 1)


def call(rank: int, seq: int, contributors: tuple[int, ...] = (0, 1, 2, 3), epoch: int = 1) -> Entry:
    value = [sum(contribution(other, seq) for other in contributors)]
    return Entry(seq, "all_reduce", "ok", (), epoch, contributors, value, 0.0, rank)


def failed(rank: int, status: str) -> Entry:
    return Entry(3, "all_reduce", status, (), 0, (), [contribution(rank, 3)], 0.0, rank)


def histories() -> list[list[Entry]]:
    """Return what the ranks of `ROUND` may have seen."""
    left = [[call(rank, 1), call(rank, 2), call(rank, 3, (0, 1), 2)] for rank in (0, 1)]
    return left + [
        [call(rank, 1), failed(rank, "NoQuorumError"), *[failed(rank, "EvictedError")] * 3] for rank in (2, 3)
    ]


def test_histories_that_may_be_pass() -> None:
    cuts.check(ROUND, histories(), {0, 1})


@pytest.mark.parametrize(
    ("rank", "at", "wrong"),
    [
        (1, 2, call(1, 3, (0, 1, 2, 3), 2)),  # one survivor has the lost ranks in its result
        (1, 1, failed(1, "EvictedError")),  # a survivor is voted out
        (0, 2, call(0, 3, (0, 1), 2)._replace(value=[7])),  # a wrong sum
        (2, 4, failed(2, "NoQuorumError")),  # a zombie does not learn it
        (3, 2, call(3, 3)),  # a zombie has a result after the cut
    ],
)
def test_what_must_not_be_is_found(rank: int, at: int, wrong: Entry) -> None:
    told = histories()
    told[rank][at] = wrong
    with pytest.raises(AssertionError):
        cuts.check(ROUND, told, {0, 1})


def test_a_soak_that_grows_or_loses_somebody_is_found() -> None:
    held = [(30, 4, 100_000)] * 8
    soak.check([{"epoch": 1, "held": held}])
    for bad in (
        {"epoch": 2, "held": held},
        {"epoch": 1, "held": held[:4] + [(31, 4, 100_000)] * 4},
        {"epoch": 1, "held": held[:4] + [(30, 5, 100_000)] * 4},
        {"epoch": 1, "held": held[:4] + [(30, 4, 100_001 + soak.GROWTH_KIB)] * 4},
    ):
        with pytest.raises(AssertionError):
            soak.check([bad])


def test_who_goes_on() -> None:
    assert winners((0, 0, 1, 1), 1) == winners((0, 0, 1, 1), 0) == {0, 1}
    assert winners((0, 1, 1, 1), 0) == {1, 2, 3}
    assert winners((0, 0, 1, 2), 0) == {0, 1}
    assert is_outvoted((0, 0, 1, 1), {0, 1})
    assert not is_outvoted((0, 0, 1, 1), {2, 3})
    assert not is_outvoted((0, 1, 1, 1), {1, 2})
    assert is_whole_host((0, 1, 1, 1), {0})
    assert not is_whole_host((0, 1, 1, 1), {1, 2})
    assert ranks_of((0, 1, 0, 1), 1) == {1, 3}


@pytest.mark.parametrize("name", cuts.NAMES)
def test_cuts_are_of_all_kinds_and_sizes(name: str) -> None:
    drawn = list(itertools.islice(cuts.rounds(1, name), 200))
    assert {spec.placement for spec in drawn} == set(cuts.PLACEMENTS)
    assert {spec.mode for spec in drawn} == {"raise", "mask"}
    assert {spec.kind for spec in drawn} == ({"zombie", "stopped"} if name == "zombie" else {name})
    for spec in drawn:
        if spec.kind == "stopped":
            assert not ranks_of(spec.placement, spec.host) & winners(spec.placement, spec.host)


@pytest.mark.parametrize("is_host", [False, True])
def test_kills_in_dispatch_and_combine_leave_a_quorum_and_cover_all_points(is_host: bool) -> None:
    drawn = list(itertools.islice(ep_kills.rounds(1, is_host), 1000))
    assert {spec.kind for spec in drawn} == {"points", "throughput", "latency"}
    assert {spec.placement for spec in drawn} == {*ep_kills.PLACEMENTS, *ep_kills.SIX_RANKS}
    points = {point for spec in drawn if spec.kind == "points" for _, point in spec.victims.values()}
    assert points == {*ep_kills.POINTS, ep_kills.BETWEEN}
    for spec in drawn:
        assert not is_outvoted(spec.placement, spec.victims)
        assert not is_host or is_whole_host(spec.placement, spec.victims)


def test_rounds_of_six_ranks_have_all_of_them_as_victims() -> None:
    drawn = list(itertools.islice(campaign.kill_rounds(1, campaign.SIX_RANKS), 2000))
    assert {what.spec.num_ranks for what in drawn} == {6}
    assert {rank for what in drawn for rank in what.spec.victims} == set(range(6))


def test_a_file_of_results_keeps_the_parts_of_other_runs(tmp_path: Path) -> None:
    told = {"rounds": 2, "violations": [("what", "why")], "times_ms": {"host cut": [3.0, 1.0]}, "covered": {"a", "b"}}
    part = bars.summary(told, ["--cuts", "2", "--json", str(tmp_path)], 4.0)
    assert part["command"].endswith("--cuts 2")
    assert part["times_ms"] == {"host cut": {"p50": 1.0, "p99": 3.0, "max": 3.0, "samples": 2}}
    assert (part["combinations"], part["violations"]) == (2, ["'what'"])
    machine = {"load_average_1min_before": 1.0}
    bars.write({"cuts": part}, machine, tmp_path / "found.json")
    bars.write({"kills": part}, machine, tmp_path / "found.json")
    assert set(json.loads((tmp_path / "found.json").read_text())["parts"]) == {"cuts", "kills"}
