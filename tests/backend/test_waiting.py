"""What a wait does besides waiting: leaving a core that it shares with the peer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from epee.engine import waiting
from epee.engine.entry import ENDED, Entry
from epee.engine.interrupts import Recovery
from epee.engine.outbox import CORE, STATE_WORDS, NoExports
from epee.engine.waiting import MOVE_PAUSE_S, Waiting


def made(rank: int) -> tuple[Waiting, list[list[int]]]:
    words = [[0] * STATE_WORDS for _ in range(2)]
    peer_regions = SimpleNamespace(rank=rank, num_ranks=2, words=words, own=words[rank], exports=NoExports())
    engine: Any = SimpleNamespace(peer_regions=peer_regions, flags=0, timeout_s=0.0)
    return Waiting(engine, Entry(engine)), words


def tries(rank: int, monkeypatch: pytest.MonkeyPatch, num_cores_apart: int) -> tuple[bool, Waiting]:
    monkeypatch.setattr(waiting, "_getcpu", lambda: min(os.sched_getaffinity(0)))
    wait, words = made(rank)
    words[1 - rank][CORE] = 1 + min(os.sched_getaffinity(0)) + num_cores_apart
    return wait._part(1 - rank, 100.0), wait


def test_the_higher_rank_leaves_a_shared_core_and_keeps_its_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    moved, wait = tries(1, monkeypatch, 0)
    assert moved
    assert os.sched_getaffinity(0) == allowed
    assert not wait._part(0, 100.0 + MOVE_PAUSE_S / 2), "moved again at once"
    assert wait._part(0, 100.0 + 2 * MOVE_PAUSE_S)


def test_a_waiter_takes_the_lock_back_however_late_it_comes_to_it() -> None:
    """The process may have been stopped for longer than the group's time-out between two lines."""
    entry = made(0)[0]._entry
    assert entry.stop_calls(1.0)
    entry.let_go()
    entry.take_back()
    assert entry._lock._is_owned()
    entry.leave()


def test_nobody_moves_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tries(0, monkeypatch, 0)[0], "the lower rank stays"
    assert not tries(1, monkeypatch, 1)[0], "the peer is on another core"


def test_a_rank_with_one_core_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert not tries(1, monkeypatch, 0)[0]
        assert os.sched_getaffinity(0) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)


class Interrupt(BaseException):
    """What a signal handler raises."""


def interrupted(monkeypatch: pytest.MonkeyPatch, handler: Any) -> Waiting:
    """Return what waited when `handler` ran between the two changes of the affinity, and raised."""
    real = os.sched_setaffinity

    def set_and_raise(pid: int, cores: set[int]) -> None:
        real(pid, cores)
        monkeypatch.setattr(os, "sched_setaffinity", real)
        handler(real)
        raise Interrupt

    monkeypatch.setattr(waiting, "_getcpu", lambda: min(os.sched_getaffinity(0)))
    monkeypatch.setattr(os, "sched_setaffinity", set_and_raise)
    wait, words = made(1)
    words[0][CORE] = 1 + min(os.sched_getaffinity(0))
    with pytest.raises(Interrupt):
        wait._part(0, 100.0)
    return wait


@pytest.fixture
def cores() -> Iterator[set[int]]:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    yield allowed
    os.sched_setaffinity(0, allowed)


def broken_off(wait: Waiting) -> None:
    """Do to a wait what `Recovery.broken_off` does; the rest of it has no part here."""
    outboxes = SimpleNamespace(exports=NoExports())
    owner: Any = SimpleNamespace(entry=wait._entry, waits=wait, flags=ENDED, peer_regions=outboxes)
    Recovery(owner).broken_off(Interrupt())


def test_an_interrupt_in_the_midst_of_a_move_leaves_the_thread_all_its_cores(
    monkeypatch: pytest.MonkeyPatch, cores: set[int]
) -> None:
    wait = interrupted(monkeypatch, lambda real: None)
    assert os.sched_getaffinity(0) < cores, "interrupted at another place"
    broken_off(wait)
    assert os.sched_getaffinity(0) == cores
    broken_off(wait)
    assert os.sched_getaffinity(0) == cores


def test_cores_that_a_signal_handler_sets_in_the_midst_of_a_move_stay(
    monkeypatch: pytest.MonkeyPatch, cores: set[int]
) -> None:
    chosen = {min(cores)}
    broken_off(interrupted(monkeypatch, lambda real: real(0, chosen)))
    assert os.sched_getaffinity(0) == chosen
