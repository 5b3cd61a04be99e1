"""The numbers and structs that the collective kernels share with the cpu: the lent region, arguments, constants.

Each `ctypes.Structure` is the only definition of its kernel's arguments; `jit.params` writes the C++ side. The fields
are explained here, their use by the kernels in `csrc/kernels/collective/*.cuh`. Everything here is arithmetic; no
memory is touched.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...errors import InvalidArgument
from ...gpu.params import COPIED_WORDS, NUM_REPORTS
from ...gpu.ranks import MAX_LOCAL, room_of
from ...jit.params import PerRank, RankSized, constants_source, offsets_source, sized, struct_source
from ...memory.layout import Field, Layout

MAX_BLOCKS = 1024  # of one kernel; each has a copy of the call's number
MAX_LANES = 176
NUM_STAGES = 2
NUM_REMEMBERED = 4  # calls whose words are separate
FACTS_BITS = 24  # below a call's number in `joined`
TILE_BYTES, TILE_PACKET_BYTES = 1536, 2048  # what a warp sends at once, and its length in packets
EXCHANGE_THREADS, TWO_SHOT_THREADS = 256, 256
SENDER, OWNER, COLLECTOR = 1, 2, 4  # roles of a rank in a pipeline

_PTR, _WORD, _INT, _LONG = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64

OPS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "reduce",
    "gather",
    "scatter",
    "vote",
)
OP_NUMBERS = {name: number for number, name in enumerate(OPS, 1)}
# In the order of `Element` and `Reduction` in `collective/elements.cuh`; the first element is bytes, only moved.
ELEMENTS: dict[torch.dtype | None, int] = {
    None: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float32: 3,
    torch.float64: 4,
    torch.int8: 5,
    torch.uint8: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.int16: 9,
}
REDUCTIONS = {name: number for number, name in enumerate(("sum", "product", "min", "max", "and", "or", "xor", "avg"))}


def _fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class CollectiveCall(RankSized):
    """First argument of every kernel.

    `own`: this rank's region; `report`, `abort`: pinned cpu memory (`abort` as in `common/wait.cuh`); `packets_offset`,
    `chunks_offset`: offsets of the payload in a region; `packets_stride`: bytes of packets of a rank.

    From `timeout_ns` on a call's own: that of one wait; `signature`: what all ranks must agree on, above the 40 bits of
    a number of bytes; `in_bytes`, `out_bytes`: bytes sent to each rank, and received from it; `sources`, `takers`: a
    bit for each rank that sends, and receives, if it takes part; `root`: the rank without which there is no call, or
    -1; `op`: for reports.
    """

    members = (
        *_fields(_PTR, "own report abort"),
        *_fields(_WORD, "packets_offset packets_stride chunks_offset"),
        *_fields(_INT, "rank unused"),
        *_fields(_WORD, "timeout_ns signature"),
        ("in_bytes", PerRank(_LONG)),
        ("out_bytes", PerRank(_LONG)),
        *_fields(_INT, "sources takers root op"),
    )


class CollectiveParams(RankSized):
    """Arguments of every kernel.

    `inputs`: the row for each rank; `outputs`: the destination of each rank's row, for a reduction this rank's own is
    the only one; `num_bytes`: of a row, if all are equally long. Pipelines: `has_gather`: two crossings, the row is cut
    into shares; `num_lanes` lanes, `num_slots` slots for each rank in each lane, `slot_bytes` apart, and chunks of
    `chunk_vecs` vectors of 16 bytes; `scatter_slots`: as `num_slots`, in the first crossing; `roles`: roles of this
    rank (`SENDER` ...); `direct_lanes`: lanes of a call whose rows all lie in pools; `stage_bytes`: of a block's
    dynamic shared memory, in which this rank's bulk copies are staged, or 0: its threads store.
    """

    members = (
        ("call", CollectiveCall),
        ("inputs", PerRank(_PTR)),
        ("outputs", PerRank(_PTR)),
        *_fields(_LONG, "num_bytes slot_bytes"),
        *_fields(_INT, "num_lanes num_slots chunk_vecs has_gather roles direct_lanes stage_bytes scatter_slots"),
    )


class MaskedParams(RankSized):
    """Arguments of the kernels of mode "mask", those of every kernel first.

    `kept_offset`: offset of a rank's kept rows in a region; `saved`: address to which a try copies a row that it
    overwrites, or 0; `told`: a pinned word for the ranks which calls have left out; `shown`: the program's own mask on
    this GPU, int32 `[num_shown]`, or 0; `is_one_row`: all ranks get the same row; `fills_absent`: output rows of ranks
    that take no part are filled with zeros. `counted`: a pinned word that receives `stamp`, with a bit for each rank in
    this call's result, or 0.
    """

    members = (
        ("base", CollectiveParams),
        *_fields(_WORD, "kept_offset"),
        *_fields(_PTR, "saved told shown counted"),
        *_fields(_WORD, "stamp"),
        *_fields(_INT, "num_shown is_one_row fills_absent unused"),
    )


class MendParams(RankSized):
    """Arguments of the kernels that repeat a large call of mode "mask".

    `again`: the call, from rows that it has not overwritten; `vote`: as of a call of its own.
    """

    members = (("again", MaskedParams), ("vote", MaskedParams))


@dataclass(frozen=True)
class ArgumentForms:
    """The parts of arguments that calls write in one copy, and their offsets in the arguments.

    Attributes:
        call, call_at: a call's own, from `timeout_ns` to the end of `CollectiveParams`.
        inputs_at: of the addresses in them, outputs after inputs.
        masked, masked_at: the arguments after them in mode "mask".
        counted, counted_at: of these `counted` and `stamp`.
        vote_at: of the vote's arguments in `MendParams`.
    """

    call: struct.Struct
    call_at: int
    inputs_at: int
    masked: struct.Struct
    masked_at: int
    counted: struct.Struct
    counted_at: int
    vote_at: int


@functools.cache
def forms_of(num_ranks: int) -> ArgumentForms:
    """Return the formats of calls of `num_ranks` ranks."""
    room = room_of(num_ranks)
    kinds = (CollectiveCall, CollectiveParams, MaskedParams, MendParams)
    call, params, masked, mend = (sized(kind, room) for kind in kinds)
    forms = ArgumentForms(
        struct.Struct(f"=QQ{room}q{room}q4i{room}Q{room}Qqq8i"),
        call.timeout_ns.offset,
        params.inputs.offset,
        struct.Struct("=5Q4i"),
        masked.saved.offset,
        struct.Struct("=2Q"),
        masked.counted.offset,
        mend.vote.offset,
    )
    assert forms.call_at + forms.call.size == ctypes.sizeof(params)
    assert forms.masked_at + forms.masked.size == ctypes.sizeof(masked)
    return forms


# Kernel file -> its entry points and their params.
KERNELS: dict[str, dict[str, type[ctypes.Structure]]] = {
    "kernels/collective/exchange.cuh": {
        "collective_exchange_reduced": CollectiveParams,
        "collective_exchange_placed": CollectiveParams,
        "collective_barrier": CollectiveParams,
    },
    "kernels/collective/two_shot.cuh": {"collective_two_shot": CollectiveParams},
    "kernels/collective/pipeline.cuh": {
        "collective_pipeline_reduced": CollectiveParams,
        "collective_pipeline_placed": CollectiveParams,
    },
}
# Kernel files of groups whose ranks have pools.
DIRECT_KERNELS: dict[str, dict[str, type[ctypes.Structure]]] = {
    "kernels/collective/direct.cuh": {
        "collective_direct_reduced": CollectiveParams,
        "collective_direct_placed": CollectiveParams,
    },
}
# Kernel files of groups in mode "mask".
_EXCHANGE = "kernels/collective/exchange.cuh"
MASKED_KERNELS: dict[str, dict[str, type[ctypes.Structure]]] = {
    _EXCHANGE: KERNELS[_EXCHANGE],
    "kernels/collective/mask/masked.cuh": {
        "collective_masked_reduced": MaskedParams,
        "collective_masked_placed": MaskedParams,
    },
    "kernels/collective/mask/tries.cuh": {
        "collective_try_reduced": MaskedParams,
        "collective_try_saving": MaskedParams,
        "collective_try_placed": MaskedParams,
        "collective_mend_reduced": MendParams,
        "collective_mend_placed": MendParams,
    },
}


@dataclass(frozen=True)
class CollectiveConfig:
    """The sizes that determine the memory; equal on all ranks.

    Attributes:
        packet_bytes: longest row that crosses in packets; of two shots too, whose only owner has it all.
        num_lanes: of large calls; each has a block for every role.
        num_slots: chunks of a rank that lie in a lane at once.
        chunk_bytes: of a slot.
        is_masked: the group is in mode "mask".
    """

    rank: int
    num_ranks: int
    packet_bytes: int = 1 << 20
    num_lanes: int = 132
    num_slots: int = 2
    chunk_bytes: int = 32 << 10
    is_masked: bool = False

    def check(self) -> None:
        """Raise `InvalidArgument` for sizes that the kernels do not support."""
        if not 1 <= self.num_ranks <= MAX_LOCAL or not 0 <= self.rank < self.num_ranks:
            raise InvalidArgument(f"collectives have 1 ... {MAX_LOCAL} ranks, got rank {self.rank} of {self.num_ranks}")
        if not 1 <= self.num_lanes <= MAX_LANES or self.num_slots < 1:
            raise InvalidArgument(f"num_lanes must be 1 ... {MAX_LANES}, num_slots 1 or more, got {self}")
        if self.chunk_bytes < 128 or self.chunk_bytes % 128 or self.packet_bytes < 1:
            raise InvalidArgument(f"chunk_bytes must be a multiple of 128, packet_bytes 1 or more, got {self}")

    @property
    def packets_stride(self) -> int:
        """Bytes of packets that one rank has in one of the two buffers of a stage."""
        return -(-self.packet_bytes // TILE_BYTES) * TILE_PACKET_BYTES

    @cached_property
    def region_layout(self) -> Layout:
        """The fields of a rank's lent region; the last dimension of what peers write is the writer, or its bytes."""
        slots = (self.num_lanes, self.num_slots, self.num_ranks, self.chunk_bytes)
        return Layout(
            *control_fields(self.num_ranks),
            Field("packets", torch.uint8, (2, NUM_STAGES, self.num_ranks, self.packets_stride), 512),
            Field("chunks", torch.uint8, (NUM_STAGES, *slots), 512),
            *((Field("kept", torch.uint8, (2, self.num_ranks, self.packets_stride), 512),) if self.is_masked else ()),
        )

    def call(self, own: int, report: int, abort: int) -> Any:
        """Return the constant part of all calls, a `CollectiveCall`, given the address of this rank's memory."""
        layout = self.region_layout
        call = sized(CollectiveCall, room_of(self.num_ranks))(own=own, report=report, abort=abort, rank=self.rank)
        call.packets_offset, call.packets_stride = layout.offset("packets"), self.packets_stride
        call.chunks_offset = layout.offset("chunks")
        return call


