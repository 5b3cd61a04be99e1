"""Encoding and decoding of the messages of `messages.py`: a fixed layout, and every number checked before use.

A frame is one byte for the type, then its fields in the order of the named tuple (`codec.py` defines the encoding of
numbers, texts and lists). The layout of each type is defined once, in the tables below, for both directions; nesting is
given by the tables, so its depth is fixed.

Writers and readers: the sender's agent thread writes; the receiver's reads, after the frame's MAC has been checked
(`auth.py`), and so does a reader of a board (`board.py`), where no MAC protects what a dying process has left. Neither
is trusted: a frame that is too short, too long, or holds a number out of range, a list out of order or a proposal of
the wrong epoch raises `ProtocolError` and nothing of it is used. A count is checked against its limit before anything
is read, and every item takes bytes of the frame, so a frame of n bytes never makes more than O(n) memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...errors import InvalidArgument, ProtocolError
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
    Join,
    JoinRefused,
    LaneState,
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
from .codec import Bytes, Choice, Cursor, Flag, Many, Maybe, Number, Text, TupleCodec, Wrong

MAX_MEMBERS = 64  # of a job; slots are below it
MAX_LANES = 1024  # in which one process takes part
MAX_ALL_LANES = MAX_MEMBERS * MAX_LANES  # a decision may contain every group of every member
MAX_DECISIONS = 1024  # in one Commit; the runtime cuts longer ones
MAX_ENDPOINT_BYTES = 1 << 10
MAX_REASON_BYTES = 1 << 10
MAX_LOCATOR_BYTES = 96
MAX_DECISION_BYTES = (
    41 * MAX_ALL_LANES + (48 + MAX_LOCATOR_BYTES) * MAX_PARTS + MAX_MEMBERS * (MAX_ENDPOINT_BYTES + 256)
)  # a cut and a start per group
MAX_FRAME_BYTES = 4 << 20  # one decision, or the states of one process's groups in a Promise
MAX_STATE_BYTES = 2 * MAX_DECISION_BYTES + 128  # a board holds two decisions
NONCE_BYTES = 16
MAX_HOST_BYTES = 32
MAX_TOLD_BYTES = 256  # of a process's data for a group, sent to other hosts
EPOCH_LIMIT = ROUND_LIMIT = INCARNATION_LIMIT = 1 << 48  # a joiner's incarnation is the epoch that it joins in
LANE_LIMIT = (1 << 63) - 1


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
    return "" if mute is None else f"{mute} is out of the lane, and tells of its part in it"


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


def _rule_of_lane(state: LaneState) -> str:
    is_wrong = state.completed > state.issued or (state.is_pull and state.completed == state.issued)
    return (
        f"completed {state.completed} of {state.issued} calls, the last one open: {state.is_pull}" if is_wrong else ""
    )


_SLOT = Number(0, MAX_MEMBERS - 1)
_EPOCH = Number(0, EPOCH_LIMIT)
_INCARNATION = Number(0, INCARNATION_LIMIT)
_LANE = Number(0, LANE_LIMIT)
_SEQ = Number(0, FOREVER)
_NONCE = Bytes(NONCE_BYTES, NONCE_BYTES)
_BALLOT = TupleCodec(Ballot, Number(0, ROUND_LIMIT), Number(-1, MAX_MEMBERS - 1))
_HOST = Text(MAX_HOST_BYTES)
_MEMBER = TupleCodec(Member, _SLOT, _INCARNATION, _NONCE, Bytes(0, MAX_ENDPOINT_BYTES), _HOST)
_REMOVAL = TupleCodec(Removal, _SLOT, _INCARNATION, Choice(DEAD, STALLED, LEFT, UNREACHABLE, EXITED), _HOST)
_CUT = TupleCodec(Cut, _LANE, _SEQ, Number(-1, MAX_MEMBERS - 1))
_START = TupleCodec(Start, _LANE, _SEQ, Flag())
_LOCATOR = Bytes(0, MAX_LOCATOR_BYTES)
_PART = TupleCodec(Part, _LANE, _SLOT, _INCARNATION, Number(-EPOCH_LIMIT, EPOCH_LIMIT), _LOCATOR)
_SLOTS = Many(_SLOT, MAX_MEMBERS, key=lambda slot: slot)
_LOCATORS = Many(TupleCodec(Locator, _SLOT, _LOCATOR), MAX_MEMBERS, key=lambda locator: locator.slot)
_LEAST, _USED = Number(0, MAX_MEMBERS), Number(0, FOREVER - 1)
_WANT = TupleCodec(Want, _LANE, _SLOTS, _SLOTS, _LEAST, _USED, _LOCATORS, rule=_rule_of_want)
_LANE_STATE = TupleCodec(LaneState, _LANE, _SEQ, _SEQ, Flag(), rule=_rule_of_lane)
_DECISION = TupleCodec(
    Decision,
    _EPOCH,
    Many(_MEMBER, MAX_MEMBERS, key=lambda member: member.slot),
    Many(_REMOVAL, MAX_MEMBERS, key=lambda removal: removal.slot),
    Many(_CUT, MAX_ALL_LANES, key=lambda cut: cut.lane),
    Many(_START, MAX_ALL_LANES, key=lambda start: start.lane),
    Many(_PART, MAX_PARTS, key=lambda part: part[:3]),
    Many(_LANE, MAX_PARTS, key=lambda lane: lane),
    rule=_rule_of_decision,
)
_LANES = Many(_LANE_STATE, MAX_LANES, key=lambda state: state.lane)
_STATE = TupleCodec(BoardState, _DECISION, _BALLOT, _BALLOT, Maybe(_DECISION), rule=_rule_of_accepted)


class LaneTold(NamedTuple):
    """The data that a process publishes about its part in a group; inside its host it stands on its board. Not for
    the agent."""

    lane: int
    data: bytes


PING = LaneTold(LANE_LIMIT, b"")  # of a group id that no group has
BEGIN, END = LaneTold(LANE_LIMIT, b"begin"), LaneTold(LANE_LIMIT, b"end")  # around all data that a process sends


class _Type(NamedTuple):
    number: int
    codec: TupleCodec


_TYPES: dict[type, _Type] = {
    record.kind: _Type(number, record)
    for number, record in enumerate(
        (
            TupleCodec(Prepare, _BALLOT, _EPOCH),
            TupleCodec(Promise, _BALLOT, _EPOCH, _BALLOT, Maybe(_DECISION), _LANES, rule=_rule_of_accepted),
            TupleCodec(Nack, _BALLOT, _EPOCH, _BALLOT),
            TupleCodec(Accept, _BALLOT, _EPOCH, _DECISION, rule=_rule_of_accept),
            TupleCodec(Accepted, _BALLOT, _EPOCH),
            TupleCodec(Commit, Many(_DECISION, MAX_DECISIONS, key=lambda decision: decision.epoch)),
            TupleCodec(Report, _EPOCH, Many(_REMOVAL, MAX_MEMBERS), Many(_WANT, MAX_LANES, key=lambda want: want.lane)),
            TupleCodec(Join, _MEMBER),
            TupleCodec(JoinRefused, _SLOT, _NONCE, Text(MAX_REASON_BYTES)),
            TupleCodec(Ask, _EPOCH),
            TupleCodec(Obituary, _NONCE, Choice(DEAD, LEFT, EXITED), Maybe(_STATE)),
            TupleCodec(LaneTold, _LANE, Bytes(0, MAX_TOLD_BYTES)),
        ),
        start=1,
    )
}
_BY_NUMBER = {entry.number: entry.codec for entry in _TYPES.values()}


def encode(message: Message | LaneTold) -> bytes:
    """Return the frame of a message, at most `MAX_FRAME_BYTES` long.

    Raises:
        InvalidArgument: a field is out of its range or of another type, or the frame would be too long.
    """
    entry = _TYPES.get(type(message))
    if entry is None:
        raise InvalidArgument(f"{type(message).__name__} is no message between agents")
    return _written(entry.codec, message, bytes([entry.number]), MAX_FRAME_BYTES)


def decode(data: bytes) -> Message | LaneTold:
    """Return the message that a frame holds.

    Raises:
        ProtocolError: it holds none; nothing of it is to be used.
    """
    codec = _BY_NUMBER.get(data[0]) if data else None
    if codec is None:
        raise ProtocolError(f"a frame of {len(data)} bytes of no known type; do the ranks run one version of epee?")
    message: Message | LaneTold = _read(codec, data, 1, MAX_FRAME_BYTES)
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
        raise ProtocolError(f"a {name} that cannot be right was not used: {exc}") from exc
    return value
