"""Encoding and decoding of the messages of `messages.py`: a fixed layout, and every number checked before use.

A frame is one byte for the type, then its fields in the order of the named tuple. The layout of each type is
defined once, in the tables below, for both directions; nesting is given by the tables, so its depth is fixed.

Writers and readers: the sender's agent thread writes; the receiver's reads, after the frame's MAC has been checked
(`auth.py`), and so does a reader of a board (`board.py`), where no MAC protects what a dying process has left. Neither
is trusted: a frame that is too short, too long, or holds a number out of range, a list out of order or a proposal of
the wrong epoch raises `ProtocolError` and nothing of it is used. A count is checked against its limit before anything
is read, and every item takes bytes of the frame, so a frame of n bytes never makes more than O(n) memory.

The codecs (`Number` to `TupleCodec`) encode single values, from which the tables build the layout of each message.
Numbers are signed 64-bit, little endian; bytes and texts carry their length, tuples their count. Each codec checks what
it writes and what it reads against the same limits, and raises `Wrong`, which the caller turns into `InvalidArgument`
or `ProtocolError`. Plain bytes in one process: no other process reads or writes them meanwhile.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from ...errors import InvalidArgument, ProtocolError
from ...memory.claim import CLAIM_BYTES as BLOB_BYTES  # of a region; `memory.shared` would bring torch
from ..protocol.messages import (
    DEAD,
    EXITED,
    FOREVER,
    LEFT,
    MAX_PARTS,
    NO_BALLOT,
    STALLED,
    UNREACHABLE,
    Accept,
    Accepted,
    Ask,
    Ballot,
    BoardState,
    Commit,
    Cut,
    Decision,
    GroupState,
    Join,
    JoinRefused,
    Locator,
    Member,
    Message,
    Nack,
    Obituary,
    Part,
    Prepare,
    Promise,
    Removal,
    Report,
    Start,
    Want,
)

_INT64 = struct.Struct("<q")


class Wrong(Exception):
    """A value breaks the layout; becomes `ProtocolError` or `InvalidArgument` where the direction is known."""


class Cursor:
    """A frame and the position up to which it has been read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int, name: str) -> bytes:
        """Return the next `count` bytes; `Wrong` when the frame has fewer."""
        chunk = self.data[self.at : self.at + count]
        if len(chunk) != count:
            raise Wrong(f"{name} ends after {len(chunk)} of {count} bytes")
        self.at += count
        return chunk


class Codec:
    """The encoding of one kind of value."""

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append `value`; `Wrong` when it breaks a rule."""
        raise NotImplementedError

    def take(self, frame: Cursor, name: str) -> Any:
        """Read a value; `Wrong` when it breaks a rule or the frame is too short."""
        raise NotImplementedError


class Number(Codec):
    """An integer from `low` to `high`: 8 bytes."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append an int."""
        if type(value) is not int:
            raise Wrong(f"{name} must be an int, got {type(value).__name__}")
        out += _INT64.pack(self._checked(value, name))

    def take(self, frame: Cursor, name: str) -> int:
        """Read an int."""
        return self._checked(_INT64.unpack(frame.take(8, name))[0], name)

    def _checked(self, value: int, name: str) -> int:
        if not self.low <= value <= self.high:
            raise Wrong(f"{name} must lie in {self.low} ... {self.high}, got {value}")
        return value


class Flag(Codec):
    """A bool: one byte, 0 or 1."""

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append a bool."""
        if type(value) is not bool:
            raise Wrong(f"{name} must be a bool, got {type(value).__name__}")
        out += b"\1" if value else b"\0"

    def take(self, frame: Cursor, name: str) -> bool:
        """Read a bool."""
        byte = frame.take(1, name)
        if byte not in (b"\0", b"\1"):
            raise Wrong(f"{name} must be 0 or 1, got {byte[0]}")
        return byte == b"\1"


class Bytes(Codec):
    """From `low` to `high` bytes, after their number."""

    def __init__(self, low: int, high: int) -> None:
        self.length = Number(low, high)

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append the number of bytes and the bytes."""
        if type(value) is not bytes:
            raise Wrong(f"{name} must be bytes, got {type(value).__name__}")
        self.length.put(out, len(value), f"length of {name}")
        out += value

    def take(self, frame: Cursor, name: str) -> bytes:
        """Read as many bytes as the number before them gives."""
        return frame.take(self.length.take(frame, f"length of {name}"), name)


