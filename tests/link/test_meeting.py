"""How partners find each other: all who belong meet, no stranger is let in or keeps them apart, nothing stays open."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epee.errors import CommTimeoutError, ProtocolError
from epee.link import meeting
from epee.link.address import listen
from epee.link.meeting import MAX_STRANGERS, Connected, Meeting, Partner
from epee.view.transport.auth import CHALLENGE_BYTES, HELLO_BYTES, Identity, Initiator, Responder, Token
from tests.harness import run_ranks
from tests.survive import stages

from .pairs import BOUND_S, num_open, reset, until

JOB, TOKEN = bytes(range(16)), b"t" * 32


class Somebody:
    """One process of a group: a listener, an identity, and a thread that meets its partners."""

    def __init__(self, rank: int, token: bytes = TOKEN, job: bytes = JOB, address: str = "127.0.0.1") -> None:
        self.rank = rank
        self.listener = listen(address)
        self.where = self.listener.getsockname()[:2]
        self.who = Identity(rank, 0, os.urandom(16))
        self.token, self.job = Token(token), job
        self.met: dict[int, Connected] = {}
        self.error: BaseException | None = None
        self.most_talks = 0

    @property
    def partner(self) -> Partner:
        return Partner(*self.where, self.who)

    def start(self, partners: list[Partner], wait_s: float = BOUND_S, check: Callable[[], object] = int) -> Somebody:
        self.meeting = Meeting(
            self.token, self.job, self.who, {each.who.slot: each for each in partners}, self.listener
        )
        deadline = time.monotonic() + wait_s

        def look() -> None:
            self.most_talks = max(self.most_talks, len(self.meeting._talks))
            check()

        def run() -> None:
            try:
                self.met = self.meeting.run(deadline, look)
            except BaseException as exc:  # noqa: BLE001 - the test looks at it
                self.error = exc

        self._thread = threading.Thread(target=run)
        self._thread.start()
        return self

    def join(self) -> Somebody:
        self._thread.join(2 * BOUND_S)
        assert not self._thread.is_alive()
        return self

    def close(self) -> None:
        for met in self.met.values():
            met.connection.close()
        self.listener.close()


@pytest.fixture(autouse=True)
def _nothing_stays_open(request: pytest.FixtureRequest) -> Iterator[None]:
    gc.collect()
    opened, threads = num_open(), threading.active_count()
    yield
    if request.node.name == "test_processes_meet":  # it may have started the server of the processes, which stays
        return
    assert num_open() == opened
    assert threading.active_count() == threads


@contextlib.contextmanager
def group(num_ranks: int, **kwargs: Any) -> Iterator[list[Somebody]]:
    members = [Somebody(rank, **kwargs) for rank in range(num_ranks)]
    try:
        yield members
    finally:
        for each in members:
            each.close()


def start_all(members: list[Somebody], **kwargs: Any) -> None:
    for each in members:
        each.start([other.partner for other in members if other is not each], **kwargs)


def check_met(members: list[Somebody]) -> None:
    """All are connected with all, with the keys of each direction on both ends, and bytes pass."""
    for each in members:
        each.join()
    assert [each.error for each in members] == [None] * len(members)
    keys = set()
    for left, right in itertools.combinations(members, 2):
        ours, theirs = left.met[right.rank], right.met[left.rank]
        assert ours.out_key == theirs.in_key
        assert ours.in_key == theirs.out_key
        assert ours.connection.getpeername() == theirs.connection.getsockname()
        keys |= {ours.out_key, ours.in_key}
        ours.connection.send(b"ping")
        until(lambda theirs=theirs: _peek(theirs.connection) == b"ping")
    assert len(keys) == len(members) * (len(members) - 1), "each direction has a key of its own"
    assert all(len(each.met) == len(members) - 1 for each in members)
    assert all(each.listener.fileno() == -1 for each in members), "nobody listens any more"


def _peek(connection: socket.socket) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return connection.recv(100, socket.MSG_PEEK)
    return b""


def call(where: Any, data: bytes = b"") -> socket.socket:
    """Connect as a stranger and say something."""
    connection = socket.create_connection(where, timeout=BOUND_S)
    with contextlib.suppress(OSError):
        connection.sendall(data)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Read to the end; True when the other side has closed. At most a refusal is said before."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(4096):
            said += data
            assert len(said) <= CHALLENGE_BYTES
    return True


# ---- who belongs


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_all_partners_meet(num_ranks: int) -> None:
    with group(num_ranks) as members:
        start_all(members)
        check_met(members)


def test_partners_meet_over_ipv6() -> None:
    try:
        listen("::1").close()
    except OSError as exc:
        pytest.skip(f"this machine has no IPv6: {exc}")
    with group(2, address="::1") as members:
        start_all(members)
        check_met(members)


def _meet(rank: int, num_ranks: int, folder: str, nonces: list[bytes]) -> list[int]:
    """One of several processes: listens, says where, meets, says who came.

    A port that the test had chosen for it could be another process's by now.
    """
    listener = listen(f"127.0.91.{1 + rank}")
    (Path(folder) / f"port-{rank}").write_text(str(listener.getsockname()[1]))
    stages.meet(folder, "listens", rank, range(num_ranks))
    ports = [int((Path(folder) / f"port-{k}").read_text()) for k in range(num_ranks)]
    partners = {
        k: Partner(f"127.0.91.{1 + k}", ports[k], Identity(k, 0, nonces[k])) for k in range(num_ranks) if k != rank
    }
    made = Meeting(Token(TOKEN), JOB, Identity(rank, 0, nonces[rank]), partners, listener)
    met = made.run(time.monotonic() + BOUND_S, lambda: None)
    for peer, each in met.items():
        each.connection.setblocking(True)
        each.connection.settimeout(BOUND_S)
        each.connection.sendall(each.out_key)
        assert each.connection.recv(32, socket.MSG_WAITALL) == each.in_key, peer
    for each in met.values():
        each.connection.close()
    return sorted(met)


def test_processes_meet(tmp_path: Path) -> None:
    nonces = [os.urandom(16) for _ in range(3)]
    assert run_ranks(_meet, 3, str(tmp_path), nonces, backend=None) == [[1, 2], [0, 2], [0, 1]]


def test_a_partner_that_comes_late_is_met() -> None:
    with group(2) as members:
        late = members[1]
        members[0].start([late.partner])
        where = late.listener.getsockname()
        late.listener.close()  # nobody listens yet
        time.sleep(0.3)
        late.listener = socket.create_server(where)
        late.listener.setblocking(False)
        late.start([members[0].partner])
        check_met(members)


def test_a_partner_that_was_slow_in_its_proof_is_met_by_both_or_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who connects must not believe in a connection that the other side has given up meanwhile."""
    monkeypatch.setattr(meeting, "HANDSHAKE_S", 0.3)
    answer, times = Initiator.answer, []

    def slow(self: Initiator, challenge: bytes) -> Any:
        times.append(1)
        if len(times) == 1:
            time.sleep(1.0)
        return answer(self, challenge)

    monkeypatch.setattr(Initiator, "answer", slow)
    with group(2) as members:
        start_all(members)
        check_met(members)
    assert len(times) > 1


