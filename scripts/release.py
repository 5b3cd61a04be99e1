"""Wheel and sdist of epee: built from the tracked files, checked, and used in a fresh venv (`make release`).

    scripts/release [--torch REQUIREMENT]   # build, check, install, use; then both files lie in dist/
    scripts/release --versions              # with each Python and torch at hand: the table of docs/dependencies.md

The checks compare with the checkout: the wheel has every file of `epee/` except notes (*.md), the licence, the README
as description and the version of `epee.__version__`, and nothing else; the sdist is what the wheel was built from. What
is used in the venv is what the README shows first. Each command has a limit of time; a `ReleaseError` ends the script.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import email
import functools
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
PYTHONS = range(10, 16)  # minor versions of Python 3 in the table
MAX_TORCH_MB = 300  # CPU builds are smaller, builds with CUDA larger, and those bring gigabytes more
LICENCE = "licenses/LICENSE"
REMEDY = "see [project] of pyproject.toml"
MADE_BY_SETUPTOOLS = {"PKG-INFO", "setup.cfg", "epee.egg-info"}
EXAMPLE = re.compile(r"^<!-- example: examples/first\.py -->\n```python\n(.*?)^```$", re.M | re.S)
TABLE = re.compile(r"(<!-- versions -->\n)(.*?)(<!-- end of versions -->)", re.S)
SIZE = re.compile(r"Downloading torch-\S+\.whl \(([\d.]+) (kB|MB|GB)\)")
ON_DISK = re.compile(r"(?:Processing|Using cached|already downloaded) (/\S*torch-\S+\.whl)")


class ReleaseError(Exception):
    """A file or a command of the release breaks a rule: name, rule, value, remedy."""


def say(text: str) -> None:
    """Print a line at once, also into a file."""
    print(text, flush=True)


def run(name: str, command: Sequence[str | Path], limit_s: float, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command and return what it printed; it and all that it started end at its limit of time."""
    say(f"==> {name}: {' '.join(map(str, command))}")
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        output.seek(0)
        text = output.read()
    tail = "\n".join(text.splitlines()[-30:])
    if code is None:
        raise ReleaseError(f"{name}: must end within {limit_s:g} s, was ended after that; see its output:\n{tail}")
    if code:
        raise ReleaseError(f"{name}: must exit with 0, got {code}; run it by hand, see its output:\n{tail}")
    say(f"    {time.monotonic() - begin:.1f} s")
    return text


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads its own group, and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tool(name: str) -> list[str]:
    """Return the command that runs a tool of the extra `dev`."""
    if importlib.util.find_spec(name) is None:
        raise ReleaseError(f"{name}: must be installed beside {sys.executable}, is not; make install")
    return [sys.executable, "-m", name]


