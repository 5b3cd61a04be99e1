"""The host that a process runs on: one boot of one kernel and one PID namespace.

Processes of a host share memory and see each other's deaths. Containers of one machine are hosts of their own unless
they share a PID namespace.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ... import env
from ...errors import InvalidArgument, expected, shortage

KEY_DIGITS = 16  # hexadecimal


def own_host_key() -> str:
    """Return the key of the host that this process runs on, `KEY_DIGITS` hexadecimal digits.

    Tests may replace it (`EPEE_HOST_KEY`, with `EPEE_TEST=1`): ranks of one machine are then hosts of their own, which
    share no memory though they could.

    Raises:
        InvalidArgument: `EPEE_HOST_KEY` is set outside a test.
        ResourceError: the system does not identify this machine.
    """
    named = str(env.get("EPEE_HOST_KEY"))
    if named and not env.get_bool("EPEE_TEST"):
        raise InvalidArgument("EPEE_HOST_KEY is for tests: it needs EPEE_TEST=1; unset it")
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except expected(OSError) as exc:
        raise shortage("cannot see which machine this is", exc) from exc
    return hashlib.sha256(f"{boot_id} {namespace} {named}".encode()).hexdigest()[:KEY_DIGITS]
