"""How a CPU buffer begins on a group of the backend "epee", where ranks die and come back.

    all ranks together   as `bootstrap.py`: one round that compares what the ranks were given, one that says whether all
                         could do their part. What the first round agrees on beside that is the number of the buffer
                         among those of the group, and the newest epoch that anybody has heard of.
    a replacement        takes part in the buffers that run already: it finds them in the registries of the others
                         (`registry.py`), the oldest first, and needs nobody's help. Where none runs that it does not
                         have, all ranks make a new one together.

A buffer runs when a member has it open and nobody who had it has closed it. So survivors that want a new buffer with
the replacement close the old one before they take it in.

No memory for calls is made here: the first call enters the epoch (`epochs.py`). A crash on the way is the group's
problem in the rounds, and the view's afterwards.
"""

from __future__ import annotations

import struct
import threading
import weakref
from typing import Any, NamedTuple

import torch.distributed as dist

from ...errors import EpeeError, MismatchError, ResourceError
from ...view.group import GroupInView
from ...view.process.endpoint import parse_endpoint
from ..config import CONFIG_NAMES, BufferConfig, describe_word
from ..control.bootstrap import TEXT_BYTES, Record, gather_present, host_id, judge, pack
from .group_view import Roster
from .registry import NUMBER, VIEW, Line, Registry, find

_EXTRA = struct.Struct("<QQ")  # travels in the place of an inbox's blob: newest buffer, epoch
_registries: weakref.WeakKeyDictionary[Any, Registry] = weakref.WeakKeyDictionary()  # of this process, by group
_lock = threading.Lock()


class Begun(NamedTuple):
    """A buffer's place in its group: its number, this rank's line, who takes part."""

    number: int
    registry: Registry
    line: Line
    roster: Roster

    def close(self) -> None:
        """Give the place up."""
        self.line.words[NUMBER] = 0
        self.roster.close()
        self.line.words[VIEW] = 0  # last: from now on another buffer may have the line
        self.roster.seat.job.release()


def begin(
    group: dist.ProcessGroup, seat: GroupInView, config: BufferConfig, refusal: EpeeError | None, timeout_s: float
) -> Begun:
    """Take part in a running buffer (a replacement), or make one together with all ranks.

    Raises:
        MismatchError: the ranks disagree, or another rank was refused.
        ResourceError: memory or permission is missing on some rank.
        RankFailedError: a rank was lost meanwhile (mode "raise").
    """
    if refusal is None and seat.is_joiner:
        begun = _join(group, seat, config, timeout_s)
        if begun is not None:
            return begun
    return _make(group, seat, config, refusal, timeout_s)


def registry_of(group: dist.ProcessGroup, seat: GroupInView) -> Registry:
    """Return this process's registry for a group, made at the first call."""
    with _lock:
        registry = _registries.get(group)
        if registry is None:
            registry = _registries[group] = Registry.make(seat.lane)
        return registry


def _make(
    group: dist.ProcessGroup, seat: GroupInView, config: BufferConfig, refusal: EpeeError | None, timeout_s: float
) -> Begun:
    registry, roster, host, extra = None, None, bytes(16), b""
    if refusal is None:
        try:
            registry, roster, host = registry_of(group, seat), Roster(seat), host_id()
            extra = _EXTRA.pack(registry.newest, roster.newest)
        except EpeeError as exc:
            refusal = exc
    parts = gather_present(group, pack(config, host, extra, refusal))
    records = {rank: Record(data) for rank, data in parts.items()}
    if refusal is not None:
        raise refusal
    judge(records)
    assert registry is not None
    assert roster is not None
    told = [_EXTRA.unpack_from(record.blob) for record in records.values()]
    number = 1 + max(newest for newest, _ in told)
    begun, problem = None, ""
    try:
        begun = _open(registry, roster, number, config, max(epoch for _, epoch in told), timeout_s)
    except EpeeError as exc:
        problem = f"{type(exc).__name__}: {exc}"
    try:
        told_problems = gather_present(group, problem.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"))
        for rank, data in told_problems.items():
            text = data.rstrip(b"\0").decode("utf-8", "replace")
            if text:
                raise ResourceError(f"Buffer: rank {rank} could not make its part: {text}")
    except BaseException:
        if begun is not None:
            begun.close()
        raise
    assert begun is not None
    return begun


def _open(registry: Registry, roster: Roster, number: int, config: BufferConfig, floor: int, timeout_s: float) -> Begun:
    job = roster.seat.job
    job.retain()
    line = None
    try:
        line = registry.open(number, roster.newest, config.words())
        roster.watch(number, line, floor, timeout_s)
        return Begun(number, registry, line, roster)
    except BaseException:
        roster.close()
        if line is not None:
            line.words[NUMBER] = line.words[VIEW] = 0
        job.release()
        raise


def _join(group: dist.ProcessGroup, seat: GroupInView, config: BufferConfig, timeout_s: float) -> Begun | None:
    """Take part in the oldest running buffer that this process does not have; None when there is none."""
    mine, roster = registry_of(group, seat), Roster(seat)
    others: dict[int, Registry] = {}
    for rank, member in roster.view.members.items():
        endpoint = parse_endpoint(member.endpoint)
        found = find(seat.lane, endpoint.pid, endpoint.start_time) if rank != group.rank() else None
        if found is not None:
            others[rank] = found
    lines = {rank: _of_mode(registry.numbers(), config) for rank, registry in others.items()}
    for number in sorted({number for held in lines.values() for number in held} - mine.had):
        holders = [rank for rank, held in lines.items() if number in held]
        is_closed = any(registry.has_closed(number) for registry in others.values())
        if not is_closed and _fits(lines[holders[0]][number], holders[0], config, group.rank()):
            return _open(mine, roster, number, config, roster.newest, timeout_s)
    return None


def _of_mode(lines: dict[int, Line], config: BufferConfig) -> dict[int, Line]:
    """Return the lines of buffers of the same mode; replacements come into those of latency mode in another way."""
    index = CONFIG_NAMES.index("mode")
    mode = config.words()[index]
    return {number: line for number, line in lines.items() if line.config(len(CONFIG_NAMES))[index] == mode}


def _fits(line: Line, rank: int, config: BufferConfig, own_rank: int) -> bool:
    """Return whether a running buffer is for this many ranks.

    Raises:
        MismatchError: it is, but was made with other arguments.
    """
    words, theirs = config.words(), line.config(len(CONFIG_NAMES))
    if theirs[0] != words[0]:
        return False
    for name, own, other in zip(CONFIG_NAMES, words, theirs, strict=True):
        if own != other:
            raise MismatchError(
                f"Buffer: a buffer of the group runs that was made with another {name}: rank {rank} has "
                f"{describe_word(name, other)}, rank {own_rank} has {describe_word(name, own)}; give the same, or "
                "close that one on all ranks first"
            )
    return True
