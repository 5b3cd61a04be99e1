"""The inboxes of a buffer's epoch: this rank's, which it lends, and those of the other members, which it maps.

Data path: a rank makes an inbox for the epoch that it is about to enter and publishes its blob, with the number of the
epoch, in its line of the registry (`offer`). It finds the lines of joiners by the process that the view names, waits
until each publishes an inbox for this epoch, and maps it (`meet_those`). Nothing of the old epoch is dropped before all
of the new one is there (`use`).

Called on the thread of a call, or of the constructor. A wait ends when the view changes; an inbox that others may have
mapped already is offered again, should the next attempt be for the same epoch. A crash leaves memory that the system
frees when the last process that maps it unmaps it.

A group whose epochs begin with `sync` alone cannot revoke what was agreed: it continues without the ranks that do not
publish their memory (`meet_those`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...errors import CommTimeoutError, EpeeError, ProtocolError, ResourceError, expected
from ...memory.shared import SharedRegion
from ...memory.signals import futex_sleep
from ...view.process.detector import is_leaving
from ...view.protocol.messages import Member
from ..config import BufferConfig
from ..job import process_of
from .group_view import Roster
from .registry import INBOX_VIEW, Line, find

logger = logging.getLogger("epee")

LOOK_S = 0.002  # between two polls for the registry of a joiner
Look = Callable[[int, str, float, float], None]  # rank, what it delays, since when, deadline: raises to end the wait


class Absent(Exception):
    """A member is not awaited any more; raised by a `Look`, for `Inboxes.meet_those`."""


class EpochMember(NamedTuple):
    """A process that has a rank in an epoch; `process` is its number and start time."""

    line: Line
    process: tuple[int, int]


class Met(NamedTuple):
    """The processes of an epoch and their inboxes by rank, this rank's included."""

    peers: dict[int, EpochMember]
    regions: dict[int, SharedRegion]


class Wait(NamedTuple):
    """A wait for the others' inboxes of an epoch: since when, how long, and whether it has become void."""

    epoch: int
    is_void: Callable[[], bool]
    started: float
    deadline: float


