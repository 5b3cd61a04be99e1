"""The RDMA devices of this machine, as the kernel lists them, and their distances to GPUs and NUMA nodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import expected

SYSFS = Path("/sys")  # read at each call: tests put another tree here
_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")  # PCI classes of GPUs with and without a display


class RdmaDevice(NamedTuple):
    """A device.

    Attributes:
        ports: numbers, ascending.
        layer: of its first port, as the kernel says: InfiniBand, Ethernet (RoCE), Unspecified (EFA) ..., "" if unknown.
        driver: of the kernel, "" if unknown.
    """

    name: str
    ports: tuple[str, ...]
    layer: str
    driver: str

    @property
    def is_efa(self) -> bool:
        """True for Amazon's."""
        return self.driver == "efa"

    @property
    def kind(self) -> str:
        """The usual name of this kind of device."""
        return "EFA" if self.is_efa else {"Ethernet": "RoCE"}.get(self.layer, self.layer or "of an unknown kind")


def rdma_devices(folder: Path | None = None) -> list[RdmaDevice]:
    """Return the devices, by name; none where the kernel has no RDMA."""
    folder = SYSFS / "class" / "infiniband" if folder is None else folder
    return [_device(path) for path in sorted(folder.iterdir())] if folder.is_dir() else []


def _device(path: Path) -> RdmaDevice:
    folder, driver = path / "ports", path / "device" / "driver"
    ports = tuple(sorted((each.name for each in folder.iterdir()), key=_number)) if folder.is_dir() else ()
    layer = folder / ports[0] / "link_layer" if ports else folder
    return RdmaDevice(
        path.name,
        ports,
        layer.read_text().strip() if layer.is_file() else "",
        driver.resolve().name if driver.exists() else "",
    )


def _number(name: str) -> int:
    return int(name) if name.isdecimal() else 0


def nearest_device(location: str, names: Sequence[str]) -> str:
    """Return the RDMA device among `names` that is nearest to a location; "" without any.

    Near means, first, sharing most bridges of the PCI tree, then being on the same NUMA node; of equals the first.

    Args:
        location: "cpu:N" (a NUMA node), "cuda:N" or "gpu:N"; for any other the first device is returned.
    """
    kind, _, number = str(location).partition(":")
    where: Path | None = None
    node = -1
    if kind == "cpu" and number.isdecimal():
        node = int(number)
    elif kind in ("cuda", "gpu") and (number or "0").isdecimal():
        where = _gpu(int(number or 0))
        node = -1 if where is None else _numa_node(where)

    def nearness(name: str) -> tuple[int, bool]:
        device = SYSFS / "class" / "infiniband" / name / "device"
        bridges = 0 if where is None else _num_shared(where, device)
        return bridges, node >= 0 and _numa_node(device) == node

    return max(names, key=nearness, default="")


def numa_node_near(location: str, device: str = "") -> int:
    """Return the NUMA node of an RDMA device by name, else of a location (as of `nearest_device`); -1: unknown."""
    node = _numa_node(SYSFS / "class" / "infiniband" / device / "device") if device else -1
    kind, _, number = str(location).partition(":")
    if node >= 0 or not (number or "0").isdecimal():
        return node
    if kind == "cpu":
        return int(number or 0)
    gpu = _gpu(int(number or 0)) if kind in ("cuda", "gpu") else None
    return -1 if gpu is None else _numa_node(gpu)


def cpus_of_node(node: int) -> str:
    """Return the CPUs of a NUMA node as the kernel lists them ("0-3,8"); "" if it does not exist."""
    return _word(SYSFS / "devices" / "system" / "node" / f"node{node}" / "cpulist") if node >= 0 else ""


def _gpu(number: int) -> Path | None:
    """Return the folder of a GPU: by CUDA's numbering where CUDA runs in this process, else in the order of PCI
    addresses."""
    folder = SYSFS / "bus" / "pci" / "devices"
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)  # a proxy has no torch, and no CUDA
    if cuda is not None and cuda.is_initialized():
        if number >= cuda.device_count():
            return None
        facts = cuda.get_device_properties(number)
        path = folder / f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        return path if path.exists() else None
    found = [path for path in sorted(folder.iterdir()) if _is_gpu(path)] if folder.is_dir() else []
    return found[number] if number < len(found) else None


def _is_gpu(path: Path) -> bool:
    return _word(path / "vendor") == _NVIDIA and _word(path / "class")[:6] in _DISPLAY


def _numa_node(device: Path) -> int:
    """Return the NUMA node of a device; -1: the kernel names none."""
    word = _word(device / "numa_node")
    return int(word) if word.isdecimal() else -1


def _num_shared(first: Path, second: Path) -> int:
    """Return how many parts the PCI paths of two devices share, beginning with the same root."""
    places = [[part for part in path.resolve().parts if ":" in part] for path in (first, second)]
    num_shared = 0
    for one, other in zip(*places, strict=False):
        if one != other:
            break
        num_shared += 1
    return num_shared


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except expected(OSError):
        return ""
