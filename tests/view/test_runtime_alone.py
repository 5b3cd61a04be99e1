"""A runtime within one process: its life, its end, its forks, its errors; and that bad clients change nothing."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epee.errors import (
    EvictedError,
    ForkError,
    InvalidArgument,
    InvalidState,
    NoQuorumError,
    ProtocolError,
    ResourceError,
)
from epee.memory.shared import process_start_time
from epee.view.process.board import BoardView
from epee.view.process.peers import Peers
from epee.view.protocol.events import AgentSettings, Freeze, Thaw
from epee.view.protocol.messages import (
    Accept,
    Ask,
    Ballot,
    Commit,
    Decision,
    GroupState,
    Join,
    Member,
    Prepare,
)
from epee.view.runtime import Runtime, first_view
from epee.view.transport import auth, switchboard
from epee.view.transport import switchboard as connection
from epee.view.transport.directory import JobDirectory
from epee.view.transport.wire import encode, pack_endpoint, parse_endpoint
from tests.forked import Program

NONCE = b"n" * 16


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPEE_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def alone() -> Iterator[Runtime]:
    runtime = Runtime(JobDirectory.create(), 3)
    runtime.start([runtime.member])
    yield runtime
    runtime.close()


def num_connections(runtime: Runtime) -> int:
    """Open connections, both ways."""
    board = runtime._running().switchboard
    return len(board._outgoing) + len(board._incoming)


def usage() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def state(group_id: int) -> GroupState:
    return GroupState(group_id, 0, 0)


def ignore(*_: object) -> None:
    return None


# ---- life and end


def test_one_process_is_a_view_of_its_own(alone: Runtime) -> None:
    view = alone.view()
    assert (view.epoch, [m.slot for m in view.members]) == (1, [3])
    assert alone.member.incarnation == 1
    assert alone.error is None
    assert alone.await_decision(0, 1.0) == view
    assert alone.await_decision(1, 0.05) is None


def test_fifty_rounds_leave_nothing(runtime_dir: Path) -> None:
    def round_() -> None:
        runtime = Runtime(JobDirectory.create(), 0)
        runtime.start([runtime.member])
        runtime.register(1, lambda: state(1), ignore, ignore, ignore)
        runtime.close()
        runtime.close()

    round_()
    before = usage()
    for _ in range(50):
        round_()
    until(lambda: usage() <= before)
    assert list(runtime_dir.iterdir()) == []


def test_a_runtime_that_never_started_can_be_closed(runtime_dir: Path) -> None:
    first = Runtime(JobDirectory.create(), 0)
    first.close()
    second = Runtime(JobDirectory.create(), 0)
    second.listen()
    second.close()
    assert list(runtime_dir.iterdir()) == []
    with pytest.raises(InvalidState, match="closed"):
        second.view()


def test_what_breaks_a_rule_is_refused() -> None:
    job = JobDirectory.create()
    for slot in (-1, 64):
        with pytest.raises(InvalidArgument, match=r"slot must lie in 0 \.\.\. 63"):
            Runtime(job, slot)
    for settings in (
        AgentSettings(policy="x"),
        AgentSettings(answer_s=0),
        AgentSettings(wait_limit_s=float("nan")),
        AgentSettings(silence_s=0.0),
        AgentSettings(admit=""),
    ):
        with pytest.raises(InvalidArgument):
            Runtime(job, 0, settings)
    with pytest.raises(InvalidArgument, match="extra"):
        Runtime(job, 0, extra=bytes(641))
    runtime = Runtime(job, 0)
    with pytest.raises(InvalidState, match="no member yet"):
        runtime.view()
    with pytest.raises(InvalidState, match="not started"):
        runtime.accuse(0, 1, 1, 1 << 40) if runtime._loop else runtime._running()
    with pytest.raises(InvalidArgument, match="this process"):
        runtime.start([runtime.member._replace(nonce=NONCE)])
    with pytest.raises(InvalidArgument, match="every slot once"):
        runtime.start([runtime.member, runtime.member._replace(nonce=NONCE)])
    runtime.start([runtime.member])
    with pytest.raises(InvalidState, match="started already"):
        runtime._run()
    runtime.close()


def test_lanes_come_and_go(alone: Runtime) -> None:
    row = alone.register(1, lambda: state(1), ignore, ignore, ignore)
    row.show(b"barrier", 1, 1)
    with pytest.raises(InvalidArgument, match="be new"):
        alone.register(1, lambda: state(1), ignore, ignore, ignore)
    with pytest.raises(InvalidArgument):
        alone.register(-1, lambda: state(1), ignore, ignore, ignore)
    alone.unregister(1)
    alone.unregister(1)
    alone.register(1, lambda: state(1), ignore, ignore, ignore)


def test_a_lane_ends_without_an_error_though_the_process_is_voted_out_meanwhile(alone: Runtime) -> None:
    alone.register(1, lambda: state(1), ignore, ignore, ignore)
    loop = alone._running()
    asked = threading.Event()

    def be_voted_out() -> None:
        """End the loop when somebody waits for it."""
        assert asked.wait(10)
        loop.shared.error = EvictedError("slot 0 was voted out")
        loop._is_running = False
        loop._inbox.clear()

    def post(function: Callable[[], None]) -> None:
        plain(function)
        asked.set()

    loop.post(be_voted_out)
    plain, loop.post = loop.post, post  # type: ignore[method-assign]
    alone.unregister(1)
    assert loop.shared.has_ended


def test_a_lane_that_comes_during_an_agreement_waits_for_its_end(alone: Runtime) -> None:
    alone.register(1, lambda: state(1), ignore, ignore, ignore)
    loop = alone._running()
    frozen, calls = threading.Event(), []
    loop.post(lambda: (loop._freeze(Freeze(1)), loop._events.clear(), frozen.set()))  # type: ignore[arg-type, func-returns-value]
    assert frozen.wait(10)

    def register() -> None:
        alone.register(2, lambda: state(2), ignore, ignore, ignore)
        calls.append("registered")

    thread = threading.Thread(target=register)
    thread.start()
    while not loop._later:
        time.sleep(0.001)
    assert calls == []
    loop.post(lambda: loop._thaw(Thaw()))
    thread.join(20)
    assert calls == ["registered"]
    assert sorted(loop._groups) == [1, 2]


def test_a_lane_that_waited_in_vain_is_not_taken_in_later(alone: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = alone.settings
    loop = alone._running()
    loop.post(lambda: (loop._freeze(Freeze(1)), loop._events.clear())[1])  # type: ignore[func-returns-value]
    with monkeypatch.context() as hasty:
        hasty.setattr("epee.view.runtime.ANSWER_S", 0.2)
        alone.settings = patient._replace(no_quorum_s=0.1)
        with pytest.raises(NoQuorumError, match="too few members answer"):
            alone.register(2, lambda: state(2), ignore, ignore, ignore)
    alone.settings = patient
    loop.post(lambda: loop._thaw(Thaw()))
    alone.register(3, lambda: state(3), ignore, ignore, ignore)
    assert sorted(loop._groups) == [3]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on fork with threads
def test_a_fork_has_no_part_in_it(alone: Runtime) -> None:
    before, loop = alone.view(), alone._running()
    fds = (loop._poll.fileno(), loop._bell, alone._board._region._fd, alone._job._folder_fd, alone._door.fd)
    shared = {fd for fd in descriptors() if int(fd.split()[0]) in fds}
    assert len(shared) == 5
    child = os.fork()
    if child == 0:
        try:
            alone.view()
        except ForkError:
            with contextlib.suppress(ForkError):
                alone.accuse(3, 1, 1, 1 << 40)
                os._exit(2)
            alone.close()
            os._exit(3 if shared & descriptors() else 0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert alone.view() == before
    alone.register(1, lambda: state(1), ignore, ignore, ignore)  # the thread still answers
    Client(alone).hello().close()


def descriptors() -> set[str]:
    """Return number, target and inode of all open descriptors."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = f"/proc/self/fd/{fd}"
            found.add(f"{fd} {os.readlink(link)} {os.stat(link).st_ino}")
    return found


