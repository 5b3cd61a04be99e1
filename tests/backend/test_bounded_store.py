"""No operation on a store outlasts the time-out of the creation that needs it, whatever the store's process does."""

from __future__ import annotations

import _thread
import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.backend.cuda.messages.pairs import PairBoard
from epee.engine import BoundedStore
from epee.engine.bootstrap import attempt, bounded_store
from epee.engine.bootstrap.attempt import BootstrapAttempt
from epee.engine.bootstrap.creation import await_all
from epee.engine.outbox import LIFE, LIFE_BORN, LIFE_READY, STATE_WORDS
from epee.engine.replication import creation_over_hosts
from epee.engine.replication.creation_over_hosts import StoreLook
from epee.ep.pool.latency import Steps
from epee.errors import CommTimeoutError, InvalidState, PeerError, RankFailedError, ResourceError
from epee.view.process.detector import DeathWatch
from tests.harness import run_ranks
from tests.survive import stages

from . import cases

TIMEOUT_S = 0.1
TOO_LATE_S = 15.0  # what stands still goes on then, so that a wait without a limit fails the test and does not hang it


class SilentStore:
    """A store whose process answers no operation before `answers` is set, and none after it is cleared."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.calls: list[str] = []

    def _operation(self, name: str, value: Any) -> Any:
        self.calls.append(name)
        self.ident = threading.get_ident()
        self.answers.wait(TOO_LATE_S)
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._operation("add", amount))

    def set(self, key: str, value: str) -> None:
        self._operation("set", None)

    def check(self, keys: list[str]) -> bool:
        return bool(self._operation("check", False))

    def compare_set(self, key: str, expected_value: str, value: str) -> bytes:
        return bytes(self._operation("compare_set", value.encode()))


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentStore]:
    monkeypatch.setattr(bounded_store, "GRACE_S", TIMEOUT_S)
    store = SilentStore()
    yield store
    store.answers.set()


def silenced(silent: SilentStore, timeout_s: float) -> tuple[BoundedStore, BootstrapAttempt]:
    """The attempt of rank 0 of two, whose store is silent when it has begun."""
    store = BoundedStore(silent, timeout_s, 0)
    silent.answers.set()
    this = BootstrapAttempt(store, 0, 2)
    silent.answers.clear()
    return store, this


@contextlib.contextmanager
def alarm(after_s: float) -> Iterator[None]:
    """Raise KeyboardInterrupt from a signal handler."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def ends_in_time(began: float) -> bool:
    return time.monotonic() - began < TOO_LATE_S - 5.0


