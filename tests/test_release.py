"""Wheel and sdist as `make release` builds them: what they hold, and that the checks notice what they lack.

`make release` uses the wheel in a fresh venv, a test here only with EPEE_RELEASE=1: it takes a minute and pip's index.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
import zipfile
from pathlib import Path

import pytest

from scripts import release

ROOT = release.ROOT


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build wheel and sdist once, without a network."""
    return release.build(tmp_path_factory.mktemp("release"), is_isolated=False)


def changed(
    wheel: Path, folder: Path, leave_out: str = "", add: str = "", replace: tuple[bytes, bytes] = (b"", b"")
) -> Path:
    """Write a wheel anew: without the files whose names end so, with another file, or with other metadata."""
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(folder / wheel.name, "w") as new:
        for name in old.namelist():
            text = old.read(name)
            if name.startswith("epee-") and name.endswith(("/METADATA", "/entry_points.txt")):
                text = text.replace(*replace) if replace[0] else text
            if not (leave_out and name.endswith(leave_out)):
                new.writestr(name, text)
        if add:
            new.writestr(add, "")
    return folder / wheel.name


def test_wheel_and_sdist_are_whole(built: tuple[Path, Path]) -> None:
    release.check(*built)
    files = set(zipfile.ZipFile(built[0]).namelist())
    assert "epee/py.typed" in files
    assert len([name for name in files if name.endswith(".cuh")]) == len(list((ROOT / "epee").rglob("*.cuh"))) > 50
    assert {name for name in release.package_files() if "/shims/" in name} <= files
    assert not {name.partition("/")[0] for name in files} & {"tests", "benchmarks", "examples", "scripts"}


@pytest.mark.parametrize(
    "name",
    [
        "epee/csrc/kernels/latency/combine.cuh",
        "epee/py.typed",
        "for_deep_ep/deep_ep_cpp.py",
        "+epee.dist-info/METADATA",
    ],
)
def test_a_wheel_without_a_file_of_the_package_is_refused(built: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    wheel = changed(built[0], tmp_path, leave_out=name)
    with pytest.raises(release.ReleaseError, match=rf"missing \['\S*{re.escape(name)}'\], .*; git add what is missing"):
        release.check_wheel(wheel)


@pytest.mark.parametrize("name", ["tests/test_a.py", "benchmarks/a.py", "examples/a.py", "epee/new.py"])
def test_a_wheel_with_another_file_is_refused(built: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    with pytest.raises(release.ReleaseError, match=rf"too many \['{name}'\]"):
        release.check_wheel(changed(built[0], tmp_path, add=name))


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        ((b"\nVersion: ", b"\nVersion: 9."), "its Version must be"),
        ((b"\nName: epee", b"\nName: ep"), "its Name must be epee, got ep; see"),
        ((b"License-Expression: Apache-2.0", b"License-Expression: MIT"), "must be Apache-2.0, got MIT; see"),
        ((b"text/markdown", b"text/plain"), "must be text/markdown, got text/plain; see"),
        ((b"## Twenty lines", b"## Lines"), "must have the text of README.md"),
        ((b"epee.cli.main:main", b"epee.cli:main"), "must have one command"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wheel_with_other_metadata_is_refused(
    built: tuple[Path, Path], tmp_path: Path, replace: tuple[bytes, bytes], message: str
) -> None:
    with pytest.raises(release.ReleaseError, match=message):
        release.check_wheel(changed(built[0], tmp_path, replace=replace))


def test_a_wheel_without_licence_is_refused(built: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(release.ReleaseError, match="must hold the licence"):
        release.check_wheel(changed(built[0], tmp_path, leave_out="/LICENSE"))


def test_a_wheel_of_another_version_is_refused(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel = tmp_path / "epee-9.9.9-py3-none-any.whl"
    wheel.write_bytes(built[0].read_bytes())
    with pytest.raises(release.ReleaseError, match=f"must be called {built[0].name}"):
        release.check_wheel(wheel)


def test_a_tool_that_is_missing_is_named() -> None:
    with pytest.raises(release.ReleaseError, match=r"^no_such_tool: must be installed .*, is not; make install"):
        release.tool("no_such_tool")


def test_the_twenty_lines_are_those_of_the_example() -> None:
    assert release.twenty_lines().strip() in (ROOT / "examples" / "first.py").read_text()


def test_a_command_ends_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    code = "import fcntl, os, time; fcntl.flock(os.open('lock', os.O_CREAT), fcntl.LOCK_EX); os.fork(); time.sleep(300)"
    with pytest.raises(release.ReleaseError, match=r"^two: must end within 2 s, was ended after that; see its output"):
        release.run("two", [sys.executable, "-c", code], 2, tmp_path)
    lock = os.open(tmp_path / "lock", os.O_CREAT)
    deadline = time.monotonic() + 30
    while True:  # both processes hold the lock, until the last of them has ended
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_command_that_fails_is_named_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(release.ReleaseError, match=r"(?s)^one: must exit with 0, got 3; run it by hand.*\nwhy$"):
        release.run("one", [sys.executable, "-c", "print('why'); raise SystemExit(3)"], 60, tmp_path)


def test_the_size_of_a_wheel_is_read_from_what_pip_prints(tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.14.1-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(bytes(2000))
    assert release.size_of("  Downloading torch-2.12.1-cp310-cp310-manylinux_2_28_x86_64.whl (532.1 MB)\n") == 532.1
    assert release.size_of("  Downloading torch-2.12.1-cp312-none-any.whl (1.5 GB)\n") == 1500
    assert release.size_of(f"Processing {wheel}\n") == 0.002
    assert release.size_of("  Downloading torch-2.12.1-cp312-none-any.whl.metadata (30 kB)\n") == 0


def test_the_table_has_every_python_and_what_make_installs() -> None:
    found = release.TABLE.search((ROOT / "docs" / "dependencies.md").read_text())
    assert found is not None
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found[2].splitlines() if "|" in line]
    assert [tuple(map(int, row[0].split(".")[:2])) for row in rows] == [(3, minor) for minor in release.PYTHONS]
    assert f"TORCH ?= {release.TORCH}\n" in (ROOT / "Makefile").read_text()
    column = head.index(release.TORCH.replace("==", " "))
    assert "**yes**" in [row[column] for row in rows]
    assert "fails" not in found[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    os.environ.get("EPEE_RELEASE") != "1",
    reason="a fresh venv takes a minute and pip's index; EPEE_RELEASE=1 runs this",
)
def test_the_wheel_works_in_a_fresh_venv(built: tuple[Path, Path], tmp_path: Path) -> None:
    release.Venv(tmp_path / "use").use(built[0], release.TORCH)
