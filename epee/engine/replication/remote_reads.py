"""Remote reads of words of other hosts, ordered behind all stores that this rank has sent: a question, an answer.

Most of the protocol waits for facts that stay true, for which a mirror is as good as the outbox. Aborting a call, or a
message, is different: a rank stores that it aborts, and then reads whether the others had gone on before (`engine/
withdrawal.py`, `p2p/channel.py`). On one host the read is a load behind a fence. Between hosts it is a question on the
same stream as the store: the gateway on the other host has applied the store to its mirror, puts a fence and loads the
words of its own host's ranks. So of two ranks on different hosts, one that aborts and one that goes on, at least one
sees the other, as on one host.

An answer is older than the next store of a rank over there. A rank that is still undecided is asked again (`AGAIN_S`).
If the link is lost, or the gateway there is another now, the question is asked again of the gateway that receives now
(`Routes`): only behind the answer to its FETCH, so it has the store, too. Nothing comes about ranks that no
gateway there has any more; the view decides the matter then, or the caller's timeouts end it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ...link.frames import MAX_ASKED, parse_told
from ...link.poller import Links
from .routes import Routes

AGAIN_S = 0.002
_MAX_OPEN = 256  # questions that are remembered; the oldest is dropped, and asked again if it is still wanted

Words = dict[int, dict[int, int]]  # rank -> word -> value


class Answers:
    """The answers of one gateway: questions that are open, and values that have come and were not taken yet."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._values: dict[int, tuple[int, ...]] = {}

    def expect(self, number: int) -> None:
        """Keep the answer to a question when it comes; no other answer is kept."""
        self._open.add(number)

    def put(self, number: int, payload: bytes) -> None:
        """Note an answer, if it is expected."""
        if number in self._open:
            self._values[number] = parse_told(payload)
            self._open.discard(number)

    def take(self, number: int) -> tuple[int, ...] | None:
        """Return the values of an answer, once; None: it has not come."""
        return self._values.pop(number, None)

    def forget(self, number: int) -> None:
        """Keep no answer to a question any more."""
        self._open.discard(number)
        self._values.pop(number, None)


class _Look:
    """The known answers about one matter on one host."""

    def __init__(self) -> None:
        self.number = 0
        self.gateway = -1  # that was asked
        self.ranks: tuple[int, ...] = ()  # about which
        self.asked_at = 0.0
        self.words: Words | None = None


class RemoteReads:
    """The questions of one rank, numbered from `first` on. One thread at a time.

    Args:
        links: on which questions are sent.
        routes: the gateways that are asked.
        answers: of each gateway.

    Attributes:
        gone: removed ranks, which are asked about no more.
    """

    def __init__(self, links: Links, routes: Routes, answers: Mapping[int, Answers], first: int = 0) -> None:
        self._links, self._routes, self._answers = links, routes, answers
        self._number = first
        self._open: dict[tuple[object, int], _Look] = {}
        self._lost: set[int] = set()  # gateways whose answers will not come; set by the thread of the links
        self.gone: frozenset[int] = frozenset()

    def at(self, peer: int, indices: Sequence[int], about: object) -> dict[int, int] | None:
        """Return words of a rank of another host, as they were behind this rank's stores about a matter; None: not yet.

        All ranks of that host are asked at once. A repeated call returns newer words as they come.

        Args:
            peer: the rank.
            indices: of its words.
            about: the matter; the store that the read must be behind was made before the first call about it.
        """
        host = self._routes.topology.host_of[peer]
        look = self._open.get((about, host))
        if look is None:
            look = self._open[about, host] = _Look()
            while len(self._open) > _MAX_OPEN:
                self._forget(next(iter(self._open)))
        while self._lost:
            self._ask_others(self._lost.pop())
        self._take(look, indices)
        now = time.monotonic()
        if not look.number and now - look.asked_at >= AGAIN_S:
            self._ask(look, host, indices, now)
        return None if look.words is None else look.words.get(peer)

    def forget(self, gateway: int) -> None:
        """Note, from any thread, that no more answers come to the questions sent to a gateway."""
        self._lost.add(gateway)

    def _ask_others(self, gateway: int) -> None:
        for look in self._open.values():
            if look.gateway == gateway:
                look.number, look.gateway, look.asked_at = 0, -1, 0.0

    def _forget(self, key: tuple[object, int]) -> None:
        old = self._open.pop(key)
        answers = self._answers.get(old.gateway)
        if answers is not None:
            answers.forget(old.number)

    def _take(self, look: _Look, indices: Sequence[int]) -> None:
        answers = self._answers.get(look.gateway)
        values, ranks = None if answers is None else answers.take(look.number), look.ranks
        if values is None:
            return
        look.number = 0
        if len(values) == len(ranks) * len(indices):
            rows = (values[first : first + len(indices)] for first in range(0, len(values), len(indices)))
            look.words = {rank: dict(zip(indices, row, strict=True)) for rank, row in zip(ranks, rows, strict=True)}

    def _ask(self, look: _Look, host: int, indices: Sequence[int], now: float) -> None:
        gateway = self._routes.gateways.get(host)
        answers = None if gateway is None else self._answers.get(gateway)
        ranks = tuple(rank for rank in self._routes.topology.hosts[host] if rank not in self.gone)
        if gateway is None or answers is None or not ranks:
            return
        assert len(ranks) * len(indices) <= MAX_ASKED
        self._number += 1
        look.number, look.asked_at, look.gateway, look.ranks = self._number, now, gateway, ranks
        answers.expect(look.number)
        self._links.ask(gateway, [(rank, index) for rank in ranks for index in indices], look.number)
