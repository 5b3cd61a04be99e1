"""How a group comes into being, and how it goes when the process does.

Each rank makes its outbox and puts one record into the group's store: version, size of the group, staging size, who and
where it is, and the blob of its outbox. It reads everybody's record, checks it and who wrote it (`proof.py`), and maps
the outbox, which must say that it is this rank's. The last step needs
no store: a rank sets its LIFE word when it has mapped all outboxes and waits for everybody's, so after birth nobody
depends on anybody's file descriptor or on the store, which is never used again.

Records are JSON of a fixed set of fields, checked before use; nothing is unpickled. The key holds how often this rank
was born in this store, so a group that is destroyed and made again with the same store does not meet old records.

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
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch.distributed as dist

from ...errors import CommTimeoutError, ProtocolError, UnsupportedError, shortage
from ...memory.host import BLOB_BYTES, HostRegion, process_start_time
from ...view.job import Seat, common_job, new_folder, own_hello, pack_member, parse_hello, parse_member, start_job
from ...view.process.detector import DeathWatch
from ...view.transport.auth import Token
from ...view.transport.wire import NONCE_BYTES
from ..engine.engine import Engine
from ..membership.epochs import Survival
from ..options import MODES
from ..outbox import LIFE, LIFE_BORN, LIFE_FAILED, LIFE_READY, Outboxes, OutboxOwner, open_outbox, outbox_layout
from ..wake import publish_word
from .attempt import BootstrapAttempt, died, failure, read_fields
from .home import FOLDER_KEY, Home, pack_home
from .proof import prove, proved, transcript
from .seat import Greeting, take_seat

PROTOCOL = 2


@dataclass(frozen=True)
class RankRecord:
    """A rank's facts about itself, for the others."""

    protocol: int
    num_ranks: int
    staging_bytes: int
    host: str
    boot_id: str
    namespace: str
    pid: int
    start_time: int
    blob: str  # hexadecimal
    mode: str
    nonce: str  # of the process, hexadecimal
    member: str  # of a job that this group founds, else ""
    epoch: int  # that this rank knows, in a job that runs already


_KINDS = get_type_hints(RankRecord)  # some 0.2 ms each time


def create_engine(this: BootstrapAttempt, timeout_s: float, staging_bytes: int, mode: str = MODES[0]) -> Engine:
    """Make this rank's part of a group; returns when all ranks have made theirs. Belongs inside `attempt`.

    Raises:
        AuthError: a record was written by somebody else, or the ranks run as different users.
        CommTimeoutError: a rank did not come within `timeout_s`.
        RankFailedError: a rank died on the way.
        MismatchError: a rank refused its options.
        PeerError: a rank could not make its part.
        UnsupportedError: the ranks run on several hosts, or this machine cannot share memory.
        ProtocolError: a record is damaged, or of another version or group.
        ResourceError: no memory or descriptor is left here.
    """
    deadline = time.monotonic() + timeout_s
    rank, num_ranks = this.rank, this.num_ranks
    watch = DeathWatch()
    regions: list[HostRegion] = []
    box = greeting = seat = survival = None
    half_made = contextlib.ExitStack()
    capacity = num_ranks
    try:
        if num_ranks > 1:
            greeting = _greet(this, deadline)
            capacity = greeting.capacity
        layout = outbox_layout(capacity, staging_bytes)
        this.region = region = HostRegion.create(layout.nbytes, f"outbox{rank}", only_owner_writes=True)
        if greeting is not None:
            seat = take_seat(greeting, this.rank, region.blob, half_made)
            _owner(seat, rank, seat.job.runtime.member.nonce).sign(region)
        if seat is not None and not seat.is_founder:
            survival = Survival(seat, mode)
        mine = _own_record(num_ranks, staging_bytes, region, mode, seat, survival)
        records = [mine]
        if seat is not None and greeting is not None:
            records = _exchange(this, mine, Proof(seat.job.directory.token, greeting.told), deadline)
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
                this.store.set(FOLDER_KEY, prove(seat.job.directory.token, seat.job.path, FOLDER_KEY.encode()))
        if survival is not None:
            survival.begin(max(record.epoch for record in records), _left(deadline).total_seconds())
        box = Outboxes(rank, regions, staging_bytes, 1, capacity)
        _await_all(this, box, watch, deadline)
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
    keep(engine)
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


def _greet(this: BootstrapAttempt, deadline: float) -> Greeting:
    """Hear from all ranks which jobs they are in; all come to the same choice for the group."""
    mine, directory = own_hello(this.rank, this.num_ranks)
    try:
        told = [json.dumps(asdict(mine)).encode()] * this.num_ranks
        this.store.set(this.key(this.rank) + "/hello", told[this.rank])
        hellos = []
        for peer in range(this.num_ranks):
            raw = _read(this, peer, "/hello", deadline)
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
            folder = str(read_fields(_read(this, 0, "/folder", deadline), 0).get("folder", ""))
            folder = folder if directory is None else str(directory.path)
    except BaseException:
        if directory is not None:
            directory.leave()
        raise
    return Greeting(hellos, directory, folder, transcript(this.number, [*told, folder.encode()]))


