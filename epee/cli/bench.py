"""`epee bench NAME`: run a benchmark of the repository.

Benchmarks are not part of the installed package; they lie in the clone's `benchmarks/` folder. A script there with a
line `NAME = "..."` is a benchmark of that name, and its docstring's first line is its description. Scripts are read for
that, not imported, and run in an interpreter of their own, so that they may start processes and choose their threads
freely. All arguments after the name are passed to the script, `--help` too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import typer

from .. import env
from ..errors import InvalidArgument, UnsupportedError

PASS_ON = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],  # `bench` shows its own help, a benchmark shows its own
}
_INTERRUPTED = 130


class Benchmark(NamedTuple):
    """A script in `benchmarks/`: its module name and its one-line description."""

    module: str
    description: str


def repository() -> Path:
    """Return the root of the clone that this package runs from.

    Raises:
        UnsupportedError: there is none: the package was installed without its repository.
    """
    root = Path(__file__).resolve().parents[2]
    if (root / "benchmarks").is_dir() and (root / "pyproject.toml").is_file():
        return root
    raise UnsupportedError(
        f"epee bench needs a clone of the repository: there is no benchmarks/ beside the package in {root}; "
        "clone the repository and run `pip install -e .` or `make bench` there"
    )


def find(root: Path) -> dict[str, Benchmark]:
    """Return the benchmarks of the clone at `root` by name."""
    found = {}
    for path in sorted((root / "benchmarks").rglob("*.py")):
        tree = ast.parse(path.read_text())
        name = _constant(tree, "NAME")
        if name is not None:
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            first_line = (ast.get_docstring(tree) or "").partition("\n")[0]
            found[name] = Benchmark(module, first_line.removeprefix(f"`epee bench {name}`: "))
    return found


def bench(
    arguments: list[str] | None = typer.Argument(
        None, metavar="[NAME] [OPTIONS]...", help="The benchmark and its options; nothing lists them."
    ),
) -> None:
    """Run a benchmark from the clone's benchmarks/ folder; without a name, list them."""
    root = repository()
    found = find(root)
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        typer.echo(_listing(found))
        return
    if name not in found:
        raise InvalidArgument(f"there is no benchmark {name!r}; there are: {', '.join(found) or 'none'}")
    raise typer.Exit(_run(root, found[name].module, rest))


def _run(root: Path, module: str, arguments: list[str]) -> int:
    try:
        return subprocess.call([sys.executable, "-m", module, *arguments], env=env.for_child(root))
    except KeyboardInterrupt:  # the benchmark got the signal too; subprocess.call has waited and ended it
        return _INTERRUPTED


def _listing(found: dict[str, Benchmark]) -> str:
    width = max((len(name) for name in found), default=0)
    lines = [f"  {name:<{width}}  {benchmark.description}" for name, benchmark in sorted(found.items())]
    return "\n".join(
        ["Usage: epee bench NAME [OPTIONS]...", "", "Benchmarks (epee bench NAME --help shows options):", *lines]
    )


def _constant(tree: ast.Module, name: str) -> str | None:
    """Return the string that a module assigns to `name` on its own top level."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if name in targets and isinstance(node.value.value, str):
                return node.value.value
    return None
