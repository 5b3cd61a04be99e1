"""Messages between CUDA tensors that go from GPU to GPU: what the backend asks of who makes them, and what it gives.

As in `calls.py`: they stand above the backend (`epee.backend.cuda.messages`), `register` says who makes them; without
that, and for a group or a pair of ranks that they do not serve, CUDA tensors go through host memory (`staging.py`).
Both ends of a message take the same way: it follows from the group's options, its size and hosts, and from what the two
ranks' hosts have told each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..engine.engine import Engine
from ..options import BackendOptions
from .interface import MODES

CheckPeer = Callable[[int, str], None]


class DeviceMessages(Protocol):
    """The messages of one group on CUDA tensors."""

    def post(self, is_send: bool, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Make a send, or a receive (of `p2p.message.ANY`: from any source); returns its work, or `NOT_SERVED`."""

    def begin_batch(self) -> None:
        """Collect messages from now on."""

    def end_batch(self) -> Any:
        """Make those that were collected as one; returns their work."""

    def close(self, is_aborted: bool) -> None:
        """End; kernels that wait for peers are ended at once if `is_aborted`. Idempotent."""


Maker = Callable[[Engine, int, int, Any, CheckPeer, bool], DeviceMessages]
_makers: list[Maker] = []


def register(maker: Maker) -> None:
    """Let `maker(engine, rank, staging_bytes, store, check_peer, is_masked)` make messages of groups; idempotent."""
    if maker not in _makers:
        _makers.append(maker)


def make(
    engine: Engine, rank: int, options: BackendOptions, store: Any, check_peer: CheckPeer
) -> DeviceMessages | None:
    """Return the messages of a group, None where those of its CUDA tensors go through host memory; opens nothing.

    Every mode is served in which a kernel waits for no decision about a rank that lives, as for collectives.
    """
    if not _makers or options.mode not in MODES or engine.box.exports is not None:
        return None
    is_masked = options.fault_mode == "mask"
    return _makers[0](engine, rank, engine.box.staging_bytes, store, check_peer, is_masked)
