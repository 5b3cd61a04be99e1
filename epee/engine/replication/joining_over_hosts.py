"""The search of a joiner for a job over several hosts, and the start of its part between the hosts.

    notes      Rank 0 of the initial members puts the job into the store: its folder's path, which has the job's id, the
               note about the group (`bootstrap/group_note.py`), and the secret unless EPEE_TOKEN_FILE has it. On each
               host the initial member of the lowest rank leaves the note in the folder as well, for when the store has
               died.
    contacts   Each member puts its identity and its agent's address under a key of its own, initial members at
               creation and others when they have been taken in. Each entry is proved by the job's token, and one that
               is damaged or forged is passed over. The entry of a former member does no harm.
    in         The decision that takes a process in names all members, their hosts, and where their links are made, so
               from then on the store may be lost. The process makes a placement of them (`link/topology.py`), its
               mirrors and its part of the links, and reads blanks until mirrors are whole. It is ready (LIFE) when it
               reads all others; no rank publishes a call that it has a part in before.

Each process writes its own keys and its own outbox. A crash before the decision leaves a key and perhaps a folder that
the next job removes; one after it is the loss of a member. If the store's host dies before all is read, the search
ends within the joiner's timeout, with an error or with the only job of this rendezvous that has a folder here; if it
dies later, no process notices. If the coordinator dies, the others take a joiner in: it has asked all members that it
knows, and continues asking.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from ... import env
from ...errors import AuthError, EpeeError, InvalidArgument, ProtocolError, expected, ignored
from ...link.address import listen, own_address
from ...link.engine import LinkMaker
from ...link.meeting import Meeting, Partner
from ...link.poller import Links
from ...link.topology import Topology
from ...memory.shared import SharedRegion
from ...view.job import Job, job_name, pack_member, parse_member
from ...view.process.machine import own_host_key
from ...view.protocol.messages import Decision, Member
from ...view.transport.auth import JOB_ID_BYTES, TOKEN_BYTES, Identity, Token
from ...view.transport.directory import JobDirectory, job_id_of, token_of_file
from ..bootstrap.attempt import read_fields
from ..bootstrap.bounded_store import BoundedStore
from ..bootstrap.group_note import (
    FOLDER_KEY,
    HOSTS,
    Home,
    OutboxEndpoint,
    pack_home,
    pack_place,
    parse_home,
    parse_place,
)
from ..bootstrap.proof import prove, proved
from ..limits import MAX_RANKS
from ..membership.group_membership import GroupMembership
from ..outbox import PeerRegions
from .links import GroupLinks

_HOME_KEY = "home"


class Found(NamedTuple):
    """A running job: its folder on this host, the note about its first group, and members on other hosts."""

    directory: JobDirectory
    home: Home
    contacts: tuple[Member, ...] = ()


def contact_key(slot: int) -> str:
    """Return the store's key under which a member publishes its identity."""
    return f"{FOLDER_KEY}/{slot}"


def leave_notes(store: BoundedStore, job: Job, topology: Topology, home: Home) -> None:
    """Publish the notes by which processes find the job later, from any host; called by initial members."""
    directory, note = job.directory, pack_home(home)
    if topology.rank == topology.here[0]:
        directory.write_home(note)
    tell_contact(store, job)
    if topology.rank == 0:
        text = json.dumps({"place": pack_place(str(directory.path), directory.host), _HOME_KEY: note.hex()})
        record = json.loads(prove(directory.token, text, FOLDER_KEY.encode()))
        secret = "" if env.get("EPEE_TOKEN_FILE") else directory.token.reveal().hex()
        store.set(FOLDER_KEY, json.dumps({HOSTS: topology.num_hosts, "token": secret, **record}))


def tell_contact(store: BoundedStore, job: Job) -> None:
    """Publish in the store the identity of this member and the address of its agent."""
    key = contact_key(job.slot)
    with ignored(RuntimeError):  # the store has died: others are asked
        store.set(key, prove(job.directory.token, pack_member(job.runtime.member), key.encode()))


