"""What a process must know to take a lost rank's place in a running group, and where it finds it.

The first group of a job is its *home*: who joins the job joins that group. Rank 0 of the founders leaves a note in
the job's folder (`Home`: id of the lane, sizes, mode) and the folder's path in the store. Each process tells the blob
of its outbox, and for which lane it is, in its `Member.endpoint` (`extra`), so every decision says how to reach all.

Both are read as untrusted: fixed layouts, every number checked. A crash before the note is complete leaves no note.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..errors import EpeeError, InvalidState, ProtocolError
from ..memory.host import BLOB_BYTES
from ..view.endpoint import parse_endpoint
from ..view.messages import Member
from .options import MAX_RANKS, MAX_STAGING_BYTES, MIN_STAGING_BYTES, MODES

VERSION = 1
FOLDER_KEY = "epee/job"
_HOME = struct.Struct("<IQIQI")
_EXTRA = struct.Struct(f"<Q{BLOB_BYTES}s")


class Home(NamedTuple):
    """The first group of a job: id of its lane, number of ranks, bytes of a staging buffer, mode."""

    lane: int
    num_ranks: int
    staging_bytes: int
    mode: str


def pack_home(home: Home) -> bytes:
    """Return the note for joiners."""
    return _HOME.pack(VERSION, home.lane, home.num_ranks, home.staging_bytes, MODES.index(home.mode))


def parse_home(raw: bytes) -> Home:
    """Return the note of a job's folder.

    Raises:
        InvalidState: there is none: the job has no group that can be joined.
        ProtocolError: it is damaged or of another version.
    """
    if not raw:
        raise InvalidState("the job has no group that could be joined yet; start its ranks first")
    if len(raw) != _HOME.size:
        raise ProtocolError(f"the note for joiners has {len(raw)} bytes, {_HOME.size} expected; another version?")
    version, lane, num_ranks, staging_bytes, mode = _HOME.unpack(raw)
    sizes_ok = 2 <= num_ranks <= MAX_RANKS and MIN_STAGING_BYTES <= staging_bytes <= MAX_STAGING_BYTES
    if version != VERSION or not sizes_ok or staging_bytes % 4096 or mode >= len(MODES):
        raise ProtocolError("the note for joiners cannot be right; is the job of another version?")
    return Home(lane, num_ranks, staging_bytes, MODES[mode])


def pack_extra(lane: int, blob: bytes) -> bytes:
    """Return what a process tells in its endpoint: the outbox with `blob` is its part of `lane`."""
    return _EXTRA.pack(lane, blob)


def outbox_of(member: Member, lane: int) -> tuple[bytes, int, int] | None:
    """Return (blob, pid, start time) of a member's outbox in `lane`, or None when it has none in that lane."""
    try:
        endpoint = parse_endpoint(member.endpoint)
    except EpeeError:
        return None  # an endpoint that cannot be right is nobody's outbox
    if len(endpoint.extra) != _EXTRA.size:
        return None
    told, blob = _EXTRA.unpack(endpoint.extra)
    return (blob, endpoint.pid, endpoint.start_time) if told == lane else None
