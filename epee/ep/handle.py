"""The results of dispatch and combine, and the handle that connects them. Metadata only: no arena memory.

A `Handle` is what users see; each path has its own kind: `CpuHandle` here, `throughput/gpu_handle.py`'s `CudaHandle`.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from ..arrays import array_of
from ..errors import UnsupportedError
from ..gpu.event import DONE, Event
from .throughput.hosts.host_records import NO_RECORDS, HostRecords
from .throughput.order import CombineOrder
from .throughput.placement import Ints, Placement, SendPlan, runs

SomeHandle = TypeVar("SomeHandle", bound="Handle")
_Bound = TypeVar("_Bound", bound="BoundToBuffer")
# A payload is a tensor, or an FP8 pair (values, scales).
Payload: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"


class Pull(NamedTuple):
    """Rows that a combine reads from one rank: for each k, the tokens and the rows of that rank's slot."""

    dst_rank: int
    runs: list[tuple[int, torch.Tensor, torch.Tensor]]


class DispatchRouting(NamedTuple):
    """The destinations that a dispatch asked for: stored if some of it may be lost, to report how much was.

    Attributes:
        topk_idx: `[num_tokens, num_topk]` int64, or None.
        topk_weights: `[num_tokens, num_topk]`, or None.
        mask: `[num_tokens, num_ranks]` bool, when that was the routing.
    """

    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    mask: torch.Tensor | None


