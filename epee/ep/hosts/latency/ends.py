"""The common end of a call without a mask on all ranks of several hosts, by the words of `control/withdrawal.py`.

Each rank writes its own words only. A rank that aborts a call sends that to all hosts, after the word that it had
gathered an earlier one. Then it reads the words of the others: on its own host directly, on another one by a query on
the same stream (`engine/replication/looks.py`), which is answered after the words sent before it: the word is in the
mirror there, followed by a fence. A rank that continues reads the mirrors first. So of two ranks one of which aborts
and the other continues, at least one sees the other, as on one host.

The state of a rank that has not answered is unknown: the call stays open. If the link to it is lost no answer arrives.
The caller gets its error then, which names the lost rank; from the next call on (`GRACE_S` later) it decides nothing
more, because it never rejoins this buffer. Should it have completed the call there, it is the only one.

A crash leaves words as they were, for which the gateway continues to answer queries as long as it lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from ....engine.replication.looks import Looks
from ....link.topology import Topology
from ....view.protocol.withdrawal import GRACE_S, Look, Stance
from ...control.withdrawal import FAILED, GATHERED, GAVE_UP, EndWords


class HostsEndWords(EndWords):
    """The words of all ranks about one call.

    Args:
        rank: this rank.
        words: of each rank, as they are read here.
        line: index of a rank's line for this call, in all of them.
        topology: the placement of the ranks.
        first: index of word 0 of `words` among those of an outbox.
        looks: the queries.
        tell: sends the own line to all hosts.
    """

    def __init__(
        self,
        rank: int,
        words: Mapping[int, memoryview],
        line: int,
        topology: Topology,
        first: int,
        looks: Looks,
        tell: Callable[[], None],
    ) -> None:
        super().__init__(rank, words, lambda _: line, lambda _, __: line)
        self._line, self._first = line, first
        self._topology = topology
        self._looks, self._tell = looks, tell
        self._unheard: set[int] = set()
        self._since = 0.0  # when this rank has first checked

    def give_up(self, mark: int) -> None:
        """As `EndWords.give_up`."""
        super().give_up(mark)
        self._tell()

    def look(self, parity: int, mark: int, dead: Collection[int] = (), absent: Collection[int] = ()) -> Look:
        """As `EndWords.look`; a rank that has not answered, though it may be lost, may have completed the call."""
        self._unheard.clear()
        self._since = self._since or time.monotonic()
        for peer in self._topology.elsewhere:
            if peer not in absent and self._answer_of(peer, mark) is None:
                self._unheard.add(peer)
        is_over = time.monotonic() - self._since >= GRACE_S
        return super().look(parity, mark, [rank for rank in dead if is_over or rank not in self._unheard], absent)

    def _stance_of(self, peer: int, at: int, parity: int, mark: int) -> Stance:
        if self._topology.is_here(peer):
            return super()._stance_of(peer, at, parity, mark)
        told = self._answer_of(peer, mark)
        if told is None:
            return Stance.OPEN
        if told[at + GATHERED] == mark:
            return Stance.COMPLETES
        if told[at + FAILED] >= mark or told[at + GAVE_UP] > mark:
            return Stance.FAILED
        if told[at] != mark:
            return Stance.MISSING
        return Stance.GAVE_UP if told[at + GAVE_UP] == mark else Stance.OPEN

    def _answer_of(self, peer: int, mark: int) -> dict[int, int] | None:
        """Return the line of a rank of another host as of a time after this rank's word; None if it is not here yet."""
        # each is loaded before those that were stored before it
        indices = [self._first + self._line + word for word in (FAILED, GAVE_UP, GATHERED, 0)]
        told = self._looks.at(peer, indices, ("latency", mark))
        return None if told is None else {index - self._first: value for index, value in told.items()}
