"""Real processes, each with a `Runtime` of its own, that do what a test tells them over a pipe, and may be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from epee.view.protocol.events import AgentSettings
from epee.view.protocol.messages import Decision, LaneState, Member
from epee.view.runtime import Runtime
from epee.view.transport.directory import JobDirectory
from tests.harness import server

PATIENT = AgentSettings(policy="error")
EVICT = AgentSettings(policy="evict", answer_s=0.1, patience_s=0.6)
LANE = 7


class Lane:
    """An engine that does nothing but note what it is told."""

    def __init__(self, slot: int) -> None:
        self.is_frozen = False
        self.num_freezes = 0
        self.decisions: list[tuple[Decision, float]] = []
        self.troubles: list[str] = []
        self.state = LaneState(LANE, 10 + slot, 11 + slot)

    def freeze(self) -> LaneState:
        self.is_frozen = True
        self.num_freezes += 1
        return self.state

    def thaw(self) -> None:
        self.is_frozen = False

    def decided(self, decision: Decision) -> None:
        self.decisions.append((decision, time.monotonic()))

    def trouble(self, error: Exception) -> None:
        self.troubles.append(type(error).__name__)


class Process:
    """What runs in a child."""

    def __init__(self, slot: int, folder: str, settings: AgentSettings) -> None:
        os.environ["EPEE_RUNTIME_DIR"] = folder
        self.slot, self.settings = slot, settings
        self.runtime: Runtime | None = None
        self.lane = Lane(slot)

    def create(self) -> str:
        self.job = JobDirectory.create("test")
        return str(self.job.path)

    def prepare(self, path: str) -> Member:
        job = self.job if hasattr(self, "job") else JobDirectory.open(path)
        self.runtime = Runtime(job, self.slot, self.settings)
        self.runtime.listen()
        return self.runtime.member

    def start(self, members: list[Member]) -> Decision:
        assert self.runtime is not None
        first = self.runtime.start(members)
        self._register()
        return first

    def join(self, timeout_s: float) -> Decision:
        assert self.runtime is not None
        decision = self.runtime.join(timeout_s)
        self._register()
        return decision

    def _register(self) -> None:
        assert self.runtime is not None
        lane = self.lane
        lane.decisions.append((self.runtime.view(), time.monotonic()))
        self.runtime.register(LANE, lane.freeze, lane.thaw, lane.decided, lane.trouble)

    def call(self, name: str, *args: Any) -> Any:
        return getattr(self.runtime, name)(*args)

    def error(self) -> str:
        assert self.runtime is not None
        return type(self.runtime.error).__name__

    def history(self) -> list[Decision]:
        """Return the views that the lane was told, each once (a lane may hear of the first one twice)."""
        seen: list[Decision] = []
        for decision, _ in self.lane.decisions:
            if decision not in seen:
                seen.append(decision)
        return seen

    def decided_at(self) -> float:
        return self.lane.decisions[-1][1]

    def lane_facts(self) -> tuple[bool, int, list[str]]:
        """Return (frozen, how often, troubles); the thaw comes a moment after the decision."""
        deadline = time.monotonic() + 5.0
        while self.lane.is_frozen and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.lane.is_frozen, self.lane.num_freezes, self.lane.troubles

    def accuse_until(self, slot: int, epoch: int, timeout_s: float) -> Decision | None:
        """Go on accusing `slot`, as an engine that waits for it does, until there is a view after `epoch`."""
        assert self.runtime is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.runtime.accuse(slot, LANE, 12, 1 << 40)
            decision = self.runtime.await_decision(epoch, 0.1)
            if decision is not None:
                return decision
        return None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.runtime, *args)

    def usage(self) -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _main(connection: Any, slot: int, folder: str, settings: AgentSettings) -> None:
    process = Process(slot, folder, settings)
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            if name == "exit":
                return  # the way a script ends: with everything that runs at exit
            connection.send(("ok", getattr(process, name)(*args)))
        except BaseException as exc:  # noqa: BLE001 - the test shows it, whatever it is
            connection.send((type(exc).__name__, f"{exc}\n{traceback.format_exc()}"))


class Refusal(AssertionError):
    """A child's call has raised; `kind` is the name of the exception."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Rank:
    """The test's hold on a child. `tell` and `answer` may be apart, so that several children work at once."""

    def __init__(self, slot: int, folder: str, settings: AgentSettings) -> None:
        self.slot = slot
        self.process, self._connection = server.fork(_main, slot, folder, settings)
        self.pid = self.process.pid or 0

    def tell(self, name: str, *args: Any) -> None:
        self._connection.send((name, args))

    def answer(self, timeout_s: float = 30.0) -> Any:
        assert self._connection.poll(timeout_s), f"rank {self.slot} does not answer"
        kind, value = self._connection.recv()
        if kind != "ok":
            raise Refusal(kind, value)
        return value

    def ask(self, name: str, *args: Any) -> Any:
        self.tell(name, *args)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """End the child as a script ends; return when it is gone."""
        self.tell("exit")
        self.process.join(20)
        assert self.process.exitcode == 0

    def dispose(self) -> None:
        self._connection.close()
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.join(10)
        self.process.close()