def test_a_partner_whose_first_connection_breaks_calls_again() -> None:
    with group(2) as members:
        left, right = members
        proxy = listen("127.0.0.1")
        proxy.setblocking(True)
        left.start([right.partner._replace(port=proxy.getsockname()[1])])
        right.start([left.partner])
        for cut in range(3):  # at once; behind the hello; behind half a hello
            connection, _ = proxy.accept()
            connection.settimeout(BOUND_S)
            if cut:
                connection.recv(HELLO_BYTES if cut == 1 else 10, socket.MSG_WAITALL)
            reset(connection)
        proxy.close()  # now nobody answers there
        left.meeting._partners = {1: right.partner}
        check_met(members)


# ---- who does not belong


def stranger_says(kind: str, victim: Somebody, other: Somebody) -> bytes:
    """What a stranger of a kind says first."""
    token, wrong = Token(TOKEN), Token(b"w" * 32)
    return {
        "nothing": b"",
        "one byte": b"e",
        "garbage": bytes(range(256)) * 8,
        "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".ljust(HELLO_BYTES, b" "),
        "wrong token": Initiator(wrong, JOB, other.who, victim.who).hello(),
        "other job": Initiator(token, b"j" * 16, other.who, victim.who).hello(),
        "other addressee": Initiator(token, JOB, other.who, other.who).hello(),
        "own identity": Initiator(token, JOB, victim.who, victim.who).hello(),
        "unknown rank": Initiator(token, JOB, Identity(7, 0, b"s" * 16), victim.who).hello(),
    }[kind]


