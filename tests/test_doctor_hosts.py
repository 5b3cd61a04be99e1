"""`epee doctor` about hosts: which address and secret groups over hosts would use, whether another host is reached."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from epee.cli.main import app
from epee.doctor.finding import Finding, Verdict
from epee.doctor.hosts import network, reach
from epee.errors import EpeeError, InvalidArgument
from epee.link import address
from epee.link.address import AddressChoice
from epee.link.nixl.devices import RdmaDevice
from tests.forked import Command
from tests.ports import free_port

OK, WARN, NO = Verdict.OK, Verdict.WARN, Verdict.NO
HERE = "127.0.0.1"
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings as those of a new process without variables."""
    monkeypatch.setattr(address, "_settings", address._Settings())
    for name in [*(name for name in os.environ if name.startswith("EPEE_")), "MASTER_ADDR"]:
        monkeypatch.delenv(name, raising=False)


def one(findings: list[Finding]) -> Finding:
    (found,) = findings
    assert bool(found.remedy) or found.verdict is OK
    return found


# ---- what groups over hosts would use


def test_the_key_of_the_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = one(network.host())
    assert found.verdict is OK
    assert re.match("key [0-9a-f]{16}: ", found.value)
    monkeypatch.setenv("EPEE_HOST_KEY", "a")
    assert one(network.host()).verdict is NO
    monkeypatch.setenv("EPEE_TEST", "1")
    assert one(network.host()).value != found.value


@pytest.mark.parametrize(
    ("choice", "verdict", "words"),
    [
        (
            AddressChoice(HERE, "EPEE_HOST_IP"),
            WARN,
            r"127.0.0.1 \(lo, MTU \d+ bytes\), chosen by EPEE_HOST_IP: no other",
        ),
        (AddressChoice("127.0.77.1", "a test"), WARN, r"127.0.77.1 \(its interface is not known\), chosen by a test"),
        (AddressChoice("192.0.2.77", "a test"), WARN, "cannot listen at 192.0.2.77: "),
    ],
)
def test_the_address_is_judged(choice: AddressChoice, verdict: Verdict, words: str) -> None:
    found = one(network.address(choice))
    assert found.verdict is verdict
    assert re.match(words, found.value)
    assert "EPEE_HOST_IP" in found.remedy


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"EPEE_HOST_IP": "127.0.77.4"}, "127.0.77.4 (its interface is not known), chosen by EPEE_HOST_IP"),
        ({"MASTER_ADDR": HERE}, "chosen by the route to MASTER_ADDR, 127.0.0.1"),
        ({"EPEE_HOST_IP": "node7"}, "EPEE_HOST_IP must be an IPv4 or IPv6 address, got 'node7'"),
    ],
)
def test_the_report_says_why_it_is_that_address(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert words in one(network.address()).value


def test_a_machine_without_a_network_is_fine_for_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_address_towards", lambda place: "")
    found = one(network.address())
    assert found.verdict is WARN
    assert "no address was found" in found.value


def test_the_secret_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(network.token()).value.startswith("no EPEE_TOKEN_FILE")
    monkeypatch.setenv("EPEE_REQUIRE_TOKEN_FILE", "1")
    assert one(network.token()).verdict is WARN
    secret = tmp_path / "token"
    monkeypatch.setenv("EPEE_TOKEN_FILE", str(secret))
    assert one(network.token()).verdict is NO
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o644)
    assert one(network.token()).verdict is NO
    secret.chmod(0o600)
    found = one(network.token())
    assert (found.verdict, str(secret) in found.value) == (OK, True)
    mark = re.search("its mark is ([0-9a-f]{8}),", found.value)
    secret.write_bytes(bytes(32))
    assert mark is not None
    assert mark[1] not in one(network.token()).value


# ---- HOST:PORT


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("node7:1", ("node7", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535)), ("[fe80::1]:80", ("fe80::1", 80))],
)
def test_a_peer_is_host_and_port(text: str, parsed: tuple[str, int]) -> None:
    assert reach.parse_peer(text) == parsed
    assert reach.shown(*parsed) == text


@pytest.mark.parametrize(
    "text", ["", "node7", "node7:", ":80", "node7:0", "node7:65536", "node7:-1", "node7:99999999", "a:b"]
)
def test_what_is_no_peer_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--peer must be HOST:PORT"):
        reach.parse_peer(text)


