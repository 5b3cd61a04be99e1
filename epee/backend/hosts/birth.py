"""How a group over several hosts comes into being: as on one host, and mirrors and links between.

    hello      told where each rank runs (`bootstrap/birth.py`), so all know hosts, gateways and partners
    token      that of EPEE_TOKEN_FILE on every host, else rank 0 makes one and puts it into the store
    record     proved with the token: outbox, address and port of this rank
    mirrors    proved, too: a gateway tells the ranks of its host where it keeps what it hears of remote ranks
    links      one connection per pair of partners (`link/meeting.py`); then LIFE_READY travels through the mirrors

A token in the store is as safe as the store: whoever reads it there can speak for a rank. A warning says so once;
EPEE_REQUIRE_TOKEN_FILE=1 refuses. Everything else is as safe as on one host: a record that fits no token is refused.

A rank that fails on the way tells the others through the store (`bootstrap/attempt.py`); they look there while they
wait for links. One that dies closes its sockets; its partners' wait ends with it, the others' with the time-out. The
group has no view: a lost rank ends it (`watch.py`), and a new one is made without the rank.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import secrets
import time
from dataclasses import replace
from typing import NamedTuple

from ... import env
from ...errors import AuthError, EpeeError, InvalidArgument, ProtocolError, shortage
from ...link.address import listen, own_address
from ...link.frames import FrameOpener, FrameSealer
from ...link.meeting import Connected, Meeting, Partner
from ...link.poller import Links
from ...link.tcp import TcpLink, set_up
from ...link.topology import Topology
from ...memory.host import BLOB_BYTES, HostRegion
from ...view.transport.auth import JOB_ID_BYTES, TOKEN_BYTES, Identity, Token
from ...view.transport.directory import token_of_file
from ..bootstrap.attempt import BootstrapAttempt, read_fields
from ..bootstrap.proof import prove, proved
from ..bootstrap.readiness import await_all
from ..bootstrap.record import Proof, RankRecord, exchange, own_record
from ..bootstrap.seat import Greeting
from ..engine.engine import Engine
from ..outbox import Outboxes, OutboxOwner, open_outbox, outbox_layout
from .exports import Exports
from .mirror import Ear
from .waiting import LinkedWaiting
from .watch import HostsWatch

logger = logging.getLogger("epee")

_LOOK_S = 0.5  # how often a rank that waits for links looks whether somebody has failed


class _Mapped(NamedTuple):
    """The outboxes of all ranks as this one maps them, and the mirrors that it keeps for its host."""

    regions: list[HostRegion]
    mirrors: dict[int, HostRegion]


def create_over_hosts(
    this: BootstrapAttempt,
    greeting: Greeting,
    topology: Topology,
    deadline: float,
    timeout_s: float,
    staging_bytes: int,
    mode: str,
    extra_bytes: int = 0,
) -> Engine:
    """Make this rank's part of a group whose ranks run on several hosts; returns when all have made theirs.

    Raises:
        as `create_engine`, and:
        InvalidArgument: EPEE_REQUIRE_TOKEN_FILE=1 and no file; an address that is none.
    """
    watch = HostsWatch()
    with contextlib.ExitStack() as undo:
        undo.callback(watch.close)
        try:
            proof = Proof(_token(this, deadline), greeting.told)
            owners = [
                OutboxOwner(bytes.fromhex(hello.nonce), greeting.hellos[0].lane, rank)
                for rank, hello in enumerate(greeting.hellos)
            ]
            nbytes = outbox_layout(this.num_ranks, staging_bytes, extra_bytes).nbytes
            this.region = region = _signed(nbytes, f"outbox{this.rank}", owners[this.rank], undo)
            listener = listen(own_address(this.store))
            undo.callback(listener.close)
            address, port = listener.getsockname()[:2]
            mine = replace(own_record(this.num_ranks, staging_bytes, region, mode), address=address, port=port)
            records = exchange(this, mine, proof, deadline)
            for peer in topology.here:
                if peer != this.rank:
                    watch.watch(peer, records[peer].pid, records[peer].start_time)
            memory = _map(this, topology, proof, records, owners, nbytes, region, deadline, undo)
            box = Outboxes(this.rank, memory.regions, staging_bytes, 1, this.num_ranks, extra_bytes)
            undo.callback(box.close)
            partners = {
                peer: Partner(records[peer].address, records[peer].port, Identity(peer, 0, owners[peer].nonce))
                for peer in topology.partners()
            }
            me = Identity(this.rank, 0, owners[this.rank].nonce)
            meeting = Meeting(proof.token, proof.told[:JOB_ID_BYTES], me, partners, listener)
            met = meeting.run(deadline, _StoreLook(this, watch))
            exports = _link(topology, box, memory.mirrors, met, mine.link_mac)
            undo.callback(exports.abandon)
            watch.attach(box, exports)
            await_all(this, box, watch, deadline)
        except BaseException as exc:
            error = this.explain(_in_words(exc), watch)
            this.fail(error)
            if error is not exc:
                raise error from exc
            raise
        undo.pop_all()
    return Engine(box, watch, timeout_s, waiting=functools.partial(LinkedWaiting, exports=exports))


def _in_words(exc: BaseException) -> BaseException:
    if isinstance(exc, OSError) and not isinstance(exc, EpeeError):
        return shortage("cannot make the links of the group", exc)
    return exc


class _StoreLook:
    """Notices, while links are made, that a rank has failed or died."""

    def __init__(self, this: BootstrapAttempt, watch: HostsWatch) -> None:
        self._this, self._watch = this, watch
        self._next = 0.0

    def __call__(self) -> None:
        """Raise what a peer has told, from time to time."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _LOOK_S
            error = self._this.heard(self._watch)
            if error is not None:
                raise error


