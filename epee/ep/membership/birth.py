"""The creation of a GPU buffer: as a group in a view, with which its ranks die, are voted out and rejoin.

A group of the backend "epee" has its part in a view. On a group of another backend the ranks first compare their
arguments and find the job that they share, or create one (`view/founding.py`); no process can join there.

    all ranks together   as `bootstrap.py`: a round that compares the arguments, one that reports whether all could make
                         their part, one that reports whether all could map the others'. The first round also agrees on
                         the number of the buffer among those of the group, and on the newest epoch that any rank has
                         received.
    a replacement        takes part in the buffers that run already: it finds them in the registries of the others
                         (`registry.py`), the oldest first, without help from any rank. If none runs that it does not
                         have, all ranks make a new one together. If one runs that cannot admit it
                         (`BufferConfig.takes_replacements`), it is refused.

A buffer runs if a member has it open and no rank that had it has closed it. So survivors that want a new buffer with
the replacement close the old one before they admit it.

Between the rounds each rank enters the first epoch (`synced.py`): it lends its inbox before the second round and maps
the others' before the third, so no rank waits there for one that could not, and no call has to wait for a rank that
stays away from it. If the view changes meanwhile, a rank that has not entered yet enters with its first call. So does a
replacement, because the others do in theirs. A crash is reported by the process group during the rounds, and by the
view afterwards; a timeout there is an error, whatever the policy is.

A GPU buffer maps the memory of all its makers, in several steps. A rank that dies in between has reached one step for
some ranks, another step for others: so that all of them raise the same, each checks whether a maker is dead when its
step fails (`Begun.deaths`), and reports that in the last round if the failure came too late for its memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch.distributed as dist

from ...errors import EpeeError, UnsupportedError, expected
from ...view.group import GroupInView
from ...view.protocol.messages import DEAD, EXITED
from ...view.transport.wire import parse_endpoint
from ..config import CONFIG_NAMES, BufferConfig
from ..control.bootstrap import compare
from ..job import job_handle_of, process_of
from ..making import ended_of, fits, job_found, reported
from .group_view import Roster
from .registry import NUMBER, Line, Registry, find

logger = logging.getLogger("epee")

_EXTRA = struct.Struct("<QQ")  # sent instead of an inbox's blob: newest buffer, epoch
_DEATHS = (DEAD, EXITED)
Enter = Callable[["Begun"], "Entrant"]
_registries: weakref.WeakKeyDictionary[Any, Registry] = weakref.WeakKeyDictionary()  # of this process, by group
# no process can join there
_elsewhere: weakref.WeakKeyDictionary[Any, weakref.ref[Registry]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Begun:
    """A buffer's part in its group: its number, this rank's line, its members.

    Attributes:
        first: if all ranks have made it together: an epoch that they all know of, the same on all; else 0.
        makers: the ranks that make it together; empty as long as they are not known.
        take_back: removes the buffer's notice from the group; idempotent.
    """

    def __init__(self, number: int, registry: Registry, line: Line, roster: Roster, first: int) -> None:
        self.number = number
        self.first = first
        self.makers: frozenset[int] = frozenset()
        self.registry = registry
        self.line = line
        self.roster = roster
        self.take_back: Callable[[], None] = _nothing
        self._processes = {rank: process_of(member) for rank, member in roster.view.members.items()}
        self._is_closed = False

    def deaths(self) -> tuple[int, ...]:
        """Return the makers that have died since they began; waits for the proof if one is dying."""
        makers = {rank: process for rank, process in self._processes.items() if rank in self.makers}
        return ended_of(makers, self._told_dead)

    def _told_dead(self) -> list[int]:
        """Return the makers that are dead as the view says; one that it lost at once has no process here."""
        losses = self.roster.losses(self.first)
        return [loss.rank for loss in losses if loss.cause in _DEATHS and loss.rank in self.makers]

    def retire_later(self) -> None:
        """Have `retire` call `close`."""
        _closed.append((os.getpid(), self))

    def close(self) -> None:
        """Release the buffer's part in the group; idempotent. Talks to the agent thread."""
        if self._is_closed:
            return
        self._is_closed = True
        self.line.mark_closed()
        try:
            try:
                self.take_back()
            finally:
                self.roster.close()
        except expected(EpeeError) as problem:
            logger.warning("a closed buffer could not tell the agent thread: %s", problem)
        finally:
            self.roster.job_handle.job.release()