class Inboxes:
    """The inboxes of one buffer on one rank.

    Args:
        config: of the buffer.
        rank: this rank.
        number: of the buffer among those of its group.
        roster: knows the members.
        line: this rank's in its registry.
        look: called between two polls of a member that keeps this rank waiting.
        nbytes: of an inbox and what else a rank lends with it, from byte `inbox_layout(config).nbytes` on.

    Attributes:
        own: this rank's inbox in the epoch that the buffer is in; None before the first.
        fill: called with a new inbox before it is lent.
    """

    def __init__(
        self, config: BufferConfig, rank: int, number: int, roster: Roster, line: Line, look: Look, nbytes: int
    ) -> None:
        self.own: SharedRegion | None = None
        self.fill: Callable[[SharedRegion], None] = _nothing
        self._config = config
        self._rank = rank
        self._number = number
        self._roster = roster
        self._line = line
        self._look = look
        self._nbytes = nbytes
        self._lines: dict[tuple[int, int], Line] = {}  # of other processes
        self._mapped: list[SharedRegion] = []
        self._next: tuple[int, SharedRegion] | None = None  # made for an epoch that was not entered yet
        self._epoch = 0  # for which `own` was made

    def offer(self, epoch: int) -> SharedRegion:
        """Return this rank's inbox for an epoch that it enters, the same one in each attempt, and lend it."""
        if self.own is not None and self._epoch == epoch:
            return self.own
        if self._next is not None and self._next[0] != epoch:
            self._next[1].close()
            self._next = None
        if self._next is None:
            region = SharedRegion.create(self._nbytes, f"inbox-{self._rank}-{epoch}")
            self.fill(region)
            self._next = epoch, region
        if self._line.words[INBOX_VIEW] != epoch:  # peers may be just reading it
            self._line.lend_inbox(epoch, self._next[1].blob)
        return self._next[1]

    def meet_those(self, members: Mapping[int, Member], wait: Wait) -> Met:
        """Map what members lend for an epoch, as far as they do; the result lacks `Absent` and damaged members.

        Raises:
            ResourceError: no memory or descriptor is left here. Otherwise as `look`.
        """
        met = Met({}, {self._rank: self.offer(wait.epoch)})
        is_complete = False
        try:
            for rank, member in members.items():
                try:
                    self._meet_one(met, rank, member, wait)
                except Absent:
                    logger.info("epoch %d of a buffer begins without rank %d", wait.epoch, rank)
                except expected(ProtocolError) as error:
                    logger.warning("epoch %d of a buffer begins without rank %d: %s", wait.epoch, rank, error)
            is_complete = True
            return met
        finally:
            if not is_complete:
                self.give_back(met)

    def _meet_one(self, met: Met, rank: int, member: Member, wait: Wait) -> None:
        """Map what one member lends; `met` is without it when the wait is void."""
        line: Line | None = self._line
        if rank != self._rank:
            line = self._find(rank, member, wait)
            region = None if line is None else self._map(rank, member, line, wait)
            if region is None:
                return
            met.regions[rank] = region
        assert line is not None
        met.peers[rank] = EpochMember(line, process_of(member))

    def give_back(self, met: Met) -> None:
        """Unmap what was met but not used; this rank's own inbox may be mapped by others and is offered again."""
        for rank, region in met.regions.items():
            if rank != self._rank:
                region.close()

    def use(self, met: Met) -> None:
        """Make what was met the memory of the buffer, and drop the old epoch's."""
        own = met.regions[self._rank]
        self._drop(own)
        if self._next is not None and self._next[1] is own:
            self._epoch, self._next = self._next[0], None
        self.own = own
        self._mapped = [region for rank, region in met.regions.items() if rank != self._rank]
        processes = {peer.process for peer in met.peers.values()}
        self._lines = {process: line for process, line in self._lines.items() if process in processes}

    def close(self) -> None:
        """Release everything; nothing else may follow."""
        self._drop()
        if self._next is not None:
            self._next[1].close()
            self._next = None
        self._lines.clear()
        # a closed buffer that is still referenced maps nothing, and is in no reference cycle
        del self._line, self._look, self.fill

    def _drop(self, kept: SharedRegion | None = None) -> None:
        for region in self._mapped:
            region.close()
        self._mapped.clear()
        if self.own is not None and self.own is not kept:
            self.own.close()
            self.own = None

    def line_of(self, rank: int, member: Member) -> Line | None:
        """Return the line of this buffer in a member's registry; None when it has not made the buffer, or closed it.

        Raises:
            ProtocolError: it has made it with other arguments.
        """
        process = process_of(member)
        line = self._lines.get(process)
        if line is not None and line.number == self._number:
            return line
        self._lines.pop(process, None)  # it has closed the buffer; another may have the line now
        registry = find(self._roster.job_handle.lane, *process)
        line = None if registry is None else registry.numbers().get(self._number)
        if line is not None:
            self._check_config(rank, line)
            self._lines[process] = line
        return line

    def has_closed(self, member: Member) -> bool:
        """Return whether a member had this buffer and has closed it; called if `line_of` finds none."""
        registry = find(self._roster.job_handle.lane, *process_of(member))
        return registry is not None and registry.has_closed(self._number)

    def _find(self, rank: int, member: Member, wait: Wait) -> Line | None:
        """Return the line of a member, which may have to make its buffer first; None when the wait is void."""
        while True:
            line = self.line_of(rank, member)
            if line is not None:
                return line
            if wait.is_void():
                return None
            time.sleep(LOOK_S)
            self._look(rank, f"rank {rank} has not made this buffer", wait.started, wait.deadline)

    def _map(self, rank: int, member: Member, line: Line, wait: Wait) -> SharedRegion | None:
        """Map the inbox that a member makes for an epoch; None when the wait is void."""
        problem: EpeeError | None = None
        what = f"rank {rank} does not come into epoch {wait.epoch}"
        while not wait.is_void():
            blob = line.inbox(wait.epoch)
            if blob is not None and problem is None:
                try:
                    return self._attach(rank, blob, line)
                except expected(EpeeError) as exc:
                    if isinstance(exc, ResourceError) and not is_leaving(*process_of(member)):
                        raise  # of this process's own
                    problem = exc  # it has just died, and the view will report it; else it is damaged
            futex_sleep(line.address + 8 * INBOX_VIEW, line.words[INBOX_VIEW])
            try:
                self._look(rank, what, wait.started, wait.deadline)
            except expected(CommTimeoutError):
                if problem is not None:
                    raise problem from None
                raise
        return None

    def _attach(self, rank: int, blob: bytes, line: Line) -> SharedRegion:
        region = SharedRegion.attach(blob)
        if region.owner_pid != line.owner_pid or region.nbytes < self._nbytes:
            region.close()
            raise ProtocolError(f"rank {rank} names an inbox that is not its own, or too small")
        return region

    def _check_config(self, rank: int, line: Line) -> None:
        words = self._config.words()
        if line.config(len(words)) != words:
            raise ProtocolError(f"rank {rank} has made buffer {self._number} of the group with other arguments")


def _nothing(region: SharedRegion) -> None:
    pass
