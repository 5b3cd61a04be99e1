"""The note about a running group that a joining process needs, for the rank of a lost process or a new one.

The first group of a job is its *home*: a process that joins the job joins that group. Rank 0 of the initial members
leaves a note in the job's folder (`Home`: id of the group, sizes, mode) and the folder's path and host in the store.
Each process publishes the blob of its outbox, the group that it is for, and the number of ranks that it was started
with, in its `Member.endpoint` (`extra`), so every decision has the addresses of all, and a joiner's shows how far the
group has grown by it (`OutboxEndpoint`).

A process that is in the job already joins any group of the job, the first one included, by an `Offer`, which it shows
on its board beside the group's row: where its outbox is, as which rank it asks to join. Members of a group show theirs,
too. A member that wants it taken in puts the offer into the request, and the offers of the members that are there since
the group began; so the decision has it all (`Part.locator`), and no rank reads another's offer then. Rank 0 of a group
that is made later leaves the note about it in the group's store.

All are read as untrusted: fixed layouts, every number checked. A crash before the note is complete leaves no note.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...errors import EpeeError, InvalidState, ProtocolError, expected
from ...memory.shared import BLOB_BYTES
from ...view.protocol.messages import Decision, Member
from ...view.transport.wire import parse_endpoint
from ..limits import MAX_RANKS, MAX_STAGING_BYTES, MIN_STAGING_BYTES, MODES
from ..outbox import OutboxOwner

VERSION = 4
FOLDER_KEY = "epee/job"
HOSTS = "hosts"  # in that record, of a group over several: the number of hosts at creation
GROUP_KEY = "epee/group_id"  # the note about a group that is not the first of its job
_HOME = struct.Struct("<IQIQII")
_SPANS, _MAC, _NIXL = 1, 2, 4  # in the last word of a note
_OFFER = struct.Struct(f"<III{BLOB_BYTES}sIQQQQQ")
_LOCATOR = struct.Struct(f"<II{BLOB_BYTES}sI")
FOUNDER, ASKS, IN = 1, 2, 3  # states of an outbox's owner: there since the group began, asks to join, has joined
_EXTRA = struct.Struct(f"<QI{BLOB_BYTES}sI")
_MAX_PORT = (1 << 16) - 1
_MAX_REQUEST = (1 << 62) - 1


class Home(NamedTuple):
    """The first group of a job: id of the group, number of ranks at creation, bytes of a staging buffer, mode.

    Attributes:
        spans: it runs over several hosts.
        link, link_mac: then EPEE_LINK and EPEE_LINK_MAC of its ranks.
    """

    group_id: int
    num_ranks: int
    staging_bytes: int
    mode: str
    spans: bool = False
    link: str = "tcp"
    link_mac: bool = False


class OutboxEndpoint(NamedTuple):
    """A process's outbox in a group, as its endpoint describes it.

    Attributes:
        blob: of its outbox.
        pid: with `start_time` the process.
        num_ranks: the world size that it was started with.
        owner: the owner that the outbox must name.
        host: key of the process's host.
        address, port: where its links with other hosts are made; port 0 where it has none.
    """

    blob: bytes
    pid: int
    start_time: int
    num_ranks: int
    owner: OutboxOwner
    host: str = ""
    address: str = ""
    port: int = 0


def pack_place(folder: str, host: str) -> str:
    """Return the text that rank 0 writes into the store: the job's folder, and the host that it is on."""
    return f"{folder}\n{host}"


def parse_place(text: str) -> tuple[str, str]:
    """Return folder and host of a record in the store; "" for an unknown host."""
    folder, _, host = text.partition("\n")
    return folder, host


def pack_home(home: Home) -> bytes:
    """Return the note for joiners."""
    flags = _SPANS * home.spans | _MAC * home.link_mac | _NIXL * (home.link == "nixl")
    return _HOME.pack(VERSION, home.group_id, home.num_ranks, home.staging_bytes, MODES.index(home.mode), flags)


def parse_home(raw: bytes) -> Home:
    """Return the note of a job's folder.

    Raises:
        InvalidState: there is none: the job has no group that can be joined.
        ProtocolError: it is damaged or of another version.
    """
    if not raw:
        raise InvalidState("the job has no group that could be joined yet; start its ranks first")
    if len(raw) != _HOME.size:
        raise ProtocolError(
            f"the record for joiners has {len(raw)} bytes, {_HOME.size} expected; is it of another version of epee?"
        )
    version, group_id, num_ranks, staging_bytes, mode, flags = _HOME.unpack(raw)
    sizes_ok = 1 <= num_ranks <= MAX_RANKS and MIN_STAGING_BYTES <= staging_bytes <= MAX_STAGING_BYTES
    if version != VERSION or not sizes_ok or staging_bytes % 4096 or mode >= len(MODES):
        raise ProtocolError("the record for joiners is invalid; is it of another version of epee?")
    link = "nixl" if flags & _NIXL else "tcp"
    return Home(group_id, num_ranks, staging_bytes, MODES[mode], bool(flags & _SPANS), link, bool(flags & _MAC))


