"""The configuration of a buffer: the numbers that all ranks must agree on, and the sizes that follow from them."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import cached_property

import torch

from ..errors import InvalidArgument
from ..gpu.payload import DTYPE_CODES, LAYOUTS, PAYLOAD_DTYPES
from ..memory.layout import Field, Layout
from ..values import is_whole, shown
from ..view.group import FAULT_MODES, STALL_POLICIES
from ..view.transport.wire import MAX_MEMBERS

KINDS = ("Buffer", "LatencyBuffer")  # the order is part of the protocol
PATHS = ("cpu", "cuda")  # by what moves the rows; the order is part of the protocol
SHARES = ("", "descriptors", "cudaIpc")  # how GPUs lend memory, "" where it is no matter; likewise
CPU = torch.device("cpu")
FP8_MULTIPLE = 16  # of an FP8 row: GPUs copy it in pieces of 16 bytes
MAX_SCALE_WORDS = 1023  # of a row: the maximum that the kernels' signatures can tell apart
MAX_TOPK = 32
MAX_EXPERT_ALIGNMENT = 4096
MAX_SMS = 1 << 16  # more than a GPU has: kernels take the GPU's own number then
MAX_CAPACITY = (1 << 31) - 1  # no call brings as many rows: larger ones are all alike
MAX_LATENCY_TOKENS = 1 << 14
_WORD_BYTES = 8
# Lowest and highest value of each number; far above use, so that sizes made of them cannot overflow.
_BOUNDS = {
    "num_experts": (1, 1 << 20),
    "hidden": (1, 1 << 20),
    "num_topk": (1, MAX_TOPK),
    "max_tokens_per_rank": (1, 1 << 24),
    "num_slots": (1, 64),
    "max_recv_rows": (0, 1 << 32),  # 0 means None
    "room_bytes": (0, 1 << 48),
    "room_expert_bytes": (0, 1 << 48),
}


def sizes_code(*sizes: int) -> int:
    """Return a number of 32 bits made of sizes, which ranks compare instead of them."""
    return zlib.crc32(",".join(map(str, sizes)).encode())


@dataclass(frozen=True)
class BufferConfig:
    """The arguments of a `Buffer` that size its memory; equal on all ranks.

    Attributes:
        num_ranks: ranks of the group.
        num_experts: over all ranks; rank r owns experts `r * num_local_experts` and the following ones.
        hidden: elements of a row.
        num_topk: experts per token at most.
        max_tokens_per_rank: tokens that one rank may dispatch in a call.
        dtype: widest payload.
        num_slots: results (and combine inputs) of a layout that may live in the arena at once.
        max_recv_rows: capacity of a layout in rows, 0 for the default.
        path: "cpu" or "cuda".
        is_latency: results are padded per expert, with send and receive phases, hooks and masks (`LatencyBuffer`).
        fault_mode, on_stall: the policies for losses and silent ranks, if the members come from a view.
        share: of a `Buffer` on GPUs: how memory is lent, by "descriptors" or by "cudaIpc".
        device: of this rank's tensors; the only attribute that ranks do not share.
        room_bytes: of memory that serves calls of all sizes that fit (of a `Buffer` on GPUs all slots); 0 where it is
            made for these sizes.
        room_expert_bytes: of a `Buffer` on GPUs: of the slots of the expert layout, lent at construction; 0: at its
            first combine.
        num_hosts: on which the ranks run.
        wide_partials: over several hosts: sums of one host travel in the dtype in which they are summed.
    """

    num_ranks: int
    num_experts: int
    hidden: int
    num_topk: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    num_slots: int = 2
    max_recv_rows: int = 0
    path: str = "cpu"
    device: torch.device = CPU
    is_latency: bool = False
    fault_mode: str = "raise"
    on_stall: str = "error"
    share: str = ""
    room_bytes: int = 0
    room_expert_bytes: int = 0
    num_hosts: int = 1
    wide_partials: bool = False

    @cached_property
    def is_cuda(self) -> bool:
        """Whether GPU kernels move the rows."""
        return self.path == "cuda"

    def check(self) -> None:
        """Raise `InvalidArgument` for the first rule that is broken."""
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if not is_whole(value, low, high):
                raise InvalidArgument(f"{name} must be an int {low} ... {high}, got {shown(value)}")
        if self.num_experts % self.num_ranks:
            raise InvalidArgument(
                f"num_experts must be a multiple of the number of ranks, got {self.num_experts} experts for "
                f"{self.num_ranks} ranks; add experts that no token chooses"
            )
        if self.hidden % 8:
            raise InvalidArgument(f"hidden must be a multiple of 8, got {self.hidden}; pad the rows")
        if self.dtype not in PAYLOAD_DTYPES:
            names = ", ".join(str(dtype) for dtype in PAYLOAD_DTYPES)
            raise InvalidArgument(
                f"dtype must be one of {names}, got {self.dtype}; FP8 pairs travel in a buffer of a wider dtype"
            )
        if self.is_latency:
            self._check_latency()
        if self.num_ranks > MAX_MEMBERS:
            raise InvalidArgument(f"a buffer serves at most {MAX_MEMBERS} ranks, got {self.num_ranks}")

    def _check_latency(self) -> None:
        if self.num_slots < 2:
            raise InvalidArgument("LatencyBuffer needs num_slots of at least 2, the calls in flight, got 1")
        if self.max_tokens_per_rank > MAX_LATENCY_TOKENS:
            raise InvalidArgument(
                f"LatencyBuffer serves at most {MAX_LATENCY_TOKENS} tokens per rank, got {self.max_tokens_per_rank}; "
                "use Buffer"
            )

    @cached_property
    def is_synced(self) -> bool:
        """Whether epochs begin with `sync` alone; a lost rank is recorded in, or raised by, the calls that meet it."""
        return self.is_latency or self.is_cuda

    @cached_property
    def takes_replacements(self) -> bool:
        """Whether a process can replace a lost rank: its memory can be mapped at the required addresses."""
        return self.share != "cudaIpc"

    @cached_property
    def num_local_experts(self) -> int:
        """Experts that one rank owns."""
        return self.num_experts // self.num_ranks

    @cached_property
    def row_words(self) -> int:
        """8-byte words of the widest row."""
        return self.hidden * self.dtype.itemsize // _WORD_BYTES

    @cached_property
    def scale_words(self) -> int:
        """Most 4-byte words of scales beside an FP8 row, one for 16 channels; 0 when this hidden size has no FP8."""
        return min(self.hidden // FP8_MULTIPLE, MAX_SCALE_WORDS) if self.hidden % FP8_MULTIPLE == 0 else 0

    @cached_property
    def weight_dtype(self) -> torch.dtype:
        """Widest dtype of top-k weights: float64 only beside float64 rows."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def capacity(self, layout: str, expert_alignment: int = 1) -> int:
        """Rows that one call of `layout` can receive, padding included.

        Rank layout: the worst case, `num_ranks * max_tokens_per_rank`. Expert layout:
        `1.5 * max_tokens_per_rank * num_topk` rows plus `num_local_experts * (expert_alignment - 1)` for padding.
        `max_recv_rows` replaces the first term of either.
        """
        if layout == "rank":
            return self.max_recv_rows or self.num_ranks * self.max_tokens_per_rank
        rows = self.max_recv_rows or math.ceil(1.5 * self.max_tokens_per_rank * self.num_topk)
        return rows + self.num_local_experts * (expert_alignment - 1)

    def slot_layout(self, layout: str, expert_alignment: int) -> Layout:
        """Return the fields of one arena slot; "meta" travels beside a dispatch, "topk_weights" beside a combine."""
        rows = self.capacity(layout, expert_alignment)
        per_row = self.num_topk if layout == "rank" else 1
        return Layout(
            Field("payload", torch.int64, (rows * self.row_words,)),
            Field("scales", torch.int32, (rows * self.scale_words,)),
            Field("meta", torch.int64, (rows * self.meta_words[layout],)),
            Field("topk_weights", self.weight_dtype, (rows * per_row,)),
        )

    @cached_property
    def meta_words(self) -> dict[str, int]:
        """The number of 8-byte words that travel beside a row of each layout (`throughput/rows.py` defines them)."""
        rank = 1 + self.num_topk + -(-self.num_topk * self.weight_dtype.itemsize // _WORD_BYTES)
        return {"rank": rank, "expert": 2}

    def words(self) -> tuple[int, ...]:
        """Return the fields as integers, in order, for the comparison between ranks."""
        return (
            self.num_ranks,
            self.num_experts,
            self.hidden,
            self.num_topk,
            self.max_tokens_per_rank,
            DTYPE_CODES.index(self.dtype),
            self.num_slots,
            self.max_recv_rows,
            self.room_bytes,
            self.room_expert_bytes,
            int(self.wide_partials),
            PATHS.index(self.path),
            int(self.is_latency),
            FAULT_MODES.index(self.fault_mode),
            STALL_POLICIES.index(self.on_stall),
            SHARES.index(self.share),
        )


# Names of `BufferConfig.words`, for messages.
CONFIG_NAMES = (
    "num_ranks",
    "num_experts",
    "hidden",
    "num_topk",
    "max_tokens_per_rank",
    "dtype",
    "num_slots",
    "max_recv_rows",
    "room_bytes",
    "room_expert_bytes",
    "wide_partials",
    "device",
    "kind of buffer",
    "fault_mode",
    "on_stall",
    "way of lending GPU memory (EPEE_CUDA_SHARE)",
)
_CHOICES = dict(zip(CONFIG_NAMES[-5:], (PATHS, KINDS, FAULT_MODES, STALL_POLICIES, SHARES), strict=True))


def describe_word(name: str, value: int) -> str:
    """Return a config or header word as a user would write it."""
    if name == "dtype":
        return str(DTYPE_CODES[value]) if 0 <= value < len(DTYPE_CODES) else f"unknown dtype {value}"
    if name in _CHOICES:
        return _CHOICES[name][value] if 0 <= value < len(_CHOICES[name]) else f"unknown {name} {value}"
    if name == "layout":
        return repr(LAYOUTS[value]) if 0 <= value < len(LAYOUTS) else f"unknown layout {value}"
    return str(value)
