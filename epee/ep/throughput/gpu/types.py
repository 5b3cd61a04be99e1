"""Arguments and results of `Buffer`'s GPU core: handles, results, options. No behaviour."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ....gpu.shapes import HandleSpace
from ....memory.fresh import Late, allocator
from ..order import CombineOrder
from .views import FieldAt, KeptRows, SlotViews

_WORD_BITS, _HANDLE_BYTES = 64, 8 * 7


def address_rule(at: tuple[int, ...], has_weights: bool, is_expert: bool) -> tuple[int, int]:
    """Return by what the addresses of a handle's parts follow from that of its words, for `pack_addresses`.

    Args:
        at: bytes from the beginning of the words to each part, in the kernels' order.
        has_weights, is_expert: whether the handle has weights, and ordinals.
    """
    is_there = (True, True, has_weights, is_expert, True, True, True)
    shifts = range(0, _WORD_BITS * len(at), _WORD_BITS)
    ones = sum(1 << shift for shift, there in zip(shifts, is_there, strict=True) if there)
    return ones, sum(offset << shift for offset, shift, there in zip(at, shifts, is_there, strict=True) if there)


def pack_addresses(base: int, rule: tuple[int, int]) -> bytes:
    """Return the addresses of a handle's parts, as kernels want them: one long number, whose digits have 64 bits."""
    ones, offsets = rule
    return (base * ones + offsets).to_bytes(_HANDLE_BYTES, "little")


def without_weights(addresses: bytes) -> bytes:
    """Return the addresses of a handle's parts without that of its weights, the third."""
    return addresses[:16] + bytes(8) + addresses[24:]


@dataclass(eq=False)
class ThroughputHandle:
    """The destinations of the rows of one dispatch: metadata in one int32 device tensor, parts at `space`.

    Attributes:
        call_idx: number of the dispatch, equal on all ranks.
        layout, expert_alignment, num_tokens: of the dispatch.
        has_topk, has_weights: whether it was routed by experts, and had weights.
        num_recv: rows of the result, None while only the device knows.
        num_tokens_per_expert: slots per local expert, padded, those of dropped rows counted; None likewise.
        capacity: of the dispatch.
    """

    call_idx: int
    layout: str
    expert_alignment: int
    num_tokens: int
    space: HandleSpace
    words: torch.Tensor
    has_topk: bool
    has_weights: bool
    num_recv: int | None = None
    num_tokens_per_expert: list[int] | None = None
    capacity: int | None = None

    @Late
    def addresses(self) -> bytes:
        """Addresses of its parts for the kernels: `gpu/params._HANDLE_NAMES`, 0 for what it does not have."""
        rule = address_rule(self.space.read_at, self.has_weights, self.layout == "expert")
        return pack_addresses(self.words.data_ptr(), rule)

    @property
    def is_expert(self) -> bool:
        """Whether the layout is "expert"."""
        return self.layout == "expert"

    def with_weights(self, topk_weights: torch.Tensor) -> ThroughputHandle:
        """Return a handle of the same rows with other weights, `[num_tokens, num_topk]` float32."""
        words = self.words.clone()
        flat = topk_weights.detach().reshape(-1).view(torch.int32)
        words[self.space.weights_of : self.space.weights_of + len(flat)].copy_(flat)
        return replace(self, words=words, has_weights=True)

    @property
    def recv_info(self) -> torch.Tensor:
        """int32 device words; see `RECV_INFO_*` in `gpu/params.py`."""
        return self.words[self.space.recv_info :]

    def part(self, name: str, length: int) -> torch.Tensor:
        """Return the first `length` words of a part of the handle, as `HandleSpace` names it."""
        at: int = getattr(self.space, name)
        return self.words[at : at + length]


