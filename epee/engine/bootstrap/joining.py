"""The joining of a running group by a process (`is_extension=True`), in the rank of a lost process or a new one.

The process finds the job's folder through the store or, when the store does not exist any more, among this user's
running jobs; reads the note about the group (`group_note.py`); makes its outbox; and asks the members to be taken in.
They do so when one of them calls `recover_ranks`. The decision that has this process as a member lists the others and
the addresses of their outboxes, and the call from which on it takes part. No rank waits for it before that decision,
and a crash on the way disturbs none.

A process that is in the job already joins a group made with `new_group`, or returns into one that it was excluded from,
by `come_in`: it shows its offer on its board (`home.Offer`), members ask the agents for a view with it (`Want`), and
all else is as above. It learns which group that is from the note that the group's rank 0 has left in the group's store,
or it knows (`Place`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ... import env
from ...errors import (
    AuthError,
    EpeeError,
    InvalidArgument,
    InvalidState,
    MismatchError,
    ProtocolError,
    UnsupportedError,
    expected,
    ignored,
)
from ...link.engine import chosen_engine
from ...memory.shared import BLOB_BYTES, SharedRegion
from ...view.job import Job, JobHandle, job_name, new_folder, retained
from ...view.process.detector import DeathWatch
from ...view.process.machine import own_host_key
from ...view.protocol.messages import Decision
from ...view.transport.directory import JobDirectory, find_jobs
from ..engine import Engine
from ..limits import MAX_RANKS
from ..membership.group_membership import GroupMembership
from ..membership.members import attach_outbox, make_blank
from ..outbox import OutboxOwner, PeerRegions, outbox_layout
from ..p2p.channel import first_number
from ..replication.joining_over_hosts import Entrance, Found, find_over_hosts, tell_contact
from .attempt import read_fields
from .bounded_store import BoundedStore
from .creation import keep
from .group_note import (
    ASKS,
    FOLDER_KEY,
    GROUP_KEY,
    HOSTS,
    Home,
    Offer,
    pack_extra,
    pack_home,
    parse_home,
    parse_place,
)
from .job_handle import own_job
from .proof import prove, proved
from .refusal import require_host

STORE_WAIT_S = 2.0


def find_job(store: BoundedStore) -> Found:
    """Return the running job.

    Raises:
        InvalidState: there is no running job, or there are several and the store does not name one.
        UnsupportedError: the ranks run on another host than this process, and on one alone.
        AuthError: the job's secret is in a file (EPEE_TOKEN_FILE), and this process has none or another one.
    """
    try:
        return _open_told(store.read(FOLDER_KEY, STORE_WAIT_S), store)
    except expected(AuthError, InvalidArgument, InvalidState, MismatchError, UnsupportedError):
        raise
    except expected(RuntimeError) as exc:  # the store has died or is another one: the folder itself can be found
        jobs = find_jobs(job_name()) if env.get("MASTER_PORT") else []  # else any job could be taken for this one
        if len(jobs) != 1:
            raise InvalidState(
                f"is_extension=True: the store names no running job ({str(exc).splitlines()[0]}), and {len(jobs)} jobs "
                f"of {job_name()} run here; start this process while the job runs, with the store of its ranks and on "
                "a host of theirs"
            ) from exc
        directory = JobDirectory.open(jobs[0])
        with contextlib.ExitStack() as undo:
            undo.callback(directory.leave)
            found = Found(directory, parse_home(directory.read_home()))
            undo.pop_all()
            return found


def _open_told(raw: bytes, store: BoundedStore) -> Found:
    """Open the job that rank 0 has named in the store; `AuthError` unless the job's own token proves it."""
    fields = read_fields(raw, 0)
    if HOSTS in fields:
        return find_over_hosts(store, fields)
    folder, host = parse_place(str(fields.get("record", "")))
    if host not in ("", own_host_key()):
        raise UnsupportedError(
            "is_extension=True: the running ranks are on another host, and a job that began on one host stays there; "
            "start this process on it (a container: in their PID namespace, --pid=host), or begin on two hosts, or "
            "with EPEE_OVER_HOSTS=1 on all ranks"
        )
    directory = JobDirectory.open(folder)
    try:
        proved(directory.token, fields, FOLDER_KEY.encode(), "the job's")
        return Found(directory, parse_home(directory.read_home()))
    except BaseException:
        directory.leave()
        raise


