"""What takes long to build is built once, however many ask; nobody sees half of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.csrc import made as module
from tests.csrc.made import is_made, made


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "FOLDER", tmp_path / "made")
    return tmp_path / "made"


def test_who_asks_meanwhile_waits_and_gets_the_same() -> None:
    calls, asks = [], threading.Barrier(4)
    found: list[bytes] = []

    def make(path: Path) -> None:
        calls.append(path)
        path.write_bytes(b"half")
        assert not is_made("library")
        assert not made("library", make, is_awaited=False).exists(), "another one is at it"
        path.write_bytes(b"whole")

    def ask() -> None:
        asks.wait(30)
        found.append(made("library", make).read_bytes())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"whole"] * 4
    assert len(calls) == 1


def test_what_could_not_be_made_is_tried_again() -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise ValueError("no compiler")

    with pytest.raises(ValueError, match="no compiler"):
        made("library", fail)
    assert not is_made("library")
    assert made("library", lambda path: path.write_bytes(b"whole")).read_bytes() == b"whole"
