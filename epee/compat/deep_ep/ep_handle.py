"""V2's handle: the result of `ElasticBuffer.dispatch` that `combine` uses.

It keeps the epee handle and the routing; every matrix that DeepEP keeps as a field is computed when it is first read,
from numbers that this rank has already (nothing here communicates). On GPUs the sums that clients read on the device
(`psum_...`, `num_unaligned_...`) are the dispatch kernel's own, so they may be read while a graph is recorded.

Rows are in (source rank, token) order, or in (expert, source rank, token, k) order when expanded, so every field is
deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from epee.compat.deep_ep.shared.layout import align_up
from epee.compat.deep_ep.shared.rows import filled_up
from epee.ep import CombineOrder, Handle, Room, count_layout
from epee.errors import UnsupportedError


class HandleForm(NamedTuple):
    """The common fields of the handles of dispatches with one cache key; see `EPHandle`."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    do_cpu_sync: bool
    num_scaleup_ranks: int


@dataclass(eq=False)
class EPHandle:
    """The handle of one dispatch.

    Attributes:
        do_expand: whether rows are per (expert, token), or per token.
        num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
        do_cpu_sync: whether results have as many rows as were received, or the worst case.
        num_scaleup_ranks: of the buffer; rank r is scale-up rank `r % num_scaleup_ranks`.
        room, core: epee's own.
        num_recv_tokens_per_expert_list: per local expert, rounded up to the alignment; empty without CPU sync.
        given_idx: this rank's routing, or None if `topk_idx` is made from the kernels' own copy when it is read.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    do_cpu_sync: bool
    num_scaleup_ranks: int
    room: Room
    core: Handle
    num_recv_tokens_per_expert_list: list[int]
    given_idx: torch.Tensor | None

    _ordered: tuple[CombineOrder, Handle] | None = field(default=None, init=False)
    token_metadata_at_forward: None = None  # of DeepEP's hybrid mode, for its own combine, which differs from epee's
    channel_linked_list: None = None  # likewise
    cached_recv_src_metadata_before_sort: None = None  # nothing needs sorting here

    @cached_property
    def topk_idx(self) -> torch.Tensor:
        """`[num_tokens, num_topk]` int64, this rank's routing."""
        found = self.core.sent_topk_idx if self.given_idx is None else self.given_idx
        assert found is not None
        return found

    def in_order(self, order: CombineOrder) -> Handle:
        """Return epee's handle for combines in this order of additions, with this rank's routing; the last is kept."""
        if self._ordered is None or self._ordered[0] is not order:
            own = order if self.given_idx is None else replace(order, topk_idx=self.given_idx)
            self._ordered = order, self.core.in_order(own)
        return self._ordered[1]

    def deterministic_sort(
        self,
        do_cpu_sync: bool,
        is_cached_dispatch: bool,
        recv_x: torch.Tensor,
        recv_sf: torch.Tensor | None,
        recv_topk_idx: torch.Tensor | None,
        recv_topk_weights: torch.Tensor | None,
        channel_linked_list: torch.Tensor | None,
    ) -> None:
        """Do nothing: rows are always sorted by (source rank, token), within each expert when expanded."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the buffer."""
        return self.room.core.num_ranks

    @property
    def num_rows(self) -> int:
        """Rows of the results."""
        return self.num_expanded_tokens if self.do_expand else self.num_recv_tokens

    @property
    def num_recv_tokens(self) -> int:
        """Tokens that arrived, each counted once; the worst case without CPU sync."""
        if not self.do_cpu_sync:
            return self.num_max_tokens_per_rank * self.room.core.num_ranks
        return len(self._token_ids) if self.do_expand else self.core.num_recv

    @property
    def num_expanded_tokens(self) -> int:
        """Rows of the expanded results, padding included (the worst case without CPU sync); 0 when not expanded."""
        if not self.do_expand:
            return 0
        if self.do_cpu_sync or not self.core.is_exact:
            return self.core.num_recv
        num_local, alignment = self.num_experts // self.num_ranks, self.expert_alignment
        per_token = min(self.core.num_topk, num_local)
        rows = self.num_ranks * self.num_max_tokens_per_rank * per_token + (alignment - 1) * num_local
        return align_up(rows, alignment)

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """`[num_scaleup_ranks]` int32: tokens from scale-up ranks 0 ... r of all hosts, each counted once."""
        ends = self.core.token_ends
        if self.num_scaleup_ranks == len(ends):
            return ends
        counts = ends.diff(prepend=ends.new_zeros(1)).view(-1, self.num_scaleup_ranks).sum(0)
        return counts.cumsum(0).to(torch.int32)

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        """`[num_local_experts]` int32: (token, k) pairs of each local expert."""
        return self.core.recv_slots

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """`[num_local_experts]` int32: the end of each expert's rows.

        Not expanded: the sum of the aligned counts of experts 0 ... i. Expanded: the first row of expert i (a multiple
        of the alignment) plus its real rows, so that `align(psum[i])` is the first row of expert i + 1.
        """
        return self.core.slot_ends

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """`[num_recv_tokens, num_topk + 2]` int32, a row for each token that arrived, in (source rank, token) order.

        Column 0: `src_rank * num_max_tokens_per_rank + src_token`. Column 1: the source's scale-up rank times
        `num_topk`, plus the last k whose expert is local. Column 2 + k: expanded, the row of that k in the result; -1
        elsewhere. Rows after those that arrived are -1.
        """
        num_topk = self.core.num_topk
        rows = self._expanded_row_of
        chosen = rows >= 0 if rows is not None else self._local_idx >= 0
        call_streams = torch.arange(num_topk, dtype=torch.int64, device=chosen.device)
        master = torch.where(chosen, call_streams, -1).amax(1)
        ids = self._token_ids
        scaleup_rank = ids // self.num_max_tokens_per_rank % self.num_scaleup_ranks
        columns = [ids[:, None], (scaleup_rank * num_topk + master)[:, None]]
        columns.append(torch.full_like(chosen, -1, dtype=torch.int64) if rows is None else rows)
        return filled_up(torch.cat(columns, 1).to(torch.int32), self.num_recv_tokens, -1)

    @cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """`[num_tokens, num_topk]` int32: the token's index among those sent to that rank, -1 for none."""
        there = count_layout(self.topk_idx, self.num_ranks, self.num_experts).is_token_in_rank
        place = torch.where(there, there.cumsum(0) - 1, -1)
        rank = self.topk_idx.div(self.num_experts // self.num_ranks, rounding_mode="floor")
        return torch.where(self.topk_idx >= 0, place.gather(1, rank.clamp(min=0)), -1).to(torch.int32)

    @property
    def _local_idx(self) -> torch.Tensor:
        assert self.core.recv_topk_idx is not None
        return self.core.recv_topk_idx[self._real_rows]

    @cached_property
    def _real_rows(self) -> torch.Tensor:
        """Indices of the rows that are no padding."""
        return (self.core.src_rank >= 0).nonzero()[:, 0]

    @cached_property
    def _ids_of_rows(self) -> torch.Tensor:
        """`src_rank * num_max_tokens_per_rank + src_token` of each row that is no padding."""
        real = self._real_rows
        return self.core.src_rank[real] * self.num_max_tokens_per_rank + self.core.src_token[real]

    @cached_property
    def _token_ids(self) -> torch.Tensor:
        """`src_rank * num_max_tokens_per_rank + src_token` of each token, ascending."""
        return torch.unique(self._ids_of_rows) if self.do_expand else self._ids_of_rows

    @cached_property
    def _expanded_row_of(self) -> torch.Tensor | None:
        """`[tokens, num_topk]` int64: the row of each k of each token, -1 for none; None when not expanded."""
        if not self.do_expand:
            return None
        src_k = self.core.src_k
        if src_k is None:
            raise UnsupportedError("recv_src_metadata of an expanded dispatch is not known on this device")
        token = torch.searchsorted(self._token_ids, self._ids_of_rows)
        shape = (len(self._token_ids), self.core.num_topk)
        rows = torch.full(shape, -1, dtype=torch.int64, device=token.device)
        rows[token, src_k[self._real_rows]] = self._real_rows
        return rows