def _by_k(slots: Ints, rows: Ints, num_topk: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    tokens, which_k = np.divmod(slots, num_topk)
    found = []
    for k in range(num_topk):
        of_k = (which_k == k).nonzero()[0]
        if len(of_k):
            found.append((k, torch.from_numpy(tokens[of_k]), torch.from_numpy(rows[of_k])))
    return found


def new_buffer_id() -> int:
    """Return a random number for a buffer: no other one of any process has it, so handles cannot be mixed up."""
    return secrets.randbits(63)


class BoundToBuffer:
    """The common base of handles of all buffers: one serves the buffer and the process that made it, no other.

    A copy shares the handle's data and serves as the handle does. It cannot be pickled.
    """

    def _twin(self: _Bound) -> _Bound:
        """Return a copy, with what has been computed from the rows; a quarter of `copy`'s time."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __copy__(self: _Bound) -> _Bound:
        return self._twin()

    def __deepcopy__(self: _Bound, memo: dict[int, object]) -> _Bound:
        return self._twin()

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "a handle cannot be pickled: it says where rows lie in the memory of one buffer of this process, until the "
            "buffer's epoch changes; send the routing (topk_idx) instead and dispatch there"
        )


@dataclass(eq=False)  # not frozen: to set the fields of frozen ones takes the CPU eight times as long
class Handle(BoundToBuffer, ABC):
    """The destinations of the rows of one dispatch.

    It serves any number of cached dispatches and combines, with any payload type, until the buffer's epoch changes or
    the buffer is closed; then it is refused with `StaleHandleError`.

    Attributes:
        seq: the call that made it; equal on all ranks.
        epoch: of the view in which it was made.
        layout: "rank" or "expert".
        expert_alignment: rows; blocks of the expert layout are padded to it.
        num_tokens: tokens of this rank.
        num_topk: columns of `topk_idx`.
        with_topk: whether routing came from `topk_idx`.
        order: in which its combines add up; None for epee's own, which is the fastest.
        capacity: maximum of rows that each rank kept, None for all. Rows that were dropped count nowhere below.
    """

    buffer_id: int
    seq: int
    epoch: int
    layout: str
    expert_alignment: int
    num_tokens: int
    num_topk: int
    with_topk: bool
    order: CombineOrder | None = field(default=None, kw_only=True)
    capacity: int | None = field(default=None, kw_only=True)

    def in_order(self: SomeHandle, order: CombineOrder | None) -> SomeHandle:
        """Return a handle of the same rows whose combines add up in another order, for another library's bits.

        On GPUs all ranks give an order or none does (otherwise `MismatchError`).
        """
        other = self._twin()
        other.order = order
        return other

    @property
    def sent_topk_idx(self) -> torch.Tensor | None:
        """`[num_tokens, num_topk]` int64: the routing of the dispatch, if the handle has a copy; else None."""
        return None

    @property
    @abstractmethod
    def num_recv(self) -> int:
        """Rows of `Dispatched.x`: padding included; without CPU sync the maximum that can be received."""

    @property
    @abstractmethod
    def num_tokens_per_expert(self) -> list[int]:
        """(token, k) slots per local expert, rounded up to `expert_alignment`; empty without top-k routing or sync."""

    @property
    @abstractmethod
    def num_received(self) -> list[int]:
        """Rows that came from each rank, padding not counted. On GPUs the CPU waits for it."""

    @property
    @abstractmethod
    def num_sent(self) -> list[int]:
        """Rows that this rank sends to each rank, itself included. On GPUs the CPU waits for it."""

    @property
    def num_sent_to_hosts(self) -> list[int] | None:
        """Tokens of this rank that go to each host, its own too, once each; None on one host, and on GPUs."""
        return None

    @property
    @abstractmethod
    def recv_counts(self) -> torch.Tensor:
        """`[1 + num_local_experts]` int32 on the buffer's device: rows that are there, then `num_tokens_per_expert`."""

    @property
    @abstractmethod
    def src_rank(self) -> torch.Tensor:
        """`[num_recv]` int64: the rank that each row came from, -1 in padding."""

    @property
    @abstractmethod
    def src_token(self) -> torch.Tensor:
        """`[num_recv]` int64: the token's index on the rank that it came from, -1 in padding."""

    @property
    @abstractmethod
    def src_k(self) -> torch.Tensor | None:
        """`[num_recv]` int64: which of its token's k a row stands for, -1 in padding; None in the rank layout."""

    @property
    @abstractmethod
    def recv_topk_idx(self) -> torch.Tensor | None:
        """`[num_recv, num_topk]` int64, local ids or -1; rank layout with top-k routing only."""

    def peek_topk_idx(self) -> torch.Tensor | None:
        """Return `recv_topk_idx` for work that is put on the current stream before the next call; read-only.

        On GPUs it is not copied for that.
        """
        return self.recv_topk_idx

    @property
    @abstractmethod
    def recv_slots(self) -> torch.Tensor:
        """`[num_local_experts]` int32 on the buffer's device: (token, k) slots per local expert, not rounded up."""

    @property
    @abstractmethod
    def slot_ends(self) -> torch.Tensor:
        """`[num_local_experts]` int32 on the buffer's device: where the slots of each local expert end.

        Rank layout: the sum of the counts of local experts 0 ... i, each rounded up. Expert layout: the first row of
        expert i plus its rows that are no padding.
        """

    @property
    @abstractmethod
    def token_ends(self) -> torch.Tensor:
        """`[num_ranks]` int32 on the buffer's device: tokens from ranks 0 ... r, each counted once."""

    @property
    def is_exact(self) -> bool:
        """Whether `num_recv` is exact; else (no CPU sync) only the GPU knows the count, and it is the maximum."""
        return True

    @property
    def num_read_rows(self) -> int:
        """Rows that a combine reads, without padding after them; the CPU waits for the GPU."""
        ends = self.token_ends if self.layout == "rank" else self.slot_ends
        return min(int(ends[-1]), self.num_recv)

    @property
    def received_up_to(self) -> torch.Tensor | None:
        """`[num_ranks, num_ranks]` int32 on the GPU: tokens that rank d (column) gets from ranks 0 ... s (row).

        None on CPUs, where a rank keeps only its own counts.
        """
        return None

    @property
    def source_tokens(self) -> torch.Tensor | None:
        """`[num_ranks]` int32 on the GPU: tokens that each rank had in the dispatch; None on CPUs."""
        return None

    @property
    @abstractmethod
    def num_dropped(self) -> torch.Tensor | None:
        """`[1]` int32 on the buffer's device: rows that this rank would have received; None without a capacity."""

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors on the GPU read by later calls; for the allocator, if these run on another stream."""
        return ()

    @abstractmethod
    def unweighted(self) -> Handle:
        """Return a handle of the same rows whose weights are all one (what the gradient of a dispatch needs)."""


@dataclass(eq=False)
class CpuHandle(Handle):
    """The handle of CPU tensors: the rows that this rank sends, and the offsets of all rows.

    Attributes:
        dropped: `[num_tokens, num_ranks]` bool: rows that were not sent, for the capacity; None if there are none.
        num_dropped_rows: rows that this rank would have received beyond the capacity.
        by_host: the records by which the rows travel between hosts.
    """

    plan: SendPlan
    placement: Placement
    sent_weights: torch.Tensor | None = None
    recv_topk_idx: torch.Tensor | None = None
    recv_weights: torch.Tensor | None = None
    recv_src_token: torch.Tensor | None = None
    recv_src_k: torch.Tensor | None = None
    routing: DispatchRouting | None = None
    dropped: torch.Tensor | None = None
    num_dropped_rows: int = 0
    by_host: HostRecords = NO_RECORDS

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

    @property
    def recv_counts(self) -> torch.Tensor:
        """`[1 + num_local_experts]` int32: rows, then `num_tokens_per_expert`."""
        return torch.tensor([self.num_recv, *self.placement.num_tokens_per_expert], dtype=torch.int32, device="cpu")

    @property
    def num_dropped(self) -> torch.Tensor | None:
        """`[1]` int32: rows that this rank would have received; None without a capacity."""
        return None if self.capacity is None else torch.tensor([self.num_dropped_rows], dtype=torch.int32, device="cpu")

    @property
    def num_sent_to_hosts(self) -> list[int] | None:
        """Tokens of this rank that go to each host, its own one too, once each; None if all ranks share a host."""
        return [len(records.tokens) for records in self.by_host.sent] or None

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
        num_received = torch.tensor(self.placement.num_received, dtype=torch.int64, device="cpu")
        ranks = torch.arange(len(num_received), dtype=torch.int64, device="cpu")
        return self._in_row_order(torch.repeat_interleave(ranks, num_received))

    @cached_property
    def src_token(self) -> torch.Tensor:
        """`[num_recv]` int64: the token's index on the rank that it came from, -1 in padding."""
        assert self.recv_src_token is not None
        return self._in_row_order(self.recv_src_token)

    @cached_property
    def empty_tokens(self) -> torch.Tensor:
        """`[n]` int64: this rank's tokens that were sent nowhere, ascending."""
        is_empty = np.ones(self.num_tokens, dtype=np.bool_)
        is_empty[array_of(self.plan.tokens)] = False
        return torch.from_numpy(is_empty.nonzero()[0])

    @cached_property
    def src_k(self) -> torch.Tensor | None:
        """`[num_recv]` int64: which of its token's k a row stands for, -1 in padding; None in the rank layout."""
        return None if self.recv_src_k is None else self._in_row_order(self.recv_src_k)

    @cached_property
    def recv_slots(self) -> torch.Tensor:
        """`[num_local_experts]` int32: (token, k) slots per local expert, not rounded up; 0 without top-k routing."""
        num_local = len(self.placement.num_tokens_per_expert)
        if self.placement.recv_rows is not None:
            expert = torch.searchsorted(self._block_ends, self.placement.recv_rows, right=True)
        elif self.recv_topk_idx is not None:
            expert = self.recv_topk_idx[self.recv_topk_idx >= 0]
        else:
            expert = torch.empty(0, dtype=torch.int64, device="cpu")
        return torch.bincount(expert, minlength=num_local).to(torch.int32)

    @cached_property
    def slot_ends(self) -> torch.Tensor:
        """`[num_local_experts]` int32: where the slots of each local expert end (see `Handle`)."""
        if self.layout == "rank":
            return self._block_ends.to(torch.int32)
        first = self._block_ends - torch.tensor(self.placement.num_tokens_per_expert, dtype=torch.int64, device="cpu")
        return (first + self.recv_slots).to(torch.int32)

    @cached_property
    def token_ends(self) -> torch.Tensor:
        """`[num_ranks]` int32: tokens from ranks 0 ... r, each counted once."""
        num_tokens = self.placement.num_received
        if self.layout == "expert":  # a token has as many rows as it has experts here
            assert self.recv_src_token is not None
            num_tokens = [len(tokens.unique()) for tokens in self.recv_src_token.split(num_tokens)]
        return torch.tensor(num_tokens, dtype=torch.int64, device="cpu").cumsum(0).to(torch.int32)

    @property
    def _block_ends(self) -> torch.Tensor:
        """`[num_local_experts]` int64: the sum of the counts of local experts 0 ... i, each rounded up."""
        return torch.tensor(self.placement.num_tokens_per_expert, dtype=torch.int64, device="cpu").cumsum(0)

    @cached_property
    def pulls(self) -> list[Pull]:
        """Expert layout: what a combine reads from each rank, ranks ascending, k ascending within a rank."""
        assert self.plan.slots is not None
        segments = self.placement.segments
        dst_row = np.array([segment.dst_row for segment in segments], dtype=np.int64)
        count = np.array([segment.num_rows for segment in segments], dtype=np.int64)
        slots, rows = array_of(self.plan.slots), runs(dst_row, count)
        pulls = []
        first = 0
        for dst_rank, num_sent in enumerate(self.num_sent):
            part = slice(first, first + num_sent)
            first += num_sent
            if num_sent:
                pulls.append(Pull(dst_rank, _by_k(slots[part], rows[part], self.num_topk)))
        return pulls

    def unweighted(self) -> CpuHandle:
        """Return a handle of the same rows whose weights are all one (what the gradient of a dispatch needs)."""
        other = replace(self, sent_weights=None, recv_weights=None)
        for name in ("pulls", "empty_tokens", "num_sent"):  # depend on the rows only: not to be computed again
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def _in_row_order(self, values: torch.Tensor) -> torch.Tensor:
        rows = self.placement.recv_rows
        if rows is None:
            return values
        return torch.full((self.num_recv,), -1, dtype=torch.int64, device="cpu").index_copy_(0, rows, values)


@dataclass(eq=False)
class Dispatched:
    """The rows that this rank received.

    Attributes:
        x: `[num_recv, hidden]` rows in the payload's dtype, or the pair (values, scales). A view into the arena while
            slots last, else ordinary memory; either way it lives as long as the tensor.
        topk_idx: rank layout: `[num_recv, num_topk]` int64, ids among this rank's experts, -1 elsewhere. None in the
            expert layout and without top-k routing.
        topk_weights: rank layout: `[num_recv, num_topk]`, 0 where not local, None when none were sent. Expert layout:
            `[num_recv]`, the row's weight, ones when none were sent, 0 in padding. float32 (float64 if sent so).
        num_tokens_per_expert: one int per local expert, rounded up to `expert_alignment`.
        handle: for combine and for cached dispatches.
        event: the end of the call; `event.wait()` makes the current stream wait for it. CPU calls are done at once.
        num_ranks: of the buffer.
        readers: raw handles of the streams that may read the rows; see `record_stream`.
        epoch: in which the call ended.
        lost_ranks: ranks whose rows are not in, ascending: they are not members, or died during the call.
        num_dropped: `[1]` int32 on the device of `x`: rows that this rank would have received beyond `capacity`; the
            CPU does not wait for it. None without `capacity`.
    """

    x: Payload
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    num_tokens_per_expert: list[int]
    handle: Handle
    event: Event
    num_ranks: int
    readers: list[int] = field(default_factory=list, repr=False)
    epoch: int = 0
    lost_ranks: tuple[int, ...] = ()
    num_dropped: torch.Tensor | None = None

    def with_values(self, x: Payload, topk_weights: torch.Tensor | None) -> Dispatched:
        """Return the same result with other tensors instead of `x` and `topk_weights`, such as those with gradients."""
        return Dispatched(
            x,
            self.topk_idx,
            topk_weights,
            self.num_tokens_per_expert,
            self.handle,
            self.event,
            self.num_ranks,
            self.readers,
            self.epoch,
            self.lost_ranks,
            self.num_dropped,
        )

    @cached_property
    def got(self) -> torch.Tensor:
        """`[num_ranks]` int32, on the CPU: 1 for a rank whose rows are in, all of them; 0 for one without any."""
        return 1 - mask_of(self.lost_ranks, self.num_ranks)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of the result until work that is on `stream` when it dies is done (as for torch's tensors).

        The streams of the call, and the one that was current in an `async_op` call, are recorded already.
        """
        if stream.cuda_stream not in self.readers:
            self.readers.append(stream.cuda_stream)
        values = self.x if isinstance(self.x, tuple) else (self.x,)
        for tensor in (*values, self.topk_idx, self.topk_weights, self.num_dropped):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)


@dataclass(eq=False)
class Combined:
    """The sums for this rank's tokens.

    Attributes:
        x: `[num_tokens, hidden]` in the dtype of `y`; ordinary memory (or `out`).
        topk_weights: `[num_tokens, num_topk]` summed over the ranks, None when none were given.
        event: as in `Dispatched`.
        num_ranks: of the buffer.
        epoch: in which the call ended.
        lost_ranks: ranks whose rows are not in the sums, ascending.
        lost: called by `lost_weight`; None if nothing can be lost.
    """

    x: torch.Tensor
    topk_weights: torch.Tensor | None
    event: Event = DONE
    num_ranks: int = 0
    epoch: int = 0
    lost_ranks: tuple[int, ...] = ()
    lost: Callable[[], torch.Tensor] | None = field(default=None, repr=False)

    @cached_property
    def got(self) -> torch.Tensor:
        """`[num_ranks]` int32, on the CPU: 1 for a rank whose rows are in the sums."""
        return 1 - mask_of(self.lost_ranks, self.num_ranks)

    @property
    def lost_weight(self) -> torch.Tensor:
        """`[num_tokens]` float32: the sum of each token's weights whose ranks are lost, or have dropped its row.

        See `lost_ranks`, and `capacity` of `dispatch`. Of those that its dispatch named; without weights an expert
        counts 1. The others' weights are not scaled up.
        """
        return torch.zeros(len(self.x), dtype=torch.float32, device=self.x.device) if self.lost is None else self.lost()


def mask_of(ranks: Sequence[int], num_ranks: int) -> torch.Tensor:
    """Return `[num_ranks]` int32: 1 for each of `ranks`."""
    mask = torch.zeros(num_ranks, dtype=torch.int32, device="cpu")
    mask[list(ranks)] = 1
    return mask
