"""Arguments and results of `LatencyBuffer`'s GPU core: options, handles over device memory, results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .params import SCALES_FLOAT, SCALES_POWER, SCALES_UE8M0, LatencyConfig, LatencyHandleSpace, handle_space


@dataclass(frozen=True)
class CoreOptions:
    """How a call runs.

    Attributes:
        timeout_s: bound of the kernel's waits.
        is_strict: a source that does not come is an error (`check`), and is awaited again by the next call.
        return_hook: send only; the result's `hook` receives.
        use_fp8, round_scale, use_ue8m0: of a dispatch, as `reference.latency` says.
    """

    timeout_s: float = 10.0
    is_strict: bool = False
    return_hook: bool = False
    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False

    @property
    def scale_kind(self) -> int:
        """How scales are rounded and stored."""
        return SCALES_UE8M0 if self.use_ue8m0 else SCALES_POWER if self.round_scale else SCALES_FLOAT

    @property
    def kind(self) -> int:
        """What all ranks must agree about in a dispatch."""
        return 1 + self.scale_kind if self.use_fp8 else 0


class CoreHandle:
    """Device metadata of one dispatch: views of one int32 tensor, made when they are read.

    Attributes:
        num_tokens: that this rank sent.
        words: the tensor; valid behind the receive half.
    """

    def __init__(self, config: LatencyConfig, num_tokens: int, words: torch.Tensor) -> None:
        self.num_tokens = num_tokens
        self.words = words
        self.space: LatencyHandleSpace = handle_space(config, num_tokens)
        self._config = config

    def address(self, part: str) -> int:
        """Return where a part lies."""
        return self.words.data_ptr() + 4 * int(getattr(self.space, part))

    def clear(self) -> None:
        """Say that nothing has come yet, until the hook has run."""
        self.words[self.space.waits : self.space.counts].zero_()

    def _part(self, name: str, count: int) -> torch.Tensor:
        start = int(getattr(self.space, name))
        return self.words[start : start + count]

    @property
    def got(self) -> torch.Tensor:
        """`[num_ranks]` bool: whose tokens are in the result."""
        return self._part("got", 2).view(torch.bool)[: self._config.num_ranks]

    @property
    def wait_us(self) -> torch.Tensor:
        """`[num_ranks]` int64: microseconds until the receive half had heard each rank."""
        return self._part("waits", 2 * self._config.num_ranks).view(torch.int64)

    @property
    def num_tokens_per_expert(self) -> torch.Tensor:
        """`[num_local_experts]` int32."""
        return self._part("counts", self._config.num_local_experts)

    @property
    def layout_range(self) -> torch.Tensor:
        """`[num_local_experts, num_ranks]` int64: `begin << 32 | count` of each source's rows."""
        shape = self._config.num_local_experts, self._config.num_ranks
        return self._part("ranges", 2 * shape[0] * shape[1]).view(torch.int64).view(shape)

    @property
    def own_ids(self) -> torch.Tensor:
        """`[num_tokens, num_topk]` int32: the experts of this rank's tokens, -1 for none."""
        return self._part("own_ids", self.num_tokens * self._config.num_topk).view(
            self.num_tokens, self._config.num_topk
        )

    @property
    def own_weights(self) -> torch.Tensor:
        """`[num_tokens, num_topk]` float32: their weights."""
        flat = self._part("own_weights", self.num_tokens * self._config.num_topk)
        return flat.view(torch.float32).view(self.num_tokens, self._config.num_topk)

    @property
    def src_token(self) -> torch.Tensor:
        """`[num_local_experts, num_ranks * max_tokens]` int32: the token's number there; undefined behind rows."""
        shape = self._config.num_local_experts, self._config.capacity
        return self._part("src_token", shape[0] * shape[1]).view(shape)


@dataclass
class CoreReceived:
    """What a dispatch brings: `x` `[L, ranks * T, hidden]`, scales `[L, ranks * T, n]` with FP8, and the hook that
    receives when only the send half has been launched."""

    x: torch.Tensor
    scales: torch.Tensor | None
    handle: CoreHandle
    hook: Callable[[], None] | None


@dataclass
class CoreCombined:
    """What a combine brings: `x` `[num_tokens, hidden]` bfloat16, `got` `[num_ranks]` bool, `wait_us` `[num_ranks]`
    int64 as of a dispatch, and the hook."""

    x: torch.Tensor
    got: torch.Tensor
    wait_us: torch.Tensor
    hook: Callable[[], None] | None
