"""How the ranks of a lane agree at `sync` on who takes part: who comes is in, who does not is put out.

Data path. A rank that is in `sync` shows in its line of the registry for which epoch of the lane it has come, whom it
counts on, the last number that its calls have used, and whether its time is over (`COUNTED`, `USED`, then `SYNC`).
Every member looks at all lines. When those who have come may go on, the lowest of them asks the agents for an epoch
with these members, whose calls begin above the highest number (`Want`, decision 52); the others ask one after the other
if that takes long, for the lowest may have stopped. **The decision is the agreement**: every sync ends with one, be it
that nobody goes or comes; all learn the same from it, and nothing follows that could fail. The next call enters the
epoch.

When they may go on:
    all have come      all members, and whoever else somebody who came counts on
    some do not        when the time of a member that came is over; soon, where nobody who came counts on those who are
                       away
    in both cases      more than half of those have come who entered the last epoch together (half with the lowest will
                       do): a newcomer decides nothing alone, nor do those who were cut off
A member that has come and stops then does not answer the agents, and is put out if enough are left (`Want.least`). Who
is out shows that it has come as members do, but its time and its voice do not count: the others take it in. Who has
closed its buffer comes no more, and does not count either.

What a rank shows names the epoch of the lane, so it says nothing about a sync after the next decision, and stays for
those who hear of that decision later; who shows a newer epoch had come to this one. A decision of another kind (a
death) begins the look anew. Who gives up takes back what it shows; should a decision that has it in be under way, it is
a member all the same, and finds that in its next call or sync. A crash leaves what was shown, and the view tells of it.

Who calls: the thread of the call. Every wait ends, by the time-out of the call or by the patience of the agents.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ...errors import MismatchError, NoQuorumError, ProtocolError, context
from ...view.protocol.messages import FOREVER, Member
from ...view.protocol.quorum import has_quorum
from ..control.membership import Agreed
from .group_view import Roster, View
from .inboxes import Inboxes
from .registry import COUNTED, SYNC, USED, Line

GRACE_S = 0.05  # how long one is waited for that nobody counts on
WANT_PAUSE_S = 0.1  # between two times that the agent is asked for the same
TURN_S = 0.3  # how much later than the one before it a rank asks in its place
_LOOK_S = 0.001
_YIELD_S = 0.001


class Came(NamedTuple):
    """Who has come to a sync, as one rank sees it.

    Attributes:
        ranks: who has come, out or not.
        used: the last number that their calls have used.
        awaited: who has not, though somebody who has counts on it.
        others: members that have not come, and nobody counts on them.
        closed: who has closed the buffer; the process may still be in the job.
        is_late: the time of a member that has come is over.
    """

    ranks: frozenset[int]
    used: int
    awaited: frozenset[int]
    others: frozenset[int]
    closed: frozenset[int]
    is_late: bool


class Sync:
    """See above; one call of `sync`.

    Args:
        rank: this rank.
        roster: who takes part, and who is out.
        line: this rank's.
        inboxes: of the buffer: knows the others' lines.
        entered: who entered the last epoch together with this rank: rank -> the epoch since which it took part.
        is_elsewhere: whether a rank waits for this one in the call after its last, which is another than sync.
        look: called in waits with the ranks that are waited for; raises what ends them.
    """

    def __init__(
        self,
        rank: int,
        roster: Roster,
        line: Line,
        inboxes: Inboxes,
        entered: Mapping[int, int],
        is_elsewhere: Callable[[int], bool],
        look: Callable[[list[int]], None],
    ) -> None:
        self._rank = rank
        self._roster = roster
        self._line = line
        self._inboxes = inboxes
        self._entered = entered
        self._is_elsewhere = is_elsewhere
        self._look = look
        self._ready_since: tuple[int, float] = (0, 0.0)  # in an epoch of the job
        self._asked_at = 0.0

    def agree(self, counted: int, used: int, since: int, deadline: float) -> Agreed:
        """Return what the ranks have agreed on, with this one in it; whoever is lost later shows in a later call.

        Args:
            counted: bits of the ranks that this one counts on; who is new is counted on by all.
            used: the last number that calls of this rank have used.
            since: the last epoch that a sync of this rank has returned, or a call has entered. A later one with this
                rank is that of a sync of which an error has taken it: the others have returned it.
            deadline: `time.monotonic()` value.

        Raises:
            NoQuorumError: too few came to decide, or the others agreed without this rank.
            MismatchError: a rank that is counted on makes another call.
            ProtocolError: a rank shows a number that cannot be right.
            EvictedError: this process cannot go on.
        """
        self._started = time.monotonic()
        settings = self._roster.seat.runtime.settings
        last = max(deadline, self._started) + settings.no_quorum_s + settings.patience_s  # enough for the agents
        try:
            while True:
                heard, view = self._roster.state
                if view.agreed.epoch > since and self._rank in view.agreed.ranks:
                    return view.agreed  # else it came too late for that one
                now = time.monotonic()
                self._show(view, counted, used, now > deadline)
                came = self._who_came(view)
                self._check_calls(view, came)
                self._go_on(heard, view, came, deadline, last)
                self._look(sorted(came.awaited | came.others))
                if now < self._started + _YIELD_S:
                    os.sched_yield()
                else:
                    time.sleep(_LOOK_S)
        except BaseException:
            self._line.come_to_sync(0, 0)
            raise

    def _show(self, view: View, counted: int, used: int, is_late: bool) -> None:
        fresh = sum(1 << rank for rank, member in view.members.items() if not self._has_entered(rank, member))
        self._line.come_to_sync(view.epoch << 1 | is_late, counted | fresh | 1 << self._rank, used)

    def _who_came(self, view: View) -> Came:
        members = {**view.out, **view.members}
        lines = {rank: self._line_at(rank, member) for rank, member in members.items()}
        marks = {rank: 0 if line is None else line.words[SYNC] for rank, line in lines.items()}
        ranks = frozenset(rank for rank, mark in marks.items() if mark >> 1 >= view.epoch)
        closed = self._closed({rank: member for rank, member in members.items() if lines[rank] is None})
        union, used = 0, 0
        for rank in ranks:
            line = lines[rank]
            if line is not None:
                union, used = union | line.words[COUNTED], max(used, _used(line, rank))
        awaited = frozenset(rank for rank in lines if rank not in ranks | closed and union >> rank & 1)
        others = frozenset(view.members.keys() - ranks - awaited)
        is_late = any(marks[rank] & 1 for rank in ranks & view.members.keys())
        return Came(ranks, used, awaited, others, closed, is_late)

    def _closed(self, members: Mapping[int, Member]) -> frozenset[int]:
        """Return which of those without a line have closed the buffer, rather than not made it yet."""
        return frozenset(rank for rank, member in members.items() if self._inboxes.has_closed(member))

    def _check_calls(self, view: View, came: Came) -> None:
        """Raise where one that is waited for waits itself, in another call; it shows that it comes before it calls."""
        elsewhere = frozenset(rank for rank in came.awaited if self._is_elsewhere(rank))
        if not elsewhere:
            return
        elsewhere -= self._who_came(view).ranks
        if elsewhere and self._roster.view is view:
            where = context("sync", rank=self._rank, peer=min(elsewhere), epoch=view.epoch)
            raise MismatchError(f"{where}: it makes another call; all ranks must call sync with a mask")

    def _line_at(self, rank: int, member: Member) -> Line | None:
        return self._line if rank == self._rank else self._inboxes.line_of(rank, member)

    def _has_entered(self, rank: int, member: Member) -> bool:
        return self._entered.get(rank) == member.incarnation

    def _voters(self, view: View, came: Came) -> list[int]:
        """Return of whom more than half must come."""
        entered = (rank for rank, member in view.members.items() if self._has_entered(rank, member))
        return [rank for rank in entered if rank not in came.closed]

    def _go_on(self, heard: int, view: View, came: Came, deadline: float, last: float) -> None:
        """Ask for the next epoch when it is time for that, and this rank's turn.

        Raises:
            NoQuorumError: they are too few at the end of the time, or the agents do not agree.
        """
        now = time.monotonic()
        voters = self._voters(view, came)
        may_vote = self._rank in voters
        is_enough = has_quorum(voters, (), came.ranks)
        if now > deadline and not is_enough:
            few = f"only ranks {sorted(came.ranks.intersection(voters))} of {sorted(voters)} came, too few to decide"
            raise self._no_quorum(view, came, few if may_vote else "the others did not sync")
        if now > last:
            raise self._no_quorum(view, came, "the agents of the ranks do not agree")
        is_alone = not came.awaited and (not came.others or now > self._started + GRACE_S)
        if not (may_vote and is_enough and (is_alone or came.is_late)):
            return
        if self._ready_since[0] != heard:
            self._ready_since, self._asked_at = (heard, now), 0.0
        position = sorted(came.ranks.intersection(voters)).index(self._rank)
        if now >= self._ready_since[1] + position * TURN_S and now >= self._asked_at + WANT_PAUSE_S:
            self._asked_at = now
            going = view.members.keys() - came.ranks
            self._roster.want(came.ranks, going, self._least(voters, came), came.used, heard)

    def _least(self, voters: list[int], came: Came) -> int:
        """Return how many of those who vote must stay, should others stop now: as many as could go on without them."""
        if self._rank == min(voters):
            return (len(voters) + 1) // 2  # half with the lowest
        return min(sum(rank in came.ranks for rank in voters), len(voters) // 2 + 1)

    def _no_quorum(self, view: View, came: Came, what: str) -> NoQuorumError:
        elapsed = time.monotonic() - self._started
        where = context("sync", rank=self._rank, epoch=view.epoch, elapsed=elapsed)
        silent: Collection[int] = view.members.keys() - came.ranks
        return NoQuorumError(f"{where}: {what}; call sync again when they do", sorted(silent), "sync", epoch=view.epoch)


def _used(line: Line, rank: int) -> int:
    """Return the last number that calls of a rank have used, which it has shown."""
    used = line.words[USED]
    if used >= FOREVER:
        raise ProtocolError(f"sync: rank {rank} says that its last call is number {used}; less than {FOREVER} can be")
    return used
