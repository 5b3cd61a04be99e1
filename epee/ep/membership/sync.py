"""How the ranks of a lane agree at `sync` on who takes part: who comes is in, who does not is put out.

A rank that is in `sync` shows in its line of the registry to which call it has come, and whom it counts on (`SYNC`,
`COUNTED`). Each of them waits until all members have come and then makes that call with them, an exchange of rows: who
returns has it from everybody, so all return with the same members. Where some do not come, or others have come back,
the ranks want another epoch (ADR 52), enter it, and meet there:

    all have come              the exchange of rows ends the sync
    some do not                at the time-out, or shortly after the beginning where nobody who came counts on them, and
                               if more than half of the members have come (half with the lowest will do): they are put
                               out, and stay in the job
    one that is out has come   it is taken in with the same decision; it begins with the new epoch, like a new process.
                               Who is out is waited for as members are, where somebody who came counts on it

Of different wants one is met, and each rank looks again in the epoch that follows. So wants need not be equal, and two
of them cannot split the ranks. Who is out wants nothing: the others take it in when they sync. A rank that has not yet
heard of an epoch to which others have come waits for that; the agents tell it.

What a rank shows names the epoch and the number of its next call there, so it says nothing about another sync, and need
not be taken back at the end; who leaves with an error takes it back. A crash leaves it: the view tells of the crash.

Who calls: the thread of the call. Every wait ends, by the time-out of the call or by the patience of the agents.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...errors import CommTimeoutError, EvictedError, MismatchError, NoQuorumError, PeerError, context
from ...memory.signals import tag, untag
from ...view.protocol.messages import Member
from ...view.protocol.quorum import has_quorum
from ..control.ending import Moved
from .group_view import Roster, View
from .registry import COUNTED, SYNC, Line

GRACE_S = 0.05  # how long one is waited for that nobody counts on
MEET_S = 5.0  # how long the exchange of rows may take those that have come, where the time-out is over
WANT_PAUSE_S = 0.1  # between two times that the agent is asked for the same
_LOOK_S = 0.001
_YIELD_S = 0.001


class Came(NamedTuple):
    """Who has come to a sync, as one rank sees it.

    Attributes:
        heard: the newest epoch of the job when it looked.
        view: of the buffer.
        ranks: who has come, out or not.
        silent: members that have not.
        awaited: who has not, and those who have count on it.
        is_behind: somebody has come to a newer epoch, of which this rank is yet to hear.
    """

    heard: int
    view: View
    ranks: frozenset[int]
    silent: frozenset[int]
    awaited: frozenset[int]
    is_behind: bool


class Sync:
    """See above; one call of `sync`.

    Args:
        rank: this rank.
        roster: who takes part, and who is out.
        line: this rank's.
        line_of: returns the line of a member, None where it has none.
        next_call: returns the number of this rank's next call in an epoch.
        is_elsewhere: whether a rank waits in that call, which may be another than sync.
        look: called in waits with the ranks that are waited for; raises what ends them.
    """

    def __init__(
        self,
        rank: int,
        roster: Roster,
        line: Line,
        line_of: Callable[[int, Member], Line | None],
        next_call: Callable[[int], int],
        is_elsewhere: Callable[[int], bool],
        look: Callable[[list[int]], None],
    ) -> None:
        self._rank = rank
        self._roster = roster
        self._line = line
        self._line_of = line_of
        self._next_call = next_call
        self._is_elsewhere = is_elsewhere
        self._look = look
        self._absent: tuple[int, frozenset[int]] = (0, frozenset())  # in an epoch: came, and did not meet
        self._wanted_since: tuple[int, float] = (0, 0.0)  # in an epoch of the buffer
        self._want_at = 0.0

    def agree(
        self, counted: int, deadline: float, enter: Callable[[float], None], meet: Callable[[float], None]
    ) -> None:
        """Return when this rank has met all members of the epoch that the buffer is in then.

        Args:
            counted: bits of the ranks that this one counts on.
            deadline: `time.monotonic()` value.
            enter: brings the buffer into the newest epoch.
            meet: makes the exchange of rows there.

        Raises:
            NoQuorumError: too few came to decide, or the others agreed without this rank.
            MismatchError: a rank that is counted on makes another call.
            EvictedError, NoQuorumError: this process cannot go on.
        """
        self._counted = counted | 1 << self._rank
        self._started = time.monotonic()
        self._seen: frozenset[int] = (
            frozenset()
        )  # have come, in this epoch or one before: their next word is on its way
        is_met = False
        try:
            while not is_met:
                came = self._await_all(deadline)
                is_met = self._meet(came, deadline, enter, meet)
        finally:
            if not is_met:
                self._line.come_to_sync(0, 0)

    def _meet(self, came: Came, deadline: float, enter: Callable[[float], None], meet: Callable[[float], None]) -> bool:
        """Meet those who have come; False when that did not end well, and the ranks are to look again.

        Who has come and does not meet the others has not come to the call that they make next.
        """
        deadline = max(deadline, time.monotonic() + MEET_S)
        has_entered = False
        try:
            enter(deadline)
            has_entered = True
            meet(deadline)
            return True
        except CommTimeoutError as error:
            if not has_entered:
                self._absent = came.view.epoch, frozenset(error.ranks) - {self._rank}
        except (EvictedError, NoQuorumError):
            if self._rank not in self._roster.view.out:  # else the others did not see that this rank had come
                raise
        except (Moved, PeerError):
            pass  # the view has changed: whoever is lost shows in what this ends in
        return False

    def _await_all(self, deadline: float) -> Came:
        """Return when all members have come and nobody is to be taken in.

        A new epoch begins the wait for its members again: all that is known of them is that they had come before.
        """
        epoch, patience = self._roster.view.epoch, deadline
        while True:
            came = self._who_came()
            is_member = self._rank in came.view.members
            now = time.monotonic()
            if is_member and came.ranks == came.view.members.keys() and (now > deadline or not came.awaited):
                return came
            self._check_calls(came)
            if came.view.epoch != epoch or (came.is_behind and now > patience):
                epoch, patience = came.view.epoch, max(deadline, now + MEET_S)
            is_late = now > (patience if came.silent or not is_member else deadline)
            is_alone = not came.awaited and (not came.silent or now > self._started + GRACE_S)
            if is_member and (is_late or is_alone):
                self._want(came, now, patience)
            elif is_late:
                raise self._left_out(came)
            self._look(sorted(came.awaited | came.silent))
            if now < self._started + _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(_LOOK_S)

    def _check_calls(self, came: Came) -> None:
        """Raise where one that is waited for waits itself, in another call: it shows that it comes before it calls."""
        others = {rank for rank in came.awaited & came.silent if self._is_elsewhere(rank)}
        if others and (others := others - self._who_came().ranks) and self._roster.view is came.view:
            where = context("sync", rank=self._rank, peer=min(others), epoch=came.view.epoch)
            raise MismatchError(f"{where}: rank {min(others)} makes another call; all ranks must call sync with a mask")

    def _who_came(self) -> Came:
        heard, view = self._roster.heard, self._roster.view
        mine = self._next_call(view.epoch)
        self._line.come_to_sync(tag(view.epoch, mine), self._counted)
        absent = self._absent[1] if self._absent[0] == view.epoch else frozenset()
        lines = self._lines({**view.members, **view.out})
        marks = {rank: untag(line.words[SYNC]) for rank, line in lines.items()}
        epoch = untag(tag(view.epoch, mine))[0]
        ranks = frozenset(
            rank
            for rank, (its_epoch, call) in marks.items()
            if its_epoch == epoch and rank not in absent and (call >= mine or rank in view.out)
        )
        self._seen |= ranks
        masks = [lines[rank].words[COUNTED] for rank in ranks]
        counted = {rank for rank in lines if rank in self._seen or any(mask >> rank & 1 for mask in masks)}
        is_behind = any(its_epoch > epoch for its_epoch, _ in marks.values())
        silent = frozenset(view.members.keys() - ranks)
        return Came(heard, view, ranks, silent, frozenset(counted - ranks - absent), is_behind)

    def _lines(self, members: Mapping[int, Member]) -> dict[int, Line]:
        found = {self._rank: self._line}
        for rank, member in members.items():
            line = self._line if rank == self._rank else self._line_of(rank, member)
            if line is not None:
                found[rank] = line
        return found

    def _want(self, came: Came, now: float, deadline: float) -> None:
        """Want that those who came take part, and nobody else.

        Raises:
            NoQuorumError: they are too few, or the agents do not agree.
        """
        if not has_quorum(came.view.members.keys(), (), came.ranks):
            if now > deadline:
                raise self._no_quorum(came, "too few ranks came to decide")
            return
        if self._wanted_since[0] != came.view.epoch:
            self._wanted_since, self._want_at = (came.view.epoch, now), 0.0
        settings = self._roster.seat.runtime.settings
        if now > self._wanted_since[1] + settings.no_quorum_s + settings.patience_s:
            raise self._no_quorum(came, "the agents of the ranks do not agree")
        if now >= self._want_at:
            self._want_at = now + WANT_PAUSE_S
            self._roster.want(came.ranks, came.silent, came.heard)

    def _left_out(self, came: Came) -> NoQuorumError:
        if self._rank not in came.view.members:
            return self._no_quorum(came, "the other ranks agreed without this one, and do not sync")
        return self._no_quorum(came, "too few ranks came to decide")

    def _no_quorum(self, came: Came, what: str) -> NoQuorumError:
        elapsed = time.monotonic() - self._started
        where = context("sync", rank=self._rank, epoch=came.view.epoch, elapsed=elapsed)
        return NoQuorumError(f"{where}: {what}; call sync again when they do", sorted(came.silent), "sync")
