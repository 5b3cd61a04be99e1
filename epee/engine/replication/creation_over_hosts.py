"""The additional steps to create a group over several hosts (see `bootstrap/creation.py`): mirrors and links.

    job        a folder on each host with the same id and secret: that of EPEE_TOKEN_FILE on every host, or rank 0's,
               which it puts into the store; and a listener of each process for the agents of other hosts
    record     address and port of this rank beside the rest
    mirrors    a gateway makes them and announces them in its outbox (field "mirrors"), which the ranks of its host have
               mapped
    links      one connection per pair of partners (`link/meeting.py`), then every rank asks for its sources
               (`links.py`), and LIFE_READY travels through the mirrors

A token in the store is as safe as the store: a process that reads it there can act as a rank. A warning says so once;
EPEE_REQUIRE_TOKEN_FILE=1 refuses. Everything else is as safe as on one host: a record that fits no token is refused.

A rank that fails on the way reports it through the store (`bootstrap/attempt.py`); the others check it while they wait
for mirrors, links and each other. A rank that dies closes its sockets, which ends its partners' wait; the others see
that it is no longer in the view.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import socket
import time
from collections.abc import Callable

from ... import env
from ...errors import AuthError, CommTimeoutError, EpeeError, InvalidArgument, ProtocolError, expected, shortage
from ...link.engine import LinkMaker
from ...link.meeting import Meeting, Partner
from ...link.poller import Links
from ...link.topology import Topology
from ...memory.shared import BLOB_BYTES, SharedRegion
from ...memory.signals import fence
from ...view.job import job_name
from ...view.process.detector import DeathWatch
from ...view.transport.auth import JOB_ID_BYTES, TOKEN_BYTES, Identity, Token
from ...view.transport.directory import JobDirectory, job_id_of, token_of_file
from ..bootstrap.attempt import BootstrapAttempt, died, read_fields
from ..bootstrap.job_handle import Greeting
from ..bootstrap.record import RankRecord
from ..outbox import LIFE, LIFE_BORN, LIFE_READY, MIRROR_BLOB, MIRROR_MADE, OutboxOwner, PeerRegions, open_outbox
from .links import GroupLinks
from .mirror import FROM_BIRTH

logger = logging.getLogger("epee")

_LOOK_S = 0.5  # how often a waiting rank checks whether another has failed
_PAUSE_S = 0.0005
_NOTE_S = 2.0  # a gateway that lives takes some milliseconds


class StoreLook:
    """A check, while this rank waits, whether another has failed or died, or is no longer in the view (`lost`)."""

    def __init__(self, this: BootstrapAttempt, watch: DeathWatch, lost: Callable[[], tuple[int, ...]]) -> None:
        self._this, self._watch, self._lost = this, watch, lost
        self._next = time.monotonic() + _LOOK_S

    def __call__(self) -> None:
        """Raise the error that a peer has reported, from time to time."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _LOOK_S
            lost = self._lost()  # first, as in `reported`
            error = self._this.reported(self._watch)
            if error is not None:
                raise error
            if lost:
                raise died(self._this.rank, lost)


def in_words(exc: BaseException) -> BaseException:
    """Return the error to raise for the exception on the way, which is being handled."""
    if isinstance(exc, expected(OSError)) and not isinstance(exc, EpeeError):
        return shortage("cannot make the links of the group", exc)
    return exc


def enter_job(this: BootstrapAttempt, greeting: Greeting, is_at_rank_0: bool, deadline: float) -> JobDirectory:
    """Return this host's folder of the job that a group over several hosts creates.

    Its id is in the path that rank 0 has published. Its secret is that of EPEE_TOKEN_FILE, or goes through the store.

    Args:
        is_at_rank_0: this process runs on rank 0's host.
    Raises:
        AuthError: EPEE_TOKEN_FILE is set on some hosts alone, or the existing folder holds another secret.
        InvalidArgument: EPEE_REQUIRE_TOKEN_FILE=1 and no file.
    """
    token = token_of_file()
    if token is None and env.get_bool("EPEE_REQUIRE_TOKEN_FILE"):
        raise InvalidArgument(
            "a group over several hosts needs a secret: EPEE_REQUIRE_TOKEN_FILE=1 demands EPEE_TOKEN_FILE on every "
            "host, a file of 32 random bytes, the same everywhere and readable by this user alone"
        )
    if greeting.directory is not None:
        secret = b"" if token is not None else greeting.directory.token.reveal()
        this.store.set(this.key(0) + "/token", json.dumps({"token": secret.hex()}))
        if token is None:
            _warn()
        return greeting.directory
    told = str(read_fields(this.read(0, "/token", deadline), 0).get("token", ""))
    if bool(told) == (token is not None):
        raise AuthError(
            "EPEE_TOKEN_FILE must be set on all hosts or on none: rank 0 has "
            f"{'none' if told else 'one'}, this rank has {'one' if told else 'none'}"
        )
    if is_at_rank_0:
        return JobDirectory.open(greeting.folder)
    try:
        secret = bytes.fromhex(told)
        if token is None and len(secret) != TOKEN_BYTES:
            raise ValueError(f"{len(secret)} bytes")
    except expected(ValueError) as exc:
        raise ProtocolError(
            f"rank 0's token in the store cannot be read ({exc}); does another job use this store?"
        ) from exc
    return JobDirectory.enter(job_name(), job_id_of(greeting.folder), secret)


