"""Faults that tests give to hosts of the harness, shown by plain sockets: kill, stop, cut, one-way cut, delay, loss."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests.harness import DEAD, Worker, collect, take_until, tell
from tests.hosts import Hosts
from tests.shake import checked_of

PORT = 7000
ALL_S = 30.0  # longer than anything here takes
DELAY_S = 0.15
SILENCE_S = 0.4  # how long nothing must come; it never fails because the machine is slow


@pytest.fixture
def pair() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


@pytest.fixture
def relayed() -> Iterator[Hosts]:
    with Hosts(2, "tun", seed=7) as hosts:
        yield hosts


def count_datagrams(address: str) -> None:
    """Tell of each datagram, for ever."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind((address, PORT))
        receiver.settimeout(ALL_S)
        tell("bound")
        while True:
            tell(receiver.recv(100).decode())


def send_datagrams(address: str, texts: list[str]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for text in texts:
            sender.sendto(text.encode(), (address, PORT))


def echo(address: str) -> None:
    """Send back what comes, until the other side closes."""
    with socket.create_server((address, PORT)) as listener:
        listener.settimeout(ALL_S)
        tell("listens")
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(ALL_S)
            while data := connection.recv(1 << 16):
                connection.sendall(data)


def talk(address: str, num_rounds: int) -> list[float]:
    """Return how long each of the rounds took, in seconds."""
    with socket.create_connection((address, PORT), timeout=ALL_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        took = []
        for number in range(num_rounds):
            start = time.monotonic()
            connection.sendall(b"%8d" % number)
            assert connection.recv(8, socket.MSG_WAITALL) == b"%8d" % number
            took.append(time.monotonic() - start)
            tell(number)
    return took


def hear_the_end(address: str) -> str:
    """Say how the other side's end shows."""
    with socket.create_connection((address, PORT), timeout=ALL_S) as connection:
        tell("connected")
        try:
            return "data" if connection.recv(8) else "end of stream"
        except ConnectionResetError:
            return "reset"


def have_children() -> None:
    """Leave this host a child, a grandchild in a session of its own, and one that ignores signals."""
    for _ in range(2):
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell("has children")
    time.sleep(1000)


def count_up() -> None:
    """Tell a number every few milliseconds."""
    for number in range(100_000):
        tell(number)
        time.sleep(0.005)


def started(hosts: Hosts, host: int, function: Callable[..., object], *args: object, num_told: int = 1) -> Worker:
    """Return a worker on a host that has told at least `num_told` values."""
    worker = hosts.worker(host)
    worker.start(function, *args, timeout_s=ALL_S)
    assert take_until([worker], lambda: len(worker.told) >= num_told, ALL_S), worker.result
    return worker


def send(hosts: Hosts, src: int, dst: int, texts: list[str]) -> None:
    sender = hosts.worker(src)
    sender.start(send_datagrams, hosts.address(dst), texts, is_last=True)
    collect([sender], (), ALL_S)


def arrive(receiver: Worker, text: str) -> bool:
    return take_until([receiver], lambda: text in receiver.told, ALL_S)


@pytest.mark.hosts
def test_a_kill_ends_all_processes_of_the_host_and_no_others(pair: Hosts) -> None:
    worker, other = started(pair, 1, have_children), started(pair, 0, have_children)
    assert len(pair.processes(1)) == 4
    pair.kill(1)
    assert pair.processes(1) == []
    assert len(pair.processes(0)) == 4
    assert collect([worker], {0}, ALL_S) == [DEAD]
    assert other.process.is_alive()
    with pytest.raises(EOFError, match="the host is dead"):
        pair.worker(1)


@pytest.mark.hosts
def test_peers_hear_of_a_kill_from_the_kernel_and_not_of_a_power_cut(pair: Hosts) -> None:
    started(pair, 1, echo, pair.address(1))
    client = started(pair, 0, hear_the_end, pair.address(1))
    pair.kill(1)
    assert collect([client], (), ALL_S)[0] in ("end of stream", "reset")


@pytest.mark.hosts
@pytest.mark.parametrize("wire", ["veth", "tun"])
def test_peers_hear_nothing_of_a_power_cut(wire: str) -> None:
    with Hosts(2, wire) as hosts:
        started(hosts, 1, echo, hosts.address(1))
        client = started(hosts, 0, hear_the_end, hosts.address(1))
        hosts.cut(1)
        hosts.kill(1)
        assert not take_until([client], lambda: client.result is not None, SILENCE_S)


@pytest.mark.hosts
def test_a_stopped_host_stands_still_and_goes_on(pair: Hosts) -> None:
    worker = started(pair, 1, count_up)
    pair.stop(1)
    assert {checked_of(pid)[0] for pid in pair.processes(1)} == {"T"}
    while take_until([worker], lambda: False, 0.0) or worker.connection.poll(0.1):  # what it said before
        worker.take()
    said = len(worker.told)
    assert not worker.connection.poll(SILENCE_S)
    pair.cont(1)
    assert take_until([worker], lambda: len(worker.told) > said, ALL_S)


@pytest.mark.hosts
def test_a_stopped_host_still_answers_on_the_network(pair: Hosts) -> None:
    started(pair, 1, echo, pair.address(1))
    pair.stop(1)
    client = started(pair, 0, hear_the_end, pair.address(1))  # its kernel takes the connection
    assert client.result is None


@pytest.mark.hosts
@pytest.mark.parametrize("wire", ["veth", "tun"])
def test_a_cut_connection_goes_on_when_it_is_healed(wire: str) -> None:
    with Hosts(2, wire) as hosts:
        started(hosts, 1, echo, hosts.address(1))
        client = started(hosts, 0, talk, hosts.address(1), 100_000)
        hosts.cut(1)
        while take_until([client], lambda: False, 0.0) or client.connection.poll(0.2):
            client.take()
        said = len(client.told)
        assert not client.connection.poll(SILENCE_S)
        hosts.heal(1)
        assert take_until([client], lambda: len(client.told) > said, ALL_S)
        assert client.told == list(range(len(client.told)))


@pytest.mark.hosts
def test_a_cut_host_leaves_the_others_connected() -> None:
    with Hosts(3) as hosts:
        hosts.cut(1)
        started(hosts, 2, echo, hosts.address(2))
        client = started(hosts, 0, talk, hosts.address(2), 10)
        assert len(collect([client], (), ALL_S)[0]) == 10


@pytest.mark.hosts("tun")
def test_a_one_way_cut_lets_the_other_way_pass(relayed: Hosts) -> None:
    receivers = [started(relayed, host, count_datagrams, relayed.address(host)) for host in range(2)]
    relayed.set_link(0, 1, is_cut=True)
    send(relayed, 0, 1, ["lost"])
    send(relayed, 1, 0, ["passes"])
    assert arrive(receivers[0], "passes")
    relayed.set_link(0, 1)
    send(relayed, 0, 1, ["heard again"])
    assert arrive(receivers[1], "heard again")
    assert receivers[1].told == ["bound", "heard again"]


@pytest.mark.hosts("tun")
def test_the_links_of_a_cut_host_are_as_before_when_it_is_healed(relayed: Hosts) -> None:
    receivers = [started(relayed, host, count_datagrams, relayed.address(host)) for host in range(2)]
    relayed.set_link(0, 1, is_cut=True)
    relayed.cut(0)
    send(relayed, 1, 0, ["lost"])
    relayed.heal(0)
    send(relayed, 0, 1, ["lost, too"])
    send(relayed, 1, 0, ["passes"])
    assert arrive(receivers[0], "passes")
    assert [receiver.told for receiver in receivers] == [["bound", "passes"], ["bound"]]


@pytest.mark.hosts("tun")
def test_a_delay_is_added_to_each_way(relayed: Hosts) -> None:
    relayed.set_link(0, 1, delay_s=DELAY_S)
    relayed.set_link(1, 0, delay_s=2 * DELAY_S)
    started(relayed, 1, echo, relayed.address(1))
    client = started(relayed, 0, talk, relayed.address(1), 3)
    assert min(collect([client], (), ALL_S)[0]) >= 3 * DELAY_S


@pytest.mark.hosts("tun")
def test_losses_are_as_frequent_as_said_and_the_same_for_one_seed() -> None:
    texts = [str(number) for number in range(120)]  # few enough for the queue of a receiver that sleeps
    seen = []
    for _ in range(2):
        with Hosts(2, "tun", seed=3) as hosts:
            receiver = started(hosts, 1, count_datagrams, hosts.address(1))
            hosts.set_link(0, 1, loss=0.5)
            send(hosts, 0, 1, texts)
            hosts.set_link(0, 1)
            send(hosts, 0, 1, ["end"])
            assert arrive(receiver, "end")
            seen.append(receiver.told)
    assert 30 < len(seen[0]) < 90
    assert seen[0] == seen[1]


@pytest.mark.hosts("tun")
def test_a_stream_survives_losses_and_delays(relayed: Hosts) -> None:
    relayed.set_link(0, 1, loss=0.05)
    relayed.set_link(1, 0, loss=0.05, delay_s=0.001)
    started(relayed, 1, echo, relayed.address(1))
    client = started(relayed, 0, talk, relayed.address(1), 60)
    assert len(collect([client], (), ALL_S)[0]) == 60


@pytest.mark.hosts
def test_a_wire_of_kernels_takes_no_orders_for_one_way(pair: Hosts) -> None:
    with pytest.raises(ValueError, match='needs wire "tun"'):
        pair.set_link(0, 1, is_cut=True)
    with pytest.raises(ValueError, match="wire must be veth or tun"):
        Hosts(2, "string")
