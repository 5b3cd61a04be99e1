"""The creation of a group, and its end with the process.

Each rank makes its outbox and puts one record into the group's store: version, size of the group, staging size, its
identity and address, and the blob of its outbox. It reads all ranks' records, checks each and its writer (`proof.py`),
and maps the outbox, which must name this rank as its owner. The last step needs no store: a rank sets its LIFE word
when it has mapped all outboxes and waits for those of all others, so after the creation no rank depends on another's
file descriptor or on the store, which is never used again.

The key of a record (`record.py`) holds how often this rank began in this store, so a group that is destroyed and
made again with the same store does not meet old records.

A rank that fails on the way reports it to the others (`attempt.py`). One that dies leaves an unused key or a timeout
that names it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from ... import env
from ...errors import ProtocolError
from ...link.address import listen, own_address
from ...link.topology import Topology
from ...memory.shared import SharedRegion
from ...view.job import JobHandle, check_spans, common_job, new_folder, own_hello, parse_hello, parse_member, start_job
from ...view.process.detector import DeathWatch
from ...view.process.machine import own_host_key
from ...view.protocol.messages import EXITED, LEFT, Member
from ...view.runtime import note_exit
from ...view.transport.directory import JobDirectory
from ..engine import Engine
from ..limits import MODES
from ..membership.group_membership import GroupMembership
from ..outbox import OutboxOwner, PeerRegions, open_outbox, outbox_layout
from ..progress import HelperThread, acquire
from ..replication.creation_over_hosts import StoreLook, await_told, enter_job, in_words, link, make_mirrors, map_mirror
from ..replication.joining_over_hosts import leave_notes
from ..replication.links import GroupLinks, NoGroupLinks
from .attempt import BootstrapAttempt, attempt, read_fields, time_left
from .group_note import FOLDER_KEY, Home, pack_home, pack_place
from .job_handle import Greeting, take_job_handle
from .proof import prove, transcript
from .readiness import await_all
from .record import Proof, RankRecord, exchange, own_record


class EngineOptions(NamedTuple):
    """The options of a new engine, equal on all ranks.

    Attributes:
        staging_bytes: size of each rank's memory for data.
        mode: the outcome of calls that lose a rank, one of `limits.MODES`.
        extra_bytes: memory beside it (`PeerRegions.extra`), where the ranks run on several hosts.
    """

    staging_bytes: int
    mode: str = MODES[0]
    extra_bytes: int = 0


def create_engine(
    store: Any, rank: int, num_ranks: int, timeout_s: float, choose: Callable[[], EngineOptions]
) -> Engine:
    """Make this rank's part of a group; returns when all ranks have made theirs.

    Args:
        store: the one in which the ranks of this group alone meet; they learn there on which hosts they run.
        timeout_s: how long to wait for the other ranks; the timeout of calls as well.
        choose: returns the options; the other ranks are notified of an error that it raises.
    Raises:
        the error of `choose`.
        AuthError: a record was written by another process, or the ranks run as different users.
        CommTimeoutError: a rank did not come within `timeout_s`.
        RankFailedError: a rank died on the way.
        MismatchError: a rank refused its options, or the ranks have variables unlike that must be alike.
        PeerError: a rank could not make its part.
        UnsupportedError: this machine cannot share memory.
        ProtocolError: a record is damaged, or of another version or group.
        ResourceError: no memory or descriptor is left here.
        InvalidArgument: a group over several hosts has no token file where EPEE_REQUIRE_TOKEN_FILE=1 demands one.
    """
    with attempt(store, rank, num_ranks) as this:
        options = choose()
        deadline = time.monotonic() + timeout_s
        greeting = topology = None
        if num_ranks > 1:
            greeting = _greeted(this, deadline)
            topology = Topology(rank, [hello.host for hello in greeting.hellos])
        engine = _Creation(this, greeting, topology, deadline, options).run(timeout_s)
        keep(engine)
        return engine


class _Creation:
    """One rank's part of the creation; `replication/creation_over_hosts.py` has more steps for several hosts."""

    def __init__(
        self,
        this: BootstrapAttempt,
        greeting: Greeting | None,
        topology: Topology | None,
        deadline: float,
        options: EngineOptions,
    ) -> None:
        self._this, self._greeting, self._deadline = this, greeting, deadline
        spans = topology is not None and (topology.num_hosts > 1 or (greeting is not None and greeting.spans))
        self._topology = topology if spans else None
        self._staging_bytes, self._mode = options.staging_bytes, options.mode
        self._extra_bytes = options.extra_bytes if self._topology is not None else 0
        self._watch = DeathWatch()
        self._job_handle: JobHandle | None = None
        self._membership: GroupMembership | None = None
        self._ways: GroupLinks | NoGroupLinks = NoGroupLinks()
        self._helper: HelperThread | None = None
        self._left: set[int] = set()  # slots
        self._leave = greeting.withdraw if greeting is not None else int

    def run(self, timeout_s: float) -> Engine:
        """Create the engine; report a failure to the others."""
        watch = self._watch
        with contextlib.ExitStack() as undo:
            undo.callback(watch.close)
            undo.callback(lambda: self._leave())
            half_made = contextlib.ExitStack()
            undo.callback(half_made.close)
            try:
                peer_regions = self._make(undo, half_made)
            except BaseException as exc:
                error = self._this.explain(exc if self._topology is None else in_words(exc), watch)
                self._this.fail(error)
                if error is not exc:
                    raise error from exc
                raise
            undo.pop_all()
        engine = Engine(peer_regions, watch, timeout_s, waiting=self._ways.waiting)
        if self._helper is not None:
            self._helper.release()  # the engine has a use of its own
        if self._membership is not None:
            self._membership.attach(engine)
        return engine

    def _make(self, undo: contextlib.ExitStack, half_made: contextlib.ExitStack) -> PeerRegions:
        this, greeting = self._this, self._greeting
        capacity = greeting.capacity if greeting is not None else this.num_ranks
        nbytes = outbox_layout(capacity, self._staging_bytes, self._extra_bytes).nbytes
        self._helper = helper = acquire()  # now, so that all ranks are notified if the system gives no thread
        undo.callback(helper.release)
        this.region = region = SharedRegion.create(nbytes, f"outbox{this.rank}", only_owner_writes=True)
        undo.callback(region.close)
        listener = None
        if self._topology is not None:
            listener = listen(own_address(this.store))
            undo.callback(listener.close)
        if greeting is not None:
            self._sit_down(greeting, region, 0 if listener is None else listener.getsockname()[1], half_made)
        records, owners = [], []
        mine = own_record(this.num_ranks, self._staging_bytes, region, self._mode, self._job_handle, self._membership)
        if greeting is not None:
            if listener is not None:
                address, port = listener.getsockname()[:2]
                mine = replace(mine, address=address, port=port)
            assert self._job_handle is not None
            records = exchange(this, mine, Proof(self._job_handle.job.directory.token, greeting.told), self._deadline)
            owners = [self._owner(self._job_handle, peer, record) for peer, record in enumerate(records)]
        regions = self._map(region, records, owners, undo)
        if self._job_handle is not None:
            self._begin(self._job_handle, records)
        mirrors: dict[int, SharedRegion] = {}
        check = StoreLook(this, self._watch, self._lost)
        if self._topology is not None:
            own = PeerRegions(0, [region], self._staging_bytes, 1, capacity, self._extra_bytes)
            mirrors = make_mirrors(self._topology, owners, own, undo)
            for peer in self._topology.elsewhere:
                keeper = self._topology.gateway(peer, self._topology.host)
                regions[peer] = mirrors.get(peer) or map_mirror(
                    peer, keeper, regions[keeper], own, owners[peer], self._deadline, check
                )
                undo.callback(regions[peer].close)
        peer_regions = PeerRegions(this.rank, regions, self._staging_bytes, 1, capacity, self._extra_bytes)
        undo.callback(peer_regions.close)
        if self._topology is not None and listener is not None and self._job_handle is not None:
            assert self._membership is not None
            peer_regions.place(self._topology.host_of)
            token = self._job_handle.job.directory.token
            args = records, owners, mirrors, token, listener, self._deadline, check, undo
            self._ways = ways = link(self._topology, peer_regions, *args)
            ways.begin(self._membership.epoch, self._membership.since())
            self._membership.use(ways)
        await_all(this, peer_regions, self._watch, self._deadline, check if self._topology is not None else _no_more)
        await_told(self._ways, peer_regions, self._watch, self._lost, self._deadline)
        return peer_regions

    def _lost(self) -> tuple[int, ...]:
        """Return the ranks that left the view by a loss: a rank that fails leaves in order, and reports why."""
        assert self._job_handle is not None
        view = self._job_handle.job.runtime.view()
        self._left |= {removal.slot for removal in view.removed if removal.cause == LEFT}
        here = self._left | {member.slot for member in view.members}
        return tuple(rank for rank, slot in enumerate(self._job_handle.slots) if slot not in here)

    def _sit_down(self, greeting: Greeting, region: SharedRegion, port: int, half_made: contextlib.ExitStack) -> None:
        """Take the job handle, and write the owner into this rank's outbox."""
        this, topology = self._this, self._topology
        rank = this.rank

        def enter() -> JobDirectory:
            """Return this host's folder of the new job."""
            if topology is not None:
                return enter_job(this, greeting, topology.is_here(0), self._deadline)
            return greeting.directory or JobDirectory.open(greeting.folder)

        def listen_to_hosts() -> socket.socket | None:
            """Return the listener for the agents of other hosts."""
            return None if topology is None else listen(own_address(this.store))

        self._job_handle = job_handle = take_job_handle(
            greeting, rank, region.blob, port, enter, listen_to_hosts, half_made
        )
        self._leave = job_handle.job.release
        OutboxOwner(job_handle.job.runtime.member.nonce, job_handle.lane, job_handle.slots[rank]).sign(region)
        if not job_handle.is_founder:
            self._follow(job_handle)

    def _follow(self, job_handle: JobHandle) -> None:
        self._membership = GroupMembership(job_handle, self._mode)
        self._leave = self._membership.close

    def _owner(self, job_handle: JobHandle, peer: int, record: RankRecord) -> OutboxOwner:
        return OutboxOwner(bytes.fromhex(record.nonce), job_handle.lane, job_handle.slots[peer])

    def _map(
        self, region: SharedRegion, records: list[RankRecord], owners: list[OutboxOwner], undo: contextlib.ExitStack
    ) -> list[SharedRegion]:
        """Watch the ranks of this host and map their outboxes; this rank's own stands for those of other hosts."""
        regions = [region] * self._this.num_ranks
        for peer, record in enumerate(records):
            if peer != self._this.rank and (self._topology is None or self._topology.is_here(peer)):
                self._watch.watch(peer, record.pid, record.start_time)
                regions[peer] = _attach(peer, record, owners[peer])
                undo.callback(regions[peer].close)
        return regions

    def _founder(self, peer: int, record: RankRecord) -> Member:
        member = parse_member(record.member, peer)
        assert self._greeting is not None
        if member.host != self._greeting.hellos[peer].host:
            raise ProtocolError(f"rank {peer} greets from host {self._greeting.hellos[peer].host}, not {member.host}")
        return member

    def _begin(self, job_handle: JobHandle, records: list[RankRecord]) -> None:
        """Create the job, if this group does, and begin with its view."""
        if job_handle.is_founder:
            start_job(job_handle, [self._founder(peer, record) for peer, record in enumerate(records)])
            self._follow(job_handle)
            home = Home(job_handle.lane, self._this.num_ranks, self._staging_bytes, self._mode)
            if self._topology is not None:
                spanning = home._replace(spans=True, link=records[0].link, link_mac=records[0].link_mac)
                leave_notes(self._this.store, job_handle.job, self._topology, spanning)
            elif self._this.rank == 0:
                job_handle.job.directory.write_home(pack_home(home))
                place = pack_place(str(job_handle.job.directory.path), own_host_key())
                self._this.store.set(FOLDER_KEY, prove(job_handle.job.directory.token, place, FOLDER_KEY.encode()))
        assert self._membership is not None
        self._membership.begin(max(record.epoch for record in records), time_left(self._deadline).total_seconds())


