"""`view.detector`: only a process that has ended counts as dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from epee.memory.host import process_start_time
from epee.view.detector import DeathWatch


@pytest.fixture
def victim() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def dead_within(watch: DeathWatch, seconds: float) -> tuple[int, ...]:
    deadline = time.monotonic() + seconds
    while not watch.dead() and time.monotonic() < deadline:
        os.sched_yield()
    return watch.dead()


def test_a_killed_process_is_dead_though_nobody_has_waited_for_it(victim: subprocess.Popen[bytes]) -> None:
    watch = DeathWatch()
    watch.watch(3, victim.pid, process_start_time(victim.pid))
    assert watch.dead() == ()
    victim.kill()
    assert dead_within(watch, 20) == (3,)
    assert watch.dead() == (3,)
    watch.close()


def test_a_stopped_process_is_not_dead(victim: subprocess.Popen[bytes]) -> None:
    watch = DeathWatch()
    watch.watch(1, victim.pid, process_start_time(victim.pid))
    victim.send_signal(signal.SIGSTOP)
    assert dead_within(watch, 0.1) == ()
    watch.close()


def test_a_pid_that_changed_hands_is_dead(victim: subprocess.Popen[bytes]) -> None:
    watch = DeathWatch()
    watch.watch(2, victim.pid, process_start_time(victim.pid) - 1)
    assert watch.dead() == (2,)
    watch.close()


def test_a_process_that_is_gone_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    start_time = process_start_time(process.pid)
    process.wait()
    watch = DeathWatch()
    watch.watch(5, process.pid, start_time)
    assert watch.dead() == (5,)
    watch.close()


def test_this_process_needs_no_watching() -> None:
    before = len(os.listdir("/proc/self/fd"))
    watch = DeathWatch()
    watch.watch(0, os.getpid(), 0)
    assert watch.dead() == ()
    assert len(os.listdir("/proc/self/fd")) == before
    watch.close()


def test_close_returns_every_descriptor(victim: subprocess.Popen[bytes]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    watch = DeathWatch()
    for rank in range(5):
        watch.watch(rank, victim.pid, process_start_time(victim.pid))
    watch.close()
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before
