"""The `epee` command: help, version, refusals, the list of benchmarks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epee.cli import bench
from epee.cli.main import app, main
from epee.errors import UnsupportedError

REPOSITORY = Path(__file__).resolve().parents[2]
runner = CliRunner()


def plain(text: str) -> str:
    """Text without colours, boxes and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


def test_help_names_all_commands() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert {"demo", "bench"} <= set(plain(result.output).split())


def test_demo_help_names_all_options() -> None:
    result = runner.invoke(app, ["demo", "--help"])
    assert result.exit_code == 0
    for option in ("--ranks", "--seconds", "--steps", "--out", "--kill", "--stall"):
        assert option in plain(result.output)
    assert "one dense process" in plain(result.output)


def test_version_is_the_packages() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert re.fullmatch(r"epee \d+\.\d+\.\d+\n", result.output)


def test_python_m_epee_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "epee", "--version"],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=REPOSITORY,
        check=True,
    )
    assert done.stdout == runner.invoke(app, ["--version"]).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3"], "--ranks must divide the 8 experts, got 3; use one of 1, 2, 4, 8"),
        (["--ranks", "0"], "--ranks must divide the 8 experts, got 0"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["epee", "demo", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"epee: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--seconds", "0"], ["--seconds", "86401"]])
def test_numbers_out_of_range_are_wrong_usage(arguments: list[str]) -> None:
    result = runner.invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in plain(result.output)


def clone(root: Path) -> Path:
    """A clone with one benchmark in it."""
    folder = root / "benchmarks"
    folder.mkdir()
    (root / "pyproject.toml").touch()
    (folder / "__init__.py").touch()
    (folder / "common.py").write_text('"""Shared."""\n\nOTHER = "x"\n')
    (folder / "some_file.py").write_text(
        '"""`epee bench thing`: measures the thing.\n\nMore.\n"""\n\nimport sys\n\nNAME = "thing"\n\n'
        'if __name__ == "__main__":\n    print(sys.argv[1:], flush=True)\n    sys.exit(7)\n'
    )
    return root


def test_benchmarks_are_found_by_their_name(tmp_path: Path) -> None:
    assert bench.find(clone(tmp_path)) == {"thing": bench.Benchmark("benchmarks.some_file", "measures the thing.")}


def test_bench_lists_the_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = clone(tmp_path)
    monkeypatch.setattr(bench, "repository", lambda: root)
    for arguments in ([], ["--help"], ["-h"]):
        result = runner.invoke(app, ["bench", *arguments])
        assert result.exit_code == 0
        assert "  thing  measures the thing." in result.output


def test_bench_hands_arguments_and_exit_code_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = clone(tmp_path)
    monkeypatch.setattr(bench, "repository", lambda: root)
    result = runner.invoke(app, ["bench", "thing", "--tokens", "3", "--help", "-x"])
    assert result.exit_code == 7
    assert capfd.readouterr().out == "['--tokens', '3', '--help', '-x']\n"


def test_an_unknown_benchmark_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = clone(tmp_path)
    monkeypatch.setattr(bench, "repository", lambda: root)
    result = runner.invoke(app, ["bench", "other"])
    assert str(result.exception) == "there is no benchmark 'other'; there are: thing"


def test_bench_outside_a_clone_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site-packages" / "epee" / "cli" / "bench.py"))
    with pytest.raises(UnsupportedError, match=r"needs a clone of the repository.*pip install -e"):
        bench.repository()


def test_this_repository_is_a_clone() -> None:
    assert bench.repository() == REPOSITORY