_closed: deque[tuple[int, Begun]] = deque()  # of this process, not yet removed from the control plane


def retire() -> None:
    """End the part of all closed buffers in the control plane. Between calls only: it talks to the agent thread."""
    while _closed:
        pid, begun = _closed.popleft()
        if pid == os.getpid():
            begun.close()


class Entrant(Protocol):
    """A buffer on its way into its first epoch (`synced.SyncedLane`)."""

    def offer(self) -> None:
        """Lend what the others need for it; local."""

    def come_in(self, deadline: float) -> None:
        """Map what they lend."""

    def close(self) -> None:
        """Release all of it, the buffer's part in the group included."""


def begin(
    group: dist.ProcessGroup,
    job_handle: GroupInView,
    config: BufferConfig,
    timeout_s: float,
    enter: Enter,
) -> Begun:
    """Take part in a running buffer (a replacement), or make one together with all ranks.

    Args:
        job_handle: the group's job handle.
        enter: makes the object that enters the first epoch.

    Raises:
        MismatchError: the ranks disagree, or another rank was refused.
        UnsupportedError: this process cannot take part in the buffer that runs.
        ResourceError: memory or permission is missing on some rank.
        RankFailedError: a rank was lost meanwhile (mode "raise").
    """
    if not job_handle.slots:
        with _lock:
            known = _known_registry(group)
        with job_found(group, config, 0 if known is None else known.lane) as there:
            return _make(group, there, config, timeout_s, enter)
    if not config.takes_replacements:
        if job_handle.is_joiner:
            _refuse_to_join(group, job_handle, config)
        job_handle = replace(job_handle, takes_part=lambda _: False)
    elif job_handle.is_joiner:
        begun = _join(group, job_handle, config, timeout_s)
        if begun is not None:
            return begun
    return _make(group, job_handle, config, timeout_s, enter)


def registry_of(group: dist.ProcessGroup, job_handle: GroupInView) -> Registry:
    """Return this process's registry for a group, made at the first call.

    It lives as long as the group, so that a joiner sees which buffers have been closed; if no process can join, as long
    as one of the buffers.
    """
    with _lock:
        registry = _known_registry(group)
        if registry is None or registry.lane != job_handle.lane:
            registry = Registry.make(job_handle.lane)
            if job_handle.is_open:
                _registries[group] = registry
            else:
                _elsewhere[group] = weakref.ref(registry)
        return registry


def _known_registry(group: dist.ProcessGroup) -> Registry | None:
    found = _elsewhere.get(group)
    return _registries.get(group) if found is None else found()


def _make(
    group: dist.ProcessGroup,
    job_handle: GroupInView,
    config: BufferConfig,
    timeout_s: float,
    enter: Enter,
) -> Begun:
    registry: Registry | None = None
    roster: Roster | None = None

    def extra() -> bytes:
        """Return the newest buffer and epoch that this rank knows."""
        nonlocal registry, roster
        registry, roster = registry_of(group, job_handle), Roster(job_handle)
        return _EXTRA.pack(registry.newest, roster.newest)

    records = compare(group, config, extra)
    assert registry is not None
    assert roster is not None
    told = [_EXTRA.unpack_from(record.blob) for record in records.values()]
    number = 1 + max(newest for newest, _ in told)
    with contextlib.ExitStack() as undo:
        begun: Begun | None = None
        entrant: Entrant | None = None

        def deaths() -> tuple[int, ...]:
            """Return the makers that have died meanwhile."""
            return () if begun is None else begun.deaths()

        with reported(group, deaths):
            floor = max(epoch for _, epoch in told)
            begun = _open(registry, roster, number, config, group.rank(), max(1, floor), timeout_s)
            begun.makers = frozenset(records)
            undo.callback(begun.close)
            entrant = enter(begun)
            undo.callback(entrant.close)
            entrant.offer()
        assert begun is not None  # otherwise all have raised
        assert entrant is not None
        with reported(group, deaths):
            entrant.come_in(time.monotonic() + timeout_s)
        undo.pop_all()
        return begun


