"""The agreement of a GPU buffer's ranks on its members at `sync`: who has joined is a member, others are excluded.

`synced.py` says what a change of the view means to the buffer's calls. A rank in `sync` publishes in its line of the
registry the epoch of the group it synchronises from, the ranks it counts on, the last number its calls have used, and
whether its timeout has expired (`COUNTED`, `USED`, then `SYNC`). Every member reads all lines. When the ranks that have
arrived may proceed, the lowest of them requests from the agents an epoch with these members, whose calls begin above
the highest number (`Want`, decision 52); if that takes long, the other ranks make the request one after another,
because the lowest may have stopped. **The decision is the agreement**: every sync ends with one, even when the
membership does not change; all ranks learn the same result from it, and no later step of the sync can fail. The next
call enters the epoch.

The ranks may proceed:
    all have arrived   all members, and every other rank that an arrived rank counts on
    some have not      when the timeout of an arrived member has expired; after a short grace period if no arrived rank
                       counts on the rest
    in both cases      more than half of the ranks that entered the last epoch together have arrived (half including the
                       lowest is enough): a joiner decides nothing alone, nor does a partition that was cut off
A member that arrives and then stops does not answer the agents, and is excluded if enough ranks remain (`Want.least`).
An excluded rank publishes its arrival as members do, but its timeout and its vote do not count: the others admit it. A
rank that has closed its buffer will not arrive and does not count either.

The published words name the epoch of the group, so they say nothing about a sync after the next decision, and they
remain for ranks that learn of that decision later; a rank that publishes a newer epoch had arrived at this one. A
decision of another kind (a death) restarts the evaluation. A rank that aborts clears what it published; if a decision
that includes it is already under way, the rank is a member all the same, and finds that in its next call or sync. A
crash leaves the published words in place, and the view reports the crash.

Called on the thread of the call. Every wait is bounded by the timeout of the call or by the timeout of the agents.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ...errors import MismatchError, NoQuorumError, ProtocolError, context
from ...view.protocol.decision import has_quorum
from ...view.protocol.messages import FOREVER, Member
from ..control.membership import Agreed
from .group_view import Roster, View
from .inboxes import Inboxes
from .registry import COUNTED, SYNC, USED, Line

GRACE_S = 0.05  # how long to wait for a rank that no rank counts on
WANT_PAUSE_S = 0.1  # between two identical requests to the agent
TURN_S = 0.3  # delay of each rank's request after that of the rank before it
_LOOK_S = 0.001
_YIELD_S = 0.001


class Came(NamedTuple):
    """The ranks that have arrived at a sync, as one rank sees it.

    Attributes:
        ranks: the ranks that have arrived, members or excluded.
        used: the last number that their calls have used.
        awaited: ranks that have not arrived although an arrived rank counts on them.
        others: members that have not arrived and that no rank counts on.
        closed: ranks that have closed the buffer; the process may still be in the job.
        is_late: the timeout of an arrived member has expired.
    """

    ranks: frozenset[int]
    used: int
    awaited: frozenset[int]
    others: frozenset[int]
    closed: frozenset[int]
    is_late: bool


class Sync:
    """One call of `sync`.

    Args:
        rank: this rank.
        roster: the membership: members and excluded ranks.
        line: this rank's line.
        inboxes: of the buffer; finds the other ranks' lines.
        entered: the ranks that entered the last epoch together with this rank: rank -> the epoch since which it took
            part.
        is_elsewhere: whether a rank waits for this one in the call after its last, and that call is not sync.
        look: called in waits with the awaited ranks; raises the error that ends the wait.
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
        """Return what the ranks have agreed on, with this rank included; a rank lost later is reported by a later call.

        Args:
            counted: bits of the ranks that this one counts on; all ranks count on a joiner.
            used: the last number that calls of this rank have used.
            since: the last epoch that a sync of this rank returned or a call entered. A later epoch with this rank
                belongs to a sync that an error interrupted here: on the other ranks it has returned.
            deadline: `time.monotonic()` value.

        Raises:
            NoQuorumError: too few ranks arrived to decide, or the others agreed without this rank.
            MismatchError: a rank that is counted on makes another call.
            ProtocolError: a rank published an impossible number.
            EvictedError: this process cannot continue.
        """
        self._started = time.monotonic()
        settings = self._roster.job_handle.runtime.settings
        last = max(deadline, self._started) + settings.no_quorum_s + settings.patience_s  # enough for the agents
        try:
            while True:
                heard, view = self._roster.state
                if view.agreed.epoch > since and self._rank in view.agreed.ranks:
                    return view.agreed  # otherwise this rank arrived too late for that epoch
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
        """Return the ranks without a line that have closed the buffer; the others have not made it yet."""
        return frozenset(rank for rank, member in members.items() if self._inboxes.has_closed(member))

    def _check_calls(self, view: View, came: Came) -> None:
        """Raise if an awaited rank waits in another call; a rank publishes its arrival before it makes a call."""
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
        """Return the ranks of which more than half must arrive."""
        entered = (rank for rank, member in view.members.items() if self._has_entered(rank, member))
        return [rank for rank in entered if rank not in came.closed]

    def _go_on(self, heard: int, view: View, came: Came, deadline: float, last: float) -> None:
        """Request the next epoch when the ranks may proceed and this rank's delay has passed.

        Raises:
            NoQuorumError: too few ranks have arrived at the deadline, or the agents do not agree.
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
        """Return how many voters must remain if others stop now: as many as could continue without them."""
        if self._rank == min(voters):
            return (len(voters) + 1) // 2  # half, including the lowest
        return min(sum(rank in came.ranks for rank in voters), len(voters) // 2 + 1)

    def _no_quorum(self, view: View, came: Came, what: str) -> NoQuorumError:
        elapsed = time.monotonic() - self._started
        where = context("sync", rank=self._rank, epoch=view.epoch, elapsed=elapsed)
        silent: Collection[int] = view.members.keys() - came.ranks
        return NoQuorumError(f"{where}: {what}; call sync again when they do", sorted(silent), "sync", epoch=view.epoch)


def _used(line: Line, rank: int) -> int:
    """Return the last call number that a rank has used, as published in its line."""
    used = line.words[USED]
    if used >= FOREVER:
        raise ProtocolError(f"sync: rank {rank} says that its last call is number {used}; less than {FOREVER} can be")
    return used
