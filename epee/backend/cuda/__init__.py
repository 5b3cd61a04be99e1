"""Collectives on CUDA tensors of one host, made by kernels over NVLink: the device half of the backend's groups."""

from __future__ import annotations

from typing import Any

import torch

from .interface import Policy, register
from .message_interface import register as register_messages


def _make(engine: Any, rank: int, staging_bytes: int, policy: Policy) -> Any:
    if not torch.cuda.device_count():  # asks NVML, which a fork survives, and CUDA only where there is none
        return None
    from .half import DeviceHalf  # imported when a group is made, not at `import epee`

    return DeviceHalf(engine, rank, staging_bytes, policy)


def _make_messages(engine: Any, rank: int, staging_bytes: int, store: Any, check_peer: Any, is_masked: bool) -> Any:
    from .messages.half import MessageHalf

    return MessageHalf(engine, rank, staging_bytes, store, check_peer, is_masked)


def serve() -> None:
    """Let groups of the backend make their calls and messages on CUDA tensors here."""
    register(_make)
    register_messages(_make_messages)
