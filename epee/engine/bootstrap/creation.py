"""The creation of a group, and its end with the process.

Each rank makes its outbox and puts one record into the group's store: version, size of the group, staging size, its
identity and address, and the blob of its outbox. It reads all ranks' records, checks each and its writer (`proof.py`),
and maps the outbox, which must name this rank as its owner. The last step needs no store: a rank sets its LIFE word
when it has mapped all outboxes and waits for those of all others, so after the creation no rank depends on another's
file descriptor or on the store, which is never used again. A rank that dies behind that word has died in the group; its
host's ranks all read the word, but on another host it may not have arrived, and never will. So over several hosts the
ranks agree: the first that finds all words, or an error, writes that into the store, and it holds for all
(`BootstrapAttempt.settle`).

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
from typing import NamedTuple

from ... import env
from ...errors import CommTimeoutError, EpeeError, ProtocolError, expected
from ...link.address import listen, own_address
from ...link.topology import Topology
from ...memory.shared import SharedRegion
from ...view.job import (
    JobHandle,
    check_spans,
    common_job,
    new_folder,
    own_hello,
    pack_member,
    parse_hello,
    parse_member,
    start_job,
)
from ...view.process.detector import DeathWatch
from ...view.process.machine import own_host_key
from ...view.protocol.messages import EXITED, LEFT, Member
from ...view.runtime import note_exit
from ...view.transport.directory import JobDirectory
from ..engine import Engine
from ..limits import MODES
from ..membership.group_membership import GroupMembership
from ..outbox import LIFE, LIFE_BORN, LIFE_FAILED, LIFE_READY, OutboxOwner, PeerRegions, open_outbox, outbox_layout
from ..progress import HelperThread, acquire
from ..replication.creation_over_hosts import StoreLook, await_told, enter_job, in_words, link, make_mirrors, map_mirror
from ..replication.joining_over_hosts import leave_notes
from ..replication.links import GroupLinks
from .attempt import BootstrapAttempt, attempt, died, read_fields
from .bounded_store import BoundedStore
from .group_note import FOLDER_KEY, Home, pack_home, pack_place
from .job_handle import Greeting, take_job_handle
from .proof import prove, transcript
from .record import Proof, RankRecord, exchange, own_record


class EngineOptions(NamedTuple):
    """The options of a new engine, equal on all ranks.

    Attributes:
        staging_bytes: size of each rank's memory for data.
        mode: the outcome of calls that lose a rank, one of `limits.MODES`.
        extra_bytes: memory beside it (`PeerRegions.extra`).
    """

    staging_bytes: int
    mode: str = MODES[0]
    extra_bytes: int = 0


def create_engine(
    store: BoundedStore, rank: int, num_ranks: int, timeout_s: float, choose: Callable[[], EngineOptions]
) -> Engine:
    """Make this rank's part of a group; returns when all ranks have made theirs.

    Args:
        store: the one in which the ranks of this group alone meet; they learn there on which hosts they run. Its
            deadline is that of the creation.
        timeout_s: of calls.
        choose: returns the options; the other ranks are notified of an error that it raises.
    Raises:
        the error of `choose`.
        AuthError: a record was written by another process, or the ranks run as different users.
        CommTimeoutError: a rank did not come by the deadline, or the store's process does not answer.
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
        engine = _Creation(this, _greeted(this, store.deadline), store.deadline, options).run(timeout_s)
        keep(engine)
        return engine


