"""The clients' own files, taken at run time from their wheels on the package index; never part of this repository.

Each wheel is pinned by version and hash, asked for as one platform has it (only its Python files are read), and kept
in the user's cache folder. Where no index is reachable the tests are skipped, with pip's reason; a wheel that is not
the pinned one fails them. EPEE_CLIENTS=none fetches nothing, EPEE_CLIENTS=all the large wheel of vLLM as well.

For a machine without a network: `python -m tests.clients.fetch FOLDER` fills a folder with the files alone (half a MB;
with EPEE_CLIENTS=all vLLM's, too), and with EPEE_CLIENTS_DIR=FOLDER the tests there look nowhere else.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

_LIMIT_S = 120


@dataclass(frozen=True)
class Client:
    """A wheel and the files that are read from it.

    Attributes:
        name, version, sha256: of the wheel.
        python, platform: whose wheel it is, "" for a pure one.
        files: of the wheel.
        is_large: more than CI downloads.
        is_source: there is no wheel, only an archive of sources.
    """

    name: str
    version: str
    sha256: str
    files: tuple[str, ...]
    python: str = ""
    platform: str = ""
    is_large: bool = False
    is_source: bool = False

    @property
    def folder(self) -> str:
        """What the folder of its files is called."""
        return f"{self.name}-{self.version}-{self.sha256[:12]}"

    def is_in(self, folder: Path) -> bool:
        """Whether all files are there."""
        return all((folder / file).is_file() for file in self.files)


_DISPATCHERS = "sglang/srt/layers/moe/token_dispatcher"
MEGATRON = Client(
    "megatron-core",
    "0.19.2",
    "8e3e486f13f559450415b9b9dc0ff3331a0bb83dd154553f7f350a75ff9c42b5",
    ("megatron/core/transformer/moe/fused_a2a.py",),
    "3.12",
    "manylinux_2_28_x86_64",
)
TORCHTITAN = Client(
    "torchtitan",
    "0.3.0",
    "5563ccf9a295b24e00a36087149e9c2d0686cecbd3972c31e67227029293af42",
    ("torchtitan/distributed/deepep/deepep.py", "torchtitan/distributed/deepep/hybridep.py"),
)
SGLANG = Client(
    "sglang",
    "0.5.23",
    "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937",
    (
        f"{_DISPATCHERS}/base.py",
        f"{_DISPATCHERS}/deepep.py",
        f"{_DISPATCHERS}/deepep_v2.py",
        f"{_DISPATCHERS}/mooncake.py",
        "sglang/srt/layers/moe/utils.py",
    ),
    "3.11",
    "manylinux_2_34_x86_64",
)

DEEPSPEED = Client(
    "deepspeed",
    "0.19.8",
    "9e491abd0827ea5c389dd702e15e11e13d83d904bac4a20d6c2a4cb37207a9af",
    ("deepspeed/module_inject/auto_ep_comm.py",),
    is_source=True,
)

_FINALIZE = "vllm/model_executor/layers/fused_moe/prepare_finalize"
VLLM = Client(
    "vllm",
    "0.33.0",
    "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
    (
        f"{_FINALIZE}/deepep_ht.py",
        f"{_FINALIZE}/deepep_ll.py",
        f"{_FINALIZE}/deepep_v2.py",
        "vllm/distributed/device_communicators/all2all.py",
        "vllm/distributed/device_communicators/base_device_communicator.py",
    ),
    "3.12",
    "manylinux_2_28_x86_64",
    is_large=True,
)


@cache
def files_of(client: Client) -> Path:
    """Return the folder below which the client's files lie as in its wheel; skip the test where they cannot be had."""
    filled = os.environ.get("EPEE_CLIENTS_DIR", "")
    if filled:
        folder = Path(filled) / client.folder
        if not client.is_in(folder):
            pytest.skip(f"EPEE_CLIENTS_DIR={filled} lacks {client.folder}: python -m tests.clients.fetch {filled}")
        return folder
    wanted = os.environ.get("EPEE_CLIENTS", "")
    if wanted == "none":
        pytest.skip("EPEE_CLIENTS=none: the clients' files are not fetched")
    if client.is_large and wanted != "all":
        pytest.skip(f"the wheel of {client.name} is large: it is fetched with EPEE_CLIENTS=all only")
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epee-clients"
    folder = root / client.folder
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "lock", "w") as lock:  # one process downloads, the others wait for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not client.is_in(folder):
            with tempfile.TemporaryDirectory(dir=root) as place:
                made = Path(place) / "files"
                _extract(_downloaded(client, Path(place)), client, made)
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
    return folder


def _extract(archive: Path, client: Client, place: Path) -> None:
    """Write the client's files from a wheel, or from an archive of sources, whose one folder is left out."""
    if not client.is_source:
        with zipfile.ZipFile(archive) as wheel:
            for file in client.files:
                wheel.extract(file, place)
        return
    with tarfile.open(archive) as sources:
        for file in client.files:
            member = sources.extractfile(f"{client.name}-{client.version}/{file}")
            assert member is not None, f"{archive.name} has no {file}"
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            (place / file).write_bytes(member.read())


def _downloaded(client: Client, place: Path) -> Path:
    """Return the pinned wheel; skip where there is no index to ask, fail where it has another file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--timeout=15", "--retries=1", "-d", str(place)]
    # sources tell pip their name by a program of theirs, which wants torch: this environment's
    command += ["--no-build-isolation", "--no-binary=:all:"] if client.is_source else ["--only-binary=:all:"]
    if client.python:
        command += ["--python-version", client.python, "--platform", client.platform]
    command.append(f"{client.name}=={client.version}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{client.name} {client.version} did not come from the package index in {_LIMIT_S} s")
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or "pip gave no reason").splitlines()[-1]
        pytest.skip(f"{client.name} {client.version} cannot be had from a package index here: {reason}")
    (wheel,) = place.glob(f"{client.name.replace('-', '_')}-*")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert found == client.sha256, f"{wheel.name} is not the pinned file: its sha256 is {found}"
    return wheel


def _fill(target: Path) -> int:
    """Copy the files of all clients that can be had into a folder; return how many cannot."""
    missing = 0
    for client in (MEGATRON, TORCHTITAN, SGLANG, DEEPSPEED, VLLM):
        try:
            folder = files_of(client)
        except pytest.skip.Exception as reason:
            print(f"{client.name}: {reason}")
            missing += 1
            continue
        for file in client.files:
            (target / client.folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / file, target / client.folder / file)
        print(f"{client.name} {client.version}: {len(client.files)} files")
    return missing


if __name__ == "__main__":
    os.environ.pop("EPEE_CLIENTS_DIR", None)
    sys.exit(_fill(Path(sys.argv[1])))
