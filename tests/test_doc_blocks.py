"""Python blocks and commands of README and docs are run, checked against the code, or marked with a reason.

A mark is a comment on the line above a block: `<!-- example: FILE -->`, `<!-- tested: FILE ... -->` or `<!-- not run:
REASON -->`. Without one, a Python block that begins with an import is a program and is run on two ranks here, or by the
test that `RUN_ELSEWHERE` names for its page; any other block is a part of one, whose names of epee must exist. Commands
are compared with the command line, the Makefile and the files that they name.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

import epee
from epee.backend.group import ProcessGroup
from epee.cli.bench import find
from epee.cli.main import app
from tests.harness import run_ranks
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_ELSEWHERE = {
    "docs/backend.md": "tests/backend/test_docs.py",
    "docs/fault-tolerance.md": "tests/backend/test_docs.py",
    "docs/training.md": "tests/nn/test_docs.py",
}
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^(?P<fence>```+)(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=fence)[ ]*$", re.M | re.S
)
INDENTED = re.compile(r"(?:^\n)((?:^    \S[^\n]*\n)(?:^(?:    [^\n]*)?\n)*)", re.M)
MARK = re.compile(r"(example|tested|not run): *(.+)")
SHELLS = ("sh", "bash", "shell", "console")
INTERNALS = ("decisions.md", "design.md", "dependencies.md", "protocol.md")
MAX_WORDS = 21_997  # may only fall


class Block(NamedTuple):
    """One block of a page: its language, the mark above it, and its text."""

    page: str
    language: str
    mark: str
    text: str

    @property
    def name(self) -> str:
        """The page and the first line, for the name of a test."""
        return f"{self.page}: {self.text.strip().splitlines()[0][:50] if self.text.strip() else ''}"


def blocks_of(path: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, then the indented ones that begin with a command."""
    page, text = str(path.relative_to(ROOT)), path.read_text()
    for found in BLOCK.finditer(text):
        yield Block(page, found["info"].strip(), found["mark"] or "", found["text"])
    for found in INDENTED.finditer(BLOCK.sub("", text)):
        yield Block(page, "", "", re.sub(r"^    ", "", found[1], flags=re.M))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language.split(" ")[0] == "python"]


def is_program(block: Block) -> bool:
    """Return whether a block is a whole program that no other test runs."""
    is_marked = bool(MARK.fullmatch(block.mark)) or "(" in block.language
    return block.text.startswith(("import ", "from ")) and not is_marked and block.page not in RUN_ELSEWHERE


PROGRAMS = [block for block in PYTHON if is_program(block)]
PARTS = [block for block in PYTHON if not block.text.startswith(("import ", "from ", "--8<--")) and not block.mark]


def test_pages_for_users_have_no_more_words_than_before() -> None:
    """Blocks do not count, nor do the bars and dashes of tables."""
    texts = [BLOCK.sub("", page.read_text()) for page in PAGES if page.name not in INTERNALS]
    assert sum(bool(re.search(r"\w", word)) for text in texts for word in text.split()) <= MAX_WORDS


def _run(rank: int, num_ranks: int, text: str, page: str, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    exec(compile(text, page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.name)
def test_a_program_of_a_page_runs_on_two_ranks(block: Block) -> None:
    run_ranks(_run, 2, block.text, block.page, free_port(), backend=None)


def test_blocks_are_found() -> None:
    assert len(PYTHON) >= 15
    assert sum(1 for block in BLOCKS if any(commands(block))) >= 10


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.mark], ids=lambda block: block.name)
def test_a_mark_names_files_that_exist_or_a_reason(block: Block) -> None:
    found = MARK.fullmatch(block.mark)
    if found is None:
        return  # a comment of another kind
    assert all((ROOT / name).exists() for name in found[2].split()) or found[1] == "not run", block.mark