@functools.cache
def _warn() -> None:
    logger.warning(
        "a group over several hosts: its secret goes through the rendezvous store, so links are as safe as that; "
        "EPEE_TOKEN_FILE on every host keeps it out of there, EPEE_REQUIRE_TOKEN_FILE=1 insists"
    )


def make_mirrors(
    topology: Topology, owners: list[OutboxOwner], layout: PeerRegions, undo: contextlib.ExitStack
) -> dict[int, SharedRegion]:
    """Make the mirrors that this rank keeps, and announce them to the ranks of its host.

    Args:
        layout: regions of this rank's own memory alone, for the offsets of the words.
    """
    made = {}
    for peer in topology.sources():
        region = made[peer] = SharedRegion.create(layout.payload_bytes, f"mirror{peer}", only_owner_writes=True)
        undo.callback(region.close)
        owners[peer].sign(region)
        first = layout.mirror_base[peer] + MIRROR_BLOB
        layout.own[first : first + BLOB_BYTES // 8] = memoryview(region.blob).cast("Q")
    fence()
    for peer in topology.sources():
        layout.own[layout.mirror_base[peer] + MIRROR_MADE] = FROM_BIRTH
    return made


def map_mirror(
    peer: int,
    keeper: int,
    region: SharedRegion,
    layout: PeerRegions,
    owner: OutboxOwner,
    deadline: float,
    check: Callable[[], None],
) -> SharedRegion:
    """Map the mirror of `peer` that `keeper`, whose outbox is `region`, keeps for this host, once it is there."""
    words = region.words(0, len(layout.own))
    try:
        row = layout.mirror_base[peer]
        while not words[row + MIRROR_MADE]:
            check()
            if time.monotonic() > deadline:
                rank = layout.rank
                text = f"init (rank={rank}): rank {keeper} did not make its mirrors in time"
                raise CommTimeoutError(text, [keeper], has_job=False)
            time.sleep(_PAUSE_S)
        blob = bytes(words[row + MIRROR_BLOB : row + MIRROR_BLOB + BLOB_BYTES // 8])
    finally:
        words.release()
    found = open_outbox(blob, owner)
    if found.owner_pid != region.owner_pid:
        found.close()
        raise ProtocolError(f"rank {keeper}'s outbox names a mirror of process {found.owner_pid}, not of its own")
    return found


def link(
    topology: Topology,
    peer_regions: PeerRegions,
    records: list[RankRecord],
    owners: list[OutboxOwner],
    mirrors: dict[int, SharedRegion],
    token: Token,
    listener: socket.socket,
    deadline: float,
    check: Callable[[], None],
    undo: contextlib.ExitStack,
) -> GroupLinks:
    """Make the links with this rank's partners, and request the others' words."""
    rank = topology.rank
    others = {
        peer: Partner(records[peer].address, records[peer].port, Identity(peer, 0, owners[peer].nonce))
        for peer in topology.elsewhere
    }
    group_id = token.derive(b"links", owners[rank].group_id.to_bytes(8, "little"))[:JOB_ID_BYTES]
    partners = {peer: others[peer] for peer in topology.partners()}
    meeting = Meeting(token, group_id, Identity(rank, 0, owners[rank].nonce), partners, listener, stays=True)
    undo.callback(meeting.close)
    maker = LinkMaker(records[rank].link_mac, records[rank].link)
    undo.callback(maker.close)
    met = meeting.run(deadline, check)
    for connected in met.values():
        undo.callback(connected.connection.close)
    for peer, partner in others.items():
        meeting.admit(peer, partner)
    ways = GroupLinks(topology, peer_regions, Links([]), meeting, dict(enumerate(owners)), maker)
    undo.callback(ways.exports.abandon)
    peer_regions.exports = ways.exports
    ways.start(met, mirrors)
    return ways


def await_told(
    ways: GroupLinks,
    peer_regions: PeerRegions,
    watch: DeathWatch,
    lost: Callable[[], tuple[int, ...]],
    deadline: float,
) -> None:
    """Wait until every other host has asked for this rank's state; the group is made, so all ranks have been ready.

    A rank that has died or left since may not have asked, and is not waited for: the calls report the consequences.

    Raises:
        CommTimeoutError: one has not in time.
    """
    ways.note_made()
    until = time.monotonic() + _NOTE_S
    deadline = max(deadline, until)  # it may have passed where others have found that the group is made
    while any(peer_regions.words[peer][LIFE] == LIFE_BORN for peer in peer_regions.peers) and time.monotonic() < until:
        time.sleep(_PAUSE_S)  # a gateway of this host has not noted it yet
    while (
        not ways.is_told
        and not watch.dead()
        and all(peer_regions.words[peer][LIFE] == LIFE_READY for peer in peer_regions.peers)
    ):
        if lost():
            return
        if time.monotonic() > deadline:
            text = f"init (rank={peer_regions.rank}): a gateway of another host has not asked for our words"
            raise CommTimeoutError(text, has_job=False)
        time.sleep(_PAUSE_S)