class Group:
    """The ranks of one job."""

    def __init__(self, folder: Path, settings: AgentSettings) -> None:
        self.folder, self.settings = str(folder), settings
        self.ranks: list[Rank] = []
        self.path = ""

    def spawn(self, slot: int) -> Rank:
        rank = Rank(slot, self.folder, self.settings)
        self.ranks.append(rank)
        return rank

    def born(self, num_ranks: int) -> list[Rank]:
        """Start `num_ranks` founders."""
        ranks = [self.spawn(slot) for slot in range(num_ranks)]
        self.path = ranks[0].ask("create")
        for rank in ranks:
            rank.tell("prepare", self.path)
        members = [rank.answer() for rank in ranks]
        for rank in ranks:
            rank.tell("start", members)
        firsts = [rank.answer() for rank in ranks]
        assert all(first == firsts[0] for first in firsts)
        return ranks

    def joiner(self, slot: int) -> Rank:
        """Start a process that may ask to join as `slot`."""
        rank = self.spawn(slot)
        rank.ask("prepare", self.path)
        return rank


@contextlib.contextmanager
def group(folder: Path, settings: AgentSettings = PATIENT) -> Iterator[Group]:
    """Yield a group and end all its processes afterwards."""
    job = Group(folder, settings)
    try:
        yield job
    finally:
        for rank in job.ranks:
            rank.dispose()


def decide(ranks: list[Rank], after_epoch: int, timeout_s: float = 20.0) -> Decision:
    """Return the first view after `after_epoch` that all `ranks` have; all must have the same."""
    for rank in ranks:
        rank.tell("call", "await_decision", after_epoch, timeout_s)
    views = [rank.answer(timeout_s + 10) for rank in ranks]
    assert all(view is not None for view in views), "no decision in time"
    return min(views)


def settle(ranks: list[Rank], slots: set[int], timeout_s: float = 20.0) -> Decision:
    """Wait until all `ranks` have the same view, with exactly these slots; return it."""
    deadline = time.monotonic() + timeout_s
    while True:
        views = [rank.ask("call", "view") for rank in ranks]
        if all(view == views[0] for view in views) and {member.slot for member in views[0].members} == slots:
            return views[0]
        assert time.monotonic() < deadline, [(view.epoch, [m.slot for m in view.members]) for view in views]
        time.sleep(0.01)


def same_history(ranks: list[Rank]) -> list[Decision]:
    """Assert that no two ranks were told different views of one epoch, in order without gaps; return the longest."""
    histories = [rank.ask("history") for rank in ranks]
    known: dict[int, Decision] = {}
    for history in histories:
        epochs = [decision.epoch for decision in history]
        assert epochs == list(range(epochs[0], epochs[0] + len(epochs))), epochs
        for decision in history:
            assert known.setdefault(decision.epoch, decision) == decision
    return max(histories, key=len)