# ---- connecting


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Yield a port of this machine; `serve` gets the first connection to it, in a thread."""
    with socket.create_server((HERE, 0)) as listener:
        listener.settimeout(PATIENCE_S)

        def run() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def answers(*said: bytes) -> Callable[[socket.socket], None]:
    """Return what tells these bytes and waits until the other side closes, reading nothing of the bulk."""

    def serve(connection: socket.socket) -> None:
        for part in said:
            connection.sendall(part)
        hung_up = select.poll()
        hung_up.register(connection, select.POLLRDHUP)
        hung_up.poll(PATIENCE_S * 1e3)

    return serve


def listening(seconds: float, seen: list[reach.Visit]) -> tuple[threading.Thread, int]:
    """Start a listener of the doctor's in a thread; return it and its port."""
    listener = address.listen(HERE)

    def run() -> None:
        with listener:
            for visit in reach.visits(listener, seconds):
                seen.append(visit)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, int(listener.getsockname()[1])


def test_a_listener_is_reached() -> None:
    seen: list[reach.Visit] = []
    thread, port = listening(2.0, seen)
    found = reach.reach(HERE, port)
    thread.join()
    assert (found.section, found.name, found.verdict, found.remedy) == ("peer", f"{HERE}:{port}", OK, "")
    assert re.fullmatch(r"reachable from 127\.0\.0\.1, connected in [\d.]+ ms; 256 KiB got through", found.value)
    assert seen == [reach.Visit(HERE, True)]


def test_strangers_cost_the_listener_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "VISIT_S", 0.2)
    seen: list[reach.Visit] = []
    thread, port = listening(1.5, seen)
    with socket.create_connection((HERE, port)) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with socket.create_connection((HERE, port)):
            pass  # gone at once
        assert reach.reach(HERE, port).verdict is OK
    thread.join()
    assert sorted(seen) == [(HERE, False), (HERE, False), (HERE, True)]


def test_another_service_is_told_apart() -> None:
    with serving(answers(b"220 mail\r\n")) as port:
        found = reach.reach(HERE, port)
    assert found.verdict is WARN
    assert "what answers there is no `epee doctor --listen`" in found.value


