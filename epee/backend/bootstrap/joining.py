"""A process joins a running group (`is_extension=True`), in the place of a lost rank or where nobody has been before.

It finds the job's folder through the store or, when the store is gone, among this user's running jobs; reads the note
about the group (`home.py`); makes its outbox; and asks the members to be taken in. They do so when one of them calls
`recover_ranks`. The decision that has this process as a member says who the others are and where their outboxes lie,
and from which call on it takes part. Nobody waits for it before that decision, and a crash on the way disturbs nobody.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

from ... import env
from ...errors import AuthError, InvalidArgument, InvalidState, UnsupportedError
from ...link.topology import own_host_key
from ...memory.host import HostRegion
from ...view.job import Job, Seat, job_name
from ...view.process.detector import DeathWatch
from ...view.process.endpoint import parse_endpoint
from ...view.protocol.messages import Decision
from ...view.transport.directory import JobDirectory, find_jobs
from ..engine.engine import Engine
from ..membership.epochs import Survival
from ..membership.members import attach_outbox, make_blank
from ..options import MAX_RANKS
from ..outbox import LIFE, LIFE_READY, Outboxes, OutboxOwner, outbox_layout
from ..p2p.channel import first_number
from ..wake import publish_word
from .attempt import read_fields
from .birth import keep
from .home import FOLDER_KEY, HOSTS, Home, outbox_of, pack_extra, parse_home, parse_place
from .proof import proved

STORE_WAIT_S = 2.0


def find_folder(store: Any) -> JobDirectory:
    """Return the folder of the running job.

    Raises:
        InvalidState: there is no running job, or there are several and the store does not say which.
        UnsupportedError: the ranks run on several hosts, or on another one than this process.
    """
    try:
        store.wait([FOLDER_KEY], timedelta(seconds=STORE_WAIT_S))
        return _open_told(bytes(store.get(FOLDER_KEY)))
    except (AuthError, UnsupportedError):
        raise
    except RuntimeError as exc:  # the store has died or is another one: the folder itself can be found
        jobs = find_jobs(job_name()) if env.get("MASTER_PORT") else []  # else any job could be taken for ours
        if len(jobs) != 1:
            raise InvalidState(
                f"is_extension=True: the store names no running job ({str(exc).splitlines()[0]}) and {len(jobs)} jobs "
                f"of {job_name()} run here; use the store of the running ranks, and start it on "
                "their host: who joins shares their memory"
            ) from exc
        return JobDirectory.open(jobs[0])


def _open_told(raw: bytes) -> JobDirectory:
    """Open the folder that rank 0 has named in the store; `AuthError` unless the job's own token proves it."""
    fields = read_fields(raw, 0)
    if HOSTS in fields:
        raise UnsupportedError(
            f"is_extension=True: the group runs on {str(fields[HOSTS])[:4]} hosts, and groups over several hosts "
            "take nobody in yet; start all ranks anew"
        )
    folder, host = parse_place(str(fields.get("record", "")))
    if host not in ("", own_host_key()):
        raise UnsupportedError(
            "is_extension=True: the running ranks are on another host, and who joins shares their memory; start this "
            "process on their host (a container: in their PID namespace, --pid=host)"
        )
    directory = JobDirectory.open(folder)
    try:
        proved(directory.token, fields, FOLDER_KEY.encode(), "the job's")
    except BaseException:
        directory.leave()
        raise
    return directory


def join_engine(store: Any, rank: int, num_ranks: int, timeout_s: float, mode: str) -> Engine:
    """Take `rank`'s place; returns when the members have taken this process in.

    Args:
        num_ranks: the world size that this process was started with; the group has at least so many ranks then.
    Raises:
        InvalidState: no group can be joined. UnsupportedError: its ranks run on other hosts.
        SlotTakenError: another process has this rank.
        InvalidArgument: the group has another mode.
        CommTimeoutError: no member has called `recover_ranks` or `extend_group_size_to` within `timeout_s`.
        ResourceError: no memory or descriptor is left here.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as undo:
        directory = find_folder(store)
        undo.callback(directory.leave)
        home = parse_home(directory.read_home())
        _check(home, rank, num_ranks, mode)
        layout = outbox_layout(MAX_RANKS, home.staging_bytes)
        region = HostRegion.create(layout.nbytes, f"outbox{rank}", only_owner_writes=True)
        undo.callback(region.close)
        job = Job(directory, rank, pack_extra(home.lane, num_ranks, region.blob))
        OutboxOwner(job.runtime.member.nonce, home.lane, rank).sign(region)
        leave = job.release
        undo.callback(lambda: leave())
        decision = job.runtime.join(max(0.1, deadline - time.monotonic()), has_lane=True)
        job.enlist()
        survival = Survival(Seat(job, list(range(num_ranks)), home.lane, False, True), mode, decision)
        leave = survival.close
        survival.join(decision)
        engine = _start(survival, decision, home, rank, region)
        undo.pop_all()
        return engine


def _check(home: Home, rank: int, num_ranks: int, mode: str) -> None:
    if home.mode != mode:
        raise InvalidArgument(
            f"fault_mode and on_stall must be those of the running group, {home.mode!r}, got {mode!r}"
        )
    if not 0 <= rank < num_ranks <= MAX_RANKS:
        raise InvalidArgument(
            f"rank must be below world_size, and that at most {MAX_RANKS}, got rank {rank} of {num_ranks}"
        )


def _size(decision: Decision, home: Home) -> int:
    """Return how many ranks the group counts: what its newcomers were told, and room for all who are there.

    The others may count more, if the group has lost ranks beyond: lists are a rank's own affair.
    """
    size = 1 + max(member.slot for member in decision.members)
    for member in decision.members:
        part = outbox_of(member, home.lane)
        if part is not None and member.incarnation == decision.epoch:
            size = max(size, part.num_ranks)
    return size


def _watch_others(decision: Decision, rank: int) -> DeathWatch:
    watch = DeathWatch()
    try:
        for member in decision.members:
            if member.slot != rank:
                endpoint = parse_endpoint(member.endpoint)
                watch.watch(member.slot, endpoint.pid, endpoint.start_time)
    except BaseException:
        watch.close()
        raise
    return watch


def _start(survival: Survival, decision: Decision, home: Home, rank: int, region: HostRegion) -> Engine:
    """Map everybody's outbox and make the engine. Absent ranks get a blank one that nobody writes."""
    nbytes = region.nbytes
    parts = {member.slot: outbox_of(member, home.lane) for member in decision.members}
    size = _size(decision, home)
    regions: list[HostRegion] = [region] * size
    blank = make_blank(nbytes)
    for peer in range(size):
        part = parts.get(peer)
        if peer != rank:
            regions[peer] = (part and attach_outbox(part, nbytes)) or blank
    box = Outboxes(rank, regions, home.staging_bytes, 1, MAX_RANKS)
    box.blanks.update(peer for peer in range(size) if regions[peer] is blank)
    watch = _watch_others(decision, rank)
    engine = Engine(box, watch, 300.0, first_number(decision.epoch))
    survival.attach(engine)
    publish_word(box, LIFE, LIFE_READY)
    keep(engine)
    return engine
