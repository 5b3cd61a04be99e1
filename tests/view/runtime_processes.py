"""Real processes, each with a `Runtime` of its own, that do what a test tells them over a pipe, and may be killed."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from epee.link.address import listen
from epee.view.protocol.events import AgentSettings
from epee.view.protocol.messages import Decision, GroupState, Member
from epee.view.runtime import Runtime
from epee.view.transport.auth import JOB_ID_BYTES, TOKEN_BYTES
from epee.view.transport.directory import JobDirectory
from tests.harness import server

PATIENT = AgentSettings(policy="error")
EVICT = AgentSettings(policy="evict", answer_s=0.1, wait_limit_s=0.6)
LANE = 7
HOST_TIMEOUT_S = 2.0


class EngineStandIn:
    """An engine that does nothing but note what it is told."""

    def __init__(self, slot: int) -> None:
        self.is_frozen = False
        self.num_freezes = 0
        self.decisions: list[tuple[Decision, float]] = []
        self.troubles: list[str] = []
        self.state = GroupState(LANE, 10 + slot, 11 + slot)

    def freeze(self) -> GroupState:
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

    def __init__(self, slot: int, folder: str, settings: AgentSettings, host: str = "") -> None:
        if folder:
            os.environ["EPEE_RUNTIME_DIR"] = folder
        if host:
            os.environ.update(EPEE_TEST="1", EPEE_HOST_KEY=host, EPEE_HOST_TIMEOUT_S=str(HOST_TIMEOUT_S))
        self.slot, self.settings = slot, settings
        self.runtime: Runtime | None = None
        self.engine = EngineStandIn(slot)

    def create(self) -> str:
        self.job = JobDirectory.create("test")
        return str(self.job.path)

    def prepare(self, path: str) -> Member:
        job = self.job if hasattr(self, "job") else JobDirectory.open(path)
        self.runtime = Runtime(job, self.slot, self.settings)
        self.runtime.listen()
        return self.runtime.member

    def enter(self, job_id: bytes, address: str = "127.0.0.1") -> Member:
        """As `prepare`, in a job over several hosts."""
        job = JobDirectory.enter("test", job_id, b"t" * TOKEN_BYTES)
        self.runtime = Runtime(job, self.slot, self.settings, listener=listen(address))
        self.runtime.listen()
        return self.runtime.member

    def start(self, members: list[Member]) -> Decision:
        assert self.runtime is not None
        first = self.runtime.start(members)
        self._register()
        return first

    def join(self, timeout_s: float, contacts: Sequence[Member] = ()) -> Decision:
        assert self.runtime is not None
        decision = self.runtime.join(timeout_s, contacts=contacts)
        self._register()
        return decision

    def _register(self) -> None:
        assert self.runtime is not None
        engine = self.engine
        engine.decisions.append((self.runtime.view(), time.monotonic()))
        self.row = self.runtime.register(LANE, engine.freeze, engine.thaw, engine.decided, engine.trouble)

    def tell(self, data: bytes) -> None:
        self.row.tell(data)

    def call(self, name: str, *args: Any) -> Any:
        return getattr(self.runtime, name)(*args)

    def healths(self, num_ranks: int) -> list[bool]:
        """Return of each rank whether it can be reached."""
        assert self.runtime is not None
        return [self.runtime.health(slot) in ("running", "reachable") for slot in range(num_ranks)]

    def error(self) -> str:
        assert self.runtime is not None
        return type(self.runtime.error).__name__

    def history(self) -> list[Decision]:
        """Return the views that the group was told, each once (a group_id may hear of the first one twice)."""
        seen: list[Decision] = []
        for decision, _ in self.engine.decisions:
            if decision not in seen:
                seen.append(decision)
        return seen

    def decided_at(self) -> float:
        return self.engine.decisions[-1][1]

    def lane_facts(self) -> tuple[bool, int, list[str]]:
        """Return (frozen, how often, troubles); the thaw comes a moment after the decision."""
        deadline = time.monotonic() + 5.0
        while self.engine.is_frozen and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.engine.is_frozen, self.engine.num_freezes, self.engine.troubles

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


def _main(connection: Any, slot: int, folder: str, settings: AgentSettings, host: str) -> None:
    process = Process(slot, folder, settings, host)
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

    def __init__(self, slot: int, folder: str, settings: AgentSettings, host: str = "") -> None:
        self.slot, self.host = slot, host
        self.process, self._connection = server.fork(_main, slot, folder, settings, host)
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

    def spawn(self, slot: int, host: str = "") -> Rank:
        rank = Rank(slot, self.folder, self.settings, host)
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

    def born_over(self, hosts: str) -> list[Rank]:
        """Start founders on several hosts that are one machine: a letter each says which."""
        self.job_id = secrets.token_bytes(JOB_ID_BYTES)
        ranks = [self.spawn(slot, host) for slot, host in enumerate(hosts)]
        for rank in ranks:
            rank.tell("enter", self.job_id)
        members = [rank.answer() for rank in ranks]
        for rank in ranks:
            rank.tell("start", members)
        assert len({rank.answer() for rank in ranks}) == 1
        return ranks

    def joiner_on(self, host: str, slot: int) -> Rank:
        """Start a process on a host that may ask to join as `slot`."""
        rank = self.spawn(slot, host)
        rank.ask("enter", self.job_id)
        return rank

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
