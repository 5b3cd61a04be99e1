"""Collectives on CUDA tensors of one host, made by kernels over NVLink: the device half of the backend's groups."""

from __future__ import annotations

from typing import Any

from ..backend.device.calls import register


def _make(engine: Any, rank: int, staging_bytes: int) -> Any:
    from .half import DeviceHalf  # imported when a group is made, not at `import epee`

    return DeviceHalf(engine, rank, staging_bytes)


def serve() -> None:
    """Let groups of the backend make their calls on CUDA tensors here."""
    register(_make)
