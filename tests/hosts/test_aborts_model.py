"""Every order in which stores, frames, questions and answers of one aborted call can take effect between hosts.

As `tests/backend/test_withdrawal_model.py` for the ranks of one host, where each load and store is a step of its own.
Here a rank's stores reach its own host at once, and each other host in order, at any later time. A rank that has
aborted asks the other hosts; a question arrives behind its stores, and its answer can be of any time from then on.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from epee.engine.outbox import COMPLETES
from epee.view.protocol.withdrawal import End, Stance, end_behind
from tests.backend.test_withdrawal_model import CALL_TAG, stance

PUBLISH, READ, RECHECK, DECIDE, GIVE_UP, LOOK, FAILED, DONE = range(8)
OPEN_WORDS = ((0, 0), (CALL_TAG, 0), (0, CALL_TAG))  # header and mark behind so many stores
ABORTED = len(OPEN_WORDS) - 1


class Rank(NamedTuple):
    """What a rank does next, at which of its peers, and what it knows of them; `sent`: how many stores it has made."""

    place: int = PUBLISH
    position: int = 0
    sent: int = 0
    has_decided: bool = False
    is_repeated: bool = False
    known: tuple[Stance | None, ...] = ()


class World(NamedTuple):
    """All ranks, and how many stores of each have come to each host."""

    ranks: tuple[Rank, ...]
    arrived: tuple[tuple[int, ...], ...]


class Model:
    """The steps of ranks with a placement; rank 0 is late.

    Args:
        repeats: whether a missing part is asked about again; else the search stops at the first unlike end.

    Attributes:
        ends: per way in which all can have ended, whether each rank has completed the call.
        num_worlds: how many states there are.
    """

    def __init__(self, placement: tuple[int, ...], repeats: bool = True) -> None:
        self.placement = placement
        self.num_hosts = max(placement) + 1
        self.is_repeated = not repeats or self.num_hosts <= 2
        early = Rank(READ, sent=1, known=(None,) * len(placement))
        late = early._replace(place=PUBLISH, sent=0)
        start = World(
            (late, *(early,) * (len(placement) - 1)),
            tuple(
                tuple(int(rank and host == here) for host in range(self.num_hosts))
                for rank, here in enumerate(placement)
            ),
        )
        found, todo = {start}, [start]
        self.ends: set[tuple[bool, ...]] = set()
        while todo and (repeats or all(len(set(end)) == 1 for end in self.ends)):
            world = todo.pop()
            places = [rank.place for rank in world.ranks]
            if all(place in (FAILED, DONE) for place in places):
                self.ends.add(tuple(place == DONE for place in places))
            for after in map(self.with_ended_hosts, self.following(world)):
                if after not in found:
                    found.add(after)
                    todo.append(after)
        self.num_worlds = len(found)

    def following(self, world: World) -> list[World]:
        """Return what a world can become in one step."""
        after = []
        for me, rank in enumerate(world.ranks):
            for host, count in enumerate(world.arrived[me]):
                if count < rank.sent:
                    row = list(world.arrived[me])
                    row[host] += 1
                    after.append(world._replace(arrived=self.put(world.arrived, me, tuple(row))))
            for changed in self.steps(world, me, rank):
                arrived = list(world.arrived[me])
                arrived[self.placement[me]] = changed.sent
                after.append(World(self.put(world.ranks, me, changed), self.put(world.arrived, me, tuple(arrived))))
        return after

    def with_ended_hosts(self, world: World) -> World:
        """Return the world where everything has come to hosts whose ranks have all ended: when it does is no matter."""
        places = {(self.placement[me], rank.place in (FAILED, DONE)) for me, rank in enumerate(world.ranks)}
        ended = {host for host in range(self.num_hosts) if (host, False) not in places}
        if not ended:
            return world
        arrived = tuple(
            tuple(rank.sent if host in ended else count for host, count in enumerate(row))
            for rank, row in zip(world.ranks, world.arrived, strict=True)
        )
        return world._replace(arrived=arrived)

    @staticmethod
    def put(row: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
        """Return the row with another value at an index."""
        return (*row[:index], value, *row[index + 1 :])

    def steps(self, world: World, me: int, rank: Rank) -> list[Rank]:
        """Return what a rank can be behind its next step."""
        peers = [peer for peer in range(len(self.placement)) if peer != me]
        here = self.placement[me]
        if rank.place == PUBLISH:
            return [rank._replace(place=READ, sent=1)]
        if rank.place == READ:  # one step: a header that has been there is there still, or has been revoked
            has_all = all(world.arrived[peer][here] for peer in peers)
            return [rank._replace(place=RECHECK)] if has_all else [rank._replace(place=GIVE_UP)]  # its time has passed
        if rank.place == RECHECK:
            if world.arrived[peers[rank.position]][here] == ABORTED:
                return [rank._replace(place=GIVE_UP, position=0)]
            if rank.position + 1 < len(peers):
                return [rank._replace(position=rank.position + 1)]
            return [rank._replace(place=DECIDE, position=0)]
        if rank.place == DECIDE:
            return [rank._replace(place=DONE, has_decided=True)]
        if rank.place == GIVE_UP:
            return [rank._replace(place=LOOK, sent=2, is_repeated=self.is_repeated)]
        return self.looks(world, me, rank, peers) if rank.place == LOOK else []

    def looks(self, world: World, me: int, rank: Rank, peers: list[int]) -> list[Rank]:
        """Return what a rank can be that has taken a host's answer, or has judged what it knows."""
        after = []
        stances = {peer: self.sight(world, me, rank, peer) for peer in peers}
        for host in {self.placement[peer] for peer in peers if stances[peer] is None}:
            if world.arrived[me][host] == ABORTED:
                told = [
                    self.own(world.ranks[peer]) if self.placement[peer] == host else known
                    for peer, known in enumerate(rank.known)
                ]
                after.append(rank._replace(known=tuple(told)))
        end = end_behind(stances, (), rank.is_repeated).end
        if end in (End.COMPLETES, End.FAILED):
            after.append(rank._replace(place=DONE if end is End.COMPLETES else FAILED, known=()))
        elif None not in stances.values():  # it asks again
            after.append(rank._replace(is_repeated=True, known=(None,) * len(self.placement)))
        return after

    def own(self, rank: Rank) -> Stance:
        """Return the state that a rank's own words show."""
        header, mark = OPEN_WORDS[rank.sent]
        return stance(header, COMPLETES if rank.has_decided else mark)

    def sight(self, world: World, me: int, rank: Rank, peer: int) -> Stance | None:
        """Return what a rank knows of a peer: its words, where they have come here that it has aborted, the answer."""
        if self.placement[peer] == self.placement[me]:
            return self.own(world.ranks[peer])
        has_aborted = OPEN_WORDS[world.arrived[peer][self.placement[me]]][1] == CALL_TAG
        return Stance.GAVE_UP if has_aborted else rank.known[peer]


@pytest.mark.parametrize(
    "placement", [(0, 0, 0), (0, 0, 1), (0, 1, 1), pytest.param((0, 1, 2), marks=pytest.mark.slow)]
)
def test_all_ranks_complete_a_call_or_none_does(placement: tuple[int, ...]) -> None:
    model = Model(placement)
    assert model.ends == {(True,) * 3, (False,) * 3}
    assert model.num_worlds > 100


def test_among_three_hosts_a_part_that_an_early_answer_misses_can_complete_the_call_elsewhere() -> None:
    assert any(len(set(end)) == 2 for end in Model((0, 1, 2), repeats=False).ends)