class DispatchResult:
    """The result of a dispatch, for the `Buffer`. Without CPU sync the tensors have full capacity.

    Args:
        x, scales, topk_idx, topk_weights, handle, readers, kept: see below.
        sources: `src_rank`, `row_src_token`, `src_k` in the expert layout, else None.
        late: how `topk_idx` and `topk_weights` are made when they are first read: the slot's views, their offsets in
            it, rows. `x` is referenced until then, so that the slot is not reused.

    Attributes:
        x: `[num_recv, hidden]`.
        scales: `[num_recv, num_scales]` 4-byte elements, or None.
        handle: of the dispatch.
        readers: raw handles of the streams that may read the slot of the result: the call's own. More may be added.
        kept: data that the handle may be asked for later; None from a cached dispatch and in the expert layout.
    """

    def __init__(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        handle: ThroughputHandle,
        readers: list[int],
        kept: KeptRows | None = None,
        sources: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        late: tuple[SlotViews, FieldAt | None, FieldAt | None, int] | None = None,
    ) -> None:
        self.x, self.scales = x, scales
        self.handle, self.readers, self.kept = handle, readers, kept
        self.sources = sources
        self._late = late
        if late is None:
            self.topk_idx, self.topk_weights = topk_idx, topk_weights

    @Late
    def topk_idx(self) -> torch.Tensor | None:
        """Rank layout `[num_recv, num_topk]` int64, else None."""
        views, topk_idx, _, rows = self._in_slot
        return None if topk_idx is None else views.alias(topk_idx, rows)

    @Late
    def topk_weights(self) -> torch.Tensor | None:
        """`[num_recv, num_topk]` or, expert layout, `[num_recv]` float32; None when none were sent."""
        views, _, topk_weights, rows = self._in_slot
        return None if topk_weights is None else views.alias(topk_weights, rows)

    @property
    def _in_slot(self) -> tuple[SlotViews, FieldAt | None, FieldAt | None, int]:
        assert self._late is not None, "set at once"
        return self._late

    @property
    def src_rank(self) -> torch.Tensor | None:
        """Expert layout `[num_recv]` int64, -1 in padding; None in the rank layout."""
        return None if self.sources is None else self.sources[0]

    @property
    def row_src_token(self) -> torch.Tensor | None:
        """Expert layout `[num_recv]` int64, -1 in padding; None in the rank layout."""
        return None if self.sources is None else self.sources[1]

    @property
    def src_k(self) -> torch.Tensor | None:
        """Expert layout `[num_recv]` int64, which k of its token a row stands for; None in the rank layout."""
        return None if self.sources is None else self.sources[2]

    @property
    def src_token(self) -> torch.Tensor | None:
        """`[num_recv]` int64, -1 in padding; None from a cached dispatch in the rank layout."""
        return self.row_src_token if self.kept is None else self.kept.src_token


class CheckedDispatch(NamedTuple):
    """The properties that decide how a dispatch is launched, except addresses.

    Attributes:
        num_tokens, dtype: of the payload.
        row_bytes: of a row without its scales.
        row_stride: bytes from row to row.
        num_scales, scale_dtype, scale_strides: 4-byte scales of a row, 0 and None without; strides in elements.
        layout, expert_alignment, has_topk, capacity: of the handle.
        has_weights: weights travel.
        is_fresh: there is routing; else the handle is of an earlier dispatch.
        is_exact: the CPU waits for the counts, or knows them.
        num_sms: as the caller asks.
    """

    num_tokens: int
    dtype: torch.dtype
    row_bytes: int
    row_stride: int
    num_scales: int
    scale_dtype: torch.dtype | None
    scale_strides: tuple[int, ...]
    layout: str
    expert_alignment: int
    has_topk: bool
    has_weights: bool
    is_fresh: bool
    is_exact: bool
    num_sms: int | None
    capacity: int | None

    @property
    def is_expert(self) -> bool:
        """Whether the layout is "expert"."""
        return self.layout == "expert"


class HandleForm:
    """The common fields of the handles of equal dispatches.

    Args:
        checked: of the dispatches.
        space: of the handles.
        device: of their words.
    """

    __slots__ = ("_constants", "_new_words", "_rule")

    def __init__(self, checked: CheckedDispatch, space: HandleSpace, device: torch.device) -> None:
        self._new_words = allocator((space.total,), torch.int32, device)
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        first = ThroughputHandle(
            0,
            checked.layout,
            checked.expert_alignment,
            checked.num_tokens,
            space,
            nothing,
            checked.has_topk,
            checked.has_weights,
            capacity=checked.capacity,
        )
        self._constants: dict[str, Any] = {**first.__dict__}
        self._rule = address_rule(space.read_at, checked.has_weights, checked.is_expert)

    def make(self, call_idx: int) -> ThroughputHandle:
        """Return the handle of a dispatch, its words uninitialised."""
        words = self._new_words()
        handle = object.__new__(ThroughputHandle)  # and the fields at once: half the time of one by one
        ones, offsets = self._rule
        addresses = (words.data_ptr() * ones + offsets).to_bytes(_HANDLE_BYTES, "little")  # as `pack_addresses`
        handle.__dict__.update(self._constants, call_idx=call_idx, words=words, addresses=addresses)
        return handle


class DispatchOptions(NamedTuple):
    """The options of a dispatch.

    Attributes:
        sync: the CPU waits for the counts, so that results have their exact size; else they have full capacity.
        num_sms: multiprocessors that send rows, None for the default.
        timeout_s: how long the GPU waits for a peer.
        capacity: rows that a rank keeps, None for all; with a handle, that of its dispatch.
    """

    layout: str = "rank"
    expert_alignment: int = 1
    sync: bool = True
    num_sms: int | None = None
    timeout_s: float = 30.0
    capacity: int | None = None


class CombineOptions(NamedTuple):
    """The options of a combine.

    Attributes:
        num_sms: multiprocessors that pull rows, None for the default.
        timeout_s: how long the GPU waits for a peer.
        order: of the additions, None for epee's own. All ranks give one or none.
    """

    num_sms: int | None = None
    timeout_s: float = 30.0
    order: CombineOrder | None = None
