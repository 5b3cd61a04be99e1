"""The folder of a job: private, checked, and gone when its job is."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from epee.errors import AuthError, InvalidArgument, InvalidState, ProtocolError, ResourceError
from epee.view.process.machine import own_host_key
from epee.view.transport import directory as d
from tests.forked import Program
from tests.harness import server

NONCE = bytes(range(16))


def descriptors() -> set[tuple[str, str]]:
    """Return the open descriptors of this process and what they are."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add((entry, os.readlink(f"/proc/self/fd/{entry}")))
    return found


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "run"
    monkeypatch.setenv("EPEE_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("EPEE_TOKEN_FILE", raising=False)
    server.context()
    forkserver.ensure_running()  # its descriptors stay; else the first program of this process would seem to leak them
    gc.collect()  # what other tests have left goes now, not in the midst of this one
    before = descriptors()
    yield folder
    assert descriptors() - before == set()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_everything_is_ours_alone_and_nothing_stays(runtime: Path) -> None:
    old_mask = os.umask(0)
    try:
        job = d.JobDirectory.create("a:1")
        door = job.listen(3, NONCE, 4)
    finally:
        os.umask(old_mask)
    assert mode(runtime) == mode(job.path) == 0o700
    assert {entry.name: mode(entry) for entry in job.path.iterdir()} == {"token": 0o600, door.name: 0o600}
    assert door.listener.getsockname().startswith("/"), "no abstract name"
    door.close()
    door.close()
    job.leave()
    job.leave()
    assert list(runtime.iterdir()) == []
    with pytest.raises(InvalidState):
        job.sockets()


def test_others_find_the_job_its_token_and_its_sockets() -> None:
    first = d.JobDirectory.create("a:1")
    second = d.JobDirectory.open(first.path)
    assert second.job_id == first.job_id
    assert second.token.derive(b"x", b"y") == first.token.derive(b"x", b"y")
    door = first.listen(3, NONCE, 4)
    assert second.sockets() == [(3, NONCE, door.name)]
    connection = second.connect(door.name)
    door.listener.accept()[0].close()
    connection.close()
    first.remove(door.name)
    with pytest.raises(FileNotFoundError):
        second.connect(door.name)
    door.close()
    first.leave()
    assert first.path.exists(), "the second is still there"
    second.leave()
    assert not first.path.exists()


def test_jobs_are_told_apart_by_name_and_token() -> None:
    jobs = [d.JobDirectory.create(name) for name in ("a:1", "b:2", "a:1")]
    assert set(d.find_jobs("a:1")) == {jobs[0].path, jobs[2].path}
    assert len(d.find_jobs()) == 3
    assert len({job.token.derive(b"x", b"y") for job in jobs}) == 3
    for job in jobs:
        job.leave()
    assert d.find_jobs() == []


def test_the_folder_of_a_living_job_is_not_removed(runtime: Path) -> None:
    job = d.JobDirectory.create()
    assert d.remove_stale(runtime) == 0
    d.JobDirectory.create().leave()
    assert job.path.exists()
    job.leave()


DYING = """
import os, signal, sys
from epee.view.transport.directory import JobDirectory
job = JobDirectory.create("dying")
door = job.listen(0, bytes(16), 4)
print(job.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_job_left_is_removed_by_the_next() -> None:
    with Program(DYING) as process:
        left = Path(process.communicate(50)[0].strip())
        assert process.returncode == -signal.SIGKILL
    assert {entry.name for entry in left.iterdir()} == {"token", "0-" + "0" * 32}
    assert d.find_jobs("dying") == []
    job = d.JobDirectory.create()
    assert not left.exists()
    with pytest.raises(ResourceError, match="has ended"):
        d.JobDirectory.open(left)
    job.leave()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on fork with threads
def test_a_forked_child_does_not_take_the_folder_along() -> None:
    job = d.JobDirectory.create()
    child = os.fork()
    if child == 0:
        job.forget()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert d.find_jobs() == [job.path]
    job.leave()
    assert not job.path.exists()


def test_unfinished_folders_are_removed_once_they_are_old(runtime: Path) -> None:
    d.JobDirectory.create().leave()
    young, old = runtime / "new-1", runtime / "new-2"
    young.mkdir(mode=0o700)
    old.mkdir(mode=0o700)
    os.utime(old, (1, 1))
    assert d.remove_stale(runtime) == 1
    assert young.exists()


def test_a_foreign_file_is_left_alone(runtime: Path) -> None:
    job = d.JobDirectory.create()
    (job.path / "notes.txt").write_text("mine")
    job.leave()
    assert [entry.name for entry in job.path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("bad", [0o750, 0o707, 0o777, 0o710])
def test_a_folder_that_others_can_enter_is_refused(runtime: Path, bad: int) -> None:
    job = d.JobDirectory.create()
    job.path.chmod(bad)
    with pytest.raises(AuthError, match="closed to others"):
        d.JobDirectory.open(job.path)
    job.path.chmod(0o700)
    job.leave()
    runtime.chmod(bad)
    with pytest.raises(AuthError, match="EPEE_RUNTIME_DIR"):
        d.JobDirectory.create()


def test_links_are_refused(runtime: Path, tmp_path: Path) -> None:
    job = d.JobDirectory.create()
    link = runtime / job.path.name.replace(job.job_id.hex(), "0" * 32)
    link.symlink_to(job.path)
    with pytest.raises(AuthError):
        d.JobDirectory.open(link)
    token, moved = job.path / "token", tmp_path / "moved"
    token.rename(moved)
    token.symlink_to(moved)
    with pytest.raises(AuthError, match="no link"):
        d.JobDirectory.open(job.path)
    job.leave()
    link.unlink()


def test_a_linked_runtime_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("EPEE_RUNTIME_DIR", str(tmp_path / "link"))
    with pytest.raises(AuthError):
        d.runtime_folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_another_users_folder_and_token_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = d.JobDirectory.create()
    os.chown(job.path / "token", 65534, 65534)
    with pytest.raises(AuthError, match="user 65534"):
        d.JobDirectory.open(job.path)
    job.leave()
    planted = tmp_path / "planted"
    planted.mkdir(mode=0o700)
    os.chown(planted, 65534, 65534)
    monkeypatch.setenv("EPEE_RUNTIME_DIR", str(planted))
    with pytest.raises(AuthError):
        d.JobDirectory.create()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_cannot_reach_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as open_to_all:
        os.chmod(open_to_all, 0o755)
        monkeypatch.setenv("EPEE_RUNTIME_DIR", open_to_all + "/run")
        job = d.JobDirectory.create()
        door = job.listen(0, NONCE, 4)
        probe = "import socket,sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
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
        link = Path(open_to_all) / "s"  # a socket's path must be short
        link.symlink_to(job.path / door.name)
        done = subprocess.run([*command, str(link)], capture_output=True, text=True, timeout=20)
        link.unlink()
        assert "PermissionError" in done.stderr
        door.close()
        job.leave()


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_token_file_of_another_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_bytes(bytes(size))
    monkeypatch.setenv("EPEE_TOKEN_FILE", str(file))
    with pytest.raises(InvalidArgument, match="32 bytes"):
        d.JobDirectory.create()
    assert os.listdir(d.runtime_folder()) == []


@pytest.mark.parametrize("call", ["_open_private", "_lock_shared", "_make", "_read_token"])
def test_a_folder_that_cannot_be_filled_is_removed(runtime: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    real, parent = getattr(d, call), d.runtime_folder()

    def fail(*args: object) -> object:
        if args[0] != parent:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    monkeypatch.setattr(d, call, fail)
    with pytest.raises(ResourceError, match="No space left"):
        d.JobDirectory.create()
    assert os.listdir(parent) == []


def test_the_launcher_may_bring_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_bytes(b"s" * 32)
    monkeypatch.setenv("EPEE_TOKEN_FILE", str(file))
    job = d.JobDirectory.create()
    assert not (job.path / "token").exists()
    assert job.token.derive(b"x", b"y") == d.Token(b"s" * 32).derive(b"x", b"y")
    file.chmod(0o644)
    with pytest.raises(AuthError, match="closed to others"):
        d.JobDirectory.open(job.path)
    job.leave()


def test_names_that_are_no_sockets_of_the_folder_are_refused() -> None:
    job = d.JobDirectory.create()
    for name in ("../x", "token", "/run/x", "", "1-zz", "\0x"):
        with pytest.raises(ProtocolError, match="no name of a socket"):
            job.connect(name)
    job.leave()
    folder = job.path.parent / "elsewhere"
    folder.mkdir(mode=0o700)
    with pytest.raises(ProtocolError, match="not the folder of a job"):
        d.JobDirectory.open(folder)


def test_long_paths_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setenv("EPEE_RUNTIME_DIR", str(deep / "run"))
    job = d.JobDirectory.create()
    door = job.listen(0, NONCE, 1)
    job.connect(door.name).close()
    door.close()
    job.leave()


def test_without_a_named_folder_a_private_one_among_the_temporary_files_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session's folder goes when the user logs out; a job need not."""
    monkeypatch.delenv("EPEE_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    session = tmp_path / "session"
    session.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert d.runtime_folder() == (tmp_path / f"epee-{os.geteuid()}").resolve()
    assert mode(d.runtime_folder()) == 0o700
    assert not list(session.iterdir())


def in_the_way(path: Path, kind: str) -> None:
    """Put something at `path` that is no folder of this user alone."""
    if kind == "file":
        path.touch(0o600)
    elif kind == "link":
        path.symlink_to(path.parent)
    elif kind == "dangling":
        path.symlink_to(path.parent / "nothing")
    else:
        path.mkdir()
        path.chmod(0o777 if kind == "open" else 0o700)
        if kind == "foreign":
            os.chown(path, 65534, 65534)


@pytest.mark.parametrize("kind", ["file", "link", "dangling", "open", "foreign"])
def test_what_is_in_the_way_of_the_default_folder_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "foreign" and os.geteuid() != 0:
        pytest.skip("only root can make another user's folder")
    monkeypatch.delenv("EPEE_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = f"epee-{os.geteuid()}"
    for name in (own, f"{own}-2"):
        in_the_way(tmp_path / name, kind)
    job = d.JobDirectory.create("a:1")
    assert job.path.parent == tmp_path / f"{own}-3"
    assert mode(job.path.parent) == 0o700
    assert d.find_jobs("a:1") == [job.path]
    job.leave()


def test_a_user_whose_names_are_all_taken_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPEE_RUNTIME_DIR")
    monkeypatch.setattr(d.env, "temporary_folders", lambda: [str(tmp_path)])
    own = f"epee-{os.geteuid()}"
    for name in (own, *(f"{own}-{number}" for number in range(2, 17))):
        in_the_way(tmp_path / name, "open")
    with pytest.raises(AuthError, match=f"{own} must belong to user .* set EPEE_RUNTIME_DIR"):
        d.JobDirectory.create()


@pytest.mark.parametrize("kind", ["none", "read-only", "full"])
def test_without_a_temporary_folder_that_can_be_written_memory_has_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.delenv("EPEE_RUNTIME_DIR")
    shared, disk = tmp_path / "shm", tmp_path / "tmp"
    shared.mkdir()
    disk.mkdir()
    monkeypatch.setattr(d.env, "SHARED_MEMORY", str(shared))

    def find() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", find if kind == "none" else lambda: str(disk))
    if kind == "read-only":
        (disk / "file").touch()
        monkeypatch.setattr(tempfile, "gettempdir", lambda: str(disk / "file"))  # nothing can be made there
    real = d._make

    def fill(folder_fd: int, name: str, content: bytes) -> int:
        if kind == "full" and os.readlink(f"/proc/self/fd/{folder_fd}").startswith(str(disk)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(folder_fd, name, content)

    monkeypatch.setattr(d, "_make", fill)
    job = d.JobDirectory.create("a:1")
    assert job.path.parent == shared / f"epee-{os.geteuid()}"
    assert mode(job.path.parent) == mode(job.path) == 0o700
    assert d.find_jobs("a:1") == [job.path]
    job.leave()
    assert not [path for path in disk.rglob("*") if path.is_dir() and path.name.startswith("new-")]


# ---- what cleaners do (review A5)


def test_a_cleaner_that_empties_a_living_jobs_folder_does_not_give_it_to_the_next_job(runtime: Path) -> None:
    job = d.JobDirectory.create("a:1")
    door = job.listen(0, NONCE, 4)
    for entry in job.path.iterdir():  # what a cleaner does to files that nobody has touched for some days
        entry.unlink()
    os.utime(job.path, (1, 1))
    other = d.JobDirectory.create("b:2")
    assert job.path.exists(), "the next job has removed the folder of a living one"
    assert job.is_there()
    assert d.find_jobs("a:1") == [job.path]
    other.leave()
    door.close()
    job.leave()
    assert list(runtime.iterdir()) == []


def test_a_process_is_reached_through_its_door_when_its_name_is_gone() -> None:
    job = d.JobDirectory.create("a:1")
    door = job.listen(0, NONCE, 4)
    shutil.rmtree(job.path)
    assert not job.is_there()
    assert job.sockets() == []
    connection = d.connect_door(os.getpid(), door.fd)
    accepted, _ = door.listener.accept()
    for end in (connection, accepted):
        end.close()
    job.remove(door.name)
    with pytest.raises(ResourceError, match=r"has ended, or its folder .* was removed"):
        d.JobDirectory.open(job.path)
    door.close()
    job.leave()


def test_a_folder_that_took_the_place_of_another_is_not_taken_for_it() -> None:
    job = d.JobDirectory.create("a:1")
    moved = job.path.with_name("moved")
    job.path.rename(moved)
    job.path.mkdir(mode=0o700)
    assert not job.is_there()
    job.leave()
    shutil.rmtree(moved)


def test_processes_of_another_host_make_its_folder_once_and_share_it() -> None:
    job_id, secret = bytes(range(16)), b"s" * 32
    first = d.JobDirectory.enter("name", job_id, secret)
    second = d.JobDirectory.enter("name", job_id, secret)
    assert first.path == second.path
    assert first.host == own_host_key()
    assert first.host in first.path.name
    assert first.job_id == job_id
    with pytest.raises(AuthError, match="another secret"):
        d.JobDirectory.enter("name", job_id, b"o" * 32)
    with pytest.raises(InvalidArgument, match="id has 16 bytes"):
        d.JobDirectory.enter("name", b"short", secret)
    first.leave()
    assert second.is_there()
    second.leave()
    assert not second.path.exists()


def test_of_two_processes_that_make_a_folder_at_once_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the secret is elsewhere, so that the folder has nothing in it that keeps a rename out."""
    token = tmp_path / "token"
    token.write_bytes(b"s" * 32)
    token.chmod(0o400)
    monkeypatch.setenv("EPEE_TOKEN_FILE", str(token))
    job_id = bytes(range(16))
    first = d.JobDirectory._make("name", job_id, b"")
    with pytest.raises(FileExistsError):
        d.JobDirectory._make("name", job_id, b"")
    assert first.is_there()
    second = d.JobDirectory.enter("name", job_id, b"")
    assert second.path == first.path
    first.leave()
    second.leave()
    assert not second.path.exists()
