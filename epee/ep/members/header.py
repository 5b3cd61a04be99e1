"""The row of a call, as ranks exchange it: its fixed words, their checks and names in messages, and its format.

A row is its tag, then the header, free bytes, counts; it says what a rank is about to do. `members/rows.py`
carries rows. Everything in one comes from a peer, so each field of the header has its bounds here;
the user of a copy checks the counts. Plain values: a crash leaves nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import le
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from ...errors import MismatchError, ProtocolError, context
from ...gpu.payload import DTYPE_CODES, LAYOUTS
from ...memory.arena import num_pool_slots
from ...memory.shared import BLOB_BYTES
from ...memory.signals import SEQ_BITS
from ..checks import CombineCall, DispatchCall
from ..config import MAX_CAPACITY, MAX_EXPERT_ALIGNMENT, BufferConfig, describe_word
from ..throughput.placement import Ints

OP_NAMES = ("none", "dispatch", "combine", "all_gather_bytes", "barrier", "sync")
OP_DISPATCH, OP_COMBINE, OP_GATHER, OP_BARRIER, OP_SYNC = range(1, len(OP_NAMES))
OPS_OF_CPUS = frozenset((OP_GATHER, OP_BARRIER, OP_SYNC))  # bytes between the CPUs; no rows
REASON_BYTES = 248
_SCALE_KINDS = {None: 0, torch.float32: 1, torch.int32: 2}
TIMED_OUT = (  # ends the message of a call that a time-out has ended
    "the call is aborted; repeat the step; raise timeout= if the peer is only slow; a rank that skipped a call must "
    "make the aborted one, too"
)
REFUSED = 1  # a call that has failed at the rank that announces it


class Moved(Exception):
    """The view has changed and no rank will end this call in its epoch: it is to be made again in the new one."""


class Header(NamedTuple):
    """The fixed words of a row, in order, after the tag. The first `NUM_AGREED` must be equal on all ranks.

    Attributes:
        op: index into `OP_NAMES`.
        layout: index into `LAYOUTS`.
        dtype: index into `DTYPE_CODES`.
        handle: call that made the handle in use, 0 without one; of `OPS_OF_CPUS` the number of bytes, but 1 of a
            `sync` that agrees on the members, whatever the view.
        with_topk: 1 when routed by topk_idx, 0 by is_token_in_rank.
        with_weights: bytes of one weight that travels, 0 without weights.
        scale_words: 4-byte words of scales per row.
        scale_kind: 0 none, 1 float32, 2 packed int32.
        expert_alignment: rows.
        capacity: rows that each rank keeps, 0 for all.
        arena_alignment: alignment that this rank's arena of the layout was made for, at least `expert_alignment`.
        refused: `REFUSED`: this rank's call was, and the row holds the reason; 0 otherwise.
        num_tokens: tokens of this rank.
        slot: of this rank's arena, that peers may write (dispatch) or read (combine).
        rank: the writer.
    """

    op: int
    layout: int
    dtype: int
    handle: int = 0
    with_topk: int = 0
    with_weights: int = 0
    scale_words: int = 0
    scale_kind: int = 0
    expert_alignment: int = 1
    capacity: int = 0
    arena_alignment: int = 0
    refused: int = 0
    num_tokens: int = 0
    slot: int = 0
    rank: int = 0

    def of_absent(self, rank: int) -> Header:
        """Return the header that replaces the row of a rank without a part in this call."""
        return self._replace(num_tokens=0, slot=0, refused=0, rank=rank)


def dispatch_header(call: DispatchCall, rank: int, slot: int, arena_alignment: int) -> Header:
    """Return what a rank announces of a dispatch."""
    payload = call.payload
    return Header(
        op=OP_DISPATCH,
        layout=LAYOUTS.index(call.layout),
        dtype=DTYPE_CODES.index(payload.dtype),
        handle=call.handle.seq if call.handle is not None else 0,
        with_topk=int(call.topk_idx is not None),
        with_weights=call.topk_weights.element_size() if call.topk_weights is not None else 0,
        scale_words=payload.scales.shape[1] if payload.scales is not None else 0,
        scale_kind=_SCALE_KINDS[payload.scale_dtype],
        expert_alignment=call.expert_alignment,
        capacity=call.capacity or 0,
        arena_alignment=arena_alignment,
        num_tokens=payload.rows.shape[0],
        slot=slot,
        rank=rank,
    )


def combine_header(call: CombineCall, rank: int, slot: int, arena_alignment: int) -> Header:
    """Return what a rank announces of a combine."""
    handle = call.handle
    return Header(
        op=OP_COMBINE,
        layout=LAYOUTS.index(handle.layout),
        dtype=DTYPE_CODES.index(call.y.dtype),
        handle=handle.seq,
        with_weights=call.topk_weights.element_size() if call.topk_weights is not None else 0,
        expert_alignment=handle.expert_alignment,
        arena_alignment=arena_alignment,
        num_tokens=handle.num_tokens,
        slot=slot,
        rank=rank,
    )


NUM_AGREED = 10
HEADER_NAMES = tuple(Header.__annotations__)
NUM_HEADER = len(HEADER_NAMES)
_INT64 = np.dtype(np.int64)
HEADER = struct.Struct(f"{NUM_HEADER}Q")
_AGREED = struct.Struct(f"{NUM_AGREED}Q")
_COMPARED = struct.Struct(f"{_AGREED.size}s{NUM_HEADER - NUM_AGREED}Q")  # the same, what must be equal in one piece
_MULTIPLE = 8  # a row fills whole cache lines
TEXT_AT = 1 + NUM_HEADER  # word of a row at which its free bytes begin
_COUNTS_AT = TEXT_AT + REASON_BYTES // 8
assert BLOB_BYTES <= REASON_BYTES
Limits: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def parse_header(words: tuple[int, ...], src: int, limits: Limits) -> Header:
    """Return the checked header of rank `src`; `ProtocolError` if it cannot be right."""
    header = tuple.__new__(Header, words)  # half the time of `Header(*words)`; `HEADER` has counted them
    lows, highs = limits
    if not (all(map(le, lows, words)) and all(map(le, words, highs))):
        for name, value, low, high in zip(HEADER_NAMES, words, lows, highs, strict=True):
            if not low <= value <= high:
                told = f"{name} must be {low} ... {high}, got {value}"
                raise ProtocolError(f"row of rank {src}: {told}; memory is corrupt")
    if header.rank != src:
        raise ProtocolError(f"row of rank {src} says it is of rank {header.rank}; memory is corrupt")
    return header


def limits_of(config: BufferConfig) -> Limits:
    """Return the lowest values of all header fields, and the highest."""
    pairs = (
        (1, len(OP_NAMES) - 1),
        (0, len(LAYOUTS) - 1),
        (0, len(DTYPE_CODES) - 1),
        (0, 1 << SEQ_BITS),
        (0, 1),
        (0, 8),
        (0, config.scale_words),
        (0, 2),
        (1, MAX_EXPERT_ALIGNMENT),
        (0, MAX_CAPACITY),
        (0, MAX_EXPERT_ALIGNMENT),
        (0, REFUSED),
        (0, config.max_tokens_per_rank),
        (0, num_pool_slots(config.num_slots) - 1),
        (0, config.num_ranks - 1),
    )
    return tuple(low for low, _ in pairs), tuple(high for _, high in pairs)


# How a user would call a header field; the others have the user's own words.
LABELS = {
    "handle": "the handle in use (number of the call that made it; for calls without rows the number of "
    "bytes; for sync 1 with a mask, 0 without)",
    "with_topk": "routing by topk_idx (1) or otherwise (0)",
    "with_weights": "topk_weights (bytes of a weight, 0 without)",
    "scale_words": "the width of the FP8 scales",
    "scale_kind": "the dtype of the FP8 scales (0 none, 1 float32, 2 packed int32)",
}


def reason_bytes(error: BaseException) -> bytes:
    """Return what the peers will read about a refusal."""
    return f"{type(error).__name__}: {error}".encode()[:REASON_BYTES]


def describe_field(name: str, value: int) -> str:
    """Return a field as a user would write it."""
    if name == "capacity":
        return str(value or None)
    return OP_NAMES[value] if name == "op" else describe_word(name, value)


def check_agreed(
    headers: Sequence[Header], texts: Sequence[bytes], parties: Sequence[int], seq: int, epoch: int
) -> None:
    """Raise what all `parties` raise alike unless all of them make the same call.

    Raises:
        MismatchError: they make different ones, or a rank refuses its own.
    """
    lead = parties[0]
    first = headers[lead]
    for src, header in enumerate(headers):
        if header.refused:
            where = context(OP_NAMES[header.op], seq=seq, epoch=epoch)
            reason = texts[src].rstrip(b"\0").decode("utf-8", "replace")
            raise MismatchError(f"{where}: rank {src} refused its call, so no rank made it: {reason}")
    for src in parties:
        if headers[src][:NUM_AGREED] == first[:NUM_AGREED]:
            continue
        fields = zip(HEADER_NAMES, first, headers[src], strict=True)
        name, mine, other = next(field for field in fields if field[1] != field[2])
        raise MismatchError(
            f"{context(OP_NAMES[first.op], seq=seq, epoch=epoch)}: ranks disagree about {LABELS.get(name, name)}: "
            f"rank {lead} has {describe_field(name, mine)}, rank {src} has {describe_field(name, other)}; "
            "all ranks must make the same calls in the same order"
        )


class ExchangedRows(NamedTuple):
    """The rows of one exchange, copied and checked. Of a rank without a part in the call: zeros.

    Attributes:
        headers: one per rank.
        counts: `[num_ranks, num_ranks + num_experts]` int64; rows that each rank sends to each rank, then (token, k)
            slots that it gives each expert.
        texts: the free bytes of each row: the blob of the rank's arena.
        parties: the ranks with a part in the call, ascending.
    """

    headers: list[Header]
    counts: Ints
    texts: list[bytes]
    parties: tuple[int, ...]


def num_row_words(config: BufferConfig) -> int:
    """Return how many words a row has, its tag included."""
    words = _COUNTS_AT + config.num_ranks + config.num_experts
    return words + -words % _MULTIPLE


class RowFormat:
    """The format of a row.

    Args:
        config: of the buffer.

    Attributes:
        num_words: of a row, its tag included.
    """

    def __init__(self, config: BufferConfig) -> None:
        self._num_ranks = config.num_ranks
        self._counts_shape = config.num_ranks, config.num_ranks + config.num_experts
        self.num_words = num_row_words(config)
        self._row_bytes = 8 * self.num_words

    def pack(self, header: Header, text: bytes, counts: Ints | None) -> bytes:
        """Return a row without its tag; zeros for counts that the receivers know."""
        numbers = b"" if counts is None else counts.tobytes()
        row = HEADER.pack(*header) + text.ljust(REASON_BYTES, b"\0") + numbers
        return row.ljust(8 * (self.num_words - 1), b"\0")

    def alike(self, rows: bytes, mine: Header, limits: Limits) -> list[Header] | None:
        """Return the headers in copies of all ranks' rows if all ranks make the call that this one makes.

        None if one does not, or refuses its call, or cannot be right: `parse_header` and `check_agreed` find out why.

        Args:
            mine: the header of this rank.
            limits: of the fields.
        """
        agreed, headers = mine[:NUM_AGREED], []
        same = _AGREED.pack(*agreed)
        most_alignment, _, most_tokens, last_slot, _ = limits[1][NUM_AGREED:]
        for src in range(self._num_ranks):
            theirs, alignment, refused, num_tokens, slot, rank = _COMPARED.unpack_from(rows, src * self._row_bytes + 8)
            if theirs != same or refused or rank != src:
                return None
            if alignment > most_alignment or num_tokens > most_tokens or slot > last_slot:
                return None
            headers.append(tuple.__new__(Header, (*agreed, alignment, 0, num_tokens, slot, src)))
        return headers

    def contents(self, rows: bytes) -> tuple[list[bytes], Ints]:
        """Return the free bytes in copies of all ranks' rows, and the counts, unchecked.

        These are `[num_ranks, num_ranks + num_experts]`.
        """
        width, first = self._row_bytes, 8 * _COUNTS_AT
        texts = [rows[end - REASON_BYTES : end] for end in range(first, first + width * self._num_ranks, width)]
        return texts, np.ndarray(self._counts_shape, _INT64, rows, first, (width, 8))

    def split(self, rows: bytes) -> tuple[list[tuple[int, ...]], list[bytes], Ints]:
        """Return the unchecked contents of copies of all ranks' rows: headers, free bytes, counts by rank."""
        headers = [HEADER.unpack_from(rows, src * self._row_bytes + 8) for src in range(self._num_ranks)]
        return headers, *self.contents(rows)
