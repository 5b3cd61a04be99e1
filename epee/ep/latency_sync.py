"""How the ranks of a latency buffer agree on who takes part: one decision per round, in memory that outlives its owner.

Each rank judges its peers alone while calls run, so masks may differ. `Agreement.sync` makes them equal again:

1. A rank says hello, on its card, for the round after the last decided one: its call number and whom it counts on.
2. It waits until all members that are not dead have said hello, and everybody who is expected for the first time
   (`latency_rejoin.py`), or the time is over. A rank that everybody present counts out is waited for only shortly.
   Meanwhile it looks for new processes and maps their memory.
3. Whoever comes first takes the lock of the table, looks again whether the round is decided, and if not writes the
   decision: the ranks that said hello and live, and the highest of their call numbers, from which all of them go on.

The table stays mapped when processes end; the kernel drops the lock of a holder that dies, and the next one looks
again. So there is one decision per round. It needs more than half of the last decided members that are not lost, or
exactly half with the lowest of them: those who were cut off cannot decide alone, and learn it (`NoQuorumError`). A
member is lost when its process is proved dead, or when the view has given its rank to another one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from ..errors import NoQuorumError, context
from .latency_card import bit_of
from .latency_rejoin import Kin
from .latency_table import Decision, word_of

_GRACE_S = 0.05  # how long a rank is waited for that everybody present counts out


class Agreement:
    """Decides in rounds who takes part.

    Args:
        kin: the processes and memory of the buffer's ranks.
        interrupt: called while waiting; raises to end the wait.
    """

    def __init__(self, kin: Kin, interrupt: Callable[[], None]) -> None:
        self._kin = kin
        self._table = kin.table
        self._card = kin.card
        self._rank = kin.rank
        self._num_ranks = kin.config.num_ranks
        self._interrupt = interrupt

    def sync(self, active: Sequence[bool], seq: int, deadline: float) -> Decision:
        """Take part in rounds until one has this rank. What was decided is to be committed (`Kin.commit`).

        Args:
            active: whom this rank counts on.
            seq: its last call.
            deadline: `time.monotonic()` value.

        Raises:
            NoQuorumError: those who came are too few to decide, or the others decided without this rank.
            EvictedError: another process has this rank.
            CommTimeoutError: the rank that decides does not get on.
        """
        table = self._table
        started = time.monotonic()
        while True:
            before = table.round
            last = table.read(before)
            try:
                self._kin.look(before, deadline, self._interrupt)
                self._card.say_hello(before + 1, seq, active, self._kin.expected(last))
                table.wake()
                self._wait(last, seq, started, deadline)
                if table.round == before:
                    self._decide(last, seq, deadline)
            except BaseException:
                self._card.take_back()  # nobody is to count on this rank any more
                raise
            decision = table.read(before + 1)
            if decision.members[self._rank]:
                return decision
            if time.monotonic() > deadline:
                where = context("sync", rank=self._rank, seq=seq, elapsed=time.monotonic() - started)
                raise NoQuorumError(
                    f"{where}: the other ranks agreed without this one, which came too late; call sync again when "
                    "they do",
                    [rank for rank, is_member in enumerate(decision.members) if not is_member],
                    "sync",
                )

    def _present(self, number: int) -> list[int]:
        """Return the ranks that have come to a round and live, ascending."""
        dead = self._kin.dead()
        cards = self._kin.cards
        return [rank for rank in sorted(cards) if cards[rank].has_come(number) and rank not in dead]

    def _missing(self, last: Decision, present: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return who has not come: those whom somebody counts on or expects, and the others."""
        cards, kin = self._kin.cards, self._kin
        active = [cards[rank].active() for rank in present]
        expected = [cards[rank].expected() for rank in present]
        needed: list[int] = []
        others: list[int] = []
        for rank in range(self._num_ranks):
            if rank in present:
                continue
            is_wanted = any(bit_of(mask, rank) for mask in active)
            if any(bit_of(mask, rank) for mask in expected):
                needed.append(rank)
            elif last.members[rank] and not kin.is_lost(rank, last):
                (needed if is_wanted else others).append(rank)
        return needed, others

    def _disputed(self, present: Sequence[int]) -> list[int]:
        """Return the present ranks whose memory is not the one that all present ranks have mapped."""
        cards = self._kin.cards
        known = [cards[rank].known() for rank in present]
        return [rank for rank in present if any(words[rank] != cards[rank].serial for words in known)]

    def _wait(self, last: Decision, seq: int, started: float, deadline: float) -> None:
        """Wait until everybody has come who may, the round is decided, or the time is over."""
        table, kin, before = self._table, self._kin, last.number
        while table.round == before:
            present = self._present(before + 1)
            needed, others = self._missing(last, present)
            now = time.monotonic()
            is_ready = not (needed or (others and now < started + _GRACE_S) or self._disputed(present))
            if is_ready or now > deadline:
                return
            self._interrupt()
            if now < started + 0.001:
                os.sched_yield()
            else:
                table.sleep(before)
            kin.look(before, deadline, self._interrupt)
            self._card.expect(kin.expected(last))

    def _decide(self, last: Decision, seq: int, deadline: float) -> None:
        """Write the decision of the round after `last`, unless somebody else does.

        Raises:
            NoQuorumError: too few have come.
            CommTimeoutError: the lock's holder does not get on.
        """
        table, cards, number = self._table, self._kin.cards, last.number + 1
        with table.locked(deadline, self._interrupt):
            if table.round != last.number:
                return
            present = self._present(number)
            disputed = self._disputed(present)
            came = [rank for rank in present if rank not in disputed]
            try:
                self._check_quorum(last, came, seq)
            except NoQuorumError:  # taken back under the lock, so that no decision can have it
                self._card.take_back()
                raise
            processes, serials = list(last.processes), list(last.serials)
            for rank in came:
                processes[rank], serials[rank] = word_of(cards[rank].process), cards[rank].serial
            table.write(
                Decision(
                    number,
                    max(cards[rank].seq for rank in came),
                    last.epoch if serials == last.serials else number,
                    [rank in came for rank in range(self._num_ranks)],
                    processes,
                    serials,
                )
            )

    def _check_quorum(self, last: Decision, present: Sequence[int], seq: int) -> None:
        living = [r for r in range(self._num_ranks) if last.members[r] and not self._kin.is_lost(r, last)]
        came = [rank for rank in living if rank in present]
        if 2 * len(came) > len(living) or (came and 2 * len(came) == len(living) and came[0] == living[0]):
            return
        where = context("sync", rank=self._rank, seq=seq)
        away = [rank for rank in living if rank not in present]
        raise NoQuorumError(
            f"{where}: only ranks {came} of {living} came, too few to decide; call sync again when the others are back",
            away,
            "sync",
            cause="silent",
        )
