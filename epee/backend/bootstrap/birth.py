"""How a group comes into being, and how it goes when the process does.

Each rank makes its outbox and puts one record into the group's store: version, size of the group, staging size, who and
where it is, and the blob of its outbox. It reads everybody's record, checks it and who wrote it (`proof.py`), and maps
the outbox, which must say that it is this rank's. The last step needs
no store: a rank sets its LIFE word when it has mapped all outboxes and waits for everybody's, so after birth nobody
depends on anybody's file descriptor or on the store, which is never used again.

The key of a record (`record.py`) holds how often this rank was born in this store, so a group that is destroyed and
made again with the same store does not meet old records.

A rank that fails on the way tells the others (`attempt.py`). One that dies leaves a key that nobody misses or a
time-out that names it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import time
import weakref
from dataclasses import asdict

from ...errors import ProtocolError
from ...link.topology import Topology, own_host_key
from ...memory.host import HostRegion
from ...view.job import Seat, common_job, new_folder, own_hello, parse_hello, parse_member, start_job
from ...view.process.detector import DeathWatch
from ..engine.engine import Engine
from ..hosts.birth import create_over_hosts
from ..membership.epochs import Survival
from ..options import MODES
from ..outbox import Outboxes, OutboxOwner, open_outbox, outbox_layout
from .attempt import BootstrapAttempt, read_fields, time_left
from .home import FOLDER_KEY, HOSTS, Home, pack_home, pack_place
from .proof import prove, transcript
from .readiness import await_all
from .record import Proof, RankRecord, exchange, own_record
from .seat import Greeting, take_seat


def create_engine(
    this: BootstrapAttempt, timeout_s: float, staging_bytes: int, mode: str = MODES[0], extra_bytes: int = 0
) -> Engine:
    """Make this rank's part of a group; returns when all ranks have made theirs. Belongs inside `attempt`.

    `extra_bytes`, equal on all ranks, are laid out beside, where the ranks run on several hosts (`Outboxes.extra`).

    Raises:
        AuthError: a record was written by somebody else, or the ranks run as different users.
        CommTimeoutError: a rank did not come within `timeout_s`.
        RankFailedError: a rank died on the way.
        MismatchError: a rank refused its options.
        PeerError: a rank could not make its part.
        UnsupportedError: this machine cannot share memory.
        ProtocolError: a record is damaged, or of another version or group.
        ResourceError: no memory or descriptor is left here.
    """
    deadline = time.monotonic() + timeout_s
    greeting = None
    if this.num_ranks > 1:
        greeting = _greeted(this, deadline)
        topology = Topology(this.rank, [hello.host for hello in greeting.hellos])
        if topology.num_hosts > 1:
            greeting.withdraw()  # a job lives on one host
            if this.rank == 0:
                this.store.set(FOLDER_KEY, json.dumps({HOSTS: topology.num_hosts}))
            engine = create_over_hosts(this, greeting, topology, deadline, timeout_s, staging_bytes, mode, extra_bytes)
            keep(engine)
            return engine
    engine = _create_here(this, greeting, deadline, timeout_s, staging_bytes, mode)
    keep(engine)
    return engine


def _create_here(
    this: BootstrapAttempt, greeting: Greeting | None, deadline: float, timeout_s: float, staging_bytes: int, mode: str
) -> Engine:
    """Make this rank's part of a group whose ranks share memory."""
    rank, num_ranks = this.rank, this.num_ranks
    watch = DeathWatch()
    regions: list[HostRegion] = []
    box = seat = survival = None
    half_made = contextlib.ExitStack()
    capacity = num_ranks if greeting is None else greeting.capacity
    try:
        layout = outbox_layout(capacity, staging_bytes)
        this.region = region = HostRegion.create(layout.nbytes, f"outbox{rank}", only_owner_writes=True)
        if greeting is not None:
            seat = take_seat(greeting, this.rank, region.blob, half_made)
            _owner(seat, rank, seat.job.runtime.member.nonce).sign(region)
        if seat is not None and not seat.is_founder:
            survival = Survival(seat, mode)
        mine = own_record(num_ranks, staging_bytes, region, mode, seat, survival)
        records = [mine]
        if seat is not None and greeting is not None:
            records = exchange(this, mine, Proof(seat.job.directory.token, greeting.told), deadline)
        for peer, record in enumerate(records):
            if peer == rank:
                regions.append(region)
                continue
            watch.watch(peer, record.pid, record.start_time)
            assert seat is not None
            regions.append(_attach(peer, record, _owner(seat, peer, bytes.fromhex(record.nonce))))
        if seat is not None and seat.is_founder:
            start_job(seat, [parse_member(record.member, peer) for peer, record in enumerate(records)])
            survival = Survival(seat, mode)
            if rank == 0:
                home = Home(seat.lane, num_ranks, staging_bytes, mode)
                seat.job.directory.write_home(pack_home(home))
                place = pack_place(seat.job.path, own_host_key())
                this.store.set(FOLDER_KEY, prove(seat.job.directory.token, place, FOLDER_KEY.encode()))
        if survival is not None:
            survival.begin(max(record.epoch for record in records), time_left(deadline).total_seconds())
        box = Outboxes(rank, regions, staging_bytes, 1, capacity)
        await_all(this, box, watch, deadline)
    except BaseException as exc:
        error = this.explain(exc, watch)
        this.fail(error)
        half_made.close()
        watch.close()
        if survival is not None:
            survival.close()
        elif seat is not None:
            seat.job.release()
        elif greeting is not None:
            greeting.withdraw()
        if box is not None:
            box.close()
        for mapped in regions:
            mapped.close()
        if error is not exc:
            raise error from exc
        raise
    engine = Engine(box, watch, timeout_s)
    if survival is not None:
        survival.attach(engine)
    return engine


def keep(engine: Engine) -> None:
    """Close `engine` at exit, and mark it in a forked child."""
    _engines.add(engine)


def _owner(seat: Seat, rank: int, nonce: bytes) -> OutboxOwner:
    return OutboxOwner(nonce, seat.lane, seat.slots[rank])


def _attach(peer: int, record: RankRecord, owner: OutboxOwner) -> HostRegion:
    """Map a peer's outbox."""
    region = open_outbox(bytes.fromhex(record.blob), owner)
    if region.owner_pid != record.pid:
        region.close()
        raise ProtocolError(f"rank {peer}'s record names process {record.pid}, its memory {region.owner_pid}")
    return region


def _greeted(this: BootstrapAttempt, deadline: float) -> Greeting:
    """Do as `_greet`; tell the peers if it fails."""
    try:
        return _greet(this, deadline)
    except BaseException as exc:
        error = this.explain(exc, DeathWatch())
        this.fail(error)
        if error is not exc:
            raise error from exc
        raise


def _greet(this: BootstrapAttempt, deadline: float) -> Greeting:
    """Hear from all ranks which jobs they are in; all come to the same choice for the group."""
    mine, directory = own_hello(this.rank, this.num_ranks, own_host_key())
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


def _close_all() -> None:
    """At exit: end the threads while Python is whole. Groups that were destroyed before are closed already."""
    for engine in list(_engines):
        engine.close()


def _mark_forked() -> None:
    for engine in list(_engines):
        engine.forked()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_mark_forked)