def join_engine(store: BoundedStore, rank: int, num_ranks: int, mode: str) -> Engine:
    """Join as `rank`; returns when the members have taken this process in.

    Args:
        num_ranks: the world size that this process was started with; the group has at least so many ranks then.
    Raises:
        InvalidState: no group can be joined. UnsupportedError: its ranks run on one host, which is another one.
        SlotTakenError: another process has this rank.
        InvalidArgument: the group has another mode.
        CommTimeoutError: no member has called `recover_ranks` or `extend_group_size_to` by the store's deadline.
        ResourceError: no memory or descriptor is left here.
    """
    with contextlib.ExitStack() as undo:
        directory, home, contacts = find_job(store)
        undo.callback(directory.leave)
        _check(home, rank, num_ranks, mode)
        door = Entrance.open(store, undo) if home.spans else None
        layout = outbox_layout(MAX_RANKS, home.staging_bytes)
        region = SharedRegion.create(layout.nbytes, f"outbox{rank}", only_owner_writes=True)
        undo.callback(region.close)
        extra = pack_extra(home.group_id, num_ranks, region.blob, 0 if door is None else door.port)
        job = Job(directory, rank, extra, None if door is None else door.for_agents(store))
        OutboxOwner(job.runtime.member.nonce, home.group_id, rank).sign(region)
        leave: Callable[[], object] = job.release
        undo.callback(lambda: leave())
        decision = job.runtime.join(max(0.1, store.deadline - time.monotonic()), has_group=True, contacts=contacts)
        job.enlist()
        membership = GroupMembership(JobHandle(job, list(range(num_ranks)), home.group_id, False, True), mode, decision)
        leave = membership.close
        if door is not None:
            membership.span(decision)
            tell_contact(store, job)
        membership.join(decision)
        engine = _start(membership, decision, home, rank, region, door)
        undo.pop_all()
        return engine


class Place(NamedTuple):
    """A group that runs, and this process's rank in it.

    Attributes:
        home: the note about it.
        slots: in the job, of the ranks with which it was made and maybe of more; of the first group, of all ranks.
        rank: of this process.
        is_home: it is the first group of its job.
    """

    home: Home
    slots: list[int]
    rank: int
    is_home: bool


def is_newcomer(store: BoundedStore, rank: int, num_ranks: int) -> bool:
    """Return whether a process is a joiner for a running group that was begun with fewer ranks."""
    raw = None if rank == 0 else store.find(FOLDER_KEY, 0.0)
    if raw is None:
        return False
    try:
        directory, home, _ = _open_told(raw, store)
    except expected(EpeeError, OSError):
        return False  # obsolete or unreadable: a process that begins a group needs none of it
    directory.leave()  # and with it the folder, if no process uses it any more
    return home.num_ranks <= min(rank, num_ranks - 1) and (home.spans or directory.path.exists())


def joins_job(store: BoundedStore, is_first: bool) -> bool:
    """Return whether a process that joins the group of a store joins the group's job with it.

    The group is the first of its job then, which the store names, and this process is not in that job; it may be in
    others, such as that of a group of its own.

    Args:
        is_first: the group is torch's default group.
    """
    job, raw = own_job(), store.find(FOLDER_KEY, 0.0)
    if raw is None:
        return is_first and job is None
    return job is None or job.key not in raw.decode(errors="replace")


def place_of(engine: Engine, mode: str) -> Place:
    """Return the slot of this process in a group that it is in."""
    peer_regions, (group_id, slots, is_home) = engine.peer_regions, engine.membership.place
    link = (True, chosen_engine(), env.get_bool("EPEE_LINK_MAC")) if peer_regions.exports.spans else ()
    num_ranks = peer_regions.num_ranks if is_home else len(slots)
    return Place(Home(group_id, num_ranks, peer_regions.staging_bytes, mode, *link), slots, peer_regions.rank, is_home)


