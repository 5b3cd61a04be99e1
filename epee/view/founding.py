"""Creation of a job for processes that have a group of another backend: through that group's all_gather alone.

    round 1   every rank sends the jobs that it is in, with its slot, its incarnation and the members that it knows
              there; rank 0 the id of the group
    round 2   only where they share no job: rank 0 makes the folder of a new one and sends its path
    round 3   each rank, having opened it and listening, sends its member

All ranks read the same data, so they make the same choice: a job in whose newest view, of those sent by the ranks, all
of them are members (a rank that was evicted may not have noticed it yet). A rank that cannot do its part sends the
reason in place of its data, and all ranks raise. No store is needed and nothing is left in the group: it is not used
after this.

The group is trusted, as it is with everything that it carries. The received data is checked all the same; the folder
and its token must belong to this user (`transport/directory.py`).

Jobs are held from before they are sent until one is chosen, so none of them ends in between. The death of a rank during
a round is handled by the group; one after the last round is noticed by the view.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import EpeeError, ProtocolError, ResourceError, expected
from .job import Job, JobHandle, hold_jobs, new_folder, pack_member, parse_member, start_job, told_fields
from .transport.directory import JobDirectory
from .transport.wire import GROUP_ID_LIMIT, MAX_MEMBERS

Gather = Callable[[bytes], Sequence[bytes]]  # equally long byte strings of all ranks, in rank order
TOLD_BYTES = 8192
MAX_TEXT = 400


class Standing(NamedTuple):
    """A process's membership in a job, and its view there: epoch, and slot -> incarnation of the members."""

    slot: int
    incarnation: int
    epoch: int
    members: Mapping[int, int]


class Presence(NamedTuple):
    """The data of a rank in round 1: id of a job -> its standing there; the group id that rank 0 requests."""

    jobs: dict[str, Standing]
    group_id: int


class GroupHandle(NamedTuple):
    """This process's handle of a job, and the incarnation of each rank's process there."""

    job_handle: JobHandle
    incarnations: Sequence[int]


def find_place(rank: int, num_ranks: int, gather: Gather) -> GroupHandle:
    """Return this rank's handle of the youngest job that all ranks share, or of a new one. Collective.

    The ranks are known to run on one host.

    The job is held for the caller: `job_handle.job.release()` releases it.

    Args:
        rank, num_ranks: of the group.
        gather: its all_gather.

    Raises:
        ResourceError: a rank has no memory, descriptor or folder; the same on all.
        ProtocolError: the data that a rank sends is invalid.
    """
    held = hold_jobs()
    try:
        told = [_presence(fields, peer) for peer, fields in enumerate(_tell(gather, _own_presence(held)))]
        key = next((key for key in reversed(told[0].jobs) if _is_shared(key, told)), "")
        if not key:
            return GroupHandle(_found(rank, gather, told[0].group_id), [1] * num_ranks)
        job = next(job for job in held if job.key == key)
        held.remove(job)
        slots = [each.jobs[key].slot for each in told]
        return GroupHandle(
            JobHandle(job, slots, told[0].group_id, False, False), [each.jobs[key].incarnation for each in told]
        )
    finally:
        for job in held:
            job.release()


def _own_presence(held: Sequence[Job]) -> dict[str, Any]:
    """Return the data that this rank sends in round 1; of many jobs the youngest that fit."""
    jobs: dict[str, Any] = {}
    room = TOLD_BYTES - MAX_TEXT
    for job in reversed(held):
        view, me = job.runtime.view(), job.runtime.member
        standing = [me.slot, me.incarnation, view.epoch, [[m.slot, m.incarnation] for m in view.members]]
        room -= len(json.dumps([job.key, standing])) + 8
        if room > 0:
            jobs = {job.key: standing, **jobs}
    return {"jobs": jobs, "group_id": 1 + secrets.randbelow(GROUP_ID_LIMIT - 1)}


