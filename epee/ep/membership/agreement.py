"""How the ranks of a latency buffer agree on who takes part: one decision per round, in memory that outlives its owner.

Each rank judges its peers alone while calls run, so masks may differ. `Agreement.sync` makes them equal again:

1. A rank says hello, on its card, for the round after the last decided one: its call number and whom it counts on.
2. It waits until all members that are not dead have said hello, and everybody who is expected for the first time
   (`rejoin.py`), or the time is over. A rank that everybody present counts out is waited for only shortly.
   Meanwhile it looks for new processes and maps their memory.
3. Whoever comes first takes the lock of the table, looks again whether the round is decided, and if not writes the
   decision: the ranks that said hello and live, and the highest of their call numbers, from which all of them go on.

The table stays mapped when processes end; the kernel drops the lock of a holder that dies, and the next one looks
again. So there is one decision per round. It needs more than half of the last decided members that are not lost, or
exactly half with the lowest of them: those who were cut off cannot decide alone, and learn it (`NoQuorumError`). Who is
taken in has mapped the memory of all others, and they have mapped its (`_agreed`). A member is lost when its process is
proved dead, or when the view has given its rank to another one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from ...errors import NoQuorumError, ProtocolError, context
from .card import bit_of
from .rejoin import Kin
from .table import Decision, word_of

_SEQ_LIMIT = 1 << 62
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
                self._wait(last, started, deadline)
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

    def _has_stayed(self, rank: int, last: Decision) -> bool:
        """Whether a process was in the last decision and has its rank still."""
        return last.members[rank] and not self._kin.is_lost(rank, last)

    def _agreed(self, last: Decision, present: Sequence[int]) -> list[int]:
        """Return the present ranks that have mapped each other's present memory, ascending.

        First those who were in the last decision, less those whose memory one of them lacks. Then each newcomer in
        turn, if it knows all of them and all know it: one that cannot map the others' memory keeps nobody out.
        """
        cards = self._kin.cards
        known = {rank: cards[rank].known() for rank in present}
        serials = {rank: cards[rank].serial for rank in present}
        stayed = [rank for rank in present if self._has_stayed(rank, last)]
        agreed = [rank for rank in stayed if all(known[other][rank] == serials[rank] for other in stayed)]
        for rank in present:
            both = [*agreed, rank]
            if rank not in stayed and all(
                known[other][rank] == serials[rank] and known[rank][other] == serials[other] for other in both
            ):
                agreed = both
        return sorted(agreed)

    def _wait(self, last: Decision, started: float, deadline: float) -> None:
        """Wait until everybody has come who may, the round is decided, or the time is over."""
        table, kin, before = self._table, self._kin, last.number
        while table.round == before:
            present = self._present(before + 1)
            needed, others = self._missing(last, present)
            now = time.monotonic()
            is_awaited = needed or (others and now < started + _GRACE_S)
            is_ready = not is_awaited and self._agreed(last, present) == present
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
            ProtocolError: a rank says a call number that cannot be right.
            CommTimeoutError: the lock's holder does not get on.
        """
        table, cards, number = self._table, self._kin.cards, last.number + 1
        with table.locked(deadline, self._interrupt):
            if table.round != last.number:
                return
            present = self._present(number)
            came = self._agreed(last, present)
            try:
                self._check_quorum(last, came, seq)
                self._check_own(last, came, seq)
            except NoQuorumError:  # taken back under the lock, so that no decision can have it
                self._card.take_back()
                raise
            newest = self._newest(came)
            processes, serials = list(last.processes), list(last.serials)
            for rank in came:
                processes[rank], serials[rank] = word_of(cards[rank].process), cards[rank].serial
            table.write(
                Decision(
                    number,
                    newest,
                    last.epoch if serials == last.serials else number,
                    [rank in came for rank in range(self._num_ranks)],
                    processes,
                    serials,
                )
            )

    def _check_own(self, last: Decision, came: Sequence[int], seq: int) -> None:
        """Let a newcomer that is not taken in decide nothing: it may not see all who have come."""
        if self._rank not in came and not self._has_stayed(self._rank, last):
            raise NoQuorumError(
                f"{context('sync', rank=self._rank, seq=seq)}: this rank and ranks {list(came)} have not mapped each "
                "other's memory in time; call sync again",
                list(came),
                "sync",
                cause="unmapped",
            )

    def _newest(self, came: Sequence[int]) -> int:
        """Return the highest call number that those who came have said.

        Raises:
            ProtocolError: one cannot be right.
        """
        said = {rank: self._kin.cards[rank].seq for rank in came}
        for rank, seq in said.items():
            if seq >= _SEQ_LIMIT:
                raise ProtocolError(f"sync: rank {rank} says that its last call is number {seq}; less than 2^62 can be")
        return max(said.values())

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
