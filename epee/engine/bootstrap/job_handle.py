"""The job of a group of the backend, and the store in which the ranks of a later group find each other.

`view/job.py` has the protocol; the ranks exchange their data through the group's store.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore

from ...view.job import Hello, Job, JobHandle, common_job, jobs, retained
from ...view.transport.directory import JobDirectory
from ..limits import MAX_RANKS
from .bounded_store import BoundedStore
from .group_note import pack_extra


class Greeting(NamedTuple):
    """The greetings of all ranks of a group before it has a job.

    Attributes:
        directory: the folder of a new job that rank 0 has made, in case; None on the others.
        folder: of the new job, if one is needed.
        told: represents all of that (`proof.transcript`).
    """

    hellos: list[Hello]
    directory: JobDirectory | None
    folder: str
    told: bytes

    @property
    def spans(self) -> bool:
        """Return whether the group is one over several hosts even if all its ranks are on one: others may join."""
        return self.hellos[0].spans

    @property
    def capacity(self) -> int:
        """The number of ranks for which outboxes need room: groups may grow."""
        return MAX_RANKS

    def withdraw(self) -> None:
        """Remove a folder that will not be used. After `take_job_handle` the job does that."""
        if self.directory is not None:
            self.directory.leave()


def take_job_handle(
    greeting: Greeting,
    rank: int,
    blob: bytes,
    port: int,
    enter: Callable[[], JobDirectory],
    listen: Callable[[], socket.socket | None],
    undo: contextlib.ExitStack,
) -> JobHandle:
    """Return this rank's job handle, in the common job or in a new one; `blob` is that of its outbox.

    Args:
        port: where its links with other hosts are made; 0 on one host.
        enter: returns the folder of a new job.
        listen: returns the listener for agents of other hosts of a new job; None on one host.
        undo: gets the cleanup if a new job cannot be made here, once the peers have been notified of the reason.
    Raises:
        ResourceError: the system gives no memory or descriptor.
    """
    hellos = greeting.hellos
    key = common_job(hellos)
    group_id = hellos[0].group_id
    job = retained(key)
    if job is not None:
        return JobHandle(job, [hello.jobs[key] for hello in hellos], group_id, False, False)
    extra = pack_extra(group_id, len(hellos), blob, port)
    directory = enter()
    undo.callback(directory.leave)
    job = Job(directory, rank, extra, listen())
    undo.callback(job.release)
    job.runtime.listen()
    undo.pop_all()
    return JobHandle(job, list(range(len(hellos))), group_id, True, True)


def own_job() -> Job | None:
    """Return the youngest job of this process with a group of the backend; None when it belongs to none."""
    return next((job for job in reversed(jobs()) if job.has_home), None)


def meeting_place(store: BoundedStore, ranks: Sequence[int]) -> BoundedStore:
    """Return the store in which the ranks of a new group find each other: torch's, unless it cannot work.

    torch names groups by counting those that a process has made. A joiner has made fewer than the others, so if any
    rank has joined the name is made of data that all members have alike.
    """
    for job in reversed(jobs()):
        name_later = None if job.name_later is None else job.name_later()
        name = "" if name_later is None else name_later(ranks)
        if name:
            return store.over(PrefixStore(name, job.store))
    return store
