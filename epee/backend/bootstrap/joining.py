"""A process joins a running group (`is_extension=True`), in the place of a lost rank or where nobody has been before.

It finds the job's folder through the store or, when the store is gone, among this user's running jobs; reads the note
about the group (`home.py`); makes its outbox; and asks the members to be taken in. They do so when one of them calls
`recover_ranks`. The decision that has this process as a member says who the others are and where their outboxes lie,
and from which call on it takes part. Nobody waits for it before that decision, and a crash on the way disturbs nobody.

Into a group made with `new_group`, or back into one that it was put out of, a process comes that is in the job already
(`come_in`): it shows its offer on its board (`home.Offer`), members ask the agents for a view with it (`Want`), and all
else is as above. Which group that is, it learns from the note that the group's rank 0 has left in the group's store, or
it knows (`Place`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from ... import env
from ...errors import AuthError, EpeeError, InvalidArgument, InvalidState, ProtocolError, UnsupportedError
from ...memory.host import HostRegion
from ...view.job import Job, Seat, job_name, retained
from ...view.process.detector import DeathWatch
from ...view.process.machine import own_host_key
from ...view.protocol.messages import Decision
from ...view.transport.directory import JobDirectory, find_jobs
from ..engine.engine import Engine
from ..membership.epochs import Survival
from ..membership.members import attach_outbox, make_blank, narrow
from ..options import MAX_RANKS
from ..outbox import LIFE, LIFE_READY, Outboxes, OutboxOwner, outbox_layout
from ..p2p.channel import first_number
from ..wake import publish_word
from .attempt import read_fields
from .birth import keep
from .home import (
    ASKS,
    FOLDER_KEY,
    HOSTS,
    LANE_KEY,
    Home,
    Offer,
    pack_extra,
    pack_home,
    parse_home,
    parse_place,
)
from .proof import prove, proved
from .seat import own_job

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


class Place(NamedTuple):
    """A group that runs, and this process's rank in it.

    Attributes:
        home: what a note says about it.
        slots: of its ranks, in the job; no slot of the job where none is known (`Occupants.slot_of`).
        rank: of this process.
        is_home: it is the first group of its job.
    """

    home: Home
    slots: list[int]
    rank: int
    is_home: bool


def is_newcomer(store: Any, rank: int, num_ranks: int) -> bool:
    """Return whether a process that was told so is one more for a running group that was begun with fewer ranks."""
    if rank == 0 or not store.check([FOLDER_KEY]):
        return False
    try:
        directory = _open_told(bytes(store.get(FOLDER_KEY)))
    except (EpeeError, OSError):
        return False  # what is there is over, or not ours to read: who begins a group needs none of it
    try:
        num_founders = parse_home(directory.read_home()).num_ranks
    except EpeeError:
        return False
    finally:
        directory.leave()  # and with it the folder, if nobody is there any more
    return num_founders <= min(rank, num_ranks - 1) and directory.path.exists()


def names_job(store: Any) -> bool:
    """Return whether a group's store names a running job: the group is the first of it."""
    return bool(store.check([FOLDER_KEY]))


def place_of(engine: Engine, mode: str) -> Place | None:
    """Return this process's place in a group that it is in, None in one that takes nobody in."""
    if engine.survival is None:
        return None
    box, (lane, slots, is_home) = engine.box, engine.survival.place
    return Place(Home(lane, box.num_ranks, box.staging_bytes, mode), slots, box.rank, is_home)


def leave_note(store: Any, place: Place | None) -> None:
    """Have processes that come later find a group, of which this process is rank 0, in its store."""
    job = own_job()
    if place is None or place.is_home or place.rank or job is None:
        return
    with contextlib.suppress(RuntimeError):  # the store is gone: then nobody comes
        note = prove(job.directory.token, pack_home(place.home).hex(), LANE_KEY.encode())
        store.set(LANE_KEY, note)