LEAVING = """
import os, sys
from epee.view.transport.directory import JobDirectory
from epee.view.runtime import Runtime
runtime = Runtime(JobDirectory.create(), 0)
runtime.start([runtime.member])
kept = runtime
if sys.argv[1] == "thread":
    raise SystemExit(0)
"""


@pytest.mark.parametrize("way", ["end", "thread"])
def test_a_script_that_ends_without_close_ends_well(runtime_dir: Path, way: str) -> None:
    with Program(LEAVING, way) as process:
        told, _ = process.communicate(50)
        assert (process.returncode, told) == (0, "")
    assert list(runtime_dir.iterdir()) == []


def test_an_error_on_the_agent_thread_is_told_to_everybody(alone: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Exception] = []
    alone.register(1, lambda: state(1), ignore, ignore, told.append)

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    loop = alone._running()
    loop.post(fail)
    until(lambda: loop.shared.has_ended)
    assert "a bug" in str(told[0])
    with pytest.raises(InvalidState, match="has ended") as error:
        alone.await_decision(1, 5.0)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert "has failed" in caplog.text
    alone.close()


def test_close_from_a_hook_does_not_lock_up(alone: Runtime) -> None:
    loop = alone._running()
    loop.post(alone.close)
    until(lambda: loop.shared.has_ended)
    alone.close()