def await_end(ident: int) -> None:
    """Wait until a thread has ended."""
    deadline = time.monotonic() + 10
    while ident in sys._current_frames():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class WatchedStore(dist.HashStore):
    """A store that notes the threads on which it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.idents: list[int] = []

    def add(self, key: str, amount: int) -> int:
        self.idents.append(threading.get_ident())
        return super().add(key, amount)


def test_an_operation_that_is_not_answered_is_a_timeout_and_so_are_the_next_at_once(silent: SilentStore) -> None:
    began = time.monotonic()
    with BoundedStore(silent, TIMEOUT_S, 3) as store:
        with pytest.raises(CommTimeoutError) as caught:
            store.add("epee/births/3", 1)
        for operation in (lambda: store.set("epee/1/3", "x"), lambda: store.find("epee/1/0", 0.5)):
            with pytest.raises(CommTimeoutError, match="does not answer"):
                operation()
    assert ends_in_time(began)
    assert silent.calls == ["add"], "the others were not begun"
    text = str(caught.value)
    for word in ("init (rank=3)", "add of epee/births/3", "the timeout is 0.1 s", "process that holds the store"):
        assert word in text
    silent.answers.set()
    await_end(silent.ident)


def test_results_and_errors_of_a_store_come_back_and_the_thread_ends() -> None:
    inner = WatchedStore()
    with BoundedStore(inner, 30.0, 0) as store:
        store.set("a", "1")
        assert store.get("a") == inner.get("a") == b"1"
        assert (store.add("n", 2), store.add("n", 0)) == (2, 2)
        assert store.check(["a"])
        assert not store.check(["b"])
        assert store.find("a", 0.5) == b"1"
        assert store.find("b", 0.01) is None
        assert store.compare_set("made", "", "x") == b"x"
        store.delete_key("a")
        assert store.over(dist.PrefixStore("p", inner)).find("n", 0.0) is None
        with pytest.raises(CommTimeoutError, match=r"no process has set the key b within 0\.01 s"):
            store.read("b", 0.01)
        with pytest.raises(TypeError):
            store.add("n", "many")  # type: ignore[arg-type]
    assert len(set(inner.idents)) == 1
    assert inner.idents[0] != threading.get_ident()
    await_end(inner.idents[0])


def test_an_exception_of_a_signal_handler_ends_a_wait_and_the_store_can_be_used_on() -> None:
    with BoundedStore(dist.HashStore(), 30.0, 0) as store:
        with alarm(0.05), pytest.raises(KeyboardInterrupt):
            store.find("missing", 0.5)
        store.set("reported", "1")
        assert store.find("reported", 0.0) == b"1"


def test_a_process_that_gets_no_thread_uses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    inner = WatchedStore()
    with BoundedStore(inner, 30.0, 0) as store:
        assert store.add("a", 1) == 1
        assert store.find("a", 0.0) == b"1"
    assert inner.idents == [threading.get_ident()]


def test_an_exception_of_a_signal_handler_leaves_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    real, starts = _thread.start_new_thread, []

    def start(*args: Any) -> int:
        starts.append(real(*args))
        raise TimeoutError  # between the start and the next line

    monkeypatch.setattr(_thread, "start_new_thread", start)
    with BoundedStore(dist.HashStore(), 30.0, 0) as store:
        with pytest.raises(TimeoutError):
            store.add("a", 1)
        assert store.add("a", 1) == 1
    assert len(starts) == 1


def test_a_store_is_not_used_behind_its_with() -> None:
    with BoundedStore(dist.HashStore(), TIMEOUT_S, 0) as store:
        store.add("a", 1)
    with pytest.raises(InvalidState, match=r"init \(rank=0\): the store is used behind its `with`"):
        store.add("a", 1)


def test_a_store_that_works_is_used_when_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_store, "GRACE_S", 0.0)
    monkeypatch.setattr(bounded_store, "FLOOR_S", TOO_LATE_S)
    with BoundedStore(dist.HashStore(), 0.0, 0) as store:
        assert [store.add("a", 1) for _ in range(50)] == list(range(1, 51))


def test_a_wait_before_the_deadline_is_no_grace() -> None:
    with BoundedStore(dist.HashStore(), 30.0, 0) as store:
        assert store.find("missing", 0.05, until=0.0) is None
        assert store._thread._grace_s == bounded_store.GRACE_S


def test_no_end_is_as_the_longest_time() -> None:
    with BoundedStore(dist.HashStore(), math.inf, 0) as store:
        assert store.add("a", 1) == 1


# ---- those who use one


def none_come(process: int, num_processes: int, folder: str) -> tuple[str, tuple[int, ...]]:
    """Ranks 0 and 2 of four; ranks 1 and 3 write nothing."""
    with pytest.raises(CommTimeoutError) as caught:
        cases.init(2 * process, 4, folder, timeout_s=1)
    return str(caught.value), caught.value.ranks


def test_all_ranks_that_have_not_come_are_named(tmp_path: Path) -> None:
    for text, ranks in run_ranks(none_come, 2, str(tmp_path), backend=None):
        assert ranks == (1, 3)
        assert "rank 1, 3 did not come to the rendezvous" in text
        assert "the key epee/1/1/hello was not set within 1." in text


def stopped(process: int, num_processes: int, folder: str) -> tuple[str, float]:
    """Process 0 holds the store and is stopped when rank 0, in process 1, has begun to make its group."""
    port, pid = Path(folder) / "port", Path(folder) / "pid"
    if process == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        pid.write_text(str(os.getpid()))
        port.write_text(str(store.port))
        stages.reach(folder, "begun")
        stages.wait_for(folder, "ended")
        return "", 0.0
    stages.wait_for(folder, "begun")
    holder, real = int(pid.read_text()), BootstrapAttempt.read
    watchdog = threading.Timer(TOO_LATE_S, os.kill, (holder, signal.SIGCONT))
    watchdog.daemon = True

    def read(this: BootstrapAttempt, *args: Any) -> bytes:
        BootstrapAttempt.read = real  # type: ignore[method-assign]
        os.kill(holder, signal.SIGSTOP)
        stages.await_stop(holder)
        return real(this, *args)

    store = dist.TCPStore("127.0.0.1", int(port.read_text()), None, False, wait_for_workers=False)
    BootstrapAttempt.read = read  # type: ignore[assignment,method-assign]
    watchdog.start()
    try:
        began = time.monotonic()
        with pytest.raises(CommTimeoutError) as caught:
            dist.init_process_group("epee", store=store, rank=0, world_size=2, timeout=timedelta(seconds=1))
        return str(caught.value), time.monotonic() - began
    finally:
        watchdog.cancel()
        os.kill(holder, signal.SIGCONT)
        stages.reach(folder, "ended")


def test_a_creation_whose_store_is_stopped_ends_by_its_own_timeout(tmp_path: Path) -> None:
    _, (text, elapsed_s) = run_ranks(stopped, 2, str(tmp_path), backend=None)
    assert elapsed_s < TOO_LATE_S - 5.0
    assert "the store of the rendezvous does not answer (find of epee/1/0/hello, waited " in text


@pytest.mark.parametrize("error", [KeyboardInterrupt, ResourceError])
def test_an_error_of_this_process_is_not_kept_back_by_a_silent_store(
    error: type[BaseException], silent: SilentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first by a signal handler, while the store does not answer; the second before it is asked."""

    def fail(store: BoundedStore) -> None:
        with attempt.attempt(store, 0, 2) as this:
            silent.answers.clear()
            if error is ResourceError:
                raise this.explain(ResourceError("no memory"), DeathWatch())
            with alarm(0.05):
                this.read(1, "/hello", store.deadline)

    monkeypatch.setattr(attempt, "REASON_WAIT_S", TIMEOUT_S)
    silent.answers.set()
    with BoundedStore(silent, 60.0, 0) as store:
        began = time.monotonic()
        with pytest.raises(error):
            fail(store)
        assert ends_in_time(began)
        with pytest.raises(CommTimeoutError, match="does not answer"):
            store.check(["a"])


