"""The RDMA devices of this machine, as the kernel lists them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_FOLDER = Path("/sys/class/infiniband")


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
        """What people call it."""
        return "EFA" if self.is_efa else {"Ethernet": "RoCE"}.get(self.layer, self.layer or "of an unknown kind")


def rdma_devices(folder: Path = _FOLDER) -> list[RdmaDevice]:
    """Return the devices, by name; none where the kernel has no RDMA."""
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
