"""Sizes of the throughput kernels: slots, launch shapes, and the parts of a dispatch's handle.

Everything here is arithmetic on shapes, independent of memory and kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ..errors import InvalidArgument
from ..memory.layout import Field, Layout, align_up
from .params import (
    MAX_CHANNELS,
    MAX_EXPERTS,
    MAX_FEW_TOKENS,
    MAX_FEW_WARPS,
    MAX_LAYOUT_BLOCKS,
    MAX_STAGED_CHUNKS,
    RECV_INFO_COUNTS,
    STAGED_ROWS,
)
from .payload import DoesNotFit
from .ranks import MAX_LOCAL, MAX_RANKS

MAX_TOPK = 32
MAX_HIDDEN = 16384
MAX_SLOTS = 100  # a slot number has seven bits in the kernels' words
BULK_BYTES = 16  # bulk copies move multiples of this
MAX_CHUNK_BYTES = 16 << 10
TOKENS_PER_LAYOUT_BLOCK = 128
FEW_TOKENS = MAX_FEW_TOKENS  # up to this number one kernel does a dispatch
PAYLOADS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_ALIGN = 256


def check_sizes(num_ranks: int, num_experts: int, hidden: int, num_local: int = 0) -> None:
    """Raise `InvalidArgument` for sizes that no kernel of a buffer supports; `num_local`: of an island, 0 for all."""
    if not 1 <= (num_local or num_ranks) <= MAX_LOCAL:
        raise InvalidArgument(f"GPU buffers have 1 ... {MAX_LOCAL} ranks on one host, got {num_local or num_ranks}")
    if num_ranks > MAX_RANKS:
        raise InvalidArgument(f"GPU buffers have 1 ... {MAX_RANKS} ranks, got {num_ranks}")
    if not 1 <= num_experts <= MAX_EXPERTS or num_experts % num_ranks:
        raise InvalidArgument(
            f"num_experts must be a multiple of {num_ranks} ranks up to {MAX_EXPERTS}, got {num_experts}"
        )
    if hidden % 8 or not 8 <= hidden <= MAX_HIDDEN:
        raise InvalidArgument(f"hidden must be a multiple of 8 up to {MAX_HIDDEN}, got {hidden}")


@dataclass(frozen=True)
class ThroughputConfig:
    """The sizes that determine the memory; equal on all ranks.

    Attributes:
        max_recv_rows: rows that a rank may receive in one call (rank layout, and staging of the expert layout).
        max_expanded_rows: rows of an expert-layout result, without padding.
        num_slots: results or combine inputs that may live in the region at once.
        room_slot_bytes: of a slot, if it is a container for calls of several shapes; 0: the need of this shape.
        room_expert_slot_bytes: of a slot for expert-layout rows that is lent at construction; 0: at the first combine
            that needs one, with the size that it needs.
        islands: the ranks whose GPUs map each other, of each such set, ascending; empty where that is all of them.
    """

    rank: int
    num_ranks: int
    num_experts: int
    hidden: int
    num_topk: int
    max_tokens: int
    dtype: torch.dtype
    max_recv_rows: int
    max_expanded_rows: int
    num_slots: int = 2
    room_slot_bytes: int = 0
    room_expert_slot_bytes: int = 0
    islands: tuple[tuple[int, ...], ...] = ()

    def check(self) -> None:
        """Raise `InvalidArgument` for sizes that the kernels do not support."""
        check_sizes(self.num_ranks, self.num_experts, self.hidden, len(self.island))
        if not 1 <= self.num_topk <= MAX_TOPK:
            raise InvalidArgument(f"num_topk must be 1 ... {MAX_TOPK}, got {self.num_topk}")
        if self.dtype not in PAYLOADS:
            raise InvalidArgument(f"dtype must be bfloat16, float16 or float32 on GPUs, got {self.dtype}")
        if not 1 <= self.num_slots <= MAX_SLOTS:
            raise InvalidArgument(f"num_slots must be 1 ... {MAX_SLOTS} on GPUs, got {self.num_slots}")
        if self.max_tokens > MAX_STAGED_CHUNKS * STAGED_ROWS:
            raise InvalidArgument(
                f"max_tokens_per_rank must be at most {MAX_STAGED_CHUNKS * STAGED_ROWS}, got {self.max_tokens}"
            )
        if not self.fits:
            raise DoesNotFit(
                f"{self.max_recv_rows} rows of hidden {self.hidden}, {self.dtype} and num_topk {self.num_topk} need "
                f"{self.needed_slot_bytes} bytes in each slot of the buffer, which has {self.slot_bytes}; make a "
                "buffer with more memory, or lower max_recv_rows or max_tokens_per_rank"
            )

    @cached_property
    def island(self) -> tuple[int, ...]:
        """The ranks whose GPUs map each other, with this one."""
        return next((ranks for ranks in self.islands if self.rank in ranks), tuple(range(self.num_ranks)))

    @cached_property
    def position(self) -> int:
        """This rank's in its island."""
        return self.island.index(self.rank)

    @property
    def num_local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.num_ranks

    @property
    def num_counters(self) -> int:
        """Numbers that a rank sends to the others: slots per expert, tokens per rank."""
        return self.num_experts + self.num_ranks

    @cached_property
    def slot_layout(self) -> Layout:
        """Fields of one slot of the receive region; rows lie at their payload's own stride from the start.

        FP8 rows use only the first byte of each element's room; their scales, sent with no other payload, lie in the
        rest (at most a quarter of a byte for each element: `BufferConfig.scale_words`).
        """
        rows, slots = self.max_recv_rows, self.max_recv_rows * self.num_topk
        return Layout(
            Field("x", torch.uint8, (rows * self.hidden,), _ALIGN),
            Field("scales", torch.int32, (rows * self.hidden * (self.dtype.itemsize - 1) // 4,), _ALIGN),
            Field("topk_idx", torch.int64, (slots,), _ALIGN),
            Field("src_token", torch.int64, (rows,)),
            Field("topk_weights", torch.float32, (slots,), _ALIGN),
            Field("combine_weights", torch.float32, (slots,), _ALIGN),
        )

    @cached_property
    def needed_slot_bytes(self) -> int:
        """Bytes that calls of this shape need in a slot."""
        return align_up(self.slot_layout.nbytes, _ALIGN)

    @cached_property
    def slot_bytes(self) -> int:
        """Distance between slots."""
        return self.room_slot_bytes or self.needed_slot_bytes

    @property
    def fits(self) -> bool:
        """Whether a slot has room for this shape, and its start is aligned for its fields."""
        return self.needed_slot_bytes <= self.slot_bytes and self.slot_bytes % _ALIGN == 0

    def recv_rows(self, capacity: int | None) -> int:
        """Rows that a rank-layout result can have: the room, or the call's `capacity` if that is less."""
        return self.max_recv_rows if capacity is None else min(capacity, self.max_recv_rows)

    def expanded_rows(self, expert_alignment: int) -> int:
        """Rows that an expert-layout result can have, padding included."""
        return self.max_expanded_rows + self.num_local_experts * (expert_alignment - 1)

    def expert_layout(self, expert_alignment: int) -> Layout:
        """Fields of one slot of the region from which peers pull expert-layout rows."""
        rows = self.expanded_rows(expert_alignment)
        return Layout(
            Field("x", torch.uint8, (rows * self.hidden * self.dtype.itemsize,), _ALIGN),
            Field("combine_weights", torch.float32, (rows,), _ALIGN),
        )

    def expert_slot_bytes(self, expert_alignment: int) -> int:
        """Bytes that calls of this shape need in a slot for expert-layout rows."""
        return align_up(self.expert_layout(expert_alignment).nbytes, _ALIGN)

    @cached_property
    def lanes_per_token(self) -> int:
        """CallStreams of a warp that share a token in the layout kernel: a power of two, at least num_topk."""
        return 1 << (self.num_topk - 1).bit_length()

    @cached_property
    def info_words(self) -> int:
        """32-bit words of a dispatch's report (`recv_info`, mailbox)."""
        return align_up(RECV_INFO_COUNTS + self.num_local_experts, 2)

    @cached_property
    def most_info_words(self) -> int:
        """`info_words` of the shape with the most experts."""
        return align_up(RECV_INFO_COUNTS + MAX_EXPERTS // self.num_ranks, 2)


def slots_of(room_bytes: int, num_slots: int) -> int:
    """Return the bytes of each of `num_slots` slots in a room; 0 for none."""
    slot_bytes = room_bytes // num_slots // _ALIGN * _ALIGN
    if room_bytes and not slot_bytes:
        raise InvalidArgument(f"a room of {room_bytes} bytes is too small for {num_slots} slots; give it more")
    return slot_bytes


@dataclass(frozen=True)
class Limits:
    """Limits of a machine: multiprocessors, dynamic shared memory of a block, warps of a block with one role."""

    num_sms: int
    shared_bytes: int
    max_warps: int = 16
    stall_one_in: int = 0  # stress tests: see `gpu/params.kernel_head`


@dataclass(frozen=True)
class LaunchShape:
    """Sizes of a launch: blocks, threads of a block, shared memory and the chunks in it."""

    grid: int
    block: int
    shared_bytes: int
    chunk_bytes: int
    num_stages: int


def _ceil_div(count: int, divisor: int) -> int:
    return -(-count // divisor)


def chunk_of(row_bytes: int, limit: int) -> int:
    """Cut a row into equal chunks of at most `limit` bytes, multiples of 16 (of 128 if that fits)."""
    pieces = -(-row_bytes // limit)
    exact = -(-row_bytes // pieces)
    wide = align_up(exact, 128)
    return wide if wide <= limit else align_up(exact, BULK_BYTES)


@lru_cache(maxsize=1024)
def layout_shape(
    num_tokens: int, num_counters: int, lanes_per_token: int, num_sms: int, limits: Limits
) -> tuple[LaunchShape, int]:
    """Return the launch of the counting kernel, a block for each 128 tokens and 32 at most, and the words of shared
    memory in which a warp keeps the experts of its tokens.

    Raises:
        InvalidArgument: the tokens do not fit.
    """
    columns = num_counters + 1
    grid = max(1, min(MAX_LAYOUT_BLOCKS, num_sms, -(-num_tokens // TOKENS_PER_LAYOUT_BLOCK)))
    warps = limits.max_warps
    while True:
        tokens_per_warp = _ceil_div(_ceil_div(num_tokens, grid), warps)
        kept = align_up(tokens_per_warp * lanes_per_token, 32)
        shared_bytes = 4 * (columns * (warps + 1) + kept * warps)
        if shared_bytes <= limits.shared_bytes:
            return LaunchShape(grid, 32 * warps, shared_bytes, 0, 0), kept
        if warps == 1:
            raise InvalidArgument(f"{num_tokens} tokens in one call are too many; send them in several calls")
        warps //= 2


@lru_cache(maxsize=1024)
def few_shape(
    num_tokens: int, row_bytes: int, num_counters: int, num_sms: int, limits: Limits
) -> tuple[LaunchShape, int] | None:
    """Return the launch of the one-kernel dispatch and its moving warps per block; None if it is not possible."""
    stage = align_up(row_bytes, 128)
    movers = min(num_sms - 1, max(1, num_tokens))
    if num_tokens > FEW_TOKENS or movers < 1 or stage > limits.shared_bytes:
        return None
    warps = min(MAX_FEW_WARPS, limits.max_warps, limits.shared_bytes // stage, max(1, _ceil_div(num_tokens, movers)))
    shared_bytes = max(warps * stage, 8 * (num_counters + 1))  # two numbers per expert at the end
    return LaunchShape(movers + 1, 32 * limits.max_warps, shared_bytes, stage, 1), warps


@lru_cache(maxsize=256)
def dispatch_shape(row_bytes: int, num_sms: int, limits: Limits, num_stages: int) -> LaunchShape:
    """Return the launch of the payload kernel: as many warps as fit `num_stages` stages each into shared memory."""
    chunk = chunk_of(row_bytes, min(MAX_CHUNK_BYTES, limits.shared_bytes // (2 * num_stages)))
    warps = min(limits.max_warps, limits.shared_bytes // (num_stages * chunk))
    return LaunchShape(num_sms, 32 * warps, warps * num_stages * chunk, chunk, num_stages)


@lru_cache(maxsize=256)
def expert_shape(row_bytes: int, grid: int, limits: Limits, num_stages: int) -> LaunchShape:
    """Return the launch of the payload kernel of the expert layout: an even number of warps, with half of a sending
    warp's `num_stages` stages for each, and a chunk of zeros.
    """
    each = num_stages // 2
    chunk = chunk_of(row_bytes, min(MAX_CHUNK_BYTES, limits.shared_bytes // (2 * each + 1)))
    warps = min(limits.max_warps, (limits.shared_bytes // chunk - 1) // each) // 2 * 2
    return LaunchShape(grid, 32 * warps, (warps * each + 1) * chunk, chunk, num_stages)


@lru_cache(maxsize=256)
def combine_shape(row_bytes: int, num_entries: int, num_sms: int, limits: Limits, has_weights: bool) -> LaunchShape:
    """Return the launch of the combine kernel: at least three stages of `num_entries` adjacent rows."""
    limit = max(BULK_BYTES, limits.shared_bytes // (3 * num_entries) // BULK_BYTES * BULK_BYTES)
    chunk = chunk_of(row_bytes, limit)
    stages = min(8, limits.shared_bytes // (num_entries * chunk))
    threads = 32 * (limits.max_warps + 1 + 2 * has_weights)
    return LaunchShape(num_sms, threads, stages * num_entries * chunk, chunk, stages)


def num_senders(wanted: int, num_sms: int, num_ranks: int, num_warps: int) -> int:
    """Return how many of `num_sms` blocks send rows, at most `wanted`; the others expand received rows.

    A sending block has half as many channels as warps, and each expanding warp can watch 32 of the streams; every rank
    has that many channels, each a stream.

    Raises:
        InvalidArgument: a single block cannot do both.
    """
    fitting = min(wanted, num_sms - 1, 2 * MAX_CHANNELS // num_warps)
    while fitting > 0 and 64 * (num_sms - fitting) < num_ranks * fitting:
        fitting -= 1
    if fitting < 1:
        raise InvalidArgument(f"a call in the expert layout needs 2 multiprocessors at least, {num_sms} may be used")
    return fitting


@dataclass(frozen=True)
class HandleSpace:
    """Element offsets of the parts of a handle in its one int32 tensor."""

    send_prefix: int
    expert_of: int
    weights_of: int
    ordinals: int
    count_matrix: int
    row_base: int
    recv_info: int
    slot_ends: int  # these lie after `recv_info` for the kernels, and are only read on the GPU
    recv_slots: int
    token_ends: int
    source_tokens: int
    num_dropped: int
    total: int

    @cached_property
    def read_at(self) -> tuple[int, ...]:
        """Byte offsets of the parts that kernels read and write by themselves, in the order of their arguments.

        The names are in `gpu/params._HANDLE_NAMES`.
        """
        parts = self.send_prefix, self.expert_of, self.weights_of, self.ordinals
        return tuple(4 * at for at in (*parts, self.count_matrix, self.row_base, self.recv_info))


def handle_space(config: ThroughputConfig, num_tokens: int) -> HandleSpace:
    """Lay out the handle of a dispatch of `num_tokens` tokens."""
    sizes = (
        num_tokens * config.num_ranks,
        num_tokens * config.num_topk,
        num_tokens * config.num_topk,
        num_tokens * config.num_topk,
        config.num_ranks * config.num_counters,
        config.num_counters,
        config.info_words,
        config.num_local_experts,
        config.num_local_experts,
        config.num_ranks,
        config.num_ranks,
        1,
    )
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + align_up(size, 4))
    return HandleSpace(*offsets)
