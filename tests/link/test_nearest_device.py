"""Which RDMA device is near a GPU or a NUMA node, on made-up trees of the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from epee.compat.mooncake import pg
from epee.link.nixl import devices

ROOT_0, ROOT_1 = "devices/pci0000:00", "devices/pci0000:80"


def device(sysfs: Path, place: str, numa_node: int, is_gpu: bool = False, name: str = "") -> None:
    """Put a PCI device into the tree: a GPU, or the RDMA device `name`."""
    path = sysfs / place
    path.mkdir(parents=True)
    (path / "numa_node").write_text(f"{numa_node}\n")
    (path / "vendor").write_text("0x10de\n" if is_gpu else "0x15b3\n")
    (path / "class").write_text("0x030200\n" if is_gpu else "0x020700\n")
    listed = sysfs / "bus" / "pci" / "devices"
    listed.mkdir(parents=True, exist_ok=True)
    (listed / path.name).symlink_to(path)
    if name:
        (sysfs / "class" / "infiniband" / name / "ports").mkdir(parents=True)
        (sysfs / "class" / "infiniband" / name / "device").symlink_to(path)


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sockets with two switches each, of which each has a GPU and an RDMA device; names against that order."""
    monkeypatch.setattr(devices, "SYSFS", tmp_path)
    for number, (root, switch) in enumerate([(ROOT_0, "01"), (ROOT_0, "41"), (ROOT_1, "81"), (ROOT_1, "c1")]):
        bridge = f"{root}/0000:{switch}:00.0"
        bus = int(switch, 16)
        device(tmp_path, f"{bridge}/0000:{bus + 1:02x}:00.0", number // 2, is_gpu=True)
        device(tmp_path, f"{bridge}/0000:{bus + 2:02x}:00.0", number // 2, name=f"mlx5_{3 - number}")
    return tmp_path


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("cuda:0", "mlx5_3"),
        ("cuda:1", "mlx5_2"),
        ("gpu:2", "mlx5_1"),
        ("cuda:3", "mlx5_0"),
        ("cpu:0", "mlx5_2"),
        ("cpu:1", "mlx5_0"),
        ("", "mlx5_0"),
        ("*", "mlx5_0"),
        ("cpu:7", "mlx5_0"),
        ("cuda:9", "mlx5_0"),
    ],
)
def test_the_device_follows_the_location(sysfs: Path, location: str, name: str) -> None:
    assert pg.get_preferred_hca(location) == name
    assert pg.get_preferred_hca(None, location) == name


def test_the_filter_comes_before_the_distance(sysfs: Path) -> None:
    pg.set_device_filter(["mlx5_1", "mlx5_3"])
    try:
        assert [pg.get_preferred_hca(f"cuda:{number}") for number in range(4)] == [
            "mlx5_3",
            "mlx5_3",
            "mlx5_1",
            "mlx5_1",
        ]
    finally:
        pg.set_device_filter([])


def test_without_the_same_bridge_the_numa_node_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "SYSFS", tmp_path)
    device(tmp_path, "devices/pci0000:10/0000:11:00.0", 1, is_gpu=True)
    device(tmp_path, "devices/pci0000:20/0000:21:00.0", 0, name="mlx5_0")
    device(tmp_path, "devices/pci0000:30/0000:31:00.0", 1, name="mlx5_1")
    assert pg.get_preferred_hca("cuda:0") == "mlx5_1"