def test_a_rank_returns_no_group_that_the_others_may_not_have(silent: SilentStore) -> None:
    """A silent store may do later what it was asked for: the first finding in it is another rank's then."""
    store, this = silenced(silent, TIMEOUT_S)
    with store:
        with pytest.raises(CommTimeoutError, match="does not answer"):
            this.settle(None, DeathWatch())
        with pytest.raises(PeerError):
            this.settle(PeerError("rank 1 failed", [1]), DeathWatch())


def test_a_check_of_the_others_does_not_take_silence_for_no_report(
    silent: SilentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation_over_hosts, "_LOOK_S", 0.0)
    store, this = silenced(silent, TIMEOUT_S)
    look = StoreLook(this, DeathWatch(), tuple)
    with store:
        with pytest.raises(CommTimeoutError, match="does not answer"):
            look()
        assert this.heard(DeathWatch()) is None
        dead: Any = SimpleNamespace(dead=lambda: (1,))
        assert isinstance(this.reported(dead), RankFailedError)


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("life", [LIFE_READY, LIFE_BORN])
def test_a_rank_that_got_ready_while_the_store_was_asked_is_ready(is_silent: bool, life: int) -> None:
    words = [0] * STATE_WORDS
    words[LIFE] = LIFE_BORN
    this: Any = None
    exports = SimpleNamespace(spans=False, publish=lambda *_: None)
    peer_regions: Any = SimpleNamespace(rank=0, peers=[1], words={1: words}, exports=exports)

    def check() -> None:
        words[LIFE] = life
        if is_silent:
            raise CommTimeoutError("the store does not answer")

    late = "the store does not answer" if is_silent else "rank 1 did not get ready in time"
    with contextlib.nullcontext() if life == LIFE_READY else pytest.raises(CommTimeoutError, match=late):
        await_all(this, peer_regions, DeathWatch(), 0.0, check)


class LoneGroup:
    """What `Steps` needs of a group of two ranks."""

    own_timeout_s = TIMEOUT_S

    def __init__(self, store: Any) -> None:
        self.store = store

    def rank(self) -> int:
        return 0

    def active_ranks(self) -> torch.Tensor:
        return torch.ones(2, dtype=torch.int32)

    def get_group_store(self) -> Any:
        return self.store


def test_a_buffer_of_a_drop_in_layer_is_made_without_a_store_that_does_not_answer(
    silent: SilentStore, caplog: pytest.LogCaptureFixture
) -> None:
    group: Any = LoneGroup(silent)
    steps, began = Steps(group), time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert not steps.is_met_again(TIMEOUT_S)
    assert "LatencyBuffer (rank=0): the store of the rendezvous does not answer (set of epee/ep/step/0/0" in caplog.text
    steps.join()
    steps.meet()
    assert ends_in_time(began)


def test_a_rank_that_takes_no_step_is_awaited_for_the_groups_timeout() -> None:
    group: Any = LoneGroup(dist.HashStore())
    with pytest.raises(CommTimeoutError, match=r"rank 1 has made no further buffer .* within 0\.1 s"):
        Steps(group).is_met_again(None)


def test_a_first_message_between_gpus_does_not_wait_for_a_store_that_does_not_answer(silent: SilentStore) -> None:
    members = SimpleNamespace(members=[])
    engine: Any = SimpleNamespace(timeout_s=TIMEOUT_S, members=members)
    board, began = PairBoard(engine, silent, 0, lambda rank: False), time.monotonic()
    with pytest.raises(CommTimeoutError, match=r"send \(rank=0\): the store of the rendezvous does not answer"):
        board.row_of(1, "send")
    assert ends_in_time(began)
