"""When a host is lost, by what its connections show."""

from __future__ import annotations

import errno

import pytest

from epee.errors import ProtocolError
from epee.view.protocol.messages import Member
from epee.view.transport.switchboard import (
    AGAIN_S,
    ENDED,
    ESTABLISHED,
    NEVER,
    NO_ANSWER,
    PROVED,
    REFUSED,
    REFUSED_S,
    SILENT,
    UNANSWERED_S,
    UNKNOWN,
    Reach,
    _seen,
    given_up_s,
    ping_s,
    recall_s,
)

TIMEOUT_S = 10.0
RECALL_S = recall_s(TIMEOUT_S)


def member(slot: int, host: str) -> Member:
    return Member(slot, 1, bytes([slot]) * 16, b"", host)


MEMBERS = [member(0, "a"), member(1, "b"), member(2, "b"), member(3, "c")]
ONE, TWO, THREE = (each.nonce for each in MEMBERS[1:])


def reach() -> Reach:
    made = Reach("a", TIMEOUT_S)
    made.follow(MEMBERS, 0.0)
    assert [each.slot for each in made.due(0.0)] == [1, 2, 3]
    for each in MEMBERS[1:]:
        made.called(each.nonce)
        made.note(each.nonce, ESTABLISHED, 0.0)
        made.note(each.nonce, PROVED, 0.1)
    return made


def test_nothing_is_due_and_nobody_lost_while_all_are_there() -> None:
    made = reach()
    assert made.due(1e6) == []
    assert made.lost(1e6) == []
    assert made.next(1e6) == NEVER


def test_a_host_is_lost_when_all_its_processes_are_refused_for_a_while() -> None:
    made = reach()
    for nonce, at in ((ONE, 5.0), (TWO, 6.0)):
        made.note(nonce, ENDED, at)
        made.note(nonce, REFUSED, at)
        made.note(nonce, REFUSED, at + AGAIN_S)
    assert made.lost(6.0 + REFUSED_S - 0.01) == []
    assert made.lost(6.0 + REFUSED_S) == ["b"]


def test_one_process_that_answers_is_enough() -> None:
    made = reach()
    made.note(ONE, REFUSED, 5.0)
    assert made.lost(1e6) == []
    made.forget(TWO)  # until it is told that this one has died
    assert made.lost(1e6) == ["b"]


def test_a_connection_that_is_made_again_in_time_is_a_blip() -> None:
    made = reach()
    made.note(THREE, ENDED, 5.0)
    assert made.due(5.0 + AGAIN_S) == [MEMBERS[3]]
    made.called(THREE)
    assert made.due(1e6) == []
    made.note(THREE, ESTABLISHED, 5.4)
    assert made.lost(1e6) == []


def test_silence_and_calls_without_an_answer() -> None:
    made = reach()
    made.note(THREE, SILENT, 20.0)
    made.note(THREE, NO_ANSWER, 20.5)
    assert made.lost(20.0 + RECALL_S - 0.01) == []
    assert made.lost(20.0 + RECALL_S) == ["c"]
    made = reach()
    made.note(THREE, ENDED, 20.0)
    made.note(THREE, NO_ANSWER, 20.5)
    assert made.lost(20.0 + UNANSWERED_S - 0.1) == []
    assert made.lost(20.0 + UNANSWERED_S) == ["c"]


def test_a_connection_that_ends_without_a_way_there_was_silent() -> None:
    made = reach()
    made.note(THREE, NO_ANSWER, 20.0)  # the kernel says no route, where it could say that the time is over
    made.note(THREE, NO_ANSWER, 20.4)
    assert made.lost(20.0 + RECALL_S - 0.01) == []
    assert made.lost(20.0 + RECALL_S) == ["c"]


@pytest.mark.parametrize("timeout_s", [0.5, 1.0, 3.0, 10.0, 600.0])
def test_a_host_is_lost_by_the_time_out_after_its_last_word_and_not_before_half_of_it(timeout_s: float) -> None:
    last, made = 20.0, Reach("a", timeout_s)
    made.follow([MEMBERS[3]], 0.0)
    made.note(THREE, PROVED, 0.0)
    given_up = last + made.ping_s + given_up_s(timeout_s)  # nothing confirms the first message after that word
    assert ping_s(timeout_s) <= 0.5
    assert given_up_s(timeout_s) > timeout_s / 2
    made.note(THREE, SILENT, given_up)
    assert made.lost(given_up) == []
    made.note(THREE, NO_ANSWER, given_up + 0.01)
    assert made.lost(last + 0.99 * timeout_s) == []
    assert made.lost(last + 1.001 * timeout_s) == ["c"]
    made.note(THREE, ESTABLISHED, last + timeout_s)  # a call may come through at the last moment
    assert made.lost(1e6) == []


def test_a_connection_that_ends_for_no_known_reason_has_the_whole_time() -> None:
    made = reach()
    made.note(THREE, UNKNOWN, 20.0)
    made.note(THREE, NO_ANSWER, 20.5)
    assert made.lost(20.0 + TIMEOUT_S - 0.1) == []
    assert made.lost(20.0 + TIMEOUT_S) == ["c"]


def test_who_was_never_reached_has_the_whole_time() -> None:
    made = Reach("a", TIMEOUT_S)
    made.follow(MEMBERS[:2], 3.0)
    made.note(ONE, NO_ANSWER, 4.0)
    assert made.lost(3.0 + TIMEOUT_S - 0.1) == []
    assert made.lost(3.0 + TIMEOUT_S) == ["b"]


def test_a_stranger_at_the_place_of_a_dead_process_does_not_speak_for_its_host() -> None:
    made = reach()
    at = 5.0
    while at < 5.0 + REFUSED_S:
        made.note(THREE, ESTABLISHED, at)
        made.note(THREE, REFUSED, at)  # it proves nothing
        at += AGAIN_S
    assert made.lost(5.0 + REFUSED_S) == ["c"]


def test_what_is_short_on_this_side_says_nothing_of_others() -> None:
    made = reach()
    made.note(THREE, ENDED, 5.0)
    made.note(THREE, UNKNOWN, 5.9)
    assert made.lost(5.9 + UNANSWERED_S - 0.1) == []


def test_errors_of_the_kernel_are_told_apart() -> None:
    assert _seen(ConnectionRefusedError(errno.ECONNREFUSED, "")) == REFUSED
    assert _seen(ProtocolError("somebody else")) == REFUSED
    assert _seen(TimeoutError(errno.ETIMEDOUT, "")) == SILENT
    assert _seen(ConnectionResetError(errno.ECONNRESET, "")) == ENDED
    assert _seen(BrokenPipeError(errno.EPIPE, "")) == ENDED
    assert _seen(OSError(errno.EHOSTUNREACH, "")) == NO_ANSWER
    assert _seen(OSError(errno.EMFILE, "")) == UNKNOWN


def test_a_time_in_which_this_process_stood_still_does_not_count() -> None:
    made = Reach("a", TIMEOUT_S)
    made.follow(MEMBERS[:2], 0.0)
    made.skip(100.0)
    assert made.lost(100.0 + TIMEOUT_S - 0.1) == []
    assert made.lost(100.0 + TIMEOUT_S) == ["b"]
    made.note(ONE, PROVED, 101.0)
    made.skip(100.0)
    assert made.lost(1e6) == []
