"""Frames: every message comes back equal, and no bytes make anything but a message or a `ProtocolError`."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epee.errors import InvalidArgument, ProtocolError
from epee.view.process.board import Board, BoardView
from epee.view.protocol import messages as m
from epee.view.protocol.decision import compose
from epee.view.transport import wire

SLOT = st.integers(0, wire.MAX_MEMBERS - 1)
EPOCH = st.integers(0, wire.EPOCH_LIMIT - 1)
SEQ = st.integers(0, m.FOREVER)
LANE = st.integers(0, wire.GROUP_ID_LIMIT)
INCARNATION = st.integers(1, wire.INCARNATION_LIMIT)
NONCE = st.binary(min_size=16, max_size=16)
HOST = st.text(max_size=8)
BALLOT = st.builds(m.Ballot, st.integers(1, wire.ROUND_LIMIT), SLOT)
MEMBER = st.builds(m.Member, SLOT, INCARNATION, NONCE, st.binary(max_size=wire.MAX_ENDPOINT_BYTES), HOST)
REMOVAL = st.builds(
    m.Removal, SLOT, INCARNATION, st.sampled_from([m.DEAD, m.STALLED, m.LEFT, m.EXITED, m.UNREACHABLE]), HOST
)


def ordered(item: st.SearchStrategy[Any], key: Any, max_size: int = 6) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(item, unique_by=key, max_size=max_size).map(lambda items: tuple(sorted(items, key=key)))


LANES = ordered(
    st.builds(lambda a, b, c, p: m.GroupState(a, min(b, c), max(b, c), p and b != c), LANE, SEQ, SEQ, st.booleans()),
    lambda s: s.group_id,
)


SLOTS = st.sets(SLOT, max_size=6)
WANT = st.builds(
    lambda group_id, one, other, most, data: m.Want(
        group_id,
        tuple(sorted(one)),
        tuple(sorted(other - one)),
        min(most, len(one)),
        locators=tuple(m.Locator(slot, data) for slot in sorted(one) if slot % 3),
    ),
    LANE,
    SLOTS,
    SLOTS,
    st.integers(0, 64),
    st.binary(max_size=wire.MAX_LOCATOR_BYTES),
)


@st.composite
def parts(draw: Any, epoch: int, processes: list[tuple[int, int]]) -> tuple[m.Part, ...]:
    if not processes or not epoch:
        return ()
    since = st.integers(1, epoch).flatmap(lambda when: st.sampled_from([when, -when]))
    part = st.builds(
        lambda group_id, who, when, locator: m.Part(group_id, *who, when, locator if when > 0 else b""),
        LANE,
        st.sampled_from(processes),
        since,
        st.binary(max_size=wire.MAX_LOCATOR_BYTES),
    )
    return draw(ordered(part, lambda one: one[:3]))


@st.composite
def decisions(draw: Any, epoch: int | None = None) -> m.Decision:
    members = draw(ordered(MEMBER, lambda member: member.slot))
    there = {member[:2] for member in members}
    removed = tuple(r for r in draw(ordered(REMOVAL, lambda removal: removal.slot)) if r[:2] not in there)
    number = draw(EPOCH) if epoch is None else epoch
    return m.Decision(
        number,
        members,
        removed,
        draw(ordered(st.builds(m.Cut, LANE, SEQ, SLOT | st.just(-1)), lambda cut: cut.group_id)),
        draw(ordered(st.builds(m.Start, LANE, SEQ, st.booleans()), lambda start: start.group_id)),
        draw(parts(number, [*there, *(removal[:2] for removal in removed)])),
        draw(ordered(LANE, lambda group_id: group_id)),
    )


@st.composite
def accepted(draw: Any, epoch: int) -> tuple[m.Ballot, m.Decision | None]:
    if draw(st.booleans()):
        return m.NO_BALLOT, None
    return draw(BALLOT), draw(decisions(epoch + 1))


@st.composite
def promises(draw: Any) -> m.Promise:
    epoch = draw(EPOCH)
    return m.Promise(draw(BALLOT), epoch, *draw(accepted(epoch)), draw(LANES))


@st.composite
def states(draw: Any) -> m.BoardState:
    decided = draw(decisions())
    return m.BoardState(decided, draw(BALLOT | st.just(m.NO_BALLOT)), *draw(accepted(decided.epoch)))


MESSAGES = st.one_of(
    st.builds(m.Prepare, BALLOT, EPOCH),
    promises(),
    st.builds(m.Nack, BALLOT, EPOCH, BALLOT),
    EPOCH.flatmap(lambda epoch: st.builds(m.Accept, BALLOT, st.just(epoch), decisions(epoch + 1))),
    st.builds(m.Accepted, BALLOT, EPOCH),
    st.builds(m.Commit, ordered(decisions(), lambda decision: decision.epoch, 3), st.integers(0, m.FOREVER)),
    st.builds(m.Report, EPOCH, st.lists(REMOVAL, max_size=4).map(tuple), ordered(WANT, lambda want: want.group_id, 3)),
    st.builds(m.Join, MEMBER.map(lambda member: member._replace(incarnation=0))),
    st.builds(m.JoinRefused, SLOT, NONCE, st.text(max_size=200)),
    st.builds(m.Ask, EPOCH, st.integers(0, m.FOREVER)),
    st.builds(m.Obituary, NONCE, st.sampled_from([m.DEAD, m.LEFT, m.EXITED]), st.none() | states()),
    st.builds(wire.GroupReport, LANE, st.binary(max_size=wire.MAX_TOLD_BYTES)),
)


@settings(max_examples=400, deadline=None)
@given(MESSAGES)
def test_every_message_comes_back_equal(message: m.Message) -> None:
    back = wire.decode(wire.encode(message))
    assert back == message
    assert type(back) is type(message)


@settings(max_examples=100, deadline=None)
@given(states())
def test_the_state_of_a_board_comes_back_equal(state: m.BoardState) -> None:
    assert wire.decode_state(wire.encode_state(state)) == state


def member(slot: int, endpoint: bytes = b"") -> m.Member:
    return m.Member(slot, 1, bytes([slot]) * 16, endpoint)


DECISION = m.Decision(
    7,
    tuple(member(slot, b"e" * 100) for slot in range(4)),
    (m.Removal(4, 1, m.DEAD), m.Removal(5, 2, m.STALLED), m.Removal(6, 2, m.UNREACHABLE, "other")),
    (m.Cut(1, 20), m.Cut(9, 3, 2)),
    (m.Start(1, 30), m.Start(9, 4, True)),
    (m.Part(1, 2, 1, -7), m.Part(1, 5, 2, -3), m.Part(9, 2, 1, 7, b"there")),
    (1, 9),
)
SAMPLES: tuple[m.Message | wire.GroupReport, ...] = (
    m.Prepare(m.Ballot(3, 1), 6),
    m.Promise(m.Ballot(3, 1), 6, m.Ballot(2, 0), DECISION, (m.GroupState(1, 3, 4, True),)),
    m.Promise(m.Ballot(3, 1), 6, m.NO_BALLOT, None, ()),
    m.Nack(m.Ballot(3, 1), 6, m.Ballot(4, 2)),
    m.Accept(m.Ballot(3, 1), 6, DECISION),
    m.Accepted(m.Ballot(3, 1), 6),
    m.Commit((DECISION, DECISION._replace(epoch=8))),
    m.Report(6, (m.Removal(4, 1, m.DEAD),), (m.Want(1, (0, 1, 3), (2,), locators=(m.Locator(3, b"there"),)),)),
    m.Join(member(3)._replace(incarnation=0)),
    m.JoinRefused(3, bytes(16), "slot 3 is taken"),
    m.Ask(6),
    m.Ask(6, 3),
    m.Commit((), 3),
    m.Obituary(bytes(16), m.DEAD, m.BoardState(m.Decision(6, ()), m.Ballot(3, 1), m.Ballot(2, 0), DECISION)),
    m.Obituary(bytes(16), m.LEFT, None),
    wire.GroupReport(7, b"where its outbox is"),
)


def decode_or_refuse(data: bytes) -> m.Message | None:
    """Decode; a value that is accepted must be one that can be encoded again, to the same bytes."""
    try:
        message = wire.decode(data)
    except ProtocolError:
        return None
    assert wire.encode(message) == data
    return message


def test_every_type_is_among_the_samples() -> None:
    assert {type(sample) for sample in SAMPLES} == {*m.Message.__args__, wire.GroupReport}  # type: ignore[attr-defined]


def test_random_bytes_are_a_valid_message_or_refused() -> None:
    rng = random.Random(1)
    for _ in range(8_000):
        head = bytes([rng.randrange(0, 13)])
        decode_or_refuse(head + rng.randbytes(rng.choice((0, 1, 8, 24, 60, 200))))


def test_mutated_frames_are_a_valid_message_or_refused() -> None:
    rng = random.Random(2)
    frames = [wire.encode(sample) for sample in SAMPLES]
    refused = 0
    for _ in range(12_000):
        data = bytearray(rng.choice(frames))
        for _ in range(rng.choice((1, 1, 2, 8))):
            kind, at = rng.randrange(4), rng.randrange(len(data))
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), b"\x00" * 7 + b"\x80", b"\xff" * 7 + b"\x7f"))
            elif kind == 2:
                del data[at:]
                data += rng.randbytes(rng.randrange(3))
            else:
                data[at:at] = data[rng.randrange(len(data)) :][:64]
            if not data:
                break
        refused += decode_or_refuse(bytes(data)) is None
    assert 6_000 < refused < 12_000


def test_a_frame_cut_anywhere_is_refused() -> None:
    for sample in SAMPLES:
        frame = wire.encode(sample)
        for length in range(len(frame)):
            with pytest.raises(ProtocolError):
                wire.decode(frame[:length])
        with pytest.raises(ProtocolError, match="bytes too many"):
            wire.decode(frame + b"\0")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (m.Ask(-1), "epoch must lie in 0"),
        (m.Ask(True), "must be an int"),
        (m.Join(member(64)), "slot must lie in 0 ... 63"),
        (m.Join(member(1, bytes(1025))), "length of Join.member.endpoint must lie in 0 ... 1024"),
        (m.Join(m.Member(1, 1, b"short", b"")), "nonce"),
        (m.Report(1, (m.Removal(1, 1, "bored"),)), "cause must be one of"),
        (m.JoinRefused(1, bytes(16), "\ud800"), "no text"),
        (m.Commit((DECISION, DECISION)), "in order without repeats"),
        (m.Accept(m.Ballot(1, 1), 3, DECISION), "after epoch 3 comes 4"),
        (m.Accept(m.Ballot(1, 1), 6, DECISION._replace(members=(member(1), member(0)))), "got 0 after 1"),
        (m.Accept(m.Ballot(1, 1), 6, DECISION._replace(removed=(m.Removal(2, 1, m.DEAD),))), "both a member and"),
        (m.Accept(m.Ballot(1, 1), 6, DECISION._replace(parts=(m.Part(1, 9, 1, -7),))), "speaks of no member"),
        (m.Accept(m.Ballot(1, 1), 6, DECISION._replace(parts=(m.Part(1, 2, 1, 8),))), "or of another epoch"),
        (
            m.Accept(m.Ballot(1, 1), 6, DECISION._replace(parts=(m.Part(1, 2, 1, -7, b"x"),))),
            "is out of the group, and",
        ),
        (m.Report(6, (), (m.Want(1, (0, 2), (2,)),)), "slot 2 is both to take part and not to"),
        (m.Report(6, (), (m.Want(1, (0,), locators=(m.Locator(1, b""),)),)), "slot 1 is to take no part, and tells"),
        (m.Report(6, (), (m.Want(1, (0,), locators=(m.Locator(0, bytes(97)),)),)), "must lie in 0 ... 96, got 97"),
        (m.Promise(m.Ballot(1, 1), 6, m.NO_BALLOT, DECISION, ()), "without its ballot"),
        (m.Promise(m.Ballot(1, 1), 6, m.NO_BALLOT, None, (m.GroupState(1, 2, 1),)), "completed 2 of 1"),
    ],
)
def test_what_breaks_a_rule_is_not_sent(message: m.Message, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words.replace("(", r"\(")):
        wire.encode(message)


def test_something_else_is_not_sent() -> None:
    with pytest.raises(InvalidArgument, match="no message"):
        wire.encode("hello")  # type: ignore[arg-type]


@functools.cache
def largest_decision() -> m.Decision:
    """All groups in which 64 processes can take part, all shared by nobody."""
    groups = {
        slot: [m.GroupState(slot << 32 | group_id, m.FOREVER - 1, m.FOREVER - 1) for group_id in range(wire.MAX_GROUPS)]
        for slot in range(wire.MAX_MEMBERS)
    }
    current = m.Decision(7, tuple(member(slot, bytes(wire.MAX_ENDPOINT_BYTES)) for slot in range(wire.MAX_MEMBERS)))
    locator = bytes(wire.MAX_LOCATOR_BYTES)
    parts = tuple(m.Part(group_id, slot, 1, 3, locator) for group_id in range(m.MAX_PARTS // 64) for slot in range(64))
    return compose(current._replace(parts=parts), groups, {}, {wire.MAX_MEMBERS - 1: m.STALLED})


@functools.cache
def largest_frame() -> bytes:
    return wire.encode(m.Commit((largest_decision(),)))


def test_what_the_members_can_come_to_fits_a_frame_and_a_board() -> None:
    """The limits belong together: what does not fit would end the threads of the agents."""
    big = largest_decision()
    assert len(big.cuts) == len(big.starts) == (wire.MAX_MEMBERS - 1) * wire.MAX_GROUPS
    assert len(big.parts) == m.MAX_PARTS
    everybody_else = tuple(m.Removal(slot, 1, m.STALLED) for slot in range(1, wire.MAX_MEMBERS))
    alone = big._replace(members=(member(0),), removed=everybody_else)
    assert len({group_id for group_id, *_ in alone.parts}) == m.MAX_PARTS // 64
    told = tuple(m.GroupState(group_id, 1, 2) for group_id in range(wire.MAX_GROUPS))
    ballot = m.Ballot(3, 1)
    assert wire.decode(largest_frame()) == m.Commit((big,))
    assert wire.decode(wire.encode(m.Commit((alone,)))) == m.Commit((alone,))
    for decision in (big, alone):
        assert wire.encode(m.Accept(ballot, 7, decision))
        assert wire.encode(m.Promise(ballot, 7, ballot, decision, told))
    state = m.BoardState(big, ballot, ballot, big._replace(epoch=9))
    board = Board(0)
    board.write(state)
    view = BoardView.attach(board.blob)
    assert view.read() == state
    view.close()
    board.close()


def test_many_lanes_and_many_evicted_do_not_end_the_agent() -> None:
    """600 groups and 55 ranks voted out at once, as after a switch has failed."""
    current = m.Decision(7, tuple(member(slot) for slot in range(64)))
    groups = {slot: [m.GroupState(group_id, 3, 4) for group_id in range(600)] for slot in range(9)}
    decision = compose(current, groups, {}, dict.fromkeys(range(9, 64), m.STALLED))
    assert len(decision.removed) == 55
    state = m.BoardState(decision, m.NO_BALLOT, m.NO_BALLOT, None)
    assert wire.decode_state(wire.encode_state(state)) == state


def test_long_frames_are_neither_sent_nor_read() -> None:
    big = largest_decision()
    assert len(largest_frame()) <= wire.MAX_FRAME_BYTES
    with pytest.raises(InvalidArgument, match="at most"):
        wire.encode(m.Commit((big, big._replace(epoch=9))))
    with pytest.raises(ProtocolError, match="at most"):
        wire.decode(bytes([10]) + bytes(wire.MAX_FRAME_BYTES))


def test_a_count_that_lies_costs_no_memory() -> None:
    frame = bytearray(wire.encode(m.Commit((DECISION,))))
    frame[1:9] = (1 << 62).to_bytes(8, "little")
    with pytest.raises(ProtocolError, match="number of"):
        wire.decode(bytes(frame))
