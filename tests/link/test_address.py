"""Which address a process takes for its links, what is no address, and that it listens there alone."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch.distributed as dist

from epee.errors import InvalidArgument, ResourceError
from epee.link import address
from epee.link.address import listen, own_address, set_device_filter, set_host_ip


class Rendezvous:
    """A store that has a host, as `TCPStore` does."""

    def __init__(self, host: str) -> None:
        self.host = host


class Behind:
    """A store around a store, as `PrefixStore` is."""

    def __init__(self, store: Any) -> None:
        self.underlying_store = store


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_settings", address._Settings())
    for name in ("EPEE_HOST_IP", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What stands for the routes of this machine: place -> own address there."""
    found = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1"}
    monkeypatch.setattr(address, "_address_towards", lambda place: found.get(place, ""))
    return found


def test_the_order_is_program_environment_filter_rendezvous_master_default(
    monkeypatch: pytest.MonkeyPatch, routes: dict[str, str]
) -> None:
    routes.update({"192.0.2.1": "10.0.0.6", "master": "10.0.0.5", "there": "10.0.0.4"})
    store = Rendezvous("there")
    assert own_address() == "10.0.0.6"
    monkeypatch.setenv("MASTER_ADDR", "master")
    assert own_address() == "10.0.0.5"
    assert own_address(store) == "10.0.0.4"
    set_device_filter(["lo"])
    assert own_address(store) == "127.0.0.1"
    monkeypatch.setenv("EPEE_HOST_IP", "10.0.0.2")
    assert own_address(store) == "10.0.0.2"
    set_host_ip("10.0.0.1")
    assert own_address(store) == "10.0.0.1"


def test_the_next_place_counts_where_one_has_no_route(monkeypatch: pytest.MonkeyPatch, routes: dict[str, str]) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address(Rendezvous("nowhere")) == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "nowhere")
    with pytest.raises(ResourceError, match="EPEE_HOST_IP"):
        own_address(Rendezvous("nowhere"))


def test_a_machine_that_knows_its_own_name_as_loopback_takes_another_address(
    monkeypatch: pytest.MonkeyPatch, routes: dict[str, str]
) -> None:
    routes["node0"] = "127.0.0.1"  # Debian: 127.0.1.1 node0
    assert own_address(Rendezvous("node0")) == "127.0.0.1"  # there is no other
    routes["192.0.2.1"] = "10.0.0.6"
    assert own_address(Rendezvous("node0")) == "10.0.0.6"
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert own_address() == "10.0.0.6"
    for place in ("localhost", "127.0.0.1"):  # who says so means it
        assert own_address(Rendezvous(place)) == "127.0.0.1"


def test_the_rendezvous_is_found_behind_prefixes(routes: dict[str, str]) -> None:
    routes.update({"there": "10.0.0.4", "192.0.2.1": "10.0.0.6"})
    assert own_address(Behind(Behind(Behind(Rendezvous("there"))))) == "10.0.0.4"
    assert own_address(Behind(object())) == "10.0.0.6"
    around: Any = Behind(None)
    around.underlying_store = around
    assert own_address(around) == "10.0.0.6"


def test_a_store_of_torch_tells_its_host() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    assert own_address(dist.PrefixStore("a", dist.PrefixStore("b", store))) == "127.0.0.1"
    assert address._rendezvous_of(dist.HashStore()) == ""


@pytest.mark.parametrize("wrong", ["node7", "", "10.0.0", "10.0.0.1:80", 1, b"\x7f\0\0\1", None])
def test_what_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="host ip must be an IPv4 or IPv6 address, got"):
        set_host_ip(wrong)
    if wrong and isinstance(wrong, str):
        monkeypatch.setenv("EPEE_HOST_IP", wrong)
        with pytest.raises(InvalidArgument, match=f"EPEE_HOST_IP must be an IPv4 or IPv6 address, got '{wrong}'"):
            own_address()


@pytest.mark.parametrize("every", ["0.0.0.0", "::", "0:0::0", "::ffff:0.0.0.0"])
def test_the_address_that_stands_for_all_is_refused(monkeypatch: pytest.MonkeyPatch, every: str) -> None:
    with pytest.raises(InvalidArgument, match="stands for all"):
        set_host_ip(every)
    monkeypatch.setenv("EPEE_HOST_IP", every)
    with pytest.raises(InvalidArgument, match=r"EPEE_HOST_IP must be one address.*name the interface's own"):
        own_address()


@pytest.mark.parametrize("wrong", ["mlx5_0", b"mlx5_0", None, 3, [""], [1], ["lo", None]])
def test_what_is_no_list_of_devices_is_refused(wrong: Any) -> None:
    set_device_filter(("lo",))
    with pytest.raises(InvalidArgument, match="device filter must be a list of device names"):
        set_device_filter(wrong)
    assert own_address() == "127.0.0.1", "the filter is as it was"


def test_devices_without_an_address_are_named() -> None:
    set_device_filter(["no such device", "nor this"])
    with pytest.raises(InvalidArgument, match=r"no such device, nor this.*/sys/class/net.*set_host_ip"):
        own_address()


def test_the_first_device_that_has_an_address_counts() -> None:
    set_device_filter(["no such device", "lo"])
    assert own_address() == "127.0.0.1"


def test_preferred_device_passes_the_filter() -> None:
    set_device_filter(["no such device"])
    assert address.preferred_device() == ""


def refuses(family: int, where: str, port: int) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(10)
        try:
            probe.connect((where, port))
        except ConnectionRefusedError:
            return True
        return False


def test_a_listener_listens_at_its_address_alone() -> None:
    with listen("127.0.0.2") as listener:
        where, port = listener.getsockname()
        assert where == "127.0.0.2"
        assert not listener.get_inheritable()
        assert not listener.getblocking()
        assert not refuses(socket.AF_INET, "127.0.0.2", port)
        for other in ("127.0.0.1", "127.0.0.3"):
            assert refuses(socket.AF_INET, other, port)


def test_a_listener_for_ipv6() -> None:
    try:
        listener = listen("::1")
    except ResourceError as exc:
        pytest.skip(f"this machine has no IPv6: {exc}")
    with listener:
        assert not refuses(socket.AF_INET6, "::1", listener.getsockname()[1])
        assert refuses(socket.AF_INET, "127.0.0.1", listener.getsockname()[1])


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ResourceError, match=r"cannot listen at 198\.51\.100\.7.*EPEE_HOST_IP or set_host_ip"):
        listen("198.51.100.7")
