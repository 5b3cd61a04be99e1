"""`errors`: one tree, whose classes are also what a caller would expect."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import epee
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


def drawn() -> dict[str, tuple[str, set[str]]]:
    """Return what the docstring draws: class -> (its parent, the built-in classes that it names)."""
    found: dict[str, tuple[str, set[str]]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:│   |    |├── |└── )*)(\w+)(?: \((\w+)\))?", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        path[depth:] = [match[2]]
        found[match[2]] = (path[depth - 1] if depth else "", {match[3]} - {None})
    return found


# Threads and processes of epee's own, where no handler runs, and commands for a terminal.
UNINTERRUPTED = (
    "doctor/", "demo/", "cli/", "compat/__main__.py", "engine/progress.py", "link/poller.py", "view/loop.py",
    "link/proxy/process.py",
)  # fmt: skip
TAKES_ALL = (  # these raise what they catch, or catch it by a rule of their own
    "compat/deep_ep/buffer.py", "compat/deep_ep/low_latency.py", "ep/members/assembly.py", "link/meeting.py",
)  # fmt: skip


def unguarded() -> Iterator[str]:
    """Yield the clauses that would take an exception of a handler for one of epee's own or the system's."""
    folder = Path(errors.__file__).parent
    kinds = {kind.__name__ for kind in CLASSES} | {"OSError", "RuntimeError", "ValueError", "Exception", "TimeoutError"}
    for path in sorted(folder.rglob("*.py")):
        name = str(path.relative_to(folder))
        if name.startswith((*UNINTERRUPTED, *TAKES_ALL)):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                parts = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                if any(isinstance(part, ast.Name) and part.id in kinds for part in parts):
                    yield f"{name}:{node.lineno}"


def test_clauses_let_exceptions_of_handlers_pass() -> None:
    assert list(unguarded()) == [], "write `except expected(...)`"


def test_the_tree_in_the_docstring_is_the_one_of_the_classes() -> None:
    real = {}
    for kind in CLASSES:
        parents = {base.__name__ for base in kind.__bases__}
        ours = {name for name in parents if hasattr(errors, name)}
        real[kind.__name__] = (next(iter(ours), ""), parents - ours)
    assert drawn() == real


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_can_be_imported_from_epee(kind: type[Exception]) -> None:
    assert kind.__name__ in epee.__all__
    assert getattr(epee, kind.__name__) is kind


def test_the_page_of_errors_has_a_row_and_an_entry_for_each() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "errors.md").read_text()
    names = {kind.__name__ for kind in CLASSES}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == names - {"EpeeError"}
    members = re.search(r"members: \[(.*?)\]", page)
    assert members is not None
    assert set(members[1].split(", ")) == names


def test_a_failure_carries_its_facts() -> None:
    error = errors.RankFailedError("gone", [2, 5], "dispatch", 7, 1, "process ended")
    assert (error.ranks, error.op, error.seq, error.epoch, error.cause) == ((2, 5), "dispatch", 7, 1, "process ended")
    assert errors.CommTimeoutError("late", [1]).ranks == (1,)


def test_context_lists_facts_and_leaves_out_what_is_not_known() -> None:
    text = errors.context("dispatch", rank=0, peer=2, root=None, elapsed=10.04)
    assert text == "dispatch (rank=0, peer=2, waited 10.0 s)"
    assert errors.context("barrier") == "barrier"


def test_a_time_out_ends_with_the_command_that_shows_who_waits() -> None:
    error = epee.CommTimeoutError("all_reduce: rank 1 silent", [1])
    ends = f"; to see who waits for whom, run: epee doctor --pid {os.getpid()}"
    assert str(error) == f"all_reduce: rank 1 silent{ends}"
    again = epee.CommTimeoutError(f"barrier: not run: {error}", [1])
    assert str(again) == f"barrier: not run: all_reduce: rank 1 silent{ends}"
    sent = copy.copy(error)  # as pickling does it
    assert (str(sent), sent.ranks) == (str(error), (1,))
    assert str(epee.CommTimeoutError("init: no word from rank 1", [1], has_job=False)) == "init: no word from rank 1"


def _handler(*_: Any) -> None:
    raise TimeoutError("raised by a signal handler")


def _handler_without_arguments(number: int, frame: Any) -> None:
    del number, frame
    raise TimeoutError("raised by a signal handler")


class Handler:
    def handle(self, number: int, frame: Any) -> None:
        """Raise in a method, one call below the handler's own frame."""
        _handler(number)


@pytest.fixture(
    params=[_handler, _handler_without_arguments, Handler().handle, functools.partial(_handler, "given")],
    ids=["function", "without arguments", "method", "partial"],
)
def send_signal(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Yield a function that interrupts its caller by a signal whose handler raises `TimeoutError`."""
    old = signal.signal(signal.SIGUSR1, request.param)
    yield lambda: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, old)


def test_an_exception_of_a_handler_is_not_the_one_that_a_clause_expects(send_signal: Callable[[], None]) -> None:
    def call() -> None:
        try:
            send_signal()
        except errors.expected(ValueError, OSError):
            pytest.fail("the exception was swallowed")

    with pytest.raises(TimeoutError, match="raised by a signal handler"):
        call()
    with pytest.raises(TimeoutError, match="raised by a signal handler"), errors.ignored(OSError):
        send_signal()


def test_an_exception_of_the_code_itself_is_the_one_that_a_clause_expects() -> None:
    def fail(*_: Any) -> None:
        raise FileNotFoundError("no such file")

    with errors.ignored(OSError):
        fail(1, None)
    try:
        fail(1, (None,))
    except errors.expected(ValueError, OSError):
        pass
    with pytest.raises(FileNotFoundError), errors.ignored(ValueError):
        fail()


def test_a_handlers_error_of_ours_is_not_our_own() -> None:
    def handler(*_: Any) -> None:
        raise errors.InvalidState("a call inside a call")

    old = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(errors.InvalidState) as caught:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert errors.is_of_handler(caught.value)
    assert not errors.is_own(caught.value)
    assert errors.is_own(errors.InvalidState("not of a handler"))


def test_a_stop_iteration_of_a_handler_that_leaves_a_generator_is_the_handlers() -> None:
    """It arrives as a RuntimeError (PEP 479), which is no error of the code that the clause is about."""

    def handler(*_: Any) -> None:
        raise StopIteration

    old = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="StopIteration") as caught, errors.ignored(RuntimeError):
            all(signal.raise_signal(signal.SIGUSR1) is None for _ in range(2))
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert errors.is_of_handler(caught.value)

    def end_search(*_: Any) -> None:
        try:
            next(iter(()))
        except StopIteration as end:
            raise RuntimeError("nothing found") from end

    old = signal.signal(signal.SIGUSR1, end_search)
    try:
        with pytest.raises(RuntimeError, match="nothing found") as raised:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert errors.is_of_handler(raised.value)
    with pytest.raises(RuntimeError) as own:
        all(next(iter(())) for _ in range(2))
    assert not errors.is_of_handler(own.value)


def test_a_recursion_error_is_no_run_time_error_unless_a_clause_names_it() -> None:
    def nested() -> None:
        nested()

    with pytest.raises(RecursionError), errors.ignored(RuntimeError):
        nested()
    with errors.ignored(ValueError, RecursionError):
        nested()
