"""Promises about the package as a whole: names, environment, what an import does, what the README shows."""

from __future__ import annotations

import ast
import builtins
import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import epee
from epee import env, errors
from tests.forked import Script

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "epee").rglob("*.py"))
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def test_the_public_names_are_the_ones_exported_and_few() -> None:
    assert len(epee.__all__) == len(set(epee.__all__)) <= 32
    assert all(hasattr(epee, name) for name in epee.__all__)
    public = {name for name in vars(epee) if not name.startswith("_")}
    packages = {path.name.removesuffix(".py") for path in (ROOT / "epee").iterdir()}
    assert public - packages - {"annotations"} <= set(epee.__all__)


def test_every_public_name_is_documented() -> None:
    for name in epee.__all__:
        if name != "__version__":
            assert getattr(epee, name).__doc__, name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_opens_with_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_every_exception_in_a_table_of_the_docs_can_be_imported_from_epee() -> None:
    rows = [line for page in DOCS for line in page.read_text().splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`(?:epee\.)?(?:errors\.)?(\w+)`", row)}
    raised = {name for name in named if name.endswith("Error") or hasattr(errors, name)}
    raised -= {name for name in raised if hasattr(builtins, name)} | {"errors"}
    assert {"EvictedError", "NoQuorumError", "PeerError", "InvalidState"} <= raised
    assert raised <= set(epee.__all__)


def test_the_environment_is_read_in_one_place() -> None:
    readers = [path for path in SOURCES if re.search(r"\bos\.(environ|getenv)", path.read_text())]
    assert readers == [ROOT / "epee" / "env.py"]


def test_the_table_of_variables_is_what_the_sources_use() -> None:
    used = set()
    for path in SOURCES:
        if path.name != "env.py":
            used.update(re.findall(r"""\bget\w*\(\s*["']([A-Z_]+)["']|["'](EPEE_[A-Z_]+)["']""", path.read_text()))
    used = {name for pair in used for name in pair if name}
    assert used == {variable.name for variable in env.TABLE}


def test_the_page_of_variables_is_the_table() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.*?) \| (.*) \|$", page, re.MULTILINE)

    def shown(value: object) -> str:
        """Return a default as the page shows it."""
        if isinstance(value, bool):
            return str(int(value))
        return f"{value:g}" if isinstance(value, float) else str(value) or "unset"

    assert rows == [(each.name, shown(each.default), each.doc) for each in env.TABLE]


@pytest.mark.parametrize("variable", env.TABLE, ids=lambda variable: variable.name)
def test_a_bad_variable_is_named(variable: env.Variable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variable.name, raising=False)
    assert env.get(variable.name) == variable.default
    if isinstance(variable.default, str):
        return  # any text will do
    monkeypatch.setenv(variable.name, "nonsense!")
    with pytest.raises(errors.InvalidArgument, match=variable.name):
        env.get(variable.name)


def test_no_untrusted_bytes_become_objects() -> None:
    forbidden = re.compile(r"\b(import pickle|import marshal|pickle\.|marshal\.|torch\.load\(|[^.\w]eval\()")
    offenders = [str(path) for path in SOURCES if forbidden.search(path.read_text())]
    assert not offenders


def test_only_the_command_line_prints() -> None:
    offenders = [
        str(path)
        for path in SOURCES
        if "cli" not in path.parts and "demo" not in path.parts and re.search(r"^\s*print\(", path.read_text(), re.M)
    ]
    assert not offenders


IMPORT_PROBE = """
import os, threading, torch, torch.distributed
def state():
    fds = ["/proc/self/fd/" + fd for fd in os.listdir("/proc/self/fd")]
    sockets = [fd for fd in fds if os.path.lexists(fd) and os.readlink(fd).startswith("socket")]
    return len(os.listdir("/proc/self/task")), threading.active_count(), len(sockets)
before = state()
import epee
after = state()
assert before == after, (before, after)
assert not torch.cuda.is_initialized()
"""


def test_an_import_starts_no_thread_opens_no_socket_and_touches_no_gpu() -> None:
    subprocess.run([sys.executable, "-c", IMPORT_PROBE], check=True, timeout=50)


def test_the_example_of_the_readme_is_the_one_that_is_tested() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = re.findall(r"<!-- example: (\S+) -->\n```python\n(.*?)```", readme, re.S)
    assert shown
    for name, code in shown:
        assert (ROOT / name).read_text().split('"""\n\n', 1)[1] == code
        assert len(code.strip().splitlines()) <= 26


def run_by_torchrun(path: Path) -> str:
    """Run an example by the README's command, which imports torch three times."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    no_gpus = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, env=no_gpus)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_as_torchrun_does(path: Path) -> str:
    """Run an example in two forked processes with the environment that torchrun gives them."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    shared |= {"CUDA_VISIBLE_DEVICES": "", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with contextlib.ExitStack() as ends:
        ranks = [
            ends.enter_context(Script(path, os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
            for rank in range(2)
        ]
        told = [process.communicate(55)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], told
    return "".join(told)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_the_examples_run(path: Path) -> None:
    """On CPU tensors, wherever this is; `tests/gpu/test_example_gpu.py` runs the second one on GPUs, by torchrun."""
    told = run_by_torchrun(path) if path.name == "first.py" else run_as_torchrun_does(path)
    assert "rank 0" in told
    assert "rank 1" in told


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target
