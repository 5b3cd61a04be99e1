"""The choice of the control plane of a group: that of a job which all its processes share, or a new one.

A process has one `Runtime` (`runtime.py`) per job. The first group creates a job: rank 0 makes its folder and sends its
path to the others, all ranks start with the same first view. Later groups whose ranks all belong to one job use it, so
their views are projections of one; a group that mixes jobs creates another.

Order: every rank publishes a `Hello` (its jobs and slots; rank 0 the group's id and, if need be, a new folder), reads
all of them and makes the same choice. The group defines the transport: a group of the backend has a store
(`engine/bootstrap/creation.py`). In a job that runs already the group is registered before this rank publishes the
epoch that it knows; the group begins in the highest published epoch, and every rank has learned, or will learn, all
decisions from there on. Initial members begin in epoch 1.

When the last group of a job is destroyed the process leaves the job, in order. A crash on the way is handled like any
other death.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import env
from ..errors import EpeeError, InvalidArgument, InvalidState, MismatchError, ProtocolError, expected, ignored, shortage
from .process.machine import KEY_DIGITS
from .protocol.events import AgentSettings
from .protocol.messages import LEFT, Member
from .runtime import Runtime
from .transport.directory import JobDirectory
from .transport.wire import GROUP_ID_LIMIT, MAX_MEMBERS, NONCE_BYTES, parse_endpoint

MAX_JOBS_TOLD = 8
SETTINGS = AgentSettings(policy="evict", admit="ask")  # each group chooses itself whether it accuses ranks


@dataclass(frozen=True)
class Hello:
    """The data that a rank publishes before a group has a job.

    Attributes:
        num_ranks: the number of ranks of the group, as this rank was given it.
        jobs: id of each job that this process is in -> its slot there.
        group_id: rank 0's choice for the group; -1 on the others.
        folder: of a new job, made by rank 0; "" when it may not be needed.
        nonce: random, so that data of another attempt does not fit this one (`proof.py`).
        host: the host it runs on (`link/topology.py`).
        spans: the group is treated as one over several hosts, even if its ranks are on one (EPEE_OVER_HOSTS).
    """

    num_ranks: int
    jobs: dict[str, int]
    group_id: int
    folder: str
    nonce: str
    host: str
    spans: bool


class JobHandle(NamedTuple):
    """This process's handle of the job of a group.

    Attributes:
        slots: of each rank.
        group_id: id of the group.
        is_founder: the group creates the job.
        is_home: it is the first group of the job; a process that joins the job joins this group.
    """

    job: Job
    slots: list[int]
    group_id: int
    is_founder: bool
    is_home: bool


class Job:
    """A `Runtime` and the number of groups that use it.

    Attributes:
        has_home: a group of the backend created it, which later joiners join.
        store: the store through which the first group was made, or joined.
        name_later: records in that store where the ranks of a later group meet (`Admission.name_later`); dead or None
        when the first group has been destroyed.
    """

    store: Any = None
    name_later: weakref.WeakMethod[Callable[[Sequence[int]], str]] | None = None

    def __init__(self, directory: JobDirectory, slot: int, extra: bytes, listener: socket.socket | None = None) -> None:
        """Make this process's part in a job, which owns `listener` (for agents of other hosts) from now on."""
        self.key = directory.job_id.hex()
        self.directory = directory
        self.has_home = bool(extra)
        settings = SETTINGS._replace(silence_s=env.get_float("EPEE_HOST_TIMEOUT_S"), death_window_s=_window.seconds)
        self.runtime = Runtime(directory, slot, settings, extra, listener)
        self.num_groups = 1

    def enlist(self) -> None:
        """Let later groups of this process find the job."""
        with _lock:
            _jobs[self.key] = self

    @property
    def slot(self) -> int:
        """This process's rank number in the job."""
        return self.runtime.member.slot

    def retain(self) -> None:
        """Hold the job for another user in this process (a buffer); `release` follows."""
        with _lock:
            self.num_groups += 1

    def release(self, cause: str = LEFT) -> None:
        """Release the job for one group; the last release takes the process out of the job, for LEFT or EXITED."""
        with _lock:
            self.num_groups -= 1
            is_last = self.num_groups <= 0
            if is_last:
                _jobs.pop(self.key, None)
        if is_last:
            self.runtime.close(cause)


