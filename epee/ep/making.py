"""The parts of all ways to make a buffer: the job of a foreign group, and steps that all ranks pass or fail alike.

A step is local: a rank makes a part of its buffer. `reported` runs it and then exchanges, through the group, whether it
was possible everywhere; else all ranks raise the same. A rank that dies in between has reached one step for some ranks
and another one for others: so each checks whether a maker is dead when its step or the exchange fails.

Each rank sends one record per step. A crash between two steps is reported by the process group, or found as above.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch.distributed as dist

from ..errors import (
    AbortedError,
    CommTimeoutError,
    EpeeError,
    MismatchError,
    PeerError,
    RankFailedError,
    ResourceError,
    expected,
)
from ..memory.claim import OwnerEndedError, has_ended
from ..memory.shared import process_start_time
from ..view.founding import find_place
from ..view.group import GroupInView
from ..view.process.detector import is_leaving, is_torn_down
from .config import CONFIG_NAMES, BufferConfig, describe_word
from .job import job_handle_at
from .members.bootstrap import GROUP_FAILED, TEXT_BYTES, all_gather_bytes, compare, gather_present

logger = logging.getLogger("epee")

ENDED = "process ended"
_PROCESS = struct.Struct("<QQ")  # pid, start time
_PROBLEM = struct.Struct(f"<Q{TEXT_BYTES}s")  # ranks that are dead, a bit for each; text
_OP = "Buffer"  # the call named in the errors of this module
_DYING_S = 1.0  # how long to wait for the proof that a process is dead which seems to be dying


def ended_of(processes: Mapping[int, tuple[int, int]], told: Callable[[], Collection[int]] = tuple) -> tuple[int, ...]:
    """Return the ranks whose processes have ended, or that are `told` to have; waits for the proof if one is dying."""
    until = time.monotonic() + _DYING_S
    while True:
        seen = {rank for rank, process in processes.items() if has_ended(*process) or is_torn_down(*process)}
        dead = tuple(sorted({*seen, *told()}))
        is_sure = dead or not any(is_leaving(*process) for process in processes.values())
        if is_sure or time.monotonic() > until:
            return dead
        time.sleep(1e-3)


@contextlib.contextmanager
def job_found(group: dist.ProcessGroup, config: BufferConfig) -> Iterator[GroupInView]:
    """Find the job that the ranks of another backend's group share, or make one; held for what runs inside. Collective.

    Raises:
        MismatchError: the ranks disagree about the buffer, or another one was refused. As `founding.find_place`.
        RankFailedError: a rank is dead, and that is why the group has failed.
    """
    processes = _compare(group, config)
    with _naming_ended(processes):
        place = find_place(group.rank(), len(processes), partial(all_gather_bytes, group))
        try:
            yield job_handle_at(place, config.fault_mode, config.on_stall)
        finally:
            place.job_handle.job.release()  # the buffer holds it now, or creation failed


def _compare(group: dist.ProcessGroup, config: BufferConfig) -> list[tuple[int, int]]:
    """Compare the arguments of the ranks of another backend's group; return their processes (pid, start time)."""
    pid = os.getpid()
    records = compare(group, config, lambda: _PROCESS.pack(pid, process_start_time(pid)))
    return [_PROCESS.unpack_from(record.blob) for record in records.values()]


