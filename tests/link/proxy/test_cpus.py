"""The CPUs that the processes of a proxy run on: named ones, else those near the NIC or the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from epee import env
from epee.errors import InvalidArgument
from epee.link.nixl import devices
from epee.link.proxy import rank
from epee.link.proxy.rank import cpus_for

from ..test_nearest_device import device


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sockets of four CPUs, a GPU on each and a NIC on the first."""
    monkeypatch.delenv("EPEE_PROXY_CPUS", raising=False)
    monkeypatch.setattr(devices, "SYSFS", tmp_path)
    monkeypatch.setattr(rank, "usable_cores", lambda: {0, 1, 4, 5, 6, 9})
    device(tmp_path, "devices/pci0000:00/0000:01:00.0", 0, is_gpu=True)
    device(tmp_path, "devices/pci0000:80/0000:81:00.0", 1, is_gpu=True)
    for node, cpus in ((0, "0-3"), (1, "4,6-7")):
        folder = tmp_path / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("location", "cpus"),
    [("cuda:0", (0, 1)), ("cuda:1", (4, 6)), ("cpu:1", (4, 6)), ("cuda:7", ()), ("cpu:5", ()), ("", ()), ("*", ())],
)
def test_without_a_nic_they_are_near_the_gpu(machine: Path, location: str, cpus: tuple[int, ...]) -> None:
    assert cpus_for(3, location) == cpus


def test_they_are_near_the_nic_that_is_nearest(machine: Path) -> None:
    device(machine, "devices/pci0000:00/0000:02:00.0", 0, name="mlx5_0")
    assert cpus_for(0, "cuda:1") == (0, 1), "the only NIC is on the other socket"
    device(machine, "devices/pci0000:80/0000:82:00.0", 1, name="mlx5_1")
    assert cpus_for(0, "cuda:1") == (4, 6)
    assert cpus_for(0, "") == ()


def test_named_cpus_are_given_one_to_a_process_in_turn(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_PROXY_CPUS", "8-9,3")
    assert [cpus_for(worker, "cuda:0") for worker in range(5)] == [(8,), (9,), (3,), (8,), (9,)]


@pytest.mark.parametrize("text", ["a", "3-", "-3", "3-1", "1,,2", "1-2-3", "0-999999999999", "1.5", ","])
def test_a_list_of_cpus_that_is_none_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_PROXY_CPUS", text)
    with pytest.raises(InvalidArgument, match="EPEE_PROXY_CPUS: must be a list of CPUs such as 0-3,8"):
        env.get("EPEE_PROXY_CPUS")
