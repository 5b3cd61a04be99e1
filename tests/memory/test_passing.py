"""`memory.passing`: a descriptor goes to whoever knows the cookie, and to nobody else; nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from epee.errors import AuthError, ProtocolError, ResourceError
from epee.memory import passing
from epee.memory.claim import CLAIM_BYTES, Claim, make_claim, parse_claim
from epee.memory.passing import DescriptorServer, fetch_descriptor
from tests import shortage
from tests.harness import run_ranks, worker

MAGIC = b"testtest"


def open_fds() -> int:
    """How many sockets, memfds and folders this process has open (the ranks' server has pipes), less the harness's."""
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    kinds = [os.readlink(fd) for fd in fds if os.path.lexists(fd)]
    found = sum(kind.startswith("socket:") or "memfd:" in kind or "epee-" in kind for kind in kinds)
    return found - worker.num_spare()


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("lent")
    os.write(fd, b"hello")
    yield fd
    os.close(fd)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fds, threads = open_fds(), threading.active_count()
    yield
    assert [name for name in os.listdir(tmp_path) if not name.startswith("pymp-")] == []  # multiprocessing's own
    assert open_fds() == fds
    assert threading.active_count() == threads


def test_out_of_descriptors_is_named_at_the_peer(file: int) -> None:
    claim = make_claim(MAGIC, file, 4096)
    server = DescriptorServer(file, claim.cookie)
    for num_free in (0, 8):
        with shortage.descriptors(num_free):
            if num_free:
                os.close(fetch_descriptor(claim, server.socket_fd))
            else:
                with pytest.raises(ResourceError, match="limit on descriptors"):
                    fetch_descriptor(claim, server.socket_fd)
    server.close()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(theirs, [passing._GIVEN], [file])
        with shortage.descriptors(0), pytest.raises(ResourceError, match=r"no descriptor is left here.*ulimit"):
            passing._receive_one(ours, 7)


def test_peers_get_copies_until_the_server_closes(file: int) -> None:
    claim = make_claim(MAGIC, file, 4096)
    server = DescriptorServer(file, claim.cookie)
    socket_fd = server.socket_fd
    for _ in range(3):
        copy = fetch_descriptor(claim, socket_fd)
        assert copy != file
        assert os.pread(copy, 10, 0) == b"hello"
        assert not os.get_inheritable(copy)
        os.close(copy)
    server.close()
    server.close()
    with pytest.raises(ResourceError, match=f"process {os.getpid()} did not hand over .* has it closed the region"):
        fetch_descriptor(claim, socket_fd)


def test_a_forked_child_does_not_stop_its_parents_server(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = make_claim(MAGIC, file, 4096)
    server = DescriptorServer(file, claim.cookie)
    copies = os.dup(server.socket_fd), server._stop.dup()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 1)
        server.close()  # what the child's garbage collector does with its copies
    os.close(fetch_descriptor(claim, copies[0]))
    os.close(copies[0])
    copies[1].shutdown(socket.SHUT_RDWR)
    copies[1].close()
    server._thread.join()


def test_a_peer_in_the_garbage_collectors_way_gets_nothing_else(file: int) -> None:
    """The server keeps a copy, so a descriptor that its owner closes and reuses is not handed out."""
    other = os.dup(file)
    claim = make_claim(MAGIC, other, 4096)
    server = DescriptorServer(other, claim.cookie)
    os.close(other)
    stranger = os.memfd_create("stranger")
    copy = fetch_descriptor(claim, server.socket_fd)
    assert os.pread(copy, 10, 0) == b"hello"
    for fd in (copy, stranger):
        os.close(fd)
    server.close()


def test_a_long_folder_name_is_no_obstacle(file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    server = DescriptorServer(file, bytes(16))
    server.close()
    deep.rmdir()


def test_a_folder_that_cannot_be_written_is_named(file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(ResourceError, match=r"cannot listen .*absent.*; let TMPDIR name a folder"):
        DescriptorServer(file, bytes(16))


@pytest.mark.parametrize("call", ["dup", "bind", "listen", "chmod", "socketpair", "start"])
def test_a_failure_at_any_step_leaves_nothing(file: int, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(24, "injected")

    owner = {"bind": socket.socket, "listen": socket.socket, "chmod": os, "dup": os, "socketpair": socket}.get(
        call, threading.Thread
    )
    monkeypatch.setattr(owner, call, fail)
    with pytest.raises(ResourceError, match="injected"):
        DescriptorServer(file, bytes(16))


def test_the_cookie_is_asked_for(file: int) -> None:
    claim = make_claim(MAGIC, file, 4096)
    server = DescriptorServer(file, claim.cookie)
    with pytest.raises(ProtocolError, match="does not know the region"):
        fetch_descriptor(claim._replace(cookie=bytes(16)), server.socket_fd)
    os.close(fetch_descriptor(claim, server.socket_fd))
    server.close()


def test_silent_and_babbling_peers_do_not_stop_the_server(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "_SERVE_S", 0.2)
    claim = make_claim(MAGIC, file, 4096)
    server = DescriptorServer(file, claim.cookie)
    path = f"/proc/self/fd/{server.socket_fd}"
    others = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(6)]
    for number, other in enumerate(others):
        other.connect(path)
        if number % 2:
            other.send(b"x" * (1 + 1000 * number))
    others.pop().close()
    os.close(fetch_descriptor(claim, server.socket_fd))
    for other in others:
        other.close()
    server.close()


def test_another_user_is_refused(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = make_claim(MAGIC, file, 4096)
    server = DescriptorServer(file, claim.cookie)
    real = passing._peer_of
    monkeypatch.setattr(
        passing,
        "_peer_of",
        lambda connection: (0, 12345) if "epee" in threading.current_thread().name else real(connection),
    )
    with pytest.raises((ProtocolError, ResourceError), match=r"does not know|did not hand over"):
        fetch_descriptor(claim, server.socket_fd)
    server.close()


def _listen_for(claim: Claim, answer: bytes, fds: list[int]) -> tuple[int, threading.Thread]:
    """A server that does not keep to the protocol."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket_fd = passing._bind_unnamed(listener)
    listener.listen(1)

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(100)
            socket.send_fds(connection, [answer], fds)

    thread = threading.Thread(target=serve)
    thread.start()
    return socket_fd, thread


@pytest.mark.parametrize(("answer", "count"), [(b"epee-fd!", 0), (b"epee-fd!", 2), (b"epee-fd!!", 1), (b"other", 1)])
def test_an_answer_that_is_not_one_descriptor_is_refused(file: int, answer: bytes, count: int) -> None:
    claim = make_claim(MAGIC, file, 4096)
    socket_fd, thread = _listen_for(claim, answer, [file] * count)
    with pytest.raises(ProtocolError, match=f"with {count} descriptors"):
        fetch_descriptor(claim, socket_fd)
    thread.join()
    os.close(socket_fd)


def test_a_silent_owner_is_not_waited_for_forever(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "PATIENCE_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        socket_fd = passing._bind_unnamed(listener)
        listener.listen(1)
        with pytest.raises(ResourceError, match=r"within 0 s .*temporarily unavailable"):
            fetch_descriptor(make_claim(MAGIC, file, 4096), socket_fd)
        os.close(socket_fd)


def _serve_until_killed(rank: int, num_ranks: int, folder: str, names: list[str]) -> None:
    tempfile.tempdir = folder
    fd = os.memfd_create("lent")
    claim = make_claim(MAGIC, fd, 4096)
    server = DescriptorServer(fd, claim.cookie)
    Path(names[0]).write_bytes(claim.pack() + server.socket_fd.to_bytes(4, "little"))
    os.rename(names[0], names[1])
    signal.pause()


def test_a_killed_owner_leaves_no_name_and_a_clear_error(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    names = [str(tmp_path / "new"), str(tmp_path / "ready")]
    seen: list[bytes] = []

    def kill() -> None:
        while not os.path.exists(names[1]):
            time.sleep(0.01)
        seen.append(Path(names[1]).read_bytes())
        claim = parse_claim(seen[0][:CLAIM_BYTES], MAGIC, CLAIM_BYTES, 0, "test")
        os.close(fetch_descriptor(claim, int.from_bytes(seen[0][-4:], "little")))
        os.kill(claim.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(_serve_until_killed, 1, str(folder), names, backend=None)
    thread.join()
    assert os.listdir(folder) == []
    with pytest.raises(ResourceError, match="has ended"):
        fetch_descriptor(
            parse_claim(seen[0][:CLAIM_BYTES], MAGIC, CLAIM_BYTES, 0, "test"), int.from_bytes(seen[0][-4:], "little")
        )
    os.unlink(names[1])
    folder.rmdir()


def _listen_as_another(rank: int, num_ranks: int, claim: Claim, name: str) -> None:
    """Rank 0 listens and hands its socket's place to a wrong claim."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        socket_fd = passing._bind_unnamed(listener)
        listener.listen(1)
        Path(name + ".new").write_text(f"{os.getpid()} {socket_fd}")
        os.rename(name + ".new", name)
        listener.settimeout(30)
        listener.accept()


def test_a_socket_of_another_process_is_not_trusted(file: int, tmp_path: Path) -> None:
    """This process's claim, but the descriptor it names leads to a socket that another process listens on."""
    claim = make_claim(MAGIC, file, 4096)
    name = str(tmp_path / "ready")
    errors: list[BaseException] = []

    def attack() -> None:
        while not os.path.exists(name):
            time.sleep(0.01)
        pid, number = map(int, Path(name).read_text().split())
        planted = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH)
        try:
            fetch_descriptor(claim, planted)
        except AuthError as error:
            errors.append(error)
        os.close(planted)

    thread = threading.Thread(target=attack)
    thread.start()
    run_ranks(_listen_as_another, 1, claim, name, backend=None)
    thread.join()
    assert "answers for process" in str(errors[0])
    os.unlink(name)