class Text(Codec):
    """A sentence for people: UTF-8."""

    def __init__(self, high: int) -> None:
        self.raw = Bytes(0, high)

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append a str."""
        if type(value) is not str:
            raise Wrong(f"{name} must be a str, got {type(value).__name__}")
        try:
            self.raw.put(out, value.encode(), name)
        except UnicodeEncodeError as exc:
            raise Wrong(f"{name} is no text: {exc.reason}") from exc

    def take(self, frame: Cursor, name: str) -> str:
        """Read a str."""
        try:
            return self.raw.take(frame, name).decode()
        except UnicodeDecodeError as exc:
            raise Wrong(f"{name} is no UTF-8: {exc.reason}") from exc


class Choice(Codec):
    """One of a few words: its index."""

    def __init__(self, *values: str) -> None:
        self.values = values
        self.index = Number(0, len(values) - 1)

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append the index of a word."""
        if value not in self.values:
            raise Wrong(f"{name} must be one of {self.values}, got {value!r}")
        self.index.put(out, self.values.index(value), name)

    def take(self, frame: Cursor, name: str) -> str:
        """Read a word."""
        return self.values[self.index.take(frame, name)]


class Many(Codec):
    """A tuple; with `key`, strictly ascending in it."""

    def __init__(self, item: Codec, high: int, key: Callable[[Any], Any] | None = None) -> None:
        self.item, self.count, self.key = item, Number(0, high), key

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append the number of items and the items."""
        if type(value) is not tuple:
            raise Wrong(f"{name} must be a tuple, got {type(value).__name__}")
        self.count.put(out, len(value), f"number of {name}")
        for item in value:
            self.item.put(out, item, name)
        self._check_order(value, name)

    def take(self, frame: Cursor, name: str) -> tuple[Any, ...]:
        """Read a tuple."""
        count = self.count.take(frame, f"number of {name}")
        items = tuple(self.item.take(frame, name) for _ in range(count))
        self._check_order(items, name)
        return items

    def _check_order(self, items: tuple[Any, ...], name: str) -> None:
        keys = [] if self.key is None else [self.key(item) for item in items]
        for before, after in itertools.pairwise(keys):
            if before >= after:
                raise Wrong(f"{name} must be in order without repeats, got {after} after {before}")


class Maybe(Codec):
    """A value or None."""

    def __init__(self, item: Codec) -> None:
        self.item, self.there = item, Number(0, 1)

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append whether there is a value, and the value."""
        self.there.put(out, int(value is not None), f"presence of {name}")
        if value is not None:
            self.item.put(out, value, name)

    def take(self, frame: Cursor, name: str) -> Any:
        """Read a value or None."""
        return self.item.take(frame, name) if self.there.take(frame, f"presence of {name}") else None


