"""The message kernels' own sources on the CPU: every byte, every failure, from real rank processes."""

from __future__ import annotations

import pytest

from tests.csrc import message_cases as cases
from tests.csrc.emulated import has_compiler
from tests.csrc.message_cases import RING_BYTES, Mail
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_size_goes_between_every_two_ranks(num_ranks: int) -> None:
    run_ranks(cases.every_size, num_ranks, timeout_s=200)


@pytest.mark.parametrize(("num_ranks", "blocks"), [(2, 3), (3, 2)])
def test_random_batches_of_grids_of_any_width_with_warps_that_stand_still(num_ranks: int, blocks: int) -> None:
    run_ranks(cases.random_batches, num_ranks, num_ranks, 40, 24, blocks, timeout_s=200)


def test_messages_that_fit_the_ring_are_sent_without_the_receiver() -> None:
    run_ranks(cases.early_sends, 2, timeout_s=100)


def test_a_receive_from_any_source_takes_the_first_message_with_its_tag() -> None:
    found = run_ranks(cases.any_source, 3, timeout_s=100)[0]
    assert sorted(found[:2]) == sorted(found[2:]) == [1, 2]


@pytest.mark.parametrize("nbytes", [64, 6 * RING_BYTES])
@pytest.mark.parametrize(
    ("wanted", "dtype", "words"),
    [
        (Mail(0, 1, 0, 2, 0), 7, ("tag 1", "tag 2")),
        (Mail(0, 1, 8, 1, 0), 7, ("bytes", "bytes")),
        (Mail(0, 1, 0, 1, 0), 8, ("dtype", "dtype")),
    ],
)
def test_ends_that_differ_are_told_at_both_ends(nbytes: int, wanted: Mail, dtype: int, words: tuple[str, str]) -> None:
    sent = Mail(0, 1, nbytes, 1, 1)
    wanted = wanted._replace(nbytes=nbytes + wanted.nbytes)
    (name, text), (other, there) = run_ranks(cases.differing, 2, sent, wanted, dtype, timeout_s=100)
    assert name == other == "MismatchError"
    assert f"rank 0 has {words[0]}" in text or words[0] in text
    assert "rank 1 has" in text
    assert "rank 0 has" in there
    assert all(word in text and word in there for word in words)


@pytest.mark.parametrize("is_send", [True, False])
def test_a_message_whose_other_end_does_not_come_ends_by_the_time(is_send: bool) -> None:
    (name, text), (other, after) = run_ranks(cases.stopped, 2, "time", 6 * RING_BYTES, is_send, timeout_s=100)
    assert name == other == "CommTimeoutError"
    assert "within the time-out" in text
    assert "has given up a message" in after


@pytest.mark.parametrize(("how", "name"), [("abort", "AbortedError"), ("dead", "RankFailedError")])
def test_the_host_ends_waits_in_flight(how: str, name: str) -> None:
    (told, _), (_, after) = run_ranks(cases.stopped, 2, how, 6 * RING_BYTES, True, timeout_s=100)
    assert told == name
    assert "has given up a message" in after


def test_a_receive_from_any_source_that_nobody_sends_to_loses_no_pair() -> None:
    told = run_ranks(cases.nobody, 2, timeout_s=100)[0]
    assert "from any rank within the time-out" in told


def test_a_copy_of_the_word_about_a_predecessors_death_loses_no_message() -> None:
    run_ranks(cases.successor, 2, timeout_s=100)


@pytest.mark.parametrize("is_send", [True, False])
def test_a_launch_for_a_peer_that_the_host_has_forgotten_is_lost_and_stores_nowhere(is_send: bool) -> None:
    told = run_ranks(cases.forgotten, 2, is_send, timeout_s=100)[0]
    assert "rank 1 is dead" in told
