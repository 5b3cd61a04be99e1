"""Versions, cores, memory and limits of this machine: read from the system, compared with epee's requirements.

Every function has the value that it checks as an argument with the real value as default, so that tests can set it.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from importlib import metadata
from pathlib import Path

import torch

from ..memory.signals import usable_cores
from .finding import Finding, Verdict, outcome

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 10)
_MIB = 1 << 20
_CGROUPS = "/sys/fs/cgroup"
_OWN_CGROUP = "/proc/self/cgroup"


def python_version(version: tuple[int, ...] | None = None) -> list[Finding]:
    """Python itself."""
    found = tuple(sys.version_info[:3]) if version is None else version
    text = ".".join(map(str, found))
    return outcome("versions", "python", text, (found[:2] < OLDEST_PYTHON, Verdict.NO, "use Python 3.10 or newer"))


def torch_version(version: str = torch.__version__) -> list[Finding]:
    """The installed torch; 2.10 ... 2.13 is what epee is tested with."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return [Finding("versions", "torch", Verdict.WARN, version, "no version number; epee needs torch 2.10")]
    is_old = (int(match[1]), int(match[2])) < OLDEST_TORCH
    return outcome("versions", "torch", version, (is_old, Verdict.NO, "pip install 'torch>=2.10'"))


def epee_version() -> list[Finding]:
    """The installed epee."""
    try:
        return [Finding("versions", "epee", Verdict.OK, metadata.version("epee"))]
    except metadata.PackageNotFoundError:
        return [Finding("versions", "epee", Verdict.WARN, "not installed, run from its sources", "pip install -e .")]


def operating_system(system: str = sys.platform, machine: str | None = None) -> list[Finding]:
    """Linux on x86-64: elsewhere the shared memory needs fences that are not implemented."""
    machine = platform.machine() if machine is None else machine
    value = f"{system} {platform.release()}, {machine}"
    is_other = not system.startswith("linux") or machine not in ("x86_64", "AMD64")
    return outcome("machine", "system", value, (is_other, Verdict.NO, "use Linux on x86-64"))


def cores(usable: int | None = None, quota: float | None = None, root: str = _CGROUPS) -> list[Finding]:
    """Cores that this process may use, and the limit of its cgroup."""
    usable = len(usable_cores()) if usable is None else usable
    quota = cgroup_cpus(root) if quota is None else quota
    value = f"{usable} usable of {os.cpu_count()}" + (f", the cgroup grants {quota:g}" if quota else "")
    raise_it = "ranks are paused when the grant is used up: start no more ranks than it has cores, or raise it"
    is_little = 0 < quota < usable, Verdict.WARN, raise_it
    is_one = usable < 2, Verdict.WARN, "ranks that share one core are slow: use two cores or more"
    return outcome("machine", "cores", value, is_little, is_one)


def cgroup_cpus(root: str = _CGROUPS, own: str = _OWN_CGROUP) -> float:
    """Return the number of cores that the cgroup grants (the least of its ancestors), 0.0 if nothing limits them."""
    grants = []
    for folder in _cgroup_folders(root, own, "cpu"):
        text = _text(folder / "cpu.max")  # version 2: "200000 100000" or "max 100000"
        pair = text.split() if text else [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
        if len(pair) == 2 and all(part.isdigit() and int(part) for part in pair):
            grants.append(int(pair[0]) / int(pair[1]))
    return min(grants, default=0.0)


def cgroup_memory_bytes(root: str = _CGROUPS, own: str = _OWN_CGROUP) -> int:
    """Return the number of bytes that the cgroup leaves (the least of its ancestors), -1 if nothing limits them."""
    left = []
    for folder in _cgroup_folders(root, own, "memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            pair = _text(folder / limit), _text(folder / used)
            if all(part.isdigit() for part in pair) and int(pair[0]) < 1 << 60:  # version 1 says "no limit" in bytes
                left.append(max(0, int(pair[0]) - int(pair[1])))
    return min(left, default=-1)


def _cgroup_folders(root: str, own: str, controller: str) -> list[Path]:
    folders = [Path(root), Path(root) / controller]
    for line in _text(Path(own)).splitlines():
        _, controllers, path = line.split(":", 2)
        base = Path(root) if not controllers else Path(root) / controller
        if not controllers or controller in controllers.split(","):
            folder = base / path.lstrip("/")
            folders += [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]
    return folders


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def shm_room(path: str = "/dev/shm") -> list[Finding]:
    """Room in /dev/shm: epee does not use it, torch's data loaders do."""
    try:
        status = os.statvfs(path)
    except OSError as exc:
        none = True, Verdict.WARN, "epee does not use it; torch's data loaders need it"
        return outcome("machine", "/dev/shm", str(exc), none)
    free, total = status.f_bavail * status.f_frsize // _MIB, status.f_blocks * status.f_frsize // _MIB
    value = f"{free} MiB free of {total}"
    enlarge = "epee does not use it; for torch's data loaders give the container --shm-size=1g"
    return outcome("machine", "/dev/shm", value, (free < 64, Verdict.WARN, enlarge))


def memory(meminfo: str = "/proc/meminfo", left: int | None = None) -> list[Finding]:
    """Memory that is free for shared regions, which lie in RAM, and the part that the cgroup leaves of it."""
    left = cgroup_memory_bytes() if left is None else left
    match = re.search(r"MemAvailable:\s+(\d+) kB", _text(Path(meminfo)))
    if match is None:
        return [Finding("machine", "memory", Verdict.WARN, f"{meminfo} does not say", "mount /proc")]
    available = int(match[1]) // 1024
    value = f"{available} MiB available" + (f", the cgroup leaves {left // _MIB} MiB" if left >= 0 else "")
    is_little = min(available, left // _MIB if left >= 0 else available) < 512
    remedy = "a buffer may not fit: free memory, or raise the container's limit"
    return outcome("machine", "memory", value, (is_little, Verdict.WARN, remedy))


def limits(
    num_files: int | None = None, address_bytes: int | None = None, locked_bytes: int | None = None
) -> list[Finding]:
    """The process's limits on descriptors, address space and locked memory; -1 is no limit."""
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if num_files is None else num_files
    address_bytes = resource.getrlimit(resource.RLIMIT_AS)[0] if address_bytes is None else address_bytes
    locked_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if locked_bytes is None else locked_bytes
    too_few = 0 <= num_files < 256, Verdict.NO, "ulimit -n 1024, or more"
    few = 0 <= num_files < 1024, Verdict.WARN, "ulimit -n 1024 for many ranks"
    little = 0 <= address_bytes < 64 << 30, Verdict.WARN, "epee maps far more than it touches: ulimit -v unlimited"
    return [
        *outcome("machine", "descriptors", _limit(num_files, 1, " open files and sockets"), too_few, few),
        *outcome("machine", "address space", _limit(address_bytes, _MIB, " MiB"), little),
        *outcome("machine", "locked memory", _limit(locked_bytes, _MIB, " MiB") + " (matters between hosts only)"),
    ]


def _limit(value: int, unit: int, suffix: str) -> str:
    return "no limit" if value < 0 else f"{value // unit}{suffix}"