class TupleCodec(Codec):
    """The codec of a named tuple: its fields in order; `rule` returns the error of their combination, or nothing."""

    def __init__(self, kind: Any, *fields: Codec, rule: Callable[[Any], str] | None = None) -> None:
        self.names = tuple(kind.__annotations__)
        assert len(fields) == len(self.names)
        self.kind, self.fields, self.rule = kind, fields, rule

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append the fields."""
        if type(value) is not self.kind:
            raise Wrong(f"{name} must be a {self.kind.__name__}, got {type(value).__name__}")
        for codec, field, item in zip(self.fields, self.names, value, strict=True):
            codec.put(out, item, f"{name}.{field}")
        self._check(value, name)

    def take(self, frame: Cursor, name: str) -> Any:
        """Read a named tuple whose fields fit together."""
        named = zip(self.fields, self.names, strict=True)
        value = self.kind(*[codec.take(frame, f"{name}.{field}") for codec, field in named])
        self._check(value, name)
        return value

    def _check(self, value: Any, name: str) -> None:
        wrong = self.rule(value) if self.rule else ""
        if wrong:
            raise Wrong(f"{name}: {wrong}")


MAX_MEMBERS = 64  # of a job; slots are below it
MAX_GROUPS = 1024  # in which one process takes part
MAX_ALL_GROUPS = MAX_MEMBERS * MAX_GROUPS  # a decision may contain every group of every member
MAX_DECISIONS = 1024  # in one Commit; the runtime cuts longer ones
MAX_ENDPOINT_BYTES = 1 << 10
MAX_EXTRA_BYTES = 640  # of an endpoint
MAX_ADDRESS_BYTES = 64  # an IPv6 address with its zone
MAX_REASON_BYTES = 1 << 10
MAX_LOCATOR_BYTES = 96
MAX_DECISION_BYTES = (
    41 * MAX_ALL_GROUPS + (48 + MAX_LOCATOR_BYTES) * MAX_PARTS + MAX_MEMBERS * (MAX_ENDPOINT_BYTES + 256)
)  # a cut and a start per group
MAX_FRAME_BYTES = 4 << 20  # one decision, or the states of one process's groups in a Promise
MAX_STATE_BYTES = 2 * MAX_DECISION_BYTES + 128  # a board holds two decisions
NONCE_BYTES = 16
MAX_HOST_BYTES = 32
MAX_TOLD_BYTES = 256  # of a process's data for a group, sent to other hosts
EPOCH_LIMIT = ROUND_LIMIT = INCARNATION_LIMIT = 1 << 48  # a joiner's incarnation is the epoch that it joins in
GROUP_ID_LIMIT = (1 << 63) - 1


def _rule_of_decision(decision: Decision) -> str:
    if any(member.incarnation == 0 for member in decision.members):
        return "a member has incarnation 0"
    members, removed = {member[:2] for member in decision.members}, {removal[:2] for removal in decision.removed}
    if both := members & removed:
        return f"(slot, incarnation) {min(both)} is both a member and removed"
    strange = [part for part in decision.parts if part[1:3] not in members | removed or part.since == 0]
    late = [part for part in decision.parts if abs(part.since) > decision.epoch]
    if strange or late:
        return f"{(strange or late)[0]} speaks of no member, or of another epoch"
    mute = next((part for part in decision.parts if part.since < 0 and part.locator), None)
    return "" if mute is None else f"{mute} is out of the group, and tells of its part in it"


def _rule_of_want(want: Want) -> str:
    both = set(want.members) & set(want.out)
    if both:
        return f"slot {min(both)} is both to take part and not to"
    strange = {locator.slot for locator in want.locators} - set(want.members)
    if strange:
        return f"slot {min(strange)} is to take no part, and tells of it"
    return f"{want.least} of {len(want.members)} members are to stay" if want.least > len(want.members) else ""


def _rule_of_accepted(value: Promise | BoardState) -> str:
    if (value.accepted is None) != (value.accepted_ballot == NO_BALLOT):
        return "a proposal without its ballot, or a ballot without its proposal"
    epoch = value.epoch if isinstance(value, Promise) else value.decided.epoch
    if value.accepted is not None and value.accepted.epoch != epoch + 1:
        return f"after epoch {epoch} comes {epoch + 1}, the proposal is for {value.accepted.epoch}"
    return ""


def _rule_of_accept(accept: Accept) -> str:
    if accept.decision.epoch != accept.epoch + 1:
        return f"after epoch {accept.epoch} comes {accept.epoch + 1}, the proposal is for {accept.decision.epoch}"
    return ""


def _rule_of_group(state: GroupState) -> str:
    is_wrong = state.completed > state.issued or (state.is_pull and state.completed == state.issued)
    return (
        f"completed {state.completed} of {state.issued} calls, the last one open: {state.is_pull}" if is_wrong else ""
    )


_SLOT = Number(0, MAX_MEMBERS - 1)
_EPOCH = Number(0, EPOCH_LIMIT)
_INCARNATION = Number(0, INCARNATION_LIMIT)
_GROUP_ID = Number(0, GROUP_ID_LIMIT)
_SEQ = Number(0, FOREVER)
_QUESTION = Number(0, FOREVER)
_NONCE = Bytes(NONCE_BYTES, NONCE_BYTES)
_BALLOT = TupleCodec(Ballot, Number(0, ROUND_LIMIT), Number(-1, MAX_MEMBERS - 1))
_HOST = Text(MAX_HOST_BYTES)
_MEMBER = TupleCodec(Member, _SLOT, _INCARNATION, _NONCE, Bytes(0, MAX_ENDPOINT_BYTES), _HOST)
_REMOVAL = TupleCodec(Removal, _SLOT, _INCARNATION, Choice(DEAD, STALLED, LEFT, UNREACHABLE, EXITED), _HOST)
_CUT = TupleCodec(Cut, _GROUP_ID, _SEQ, Number(-1, MAX_MEMBERS - 1))
_START = TupleCodec(Start, _GROUP_ID, _SEQ, Flag())
_LOCATOR = Bytes(0, MAX_LOCATOR_BYTES)
_PART = TupleCodec(Part, _GROUP_ID, _SLOT, _INCARNATION, Number(-EPOCH_LIMIT, EPOCH_LIMIT), _LOCATOR)
_SLOTS = Many(_SLOT, MAX_MEMBERS, key=lambda slot: slot)
_LOCATORS = Many(TupleCodec(Locator, _SLOT, _LOCATOR), MAX_MEMBERS, key=lambda locator: locator.slot)
_LEAST, _USED = Number(0, MAX_MEMBERS), Number(0, FOREVER - 1)
_WANT = TupleCodec(Want, _GROUP_ID, _SLOTS, _SLOTS, _LEAST, _USED, _LOCATORS, rule=_rule_of_want)
_GROUP_STATE = TupleCodec(GroupState, _GROUP_ID, _SEQ, _SEQ, Flag(), rule=_rule_of_group)
_DECISION = TupleCodec(
    Decision,
    _EPOCH,
    Many(_MEMBER, MAX_MEMBERS, key=lambda member: member.slot),
    Many(_REMOVAL, MAX_MEMBERS, key=lambda removal: removal.slot),
    Many(_CUT, MAX_ALL_GROUPS, key=lambda cut: cut.group_id),
    Many(_START, MAX_ALL_GROUPS, key=lambda start: start.group_id),
    Many(_PART, MAX_PARTS, key=lambda part: part[:3]),
    Many(_GROUP_ID, MAX_PARTS, key=lambda group_id: group_id),
    rule=_rule_of_decision,
)
_LANES = Many(_GROUP_STATE, MAX_GROUPS, key=lambda state: state.group_id)
_STATE = TupleCodec(BoardState, _DECISION, _BALLOT, _BALLOT, Maybe(_DECISION), rule=_rule_of_accepted)


class GroupReport(NamedTuple):
    """The data that a process publishes about its part in a group; inside its host it stands on its board. Not for
    the agent."""

    group_id: int
    data: bytes


PING = GroupReport(GROUP_ID_LIMIT, b"")  # of a group id that no group has
BEGIN, END = (
    GroupReport(GROUP_ID_LIMIT, b"begin"),
    GroupReport(GROUP_ID_LIMIT, b"end"),
)  # around all data that a process sends


_BY_NUMBER = dict(
    enumerate(
        (
            TupleCodec(Prepare, _BALLOT, _EPOCH),
            TupleCodec(Promise, _BALLOT, _EPOCH, _BALLOT, Maybe(_DECISION), _LANES, rule=_rule_of_accepted),
            TupleCodec(Nack, _BALLOT, _EPOCH, _BALLOT),
            TupleCodec(Accept, _BALLOT, _EPOCH, _DECISION, rule=_rule_of_accept),
            TupleCodec(Accepted, _BALLOT, _EPOCH),
            TupleCodec(Commit, Many(_DECISION, MAX_DECISIONS, key=lambda decision: decision.epoch), _QUESTION),
            TupleCodec(
                Report, _EPOCH, Many(_REMOVAL, MAX_MEMBERS), Many(_WANT, MAX_GROUPS, key=lambda want: want.group_id)
            ),
            TupleCodec(Join, _MEMBER),
            TupleCodec(JoinRefused, _SLOT, _NONCE, Text(MAX_REASON_BYTES)),
            TupleCodec(Ask, _EPOCH, _QUESTION),
            TupleCodec(Obituary, _NONCE, Choice(DEAD, LEFT, EXITED), Maybe(_STATE)),
            TupleCodec(GroupReport, _GROUP_ID, Bytes(0, MAX_TOLD_BYTES)),
        ),
        start=1,
    )
)
_NUMBERS = {codec.kind: number for number, codec in _BY_NUMBER.items()}


def encode(message: Message | GroupReport) -> bytes:
    """Return the frame of a message, at most `MAX_FRAME_BYTES` long.

    Raises:
        InvalidArgument: a field is out of its range or of another type, or the frame would be too long.
    """
    number = _NUMBERS.get(type(message))
    if number is None:
        raise InvalidArgument(f"{type(message).__name__} is no message between agents")
    return _written(_BY_NUMBER[number], message, bytes([number]), MAX_FRAME_BYTES)


def decode(data: bytes) -> Message | GroupReport:
    """Return the message that a frame holds.

    Raises:
        ProtocolError: it holds none; nothing of it is to be used.
    """
    codec = _BY_NUMBER.get(data[0]) if data else None
    if codec is None:
        raise ProtocolError(f"a frame of {len(data)} bytes of no known type; do the ranks run one version of epee?")
    message: Message | GroupReport = _read(codec, data, 1, MAX_FRAME_BYTES)
    return message


def encode_state(state: BoardState) -> bytes:
    """Return the bytes of a board's state, at most `MAX_STATE_BYTES`; raises as `encode`."""
    return _written(_STATE, state, b"", MAX_STATE_BYTES)


