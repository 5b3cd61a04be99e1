"""`errors`: one tree, whose classes are also what a caller would expect."""

from __future__ import annotations

import inspect

import pytest

from epee import errors

CLASSES = [item for _, item in inspect.getmembers(errors, inspect.isclass) if item.__module__ == "epee.errors"]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_ours_and_documented(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.EpeeError)
    assert issubclass(kind, RuntimeError)
    assert kind.__doc__
    assert str(kind("what happened")) == "what happened"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.InvalidArgument, ValueError),
        (errors.CommTimeoutError, TimeoutError),
        (errors.AuthError, PermissionError),
        (errors.RankFailedError, errors.PeerError),
        (errors.EvictedError, errors.PeerError),
        (errors.NoQuorumError, errors.PeerError),
    ],
)
def test_an_error_is_caught_by_the_name_one_expects(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)


def test_a_failure_carries_its_facts() -> None:
    error = errors.RankFailedError("gone", [2, 5], "dispatch", 7, 1, "process ended")
    assert (error.ranks, error.op, error.seq, error.epoch, error.cause) == ((2, 5), "dispatch", 7, 1, "process ended")
    assert errors.CommTimeoutError("late", [1]).ranks == (1,)


def test_context_lists_facts_and_leaves_out_what_is_not_known() -> None:
    text = errors.context("dispatch", rank=0, peer=2, root=None, elapsed=10.04)
    assert text == "dispatch (rank=0, peer=2, waited 10.0 s)"
    assert errors.context("barrier") == "barrier"
