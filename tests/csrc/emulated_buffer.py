"""`epee.Buffer` over the emulated GPU: the same class and the same kernels, with CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import epee
from epee.gpu.platform import Platform
from tests.csrc.emulated import EmulatedPlatform


class EmulatedBuffer(epee.Buffer):
    """A GPU buffer without a GPU."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "device": "cuda"})

    @staticmethod
    def _platform_of(device: torch.device | str | None) -> Platform | None:
        return EmulatedPlatform()


def emulated(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run a rank's function with `epee.Buffer` on the emulated GPU."""
    epee.Buffer = EmulatedBuffer  # type: ignore[misc]
    return function(rank, num_ranks, *args)
