"""A port for a program that listens at a port it is told.

Ports that the kernel hands out (32768 and more) are taken by other tests of this run between the look and the use, so
one below them is drawn at random.
"""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 15_000, 32_000
_TRIES = 100


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of an address at which nobody listens now."""
    dice = random.SystemRandom()
    for _ in range(_TRIES):
        port = dice.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port of {_TRIES} from {_FIRST} to {_LAST} is free at {address}")