def _defined(owner: str) -> list[Any]:
    """Return the objects that a variable of this name may be in a part of a program."""
    return {"epee": [epee], "buffer": [epee.Buffer, epee.LatencyBuffer], "group": [ProcessGroup]}.get(owner, [])


@pytest.mark.parametrize("block", PARTS, ids=lambda block: block.name)
def test_names_of_epee_in_a_part_of_a_program_exist(block: Block) -> None:
    try:
        tree = ast.parse(block.text)
    except SyntaxError:  # two programs side by side, or arguments that are left out
        names = re.findall(r"\bepee\.([A-Z]\w+)", block.text)
        assert all(hasattr(epee, name) for name in names), names
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owners = _defined(node.value.id)
            assert not owners or any(hasattr(owner, node.attr) for owner in owners), f"{node.value.id}.{node.attr}"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            called = [getattr(owner, node.func.attr, None) for owner in _defined(node.func.value.id)]
            allowed = {name for each in called if callable(each) for name in inspect.signature(each).parameters}
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            assert not allowed or given <= allowed, f"{node.func.attr}: {given - allowed}"


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the commands of a block, without comments and without the variables set in front of them."""
    if block.language not in ("", *SHELLS, "text"):
        return
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        try:
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
        except ValueError:  # a line of output
            continue
        while words and re.match(r"[A-Z_][A-Z0-9_]*=", words[0]):
            words = words[1:]
        if words and words[0].rpartition("/")[2] in CHECKS:
            yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_shell_block_has_known_commands_or_a_mark(page: Path) -> None:
    for block in blocks_of(page):
        if block.language in SHELLS and not block.mark:
            lines = [line for line in block.text.replace("\\\n", " ").splitlines() if line.split("#")[0].strip()]
            assert len(lines) == len(list(commands(block))), block.text


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {word for word in words[1:] if "=" not in word} <= targets


@cache
def subcommands() -> dict[str, Any]:
    """Return the commands of `epee` by name."""
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def check_epee(words: list[str]) -> None:
    if len(words) == 1 or words[1].startswith("-"):
        return
    assert words[1] in subcommands(), words
    if words[1] == "bench":
        assert all(word.isupper() or word in find(ROOT) for word in words[2:3]), words
        return
    options = {option for each in subcommands()[words[1]].params for option in each.opts}
    assert {word.split("=")[0] for word in words[2:] if word.startswith("--")} <= {*options, "--help"}, words


def check_script(words: list[str]) -> None:
    """Check the files of the repository that a command runs; names without a folder are the reader's own."""
    if words[1:3] == ["-m", "epee.compat"]:
        flags = words[3 : words.index("--")] if "--" in words else words[3:]
        assert set(flags) <= {"--deep-ep", "--mooncake"}, words
        words = words[words.index("--") + 1 :] if "--" in words else []
    modules = [word for option, word in pairwise(words) if option == "-m" and word.startswith("tests.")]
    assert all((ROOT / f"{module.replace('.', '/')}.py").exists() for module in modules), words
    for word in words:
        if re.match(r"(examples|benchmarks|tests|scripts)/", word) and "*" not in word:
            assert (ROOT / word.partition("::")[0]).exists(), words


def check_pip(words: list[str]) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    extras = {extra for word in words for extra in re.findall(r"(?:epee|\.)\[([\w,]+)\]", word)}
    assert all(re.search(rf"^{name} = \[", project, re.M) for each in extras for name in each.split(",")), words


CHECKS = {
    "make": check_make,
    "epee": check_epee,
    "pip": check_pip,
    "python": check_script,
    "python3": check_script,
    "torchrun": check_script,
    "test": check_script,
    "srun": check_script,
    "shake": check_script,
    "compare-tests": check_script,
}
COMMANDS = [(block.page, words) for block in BLOCKS for words in commands(block)]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(words)[:60]}" for page, words in COMMANDS]
)
def test_a_command_of_a_page_exists(page: str, words: list[str]) -> None:
    CHECKS[words[0].rpartition("/")[2]](words)
