"""The whole demo: a few steps, its files, its failures, Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from epee.demo import rank, run
from epee.demo.settings import Settings
from tests.demo import broken
from tests.demo.test_launch import REPOSITORY, wait_until_gone
from tests.forked import Command

LIMIT_S = 100
LINE = r"^step +1 +\d+\.\d s  loss \d\.\d{3}  [\d,]+ tokens/s  sent 0→1 \d+\.\d MB  1→0 \d+\.\d MB$"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "epee", "demo", *arguments]


@contextmanager
def started(*arguments: str) -> Iterator[Command]:
    """The demo in a process group of its own; nothing of it is left afterwards."""
    with Command(["demo", *arguments], REPOSITORY) as process:
        yield process


@contextmanager
def started_afresh(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """As `started`, by a shell's means: `python -m epee demo`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # tests that a shell runs in the background inherit that
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    try:
        with process:
            yield process
    finally:
        process.kill()


def read_until(process: subprocess.Popen[str] | Command, pattern: str) -> str:
    """Read the output up to a line that matches and return that much."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if re.search(pattern, line):
            return seen
    raise AssertionError(f"no line matches {pattern!r} in:\n{seen}")


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            child, _, rest = stat.read_text().partition(" ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(rest.rpartition(")")[2].split()[1]), []).append(int(child))
    found, queue = [], [pid]
    while queue:
        queue += children.get(queue.pop(), [])
        found = queue + found
    return sorted(set(found) - {pid})


def rank_processes(pid: int) -> list[int]:
    """Descendants that hold a rank: they have epee's shared memory mapped."""
    return [child for child in descendants(pid) if "memfd:epee" in Path(f"/proc/{child}/maps").read_text()]


def check_png(path: Path) -> None:
    """Fail unless the file is a whole PNG with more than one colour."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks: dict[bytes, bytes] = {}
    position = 8
    while position < len(data):
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        body = data[position + 8 : position + 8 + length]
        (crc,) = struct.unpack(">I", data[position + 8 + length : position + 12 + length])
        assert crc == zlib.crc32(kind + body)
        chunks[kind] = chunks.get(kind, b"") + body
        position += 12 + length
    assert b"IEND" in chunks
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    assert width >= 400
    assert height >= 300
    pixels = zlib.decompress(chunks[b"IDAT"])
    assert len(pixels) >= width * height
    assert len(set(pixels)) > 20


def small(**changes: Any) -> Settings:
    """Settings that take a second."""
    few = {"num_steps": 4, "batch": 4, "valid_batches": 2}
    size = {"hidden": 32, "num_heads": 2, "num_layers": 2, "ffn_hidden": 32, "context": 32}
    return Settings(**{**few, **size, **changes})


def easy_text() -> bytes:
    """Return text that a small model learns in a few steps."""
    return "".join(f"def function_{n}(a, b):\n    return a + {n} * b\n\n" for n in range(4000)).encode()


def run_here(settings: Settings) -> tuple[int, str]:
    """Run the demo's parent in this process; return exit code and output."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(run, "read_text", easy_text)
        code = run.run(settings)
    return code, output.getvalue()


def test_the_command_writes_all_files_passes_the_check_and_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "results"
    with started_afresh("--steps", "4", "--out", str(out)) as process:
        seen = read_until(process, LINE)
        children = descendants(process.pid)
        assert children
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, seen + output
        assert "PASS" in output
        wait_until_gone(children)
    check_files(out)
    check_numbers(json.loads((out / "demo.json").read_text()), 2)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_any_number_of_ranks(num_ranks: int, tmp_path: Path) -> None:
    code, output = run_here(small(num_ranks=num_ranks, out=str(tmp_path)))
    assert code == 0, output
    assert "PASS" in output
    check_files(tmp_path)
    check_numbers(json.loads((tmp_path / "demo.json").read_text()), num_ranks)


def check_files(out: Path) -> None:
    assert sorted(path.name for path in out.iterdir()) == ["demo.json", "demo.png"]
    check_png(out / "demo.png")