def leave_note(store: BoundedStore, place: Place) -> None:
    """Publish, in the store of a group of which this process is rank 0, the note by which later processes find it."""
    job = own_job()
    if place.is_home or place.rank or job is None:
        return
    with ignored(RuntimeError):  # the store no longer exists: then no process joins
        note = prove(job.directory.token, pack_home(place.home).hex(), GROUP_KEY.encode())
        store.set(GROUP_KEY, note)


def find_place(store: BoundedStore, ranks: Sequence[int], rank: int) -> Place:
    """Return the slot of this process in the running group of these global ranks, or of the first of them.

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
        fields = read_fields(store.read(GROUP_KEY, STORE_WAIT_S), 0)
    except expected(RuntimeError) as exc:
        raise InvalidArgument(
            f"is_extension=True: the store names no running group of ranks {list(ranks)} ({str(exc).splitlines()[0]}); "
            "make the groups in the order in which the running ranks have made them, with their store; a group that "
            "does not run yet is made by all its ranks, without is_extension"
        ) from exc
    text = proved(job.directory.token, fields, GROUP_KEY.encode(), "the group's")
    try:
        home = parse_home(bytes.fromhex(text))
    except expected(ValueError) as exc:
        raise ProtocolError(f"the note about the group of ranks {list(ranks)} cannot be read: {exc}") from exc
    return Place(home, list(ranks), rank, False)


def come_in(
    place: Place,
    num_ranks: int,
    timeout_s: float,
    mode: str,
    before: Engine | None,
    extra_bytes: int = 0,
    has_messages: bool = True,
) -> Engine:
    """Take this process, which is in the job, into a running group; returns when its members have taken it in.

    Args:
        num_ranks: the size of the group that this process was given.
        timeout_s: how long to wait for them.
        before: the engine of this process in the group so far, if it had one; it is closed.
        extra_bytes: as of `create_engine`; those of the members.
        has_messages: whether the members' outboxes have channels; not those of `EngineMeeting`.
    Raises:
        InvalidState: this process is not in the group's job (any more).
        UnsupportedError: the group runs on one host, which is another one.
        CommTimeoutError: no member has called `recover_ranks` in time. As `join_engine` else.
    """
    _check(place.home, place.rank, num_ranks, mode)
    founders = place.slots if place.is_home else place.slots[: place.home.num_ranks]
    if not place.is_home and len(founders) < place.home.num_ranks:
        raise InvalidArgument(
            f"ranks must be those that the group was made with, {place.home.num_ranks} of them, and maybe more behind "
            f"them, got {len(founders)}"
        )
    own = own_job() if before is None else before.membership.job
    job = None if own is None else retained(own.key)
    if job is None:
        raise InvalidState("this process is in no job any more; start it again with is_extension=True")
    home, rank = place.home, place.rank
    with contextlib.ExitStack() as undo:
        release: Callable[[], object] = job.release
        undo.callback(lambda: release())
        if not home.spans:
            require_host(job.runtime, home.group_id, Offer(ASKS, rank, num_ranks, bytes(BLOB_BYTES)), timeout_s)
        if before is not None:
            before.close()  # it has the group's membership
        layout = outbox_layout(MAX_RANKS, home.staging_bytes, extra_bytes, has_messages)
        region = SharedRegion.create(layout.nbytes, f"outbox{rank}", only_owner_writes=True)
        undo.callback(region.close)
        OutboxOwner(job.runtime.member.nonce, home.group_id, job.slot).sign(region)
        door = Entrance.open(job.store, undo) if home.spans else None
        membership = GroupMembership(JobHandle(job, founders, home.group_id, False, place.is_home), mode, asks=True)
        release = membership.close
        decision = membership.ask(
            Offer(ASKS, rank, num_ranks, region.blob, 0 if door is None else door.port), timeout_s
        )
        if door is not None:
            membership.span(decision)
        engine = _start(membership, decision, home, rank, region, door, extra_bytes, has_messages)
        undo.pop_all()
        return engine


def _check(home: Home, rank: int, num_ranks: int, mode: str) -> None:
    if home.mode != mode:
        raise InvalidArgument(
            f"fault_mode and on_stall must be those of the running group, {home.mode!r}, got {mode!r}"
        )
    own = chosen_engine(), env.get_bool("EPEE_LINK_MAC")
    if home.spans and own != (home.link, home.link_mac):
        raise MismatchError(
            f"EPEE_LINK and EPEE_LINK_MAC must be those of the running group, {home.link} and {int(home.link_mac)}, "
            f"got {own[0]} and {int(own[1])}"
        )
    if not 0 <= rank < num_ranks <= MAX_RANKS:
        raise InvalidArgument(
            f"rank must be below world_size, and that at most {MAX_RANKS}, got rank {rank} of {num_ranks}"
        )


def _start(
    membership: GroupMembership,
    decision: Decision,
    home: Home,
    rank: int,
    region: SharedRegion,
    door: Entrance | None,
    extra_bytes: int = 0,
    has_messages: bool = True,
) -> Engine:
    """Map the outboxes of all ranks and make the engine. Excluded ranks get a blank one that no process writes.

    The group counts the largest number of ranks that its joiners were given, and has room for all present ranks. The
    others may count more, if it has lost ranks beyond: the length of lists is a rank's own matter. Over several hosts
    those of others are blank for the time being, too, and this rank is ready when it reads their mirrors
    (`replication/joining_over_hosts.py`).
    """
    nbytes = region.nbytes
    parts = membership.parts(decision)
    told = [part.num_ranks for peer, part in parts.items() if membership.is_new(peer, decision)]
    size = max([1 + max(parts), *told])
    regions: list[SharedRegion] = [region] * size
    blank = make_blank(nbytes)
    for peer in range(size):
        part = parts.get(peer)
        if peer != rank and door is not None and part is not None and not door.is_here(part):
            regions[peer] = make_blank(nbytes)  # one of its own: its mirror will be read instead
        elif peer != rank:
            regions[peer] = (part and attach_outbox(part, nbytes)) or blank
    peer_regions = PeerRegions(rank, regions, home.staging_bytes, 1, MAX_RANKS, extra_bytes, has_messages)
    peer_regions.blanks.update(peer for peer in range(size) if regions[peer] is blank)
    with contextlib.ExitStack() as undo:
        watch = DeathWatch()
        undo.callback(watch.close)
        for peer, part in parts.items():
            if peer != rank and (door is None or door.is_here(part)):
                watch.watch(peer, part.pid, part.start_time)
        if door is not None:
            ways = door.enter(membership, decision, parts, peer_regions, home)
            undo.callback(ways.exports.abandon)
        engine = Engine(peer_regions, watch, 300.0, membership, first_number(decision.epoch))
        keep(engine)
        undo.pop_all()
        return engine


def alone(rank: int, num_ranks: int, timeout_s: float, staging_bytes: int, mode: str) -> Engine:
    """Return the engine of a process that joins a group later: it counts `num_ranks`, and has itself alone.

    It is the only member of a job of its own, which no process finds and no other group uses.
    """
    layout = outbox_layout(num_ranks, staging_bytes)
    with contextlib.ExitStack() as undo:
        region = SharedRegion.create(layout.nbytes, f"outbox{rank}", only_owner_writes=True)
        undo.callback(region.close)
        directory = new_folder("/alone")
        leave: Callable[[], object] = directory.leave
        undo.callback(lambda: leave())
        job = Job(directory, rank, b"")
        leave = job.release
        job.runtime.start([job.runtime.member])
        membership = GroupMembership(JobHandle(job, list(range(num_ranks)), 0, True, True), mode)
        leave = membership.close
        blank = make_blank(layout.nbytes)
        peer_regions = PeerRegions(
            rank, [region if peer == rank else blank for peer in range(num_ranks)], staging_bytes, 1
        )
        peer_regions.blanks.update(peer_regions.peers)
        engine = Engine(peer_regions, DeathWatch(), timeout_s, membership)
        keep(engine)
        undo.pop_all()
        return engine