def _token(this: BootstrapAttempt, deadline: float) -> Token:
    """Return the group's token: this user's file, or what rank 0 tells through the store."""
    token = token_of_file()
    if token is None and env.get_bool("EPEE_REQUIRE_TOKEN_FILE"):
        raise InvalidArgument(
            "a group over several hosts needs a secret: EPEE_REQUIRE_TOKEN_FILE=1 demands EPEE_TOKEN_FILE on every "
            "host, a file of 32 random bytes, the same everywhere and readable by this user alone"
        )
    if this.rank == 0:
        secret = secrets.token_bytes(TOKEN_BYTES)
        told = "" if token is not None else secret.hex()
        this.store.set(this.key(0) + "/token", json.dumps({"token": told}))
        if token is None:
            _warn()
        return token or Token(secret)
    told = str(read_fields(this.read(0, "/token", deadline), 0).get("token", ""))
    if bool(told) == (token is not None):
        raise AuthError(
            "EPEE_TOKEN_FILE must be set on all hosts or on none: rank 0 has "
            f"{'none' if told else 'one'}, this rank has {'one' if told else 'none'}"
        )
    if token is not None:
        return token
    try:
        return Token(bytes.fromhex(told))
    except ValueError as exc:
        raise ProtocolError(f"rank 0's token in the store cannot be read ({exc}); is the store ours?") from exc


@functools.cache
def _warn() -> None:
    logger.warning(
        "a group over several hosts: its secret goes through the rendezvous store, so links are as safe as that; "
        "EPEE_TOKEN_FILE on every host keeps it out of there, EPEE_REQUIRE_TOKEN_FILE=1 insists"
    )


def _signed(nbytes: int, name: str, owner: OutboxOwner, undo: contextlib.ExitStack) -> HostRegion:
    region = HostRegion.create(nbytes, name, only_owner_writes=True)
    undo.callback(region.close)
    owner.sign(region)
    return region


def _map(
    this: BootstrapAttempt,
    topology: Topology,
    proof: Proof,
    records: list[RankRecord],
    owners: list[OutboxOwner],
    nbytes: int,
    region: HostRegion,
    deadline: float,
    undo: contextlib.ExitStack,
) -> _Mapped:
    """Make the mirrors that this rank keeps, tell them to its host, and map everybody's."""
    mirrors = {peer: _signed(nbytes, f"mirror{peer}", owners[peer], undo) for peer in topology.sources()}
    text = json.dumps({str(peer): mirror.blob.hex() for peer, mirror in mirrors.items()})
    this.store.set(this.key(this.rank) + "/mirrors", prove(proof.token, text, proof.purpose(this.rank) + b"mirrors"))
    told = {peer: _mirrors_of(this, peer, proof, deadline) for peer in topology.here if peer != this.rank}
    regions = []
    for peer in range(this.num_ranks):
        keeper = peer if topology.is_here(peer) else topology.gateway(peer, topology.host)
        if keeper == this.rank:
            regions.append(region if peer == this.rank else mirrors[peer])
            continue
        blob = bytes.fromhex(records[peer].blob) if keeper == peer else told[keeper].get(peer, b"")
        found = open_outbox(blob, owners[peer])
        undo.callback(found.close)
        if found.owner_pid != records[keeper].pid:
            raise ProtocolError(f"rank {keeper}'s record names process {records[keeper].pid}, its memory another")
        regions.append(found)
    return _Mapped(regions, mirrors)


def _mirrors_of(this: BootstrapAttempt, peer: int, proof: Proof, deadline: float) -> dict[int, bytes]:
    """Return what a gateway of this host tells of its mirrors: rank -> blob."""
    fields = read_fields(this.read(peer, "/mirrors", deadline), peer)
    told = json.loads(proved(proof.token, fields, proof.purpose(peer) + b"mirrors", f"rank {peer}'s mirrors'"))
    try:
        blobs = {int(rank): bytes.fromhex(blob) for rank, blob in told.items()}
        if any(len(blob) != BLOB_BYTES for blob in blobs.values()):
            raise ValueError("a blob has another size")
    except (AttributeError, TypeError, ValueError) as exc:
        raise ProtocolError(f"rank {peer}'s mirrors in the store cannot be read ({exc}); another version?") from exc
    return blobs


def _link(
    topology: Topology, box: Outboxes, mirrors: dict[int, HostRegion], met: dict[int, Connected], covers_payloads: bool
) -> Exports:
    """Make the links of the connections and let the frames come."""
    ears, links = {}, []
    for peer, (connection, out_key, in_key) in met.items():
        set_up(connection)
        ears[peer] = ear = Ear(peer, mirrors.get(peer))
        ear.attach(box, topology.here)
        sealer, opener = FrameSealer(out_key, covers_payloads), FrameOpener(in_key, covers_payloads)
        links.append(TcpLink(peer, connection, sealer, opener, ear))
    made = Links(links)
    exports = Exports(topology, box, made, ears)
    for ear in ears.values():
        ear.bind(made)
    box.exports = exports
    made.start(exports.lose, exports.tell_progress)
    return exports
