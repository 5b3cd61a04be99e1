"""The needs of a pool's calls, in numbers that are equal on all ranks; and the bytes that a rank lends for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..latency.buffer import LatencyBuffer

BALANCED_SHARES = 2  # rows of an expanded room on a GPU, in rows that a rank gets when experts are equally busy
_LEAST_ITEMSIZE = 2  # of a buffer's dtype
_LEAST_TOKENS = 128
MOST_BLIND_TOKENS = 1 << 16  # that a GPU buffer can be made for


@dataclass  # not frozen, as `Need`: these are made in each call, and to set the fields of frozen ones takes long
class Wish:
    """The dispatch that one rank is about to make, without a known bound.

    Attributes:
        hidden, num_experts, num_tokens: sizes.
        num_topk: columns of `topk_idx`, 0 without top-k routing.
        dtype: of the payload's values.
        num_worst_tokens: rows of the result, 0 for as many as there are.
        num_sent: rows for each rank; zeros on GPUs, where the CPU does not know them.
    """

    hidden: int
    dtype: torch.dtype
    num_topk: int
    num_experts: int
    num_worst_tokens: int
    num_tokens: int
    num_sent: tuple[int, ...]


@dataclass
class Need:
    """The needs of a `Buffer` call; equal on all ranks.

    Attributes:
        layout: "rank", "expert", or "both".
        num_experts: over all ranks.
        hidden: elements of a row.
        num_topk: columns of `topk_idx`.
        num_tokens: most tokens of a rank.
        dtype: of the payload's values.
        device: of the tensors.
        num_rows: of a result of the rank layout that is returned in full capacity; 0 when that must not be exact.
    """

    layout: str
    num_experts: int
    hidden: int
    num_topk: int
    num_tokens: int
    dtype: torch.dtype
    device: torch.device
    num_rows: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element that travels, there or back: 2, 4 or 8; FP8 values come back as bfloat16."""
        return max(_LEAST_ITEMSIZE, self.dtype.itemsize)

    @classmethod
    def of(cls, wishes: list[Wish], device: torch.device) -> Need:
        """Return the needs of a call for which the requests of all ranks are known (`BufferPool.agree`)."""
        num_tokens = max(wish.num_tokens for wish in wishes)
        return cls._for(wishes[0], device, num_tokens, 0)

    @classmethod
    def unasked(cls, wish: Wish, device: torch.device) -> Need:
        """Return the needs of a call whose peers are not asked: no rank has more tokens than any rank receives."""
        num_rows = wish.num_worst_tokens
        return cls._for(wish, device, min(num_rows, MOST_BLIND_TOKENS), num_rows)

    @classmethod
    def _for(cls, wish: Wish, device: torch.device, num_tokens: int, num_rows: int) -> Need:
        num_topk = max(1, wish.num_topk)
        return cls("rank", wish.num_experts, wish.hidden, num_topk, num_tokens, wish.dtype, device, num_rows)

    def num_rows_of(self, num_ranks: int, num_tokens: int) -> int:
        """Return the rows that a room for `num_tokens` of each rank holds.

        The worst case, but on GPUs not more than twice a balanced share: on the CPU rows that are never sent cost
        nothing; on a GPU they are memory, and an expanded worst case would be many times the rows of a call. A routing
        that needs more is an error on all ranks.
        """
        if self.layout == "rank":
            return self.num_rows or num_ranks * num_tokens
        worst = num_ranks * num_tokens * min(self.num_topk, self.num_experts // num_ranks)
        if self.layout == "expert":
            return worst
        return max(num_ranks * num_tokens, min(worst, BALANCED_SHARES * self.num_topk * num_tokens))


class LatencyNeed(NamedTuple):
    """The needs of a `LatencyBuffer` call; equal on all ranks.

    Attributes:
        max_tokens: most tokens of a rank.
        hidden: elements of a row.
        num_experts: over all ranks.
        num_topk: columns of `topk_idx`.
        device: of the tensors.
    """

    max_tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    device: torch.device


def num_tokens_made_for(num_tokens: int) -> int:
    """Return the tokens that room is made for when so many are needed: a power of two, so that growth is rare."""
    return max(_LEAST_TOKENS, 1 << max(0, num_tokens - 1).bit_length())


def latency_bytes(num_ranks: int, max_tokens: int, hidden: int, num_experts: int, num_topk: int) -> int:
    """Return the bytes of a `LatencyBuffer` in which calls of this size fit.

    Raises:
        InvalidArgument: no buffer can be made for such sizes.
    """
    return LatencyBuffer.bytes_for(num_ranks, num_experts, hidden, num_topk, max_tokens)
