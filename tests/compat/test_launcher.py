"""`python -m epee.compat -- CMD`: what processes below it import, from an installed wheel in an environment of its own.

The wheel is built from a copy of the tree and installed into a fresh venv, which sees torch through a `.pth` file. The
programs are what users have: a shell script, torchrun, mp.spawn.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("launcher")]

LOOK = """
import importlib, importlib.metadata, json, sys
def look(names):
    return {name: getattr(importlib.import_module(name), "__file__", None) for name in names}
"""
NAMES = [
    "deep_ep.utils.math", "deep_ep", "deep_ep.utils", "deep_ep.buffers.elastic", "deep_ep.buffers.legacy", "deep_ep._C",
    "deep_ep.hybrid_ep_buffer", "deep_ep.comm", "deep_ep_cpp", "mooncake.mooncake_ep_buffer", "mooncake.pg",
    "mooncake.ep", "mooncake.mooncake_elastic_buffer",
]  # fmt: skip

# rank 0 or 1 below torchrun; each has a child that mp.spawn starts
RANK = f"""{LOOK}
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
NAMES = {NAMES!r}

def child(rank, out):
    from deep_ep import Buffer
    from deep_ep.buffers.legacy import Buffer as other
    assert Buffer is other
    open(out + f".child{{rank}}", "w").write(json.dumps(look(NAMES)))

if __name__ == "__main__":
    from importlib.util import find_spec
    assert find_spec("deep_ep") is not None
    from mooncake import pg, ep
    import mooncake.ep as again
    from deep_ep_cpp import EventHandle
    import deep_ep
    assert again is ep and EventHandle is deep_ep.EventHandle and ep.pg is pg
    rank, out = int(os.environ["RANK"]), sys.argv[1]
    dist.init_process_group("mooncake-cpu", pg_options=pg.MooncakeBackendOptions(torch.ones(2, dtype=torch.int32)))
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=4, hidden=64, num_topk=1)
    x = torch.full((2, 64), rank + 1.0, dtype=torch.bfloat16)
    idx = torch.tensor([[0], [1]])
    got = buffer.dispatch(x, topk_idx=idx, topk_weights=torch.ones(2, 1), num_experts=2)
    assert got[0][:, 0].tolist() == [1.0, 2.0], got[0]
    back = buffer.combine(got[0], got[3])[0]
    assert torch.equal(back, x)
    mp.spawn(child, (f"{{out}}.{{rank}}",), nprocs=1)
    found = look(NAMES)
    found["version"] = importlib.metadata.version("deep_ep")
    open(f"{{out}}.{{rank}}", "w").write(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
"""


class Place:
    """An environment with the wheel installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = folder / "venv" / "lib" / version / "site-packages"

    def run(self, *command: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
        """Run a command in the venv, without this process's PYTHONPATH."""
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environ["PATH"] = f"{self.python.parent}{os.pathsep}{environ['PATH']}"
        environ |= {name: value for name, value in changes.items() if value is not None}
        return subprocess.run(
            command, env=environ, cwd=self.folder, capture_output=True, text=True, timeout=200, check=False
        )

    def launch(self, options: Sequence[str], *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command below the launcher."""
        return self.run(str(self.python), "-m", "epee.compat", *options, "--", *command)

    def found(self, options: Sequence[str], names: Sequence[str]) -> Any:
        """Return the files of modules as a process below the launcher finds them."""
        code = f"{LOOK}\nprint(json.dumps(look({list(names)!r})))"
        done = self.launch(options, str(self.python), "-c", code)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Build the wheel from a copy and install it, as a user would."""
    folder = tmp_path_factory.mktemp("launcher")
    source = folder / "source"
    shutil.copytree(ROOT / "epee", source / "epee", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-index"]
    built = [*pip, "wheel", *options, "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(built, check=True, capture_output=True, timeout=200)
    venv.create(folder / "venv", with_pip=False)
    made = Place(folder)
    (wheel,) = folder.glob("epee-*.whl")
    installed = [*pip, "--python", str(made.python), "install", *options, str(wheel)]
    subprocess.run(installed, check=True, capture_output=True, timeout=200)
    (made.site / "torch.pth").write_text(sysconfig.get_paths()["purelib"])
    return made


def test_every_process_below_a_shell_torchrun_and_spawn_finds_epee(place: Place) -> None:
    (place.folder / "rank.py").write_text(RANK)
    (place.folder / "run.sh").write_text(
        '#!/bin/sh\nexec python -m torch.distributed.run --standalone --nproc-per-node 2 rank.py "$1"\n'
    )
    done = place.launch([], "sh", "run.sh", "out")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        for name in (f"out.{rank}", f"out.{rank}.child0"):
            found = json.loads((place.folder / name).read_text())
            assert found.pop("version", "2.1.0+epee") == "2.1.0+epee"
            assert set(found) == set(NAMES)
            assert all(file.startswith(str(place.site / "epee" / "compat")) for file in found.values()), found
            assert not any("shims" in file for file in found.values()), found


def real_package(place: Place, name: str, files: dict[str, str]) -> None:
    """Put a package into the venv that is not epee's."""
    (place.site / name).mkdir(exist_ok=True)
    for file, text in files.items():
        (place.site / name / file).write_text(text)


def test_only_what_is_asked_for_is_taken(place: Place) -> None:
    real_package(place, "deep_ep", {"__init__.py": "", "utils.py": ""})
    real_package(place, "mooncake", {"__init__.py": "REAL = 1", "pg.py": "", "engine.py": "import mooncake.pg as pg"})
    mine, real = str(place.site / "epee"), str(place.site / "deep_ep")
    try:
        found = place.found(["--mooncake"], ["deep_ep", "deep_ep.utils", "mooncake", "mooncake.pg", "mooncake.engine"])
        assert [file.startswith(mine) for file in found.values()] == [False, False, False, True, False], found
        assert found["deep_ep"].startswith(real)
        found = place.found(["--deep-ep"], ["deep_ep", "deep_ep.utils", "mooncake.pg"])
        assert [file.startswith(mine) for file in found.values()] == [True, True, False], found
    finally:
        for name in ("deep_ep", "mooncake"):
            shutil.rmtree(place.site / name)


def test_without_its_switch_a_stand_in_yields_in_words(place: Place) -> None:
    code = "import logging; logging.basicConfig(level=logging.INFO)\n"
    code += "import deep_ep, deep_ep.utils; print(deep_ep.__file__)"
    below = [str(place.python), "-c", code]
    off = place.launch([], "env", "-u", "EPEE_AS_DEEP_EP", *below)
    assert off.returncode == 1
    assert "No module named 'deep_ep': epee's stand-in for it is switched off (EPEE_AS_DEEP_EP is not 1" in off.stderr
    real_package(place, "deep_ep", {"__init__.py": "", "utils.py": ""})
    try:
        off = place.launch([], "env", "EPEE_AS_DEEP_EP=0", *below)
        assert off.returncode == 0, off.stderr
        assert off.stdout.strip() == str(place.site / "deep_ep" / "__init__.py")
        assert f"EPEE_AS_DEEP_EP is not 1: deep_ep is the real one, {off.stdout.strip()}" in off.stderr
    finally:
        shutil.rmtree(place.site / "deep_ep")


def test_a_command_that_is_not_there_is_named(place: Place) -> None:
    done = place.launch([], "no-such-command")
    assert done.returncode == 127
    assert "no-such-command: No such file" in done.stderr
    done = place.launch([])
    assert done.returncode == 2
    assert "vllm serve" in done.stderr