@contextlib.contextmanager
def _naming_ended(processes: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Raise that ranks are dead where that is why another backend's group has failed."""
    try:
        yield
    except expected(PeerError) as error:
        until = time.monotonic() + _DYING_S
        while error.cause == GROUP_FAILED and time.monotonic() < until:
            ended = [rank for rank, process in enumerate(processes) if has_ended(*process)]
            if ended:
                raise death_in_birth(ended) from error
            time.sleep(1e-3)
        raise


def death_in_birth(dead: Sequence[int]) -> RankFailedError:
    """Return the error that all survivors raise if ranks die while a buffer is made."""
    names = ", ".join(map(str, dead))
    return RankFailedError(
        f"Buffer: rank {names} is dead (its process ended) since the ranks began to make the buffer; make it in a "
        "group of the others (new_group)",
        dead,
        _OP,
        cause=ENDED,
    )


@contextlib.contextmanager
def told_alike(death: Callable[[], PeerError | None]) -> Iterator[None]:
    """Raise the same error on all ranks if a rank dies while the others make a buffer: each meets it in another step.

    A refusal stays as it is: a rank that has announced why it cannot make its part may well have ended after that.

    Args:
        death: returns the error to raise if a rank has died since the ranks began.
    """
    try:
        yield
    except expected(MismatchError, AbortedError):
        raise
    except expected(Exception) as error:
        found = death()
        if found is not None:
            raise found from error
        raise


class Reported:
    """A step of the creation of a buffer, and what the ranks give each other with it.

    Attributes:
        data: of this rank; equally long on all.
        found: of the ranks, by rank, once the step is over.
    """

    def __init__(self, length: int) -> None:
        self.data = bytes(length)
        self.found: dict[int, bytes] = {}


@contextlib.contextmanager
def reported(group: dist.ProcessGroup, deaths: Callable[[], Sequence[int]], length: int = 0) -> Iterator[Reported]:
    """Run a step inside, and report to all ranks whether it was possible here; raise on all if it was not. Collective.

    Args:
        group: of the buffer.
        deaths: returns the makers that have died, waits for the proof if one is dying.
        length: of the data, in bytes.
    """
    step, problem = Reported(length), None
    try:
        yield step
    except expected(EpeeError) as error:
        is_death = isinstance(error, OwnerEndedError)  # the memory of a maker could not be opened
        problem = death_in_birth(dead) if is_death and (dead := deaths()) else error
    with _naming_deaths(deaths):
        step.found = _tell_problems(group, problem, step.data)


@contextlib.contextmanager
def _naming_deaths(deaths: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Raise that a rank is dead if that may be why the group has failed: another backend's, or in mode "raise"."""
    try:
        yield
    except expected(RuntimeError) as error:
        is_groups = not isinstance(error, EpeeError) or (isinstance(error, PeerError) and error.cause == GROUP_FAILED)
        is_groups = is_groups or (isinstance(error, RankFailedError) and error.op != _OP)
        if is_groups and (dead := deaths()):
            raise death_in_birth(dead) from error
        raise


def _tell_problems(group: dist.ProcessGroup, problem: EpeeError | None, data: bytes) -> dict[int, bytes]:
    """Report to all ranks why this one cannot make its part, if so; raise that cause on all ranks.

    Returns:
        The `data` of the ranks, equally long on all, by rank.
    """
    mine = "" if problem is None else f"{type(problem).__name__}: {problem}"
    lost = 0
    if isinstance(problem, RankFailedError) and problem.cause == ENDED:
        lost = sum(1 << rank for rank in problem.ranks)
    parts = gather_present(group, _PROBLEM.pack(lost, mine.encode()[:TEXT_BYTES]) + data)
    told = {rank: _PROBLEM.unpack_from(part) for rank, part in parts.items()}
    dead = functools.reduce(operator.or_, (bits for bits, _ in told.values()), 0)
    if dead:
        raise death_in_birth([rank for rank in range(dead.bit_length()) if dead >> rank & 1]) from problem
    texts = {rank: data.rstrip(b"\0").decode("utf-8", "replace") for rank, (_, data) in told.items()}
    for rank in sorted(texts, key=lambda rank: texts[rank].startswith(CommTimeoutError.__name__)):
        if texts[rank]:
            raise ResourceError(f"Buffer: rank {rank} could not make its part: {texts[rank]}")
    return {rank: part[_PROBLEM.size :] for rank, part in parts.items()}


def fits(theirs: Sequence[int], rank: int, config: BufferConfig, own_rank: int) -> bool:
    """Return whether a running buffer with these words has as many ranks and was made with these arguments.

    Raises:
        MismatchError: `Buffer`: it has as many, but was made with other arguments.
    """
    words = config.words()
    if theirs[0] != words[0]:
        return False
    for name, own, other in zip(CONFIG_NAMES, words, theirs, strict=True):
        if own != other:
            told = (
                f"Buffer: a buffer of the group runs that was made with another {name}: rank {rank} has "
                f"{describe_word(name, other)}, rank {own_rank} has {describe_word(name, own)}"
            )
            if config.is_latency:  # a group may have several, one for each shape
                logger.info(told)
                return False
            raise MismatchError(f"{told}; give the same, or close that one on all ranks first")
    return True
