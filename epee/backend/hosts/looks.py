"""Looks at words of other hosts as they are now, behind everything that this rank has told: a question, an answer.

Most of the protocol waits for facts that stay true, for which a mirror is as good as the outbox. Giving up a call, or a
message, is different: a rank stores that it gives up, and then looks whether the others had gone on before (`engine/
withdrawal.py`, `p2p/channel.py`). On one host the look is a load behind a fence. Between hosts it is a question on the
same stream as the store: the gateway on the other host has applied the store to its mirror, puts a fence and loads the
words of its own host's ranks. So of two ranks on different hosts, one that gives up and one that goes on, at least one
sees the other, as on one host.

An answer is older than the next thing that a rank over there does. Who is still undecided is asked again (`AGAIN_S`).
Where the link is lost no answer comes; the caller's time-outs end that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...link.frames import MAX_ASKED
from ...link.poller import Links
from ...link.topology import Topology
from .mirror import Ear

AGAIN_S = 0.002
_MAX_OPEN = 256  # questions that are remembered; the oldest goes, and is asked again if somebody still wants it

Answers = dict[int, dict[int, int]]  # rank -> word -> value


class _Look:
    """What is known about one matter on one host."""

    def __init__(self) -> None:
        self.number = 0
        self.asked_at = 0.0
        self.words: Answers | None = None


class Looks:
    """The questions of one rank, numbered from `first` on. One thread at a time."""

    def __init__(self, topology: Topology, links: Links, ears: dict[int, Ear], first: int = 0) -> None:
        self._topology = topology
        self._gateways = topology.gateways()
        self._links = links
        self._ears = ears
        self._number = first
        self._open: dict[tuple[object, int], _Look] = {}

    def at(self, peer: int, indices: Sequence[int], about: object) -> dict[int, int] | None:
        """Return words of a rank of another host, as they were behind this rank's stores about a matter; None: not yet.

        All ranks of that host are asked at once. Whoever calls again gets newer words as they come.

        Args:
            peer: the rank.
            indices: of its words.
            about: the matter; the store that the look must be behind was made before the first call about it.
        """
        host = self._topology.host_of[peer]
        look = self._open.get((about, host))
        if look is None:
            look = self._open[about, host] = _Look()
            while len(self._open) > _MAX_OPEN:
                self._forget(next(iter(self._open)))
        self._take(look, host, indices)
        now = time.monotonic()
        if not look.number and now - look.asked_at >= AGAIN_S:
            self._ask(look, host, indices, now)
        return None if look.words is None else look.words[peer]

    def _forget(self, key: tuple[object, int]) -> None:
        old, ear = self._open.pop(key), self._ears[self._gateways[key[1]]]
        ear.asked.discard(old.number)
        ear.told.pop(old.number, None)

    def _take(self, look: _Look, host: int, indices: Sequence[int]) -> None:
        told = self._ears[self._gateways[host]].told
        if look.number not in told:
            return
        values, ranks = told.pop(look.number), self._topology.hosts[host]
        look.number = 0
        if len(values) == len(ranks) * len(indices):
            rows = (values[first : first + len(indices)] for first in range(0, len(values), len(indices)))
            look.words = {rank: dict(zip(indices, row, strict=True)) for rank, row in zip(ranks, rows, strict=True)}

    def _ask(self, look: _Look, host: int, indices: Sequence[int], now: float) -> None:
        ranks = self._topology.hosts[host]
        assert len(ranks) * len(indices) <= MAX_ASKED
        self._number += 1
        look.number, look.asked_at = self._number, now
        self._ears[self._gateways[host]].asked.add(look.number)
        self._links.ask(self._gateways[host], [(rank, index) for rank in ranks for index in indices], look.number)