def version_of_checkout(root: Path = ROOT) -> str:
    """Return `epee.__version__`, the only place where the version is written, without an import."""
    for node in ast.parse((root / "epee" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(each) for each in node.targets] == ["__version__"]:
            return str(ast.literal_eval(node.value))
    raise ReleaseError("epee/__init__.py: must assign __version__ a string, found none; add it")


def package_files(root: Path = ROOT) -> set[str]:
    """Return the files of `epee/` that belong into the wheel."""
    files = {path for path in (root / "epee").rglob("*") if path.is_file() and path.suffix not in (".md", ".pyc")}
    return {"epee/py.typed", *(str(path.relative_to(root)) for path in files)}


def git(*arguments: str) -> str:
    """Return what git prints about the checkout."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


def build(folder: Path, is_isolated: bool = True) -> tuple[Path, Path]:
    """Build sdist and wheel, the wheel from the sdist, from a copy of the tracked files; return wheel and sdist."""
    if changes := git("status", "--porcelain", "--untracked-files=no"):
        say(f"note: these files are not as they were committed:\n{changes.rstrip()}")
    for name in filter(None, git("ls-files", "-z").split("\0")):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    options = ["--outdir", str(folder / "dist"), *([] if is_isolated else ["--no-isolation"])]
    run("build", [*tool("build"), *options, folder / "source"], 300, folder)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


def require_equal(name: str, rule: str, got: object, wanted: object, remedy: str) -> None:
    """Raise a ReleaseError unless both are equal; sets are shown by their difference."""
    if got == wanted:
        return
    if isinstance(got, set) and isinstance(wanted, set):
        got = f"missing {sorted(wanted - got)[:5]}, too many {sorted(got - wanted)[:5]}"
    raise ReleaseError(f"{name}: {rule}, got {got}; {remedy}")


def check_wheel(wheel: Path, root: Path = ROOT) -> None:
    """Check files, metadata, entry point, licence and description of a wheel against the checkout."""
    version = version_of_checkout(root)
    name, info = f"epee-{version}-py3-none-any.whl", f"epee-{version}.dist-info"
    require_equal(wheel.name, f"must be called {name}, as of epee/__init__.py", wheel.name, name, "see pyproject.toml")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        files = {name for name in names if not name.startswith(f"{info}/")}
        remedy = "git add what is missing and name it in [tool.setuptools.package-data]"
        require_equal(name, "must hold the files of epee/ alone", files, package_files(root), remedy)
        require_equal(name, "must hold the licence", names & {f"{info}/{LICENCE}"}, {f"{info}/{LICENCE}"}, REMEDY)
        licence = archive.read(f"{info}/{LICENCE}").decode()
        metadata = email.message_from_string(archive.read(f"{info}/METADATA").decode())
        found = PathDistribution(zipfile.Path(archive, f"{info}/"))
        points = {point.name: point.value for point in found.entry_points}
    want = {"Name": "epee", "Version": version, "License-Expression": "Apache-2.0"}
    want |= {"Description-Content-Type": "text/markdown"}
    for key, value in want.items():
        require_equal(name, f"its {key} must be {value}", metadata.get(key), value, REMEDY)
    require_equal(name, "must have one command", points, {"epee": "epee.cli.main:main"}, REMEDY)
    for file, text in (("LICENSE", licence), ("README.md", str(metadata.get_payload()))):
        got = "it" if text.strip() == (root / file).read_text().strip() else "another text"
        require_equal(name, f"must have the text of {file}", got, "it", REMEDY)
    say(f"    {name}: {len(files)} files, {sum(file.endswith('.cuh') for file in files)} of them device code")


def check_sdist(sdist: Path, root: Path = ROOT) -> None:
    """Check that an sdist holds what the wheel is built from, and no tests, benchmarks or examples."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    names = {name for name in names if name.partition("/")[0] not in MADE_BY_SETUPTOOLS}
    wanted = package_files(root) | {"LICENSE", "README.md", "MANIFEST.in", "pyproject.toml"}
    rule = "must hold what the wheel is built from and nothing else"
    require_equal(sdist.name, rule, names, wanted, "see MANIFEST.in")
    say(f"    {sdist.name}: {len(names)} files")


def check(wheel: Path, sdist: Path, root: Path = ROOT) -> None:
    """Check both files, and that a package index can show their description."""
    check_wheel(wheel, root)
    check_sdist(sdist, root)
    run("description", [*tool("twine"), "--no-color", "check", "--strict", wheel, sdist], 60, ROOT)


class Venv:
    """A fresh virtual environment, and a folder outside the checkout where its commands run.

    Attributes:
        folder: where both are.
        site: where packages are installed.
    """

    def __init__(self, folder: Path, python: str | Path = sys.executable) -> None:
        self.folder, self.outside = folder, folder / "outside"
        self.outside.mkdir(parents=True)
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        self.env = kept | {"PATH": f"{folder / 'venv' / 'bin'}{os.pathsep}{kept['PATH']}", "PYTHONUNBUFFERED": "1"}
        run("venv", [python, "-m", "venv", folder / "venv"], 120, self.outside)
        (self.site,) = (folder / "venv" / "lib").glob("python3*/site-packages")

    def run(self, name: str, *command: str | Path, limit_s: float = 120) -> str:
        """Run a command of the venv, outside the checkout."""
        path = self.folder / "venv" / "bin" / command[0]
        return run(name, [path, *command[1:]], limit_s, self.outside, self.env)

    def install(self, *what: str | Path) -> None:
        """Install by pip."""
        self.run("install", "python", "-m", "pip", "install", "--quiet", *what, limit_s=600)

    def use(self, wheel: Path, torch: str | Path) -> None:
        """Install torch and the wheel, and run what the README shows first."""
        version = version_of_checkout()
        self.install(torch)
        self.install(wheel)
        found = self.run("import", "python", "-c", "import epee; print(epee.__version__, epee.__file__)").split()
        want = [version, str(self.site / "epee" / "__init__.py")]
        require_equal("import epee", f"must be the wheel's, {want}", found, want, "see what else is on sys.path")
        shown = self.run("version", "epee", "--version").strip()
        require_equal("epee --version", f"must print epee {version}", shown, f"epee {version}", "see epee/cli/main.py")
        (self.outside / "first.py").write_text(twenty_lines())
        name, launcher = "twenty lines of the README", ("torchrun", "--standalone", "--nproc-per-node", "2")
        ranks = set(re.findall(r"rank (\d): received \d+ rows", self.run(name, *launcher, "first.py")))
        require_equal(name, "both ranks must report their rows", ranks, {"0", "1"}, "run examples/first.py")
        self.run("doctor", "epee", "doctor")
        self.run("deep_ep", "python", "-m", "epee.compat", "--", "python", "-c", "import deep_ep")

    def use_without_torch(self, wheel: Path) -> None:
        """Install the wheel and what it needs except torch, and compile every module."""
        self.install("--no-deps", wheel)
        (info,) = self.site.glob("epee-*.dist-info")
        needed = [each.split(";")[0].strip() for each in PathDistribution(info).requires or [] if "extra" not in each]
        self.install(*[each for each in needed if not each.startswith("torch")])
        self.run("compile", "python", "-W", "error", "-m", "compileall", "-q", "-f", self.site / "epee")


def twenty_lines() -> str:
    """Return the first program of the README."""
    found = EXAMPLE.search((ROOT / "README.md").read_text())
    if found is None:
        raise ReleaseError("README.md: must show examples/first.py, has no such block; see tests/test_doc_blocks.py")
    return found[1]


def interpreter(minor: int) -> Path | None:
    """Return an interpreter of Python 3.`minor` from PATH or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = shutil.which(name := f"python3.{minor}")
    paths: list[str | Path] = [*sorted(pyenv.glob(f"versions/3.{minor}.*/bin/{name}")), *([on_path] if on_path else [])]
    for path in paths:
        if subprocess.run([path, "-c", "import venv"], capture_output=True, timeout=60, check=False).returncode == 0:
            return Path(path)
    return None


def torch_versions() -> list[str]:
    """Return the newest version of each minor release of torch from 2.10 on that pip lists."""
    text = run("versions of torch", [sys.executable, "-m", "pip", "index", "versions", "torch"], 120, ROOT)
    (listed,) = re.findall(r"^Available versions: (.*)$", text, re.M)
    newest: dict[tuple[int, int], str] = {}
    for version in listed.split(", "):  # the newest first
        major, minor = map(int, version.split(".")[:2])
        if (major, minor) >= (2, 10):
            newest.setdefault((major, minor), version.partition("+")[0])
    return list(newest.values())[::-1]


def why_not_fetched(venv: Venv, version: str) -> str:
    """Fetch a wheel of torch into the folder `wheels` of a venv; return "" or why not: of a large one only its size."""
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "-d", str(venv.folder / "wheels")]
    pip = [str(venv.folder / "venv" / "bin" / "python"), "-m", "pip", "download", *options, f"torch=={version}"]
    say(f"==> fetch torch {version}, no more than {MAX_TORCH_MB} MB")
    process = subprocess.Popen(
        pip, env=venv.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    limit = threading.Timer(300, end, [process])
    limit.start()
    reason = "pip has none"
    try:
        assert process.stdout is not None
        for line in process.stdout:
            say(f"    {line.rstrip()}")
            size_mb = size_of(line)
            if size_mb > MAX_TORCH_MB:
                return f"{size_mb:.0f} MB"
            if "constraint" in line:
                reason = "above pip's cap"
        code = process.wait()
        return "no answer" if code == -signal.SIGKILL else reason if code else ""
    finally:
        limit.cancel()
        end(process)


def size_of(line: str) -> float:
    """Return the MB of the wheel of torch that a line of pip's output names, else 0."""
    if found := SIZE.search(line):
        return float(found[1]) * {"kB": 1e-3, "MB": 1, "GB": 1e3}[found[2]]
    if found := ON_DISK.search(line):
        return Path(found[1]).stat().st_size / 1e6
    return 0.0


def row_of_versions(wheel: Path, minor: int, torches: Sequence[str], folder: Path) -> list[str]:
    """Return a row of the table: a Python, what ran there without torch, and with each torch that can be had."""
    python = interpreter(minor)
    if python is None:
        return [f"3.{minor}", "no interpreter", *["-" for _ in torches]]
    plain = Venv(folder / f"3.{minor}", python)
    version = plain.run("version", "python", "-c", "import platform; print(platform.python_version())").strip()
    row = [version, outcome("installs", functools.partial(plain.use_without_torch, wheel))]
    for torch in torches:
        reason = why_not_fetched(plain, torch)
        if not reason:
            (fetched,) = (plain.folder / "wheels").glob("torch-*.whl")
            fresh = Venv(plain.folder / "torch", python)
            reason = outcome("**yes**", functools.partial(fresh.use, wheel, fetched))
            shutil.rmtree(plain.folder / "torch")
            fetched.unlink()
        row.append(reason)
    shutil.rmtree(plain.folder)
    return row


def outcome(good: str, steps: Callable[[], None]) -> str:
    """Return what a cell of the table says of steps that ran, with `good` where none failed."""
    try:
        steps()
    except ReleaseError as error:
        say(str(error))
        return f"**fails: {str(error).partition(':')[0]}**"
    return good


def write_versions(wheel: Path, folder: Path) -> None:
    """Use a wheel with every Python and torch at hand, and write what was run into docs/dependencies.md."""
    page, torches = ROOT / "docs" / "dependencies.md", torch_versions()
    rows = [["Python", "without torch", *(f"torch {torch}" for torch in torches)], ["---"] * (len(torches) + 2)]
    rows += [row_of_versions(wheel, minor, torches, folder) for minor in PYTHONS]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    when = f"{datetime.date.today()}, Linux {platform.machine()}, `scripts/release --versions`:"
    table = "\n".join([when, "", *lines, ""])
    page.write_text(TABLE.sub(lambda found: f"{found[1]}{table}{found[3]}", page.read_text()))
    say(table)


def main(arguments: Sequence[str]) -> None:
    """Build, check and use; what has passed goes to dist/."""
    parser = argparse.ArgumentParser(prog="scripts/release", description="Build, check and use a wheel of epee.")
    parser.add_argument("--torch", default=TORCH, help=f"what pip installs as torch (default: {TORCH})")
    parser.add_argument("--versions", action="store_true", help="write the table of docs/dependencies.md instead")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="epee-release-") as name:
        folder = Path(name)
        wheel, sdist = build(folder)
        check(wheel, sdist)
        if given.versions:
            write_versions(wheel, folder)
            return
        Venv(folder / "use").use(wheel, given.torch)
        (ROOT / "dist").mkdir(exist_ok=True)
        for path in (wheel, sdist):
            shutil.copy(path, ROOT / "dist" / path.name)
            say(f"passed: dist/{path.name}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ReleaseError as error:
        sys.exit(f"release: {error}")
