"""Settings that groups over several hosts would use here: the host's key, the address for links, the secret.

Nothing is connected to; `reach.py` tests whether another host can be reached. A machine without a network is fine for
groups on one host, so a problem is a warning, unless it affects these, too.
"""

from __future__ import annotations

import contextlib
import ipaddress

from ... import env
from ...errors import EpeeError
from ...link.address import AddressChoice, allowed_devices, choose_address, interface_of, listen, mtu_of
from ...link.engine import chosen_engine
from ...link.nixl.agent import BACKEND
from ...link.nixl.devices import RdmaDevice, rdma_devices
from ...link.nixl.library import why_missing
from ...view.process.machine import own_host_key
from ...view.transport.directory import token_of_file
from ..finding import Finding, Verdict, outcome

_ANOTHER = "set EPEE_HOST_IP to an address of this machine that the other hosts reach; groups on one host need none"
_MAKE_TOKEN = "head -c 32 /dev/urandom > FILE; chmod 600 FILE; the same file on every host, named by EPEE_TOKEN_FILE"


def host() -> list[Finding]:
    """The key by which ranks detect whether they share a host."""
    try:
        key = own_host_key()
    except EpeeError as exc:
        return [Finding("hosts", "host", Verdict.NO, str(exc), "unset EPEE_HOST_KEY, or mount /proc")]
    return [
        Finding(
            "hosts",
            "host",
            Verdict.OK,
            f"key {key}: ranks with an equal key share memory (same boot, same PID namespace)",
        )
    ]


def address(choice: AddressChoice | None = None) -> list[Finding]:
    """The address for links to other hosts, the reason for it, and whether a process can listen there."""
    try:
        choice = choose_address() if choice is None else choice
        listen(choice.address).close()
    except EpeeError as exc:
        return [Finding("hosts", "address", Verdict.WARN, str(exc), _ANOTHER)]
    value = f"{where(choice.address)}, chosen by {choice.reason}"
    if ipaddress.ip_address(choice.address).is_loopback:
        return [Finding("hosts", "address", Verdict.WARN, f"{value}: no other host reaches it", _ANOTHER)]
    return [Finding("hosts", "address", Verdict.OK, value)]


def where(own: str) -> str:
    """Return an address of this machine with its interface and MTU, for people."""
    interface = interface_of(own)
    return f"{own} ({interface}, MTU {mtu_of(interface)} bytes)" if interface else f"{own} (its interface is not known)"


def engine(devices: list[RdmaDevice] | None = None) -> list[Finding]:
    """The engine that moves bytes between hosts, the RDMA devices here, and whether NIXL for them is installed."""
    devices = rdma_devices() if devices is None else devices
    try:
        chosen = chosen_engine()
    except EpeeError:  # a finding of its own (`settings.py`)
        chosen = "tcp"
    missing = why_missing()
    extra = f"the extra nixl is not installed ({missing})" if missing else "the extra nixl is installed"
    nics = ", ".join(f"{device.name} ({device.kind})" for device in devices)
    allowed = [name for name in allowed_devices() if name.split(":")[0] in {device.name for device in devices}]
    served = f"{nics}: NIXL's {BACKEND} serves it with EPEE_LINK=nixl (not tried on a NIC yet)"
    served = served if nics else "no RDMA device"
    value = f"EPEE_LINK={chosen}; {served}{f', on {chr(44).join(allowed)} only' if allowed else ''}; {extra}"
    is_efa = chosen == "nixl" and any(device.is_efa for device in devices) and str(env.get("UCX_MODULES")) == "^efa"
    absent = chosen == "nixl" and missing, Verdict.NO, "pip install '.[nixl]' in a clone of epee, or unset EPEE_LINK"
    left_out = is_efa, Verdict.WARN, "unset UCX_MODULES: ^efa leaves out what serves EFA"
    return outcome("hosts", "links", value, absent, left_out)


def token() -> list[Finding]:
    """The secret of groups over several hosts: a file, or the value that rank 0 puts into the store."""
    named = str(env.get("EPEE_TOKEN_FILE"))
    try:
        found = token_of_file()
    except EpeeError as exc:
        return [Finding("hosts", "token", Verdict.NO, str(exc), _MAKE_TOKEN)]
    if found is not None:
        mark = found.derive(b"doctor", b"mark").hex()[:8]
        value = f"{named}, this user's alone; its mark is {mark}, which must be the same on every host"
        return [Finding("hosts", "token", Verdict.OK, value)]
    with contextlib.suppress(EpeeError):  # a value that is neither 0 nor 1 is a finding of its own (`settings.py`)
        if env.get_bool("EPEE_REQUIRE_TOKEN_FILE"):
            value = "no EPEE_TOKEN_FILE, and EPEE_REQUIRE_TOKEN_FILE=1 refuses groups over several hosts without"
            return [Finding("hosts", "token", Verdict.WARN, value, _MAKE_TOKEN)]
    value = (
        "no EPEE_TOKEN_FILE: the secret of a group over several hosts is as safe as the store, through which it goes"
    )
    return [Finding("hosts", "token", Verdict.OK, value)]