def check_numbers(numbers: dict[str, Any], num_ranks: int) -> None:
    size = numbers["settings"]
    tokens_per_step = num_ranks * size["batch"] * size["context"]
    assert size["num_ranks"] == num_ranks
    assert [step[0] for step in numbers["steps"]] == [1, 2, 3, 4]
    assert numbers["steps"][0][2] == pytest.approx(5.55, abs=0.3)  # ln 256 and a little: nothing is known yet
    assert numbers["steps"][-1][2] < numbers["steps"][0][2]
    assert numbers["tokens"] == 4 * tokens_per_step
    assert 0 < numbers["valid"] < numbers["steps"][0][2]
    assert numbers["check"]["passed"] is True
    assert numbers["check"]["max_deviation"] < 1e-10
    assert {"torch", "epee"} <= numbers["versions"].keys()
    # of the last validation batch
    assert sum(numbers["rows_per_expert"]) == tokens_per_step * size["num_topk"] * size["num_layers"]
    assert len(numbers["rows_per_expert"]) == size["num_experts"]
    assert numbers["steps"][-1][3] == numbers["tokens"]
    check_traffic(numbers, num_ranks)


def check_traffic(numbers: dict[str, Any], num_ranks: int) -> None:
    """The matrix is symmetric (each row is answered), and forward and backward explain all of it."""
    matrix = numbers["bytes_per_link"]
    assert len(matrix) == num_ranks
    for src in range(num_ranks):
        for dst in range(num_ranks):
            assert matrix[src][dst] == matrix[dst][src] > 0
    size = numbers["settings"]
    num_rows = numbers["tokens"] * size["num_topk"] * size["num_layers"]
    assert sum(map(sum, matrix)) == num_rows * 2 * 2 * 4 * size["hidden"]


def test_one_seed_gives_one_result(tmp_path: Path) -> None:
    results = []
    for seed in (5, 5, 6):
        code, output = run_here(small(seed=seed, out=str(tmp_path)))
        assert code == 0, output
        numbers = json.loads((tmp_path / "demo.json").read_text())
        results.append(([step[2] for step in numbers["steps"]], numbers["bytes_per_link"]))
    assert results[0] == results[1]
    assert results[0] != results[2]


def test_time_decides_when_no_steps_are_given(tmp_path: Path) -> None:
    code, output = run_here(small(num_steps=None, seconds=1.0, out=str(tmp_path)))
    assert code == 0, output
    numbers = json.loads((tmp_path / "demo.json").read_text())
    assert numbers["steps"][-1][1] >= 1.0
    assert all(seconds < 1.0 for _, seconds, *_ in numbers["steps"][:-2])


@pytest.mark.parametrize("how", ["ctrl-c in a terminal", "SIGTERM to the parent"])
def test_an_interrupt_ends_all_ranks(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with started("--seconds", "600", "--out", str(tmp_path)) as process:
        read_until(process, r"step +\d+")
        children = descendants(process.pid)
        assert len(rank_processes(process.pid)) == 2
        if how == "ctrl-c in a terminal":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
        assert "interrupted" in output
        assert "Traceback" not in output
        wait_until_gone(children)
        assert not list(tmp_path.glob("epee-demo-*"))


def test_ctrl_c_while_the_ranks_start_is_quiet(tmp_path: Path) -> None:
    with started("--seconds", "600", "--out", str(tmp_path)) as process:
        read_until(process, r"starting 2 rank\(s\)")
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
        assert "Traceback" not in output


def test_a_killed_rank_is_named_and_the_others_end(tmp_path: Path) -> None:
    with started("--seconds", "600", "--out", str(tmp_path)) as process:
        read_until(process, r"step +\d+")
        children, ranks = descendants(process.pid), rank_processes(process.pid)
        os.kill(ranks[0], signal.SIGKILL)
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1
        assert re.search(r"rank [01] failed: it died without a word \(ended by SIGKILL\)", output)
        assert output.count("failed:") == 1
        wait_until_gone(children)


def test_a_raising_rank_is_shown_once_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "run_rank", broken.raise_everywhere)
    code, output = run_here(small(out=str(tmp_path)))
    assert code == 1
    assert re.search(r"rank \d failed: ValueError: nonsense", output)
    assert output.count("Traceback") == 1
    assert "in raise_everywhere" in output


def test_a_failed_check_is_a_failed_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is real: a combine that loses one part in a million fails it."""
    monkeypatch.setattr(rank, "run_rank", broken.run_rank)
    code, output = run_here(small(out=str(tmp_path)))
    assert code == 1
    assert "FAIL" in output
    assert json.loads((tmp_path / "demo.json").read_text())["check"]["passed"] is False