def find_over_hosts(store: BoundedStore, fields: dict[str, Any]) -> Found:
    """Return the job over several hosts that rank 0 has named in the store.

    Raises:
        AuthError: EPEE_TOKEN_FILE is set here and not there, or the other way round, or is another one.
        ProtocolError: the record cannot be right.
    """
    token = token_of_file()
    record = {name: value for name, value in fields.items() if name not in (HOSTS, "token")}
    told = fields.get("token")
    if bool(told) == (token is not None):
        raise AuthError(
            "EPEE_TOKEN_FILE must be set on all hosts or on none: the running ranks have "
            f"{'none' if told else 'one'}, this process has {'one' if token is not None else 'none'}"
        )
    if token is None and env.get_bool("EPEE_REQUIRE_TOKEN_FILE"):
        raise InvalidArgument("EPEE_REQUIRE_TOKEN_FILE=1 demands EPEE_TOKEN_FILE, which the running ranks have not")
    try:
        secret = bytes.fromhex(str(told or ""))
        if token is None and len(secret) != TOKEN_BYTES:
            raise ValueError(f"a token of {len(secret)} bytes")
        text = read_fields(proved(token or Token(secret), record, FOLDER_KEY.encode(), "the job's").encode(), 0)
        folder, host = parse_place(str(text.get("place")))
        job_id, home = job_id_of(folder), parse_home(bytes.fromhex(str(text.get(_HOME_KEY))))
    except expected(ValueError) as exc:
        raise ProtocolError(
            f"the job's record in the store cannot be read ({exc}); does another job use this store?"
        ) from exc
    is_rank_0s = host == own_host_key()
    directory = _entered(folder) if is_rank_0s else None
    directory = directory or JobDirectory.enter(job_name(), job_id, secret)
    with contextlib.ExitStack() as undo:
        undo.callback(directory.leave)
        contacts = _contacts(store, directory)
        if not directory.read_home():
            with ignored(EpeeError):  # another process writes it just now
                directory.write_home(pack_home(home))
        undo.pop_all()
    return Found(directory, home, contacts)


def _entered(folder: str) -> JobDirectory | None:
    """Return rank 0's folder, on its host; None when all have left it, and it no longer exists."""
    try:
        return JobDirectory.open(folder)
    except expected(EpeeError):
        return None


def _contacts(store: BoundedStore, directory: JobDirectory) -> tuple[Member, ...]:
    """Return the processes that have published themselves as members, as far as that is proved."""
    found = []
    for slot in range(MAX_RANKS):
        key = contact_key(slot)
        raw = store.find(key, 0.0)
        if raw is not None:
            with ignored(AuthError, ProtocolError):
                text = proved(directory.token, read_fields(raw, slot), key.encode(), f"slot {slot}'s")
                found.append(parse_member(text, slot))
    return tuple(found)


class Entrance:
    """The listener of a joining process for ranks of other hosts, and the start of its part there.

    Attributes:
        port: where its links are made.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._host = own_host_key()
        self.port = int(listener.getsockname()[1])

    @classmethod
    def open(cls, store: Any, undo: contextlib.ExitStack) -> Entrance:
        """Listen; `undo` gets the cleanup."""
        listener = listen(own_address(store))
        undo.callback(listener.close)
        return cls(listener)

    def for_agents(self, store: Any) -> socket.socket:
        """Return the listener for the agents of other hosts."""
        return listen(own_address(store))

    def is_here(self, part: OutboxEndpoint) -> bool:
        """Return whether a rank runs on this host."""
        return part.host == self._host

    def enter(
        self,
        membership: GroupMembership,
        decision: Decision,
        parts: Mapping[int, OutboxEndpoint],
        peer_regions: PeerRegions,
        home: Home,
    ) -> GroupLinks:
        """Begin this rank's part between hosts, in the view that took it in.

        Raises:
            ResourceError: no memory, descriptor or thread is left.
        """
        rank, token = peer_regions.rank, membership.token
        topology = Topology(rank, [parts[peer].host if peer in parts else "" for peer in range(peer_regions.num_ranks)])
        owners = {peer: part.owner for peer, part in parts.items()}
        group_id = token.derive(b"links", home.group_id.to_bytes(8, "little"))[:JOB_ID_BYTES]
        others = {
            peer: Partner(parts[peer].address, parts[peer].port, Identity(peer, 0, owners[peer].nonce))
            for peer in topology.elsewhere
            if parts[peer].port
        }
        peer_regions.place(topology.host_of, decision.epoch)
        with contextlib.ExitStack() as undo:
            meeting = Meeting(token, group_id, Identity(rank, 0, owners[rank].nonce), {}, self._listener, stays=True)
            undo.callback(meeting.close)
            for peer, partner in others.items():
                meeting.admit(peer, partner)
            maker = LinkMaker(home.link_mac, home.link)
            undo.callback(maker.close)
            meeting.listen()
            mirrors = {}
            for peer in topology.sources():
                region = mirrors[peer] = SharedRegion.create(
                    peer_regions.payload_bytes, f"mirror{peer}", only_owner_writes=True
                )
                undo.callback(region.close)
                owners[peer].sign(region)
            ways = GroupLinks(topology, peer_regions, Links([]), meeting, owners, maker)
            undo.callback(ways.exports.abandon)
            peer_regions.exports = ways.exports
            ways.begin(decision.epoch, membership.since(), joined=True)
            ways.start({}, mirrors)
            membership.use(ways)
            undo.pop_all()
            return ways