def keep(engine: Engine) -> None:
    """Close `engine` at exit, and mark it in a forked child."""
    _engines.add(engine)


def _attach(peer: int, record: RankRecord, owner: OutboxOwner) -> SharedRegion:
    """Map a peer's outbox."""
    region = open_outbox(bytes.fromhex(record.blob), owner)
    if region.owner_pid != record.pid:
        region.close()
        raise ProtocolError(f"rank {peer}'s record names process {record.pid}, its memory {region.owner_pid}")
    return region


def _greeted(this: BootstrapAttempt, deadline: float) -> Greeting:
    """Run `_greet`; report a failure to the peers."""
    try:
        return _greet(this, deadline)
    except BaseException as exc:
        error = this.explain(exc, DeathWatch())
        this.fail(error)
        if error is not exc:
            raise error from exc
        raise


def _greet(this: BootstrapAttempt, deadline: float) -> Greeting:
    """Read from all ranks which jobs they are in; all reach the same choice for the group."""
    mine, directory = own_hello(this.rank, this.num_ranks, own_host_key(), env.get_bool("EPEE_OVER_HOSTS"))
    try:
        told = [json.dumps(asdict(mine)).encode()] * this.num_ranks
        this.store.set(this.key(this.rank) + "/hello", told[this.rank])
        hellos = []
        for peer in range(this.num_ranks):
            raw = this.read(peer, "/hello", deadline)
            if peer != this.rank:
                told[peer] = raw
            this.others_know = True
            hellos.append(parse_hello(read_fields(told[peer], peer), peer, this.num_ranks))
            this.others_know = False
        this.others_know = True  # every rank has read the same
        check_spans(hellos)
        this.others_know = False
        folder = hellos[0].folder
        if not folder and not common_job(hellos):
            if this.rank == 0:
                directory = new_folder()
                this.store.set(this.key(0) + "/folder", json.dumps({"folder": str(directory.path)}))
            folder = str(read_fields(this.read(0, "/folder", deadline), 0).get("folder", ""))
            folder = folder if directory is None else str(directory.path)
    except BaseException:
        if directory is not None:
            directory.leave()
        raise
    return Greeting(hellos, directory, folder, transcript(this.number, [*told, folder.encode()]))


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def close_at_exit(engine: Engine) -> None:
    """Close an engine because the process ends: its rank has failed unless the program has destroyed its groups."""
    engine.close(failed=note_exit() == EXITED)


def _close_all() -> None:
    """At exit: end the threads while Python is whole. Groups that were destroyed before are closed already."""
    for engine in list(_engines):
        close_at_exit(engine)


def _mark_forked() -> None:
    for engine in list(_engines):
        engine.forked()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_mark_forked)


def _no_more() -> None:
    """Do nothing: no records are read any more, only the outboxes."""
