"""Arguments and results of `LatencyBuffer`'s GPU core: options, handles over device memory, results."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .half import Half
from .params import SCALES_FLOAT, SCALES_POWER, SCALES_UE8M0
from .shapes import LatencyConfig, LatencyHandleSpace


@dataclass(frozen=True)
class CoreOptions:
    """The options of calls that share a plan.

    Attributes:
        timeout_s: bound of the kernel's waits, for calls that name none.
        is_strict: a missing source is an error (`check`), and is awaited again by the next call.
        return_hook: send only; the result's `hook` receives.
        use_fp8, round_scale, use_ue8m0: of a dispatch, as in `reference.latency`.
    """

    timeout_s: float = 10.0
    is_strict: bool = False
    return_hook: bool = False
    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False

    @property
    def scale_kind(self) -> int:
        """The rounding and storage of scales."""
        return SCALES_UE8M0 if self.use_ue8m0 else SCALES_POWER if self.round_scale else SCALES_FLOAT

    @property
    def kind(self) -> int:
        """The properties of a dispatch on which all ranks must agree."""
        return 1 + self.scale_kind if self.use_fp8 else 0


class CoreHandle:
    """Device metadata of one dispatch: views of one int32 tensor, made when they are read.

    Attributes:
        num_tokens: that this rank sent.
        words: the tensor; valid after the receive phase.
        address: of the tensor.

    Args:
        counts: `num_tokens_per_expert`, if that has memory of its own.
    """

    __slots__ = ("_config", "_counts", "_space", "address", "num_tokens", "words")

    def __init__(
        self,
        config: LatencyConfig,
        num_tokens: int,
        space: LatencyHandleSpace,
        words: torch.Tensor,
        counts: torch.Tensor | None = None,
    ) -> None:
        self.num_tokens = num_tokens
        self.words = words
        self.address = words.data_ptr()
        self._space = space
        self._config = config
        self._counts = counts

    def _part(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return _view(self.words, int(getattr(self._space, name)), shape, dtype)

    @property
    def got(self) -> torch.Tensor:
        """`[num_ranks]` bool: whose tokens are in the result."""
        return self._part("got", (self._config.num_ranks,), torch.bool)

    @property
    def wait_us(self) -> torch.Tensor:
        """`[num_ranks]` int64: microseconds until the receive phase had the message of each rank."""
        return self._part("waits", (self._config.num_ranks,), torch.int64)

    @property
    def num_tokens_per_expert(self) -> torch.Tensor:
        """`[num_local_experts]` int32."""
        if self._counts is not None:
            return self._counts
        return self._part("counts", (self._config.num_local_experts,), torch.int32)

    @property
    def layout_range(self) -> torch.Tensor:
        """`[num_local_experts, num_ranks]` int64: `begin << 32 | count` of each source's rows."""
        return self._part("ranges", (self._config.num_local_experts, self._config.num_ranks), torch.int64)

    @property
    def own_ids(self) -> torch.Tensor:
        """`[num_tokens, num_topk]` int32: the physical experts of this rank's tokens, -1 for none."""
        return self._part("own_ids", (self.num_tokens, self._config.num_topk), torch.int32)

    @property
    def own_weights(self) -> torch.Tensor:
        """`[num_tokens, num_topk]` float32: their weights."""
        return self._part("own_weights", (self.num_tokens, self._config.num_topk), torch.float32)

    @property
    def src_token(self) -> torch.Tensor:
        """`[num_local_experts, num_ranks * max_tokens]` int32: the token's number there; undefined after the rows."""
        return self._part("src_token", (self._config.num_local_experts, self._config.capacity), torch.int32)


@dataclass(eq=False, slots=True)
class CoreReceived:
    """The result of a dispatch: `x` `[L, ranks * T, hidden]`, scales `[L, ranks * T, n]` with FP8, the hook that
    receives when only the send phase has been launched, and the raw stream of the launch.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    handle: CoreHandle
    hook: Half | None
    stream: int


@dataclass(eq=False, slots=True)
class CoreCombined:
    """The result of a combine: `x` `[num_tokens, hidden]` bfloat16, `words` with the small results; hook and stream as
    of a dispatch.
    """

    x: torch.Tensor
    words: torch.Tensor
    hook: Half | None
    stream: int
    num_ranks: int

    @property
    def got(self) -> torch.Tensor:
        """`[num_ranks]` bool: whose experts are in the sums."""
        return _view(self.words, self.num_ranks, (self.num_ranks,), torch.bool)

    @property
    def wait_us(self) -> torch.Tensor:
        """`[num_ranks]` int64, as of a dispatch."""
        return _view(self.words, 0, (self.num_ranks,), torch.int64)


def _view(words: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return what begins `start` words into `words`, which have memory of their own, whatever the mode in which it is
    made: an inference tensor if they are one."""
    if words.is_inference() == torch.is_inference_mode_enabled():  # to enter a mode costs more than a view
        if dtype is words.dtype and len(shape) == 1:  # the counts, which many callers read
            return words.as_strided(shape, (1,), start)
        return _cut(words, start, shape, dtype)
    with torch.inference_mode(words.is_inference()):
        return _cut(words, start, shape, dtype)


def _cut(words: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(shape)
    if dtype == words.dtype and len(shape) == 1:
        return words.as_strided(shape, (1,), start)
    part = words[start : start - (-count * dtype.itemsize // words.itemsize)]
    return part.view(dtype)[:count].view(shape)
