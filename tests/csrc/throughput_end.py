"""A rank's end of a GPU buffer without a `Buffer` around it: machine, shape, plans. Nobody checks, agrees or hears of
deaths; the arguments are those that a `CudaPath` hands down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from epee.ep.throughput.gpu import combine
from epee.ep.throughput.gpu.dispatch import plan_of
from epee.ep.throughput.gpu.machine import Machine
from epee.ep.throughput.gpu.shape import Shape
from epee.ep.throughput.gpu.types import CombineOptions, DispatchOptions, DispatchResult, ThroughputHandle
from epee.gpu.lent import AllGather
from epee.gpu.platform import Platform
from epee.gpu.report import REFUSED_INVALID_ARGUMENT
from epee.gpu.shapes import ThroughputConfig


class ThroughputEnd:
    """Makes calls of one shape, and of others over the same memory. Collective to make."""

    def __init__(self, platform: Platform, config: ThroughputConfig, all_gather: AllGather) -> None:
        self.machine = Machine(platform, config, all_gather)
        self.shape, self.config = Shape(self.machine, config), config
        self.check, self.close = self.machine.check, self.machine.close

    def dispatch(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        route: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        handle: ThroughputHandle | None,
        options: DispatchOptions,
    ) -> DispatchResult:
        """Send rows."""
        stream, payload = self.machine.begin(), (x, scales, topk_weights)
        plan = plan_of(self.shape, handle, payload, route, options, None)
        return plan.start(payload, route, handle, options.timeout_s, stream)

    def combine(
        self,
        y: torch.Tensor,
        handle: ThroughputHandle,
        topk_weights: torch.Tensor | None,
        bias: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        options: CombineOptions,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring rows back."""
        self.machine.begin()
        return combine.combine(self.shape, y, handle, topk_weights, bias, out, options, None)

    def combine_input(self, handle: ThroughputHandle, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory for rows to be combined."""
        return combine.combine_input(self.shape, handle, dtype)

    def barrier(self, timeout_s: float) -> None:
        """Let the ranks meet."""
        self.machine.begin()
        self.machine.barrier(timeout_s)

    def refuse(self, timeout_s: float, tell: Callable[[int], Any] | None = None) -> None:
        """Take part in the peers' next call as the rank whose arguments are wrong."""
        combine.refuse(self.shape, REFUSED_INVALID_ARGUMENT, timeout_s, tell)