class _Creation:
    """One rank's part of the creation; `replication/creation_over_hosts.py` has more steps for several hosts."""

    _job_handle: JobHandle
    _membership: GroupMembership
    _helper: HelperThread

    def __init__(self, this: BootstrapAttempt, greeting: Greeting, deadline: float, options: EngineOptions) -> None:
        self._this, self._greeting, self._deadline = this, greeting, deadline
        self._topology = Topology(this.rank, [hello.host for hello in greeting.hellos])
        self._spans = self._topology.num_hosts > 1 or greeting.spans
        self._staging_bytes, self._mode = options.staging_bytes, options.mode
        self._extra_bytes = options.extra_bytes
        self._watch = DeathWatch()
        self._left: set[int] = set()  # slots
        self._leave: Callable[[], object] = greeting.withdraw

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
                error = self._this.explain(in_words(exc) if self._spans else exc, watch)
                self._this.fail(error)
                if error is not exc:
                    raise error from exc
                raise
            undo.pop_all()
        engine = Engine(peer_regions, watch, timeout_s, self._membership)
        self._helper.release()  # the engine has a use of its own
        return engine

    def _make(self, undo: contextlib.ExitStack, half_made: contextlib.ExitStack) -> PeerRegions:
        this, greeting, topology = self._this, self._greeting, self._topology
        capacity = greeting.capacity
        nbytes = outbox_layout(capacity, self._staging_bytes, self._extra_bytes).nbytes
        self._helper = helper = acquire()  # now, so that all ranks are notified if the system gives no thread
        undo.callback(helper.release)
        this.region = region = SharedRegion.create(nbytes, f"outbox{this.rank}", only_owner_writes=True)
        undo.callback(region.close)
        address, port, listener = "", 0, None
        if self._spans:
            listener = listen(own_address(this.store))
            undo.callback(listener.close)
            address, port = listener.getsockname()[:2]
        self._sit_down(region, port, half_made)
        job = self._job_handle.job
        known = (pack_member(job.runtime.member), 1) if self._job_handle.is_founder else ("", self._membership.epoch)
        sizes = this.num_ranks, self._staging_bytes
        mine = own_record(*sizes, region, self._mode, job.runtime.member.nonce, *known)
        mine, token = replace(mine, address=address, port=port), job.directory.token
        records = exchange(this, mine, Proof(token, greeting.told), self._deadline)
        owners = [self._owner(peer, record) for peer, record in enumerate(records)]
        regions = self._map(region, records, owners, undo)
        self._begin(records)
        check = StoreLook(this, self._watch, self._lost)
        mirrors = self._mirrors(region, regions, owners, undo, check)
        peer_regions = PeerRegions(this.rank, regions, self._staging_bytes, 1, capacity, self._extra_bytes)
        undo.callback(peer_regions.close)
        between: list[GroupLinks] = []
        if listener is not None:
            peer_regions.place(topology.host_of)
            args = records, owners, mirrors, token, listener, self._deadline, check, undo
            ways = link(topology, peer_regions, *args)
            ways.begin(self._membership.epoch, self._membership.since())
            self._membership.use(ways)
            between.append(ways)
        await_all(this, peer_regions, self._watch, self._deadline, check)
        for ways in between:
            await_told(ways, peer_regions, self._watch, self._lost, self._deadline)
        return peer_regions

    def _mirrors(
        self,
        own: SharedRegion,
        regions: list[SharedRegion],
        owners: list[OutboxOwner],
        undo: contextlib.ExitStack,
        check: Callable[[], None],
    ) -> dict[int, SharedRegion]:
        """Make the mirrors that this rank keeps, and map those of all ranks of other hosts in `regions`."""
        topology = self._topology
        if not topology.elsewhere:
            return {}
        layout = PeerRegions(0, [own], self._staging_bytes, 1, self._greeting.capacity, self._extra_bytes)
        mirrors = make_mirrors(topology, owners, layout, undo)
        for peer in topology.elsewhere:
            keeper = topology.gateway(peer, topology.host)
            regions[peer] = mirrors.get(peer) or map_mirror(
                peer, keeper, regions[keeper], layout, owners[peer], self._deadline, check
            )
            undo.callback(regions[peer].close)
        return mirrors

    def _lost(self) -> tuple[int, ...]:
        """Return the ranks that left the view by a loss: a rank that fails leaves in order, and reports why."""
        view = self._job_handle.job.runtime.view()
        self._left |= {removal.slot for removal in view.removed if removal.cause == LEFT}
        here = self._left | {member.slot for member in view.members}
        return tuple(rank for rank, slot in enumerate(self._job_handle.slots) if slot not in here)

    def _sit_down(self, region: SharedRegion, port: int, half_made: contextlib.ExitStack) -> None:
        """Take the job handle, and write the owner into this rank's outbox."""
        this, greeting = self._this, self._greeting

        def enter() -> JobDirectory:
            """Return this host's folder of the new job."""
            if self._spans:
                return enter_job(this, greeting, self._topology.is_here(0), self._deadline)
            return greeting.directory or JobDirectory.open(greeting.folder)

        def listen_to_hosts() -> socket.socket | None:
            """Return the listener for the agents of other hosts."""
            return listen(own_address(this.store)) if self._spans else None

        args = greeting, this.rank, region.blob, port, enter, listen_to_hosts, half_made
        self._job_handle = job_handle = take_job_handle(*args)
        self._leave = job_handle.job.release
        OutboxOwner(job_handle.job.runtime.member.nonce, job_handle.group_id, job_handle.slots[this.rank]).sign(region)
        if not job_handle.is_founder:
            self._follow()

    def _follow(self) -> None:
        self._membership = GroupMembership(self._job_handle, self._mode)
        self._leave = self._membership.close

    def _owner(self, peer: int, record: RankRecord) -> OutboxOwner:
        return OutboxOwner(bytes.fromhex(record.nonce), self._job_handle.group_id, self._job_handle.slots[peer])

    def _map(
        self, region: SharedRegion, records: list[RankRecord], owners: list[OutboxOwner], undo: contextlib.ExitStack
    ) -> list[SharedRegion]:
        """Watch the ranks of this host and map their outboxes; this rank's own stands for those of other hosts."""
        regions = [region] * self._this.num_ranks
        for peer, record in enumerate(records):
            if peer != self._this.rank and self._topology.is_here(peer):
                self._watch.watch(peer, record.pid, record.start_time)
                regions[peer] = _attach(peer, record, owners[peer])
                undo.callback(regions[peer].close)
        return regions

    def _founder(self, peer: int, record: RankRecord) -> Member:
        member, host = parse_member(record.member, peer), self._greeting.hellos[peer].host
        if member.host != host:
            raise ProtocolError(f"rank {peer} greets from host {host}, not {member.host}")
        return member

    def _begin(self, records: list[RankRecord]) -> None:
        """Create the job, if this group does, and begin with its view."""
        job_handle, job = self._job_handle, self._job_handle.job
        if job_handle.is_founder:
            start_job(job_handle, [self._founder(peer, record) for peer, record in enumerate(records)])
            self._follow()
            home = Home(job_handle.group_id, self._this.num_ranks, self._staging_bytes, self._mode)
            if self._spans:
                spanning = home._replace(spans=True, link=records[0].link, link_mac=records[0].link_mac)
                leave_notes(self._this.store, job, self._topology, spanning)
            elif self._this.rank == 0:
                job.directory.write_home(pack_home(home))
                place = pack_place(str(job.directory.path), own_host_key())
                self._this.store.set(FOLDER_KEY, prove(job.directory.token, place, FOLDER_KEY.encode()))
        self._membership.begin(max(record.epoch for record in records), max(0.1, self._deadline - time.monotonic()))


