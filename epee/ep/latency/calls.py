"""The latency half of `Buffer`: checks what it is given, hands it to the path, wraps what comes back.

`Buffer` calls this with its lock held; hooks that users call later are wrapped there, so that they take the lock, too.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ...errors import InvalidArgument
from ..config import BufferConfig
from ..streams import Lane, RunOptions
from .checks import (
    check_latency_combine,
    check_latency_dispatch,
    check_latency_handle,
    check_options,
    check_quantisation,
)
from .types import LatencyCombined, LatencyDispatched, LatencyHandle, LatencyPath, Quantisation


class Waits(NamedTuple):
    """How a call waits, as the user said it.

    Attributes:
        active_ranks: `[num_ranks or more]` int32 or None.
        timeout_us: microseconds, or None.
        timeout: seconds, or None.
        return_hook: whether a hook is wanted.
    """

    active_ranks: object
    timeout_us: object
    timeout: float | None
    return_hook: object

    @property
    def are_given(self) -> bool:
        """Whether something is given that has a meaning in latency mode only."""
        return self.active_ranks is not None or self.timeout_us is not None or self.return_hook is not False


class _Epoch(Protocol):
    @property
    def epoch(self) -> int: ...


class LatencyCalls:
    """The calls of a buffer in latency mode.

    Args:
        config: of the buffer.
        path: moves the rows.
        exchange: knows the epoch.
        buffer_id: that handles must have.
        timeout_s: default time-out.
    """

    def __init__(
        self, config: BufferConfig, path: LatencyPath, exchange: _Epoch, buffer_id: int, timeout_s: float
    ) -> None:
        self._config = config
        self._path = path
        self._exchange = exchange
        self._buffer_id = buffer_id
        self._timeout_s = timeout_s

    def dispatch(
        self,
        x: object,
        topk_idx: object,
        topk_weights: object,
        how: Quantisation,
        waits: Waits,
        lane: Lane,
        run: RunOptions,
    ) -> LatencyDispatched:
        """Check and run a dispatch."""
        config = self._config
        options = check_options(config, *waits, run.async_op, self._timeout_s)
        call = check_latency_dispatch(config, x, topk_idx, topk_weights, check_quantisation(config, *how))
        return self._path.dispatch(call, options, lane, run)

    def combine(
        self,
        y: object,
        handle: object,
        topk_weights: object,
        partial_dtype: object,
        out: object,
        waits: Waits,
        lane: Lane,
        run: RunOptions,
    ) -> LatencyCombined:
        """Check and run a combine."""
        config = self._config
        options = check_options(config, *waits, run.async_op, self._timeout_s)
        known = self._known(handle)
        call = check_latency_combine(config, y, known, topk_weights, partial_dtype, out)
        return self._path.combine(call, options, lane, run)

    def combine_input(self, handle: object, dtype: object) -> torch.Tensor:
        """Return memory for the `y` of a combine."""
        if dtype not in (None, torch.bfloat16):
            raise InvalidArgument(f"dtype must be torch.bfloat16 in latency mode, got {dtype}")
        return self._path.combine_input(self._known(handle))

    def sync(self, active_ranks: object, deadline: float) -> torch.Tensor:
        """Agree with the other ranks on who takes part."""
        options = check_options(self._config, active_ranks, None, None, False, False, self._timeout_s)
        return self._path.sync(options.active_ranks, deadline)

    def _known(self, handle: object) -> LatencyHandle:
        return check_latency_handle(handle, self._buffer_id, self._exchange.epoch)