KINDS = ["nothing", "one byte", "garbage", "http", "wrong token", "other job", "other addressee", "own identity"]


@pytest.mark.parametrize("kind", [*KINDS, "unknown rank"])
def test_a_stranger_is_not_let_in_and_the_right_ones_meet(kind: str) -> None:
    with group(2) as members:
        left, right = members
        right.start([left.partner])
        strangers = [call(right.where, stranger_says(kind, right, left)) for _ in range(5)]
        try:
            time.sleep(0.02)
            left.start([right.partner])
            check_met(members)
            assert all(is_closed(each) for each in strangers)
        finally:
            for each in strangers:
                each.close()


def attempt(victim: Somebody, who: Identity, token: bytes = TOKEN, proof: bytes | None = None) -> bool:
    """Do a whole handshake as `who`; True when a welcome came."""
    initiator = Initiator(Token(token), JOB, who, victim.who)
    with call(victim.where, initiator.hello()) as connection:
        try:
            challenge = connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
            said = proof or initiator.answer(challenge)[0]
            connection.sendall(said)
            return bool(connection.recv(32, socket.MSG_WAITALL))
        except OSError:
            return False


def test_nobody_speaks_for_another_rank() -> None:
    """A holder of the token is let in only as the process that is waited for; without it, as nobody."""
    with group(3) as members:
        left, middle, right = members
        middle.start([left.partner, right.partner])
        nonce = b"s" * 16
        assert not attempt(middle, Identity(0, 0, nonce)), "rank 0 is another process"
        assert not attempt(middle, left.who._replace(incarnation=1)), "an earlier or later one"
        assert not attempt(middle, Identity(7, 0, nonce)), "nobody's rank"
        assert not attempt(middle, right.who), "of this pair the other one calls"
        assert not attempt(middle, left.who, token=b"w" * 32)
        assert not attempt(middle, left.who, proof=bytes(32))
        left.start([middle.partner, right.partner])
        right.start([left.partner, middle.partner])
        check_met(members)


