"""The thread that tells kernels of deaths: when it looks closely, whom it tells of, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from epee.gpu import death_notifier
from epee.gpu.death_notifier import DeathNotifier
from epee.memory.shared import process_start_time
from epee.view.process import detector
from tests.harness import run_ranks

LONG_S = 60.0  # a test that waits so long has failed


class Kernels:
    """The kernels of a rank: their word, and what they are told. Counts how often both are touched."""

    def __init__(self) -> None:
        self.word = 0
        self.is_waiting = True  # the word moves with each look
        self.told: tuple[int, ...] = ()
        self.num_rounds = self.num_told = 0
        self._changed = threading.Condition()

    def tell(self, ranks: Sequence[int]) -> None:
        """Hear who is dead."""
        with self._changed:
            self.told = tuple(ranks)
            self.num_told += 1
            self._changed.notify_all()

    def waiting(self) -> int:
        """Return the word, once a round."""
        with self._changed:
            self.num_rounds += 1
            self.word += self.is_waiting
            self._changed.notify_all()
            return self.word

    def await_told(self, ranks: tuple[int, ...]) -> bool:
        """Wait until these ranks are dead."""
        with self._changed:
            return self._changed.wait_for(lambda: self.told == ranks, LONG_S)

    def pass_rounds(self, count: int) -> bool:
        """Wait until the notifier has done `count` whole rounds from now on."""
        with self._changed:
            until = self.num_rounds + count + 1  # one may be half over, another has just begun
            return self._changed.wait_for(lambda: self.num_rounds >= until, LONG_S)


class RemoteReads:
    """Stands in for signs and close looks: which ranks show one, who is taken for torn down, and who was looked at."""

    def __init__(self) -> None:
        self.dying: set[int] = set()
        self.torn_down: set[int] = set()
        self.at: list[int] = []
        self.num_asked = 0

    def leaving(self, signs: detector.DyingSigns) -> list[int]:
        self.num_asked += 1
        return sorted(self.dying)

    def __call__(self, pid: int, start_time: int) -> bool:
        self.at.append(pid)
        return pid in self.torn_down


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> RemoteReads:
    """What the detector does in place of reading /proc."""
    stand_in = RemoteReads()
    monkeypatch.setattr(detector, "is_torn_down", stand_in)
    monkeypatch.setattr(detector.DyingSigns, "leaving", lambda signs: stand_in.leaving(signs))
    return stand_in


@pytest.fixture
def peers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Six processes that stay until they are killed."""
    made = [subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE) for _ in range(6)]
    yield made
    for process in made:
        process.kill()
        process.communicate()


