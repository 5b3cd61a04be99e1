"""Who shares a host and who receives for whom: properties of every placement, and the key of a host."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epee.errors import InvalidArgument
from epee.link.topology import Topology
from epee.view.process.machine import KEY_DIGITS, own_host_key

placements = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=24)


def views(keys: list[str]) -> list[Topology]:
    return [Topology(rank, keys) for rank in range(len(keys))]


@given(placements)
def test_hosts_are_a_partition_numbered_by_their_lowest_rank(keys: list[str]) -> None:
    for topology in views(keys):
        assert sorted(rank for ranks in topology.hosts for rank in ranks) == list(range(len(keys)))
        assert all(list(ranks) == sorted(ranks) for ranks in topology.hosts)
        assert [ranks[0] for ranks in topology.hosts] == sorted(ranks[0] for ranks in topology.hosts)
        assert topology.num_hosts == len(set(keys))
        assert topology.host == topology.host_of[topology.rank]
        assert topology.rank in topology.here
        assert sorted(topology.here + topology.elsewhere) == list(range(len(keys)))
        for rank, key in enumerate(keys):
            assert topology.is_here(rank) == (key == keys[topology.rank])
            assert rank in topology.hosts[topology.host_of[rank]]


@given(placements)
def test_all_ranks_see_the_same_hosts_and_gateways(keys: list[str]) -> None:
    seen = views(keys)
    assert len({(topology.hosts, topology.host_of) for topology in seen}) == 1
    for source in range(len(keys)):
        for host in range(seen[0].num_hosts):
            if host != seen[0].host_of[source]:
                assert len({topology.gateway(source, host) for topology in seen}) == 1


@given(placements)
def test_a_remote_source_has_one_gateway_on_each_host(keys: list[str]) -> None:
    seen = views(keys)
    for host, ranks in enumerate(seen[0].hosts):
        heard = Counter(source for rank in ranks for source in seen[rank].sources())
        assert heard == Counter(seen[ranks[0]].elsewhere), host
        relayed = Counter(source for rank in ranks for source in seen[rank].relayed())
        assert relayed == Counter(range(len(keys))), host
        assert all(rank in seen[rank].relayed() for rank in ranks)


@given(placements)
def test_gateways_and_sources_are_inverse_and_partners_are_symmetric(keys: list[str]) -> None:
    seen = views(keys)
    for topology in seen:
        assert sorted(topology.gateways()) == [host for host in range(topology.num_hosts) if host != topology.host]
        for host, gateway in topology.gateways().items():
            assert gateway in topology.hosts[host]
            assert topology.rank in seen[gateway].sources()
        for source in topology.sources():
            assert seen[source].gateways()[topology.host] == topology.rank
        for partner in topology.partners():
            assert topology.rank in seen[partner].partners()
        assert topology.rank not in topology.partners()
        assert list(topology.partners()) == sorted(set(topology.partners()))
        assert not any(topology.is_here(partner) for partner in topology.partners())


@given(placements)
def test_the_work_of_gateways_is_spread_evenly(keys: list[str]) -> None:
    seen = views(keys)
    for topology in seen:
        for host, ranks in enumerate(topology.hosts):
            if host == topology.host:
                continue
            loads = [sum(topology.gateway(source, host) == rank for source in topology.here) for rank in ranks]
            assert max(loads) - min(loads) <= 1


@given(st.integers(1, 6), st.integers(2, 4), st.randoms(use_true_random=False))
def test_hosts_of_one_size_are_joined_by_rails(num_per_host: int, num_hosts: int, shuffle: object) -> None:
    keys = [chr(97 + host) for host in range(num_hosts)] * num_per_host
    shuffle.shuffle(keys)
    for topology in views(keys):
        position = topology.here.index(topology.rank)
        assert topology.partners() == tuple(sorted(topology.gateways().values())) == topology.sources()
        for host, gateway in topology.gateways().items():
            assert topology.hosts[host].index(gateway) == position
            assert topology.gateway(gateway, topology.host) == topology.rank


def test_one_host_has_nobody_elsewhere() -> None:
    topology = Topology(1, ["k"] * 4)
    assert (topology.elsewhere, topology.gateways(), topology.sources(), topology.partners()) == ((), {}, (), ())


def test_one_rank_alone_hears_for_three() -> None:
    alone, three = Topology(0, ["a", "b", "b", "b"]), Topology(3, ["a", "b", "b", "b"])
    assert alone.sources() == alone.partners() == (1, 2, 3)
    assert alone.gateways() == {1: 1}
    assert three.gateways() == {0: 0}
    assert three.sources() == ()


def test_a_host_key_is_the_same_for_all_processes_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPEE_HOST_KEY", raising=False)
    key = own_host_key()
    assert key == own_host_key()
    assert len(key) == KEY_DIGITS
    assert int(key, 16) >= 0


def test_a_host_key_of_the_tests_makes_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_TEST", "1")
    keys = set()
    for name in ("", "left", "right"):
        monkeypatch.setenv("EPEE_HOST_KEY", name)
        keys.add(own_host_key())
    assert len(keys) == 3


@pytest.mark.parametrize("value", [None, "0", ""])
def test_a_host_key_outside_of_a_test_is_refused(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.setenv("EPEE_HOST_KEY", "left")
    monkeypatch.delenv("EPEE_TEST", raising=False)
    if value is not None:
        monkeypatch.setenv("EPEE_TEST", value)
    with pytest.raises(InvalidArgument, match=r"EPEE_HOST_KEY is for tests.*EPEE_TEST=1.*unset"):
        own_host_key()


@given(placements, st.integers(0, 7), st.sampled_from("abcx"))
def test_a_placement_with_newcomers_gives_all_the_same_gateways_whatever_they_know(
    keys: list[str], new: int, key: str
) -> None:
    gone = {1} if len(keys) > 2 and new != 1 else set()
    places = {rank: host for rank, host in enumerate(keys) if rank not in gone} | {new: key}
    there = [places.get(rank, "") for rank in range(max(places) + 1)]
    for rank in places:
        fresh = Topology(rank, there)
        old = fresh if rank == new else Topology(rank, keys).moved(places)
        assert old.placement == fresh.placement
        assert old.here == fresh.here
        assert old.elsewhere == fresh.elsewhere
        assert old.sources() == fresh.sources()
        assert all(old.key_of(peer) == places[peer] for peer in places)
        assert [old.host_of[peer] for peer in gone] == [-1] * len(gone)
        for source in old.elsewhere:
            assert old.gateway(source, old.host) == fresh.gateway(source, fresh.host)
