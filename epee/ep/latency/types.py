"""Arguments and results of `LatencyBuffer`, on CPUs and GPUs alike: checked calls, handles, results.

Metadata only; no memory of peers is named here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...gpu.event import DONE, Event
from ..config import BufferConfig
from ..handle import BoundToBuffer

SCALE_BLOCK = 128  # channels that share one FP8 scale


class LatencyOptions(NamedTuple):
    """Options of a call's waits, and its mask; these need not be equal on all ranks.

    Attributes:
        active_ranks: `[num_ranks or more]` int32 on the buffer's device, 1 = active, read and written in each phase;
            None: all ranks are needed, and a missing one is an error.
        timeout_s: seconds that a phase waits for a silent peer.
        return_hook: send now, receive when the hook is called.
    """

    active_ranks: torch.Tensor | None
    timeout_s: float
    return_hook: bool


class CallSizes(NamedTuple):
    """The buffer to which cache entries belong: one memory serves buffers of several sizes.

    Attributes:
        buffer_id: of the buffer, which goes into handles.
        config: of the buffer.
        ready: what the path has prepared for such calls.
    """

    buffer_id: int
    config: BufferConfig
    ready: Any


class Quantisation(NamedTuple):
    """The format in which rows are sent.

    Attributes:
        use_fp8: as float8_e4m3fn with a scale for each 128 channels.
        round_scale: scales are powers of two.
        use_ue8m0: four scales in an int32.
    """

    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False


QUANTISATION_NAMES = tuple(Quantisation.__annotations__)


@dataclass(eq=False, slots=True)
class CheckedLatencyDispatch:
    """The properties of a dispatch without its data, cached; calls with equal keys share one (`plans.py`).

    Attributes:
        sizes: of the buffer.
        num_tokens: of this rank.
        quantisation: of the rows.
        is_strict: no mask was given: all ranks are needed.
        return_hook: send now, receive when the hook is called.
        plan: what the path has prepared for such calls.
    """

    sizes: CallSizes
    num_tokens: int
    quantisation: Quantisation
    is_strict: bool
    return_hook: bool
    plan: Any = None


@dataclass(eq=False, slots=True)
class CheckedLatencyCombine:
    """The properties of a combine without its data, as `CheckedLatencyDispatch`.

    Attributes:
        sizes: of the buffer.
        num_tokens: of this rank's dispatch.
        partial_dtype: bfloat16 or float32: the dtype of the partial sums.
        is_strict, return_hook, plan: as there.
    """

    sizes: CallSizes
    num_tokens: int
    partial_dtype: torch.dtype
    is_strict: bool
    return_hook: bool
    plan: Any = None


class LatencyDispatchCall(NamedTuple):
    """A checked dispatch.

    Attributes:
        checked: the properties of its arguments.
        x: `[num_tokens, hidden]` bfloat16.
        topk_idx: `[num_tokens, num_topk]` int64, contiguous.
        topk_weights: `[num_tokens, num_topk]` float32, contiguous, or None for ones.
        active_ranks, timeout_s: as in `LatencyOptions`.
    """

    checked: CheckedLatencyDispatch
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    active_ranks: torch.Tensor | None
    timeout_s: float


class LatencyCombineCall(NamedTuple):
    """A checked combine.

    Attributes:
        checked: the properties of its arguments.
        handle: of the dispatch.
        y: `[num_local_experts, num_ranks * max_tokens_per_rank, hidden]` bfloat16, contiguous.
        topk_weights: `[num_tokens, num_topk]` float32, contiguous, or None for those of the dispatch.
        out: `[num_tokens, hidden]` bfloat16 or None.
        active_ranks, timeout_s: as in `LatencyOptions`.
    """

    checked: CheckedLatencyCombine
    handle: LatencyHandle
    y: torch.Tensor
    topk_weights: torch.Tensor | None
    out: torch.Tensor | None
    active_ranks: torch.Tensor | None
    timeout_s: float


@dataclass(eq=False)
class LatencyHandle(BoundToBuffer):
    """The destinations of the rows of one dispatch. It serves any number of combines, as long as its epoch lasts.

    Attributes:
        buffer_id: of the buffer that made it.
        seq: the call that made it; equal on all ranks.
        epoch: of the view in which it was made.
        num_tokens: of this rank.
        num_topk: columns of `topk_idx`.
        got: `[num_ranks]` bool on the buffer's device: the ranks whose tokens this rank has; valid once they are
            received.
        layout_range: `[num_local_experts, num_ranks]` int64, `begin << 32 | count` of each source's rows in a block.
        src_token: `[num_local_experts, num_ranks * max_tokens_per_rank]` int32: the token's index on its source; values
            after an expert's rows are undefined.
        is_received: whether the receive phase has been done (on GPUs: launched).
    """

    buffer_id: int
    seq: int
    epoch: int
    num_tokens: int
    num_topk: int
    got: torch.Tensor
    layout_range: torch.Tensor
    src_token: torch.Tensor
    is_received: bool = False


Hook = Callable[[], None]


@dataclass(eq=False)
class LatencyDispatched:
    """The rows that this rank received. With a hook everything is undefined until the hook has been called.

    Attributes:
        x: `[num_local_experts, num_ranks * max_tokens_per_rank, hidden]` bfloat16, or the pair (float8_e4m3fn values,
            scales); a block holds its expert's rows in (source rank, token) order, the rest is undefined. The scales'
            rows lie side by side (stride 1): float32 `[..., hidden / 128]` or int32 `[..., hidden / 512]`.
        num_tokens_per_expert: `[num_local_experts]` int32 on the buffer's device: rows of each block.
        handle: for combine; the weights stay with it.
        event: the end of the call; `event.wait()` makes the current stream wait for it. CPU calls are done at once.
        hook: runs the receive phase, once; None without `return_hook`.
        got: `[num_ranks]` bool on the buffer's device: the ranks whose rows are in. Any other source is missing as a
            whole.
        wait_us: `[num_ranks]` int64 on the buffer's device: microseconds until the receive phase had the message of
            each rank.
    """

    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    num_tokens_per_expert: torch.Tensor
    handle: LatencyHandle
    event: Event
    got: torch.Tensor
    hook: Hook | None = None
    wait_us: torch.Tensor | None = None

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of the result until work that is on `stream` when it dies is done (as for torch's tensors).

        The streams of the call, and the one that was current in an `async_op` call, are recorded already.
        """
        for tensor in (*(self.x if isinstance(self.x, tuple) else (self.x,)), self.num_tokens_per_expert, self.got):
            if tensor.is_cuda:
                tensor.record_stream(stream)


@dataclass(eq=False)
class LatencyCombined:
    """The sums of a combine.

    Attributes:
        x: `[num_tokens, hidden]` bfloat16 (or `out`).
        event: the end of the call, as in `LatencyDispatched`.
        got: `[num_ranks]` bool on the buffer's device: the ranks whose experts are in the sums.
        hook: runs the receive phase, once; None without `return_hook`.
        lost: called by `lost_weight`.
        wait_us: as in `LatencyDispatched`.
    """

    x: torch.Tensor
    got: torch.Tensor
    event: Event = DONE
    hook: Hook | None = None
    lost: Callable[[], torch.Tensor] | None = field(default=None, repr=False)
    wait_us: torch.Tensor | None = None

    @property
    def lost_weight(self) -> torch.Tensor:
        """`[num_tokens]` float32: the weights of each token whose expert is not in the sums (see `got`)."""
        assert self.lost is not None
        return self.lost()