def identity(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Number and start time."""
    return process.pid, process_start_time(process.pid)


def begin(kernels: Kernels, peers: Sequence[subprocess.Popen[bytes]]) -> DeathNotifier:
    """A notifier that watches them, as ranks 0, 1, ..."""
    notifier = DeathNotifier(kernels.tell, kernels.waiting, "test-notifier")
    notifier.start({rank: identity(process) for rank, process in enumerate(peers)})
    return notifier


def num_watched() -> int:
    """How many pidfds this process has, which are as many as descriptors for signs."""
    pidfds = signs = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            at = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # of the listing itself
            continue
        pidfds += "pidfd" in at
        signs += at.endswith("/statm")
    assert pidfds == signs
    return pidfds


def test_looks_closely_only_at_who_shows_a_sign(looks: RemoteReads, peers: list[subprocess.Popen[bytes]]) -> None:
    kernels = Kernels()
    notifier = begin(kernels, peers)
    assert kernels.pass_rounds(3)  # that somebody waits is no reason
    assert looks.num_asked > 0
    assert looks.at == []
    assert kernels.num_told == 0
    for dying in ({2}, set(range(6))):
        looks.at.clear()
        looks.dying = dying
        assert kernels.pass_rounds(8)
        assert notifier._sleep_s == death_notifier.WAITING_S, "not to be busy with one that never ends"
        assert set(looks.at) == {peers[rank].pid for rank in dying}  # all, though a few at a time
    assert kernels.num_told == 0, "a sign is no proof"
    notifier.stop()


def test_nobody_looks_into_proc_while_no_kernel_waits(looks: RemoteReads, peers: list[subprocess.Popen[bytes]]) -> None:
    kernels = Kernels()
    kernels.is_waiting = False
    notifier = begin(kernels, peers)
    looks.torn_down, looks.dying = {peers[5].pid}, {5}
    assert kernels.pass_rounds(8)
    assert (looks.num_asked, looks.at, kernels.told) == (0, [], ())
    kernels.word = 1
    assert kernels.await_told((5,))
    notifier.stop()


def test_who_asks_is_told_at_once_of_what_proc_shows(looks: RemoteReads, peers: list[subprocess.Popen[bytes]]) -> None:
    kernels = Kernels()
    kernels.is_waiting = False
    notifier = begin(kernels, peers)
    looks.torn_down, looks.dying = {peers[5].pid}, {5, 3}
    assert kernels.pass_rounds(3)
    assert kernels.told == ()
    notifier.look()
    assert kernels.told == (5,), "when it returns; a sign is no proof"
    notifier.stop()
    looks.torn_down = {peers[3].pid}
    notifier.look()
    assert kernels.told == (5,)


def test_who_asks_is_not_told_of_a_process_that_has_not_ended_where_that_matters(
    looks: RemoteReads, peers: list[subprocess.Popen[bytes]]
) -> None:
    kernels = Kernels()
    notifier = DeathNotifier(kernels.tell, kernels.waiting, "test-notifier", needs_end=True)
    notifier.start({rank: identity(process) for rank, process in enumerate(peers)})
    looks.torn_down, looks.dying = {peers[5].pid}, {5}
    notifier.look()
    assert kernels.told == ()
    peers[5].kill()
    peers[5].wait()
    notifier.look()
    assert kernels.told == (5,)
    notifier.stop()


def test_a_death_that_only_proc_shows_is_told(looks: RemoteReads, peers: list[subprocess.Popen[bytes]]) -> None:
    kernels = Kernels()
    notifier = begin(kernels, peers)
    looks.torn_down = {peers[5].pid, peers[1].pid}
    assert kernels.pass_rounds(3)
    assert kernels.told == ()
    looks.dying = {5, 1}
    assert kernels.await_told((1, 5))
    looks.at.clear()
    assert kernels.pass_rounds(2)
    assert not looks.torn_down & set(looks.at), "what is proved is looked at no more"
    notifier.stop()


def test_a_death_is_told_before_the_pidfd_says_so(
    monkeypatch: pytest.MonkeyPatch, peers: list[subprocess.Popen[bytes]]
) -> None:
    """With real signs and looks; a process with memory on a GPU takes a long while to end."""

    def pidfds_are_silent(watch: detector.DeathWatch, wait_s: float = 0.0) -> tuple[int, ...]:
        time.sleep(wait_s)
        return tuple(sorted(watch._dead))

    monkeypatch.setattr(detector.DeathWatch, "dead", pidfds_are_silent)
    kernels = Kernels()
    notifier = begin(kernels, peers)
    for rank in (4, 0):
        peers[rank].kill()
    assert kernels.await_told((0, 4))
    assert notifier.told == (0, 4)
    notifier.stop()


def test_an_ended_process_is_told_without_a_close_look(
    looks: RemoteReads, peers: list[subprocess.Popen[bytes]]
) -> None:
    kernels = Kernels()
    notifier = begin(kernels, peers)
    peers[2].kill()
    assert kernels.await_told((2,))
    assert looks.at == []
    notifier.stop()


def test_a_word_that_another_wrote_over_is_told_again(looks: RemoteReads, peers: list[subprocess.Popen[bytes]]) -> None:
    kernels = Kernels()
    notifier = begin(kernels, peers)
    looks.torn_down, looks.dying = {peers[4].pid}, {4}
    assert kernels.await_told((4,))
    kernels.tell(())  # as a host that has only seen what pidfds say
    assert kernels.await_told((4,))
    notifier.stop()


def test_a_successor_is_followed_and_its_predecessor_forgotten(peers: list[subprocess.Popen[bytes]]) -> None:
    kernels = Kernels()
    notifier = begin(kernels, peers[:3])
    peers[1].kill()
    assert kernels.await_told((1,))
    for _ in range(20):  # the thread sleeps with the lock and lets each of them in
        notifier.follow(1, identity(peers[4]))
        assert kernels.told == ()
    assert kernels.pass_rounds(2)
    assert kernels.told == ()
    peers[4].kill()
    assert kernels.await_told((1,))
    notifier.stop()


def test_nothing_is_left_when_it_has_stopped(peers: list[subprocess.Popen[bytes]]) -> None:
    before, threads = num_watched(), threading.active_count()
    notifier = begin(Kernels(), peers)
    assert (num_watched(), threading.active_count()) == (before + len(peers), threads + 1)
    peers[0].kill()
    notifier.follow(3, identity(peers[4]))
    notifier.stop()
    assert (num_watched(), threading.active_count()) == (before, threads)
    notifier.stop()


def test_one_that_never_began_leaves_nothing() -> None:
    before = num_watched()
    notifier = DeathNotifier(lambda ranks: None, lambda: 0, "test-notifier")
    notifier.stop()
    assert num_watched() == before


def test_a_finalizer_in_its_own_thread_may_stop_it(peers: list[subprocess.Popen[bytes]]) -> None:
    before = num_watched()
    kernels = Kernels()

    def waiting() -> int:
        notifier.stop()
        return kernels.waiting()

    notifier = DeathNotifier(kernels.tell, waiting, "test-notifier")
    notifier.start({0: identity(peers[0])})
    notifier._thread.join(LONG_S)
    assert not notifier._thread.is_alive()
    assert kernels.num_rounds == 1
    assert num_watched() == before


def test_a_forked_child_drops_its_copies() -> None:
    assert run_ranks(forked, 1) == [0]


def forked(rank: int, num_ranks: int) -> int:
    """Fork while the thread sleeps; in a process of its own, as pytest has threads that a fork would lose."""
    kernels = Kernels()
    with subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE) as peer:
        notifier = begin(kernels, [peer])
        assert kernels.pass_rounds(1)
        assert num_watched() == 1
        child = os.fork()
        if child == 0:
            notifier.stop()
            os._exit(num_watched())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        peer.kill()
        assert kernels.await_told((0,)), "the child has stopped its parent's"
        notifier.stop()
    return status