def test_close_wakes_who_waits(alone: Runtime) -> None:
    errors: list[Exception] = []

    def wait() -> None:
        try:
            alone.await_decision(1, 30.0)
        except InvalidState as exc:
            errors.append(exc)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    alone.close()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 4


# ---- bad clients


class Client:
    """Somebody who connects to a runtime's socket."""

    def __init__(self, target: Runtime, token: auth.Token | None = None) -> None:
        self.job = target._job
        self.peer = auth.Identity(*target.member[:3])
        self.me = auth.Identity(5, 0, os.urandom(16))
        self.token = token or self.job.token
        self.socket = self._connect(f"{self.peer.slot}-{self.peer.nonce.hex()}")
        self.socket.setblocking(True)
        self.socket.settimeout(20)

    def _connect(self, name: str) -> socket.socket:
        """Connect like an agent: again, where more than can be queued are before this one."""
        deadline = time.monotonic() + 20
        while True:
            try:
                return self.job.connect(name)
            except BlockingIOError:
                assert time.monotonic() < deadline
                time.sleep(0.005)

    def hello(self) -> Client:
        """Do the handshake."""
        initiator = auth.Initiator(self.token, self.job.job_id, self.me, self.peer)
        self.socket.sendall(initiator.hello())
        challenge = self.socket.recv(auth.CHALLENGE_BYTES, socket.MSG_WAITALL)
        proof, self.sealer = initiator.answer(challenge)
        self.socket.sendall(proof)
        return self

    def send(self, data: bytes) -> Client:
        self.socket.sendall(data)
        return self

    def is_closed(self) -> bool:
        """Wait until the other side has hung up."""
        try:
            while self.socket.recv(1000):
                pass
        except ConnectionResetError:
            pass
        self.socket.close()
        return True

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def quiet(alone: Runtime) -> Iterator[Runtime]:
    """A runtime that must be as before when the test ends."""
    view, epoch_words = alone.view(), alone._board
    yield alone
    assert alone.view() == view
    assert alone.error is None
    assert alone.waiting() == ()
    assert epoch_words is alone._board
    friend = Client(alone).hello()  # who belongs here still gets in
    friend.close()


def dropped(runtime: Runtime, reason: str, count: int = 1) -> None:
    until(lambda: runtime.dropped().get(reason, 0) >= count)


def test_garbage_is_dropped(quiet: Runtime) -> None:
    rng = random.Random(8)
    for size in (auth.HELLO_BYTES, auth.HELLO_BYTES + 1, 4096, 1 << 16):
        client = Client(quiet)
        with contextlib.suppress(OSError):
            client.send(rng.randbytes(size))
        assert client.is_closed()
    dropped(quiet, "malformed", 4)


