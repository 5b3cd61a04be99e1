"""The checker of histories: each rule is broken once by hand and must be named; what is right must pass."""

from __future__ import annotations

import pytest

from tests.sim.history import (
    DIED,
    DONE,
    EVICTED,
    FAILED,
    GAVE_UP,
    LOST,
    OK,
    ROOTLESS,
    SHOWN,
    TIMEOUT,
    VIEW,
    History,
    Record,
    check,
    slots_of,
)

MEMBERS = {1: {0: 1, 1: 1, 2: 1}, 2: {0: 1, 1: 1}}


def expected(group_id: int, seq: int, slot: int, contributors: dict[int, int]) -> int:
    return 1000 * seq + sum(10**src for src in contributors)


def view(slot: int, epoch: int, digest: int = 1) -> Record:
    return Record(0.0, slot, 1, VIEW, epoch=epoch, digest=digest)


def done(slot: int, seq: int, epoch: int, who: int, status: int = OK, digest: int | None = None) -> Record:
    if digest is None:
        digest = expected(7, seq, slot, dict.fromkeys(slots_of(who), 1)) if status == OK else 0
    return Record(0.0, slot, 1, DONE, status, 7, seq, epoch, who, digest)


def shown(slot: int, seq: int, epoch: int, who: int) -> Record:
    return Record(0.0, slot, 1, SHOWN, 0, 7, seq, epoch, who)


def rules(records: list[Record], voted_out: set[tuple[int, int]] | None = None) -> list[str]:
    return [violation.rule for violation in check(History(records, MEMBERS), expected, voted_out or set())]


GOOD = [
    *(view(slot, 1) for slot in range(3)),
    *(done(slot, 1, 1, 0b111) for slot in range(3)),
    view(0, 2),
    view(1, 2),
    done(0, 2, 2, 0b011),
    done(1, 2, 2, 0b011),
]


def test_a_good_history_passes() -> None:
    assert rules(GOOD) == []


def test_a_record_is_64_bytes_and_comes_back() -> None:
    record = Record(1.5, 3, 70000, DONE, FAILED, 1 << 60, 1 << 39, 1 << 33, (1 << 64) - 1, (1 << 64) - 2)
    assert len(record.pack()) == 64
    assert Record.unpack(record.pack()) == record


def both_end(seq: int) -> list[Record]:
    return [done(0, seq, 2, 0b100, ROOTLESS), done(1, seq, 2, 0b100, ROOTLESS)]


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ([view(2, 2, digest=2)], "V-1"),
        ([view(2, 3)], "V-11"),
        ([Record(0.0, 2, 2, VIEW, epoch=3, digest=1)], "V-10"),
        ([done(2, 2, 1, 0b111)], "C-3"),
        ([done(2, 1, 1, 0b111)], "C-11"),
        ([done(1, 3, 1, 0b111), done(0, 3, 1, 0b111)], "V-11"),
        ([done(1, 3, 2, 0b001)], "C-3"),
        ([done(1, 3, 2, 0b111)], "C-3"),
        ([done(1, 3, 3, 0b011)], "C-3"),
        ([done(1, 3, 2, 0b011, digest=5)], "C-10"),
        ([done(1, 3, 2, 0, FAILED, digest=5)], "C-5"),
        ([done(1, 3, 2, 0b011), done(0, 3, 2, 0, FAILED)], "C-3"),
        ([Record(0.0, 1, 1, EVICTED, epoch=3), done(1, 3, 2, 0b011)], "V-9"),
        ([done(0, 3, 2, 0b100, ROOTLESS), done(1, 3, 3, 0b100, ROOTLESS)], "C-3"),
        ([done(0, 3, 2, 0b100, ROOTLESS), done(1, 3, 2, 0b011)], "C-3"),
        ([done(0, 3, 2, 0b100, ROOTLESS), shown(0, 3, 1, 0b111)], "C-12"),
        ([*both_end(3), shown(0, 3, 2, 0b011), shown(1, 3, 2, 0b001)], "C-12"),
    ],
    ids=[
        "two views of an epoch",
        "a skipped epoch",
        "a joiner with a later view than its own",
        "two sets of contributors",
        "ended twice",
        "an older epoch again",
        "without itself",
        "not members",
        "of an epoch that it does not hold",
        "a wrong result",
        "an error that wrote",
        "error here, result there",
        "after the eviction",
        "without a root in two views",
        "without a root here, result there",
        "shown who was lost before",
        "shown otherwise",
    ],
)
def test_a_broken_rule_is_named(more: list[Record], rule: str) -> None:
    assert rule in rules(GOOD + more)


def test_who_was_voted_out_alive_may_have_seen_another_outcome() -> None:
    more = [done(2, 2, 1, 0b111)]
    assert "C-3" in rules(GOOD + more)
    assert rules(GOOD + more, {(2, 1)}) == []


def test_the_dead_are_held_to_it_unless_somebody_was_voted_out_alive() -> None:
    died = Record(0.0, 1, 1, DIED)
    more = [done(0, 3, 2, 0, FAILED), done(1, 3, 2, 0b011), died]
    assert rules(GOOD + more) == ["C-3"]
    assert rules(GOOD + more, {(2, 1)}) == []


@pytest.mark.parametrize("status", [FAILED, TIMEOUT, GAVE_UP])
def test_who_is_in_a_result_does_not_end_the_call_with_an_error(status: int) -> None:
    more = [done(0, 3, 2, 0, status), done(1, 3, 2, 0b011)]
    assert rules(GOOD + more) == ["C-3"]


def test_errors_of_one_call_may_differ_and_later_calls_are_compared_all_the_same() -> None:
    more = [done(0, 3, 2, 0, TIMEOUT), done(1, 3, 2, 0, FAILED)]
    assert rules(GOOD + more) == []
    assert rules([*GOOD, *more, done(0, 4, 2, 0, GAVE_UP), done(1, 4, 2, 0b011)]) == ["C-3"]


def test_a_call_that_is_said_to_be_lost_may_have_ended_otherwise_elsewhere() -> None:
    assert rules([*GOOD, done(0, 3, 2, 0, LOST), done(1, 3, 2, 0b011)]) == []


def test_who_has_called_with_other_roots_may_be_shown_otherwise() -> None:
    more = [done(0, 3, 2, 0b100, ROOTLESS), done(1, 3, 3, 0b001, ROOTLESS)]
    assert rules([*GOOD, view(1, 3), *more, shown(0, 3, 2, 0b011)]) == []
    # the shown ones stand behind the ends of their process, whatever another one has recorded
    assert rules([*GOOD, view(1, 3), *more, shown(0, 3, 2, 0b011), shown(1, 3, 3, 0b010)]) == []


def test_a_result_without_one_that_gave_the_call_up_and_died_is_right() -> None:
    more = [Record(0.0, 2, 1, DONE, GAVE_UP, 7, 2, 1), Record(0.0, 2, 1, DIED)]
    assert rules(GOOD + more) == []