class _Window:
    """The time that decisions on deaths wait, in all jobs of this process."""

    seconds = 0.0


_window = _Window()
_jobs: dict[str, Job] = {}
_lock = threading.RLock()  # a garbage collection under it may end a dropped buffer


def _forget() -> None:
    """Drop the jobs in a forked child: they are the parent's, and the holder of the lock may be as well."""
    global _lock
    _lock = threading.RLock()
    _jobs.clear()


os.register_at_fork(after_in_child=_forget)


def set_death_window(seconds: float) -> None:
    """Let decisions on a death wait so long for further deaths, in the current and later jobs of this process.

    The rank that decides is the lowest one alive, so all ranks should set the same.

    Raises:
        InvalidArgument: not a number of seconds from 0 on.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e6:
        raise InvalidArgument(f"the window must be a number of seconds from 0 on, got {seconds!r}")
    _window.seconds = float(seconds)
    for job in jobs():
        with ignored(InvalidState):  # closed, or not begun: then it reads the window when it begins
            job.runtime.set_death_window(_window.seconds)


def jobs() -> list[Job]:
    """Return the jobs of this process, oldest first."""
    with _lock:
        return list(_jobs.values())


def hold_jobs() -> list[Job]:
    """Return the youngest working jobs of this process, oldest first, each held for one more group."""
    with _lock:
        found = [job for job in _jobs.values() if job.runtime.error is None][-MAX_JOBS_TOLD:]
        for job in found:
            job.num_groups += 1
        return found


def retained(key: str) -> Job | None:
    """Return the job with an id, held for one more group; None when this process is not in it."""
    with _lock:
        job = _jobs.get(key)
        if job is not None:
            job.num_groups += 1
        return job


def job_name() -> str:
    """Return the name that the processes of a job share before they meet: that of their rendezvous."""
    return f"{env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"


def new_folder(kind: str = "") -> JobDirectory:
    """Make the folder of a new job of some kind; `ResourceError` where the system gives none."""
    try:
        return JobDirectory.create(job_name() + kind)
    except expected(OSError) as exc:
        if isinstance(exc, EpeeError):
            raise
        raise shortage("cannot make a folder for the job", exc) from exc


def own_hello(rank: int, num_ranks: int, host: str, spans: bool) -> tuple[Hello, JobDirectory | None]:
    """Return the `Hello` of this rank, which runs on `host`, and the folder that rank 0 makes when it is in no job."""
    with _lock:
        usable = {key: job.slot for key, job in _jobs.items() if job.has_home and job.runtime.error is None}
    mine = dict(list(usable.items())[-MAX_JOBS_TOLD:])
    nonce = secrets.token_hex(NONCE_BYTES)
    if rank != 0:
        return Hello(num_ranks, mine, -1, "", nonce, host, spans), None
    directory = None if mine else new_folder()
    group_id = secrets.randbelow(GROUP_ID_LIMIT)
    folder = "" if directory is None else str(directory.path)
    return Hello(num_ranks, mine, group_id, folder, nonce, host, spans), directory


def check_spans(hellos: Sequence[Hello]) -> None:
    """Raise `MismatchError` where the ranks are on one host and disagree on whether the group is to span several."""
    told = {spans: [rank for rank, hello in enumerate(hellos) if hello.spans == spans] for spans in (True, False)}
    if len({hello.host for hello in hellos}) == 1 and all(told.values()):
        yes, no = (", ".join(map(str, told[spans])) for spans in (True, False))
        raise MismatchError(
            f"EPEE_OVER_HOSTS must be equal on all ranks of a group that begins on one host: 1 on rank(s) {yes}, 0 or "
            f"unset on rank(s) {no}; set it alike for all of them"
        )


def common_job(hellos: Sequence[Hello]) -> str:
    """Return the id of the youngest job of rank 0 that all ranks are in, or ""."""
    for key in reversed(hellos[0].jobs):
        if all(key in hello.jobs for hello in hellos):
            return key
    return ""


def start_job(job_handle: JobHandle, members: Sequence[Member]) -> None:
    """Begin with the first view; later groups can find the job from now on."""
    job_handle.job.runtime.start(members)
    job_handle.job.enlist()


def told_fields(raw: bytes, limit: int) -> dict[str, Any]:
    """Return the fields of a peer's JSON object; `ValueError` if it is longer than `limit`, or not one."""
    if len(raw) > limit:
        raise ValueError(f"{len(raw)} bytes")
    try:
        fields = json.loads(raw)
    except expected(RecursionError) as exc:
        raise ValueError(str(exc)) from exc
    if not isinstance(fields, dict):
        raise ValueError(f"{type(fields).__name__} instead of an object")
    return fields


