"""The roles between hosts: equal in the eyes of all, always somebody's who lives, unchanged where nobody is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epee.link.topology import Roles, Topology

PLACED = st.lists(st.sampled_from("abcd"), min_size=2, max_size=12)


@st.composite
def views(draw: st.DrawFn) -> tuple[list[str], set[int]]:
    """Return a placement, and who lives."""
    keys = draw(PLACED)
    return keys, draw(st.sets(st.integers(0, len(keys) - 1), min_size=1))


def roles_of_all(keys: list[str], present: set[int]) -> list[Roles]:
    return [Roles(Topology(rank, keys), present) for rank in range(len(keys))]


@given(PLACED)
def test_with_all_present_the_roles_are_those_of_the_topology(keys: list[str]) -> None:
    for roles in roles_of_all(keys, set(range(len(keys)))):
        topology = roles.topology
        assert roles.gateways() == topology.gateways()
        assert roles.partners() == topology.partners()
        assert tuple(rank for rank in topology.elsewhere if roles.is_kept_here(rank)) == topology.sources()
        assert [roles.teller(rank) for rank in range(len(keys))] == list(range(len(keys)))


@given(views())
def test_roles_belong_to_the_living_and_all_agree(view: tuple[list[str], set[int]]) -> None:
    keys, present = view
    everybody = roles_of_all(keys, present)
    for source, key in enumerate(keys):
        for host in range(everybody[0].topology.num_hosts):
            found = {roles.gateway(source, host) for roles in everybody if roles.topology.host_of[source] != host}
            assert len(found) <= 1
            living = {rank for rank in present if everybody[0].topology.host_of[rank] == host}
            assert found <= (living or {None})
        teller = {roles.teller(source) for roles in everybody}
        there = [rank for rank in sorted(present) if keys[rank] == key]
        assert teller == ({source} if source in present else {there[0] if there else None})


@given(views())
def test_each_lost_rank_costs_only_its_own_roles(view: tuple[list[str], set[int]]) -> None:
    """Whose gateway lives keeps it: no mirror is made anew without need."""
    keys, present = view
    before = Roles(Topology(0, keys), set(range(len(keys))))
    after = Roles(Topology(0, keys), present)
    for source in range(len(keys)):
        for host in range(before.topology.num_hosts):
            old = before.gateway(source, host)
            if old in present:
                assert after.gateway(source, host) == old


@given(views())
def test_links_are_wanted_by_both_ends(view: tuple[list[str], set[int]]) -> None:
    keys, present = view
    partners = {rank: Roles(Topology(rank, keys), present).partners() for rank in present}
    for rank, others in partners.items():
        assert all(rank in partners[other] for other in others)
        assert all(keys[rank] != keys[other] for other in others)


def test_who_has_come_after_a_lost_rank_does_not_tell_of_it() -> None:
    keys = ["a", "a", "b", "b"]
    roles = Roles(Topology(0, keys), {0, 1, 2}, {0: 1, 1: 1, 2: 7, 3: 1})
    assert roles.teller(3) is None
    assert not roles.is_witnessed(3)
    assert Roles(Topology(0, keys), {0, 1, 3}, {0: 1, 1: 1, 2: 7, 3: 1}).teller(2) == 3
    assert roles.without({2}).present == {0, 1}
