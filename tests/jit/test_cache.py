"""The kernel cache loads nothing that it did not write itself, and survives whatever it finds."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from epee.jit.cache import CubinCache, cache_key

KEY = cache_key("text", ("-a",), "nvrtc 1.0")


def make(tmp_path: Path, cap_bytes: int = 1 << 20) -> CubinCache:
    return CubinCache(tmp_path / "cache", cap_bytes)


def test_stored_kernel_is_loaded(tmp_path: Path) -> None:
    make(tmp_path).store(KEY, b"cubin")
    assert make(tmp_path).load(KEY) == b"cubin"


def test_key_depends_on_every_part_and_its_borders() -> None:
    keys = {
        cache_key("ab", ("c",), "v"),
        cache_key("a", ("bc",), "v"),
        cache_key("ab", ("c", ""), "v"),
        cache_key("ab", ("c",), "w"),
    }
    assert len(keys) == 4


def test_absent_kernel_is_none(tmp_path: Path) -> None:
    assert make(tmp_path).load(KEY) is None


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_damaged_file_is_not_loaded(tmp_path: Path, damage: str) -> None:
    cache = make(tmp_path)
    cache.store(KEY, b"x" * 1000)
    path = cache.folder / f"{KEY}.cubin"
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[500] ^= 1
    path.write_bytes(bytes(raw) if damage == "flip" else bytes(raw[:100]) if damage == "cut" else b"")
    assert cache.load(KEY) is None
    cache.store(KEY, b"y")
    assert cache.load(KEY) == b"y"


def test_file_that_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    cache = make(tmp_path)
    cache.store(KEY, b"cubin")
    (cache.folder / f"{KEY}.cubin").chmod(0o666)
    assert cache.load(KEY) is None


def test_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    cache = make(tmp_path)
    cache.store(KEY, b"cubin")
    path = cache.folder / f"{KEY}.cubin"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.load(KEY) is None


@pytest.mark.parametrize("trick", ["writable", "link", "parent link", "file"])
def test_folder_that_is_not_ours_alone_is_not_used(tmp_path: Path, trick: str) -> None:
    folder = tmp_path / "parent" / "cache"
    folder.parent.mkdir()
    if trick == "writable":
        folder.mkdir()
        folder.chmod(0o777)
    elif trick == "link":
        (tmp_path / "target").mkdir()
        folder.symlink_to(tmp_path / "target")
    elif trick == "parent link":
        folder.parent.rename(tmp_path / "real")
        folder.parent.symlink_to(tmp_path / "real")
    else:
        folder.write_text("")
    cache = CubinCache(folder, 1 << 20)
    assert cache.folder != folder
    cache.store(KEY, b"cubin")
    assert cache.load(KEY) == b"cubin"
    assert not list(tmp_path.rglob("*.cubin"))


def test_private_folder_goes_with_the_cache(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    cache = make(tmp_path)
    cache.store(KEY, b"cubin")
    private = cache.folder
    assert private.is_dir()
    del cache
    assert not private.exists()


def test_a_forked_child_leaves_its_parents_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("in the way")
    cache = make(tmp_path)
    private = cache.folder
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 1)
        del cache
    assert private.is_dir()
    private.rmdir()


def test_folder_in_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    cache = make(tmp_path)
    (cache.folder / f"{KEY}.cubin").mkdir()
    assert cache.load(KEY) is None


@pytest.mark.parametrize("call", ["utime", "read"])
def test_a_disk_that_fails_only_costs_time(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(tmp_path)
    cache.store(KEY, b"cubin")

    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    if call == "utime":
        monkeypatch.setattr(os, "utime", fail)
        assert cache.load(KEY) == b"cubin"
    else:
        monkeypatch.setattr(os, "fdopen", fail)
        assert cache.load(KEY) is None


def test_what_a_killed_writer_left_goes_in_time(tmp_path: Path) -> None:
    cache = make(tmp_path)
    old, new = cache.folder / ".new-old", cache.folder / ".new-new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1000.0, 1000.0))
    cache.store(KEY, b"cubin")
    assert (old.exists(), new.exists()) == (False, True)


def test_oldest_kernels_go_when_the_folder_is_full(tmp_path: Path) -> None:
    cache = make(tmp_path, cap_bytes=3000)
    for i in range(3):
        cache.store(cache_key(str(i), (), ""), b"x" * 900)
        path = cache.folder / f"{cache_key(str(i), (), '')}.cubin"
        os.utime(path, (1000.0 + i, 1000.0 + i))
    assert cache.load(cache_key("0", (), "")) is not None  # used again: now the newest
    cache.store(KEY, b"x" * 900)
    assert cache.load(cache_key("1", (), "")) is None
    assert cache.load(cache_key("0", (), "")) is not None
    assert cache.load(KEY) is not None


def test_full_or_closed_disk_only_costs_the_entry(tmp_path: Path) -> None:
    cache = make(tmp_path)
    cache.folder.rmdir()
    cache.store(KEY, b"cubin")
    assert cache.load(KEY) is None


def test_many_writers_leave_a_whole_file(tmp_path: Path) -> None:
    cache = make(tmp_path)
    cubin = os.urandom(200_000)
    threads = [threading.Thread(target=cache.store, args=(KEY, cubin)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.load(KEY) == cubin
    assert [path.name for path in cache.folder.iterdir()] == [f"{KEY}.cubin"]


# ---- where the folder lies (review A12)


def test_missing_parents_are_made_for_us_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "cache"
    old_mask = os.umask(0)
    try:
        cache = CubinCache(folder, 1 << 20)
    finally:
        os.umask(old_mask)
    assert cache.folder == folder
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.parents[:2])] == [0o700] * 3


@pytest.mark.parametrize(("mode", "is_used"), [(0o777, False), (0o1777, True), (0o757, False), (0o700, True)])
def test_a_parent_where_others_could_exchange_the_folder_is_refused(tmp_path: Path, mode: int, is_used: bool) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(mode)
    cache = CubinCache(parent / "cache", 1 << 20)
    assert (cache.folder == parent / "cache") is is_used


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_a_parent_of_another_user_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parent = tmp_path / "parent"
    parent.mkdir(mode=0o755)
    os.chown(parent, 65534, 65534)
    cache = CubinCache(parent / "cache", 1 << 20)
    assert cache.folder != parent / "cache"
    assert f"its parent {parent} belongs to user 65534" in caplog.text


def test_a_kernel_under_another_kernels_name_is_not_loaded(tmp_path: Path) -> None:
    cache, other = make(tmp_path), cache_key("another text", (), "")
    cache.store(KEY, b"cubin")
    (cache.folder / f"{KEY}.cubin").rename(cache.folder / f"{other}.cubin")
    assert cache.load(other) is None


def test_a_folder_that_is_exchanged_later_is_not_used(tmp_path: Path) -> None:
    cache = make(tmp_path)
    cache.store(KEY, b"cubin")
    cache.folder.rename(tmp_path / "moved")
    cache.folder.mkdir()
    (cache.folder / f"{KEY}.cubin").write_bytes(b"planted")
    assert cache.load(KEY) == b"cubin"
    cache.store(KEY, b"newer")
    assert (cache.folder / f"{KEY}.cubin").read_bytes() == b"planted"
    assert make(tmp_path).load(KEY) is None


def test_who_claims_a_key_is_alone_until_the_end_of_the_block_and_leaves_no_file(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    with first.claimed(KEY) as is_mine, second.claimed(KEY) as is_theirs, second.claimed("0" * 64) as is_another:
        assert (is_mine, is_theirs, is_another) == (True, False, True)
    with second.claimed(KEY) as is_mine:
        assert is_mine
    assert not list(first.folder.iterdir())


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    cache = make(tmp_path)
    code = "import sys, os, signal; from pathlib import Path; from epee.jit.cache import CubinCache\n"
    code += (
        "with CubinCache(Path(sys.argv[1]), 1 << 20).claimed(sys.argv[2]) as it: os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(cache.folder), KEY], check=False)
    assert list(cache.folder.iterdir()), "killed before it could remove its file"
    with cache.claimed(KEY) as is_mine:
        assert is_mine


def test_a_folder_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with make(tmp_path).claimed(KEY) as is_mine:
        assert is_mine