def _own_record(
    num_ranks: int,
    staging_bytes: int,
    region: HostRegion,
    mode: str = MODES[0],
    seat: Seat | None = None,
    survival: Survival | None = None,
) -> RankRecord:
    pid = os.getpid()
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError as exc:
        raise shortage("cannot see which machine this is", exc) from exc
    return RankRecord(
        PROTOCOL,
        num_ranks,
        staging_bytes,
        os.uname().nodename,
        boot_id,
        namespace,
        pid,
        process_start_time(pid),
        region.blob.hex(),
        mode,
        seat.job.runtime.member.nonce.hex() if seat is not None else bytes(NONCE_BYTES).hex(),
        pack_member(seat.job.runtime.member) if seat is not None and seat.is_founder else "",
        survival.epoch if survival is not None else 1,
    )


class Proof(NamedTuple):
    """What the records of an attempt are proved with: the job's token, and what was told before."""

    token: Token
    told: bytes

    def purpose(self, rank: int) -> bytes:
        """Return what `rank`'s record is for."""
        return self.told + rank.to_bytes(4, "little")


def _exchange(this: BootstrapAttempt, mine: RankRecord, proof: Proof, deadline: float) -> list[RankRecord]:
    """Put this rank's record into the store and return everybody's, proved and checked."""
    own = json.dumps(asdict(mine))
    this.store.set(this.key(this.rank), prove(proof.token, own, proof.purpose(this.rank)))
    records = []
    for peer in range(this.num_ranks):
        fields = read_fields(_read(this, peer, "", deadline), peer)
        text = proved(proof.token, fields, proof.purpose(peer), f"rank {peer}'s")
        this.others_know = True  # every rank compares the same records
        records.append(_parse(text.encode(), peer, mine))
        this.others_know = False
    this.others_know = True
    _check_host(records)
    this.others_know = False
    return records


def _read(this: BootstrapAttempt, peer: int, what: str, deadline: float) -> bytes:
    """Return a record of `peer`; raise what it tells instead if it has failed."""
    try:
        this.store.wait([this.key(peer) + what], _left(deadline))
        raw = bytes(this.store.get(this.key(peer) + what))
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as exc:
        raise CommTimeoutError(
            f"init (rank={this.rank}, peer={peer}): no word from rank {peer}: {str(exc).splitlines()[0]}; "
            "start all ranks with the same rendezvous, and rank numbers that differ",
            [peer],
        ) from exc
    this.others_know = True
    fields = read_fields(raw, peer)
    if "failed" in fields:
        raise failure(fields, this.rank, this.num_ranks)
    this.others_know = False
    return raw


def _left(deadline: float) -> Any:
    return timedelta(seconds=max(0.1, deadline - time.monotonic()))


def _parse(raw: bytes, peer: int, mine: RankRecord) -> RankRecord:
    """Turn a peer's record into a checked `RankRecord`."""
    fields = read_fields(raw, peer)
    try:
        record = RankRecord(**fields)
        for name, kind in _KINDS.items():
            if type(fields[name]) is not kind:
                raise TypeError(f"{name} is {fields[name]!r}")
        if len(bytes.fromhex(record.blob)) != BLOB_BYTES:
            raise ValueError("blob has another size")
        if len(bytes.fromhex(record.nonce)) != NONCE_BYTES:
            raise ValueError("nonce has another size")
        if not 0 < record.pid < 1 << 31:
            raise ValueError(f"pid is {record.pid}")
    except (ValueError, TypeError, KeyError) as exc:
        raise ProtocolError(f"rank {peer}'s record in the store cannot be read ({exc}); is the store ours?") from exc
    if record.protocol != PROTOCOL:
        raise ProtocolError(
            f"rank {peer} speaks version {record.protocol} of the backend's protocol, this rank {PROTOCOL}; "
            "install one version of epee everywhere"
        )
    for name in ("num_ranks", "staging_bytes", "mode"):
        here, there = getattr(mine, name), getattr(record, name)
        if here != there:
            raise ProtocolError(f"{name} must be equal on all ranks: {here} here, {there} on rank {peer}")
    return record


def _check_host(records: list[RankRecord]) -> None:
    """Refuse groups whose ranks cannot share memory; every rank sees the same records and says the same."""
    first = records[0]
    for rank, record in enumerate(records):
        if record.boot_id != first.boot_id:
            raise UnsupportedError(
                f"a group of the backend epee lives on one host so far; rank 0 runs on {first.host}, rank {rank} on "
                f"{record.host}; use gloo or nccl for groups that span hosts, epee inside each host"
            )
        if record.namespace != first.namespace:
            raise UnsupportedError(
                f"ranks 0 and {rank} run on host {first.host} in different PID namespaces (containers); "
                "run them in one, or share it (--pid=host)"
            )


def _await_all(this: BootstrapAttempt, box: Outboxes, watch: DeathWatch, deadline: float) -> None:
    """Say that this rank has mapped all outboxes; wait until all have."""
    publish_word(box, LIFE, LIFE_READY)
    pause = 0.0001
    for peer in box.peers:
        while box.words[peer][LIFE] == LIFE_BORN:
            dead = watch.dead()
            if dead:
                raise died(this.rank, dead)
            _raise_if_failed(this, box, watch)
            if time.monotonic() > deadline:
                raise CommTimeoutError(f"init (rank={box.rank}): rank {peer} did not get ready in time", [peer])
            time.sleep(pause)
            pause = min(2 * pause, 0.005)
    _raise_if_failed(this, box, watch)


def _raise_if_failed(this: BootstrapAttempt, box: Outboxes, watch: DeathWatch) -> None:
    for peer in box.peers:
        if box.words[peer][LIFE] == LIFE_FAILED:
            raise this.failure_of(peer, watch)


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