@pytest.mark.parametrize("said", [reach.GREETING + b"127.0.0.1\n", reach.GREETING + b"127.0.0.1\n" + b"what?\n"])
def test_bytes_that_do_not_get_through_are_found(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(answers(said)) as port:
        found = reach.reach(HERE, port, timeout_s=0.5)
    assert found.verdict is NO
    assert "256 KiB do not get through" in found.value
    assert "MTU" in found.remedy


@pytest.mark.parametrize("said", [b"[31m\n", b"127.0.0.1 <script>\n", b"\n", b"9" * 200])
def test_what_a_stranger_says_is_not_shown(said: bytes) -> None:
    with serving(answers(reach.GREETING + said)) as port:
        found = reach.reach(HERE, port)
    assert found.verdict is WARN
    assert said.decode().strip() not in found.value or not said.strip()


def test_translated_addresses_are_told() -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(reach.GREETING + b"10.9.8.7\n")
        left = reach.BULK_BYTES
        while left:
            left -= len(connection.recv(left))
        connection.sendall(reach.DONE)

    with serving(serve) as port:
        found = reach.reach(HERE, port)
    assert found.verdict is OK
    assert "there it comes from 10.9.8.7: addresses are translated" in found.value


def test_a_port_where_nobody_listens_is_told() -> None:
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
    found = reach.reach(HERE, port)
    assert found.verdict is NO
    assert found.value.startswith("refused: ")
    assert f"epee doctor --listen {port}" in found.remedy


def test_silence_is_told_in_time() -> None:
    with socket.socket() as listener, contextlib.ExitStack() as others:
        listener.bind((HERE, 0))
        listener.listen(0)
        for _ in range(3):  # its queue is full: it answers nobody any more
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(listener.getsockname())
        began = time.monotonic()
        found = reach.reach(*listener.getsockname(), timeout_s=0.3)
    assert time.monotonic() - began < 5.0
    assert found.verdict is NO
    assert found.value == "timed out: nothing came back within 0.3 s"
    assert "firewall" in found.remedy


@pytest.mark.parametrize("number", [errno.ENETUNREACH, errno.EHOSTUNREACH])
def test_a_missing_route_is_told(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: socket.socket, where: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    found = reach.reach("10.0.0.1", 80)
    assert (found.verdict, found.value) == (NO, f"no route: {os.strerror(number)}")
    assert "ip route get" in found.remedy


def test_an_unknown_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = reach.reach("node7", 80)
    assert found.verdict is NO
    assert found.value.startswith("unknown: node7 is no address")


def test_a_name_server_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: time.sleep(1.5))
    found = reach.reach("node7", 80, timeout_s=0.1)
    assert found.verdict is NO
    assert "name servers" in found.remedy


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "--peer", "a:1"], "--peer and --listen exclude each other"),
        (["--pid", "1", "--peer", "a:1"], "--pid and --peer exclude each other"),
        (["4711"], "a port belongs to --listen"),
        (["--listen", "--json"], "has no --json"),
        (["--peer", "nonsense"], "--peer must be HOST:PORT"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert isinstance(result.exception, EpeeError)
    assert words in str(result.exception)


@pytest.mark.parametrize("port", [[], ["given"]])
def test_two_doctors_meet(port: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_HOST_IP", "127.0.77.3")
    number = [str(free_port("127.0.77.3"))] if port else []
    with Command(["doctor", "--listen", *number, "--seconds", "600"], Path.cwd()) as outside:
        first, second = outside.stdout.readline(), outside.stdout.readline()
        assert first.startswith("listening for 600 s at 127.0.77.3 (")
        assert "chosen by EPEE_HOST_IP" in first
        place = second.split()[-1]
        assert second == f"run on another host:  epee doctor --peer {place}\n"
        assert place == f"127.0.77.3:{number[0]}" if number else place.startswith("127.0.77.3:")
        shown = CliRunner().invoke(app, ["doctor", "--peer", place])
        assert (shown.exit_code, "ok" in shown.output.split()) == (0, True)
        told = json.loads(CliRunner().invoke(app, ["doctor", "--peer", place, "--json"]).output)
        assert (told["verdict"], told["name"]) == ("ok", place)
        reached = [outside.stdout.readline() for _ in range(2)]  # the other side may know it a moment earlier
        outside.send_signal(signal.SIGINT)
        output, _ = outside.communicate(PATIENCE_S)
        assert outside.returncode == 0
    assert (reached, output) == (["reached from 127.0.0.1: all of its bytes came\n"] * 2, "")
    gone = CliRunner().invoke(app, ["doctor", "--peer", place])
    assert gone.exit_code == 1
    assert "refused" in gone.output


def test_nobody_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_HOST_IP", HERE)
    result = CliRunner().invoke(app, ["doctor", "--listen", "--seconds", "0.1"])
    assert result.exit_code == 1
    assert "no connection came" in result.output


def test_an_address_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_HOST_IP", "192.0.2.77")
    result = CliRunner().invoke(app, ["doctor", "--listen", "4711"])
    assert isinstance(result.exception, EpeeError)
    assert "cannot listen at 192.0.2.77, port 4711" in str(result.exception)


# ---- links


def test_the_engine_and_the_nics_that_it_could_use_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nics = [RdmaDevice("mlx5_0", ("1",), "InfiniBand", "mlx5_core"), RdmaDevice("rdmap0", ("1",), "", "efa")]
    monkeypatch.setattr(network, "why_missing", lambda: "")
    found = one(network.engine([]))
    assert found.verdict is OK
    assert found.value == "EPEE_LINK=tcp; no RDMA device; the extra nixl is installed"
    found = one(network.engine(nics))
    assert "mlx5_0 (InfiniBand), rdmap0 (EFA): NIXL's UCX serves it with EPEE_LINK=nixl" in found.value
    monkeypatch.setenv("EPEE_LINK", "nixl")
    monkeypatch.setenv("UCX_MODULES", "^efa")
    assert one(network.engine(nics)).verdict is WARN
    assert one(network.engine(nics[:1])).verdict is OK
    monkeypatch.setattr(network, "why_missing", lambda: "none of them")
    found = one(network.engine(nics))
    assert found.verdict is NO
    assert ".[nixl]" in found.remedy
    assert "none of them" in found.value


def test_the_filter_of_devices_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nics = [RdmaDevice(name, ("1",), "InfiniBand", "mlx5_core") for name in ("mlx5_0", "mlx5_1")]
    monkeypatch.setattr(address, "rdma_devices", lambda: nics)
    address.set_device_filter(["mlx5_1"])
    assert "on mlx5_1:1 only" in one(network.engine(nics)).value