def test_a_wrong_token_gets_nowhere(quiet: Runtime) -> None:
    client = Client(quiet, auth.Token(b"w" * 32))
    initiator = auth.Initiator(client.token, client.job.job_id, client.me, client.peer)
    client.send(initiator.hello())
    challenge = client.socket.recv(auth.CHALLENGE_BYTES, socket.MSG_WAITALL)
    client.send(client.token.derive(b"initiator", initiator.hello() + challenge[:-32]))
    assert client.is_closed()
    dropped(quiet, "not proved")


def test_a_replayed_connection_gets_nowhere(quiet: Runtime) -> None:
    recorded = bytearray()
    honest = Client(quiet)
    initiator = auth.Initiator(honest.token, honest.job.job_id, honest.me, honest.peer)
    honest.send(initiator.hello())
    proof, sealer = initiator.answer(honest.socket.recv(auth.CHALLENGE_BYTES, socket.MSG_WAITALL))
    recorded += initiator.hello() + proof + sealer.seal(encode(Ask(1)))
    honest.send(proof).close()
    replay = Client(quiet)
    with contextlib.suppress(OSError):
        replay.send(bytes(recorded))
    assert replay.is_closed()
    dropped(quiet, "not proved")


def test_frames_that_are_changed_or_repeated_end_the_connection(quiet: Runtime) -> None:
    client = Client(quiet).hello()
    frame = client.sealer.seal(encode(Prepare(Ballot(9, 5), 1)))
    assert client.send(frame + frame).is_closed()
    changed = Client(quiet).hello()
    frame = bytearray(changed.sealer.seal(encode(Prepare(Ballot(9, 5), 1))))
    frame[10] ^= 1
    assert changed.send(bytes(frame)).is_closed()
    dropped(quiet, "not proved", 2)


def test_a_length_of_two_gigabytes_costs_nothing(quiet: Runtime) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert Client(quiet).hello().send((2 << 30).to_bytes(4, "little")).is_closed()
    dropped(quiet, "malformed")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_sealed_frame_of_nonsense_ends_the_connection(quiet: Runtime) -> None:
    client = Client(quiet).hello()
    assert client.send(client.sealer.seal(b"\x07nonsense")).is_closed()
    dropped(quiet, "malformed")


def test_a_stranger_with_the_token_cannot_vote(quiet: Runtime) -> None:
    client = Client(quiet).hello()
    board = BoardView.attach(parse_endpoint(quiet.member.endpoint).board)
    before = board.read()
    for message in (
        Prepare(Ballot(9, 5), 1),
        Prepare(Ballot(9, 3), 1),
        Accept(Ballot(9, 5), 1, Decision(2, ())),
        Ask(0),
    ):
        client.send(client.sealer.seal(encode(message)))
    marker = Client(quiet).hello()
    assert marker.send(b"\0\0\0\0").is_closed()  # by now the others were read
    assert board.read() == before
    client.close()
    board.close()


def test_a_joiner_that_lies_about_its_process_is_not_heard(quiet: Runtime) -> None:
    client = Client(quiet).hello()
    good = parse_endpoint(quiet.member.endpoint)
    for endpoint in (pack_endpoint(good._replace(pid=1)), b"nonsense", bytes(1024)):
        client.send(client.sealer.seal(encode(Join(Member(5, 0, client.me.nonce, endpoint, quiet.member.host)))))
    dropped(quiet, "malformed", 3)
    client.send(client.sealer.seal(encode(Join(Member(5, 0, client.me.nonce, quiet.member.endpoint, "elsewhere")))))
    dropped(quiet, "malformed", 4)
    unreadable = pack_endpoint(good._replace(board=bytes(len(good.board))))
    client.send(client.sealer.seal(encode(Join(Member(5, 0, client.me.nonce, unreadable, quiet.member.host)))))
    until(lambda: quiet._running().peers.get(client.me.nonce) is not None)
    client.close()


