"""A newcomer tells other hosts what it stores as it arrives: they may have been told all of its outbox before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epee.engine.membership.members import Arrival
from epee.engine.p2p.channel import first_number


class Told:
    """Exports that keep what is told."""

    def __init__(self) -> None:
        self.words: list[tuple[int, int]] = []

    def publish(self, peer_regions: Any, index: int, value: int) -> None:
        """As `Exports.publish`."""
        peer_regions.own[index] = value
        self.words.append((index, value))


def outboxes(told: Told) -> Any:
    """What `Arrival` uses of the outboxes of four ranks, of which this is rank 1."""
    return SimpleNamespace(
        rank=1, peers=(0, 2, 3), own=[0] * 40, verdict_base=[8, 16, 24, 32], exports=told, peer_words=(), own_address=0
    )


@pytest.mark.parametrize("epoch", [2, 7])
def test_a_newcomer_says_to_all_hosts_that_it_reads_the_others_from_the_start(epoch: int) -> None:
    told = Told()
    full = outboxes(told)
    Arrival(full, epoch)
    wanted = first_number(epoch) - 1
    assert wanted > 0
    assert [full.own[index] for index in (8, 24, 32)] == [wanted] * 3
    assert told.words == [(8, wanted), (24, wanted), (32, wanted)]


def test_a_founder_says_nothing() -> None:
    told = Told()
    Arrival(outboxes(told), 0)
    assert told.words == []