def _open(
    registry: Registry,
    roster: Roster,
    number: int,
    config: BufferConfig,
    rank: int,
    first: int,
    timeout_s: float,
) -> Begun:
    job = roster.job_handle.job
    job.retain()
    line = None
    try:
        line = registry.open(number, config.words())
        roster.watch(number, first, timeout_s)
        return Begun(number, registry, line, roster, first)
    except BaseException:
        try:
            roster.close()
        finally:
            if line is not None:
                line.words[NUMBER] = 0
                registry.forget(number)
            job.release()
        raise


def _join(group: dist.ProcessGroup, job_handle: GroupInView, config: BufferConfig, timeout_s: float) -> Begun | None:
    """Take part in the oldest running buffer that this process does not have; return None if there is none."""
    mine, roster = registry_of(group, job_handle), Roster(job_handle)
    number = _running(mine, roster, group.rank(), config)
    if number is None:
        return None
    return _open(mine, roster, number, config, group.rank(), 0, timeout_s)


def awaited_bytes(group: dist.ProcessGroup, config: BufferConfig) -> int:
    """Return the memory size of a running buffer that this process, which replaces a lost rank, would join.

    Of those that equal `config` except in their bytes, one with the same, or else the oldest; 0 if there is none.
    Local.
    """
    job_handle = job_handle_of(group, config.num_ranks)
    if not job_handle.is_joiner or not config.takes_replacements:
        return 0
    at = CONFIG_NAMES.index("room_bytes")
    own = config.words()
    found = []
    for _, _, line in _open_lines(registry_of(group, job_handle), Roster(job_handle), group.rank(), config):
        theirs = line.config(len(CONFIG_NAMES))
        if theirs[:at] + theirs[at + 1 :] == own[:at] + own[at + 1 :] and theirs[at]:
            found.append(theirs[at])
    return own[at] if own[at] in found else found[0] if found else 0


def _refuse_to_join(group: dist.ProcessGroup, job_handle: GroupInView, config: BufferConfig) -> None:
    """Raise if a buffer runs that this process would have to take part in, and cannot.

    Raises:
        UnsupportedError: there is one. MismatchError: it was made with other arguments.
    """
    if _running(registry_of(group, job_handle), Roster(job_handle), group.rank(), config) is not None:
        raise UnsupportedError(
            "Buffer: a buffer of the group runs whose memory is lent by cudaIpc, which cannot be mapped where a lost "
            "rank's was: this process cannot take part; close that buffer on all ranks and make it again with this "
            "one, or leave EPEE_CUDA_SHARE unset on all of them"
        )


def _running(mine: Registry, roster: Roster, own_rank: int, config: BufferConfig) -> int | None:
    """Return the number of the oldest running buffer that this process does not have; None if there is none."""
    for number, holder, line in _open_lines(mine, roster, own_rank, config):
        if fits(line.config(len(CONFIG_NAMES)), holder, config, own_rank):
            return number
    return None


def _open_lines(mine: Registry, roster: Roster, own_rank: int, config: BufferConfig) -> Iterator[tuple[int, int, Line]]:
    """Return number, a holder and its line of each running buffer of a kind new to this process, oldest first."""
    others: dict[int, Registry] = {}
    for rank, member in roster.view.members.items():
        endpoint = parse_endpoint(member.endpoint)
        found = find(roster.job_handle.lane, endpoint.pid, endpoint.start_time) if rank != own_rank else None
        if found is not None:
            others[rank] = found
    lines = {rank: _of_kind(registry.numbers(), config) for rank, registry in others.items()}
    for number in sorted({number for held in lines.values() for number in held} - mine.had):
        holder = next(rank for rank, held in lines.items() if number in held)
        if not any(registry.has_closed(number) for registry in others.values()):
            yield number, holder, lines[holder][number]


def _of_kind(lines: dict[int, Line], config: BufferConfig) -> dict[int, Line]:
    """Return the lines of buffers of the same kind and device; others do not concern this buffer."""
    kind = [CONFIG_NAMES.index(name) for name in ("kind of buffer", "device")]
    own = [config.words()[at] for at in kind]
    found = {}
    for number, line in lines.items():
        theirs = line.config(len(CONFIG_NAMES))
        if [theirs[at] for at in kind] == own:
            found[number] = line
    return found


def _nothing() -> None:
    """Do nothing: no notice of the buffer was published."""


def _forget() -> None:
    """Drop the parent's state, in a forked child."""
    global _lock
    _lock = threading.Lock()
    _registries.clear()
    _elsewhere.clear()


os.register_at_fork(after_in_child=_forget)