def find_place(store: Any, ranks: Sequence[int], rank: int) -> Place:
    """Return the place of this process in the running group of these global ranks, or of the first of them.

    Raises:
        InvalidState: this process is in no job yet.
        InvalidArgument: there is no such group.
    """
    job = own_job()
    if job is None:
        raise InvalidState(
            "is_extension=True: this process is in no running job yet; join the default group first, then others"
        )
    try:
        store.wait([LANE_KEY], timedelta(seconds=STORE_WAIT_S))
        fields = read_fields(bytes(store.get(LANE_KEY)), 0)
    except RuntimeError as exc:
        raise InvalidArgument(
            f"is_extension=True: the store names no running group of ranks {list(ranks)} ({str(exc).splitlines()[0]}); "
            "make the groups in the order in which the running ranks have made them, with their store; a group that "
            "does not run yet is made by all its ranks, without is_extension"
        ) from exc
    text = proved(job.directory.token, fields, LANE_KEY.encode(), "the group's")
    try:
        home = parse_home(bytes.fromhex(text))
    except ValueError as exc:
        raise ProtocolError(f"the note about the group of ranks {list(ranks)} cannot be read: {exc}") from exc
    return Place(home, list(ranks), rank, False)


def come_in(place: Place, num_ranks: int, timeout_s: float, mode: str, before: Engine | None) -> Engine:
    """Take this process, which is in the job, into a running group; returns when its members have taken it in.

    Args:
        num_ranks: the size of the group that this process was told.
        timeout_s: how long to wait for them.
        before: the engine of this process's place in the group so far, if it had one; it is closed.
    Raises:
        InvalidState: this process is not in the group's job (any more).
        CommTimeoutError: no member has called `recover_ranks` in time. As `join_engine` else.
    """
    _check(place.home, place.rank, num_ranks, mode)
    own = own_job()
    job = None if own is None else retained(own.key)
    if job is None:
        raise InvalidState("this process is in no job any more; start it again with is_extension=True")
    home, rank = place.home, place.rank
    with contextlib.ExitStack() as undo:
        release = job.release
        undo.callback(lambda: release())
        if before is not None:
            before.close()  # it has the lane
        region = HostRegion.create(
            outbox_layout(MAX_RANKS, home.staging_bytes).nbytes, f"outbox{rank}", only_owner_writes=True
        )
        undo.callback(region.close)
        OutboxOwner(job.runtime.member.nonce, home.lane, job.slot).sign(region)
        survival = Survival(Seat(job, place.slots, home.lane, False, place.is_home), mode, asks=True)
        release = survival.close
        decision = survival.ask(Offer(ASKS, rank, num_ranks, region.blob), timeout_s)
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


def _start(survival: Survival, decision: Decision, home: Home, rank: int, region: HostRegion) -> Engine:
    """Map everybody's outbox and make the engine. Absent ranks get a blank one that nobody writes.

    The group counts as many ranks as its newcomers were told, and has room for all who are there. The others may count
    more, if it has lost ranks beyond: lists are a rank's own affair.
    """
    nbytes = region.nbytes
    parts = survival.parts(decision)
    told = [part.num_ranks for peer, part in parts.items() if survival.is_new(peer, decision)]
    size = max([1 + max(parts), *told])
    regions: list[HostRegion] = [region] * size
    blank = make_blank(nbytes)
    for peer in range(size):
        part = parts.get(peer)
        if peer != rank:
            regions[peer] = (part and attach_outbox(part, nbytes)) or blank
    box = Outboxes(rank, regions, home.staging_bytes, 1, MAX_RANKS)
    box.blanks.update(peer for peer in range(size) if regions[peer] is blank)
    watch = DeathWatch()
    try:
        for peer, part in parts.items():
            if peer != rank:
                watch.watch(peer, part.pid, part.start_time)
    except BaseException:
        watch.close()
        raise
    engine = Engine(box, watch, 300.0, first_number(decision.epoch))
    survival.attach(engine)
    publish_word(box, LIFE, LIFE_READY)
    keep(engine)
    return engine


def alone(rank: int, num_ranks: int, timeout_s: float, staging_bytes: int) -> Engine:
    """Return the engine of a process that joins a group later: it counts `num_ranks`, and has itself alone."""
    layout = outbox_layout(num_ranks, staging_bytes)
    region = HostRegion.create(layout.nbytes, f"outbox{rank}", only_owner_writes=True)
    try:
        blank = make_blank(layout.nbytes)
        box = Outboxes(rank, [region if peer == rank else blank for peer in range(num_ranks)], staging_bytes, 1)
        box.blanks.update(box.peers)
        engine = Engine(box, DeathWatch(), timeout_s)
        engine.members = narrow(box, [rank], 1)
    except BaseException:
        region.close()
        raise
    keep(engine)
    return engine