def test_strangers_that_say_nothing_make_room_for_others(quiet: Runtime) -> None:
    before = usage()[0]
    silent = []
    for _ in range(switchboard.MAX_STRANGERS + 100):
        with contextlib.suppress(BlockingIOError):
            silent.append(Client(quiet))
    dropped(quiet, "too many", 50)
    assert num_connections(quiet) <= switchboard.MAX_STRANGERS
    friend = Client(quiet).hello()
    friend.send(friend.sealer.seal(encode(Ask(1))))
    for client in silent:
        client.close()
    friend.close()
    until(lambda: usage()[0] <= before)


def test_a_slow_handshake_is_cut_off(quiet: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hasty:  # whoever comes at the end has the usual time
        hasty.setattr(connection, "HANDSHAKE_S", 0.3)
        client = Client(quiet)
        client.send(b"epeectl\0")
        assert client.is_closed()
        half = Client(quiet)
        half.send(auth.Initiator(half.token, half.job.job_id, half.me, half.peer).hello())
        assert half.is_closed()
        dropped(quiet, "late", 2)


def test_a_flood_of_bad_connections_is_survived(quiet: Runtime) -> None:
    rng = random.Random(9)
    for _ in range(1000):
        with contextlib.suppress(OSError):
            client = Client(quiet)
            client.socket.setblocking(False)
            client.socket.send(rng.randbytes(rng.randrange(1, 300)))
            client.close()
    until(lambda: num_connections(quiet) == 0)


def test_when_descriptors_run_out_the_agent_goes_on(quiet: Runtime) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [Client(quiet) for _ in range(3)]
    used = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        until(lambda: num_connections(quiet) >= 3)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
        fillers = []
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        probe.connect(quiet._job._address(f"3-{quiet.member.nonce.hex()}"))
        dropped(quiet, "no descriptor")
        for fd in fillers:
            os.close(fd)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        probe.close()
        for client in clients:
            client.close()
    Client(quiet).hello().close()


def test_another_jobs_process_gets_nowhere(quiet: Runtime) -> None:
    other = JobDirectory.create()
    client = Client(quiet, other.token)
    client.send(auth.Initiator(other.token, other.job_id, client.me, client.peer).hello())
    assert client.is_closed()
    dropped(quiet, "malformed")
    other.leave()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_is_refused_even_where_the_folder_lets_it_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("EPEE_RUNTIME_DIR", folder + "/run")
        runtime = Runtime(JobDirectory.create(), 3)
        runtime.start([runtime.member])
        for path in (Path(folder) / "run", runtime._job.path):
            path.chmod(0o755)
        address = runtime._job.path / f"3-{runtime.member.nonce.hex()}"
        address.chmod(0o666)
        link = Path(folder) / "s"
        link.symlink_to(address)
        probe = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(1))"
        command = [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "/usr/bin/env",
            "python3",
            "-c",
            probe,
        ]
        done = subprocess.run([*command, str(link)], capture_output=True, text=True, timeout=20)
        assert done.stdout.strip() == "b''" or "ConnectionReset" in done.stderr
        dropped(runtime, "not proved")
        link.unlink()
        runtime.close()


def test_the_token_shows_nowhere(alone: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    secret = (alone._job.path / "token").read_bytes()
    forms = (secret, secret.hex().encode(), repr(secret).encode())
    places = [Path("/proc/self/cmdline").read_bytes(), Path("/proc/self/environ").read_bytes(), caplog.text.encode()]
    places += [repr(alone).encode(), repr(vars(alone)).encode(), repr(vars(alone._job)).encode(), alone.member.endpoint]
    assert not any(form in place for form in forms for place in places)


def test_nothing_listens_on_the_network(request: pytest.FixtureRequest) -> None:
    others = _open_files()  # of other tests of this process
    assert isinstance(request.getfixturevalue("alone"), Runtime)
    mine = _open_files() - others
    assert any(name.startswith("socket:") for name in mine)
    listening = [line.split() for name in ("tcp", "tcp6") for line in _lines(name) if line.split()[3] == "0A"]
    assert not [row for row in listening if f"socket:[{row[9]}]" in mine]


def _open_files() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)}


def _exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def _lines(name: str) -> list[str]:
    path = Path("/proc/self/net") / name
    return path.read_text().splitlines()[1:] if path.exists() else []