def pack_extra(group_id: int, num_ranks: int, blob: bytes, port: int = 0) -> bytes:
    """Return the extra part of a process's endpoint: with `blob`, its outbox in `group_id` (`OutboxEndpoint`)."""
    return _EXTRA.pack(group_id, num_ranks, blob, port)


def outbox_of(member: Member, group_id: int) -> OutboxEndpoint | None:
    """Return a member's part in `group_id`, None when it has none or an invalid one."""
    try:
        endpoint = parse_endpoint(member.endpoint)
    except expected(EpeeError):
        return None  # an invalid endpoint is no outbox
    if len(endpoint.extra) != _EXTRA.size:
        return None
    told, num_ranks, blob, port = _EXTRA.unpack(endpoint.extra)
    if told != group_id or not member.slot < num_ranks <= MAX_RANKS or port > _MAX_PORT:
        return None
    owner = OutboxOwner(member.nonce, group_id, member.slot)
    where = member.host, endpoint.address, port
    return OutboxEndpoint(blob, endpoint.pid, endpoint.start_time, num_ranks, owner, *where)


def takes_part(group_id: int, member: Member) -> bool:
    """Return whether a member has a part in `group_id`."""
    return outbox_of(member, group_id) is not None


class OutboxLocator(NamedTuple):
    """A process's outbox in a group, as a decision describes it (`Part.locator`).

    Attributes:
        rank: in the group.
        num_ranks: the number of ranks of the group that this process was given.
        blob: of its outbox.
        port: where its links with other hosts are made; 0 where it has none.
    """

    rank: int
    num_ranks: int
    blob: bytes
    port: int

    def pack(self) -> bytes:
        """Return the bytes for a request."""
        return _LOCATOR.pack(*self)

    def endpoint(self, member: Member, group_id: int) -> OutboxEndpoint:
        """Return the outbox of `member`, its owner."""
        process = parse_endpoint(member.endpoint)
        owner = OutboxOwner(member.nonce, group_id, member.slot)
        where = member.host, process.address, self.port
        return OutboxEndpoint(self.blob, process.pid, process.start_time, self.num_ranks, owner, *where)


def locators_of(decision: Decision, group_id: int) -> dict[int, OutboxLocator]:
    """Return the locators of a group's outboxes in a decision, by slot of the member; invalid ones are left out."""
    members = {member[:2] for member in decision.members}
    told = {part.slot: part.locator for part in decision.parts if part.group_id == group_id and part[1:3] in members}
    found = {slot: OutboxLocator(*_LOCATOR.unpack(data)) for slot, data in told.items() if len(data) == _LOCATOR.size}
    return {
        slot: locator
        for slot, locator in found.items()
        if locator.rank < locator.num_ranks <= MAX_RANKS and locator.port <= _MAX_PORT
    }


class Offer(NamedTuple):
    """A process's outbox in a group, as its board describes it.

    Attributes:
        state: FOUNDER, ASKS or IN.
        rank: in the group.
        num_ranks: the number of ranks of the group that this process was given.
        blob: of its outbox.
        port: where its links with other hosts are made; 0 where it has none.
        turned: over several hosts, up to which view it needs nothing more of lost ranks
            (`replication/loss_resolution.py`).
        request: the number of this request to join, above all numbers that the boards show when it is made; of a member
            the highest number that it knows of.
        next_seq, heard, before: the waiting ranks that the process knows (`local_state.Mark`).
    """

    state: int
    rank: int
    num_ranks: int
    blob: bytes
    port: int = 0
    turned: int = 0
    request: int = 0
    next_seq: int = 0
    heard: int = 0
    before: int = 0

    def pack(self) -> bytes:
        """Return the bytes for the board."""
        return _OFFER.pack(*self)

    @property
    def locator(self) -> OutboxLocator:
        """The locator for a decision."""
        return OutboxLocator(self.rank, self.num_ranks, self.blob, self.port)

    def after(self, others: Iterable[Offer]) -> Offer:
        """Return this request to join with a number above those that `others` show."""
        return self._replace(request=min(_MAX_REQUEST, 1 + max((other.request for other in others), default=0)))


def parse_offers(told: Mapping[int, bytes]) -> dict[int, Offer]:
    """Return the offers on the boards of a group, by slot; invalid ones are left out."""
    found = {slot: Offer(*_OFFER.unpack(data)) for slot, data in told.items() if len(data) == _OFFER.size}
    return {
        slot: offer
        for slot, offer in found.items()
        if offer.state in (FOUNDER, ASKS, IN)
        and offer.rank < offer.num_ranks <= MAX_RANKS
        and offer.port <= _MAX_PORT
        and offer.request <= _MAX_REQUEST
    }