_U64 = torch.int64


@functools.cache
def control_fields(num_ranks: int) -> tuple[Field, ...]:
    """Return the fields of words in the region of a rank of `num_ranks`."""
    room = room_of(num_ranks)
    return (
        Field("joined", _U64, (NUM_REMEMBERED, room), 128),
        Field("places", _U64, (NUM_REMEMBERED, room, 2), 128),
        Field("pools", _U64, (room,), 128),
        Field("pool_bytes", _U64, (room,), 128),
        Field("gone", _U64, (room,), 128),
        Field("left", _U64, (room,), 128),
        Field("expected", _U64, (NUM_REMEMBERED, room), 128),
        Field("flags", _U64, (NUM_STAGES, MAX_LANES, room), 128),
        Field("credits", _U64, (NUM_STAGES, MAX_LANES, room), 128),
        Field("peers", _U64, (room,), 128),
        Field("tags", _U64, (MAX_BLOCKS,), 128),
        Field("view", _U64, (1,), 128),
        Field("news", _U64, (COPIED_WORDS,), 128),
        Field("failed", _U64, (2,), 128),
        Field("out", _U64, (1,), 128),
        Field("settled", _U64, (1,), 128),
        Field("got", _U64, (NUM_REMEMBERED,), 128),
        Field("ballot", _U64, (2,), 128),
        Field("ballots", _U64, (room, 2), 128),
    )