# ---- peers


def test_an_event_of_an_older_descriptor_is_no_proof_of_death(alone: Runtime) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        good = parse_endpoint(alone.member.endpoint)
        endpoint = good._replace(pid=process.pid, start_time=process_start_time(process.pid))
        poll = select.epoll()
        others = Peers(NONCE, poll, "")
        with pytest.raises(ProtocolError, match="not believed"):
            others.add(Member(1, 1, b"p" * 16, pack_endpoint(endpoint)), os.getpid())
        assert others.add(Member(1, 1, b"p" * 16, pack_endpoint(endpoint))) is True
        assert not others.is_mapped(b"p" * 16), "the board is another's"
        (fd,) = others._nonce_of
        assert others.died(fd) is None, "it lives"
        assert others.died(0) is None, "no pidfd"
        process.kill()
        assert poll.poll(20) == [(fd, select.EPOLLIN)]
        dead = others.died(fd)
        assert dead is not None
        assert dead.health(time.monotonic()) == "dead"
        assert others.died(fd) is None
        others.close()
        poll.close()


def test_a_pid_that_changed_hands_is_not_taken_for_the_process_that_is_meant(alone: Runtime) -> None:
    endpoint = parse_endpoint(alone.member.endpoint)._replace(pid=1)
    poll = select.epoll()
    others = Peers(NONCE, poll, "")
    assert others.add(Member(1, 1, b"p" * 16, pack_endpoint(endpoint))) is False
    with pytest.raises(ResourceError, match="no witness"):
        others.read_board(b"p" * 16)
    others.retire(Decision(2, ()))
    assert others.get(b"p" * 16) is None
    others.close()
    poll.close()


# ---- the switchboard


def test_messages_to_a_peer_that_does_not_read_are_dropped_not_waited_for() -> None:
    job = JobDirectory.create()
    door, own = job.listen(1, NONCE, 8), job.listen(0, b"m" * 16, 8)
    poll = select.epoll()
    board = switchboard.Switchboard(job, auth.Identity(0, 1, b"m" * 16), own, poll)
    peer = Member(1, 1, NONCE, b"")
    big = Commit(tuple(Decision(n, (Member(1, 1, NONCE, bytes(1000)),)) for n in range(1, 9)))
    for _ in range(2 * connection.MAX_QUEUED_BYTES // len(encode(big))):
        board.send(peer, big, time.monotonic())
    assert board.dropped["queue full"] > 0
    assert not board.is_idle
    assert board.expire(time.monotonic() + 2 * connection.HANDSHAKE_S) == float("inf")
    assert board.is_idle
    door.close()
    board.send(peer, Ask(1), time.monotonic())
    board.send(peer._replace(nonce=b"x" * 16), Ask(1), time.monotonic())
    assert board.dropped["unreachable"] == 2
    board.close()
    poll.close()
    job.leave()


def test_a_long_commit_is_cut_into_frames() -> None:
    decisions = tuple(
        Decision(n, tuple(Member(slot, 1, bytes([slot]) * 16, bytes(1000)) for slot in range(64))) for n in range(1, 40)
    )
    parts = switchboard._parts(Commit(decisions))
    assert [part.decisions[0] for part in parts] == list(decisions)  # type: ignore[union-attr]
    assert all(encode(part) for part in parts)
    assert [part.answers for part in switchboard._parts(Commit(decisions, 7))] == [*([0] * 38), 7]  # type: ignore[union-attr]
    assert switchboard._parts(Ask(1)) == [Ask(1)]
    assert first_view([Member(1, 0, NONCE, b"")]).members[0].incarnation == 1


# ---- the folder


def test_that_the_folder_has_vanished_is_said_once(alone: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(alone._job.path)
    for _ in range(3):
        alone._ask(lambda done: (alone._running()._look_around(), done()))
    told = [record for record in caplog.records if "was removed" in record.message]
    assert len(told) == 1
    assert str(alone._job.path) in told[0].message
    assert "EPEE_RUNTIME_DIR" in told[0].message
    assert alone.view().epoch == 1
