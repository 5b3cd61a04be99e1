"""Requests of V1 dispatches: the sizes of a call, checked, and packed into the few words that the ranks exchange.

On GPUs only shapes are read, so a request is computed once for calls with the same shapes. On CPUs the data is read as
well: errors are found before the ranks agree.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from epee.compat.deep_ep.shared.rows import has_memory, values_of
from epee.ep import Need, Payload, Wish, check_topk_idx, count_layout
from epee.errors import InvalidArgument
from epee.values import is_whole, shown

_MOST_TOKENS = (1 << 31) - 1
_MOST_WISHES = 1024  # number of cached requests
# num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert
Counts: TypeAlias = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]
# rows, their counts, topk_idx, topk_weights
Given: TypeAlias = tuple[Payload, Counts, "torch.Tensor | None", "torch.Tensor | None"]


class Wishes:
    """The requests of one buffer.

    Args:
        num_ranks: of the group.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._known: dict[tuple[object, ...], tuple[Wish, Need]] = {}

    def find(self, given: Given, num_worst_tokens: int, device: torch.device, is_gpu: bool) -> tuple[Wish, Need]:
        """Return this rank's request and needs; on GPUs computed once for calls with the same shapes."""
        x, counts, routing, topk_weights = given
        shapes = None
        if is_gpu and routing is not None and all(isinstance(count, torch.Tensor) for count in counts):
            values: Any = values_of(x)
            _, is_in, per_expert = counts
            assert is_in is not None
            assert per_expert is not None
            shapes = (
                values.shape,
                values.dtype,
                routing.shape,
                topk_weights is None,
                is_in.shape,
                is_in.dtype,
                per_expert.shape,
                num_worst_tokens,
                device,
            )
            known = self._known.get(shapes)
            if known is not None:
                return known
        wish = self._wish(given, num_worst_tokens, is_gpu)
        known = wish, Need.of([wish], device)
        if shapes is not None:
            if len(self._known) >= _MOST_WISHES:
                self._known.clear()
            self._known[shapes] = known
        return known

    def _wish(self, given: Given, num_worst_tokens: int, is_gpu: bool) -> Wish:
        """Check the request that is sent to the other ranks."""
        x, counts, routing, topk_weights = given
        values = values_of(x)
        num_tokens, hidden = values.shape
        _, is_token_in_rank, per_expert = counts
        if not all(map(has_memory, counts)):
            raise InvalidArgument(
                "dispatch needs num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert: give those of "
                "get_dispatch_layout, or a handle"
            )
        if (routing is None) != (topk_weights is None):
            raise InvalidArgument("topk_idx and topk_weights must be given both or neither")
        if not is_whole(num_worst_tokens, 0, _MOST_TOKENS) or (num_worst_tokens and routing is None):
            raise InvalidArgument(
                f"num_worst_tokens must be a number from 0 to {_MOST_TOKENS} and needs topk_idx and topk_weights, got "
                f"{shown(num_worst_tokens)}"
            )
        assert is_token_in_rank is not None
        assert per_expert is not None
        num_experts = per_expert.numel()
        if num_experts < 1 or num_experts % self._num_ranks:
            raise InvalidArgument(
                f"num_tokens_per_expert must have a multiple of {self._num_ranks} entries, got {num_experts}"
            )
        if is_token_in_rank.shape != (num_tokens, self._num_ranks) or is_token_in_rank.dtype != torch.bool:
            raise InvalidArgument(
                f"is_token_in_rank must be bool [{num_tokens}, {self._num_ranks}], "
                f"got {is_token_in_rank.dtype} {list(is_token_in_rank.shape)}"
            )
        if routing is not None and not is_gpu:
            check_topk_idx(routing, num_experts)
            wanted = count_layout(routing, self._num_ranks, num_experts).is_token_in_rank
            if not torch.equal(is_token_in_rank, wanted):
                raise InvalidArgument(
                    "is_token_in_rank must say where topk_idx goes; take it from get_dispatch_layout(topk_idx), or "
                    "leave topk_idx out to route by is_token_in_rank alone"
                )
        return Wish(
            hidden=hidden,
            dtype=values.dtype,
            num_topk=0 if routing is None else routing.shape[1],
            num_experts=num_experts,
            num_worst_tokens=num_worst_tokens,
            num_tokens=num_tokens,
            num_sent=(0,) * self._num_ranks if is_gpu else tuple(is_token_in_rank.sum(0).tolist()),
        )