def test_a_recorded_handshake_opens_nothing() -> None:
    with group(3) as members:
        left, middle, right = members
        middle.start([left.partner, right.partner])
        initiator = Initiator(Token(TOKEN), JOB, left.who, middle.who)
        with call(middle.where, initiator.hello()) as first:
            proof, _ = initiator.answer(first.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
        with call(middle.where, initiator.hello()) as again:
            assert len(again.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
            again.sendall(proof)
            assert is_closed(again)
        left.start([middle.partner, right.partner])
        right.start([left.partner, middle.partner])
        check_met(members)


def test_somebody_at_a_partners_place_without_the_token_is_not_believed() -> None:
    with group(2) as members:
        left, right = members
        right.token = Token(b"w" * 32)
        left.start([right.partner], wait_s=0.5)
        right.start([left.partner], wait_s=0.5)
        for each in members:
            assert isinstance(each.join().error, CommTimeoutError)


@pytest.mark.parametrize("says", ["nothing", "garbage", "closes"])
def test_somebody_strange_at_a_partners_place_ends_in_a_timeout(says: str) -> None:
    with group(1) as members, listen("127.0.0.1") as place:
        place.setblocking(True)
        place.settimeout(BOUND_S)
        partner = Partner(*place.getsockname(), Identity(1, 0, b"n" * 16))
        members[0].start([partner], wait_s=0.5)
        connection, _ = place.accept()
        with connection:
            if says == "garbage":
                connection.sendall(bytes(CHALLENGE_BYTES))
            if says != "closes":
                members[0].join()
        assert isinstance(members[0].join().error, CommTimeoutError)


def flood(where: Any, stop: threading.Event, per_s: float, says: Callable[[], bytes], keeps: int) -> None:
    """Connect `per_s` times a second and say something; keep so many connections open."""
    kept: list[socket.socket] = []
    at = time.monotonic()
    try:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                connection = socket.socket()
                connection.setblocking(False)
                kept.append(connection)
                with contextlib.suppress(BlockingIOError):
                    connection.connect(where)
                connection.send(says())
            while len(kept) > keeps:
                kept.pop(0).close()
            at += 1 / per_s
            time.sleep(max(0.0, at - time.monotonic()))
    finally:
        for connection in kept:
            connection.close()


@pytest.mark.parametrize("kind", ["garbage", "silent", "hello"])
def test_a_thousand_strangers_a_second_do_not_keep_partners_apart(kind: str) -> None:
    choose = random.Random(1)
    with group(3) as members:
        stop = threading.Event()
        hello = Initiator(Token(b"w" * 32), JOB, members[0].who, members[2].who).hello()
        says = {"garbage": lambda: choose.randbytes(200), "silent": lambda: b"", "hello": lambda: hello}[kind]
        floods = [threading.Thread(target=flood, args=(each.where, stop, 500, says, 150)) for each in members[1:]]
        try:
            before = num_open()
            for each in members[1:]:
                each.start([other.partner for other in members if other is not each])
            for thread in floods:
                thread.start()
            most, until_ = 0, time.monotonic() + 0.5
            while time.monotonic() < until_:
                most = max(most, num_open())
                time.sleep(0.01)
            members[0].start([each.partner for each in members[1:]])
            check_met(members)
        finally:
            stop.set()
            for thread in floods:
                thread.join(BOUND_S)
        for each in members[1:]:
            assert each.most_talks <= MAX_STRANGERS + 2
        assert most - before <= 2 * (150 + 5) + 2 * (MAX_STRANGERS + 2) + 20


def test_a_talk_keeps_no_more_than_a_message_in_memory() -> None:
    with group(2) as members:
        left, right = members
        right.start([left.partner])
        with call(right.where, b"x" * (HELLO_BYTES - 1)) as stranger:
            until(lambda: any(len(talk.got) == HELLO_BYTES - 1 for talk in right.meeting._talks))
            with contextlib.suppress(ConnectionError):  # closed at the first wrong byte
                stranger.sendall(bytes(1 << 20))
            assert is_closed(stranger)
        left.start([right.partner])
        check_met(members)


def test_the_oldest_stranger_makes_room_first_one_that_has_said_nothing() -> None:
    with group(2) as members:
        left, right = members
        right.start([left.partner])
        hello = Initiator(Token(TOKEN), JOB, left.who, right.who).hello()
        speaker = call(right.where, hello)
        assert len(speaker.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        silent = [call(right.where) for _ in range(MAX_STRANGERS + 5)]
        try:
            for each in silent[:5]:
                assert is_closed(each)
            speaker.setblocking(False)
            with pytest.raises(BlockingIOError):
                speaker.recv(1)
            left.start([right.partner])
            check_met(members)
        finally:
            for each in (speaker, *silent):
                each.close()


# ---- while the group lives


def stay(members: list[Somebody]) -> list[Meeting]:
    """Make meetings that go on, of partners that have been met already."""
    made = []
    for each in members:
        meeting_ = Meeting(Token(TOKEN), JOB, each.who, {}, each.listener, stays=True)
        for other in members:
            if other is not each:
                meeting_.admit(other.rank, other.partner)
        meeting_.listen()
        made.append(meeting_)
    return made


@pytest.mark.parametrize("who_calls", ["the higher", "both"])
def test_a_higher_rank_calls_a_lower_one_that_does_not_know_of_it(who_calls: str) -> None:
    """Where both call at the same time there is one connection in the end, the same for both."""
    with group(2) as members:
        left, right = stay(members)
        right.want(0)
        assert not right.is_busy, "of this pair the lower one calls, where it knows that it has to"
        right.want(0, alone=True)
        if who_calls == "both":
            left.want(1)
        met: list[dict[int, Connected]] = [{}, {}]
        end = time.monotonic() + BOUND_S
        while left.is_busy or right.is_busy or not all(met):
            assert time.monotonic() < end
            for each, found in zip((left, right), met, strict=True):
                each.step(0.01)
                for peer, connected in each.take().items():
                    if peer in found:
                        found[peer].connection.close()
                    found[peer] = connected
        ours, theirs = met[0][1], met[1][0]
        assert (ours.out_key, ours.in_key) == (theirs.in_key, theirs.out_key)
        for connected in (ours, theirs):
            connected.connection.close()
        left.close()
        right.close()


# ---- ends


def test_a_partner_that_never_comes_is_named_with_its_place_and_what_to_do() -> None:
    with group(3) as members:
        members[0].start([members[1].partner, members[2].partner], wait_s=1.0)
        members[1].start([members[0].partner, members[2].partner], wait_s=1.0)
        where = members[2].where
        members[2].listener.close()
        for each in members[:2]:
            error = each.join().error
            assert isinstance(error, CommTimeoutError)
            assert error.ranks == (2,)
            text = str(error)
            assert f"rank={each.rank}" in text
            assert f"2 ({where[0]}:{where[1]})" in text
            assert "EPEE_HOST_IP" in text
            assert "epee doctor --peer HOST:PORT" in text
            assert each.met == {}
            assert each.listener.fileno() == -1


def test_a_check_that_raises_ends_the_wait_and_closes_everything() -> None:
    with group(3) as members:
        go = threading.Event()

        def check() -> None:
            if go.is_set():
                raise ProtocolError("rank 2 has failed")

        for each in members[:2]:
            each.start([other.partner for other in members if other is not each], check=check)
        stranger = call(members[1].where)
        until(lambda: len(members[0].meeting._met) == len(members[1].meeting._met) == 1)
        go.set()
        for each in members[:2]:
            assert str(each.join().error) == "rank 2 has failed"
            assert each.listener.fileno() == -1
            assert each.meeting._select.get_map() is None
        assert is_closed(stranger)
        stranger.close()


def test_no_descriptor_left_delays_a_meeting_and_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    with group(2) as members:
        right = members[1]
        refusals = 0

        class Poor:
            def accept(self) -> Any:
                nonlocal refusals
                refusals += 1
                if refusals < 4:
                    raise OSError(24, "Too many open files")
                return right_listener.accept()

            def __getattr__(self, name: str) -> Any:
                return getattr(right_listener, name)

        right_listener = right.listener
        right.listener = Poor()
        naps: list[float] = []
        sleep = time.sleep
        monkeypatch.setattr(meeting.time, "sleep", lambda s: naps.append(s) or sleep(s))
        start_all(members)
        check_met(members)
        assert len(naps) >= 3


class NoSockets:
    """The module `socket` as a meeting sees it that has no descriptor left, for so many calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        monkeypatch.setattr(meeting, "socket", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def socket(self, *args: Any) -> socket.socket:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return socket.socket(*args)


def test_no_descriptor_left_to_call_with_ends_a_birth(monkeypatch: pytest.MonkeyPatch) -> None:
    with group(2) as members:
        NoSockets(monkeypatch, 1)
        members[0].start([members[1].partner])
        error = members[0].join().error
        assert isinstance(error, OSError)
        assert error.errno == errno.EMFILE
        assert members[0].listener.fileno() == -1


def test_no_descriptor_left_to_call_with_delays_a_meeting_that_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The partner is called again soon, and the user is told once."""
    with group(2) as members:
        left, right = stay(members)
        NoSockets(monkeypatch, 3)
        left.want(1)
        before = time.monotonic()
        left.step()
        assert left.is_busy
        assert left._again[1] < before + meeting.HANDSHAKE_S
        met: list[dict[int, Connected]] = [{}, {}]
        end = time.monotonic() + BOUND_S
        while not all(met):
            assert time.monotonic() < end
            for each, found in zip((left, right), met, strict=True):
                each.step(0.01)
                found.update(each.take())
        told = [record.getMessage() for record in caplog.records]
        assert told == ["rank 0 cannot call rank 1 now, and tries again: [Errno 24] Too many open files"]
        for each, found in zip((left, right), met, strict=True):
            for connected in found.values():
                connected.connection.close()
            each.close()


def test_a_responder_that_is_not_a_partner_is_refused_by_who_connects() -> None:
    """Somebody of the job, but another rank, listens at the port that a record named."""
    with group(3) as members:
        left, middle, right = members
        wrong = Partner(*right.where, middle.who)
        left.start([wrong], wait_s=0.5)
        right.start([left.partner], wait_s=0.5)
        for each in (left, right):
            assert isinstance(each.join().error, CommTimeoutError)


def test_responders_know_each_other_by_the_keys_of_the_handshake() -> None:
    """The welcome is no key of a direction and no proof, so nothing that was said can be said again as another."""
    initiator = Initiator(Token(TOKEN), JOB, Identity(0, 0, b"a" * 16), Identity(1, 0, b"b" * 16))
    responder = Responder(Token(TOKEN), JOB, Identity(1, 0, b"b" * 16))
    proof, _ = initiator.answer(responder.challenge(initiator.hello()))
    responder.finish(proof)
    purposes = (meeting._WELCOME, meeting._FORTH, meeting._BACK)
    assert len({proof, *map(initiator.key, purposes)}) == 4
    assert [initiator.key(each) for each in purposes] == [responder.key(each) for each in purposes]
