"""The values that follow from the sizes of latency calls: the lent region, the small results of a dispatch, launches.

Everything here is arithmetic; no memory is touched. The structs by which they are passed to kernels are in `params.py`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from ....errors import InvalidArgument, expected
from ....gpu.params import COPIED_WORDS, MAX_EXPERTS
from ....gpu.payload import DoesNotFit
from ....gpu.ranks import room_of
from ....gpu.shapes import Limits, check_sizes
from ....memory.layout import Field, Layout, align_up
from ...config import BufferConfig, sizes_code
from .params import (
    COMBINE_FLAGS,
    COMBINE_WARPS,
    HEAD_TOKEN_BITS,
    KIND_BITS,
    MAX_TOKENS,
    MAX_TOPK,
    PACKET_BYTES,
    PACKET_SHARES,
    PACKET_TOKENS,
    PACKET_WORDS,
    PARTIAL_SHARES,
    RECEIVE_HALF,
    SCALE_BLOCK,
    SEND_HALF,
    LatencyPlaces,
)

_CODE_BITS = 32 - HEAD_TOKEN_BITS - 2 - KIND_BITS
_AREA_ALIGN = 256
_LEAST_PAD = 4 * _AREA_ALIGN  # more than what alignment of the areas can cost
_PACKETS = 1 / 3  # of a section's bytes: at 43 tokens and more 32 of them fit there in packets
_DISPATCH = 3 / 8  # of rows and packets: a little more than the 1 to 2 of bfloat16 rows to float32 partials, for ids
# rows of dispatch and combine, packets of dispatch and combine
_SHARES = tuple(kind * op for kind in (1 - _PACKETS, _PACKETS) for op in (_DISPATCH, 1 - _DISPATCH))


def _ceil_div(count: int, divisor: int) -> int:
    return -(-count // divisor)


def packet_bytes(num_words: int) -> int:
    """Return how long a record of `num_words` words is in packets."""
    return _ceil_div(num_words, PACKET_WORDS) * PACKET_BYTES


@dataclass(frozen=True)
class LatencyConfig:
    """The sizes of a call, and of the memory; equal on all ranks.

    Attributes:
        max_tokens: that a rank dispatches in a call (T).
        max_in_flight: calls of a kind whose receive phase may be outstanding: 1, 2 or 4.
        packet_tokens: up to so many tokens a rank's rows cross in packets, if that many fit.
        room: lengths of sections in memory that serves calls of several sizes; None: the lengths that these sizes need.
    """

    rank: int
    num_ranks: int
    num_experts: int
    hidden: int
    num_topk: int
    max_tokens: int
    max_in_flight: int = 2
    packet_tokens: int = PACKET_TOKENS
    room: Sections | None = None

    def check(self) -> None:
        """Raise `InvalidArgument` for what the kernels cannot do."""
        check_sizes(self.num_ranks, self.num_experts, self.hidden)
        for name, most in (("num_topk", MAX_TOPK), ("max_tokens", MAX_TOKENS)):
            if not 1 <= getattr(self, name) <= most:
                raise InvalidArgument(
                    f"{name} must be 1 ... {most} for a LatencyBuffer on GPUs, got {getattr(self, name)}"
                )
        if self.max_in_flight not in (1, 2, 4):
            raise InvalidArgument(f"max_in_flight must be 1, 2 or 4, got {self.max_in_flight}")
        if self.room is not None and self.needs.longer_than(self.room):
            short = self.needs.longer_than(self.room)
            raise DoesNotFit(
                f"calls of {self.max_tokens} tokens of hidden {self.hidden} with top-{self.num_topk} need "
                f"{room_bytes(self)} bytes of memory made for any sizes (of_bytes), the buffer has "
                f"{region_layout(self).nbytes}, whose sections are too short for {', '.join(short)}; make it with more"
            )

    @property
    def num_local_experts(self) -> int:
        """Experts of one rank (L)."""
        return self.num_experts // self.num_ranks

    @property
    def owner_factor(self) -> int:
        """2^20 / experts of a rank, rounded up: an id times this, shifted by 20, is its owner; exact below 1024."""
        return _ceil_div(1 << 20, self.num_local_experts)

    @property
    def num_slots(self) -> int:
        """Calls of a kind whose data may be in the region at once; `latency/call.cuh` explains the factor two."""
        return 2 * self.max_in_flight

    @property
    def capacity(self) -> int:
        """Rows of an expert's block."""
        return self.num_ranks * self.max_tokens

    @property
    def token_words(self) -> int:
        """32-bit words that name tokens of one rank."""
        return _ceil_div(self.max_tokens, 32)

    @property
    def meta_words(self) -> int:
        """32-bit words in front of a record's row."""
        return align_up(2 * self.num_topk, 4)

    @property
    def dispatch_words(self) -> int:
        """Words of the longest record of a dispatch: a bfloat16 row, or e4m3 with scales if that is longer."""
        return self.meta_words + max(self.hidden // 2, self.hidden // 4 + _ceil_div(self.hidden, SCALE_BLOCK))

    @cached_property
    def needs(self) -> Sections:
        """The lengths of sections that calls of these sizes need."""
        tokens, packets = self.max_tokens, min(self.max_tokens, self.packet_tokens)
        return Sections(
            head_words=1 + self.token_words + self.num_local_experts,
            tokens=tokens,
            weights=tokens * self.num_topk,
            dispatch_rows=tokens * self.row_stride("dispatch"),
            combine_rows=tokens * self.row_stride("combine"),
            dispatch_packets=packets * packet_bytes(self.dispatch_words),
            combine_packets=packets * packet_bytes(self.hidden),
        )

    @property
    def sections(self) -> Sections:
        """The lengths of sections."""
        return self.needs if self.room is None else self.room

    def row_stride(self, op: str) -> int:
        """Return the bytes from record to record of an operation."""
        return align_up(4 * (self.dispatch_words if op == "dispatch" else self.hidden), 16)

    @cached_property
    def region_layout(self) -> Layout:
        """The fields of a rank's lent region."""
        return region_layout(self)

    def kind_of(self, kind: int) -> int:
        """Return what ranks compare in each call: its kind, and 16 bits made of the sizes."""
        code = sizes_code(self.num_experts, self.hidden, self.num_topk, self.max_tokens)
        return kind | (code & (1 << _CODE_BITS) - 1) << KIND_BITS

    def places(self, op: str) -> LatencyPlaces:
        """Return where `op` ("dispatch" or "combine") has its words and records."""
        layout = self.region_layout
        at = LatencyPlaces(*(layout.offset(f"{op}_{part}") for part in ("heads", "flags", "rows", "packets")))
        at.head_section = layout[f"{op}_heads"].shape[-1]
        at.flag_section = math.prod(layout[f"{op}_flags"].shape[2:])
        at.rows_section, at.packets_section = layout[f"{op}_rows"].shape[-1], layout[f"{op}_packets"].shape[-1]
        at.head_words = self.needs.head_words if op == "dispatch" else 1
        at.num_slots, at.max_tokens, at.row_stride = self.num_slots, self.max_tokens, self.row_stride(op)
        at.packet_stride = packet_bytes(self.dispatch_words if op == "dispatch" else self.hidden)
        at.packet_tokens = self.most_packets
        return at

    @cached_property
    def most_packets(self) -> int:
        """Up to how many tokens a rank's rows cross in packets, in both directions."""
        have, most = self.sections, min(self.max_tokens, self.packet_tokens)
        fit = (
            have.dispatch_packets // packet_bytes(self.dispatch_words),
            have.combine_packets // packet_bytes(self.hidden),
        )
        return min(most, *fit)


@dataclass(frozen=True)
class Sections:
    """The lengths of a section, the part of an area that one source writes in one call; equal on all ranks.

    Attributes:
        head_words: 64-bit words in front of a dispatch.
        tokens: that have a flag.
        weights: words of weights that are given to a combine.
        dispatch_rows, combine_rows, dispatch_packets, combine_packets: bytes.
    """

    head_words: int
    tokens: int
    weights: int
    dispatch_rows: int
    combine_rows: int
    dispatch_packets: int
    combine_packets: int

    @classmethod
    def of_bytes(cls, nbytes: int, num_ranks: int, max_in_flight: int) -> Sections:
        """Cut memory of so many bytes into sections for calls of any sizes.

        Words are few bytes and there for the largest sizes that kernels serve. The rest is shared out so that a batch
        of 43 tokens or more has all the rest in rows, and 32 of them fit in packets.

        Raises:
            InvalidArgument: there is nothing left for rows.
        """
        words = cls(
            1 + _ceil_div(MAX_TOKENS, 32) + MAX_EXPERTS // num_ranks, MAX_TOKENS, MAX_TOKENS * MAX_TOPK, 0, 0, 0, 0
        )
        num_sections = 2 * max_in_flight * num_ranks
        fixed = _layout(num_ranks, 2 * max_in_flight, words).nbytes
        share = (nbytes - fixed - _LEAST_PAD) // num_sections
        if share < 4 * _AREA_ALIGN:
            raise InvalidArgument(
                f"a LatencyBuffer of {num_ranks} ranks needs more than {fixed + num_sections * 4 * _AREA_ALIGN} bytes, "
                f"got {nbytes}"
            )
        areas = [int(share * part) // _AREA_ALIGN * _AREA_ALIGN for part in _SHARES]
        return cls(words.head_words, words.tokens, words.weights, *areas)

    def longer_than(self, room: Sections) -> list[str]:
        """Return for what sections of `room` are too short; fewer packets are slower, not too few."""
        names = ("head_words", "tokens", "weights", "dispatch_rows", "combine_rows")
        return [name for name in names if getattr(self, name) > getattr(room, name)]


def room_bytes(config: LatencyConfig) -> int:
    """Return how much memory serves calls of such sizes, packets included, where it serves others, too."""
    needs = config.needs
    areas = (needs.dispatch_rows, needs.combine_rows, needs.dispatch_packets, needs.combine_packets)
    share = max(math.ceil((area + _AREA_ALIGN) / part) for area, part in zip(areas, _SHARES, strict=True))
    least = Sections.of_bytes(1 << 40, config.num_ranks, config.max_in_flight)
    words = replace(least, dispatch_rows=0, combine_rows=0, dispatch_packets=0, combine_packets=0)
    fixed = _layout(config.num_ranks, config.num_slots, words).nbytes
    return fixed + _LEAST_PAD + config.num_slots * config.num_ranks * share


def region_layout(config: LatencyConfig) -> Layout:
    """Return the fields of a rank's lent region; `[slot][source]...` for those that peers write."""
    return _layout(config.num_ranks, config.num_slots, config.sections)


@functools.cache
def _layout(num_ranks: int, num_slots: int, sections: Sections) -> Layout:
    def words(name: str, *shape: int) -> Field:
        """Return a field of 64-bit words, at a multiple of 128 bytes."""
        return Field(name, torch.int64, shape, 128)

    def words_of(name: str, *shape: int) -> Field:
        """Return one with a section for each slot and source."""
        return words(name, num_slots, num_ranks, *shape)

    def area(name: str) -> Field:
        """Return a field of bytes with a section for each slot and source."""
        return Field(name, torch.uint8, (num_slots, num_ranks, getattr(sections, name)), _AREA_ALIGN)

    return Layout(
        words("peers", room_of(num_ranks)),
        words("dispatch_tags", 2),
        words("combine_tags", 2),
        words("dispatch_heard", room_of(num_ranks)),
        words("combine_heard", room_of(num_ranks)),
        words("dispatch_end", 1),
        words("combine_end", 1),
        words("reported", 2),
        words("news", COPIED_WORDS),
        words("scratch", 1),
        words_of("dispatch_heads", sections.head_words),
        words_of("dispatch_flags", sections.tokens),
        words_of("combine_heads", 1),
        words_of("combine_flags", sections.tokens, COMBINE_FLAGS),
        words_of("combine_weights", sections.weights),
        area("dispatch_rows"),
        area("combine_rows"),
        area("dispatch_packets"),
        area("combine_packets"),
    )


@dataclass(frozen=True)
class LatencyHandleSpace:
    """Element offsets of the parts of a dispatch's small results in its one int32 tensor."""

    ranges: int  # int64
    waits: int  # int64
    got: int  # bool
    counts: int
    src_token: int
    recv_rows: int
    recv_weights: int
    recv_info: int
    sent_to: int
    own_ids: int
    own_weights: int
    total: int


@functools.cache
def handle_space(config: LatencyConfig, num_tokens: int) -> LatencyHandleSpace:
    """Lay out the small results of a dispatch of `num_tokens` tokens."""
    choices = config.num_ranks * config.max_tokens * config.num_topk
    sizes = (
        2 * config.num_local_experts * config.num_ranks,
        2 * config.num_ranks,
        _ceil_div(config.num_ranks, 4),
        config.num_local_experts,
        config.num_local_experts * config.capacity,
        choices,
        choices,
        config.num_ranks * (1 + config.token_words),
        1 + num_tokens,
        num_tokens * config.num_topk,
        num_tokens * config.num_topk,
    )
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + align_up(size, 4))
    return LatencyHandleSpace(*offsets)


class Launch(NamedTuple):
    """Sizes of a launch: blocks, threads of a block, bytes of shared memory."""

    grid: int
    block: int
    shared_bytes: int


@functools.cache
def dispatch_launch(config: LatencyConfig, num_tokens: int, halves: int, max_sms: int, limits: Limits) -> Launch:
    """Return the launch of a dispatch: a block that counts, one for each token, and as many as the rows need that come
    if all ranks have as many tokens, but no fewer than do for full batches of the others. A multiprocessor has one.

    Raises:
        InvalidArgument: the routing of so many tokens does not fit into shared memory.
    """
    warps = limits.max_warps
    sending = num_tokens + 1 if halves & SEND_HALF else 0
    shares = PACKET_SHARES if num_tokens <= config.most_packets else 1
    rows = max(shares * config.num_ranks * num_tokens, config.capacity)  # a warp each
    receiving = 1 + _ceil_div(rows, warps) if halves & RECEIVE_HALF else 0
    grid = max(1, min(max_sms, max(sending, receiving)))
    shared_bytes = 4 * align_up(config.num_experts + config.num_ranks * config.token_words, 4)
    if halves & SEND_HALF:
        shared_bytes += align_up(2 * num_tokens * config.num_topk, 16) + align_up(4 * config.dispatch_words, 16) + 16
    if shared_bytes > limits.shared_bytes:
        raise InvalidArgument(
            f"{num_tokens} tokens with top-{config.num_topk} of hidden {config.hidden} need {shared_bytes} bytes of "
            f"shared memory, there are {limits.shared_bytes}; use a smaller batch, or Buffer"
        )
    return Launch(grid, 32 * warps, shared_bytes)


@functools.cache
def combine_launch(config: LatencyConfig, num_tokens: int, halves: int, max_sms: int, limits: Limits) -> Launch:
    """Return the launch of a combine: a block for each part of a partial that a rank with as many tokens as the others
    sends, and not too few when they have more; two blocks on a multiprocessor."""
    is_packed, is_sending = num_tokens <= config.most_packets, bool(halves & SEND_HALF)
    sending = config.num_ranks * num_tokens * (PARTIAL_SHARES if is_packed else COMBINE_FLAGS)
    sending = max(sending, _ceil_div(config.capacity, 8)) if is_sending else 0
    receiving = (5 if is_packed else 2) * num_tokens if halves & RECEIVE_HALF else 0  # shares of a token, a block each
    return Launch(max(1, min(2 * max_sms, max(sending, receiving))), 32 * min(COMBINE_WARPS, limits.max_warps), 0)


def latency_config(config: BufferConfig, rank: int) -> LatencyConfig:
    """Return what the kernels' memory is made for.

    Raises:
        InvalidArgument: the kernels cannot do it.
    """
    if config.num_slots > 4:
        raise InvalidArgument(f"LatencyBuffer has at most 4 calls in flight on GPUs, got num_slots={config.num_slots}")
    in_flight = 2 if config.num_slots <= 2 else 4
    made = LatencyConfig(
        rank,
        config.num_ranks,
        config.num_experts,
        config.hidden,
        config.num_topk,
        config.max_tokens_per_rank,
        max_in_flight=in_flight,
        room=Sections.of_bytes(config.room_bytes, config.num_ranks, in_flight) if config.room_bytes else None,
    )
    made.check()
    return made


def gpu_room_bytes(config: BufferConfig) -> int:
    """Return how much memory serves calls of such sizes on GPUs, where it serves others, too; 0 where none can."""
    try:
        return room_bytes(latency_config(config, 0))
    except expected(InvalidArgument):
        return 0