def await_all(
    this: BootstrapAttempt, peer_regions: PeerRegions, watch: DeathWatch, deadline: float, check: Callable[[], None]
) -> None:
    """Publish that this rank has mapped all outboxes; wait until all have. `check` raises errors reported meanwhile."""
    peer_regions.exports.publish(peer_regions, LIFE, LIFE_READY)
    error: EpeeError | None = None
    try:
        _await_ready(this, peer_regions, watch, deadline, check)
    except expected(EpeeError) as exc:
        if not peer_regions.exports.spans:
            raise
        error = this.heard(watch) or exc
    if peer_regions.exports.spans:
        this.settle(error, watch)


def _await_ready(
    this: BootstrapAttempt, peer_regions: PeerRegions, watch: DeathWatch, deadline: float, check: Callable[[], None]
) -> None:
    pause = 0.0001
    for peer in peer_regions.peers:
        while peer_regions.words[peer][LIFE] == LIFE_BORN:
            # read behind the death: all ranks of the host find the same
            dead = tuple(rank for rank in watch.dead() if peer_regions.words[rank][LIFE] == LIFE_BORN)
            if dead:
                raise this.heard(watch) or died(this.rank, dead)
            _raise_if_failed(this, peer_regions, watch)
            late = CommTimeoutError(f"init (rank={peer_regions.rank}): rank {peer} did not get ready in time", [peer])
            try:
                check()
                is_late = time.monotonic() > deadline
            except expected(CommTimeoutError) as exc:
                late, is_late = exc, True
            if is_late and peer_regions.words[peer][LIFE] == LIFE_BORN:  # read behind the check, which may last
                raise late
            time.sleep(pause)
            pause = min(2 * pause, 0.005)
    _raise_if_failed(this, peer_regions, watch)


def _raise_if_failed(this: BootstrapAttempt, peer_regions: PeerRegions, watch: DeathWatch) -> None:
    for peer in peer_regions.peers:
        if peer_regions.words[peer][LIFE] == LIFE_FAILED:
            raise this.failure_of(peer, watch)


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
