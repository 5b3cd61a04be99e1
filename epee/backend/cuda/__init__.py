"""The CUDA backend of a group: collectives and messages on CUDA tensors of one host, made by kernels over NVLink.

A group or a call that is not served here sends CUDA tensors through cpu memory (`backend/staging.py`). The path of a
call follows from values that are equal on all ranks: the group's options, its size, its hosts, and the call. Both ends
of a message take the same path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .interface import MODES, Policy

if TYPE_CHECKING:
    from ...engine import Engine
    from ..options import BackendOptions
    from .half import DeviceHalf
    from .messages.half import MessageHalf


def make_calls(engine: Engine, rank: int, size: int, options: BackendOptions) -> DeviceHalf | None:
    """Create the collectives of a group; None if its CUDA tensors go through cpu memory. Opens no device."""
    # Not by the size: a process that joins a grown group must take part in the meeting, to learn that the group is too
    # large.
    if options.mode not in MODES or size <= 0 or engine.peer_regions.exports.spans:
        return None
    if not torch.cuda.device_count():  # asks NVML, which a fork survives, and CUDA only where there is no NVML
        return None
    from .half import DeviceHalf  # imported when a group is made, not at `import epee`

    policy = Policy(options.fault_mode == "mask", options.counts_present, options.on_stall == "wait")
    return DeviceHalf(engine, rank, engine.peer_regions.staging_bytes, policy)


def make_messages(
    engine: Engine, rank: int, options: BackendOptions, store: Any, check_peer: Callable[[int, str], None]
) -> MessageHalf | None:
    """Create the messages of a group; None if those of its CUDA tensors go through cpu memory. Opens no device.

    Served are all modes in which no kernel waits for a decision about a living rank, as for collectives.
    """
    if options.mode not in MODES or engine.peer_regions.exports.spans:
        return None
    from .messages.half import MessageHalf

    return MessageHalf(engine, rank, engine.peer_regions.staging_bytes, store, check_peer, options.fault_mode == "mask")
