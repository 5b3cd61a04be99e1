"""The numbers and the struct that the message kernels share with the cpu: the lent region, arguments, constants.

The fields are explained here, their use by the kernels in `csrc/kernels/message/batch.cuh`. Arithmetic only.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ....errors import InvalidArgument
from ....gpu.ranks import MAX_LOCAL, room_of
from ....jit.params import PerRank, RankSized, constants_source, offsets_source, sized, struct_source
from ....memory.layout import Field, Layout

MAX_LANES = 64
OPS_INSIDE = 64  # sends and receives among a kernel's arguments; more lie in cpu memory
OP_WORDS = 4  # address, bytes, tag, dtype
GONE_WORDS = 4
HEADER_BYTES = 128  # after the bytes of a slot
THREADS, BLOCKS_PER_SM = 320, 2
SEND, RECEIVE = 1, 2  # numbers of the operations in reports
OPS = ("send", "recv")

_PTR, _WORD, _INT = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32


class MessageParams(RankSized):
    """Arguments of every kernel.

    `own`: this rank's region; `report`, `abort`: pinned cpu memory (`abort` as in `common/wait.cuh`); `rings_offset`:
    offset of the rings in a region; `timeout_ns`: of one wait; `ticket`: number of the launch, 0 of one in a graph;
    `failed`: pinned words, one for each pair and direction as in `channels`: the first ticket that has lost a message,
    0: none; `more`: pinned memory with the operations after the first `OPS_INSIDE`; `source`: pinned word that gets 1 +
    the rank that a receive from any source has found; `skips_dead`: such a receive continues without the dead.
    `num_lanes` lanes of a pair with `num_slots` slots of `slot_bytes`; a message takes a lane for each `lane_bytes`.
    `blocks` of a channel; `begins`: index of each channel's first operation among `ops`, and the end; `channels`: peer
    << 1, and 1 for sends.
    """

    members = (
        ("own", _PTR),
        ("report", _PTR),
        ("abort", _PTR),
        ("rings_offset", _WORD),
        ("timeout_ns", _WORD),
        ("ticket", _WORD),
        ("failed", _PTR),
        ("more", _PTR),
        ("source", _PTR),
        ("rank", _INT),
        ("num_ranks", _INT),
        ("num_lanes", _INT),
        ("num_slots", _INT),
        ("slot_bytes", _INT),
        ("lane_bytes", _INT),
        ("num_channels", _INT),
        ("blocks", _INT),
        ("skips_dead", _INT),
        ("unused", _INT),
        ("begins", PerRank(_INT, 2, 2)),
        ("channels", PerRank(_INT, 2)),
        ("ops", _WORD * (OP_WORDS * OPS_INSIDE)),
    )


KERNELS: dict[str, dict[str, type[ctypes.Structure]]] = {
    "kernels/message/batch.cuh": {"message_batch": MessageParams, "message_from_any": MessageParams},
}


@dataclass(frozen=True)
class MessageConfig:
    """The sizes that determine the memory; equal on all ranks.

    Attributes:
        num_lanes: of an ordered pair; a block each moves them.
        num_slots: chunks of a lane that lie at the receiver at once.
        slot_bytes: of a chunk.
        lane_bytes: a message takes one lane more for each of these.
    """

    rank: int
    num_ranks: int
    num_lanes: int = 64
    num_slots: int = 4
    slot_bytes: int = 24 << 10
    lane_bytes: int = 8 << 10

    def check(self) -> None:
        """Raise `InvalidArgument` for sizes that the kernels do not support."""
        if not 1 <= self.num_ranks <= MAX_LOCAL or not 0 <= self.rank < self.num_ranks:
            raise InvalidArgument(f"messages have 1 ... {MAX_LOCAL} ranks, got rank {self.rank} of {self.num_ranks}")
        if not 1 <= self.num_lanes <= MAX_LANES or self.num_slots < 1:
            raise InvalidArgument(f"num_lanes must be 1 ... {MAX_LANES}, num_slots 1 or more, got {self}")
        if self.slot_bytes < 128 or self.slot_bytes % 128 or self.lane_bytes < 128:
            raise InvalidArgument(f"slot_bytes must be a multiple of 128, lane_bytes 128 or more, got {self}")

    def lanes_of(self, nbytes: int) -> int:
        """Return over how many lanes a message is distributed."""
        return min(self.num_lanes, max(1, -(-nbytes // self.lane_bytes)))

    @cached_property
    def region_layout(self) -> Layout:
        """The fields of a rank's lent region."""
        slots = (self.num_ranks, self.num_lanes, self.num_slots, self.slot_bytes + HEADER_BYTES)
        return Layout(*word_fields(self.num_ranks), Field("rings", torch.uint8, slots, 512))


def config_of(rank: int, num_ranks: int, staging_bytes: int) -> MessageConfig:
    """Return sizes for which the rings of all sources take at most about twice `staging_bytes`, 6 MiB per source.

    A lane has room for the bytes in transit, those being copied, those in transit while the acknowledgement returns,
    and one chunk more. A chunk is what the threads of a block load at once (`THREADS`; kDeep in `batch.cuh`): with
    more, the last loads would begin when the first bytes have been sent.
    """
    slots, slot = 4, 24 << 10
    lanes = max(2, min(MAX_LANES, 2 * staging_bytes // (slots * num_ranks * slot)))
    return MessageConfig(rank, num_ranks, lanes, slots, slot)


_U64 = torch.int64


def channels_of(num_ranks: int) -> int:
    """Return for how many pairs and directions there is room: each rank in both directions."""
    return 2 * room_of(num_ranks)


@functools.cache
def word_fields(num_ranks: int) -> tuple[Field, ...]:
    """Return the fields of words in the region of a rank of `num_ranks`."""
    room = room_of(num_ranks)
    lanes = (room, MAX_LANES)
    return (
        Field("flags", _U64, lanes, 128),
        Field("credits", _U64, lanes, 128),
        Field("gone", _U64, (room, GONE_WORDS), 128),
        Field("sent", _U64, lanes, 128),
        Field("taken", _U64, lanes, 128),
        Field("peers", _U64, (room,), 128),
        Field("lost", _U64, (room,), 128),
        Field("reported", _U64, (room + 1,), 128),
        Field("news", _U64, (3,), 128),
    )


@functools.cache
def kernel_head(num_ranks: int, stall_one_in: int = 0) -> str:
    """Return the generated C++ in front of the kernels; all groups with equal `room_of` share it.

    Args:
        num_ranks: of the group.
        stall_one_in: as in `ep.gpu.params.kernel_head`.
    """
    room = room_of(num_ranks)
    constants: dict[str, Any] = {
        "kMaxRanks": room,
        "kMaxLanes": MAX_LANES,
        "kMaxChannels": channels_of(num_ranks),
        "kOpsInside": OPS_INSIDE,
        "kNumReports": room,  # one of each pair
        "kMessageThreads": THREADS,
        "kMessageBlocks": BLOCKS_PER_SM,
        "kSend": SEND,
        "kReceive": RECEIVE,
        "kStallOneIn": stall_one_in,
    }
    words, params = Layout(*word_fields(num_ranks)), sized(MessageParams, room)
    return "".join([constants_source(constants), offsets_source(words, words.names, "Region"), struct_source(params)])