def decode_state(data: bytes) -> BoardState:
    """Return the state that a board holds; raises as `decode`."""
    state: BoardState = _read(_STATE, data, 0, MAX_STATE_BYTES)
    return state


def _written(codec: TupleCodec, value: Any, head: bytes, limit: int) -> bytes:
    out = bytearray(head)
    try:
        codec.put(out, value, codec.kind.__name__)
        if len(out) > limit:
            raise Wrong(f"{codec.kind.__name__} takes {len(out)} bytes, at most {limit} are allowed")
    except Wrong as exc:
        raise InvalidArgument(f"cannot be sent: {exc}") from exc
    return bytes(out)


def _read(codec: TupleCodec, data: bytes, start: int, limit: int) -> Any:
    name = codec.kind.__name__
    try:
        if len(data) > limit:
            raise Wrong(f"{len(data)} bytes, at most {limit} are allowed")
        frame = Cursor(data)
        frame.at = start
        value = codec.take(frame, name)
        if frame.at != len(data):
            raise Wrong(f"{len(data) - frame.at} bytes too many")
    except Wrong as exc:
        raise ProtocolError(f"an invalid {name} was not used: {exc}") from exc
    return value


class Endpoint(NamedTuple):
    """The address and the resources of a process: opaque bytes in `Member.endpoint` for the agents.

    Others need it to watch the process and to read its board. Its socket is reached through the process's own
    descriptor of the socket's file (`directory.Door`), which needs no name. The process itself writes its endpoint when
    it is created; the runtime of each other member reads it, and checks every number before it opens a pid or a file by
    it.

    Attributes:
        pid: its number in the PID namespace of the job.
        start_time: when it started, clock ticks since boot; with `pid` it names one process.
        door: its descriptor of its socket's file (`directory.Door.fd`).
        board: blob of its board (`board.py`).
        beat: blob of its heartbeat (`board.Beat`).
        extra: data for the engines above, at most `MAX_EXTRA_BYTES`.
        address, port: TCP address for agents of other hosts; "" and 0 where the job keeps to one host.
    """

    pid: int
    start_time: int
    door: int
    board: bytes
    beat: bytes
    extra: bytes
    address: str = ""
    port: int = 0


_ENDPOINT = TupleCodec(
    Endpoint,
    Number(1, (1 << 31) - 1),
    Number(0, (1 << 62)),
    Number(0, (1 << 31) - 1),
    Bytes(BLOB_BYTES, BLOB_BYTES),
    Bytes(BLOB_BYTES, BLOB_BYTES),
    Bytes(0, MAX_EXTRA_BYTES),
    Text(MAX_ADDRESS_BYTES),
    Number(0, (1 << 16) - 1),
)


def pack_endpoint(endpoint: Endpoint) -> bytes:
    """Return at most `MAX_ENDPOINT_BYTES` bytes; `InvalidArgument` if a field is out of range."""
    return _written(_ENDPOINT, endpoint, b"", MAX_ENDPOINT_BYTES)


def parse_endpoint(data: bytes) -> Endpoint:
    """Return the endpoint in a member's bytes; `ProtocolError` if it is invalid."""
    endpoint: Endpoint = _read(_ENDPOINT, data, 0, MAX_ENDPOINT_BYTES)
    return endpoint