def _is_shared(key: str, told: Sequence[Presence]) -> bool:
    """Return whether all ranks are in a job, by the newest of the views that they sent."""
    if not all(key in each.jobs for each in told):
        return False
    standings = [each.jobs[key] for each in told]
    newest = max(standings, key=lambda standing: standing.epoch)
    return all(newest.members.get(one.slot) == one.incarnation for one in standings)


def _found(rank: int, gather: Gather, group_id: int) -> JobHandle:
    """Create a job together with all ranks; see rounds 2 and 3."""
    with contextlib.ExitStack() as undo:
        problem, directory, job = "", None, None
        if rank == 0:
            try:
                # not the job of a backend's group: a process that joins a group must not find it
                directory = new_folder("/buffers")
                undo.callback(directory.leave)
            except expected(EpeeError) as exc:
                problem = str(exc)
        path = _tell(gather, _said({"folder": "" if directory is None else str(directory.path)}, problem))[0]["folder"]
        try:
            if directory is None:
                directory = JobDirectory.open(str(path))
                undo.callback(directory.leave)
            job = Job(directory, rank, b"")
            undo.pop_all()  # the job leaves its folder
            undo.callback(job.release)
            job.runtime.listen()
        except expected(EpeeError) as exc:
            problem = str(exc)
        words = {"member": pack_member(job.runtime.member) if job is not None else ""}
        members = [str(fields["member"]) for fields in _tell(gather, _said(words, problem))]
        assert job is not None  # else all ranks have raised
        job_handle = JobHandle(job, list(range(len(members))), group_id, True, False)
        start_job(job_handle, [parse_member(text, peer) for peer, text in enumerate(members)])
        undo.pop_all()
        return job_handle


def _said(words: dict[str, Any], problem: str) -> dict[str, Any]:
    return {"failed": problem.encode("ascii", "replace").decode()[:MAX_TEXT]} if problem else words


def _tell(gather: Gather, words: dict[str, Any]) -> list[dict[str, Any]]:
    """Send data to all ranks and return what they send, in rank order; raise if one of them has failed."""
    raw = json.dumps(words).encode()
    assert len(raw) <= TOLD_BYTES, len(raw)
    told = [_fields(data, peer) for peer, data in enumerate(gather(raw.ljust(TOLD_BYTES, b" ")))]
    for peer, fields in enumerate(told):
        if "failed" in fields:
            raise ResourceError(f"Buffer: rank {peer} could not make its part of the job: {fields['failed']}")
    for peer, fields in enumerate(told):
        if set(fields) != set(words):
            raise ProtocolError(f"rank {peer} tells {list(fields)[:9]}, not {list(words)}; another version of epee?")
    return told


def _fields(data: bytes, peer: int) -> dict[str, Any]:
    try:
        return told_fields(data, TOLD_BYTES)
    except expected(ValueError) as exc:
        at = getattr(exc, "pos", 0)  # of text that is not JSON
        around, length = data[max(0, at - 20) : at + 20], len(data.rstrip(b" "))
        raise ProtocolError(
            f"what rank {peer} tells cannot be read ({exc}; {length} bytes, {around!r} there); another version of epee?"
        ) from exc


def _presence(fields: dict[str, Any], peer: int) -> Presence:
    """Return a checked `Presence`."""
    jobs, group_id = fields["jobs"], fields["group_id"]
    try:
        if type(group_id) is not int or not 0 < group_id < GROUP_ID_LIMIT:
            raise ValueError("group_id")
        return Presence({key: _standing(*standing) for key, standing in jobs.items()}, group_id)
    except expected(ValueError, TypeError, AttributeError) as exc:
        told = str(fields)[:200]
        raise ProtocolError(f"rank {peer} tells of its jobs what cannot be right ({exc}): {told}") from exc


def _standing(slot: Any, incarnation: Any, epoch: Any, members: Any) -> Standing:
    pairs = [(slot, incarnation), *((one, other) for one, other in members)]
    numbers = [epoch, *(number for pair in pairs for number in pair)]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("numbers")
    if not all(one < MAX_MEMBERS and other for one, other in pairs):
        raise ValueError("slots")
    return Standing(slot, incarnation, epoch, dict(pairs[1:]))