def direct_threads(pipeline: tuple[int, int], num_ranks: int) -> int:
    """Return the threads of a block of calls on pools, which need more registers than those of other pipelines."""
    return max(96, pipeline[0] - 8 * room_of(num_ranks))


def mend_threads(pipeline: tuple[int, int]) -> int:
    """Return the threads of a block that repeats a call of mode "mask" and also votes; one block per multiprocessor."""
    return max(96, pipeline[0] - 128)


@functools.cache
def kernel_head(
    num_ranks: int,
    dtype: torch.dtype | None,
    reduction: str = "sum",
    pipeline: tuple[int, int] = (384, 2),
    stall_one_in: int = 0,
) -> str:
    """Return the generated C++ in front of every collective kernel.

    Args:
        num_ranks: of the group.
        dtype: of a reduction, or None for bytes that are only moved.
        reduction: one of `REDUCTIONS`.
        pipeline: threads of a pipeline's block, and its blocks on a multiprocessor.
        stall_one_in: as in `ep.gpu.params.kernel_head`.
    """
    if dtype not in ELEMENTS or reduction not in REDUCTIONS:
        raise InvalidArgument(f"reductions are {', '.join(REDUCTIONS)} of {ELEMENTS}, got {reduction} of {dtype}")
    if reduction in ("and", "or", "xor") and dtype is not None and dtype.is_floating_point:
        raise InvalidArgument(f"reduction {reduction} is of integers, got {dtype}")
    constants = {
        "kNumRanks": num_ranks,
        "kMaxRanks": room_of(num_ranks),
        "kMaxLocal": MAX_LOCAL,
        "kMaxBlocks": MAX_BLOCKS,
        "kMaxLanes": MAX_LANES,
        "kNumReports": NUM_REPORTS,
        "kElement": ELEMENTS[dtype],
        "kReduction": REDUCTIONS[reduction],
        "kExchangeThreads": EXCHANGE_THREADS,
        "kTwoShotThreads": TWO_SHOT_THREADS,
        "kPipelineThreads": pipeline[0],
        "kPipelineBlocks": pipeline[1],
        "kDirectThreads": direct_threads(pipeline, num_ranks),
        "kMendThreads": mend_threads(pipeline),
        "kStallOneIn": stall_one_in,
    }
    structs = (CollectiveCall, CollectiveParams, MaskedParams, MendParams)
    words = Layout(*control_fields(num_ranks))
    return "".join(
        [
            constants_source(constants),
            offsets_source(words, words.names, "Region"),
            *(struct_source(sized(struct, room_of(num_ranks))) for struct in structs),
        ]
    )
