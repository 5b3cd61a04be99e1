"""`view.detector`: only a process that has ended counts as dead."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from epee.errors import ResourceError
from epee.memory.shared import process_start_time
from epee.view.process import detector
from epee.view.process.detector import DeathWatch, DyingSigns, is_torn_down, open_process
from tests import shortage


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


def test_who_sleeps_for_a_death_wakes_up_by_it(victim: subprocess.Popen[bytes]) -> None:
    watch = DeathWatch()
    watch.watch(3, victim.pid, process_start_time(victim.pid))
    assert watch.dead(0.005) == ()
    killer = threading.Thread(target=victim.kill)
    killer.start()
    assert watch.dead(3600) == (3,)
    killer.join()
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


def test_who_cannot_be_watched_is_not_dead(victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    watch = DeathWatch()
    start = process_start_time(victim.pid)
    for num_free in (0, 1):  # for the pidfd, for /proc
        with shortage.descriptors(num_free), pytest.raises(ResourceError, match="Too many open files"):
            watch.watch(4, victim.pid, start)
        assert watch.dead() == ()
    for number in (errno.EPERM, errno.ENFILE, errno.ENOMEM, errno.EINVAL):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pidfd_open", _refuse(number))
            with pytest.raises(ResourceError, match=f"cannot watch process {victim.pid}") as caught:
                watch.watch(4, victim.pid, start)
            assert ("a filter refuses the system call pidfd_open" in str(caught.value)) == (number == errno.EPERM)
    assert watch.dead() == ()
    watch.watch(4, victim.pid, start)
    victim.kill()
    assert dead_within(watch, 20) == (4,)


def _refuse(number: int) -> Callable[[int], int]:
    def pidfd_open(pid: int) -> int:
        raise OSError(number, os.strerror(number))

    return pidfd_open


def test_a_process_without_proc_is_asked_through_its_pidfd(
    victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = process_start_time(victim.pid)
    monkeypatch.setattr(detector, "started_at", lambda pid: -1)
    with pytest.raises(ResourceError, match="lives, but /proc does not show it"):
        open_process(victim.pid, start)
    victim.kill()
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
    assert open_process(victim.pid, start) == -1


def test_a_rank_is_watched_anew_in_place_of_another(victim: subprocess.Popen[bytes]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    watch = DeathWatch()
    watch.watch(1, 1, process_start_time(1) + 1)
    assert watch.dead() == (1,)
    for _ in range(3):
        watch.watch(1, victim.pid, process_start_time(victim.pid))
        assert watch.dead() == ()
    assert len(os.listdir("/proc/self/fd")) == before + 1
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


def test_an_address_space_that_is_gone_is_a_proof() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; b = bytearray(1 << 26); time.sleep(600)"])
    start = process_start_time(sleeper.pid)
    watch = DeathWatch()
    try:
        watch.watch(3, sleeper.pid, start)
        assert not is_torn_down(sleeper.pid, start)
        assert watch.look([3, 4]) == ()
        sleeper.kill()
        deadline = time.monotonic() + 30
        while not is_torn_down(sleeper.pid, start):  # it stays a zombie: nobody has waited for it
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert not is_torn_down(sleeper.pid, start + 1), "another process of that number"
        assert watch.look([3, 4]) == (3,)
        assert watch.look([3, 4]) == (), "told once"
        assert watch.dead() == (3,)
    finally:
        sleeper.wait()
        watch.close()
    assert not is_torn_down(sleeper.pid, start), "that one is the pidfd's"


def test_a_thread_that_lives_keeps_its_process_alive() -> None:
    """The first thread of a process may end before the others; its own address space is gone then."""
    code = "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    sleeper = subprocess.Popen([sys.executable, "-c", code + "ctypes.CDLL(None).pthread_exit(None)"])
    start = process_start_time(sleeper.pid)
    try:
        deadline = time.monotonic() + 30
        while not Path(f"/proc/{sleeper.pid}/statm").read_text().startswith("0 "):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert not is_torn_down(sleeper.pid, start)
    finally:
        sleeper.kill()
        sleeper.wait()


def test_signs_of_dying_are_shown_by_who_has_lost_its_memory_or_is_gone(victim: subprocess.Popen[bytes]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sleeper = subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE)
    signs = DyingSigns()
    signs.watch(1, victim.pid)
    signs.watch(2, sleeper.pid)
    signs.watch(3, os.getpid())
    for _ in range(3):
        assert signs.leaving() == []
    sleeper.kill()
    deadline = time.monotonic() + 30
    while signs.leaving() != [2]:  # it stays a zombie
        assert time.monotonic() < deadline
    sleeper.communicate()
    assert signs.leaving() == [2]
    signs.watch(2, victim.pid)  # its successor
    assert signs.leaving() == []
    signs.watch(1, sleeper.pid)  # has gone
    assert signs.leaving() == []
    signs.close()
    signs.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_watch_may_be_closed_by_another_thread_while_one_asks(victim: subprocess.Popen[bytes]) -> None:
    watch = DeathWatch()
    watch.watch(3, victim.pid, process_start_time(victim.pid))
    poll = watch._poll

    class Poll:
        def poll(self, wait_ms: float) -> list[tuple[int, int]]:
            found = poll.poll(3_600_000)  # until the victim has ended
            watch._poll = poll
            watch.close()
            return found

    watch._poll = Poll()  # type: ignore[assignment]
    victim.kill()
    assert watch.dead() == ()
    assert not watch._rank_of_fd


def test_a_watch_that_was_interrupted_leaves_no_descriptor(victim: subprocess.Popen[bytes]) -> None:
    before, watch = len(os.listdir("/proc/self/fd")), DeathWatch()
    poll = watch._poll

    class Poll:
        def register(self, fd: int, events: int) -> None:
            watch._poll = poll
            raise KeyboardInterrupt

    watch._poll = Poll()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        watch.watch(3, victim.pid, process_start_time(victim.pid))
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before
