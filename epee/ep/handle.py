"""What dispatch and combine return, and the handle that ties them together. Metadata only: no arena memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from .layout import Placement, SendPlan, runs

# A payload is a tensor, or an FP8 pair (values, scales).
Payload: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"


class Pull(NamedTuple):
    """Rows that a combine reads from one rank: for each k, the tokens and the rows of that rank's slot."""

    dst_rank: int
    runs: list[tuple[int, torch.Tensor, torch.Tensor]]


def _by_k(slots: torch.Tensor, rows: torch.Tensor, num_topk: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    k = slots.remainder(num_topk)
    order = torch.argsort(k, stable=True)
    counts = torch.bincount(k, minlength=num_topk).tolist()
    tokens = slots.div(num_topk, rounding_mode="floor")[order].split(counts)
    return [(idx, tokens[idx], part) for idx, part in enumerate(rows[order].split(counts)) if len(part)]


@dataclass(frozen=True, eq=False)
class Handle:
    """Remembers where the rows of one dispatch went.

    It serves any number of cached dispatches and combines, with any payload type, until the buffer's epoch changes or
    the buffer is closed; then it is refused with `StaleHandleError`.

    Attributes:
        seq: the call that made it; equal on all ranks.
        epoch: of the view in which it was made.
        layout: "rank" or "expert".
        expert_alignment: rows; blocks of the expert layout are padded to it.
        num_tokens: tokens of this rank.
        num_recv: rows of `Dispatched.x`, padding included.
        num_tokens_per_expert: see `Dispatched`.
        num_received: rows that came from each rank, padding not counted.
    """

    buffer_id: int
    seq: int
    epoch: int
    layout: str
    expert_alignment: int
    num_tokens: int
    num_topk: int
    with_topk: bool
    plan: SendPlan
    placement: Placement
    sent_weights: torch.Tensor | None = None
    recv_topk_idx: torch.Tensor | None = None
    recv_weights: torch.Tensor | None = None
    recv_src_token: torch.Tensor | None = None
    recv_src_k: torch.Tensor | None = None

    @property
    def num_recv(self) -> int:
        """Rows of `Dispatched.x`, padding included."""
        return self.placement.num_recv

    @property
    def num_tokens_per_expert(self) -> list[int]:
        """(token, k) slots per local expert, rounded up to `expert_alignment`; empty without top-k routing."""
        return list(self.placement.num_tokens_per_expert) if self.with_topk else []

    @property
    def num_received(self) -> list[int]:
        """Rows that came from each rank, padding not counted."""
        return self.placement.num_received

    @cached_property
    def num_sent(self) -> list[int]:
        """Rows that this rank sends to each rank, itself included."""
        num_ranks = len(self.placement.num_received)
        sent = [0] * num_ranks
        for segment in self.placement.meta_segments:
            sent[segment.dst_rank] += segment.num_rows
        return sent

    @cached_property
    def src_rank(self) -> torch.Tensor:
        """`[num_recv]` int64: the rank that each row came from, -1 in padding."""
        num_received = torch.tensor(self.placement.num_received, dtype=torch.int64)
        return self._in_row_order(torch.repeat_interleave(torch.arange(len(num_received)), num_received))

    @cached_property
    def src_token(self) -> torch.Tensor:
        """`[num_recv]` int64: the token's index on the rank that it came from, -1 in padding."""
        assert self.recv_src_token is not None
        return self._in_row_order(self.recv_src_token)

    @cached_property
    def empty_tokens(self) -> torch.Tensor:
        """`[n]` int64: this rank's tokens that were sent nowhere, ascending."""
        is_empty = np.ones(self.num_tokens, dtype=np.bool_)
        is_empty[self.plan.tokens.numpy()] = False
        return torch.from_numpy(is_empty.nonzero()[0])

    @cached_property
    def src_k(self) -> torch.Tensor | None:
        """`[num_recv]` int64: which of its token's k a row stands for, -1 in padding; None in the rank layout."""
        return None if self.recv_src_k is None else self._in_row_order(self.recv_src_k)

    @cached_property
    def pulls(self) -> list[Pull]:
        """Expert layout: what a combine reads from each rank, ranks ascending, k ascending within a rank."""
        assert self.plan.slots is not None
        segments = self.placement.segments
        dst_row = torch.tensor([segment.dst_row for segment in segments], dtype=torch.int64)
        count = torch.tensor([segment.num_rows for segment in segments], dtype=torch.int64)
        rows = runs(dst_row, count)
        pulls = []
        first = 0
        for dst_rank, num_sent in enumerate(self.num_sent):
            part = slice(first, first + num_sent)
            first += num_sent
            if num_sent:
                pulls.append(Pull(dst_rank, _by_k(self.plan.slots[part], rows[part], self.num_topk)))
        return pulls

    def unweighted(self) -> Handle:
        """Return a handle of the same rows whose weights are all one (what the gradient of a dispatch needs)."""
        other = replace(self, sent_weights=None, recv_weights=None)
        for name in ("pulls", "empty_tokens", "num_sent"):  # depend on the rows only: not to be worked out again
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def _in_row_order(self, values: torch.Tensor) -> torch.Tensor:
        rows = self.placement.recv_rows
        if rows is None:
            return values
        return torch.full((self.num_recv,), -1, dtype=torch.int64).index_copy_(0, rows, values)


@dataclass(frozen=True, eq=False)
class Dispatched:
    """What this rank received.

    Attributes:
        x: `[num_recv, hidden]` rows in the payload's dtype, or the pair (values, scales). A view into the arena while
            slots last, else ordinary memory; either way it lives as long as the tensor.
        topk_idx: rank layout: `[num_recv, num_topk]` int64, ids among this rank's experts, -1 elsewhere. None in the
            expert layout and without top-k routing.
        topk_weights: rank layout: `[num_recv, num_topk]`, 0 where not local, None when none were sent. Expert layout:
            `[num_recv]`, the row's weight, ones when none were sent, 0 in padding. float32 (float64 if sent so).
        num_tokens_per_expert: one int per local expert, rounded up to `expert_alignment`.
        handle: for combine and for cached dispatches.
        event: None for CPU tensors.
        got: `[num_ranks]` bool: whose rows are in.
    """

    x: Payload
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    num_tokens_per_expert: list[int]
    handle: Handle
    event: None
    got: torch.Tensor


@dataclass(frozen=True, eq=False)
class Combined:
    """What came back for this rank's tokens.

    Attributes:
        x: `[num_tokens, hidden]` in the dtype of `y`; ordinary memory (or `out`).
        topk_weights: `[num_tokens, num_topk]` summed over the ranks, None when none were given.
        event: None for CPU tensors.
    """

    x: torch.Tensor
    topk_weights: torch.Tensor | None
    event: None