def pack_member(member: Member) -> str:
    """Return a member as text for a record."""
    return json.dumps([member.slot, member.nonce.hex(), member.endpoint.hex(), member.host])


def parse_member(text: str, rank: int) -> Member:
    """Return the initial member that `rank` claims to be; `ProtocolError` if that is invalid."""
    try:
        slot, nonce, endpoint, host = json.loads(text)
        member = Member(slot, 0, bytes.fromhex(nonce), bytes.fromhex(endpoint), host)
        if not isinstance(host, str) or len(host) != KEY_DIGITS:
            raise ValueError(f"host {host!r}")
        if type(slot) is not int or slot != rank or len(member.nonce) != NONCE_BYTES:
            raise ValueError(f"slot {slot!r}, nonce of {len(member.nonce)} bytes")
        parse_endpoint(member.endpoint)
    except expected(ValueError, TypeError, RecursionError, ProtocolError) as exc:
        raise ProtocolError(
            f"rank {rank}'s record names a member that cannot be right ({exc}); does another job use this store?"
        ) from exc
    return member


def parse_hello(fields: dict[str, Any], rank: int, num_ranks: int) -> Hello:
    """Return a checked `Hello`; `ProtocolError` if it is invalid."""
    try:
        hello = Hello(**fields)
        jobs_ok = isinstance(hello.jobs, dict) and len(hello.jobs) <= MAX_JOBS_TOLD
        if not jobs_ok or not all(type(s) is int and 0 <= s < MAX_MEMBERS for s in hello.jobs.values()):
            raise ValueError(f"jobs are {hello.jobs!r}")
        if (
            type(hello.group_id) is not int
            or not -1 <= hello.group_id < GROUP_ID_LIMIT
            or not isinstance(hello.folder, str)
        ):
            raise ValueError(f"group_id is {hello.group_id!r}")
        if rank == 0 and hello.group_id < 0:
            raise ValueError("rank 0 names no group_id")
        if type(hello.num_ranks) is not int or not isinstance(hello.nonce, str) or not isinstance(hello.host, str):
            raise TypeError(f"num_ranks is {hello.num_ranks!r}, nonce {hello.nonce!r}, host {hello.host!r}")
        if type(hello.spans) is not bool:
            raise TypeError(f"spans is {hello.spans!r}")
        if len(bytes.fromhex(hello.nonce)) != NONCE_BYTES:
            raise ValueError("nonce has another size")
    except expected(TypeError, ValueError) as exc:
        raise ProtocolError(
            f"rank {rank}'s greeting in the store cannot be read ({exc}); does another job use this store?"
        ) from exc
    if hello.num_ranks != num_ranks:
        raise ProtocolError(f"num_ranks must be equal on all ranks: {num_ranks} here, {hello.num_ranks} on rank {rank}")
    return hello
