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
from ....gpu.params import COPIED_WORDS
from ....gpu.ranks import MAX_LOCAL
from ....jit.params import constants_source, offsets_source, struct_source
from ....memory.layout import Field, Layout

MAX_LANES = 64
MAX_CHANNELS = 2 * MAX_LOCAL  # of a batch: each rank in both directions
OPS_INSIDE = 64  # sends and receives among a kernel's arguments; more lie in cpu memory
OP_WORDS = 4  # address, bytes, tag, dtype
GONE_WORDS = 4
HEADER_BYTES = 128  # after the bytes of a slot
THREADS, BLOCKS_PER_SM = 320, 2
SEND, RECEIVE = 1, 2  # numbers of the operations in reports
OPS = ("send", "recv")

_PTR, _WORD, _INT = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32


class MessageParams(ctypes.Structure):
    """Arguments of every kernel; with room for all ranks of an NVLink domain, as a group may grow.

    `own`: this rank's region; `report`, `abort`: pinned cpu memory (`abort` as in `common/wait.cuh`);
    `timeout_ns`: of one wait; `ticket`: number of the launch, 0 of one in a graph;
    `failed`: pinned words, one for each pair and direction as in `channels`: the first ticket that has lost a message,
    0: none; `more`: pinned memory with the operations after the first `OPS_INSIDE`; `source`: pinned word that gets 1 +
    the rank that a receive from any source has found; `skips_dead`: such a receive continues without the dead.
    `num_lanes` lanes of a pair with `num_slots` slots of `slot_bytes`; a message takes a lane for each `lane_bytes`.
    `blocks` of a channel; `begins`: index of each channel's first operation among `ops`, and the end; `channels`: peer
    << 1, and 1 for sends.
    """

    _fields_ = (
        ("own", _PTR),
        ("report", _PTR),
        ("abort", _PTR),
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
        ("begins", _INT * (MAX_CHANNELS + 2)),
        ("channels", _INT * MAX_CHANNELS),
        ("ops", _WORD * (OP_WORDS * OPS_INSIDE)),
    )


KERNELS: dict[str, dict[str, type[ctypes.Structure]]] = {
    "kernels/message/batch.cuh": {"message_batch": MessageParams, "message_from_any": MessageParams},
}


@dataclass(frozen=True)
class MessageConfig:
    """The sizes that determine the memory; equal on all ranks, but for `num_ranks`.

    Attributes:
        num_ranks: ranks whose rings lie in the region: those of the group when it is made.
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

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring of one source."""
        return self.num_lanes * self.num_slots * (self.slot_bytes + HEADER_BYTES)

    @cached_property
    def region_layout(self) -> Layout:
        """The fields of a rank's lent region."""
        return Layout(*WORD_FIELDS, Field("rings", torch.uint8, (self.num_ranks, self.ring_bytes), 512))


def config_of(rank: int, num_ranks: int, staging_bytes: int) -> MessageConfig:
    """Return sizes for which a ring takes 6 MiB, or half of `staging_bytes` where that is less.

    A lane has room for the bytes in transit, those being copied, those in transit while the acknowledgement returns,
    and one chunk more. A chunk is what the threads of a block load at once (`THREADS`; kDeep in `batch.cuh`): with
    more, the last loads would begin when the first bytes have been sent.
    """
    slots, slot = 4, 24 << 10
    lanes = max(2, min(MAX_LANES, staging_bytes // (2 * slots * slot)))
    return MessageConfig(rank, num_ranks, lanes, slots, slot)


_U64 = torch.int64


_LANES = (MAX_LOCAL, MAX_LANES)
# Fields of words in the region of a rank, the same in all groups, so that ranks may join.
WORD_FIELDS = (
    Field("flags", _U64, _LANES, 128),
    Field("credits", _U64, _LANES, 128),
    Field("gone", _U64, (MAX_LOCAL, GONE_WORDS), 128),
    Field("sent", _U64, _LANES, 128),
    Field("taken", _U64, _LANES, 128),
    Field("peers", _U64, (MAX_LOCAL,), 128),
    Field("rings_here", _U64, (MAX_LOCAL,), 128),
    Field("rings_there", _U64, (MAX_LOCAL,), 128),
    Field("lost", _U64, (MAX_LOCAL,), 128),
    Field("reported", _U64, (MAX_LOCAL + 1,), 128),
    Field("news", _U64, (COPIED_WORDS,), 128),
)


@functools.cache
def kernel_head(stall_one_in: int = 0) -> str:
    """Return the generated C++ in front of the kernels, which groups of all sizes share.

    Args:
        stall_one_in: as in `ep.gpu.params.kernel_head`.
    """
    constants: dict[str, Any] = {
        "kMaxRanks": MAX_LOCAL,
        "kMaxLanes": MAX_LANES,
        "kMaxChannels": MAX_CHANNELS,
        "kOpsInside": OPS_INSIDE,
        "kNumReports": MAX_LOCAL,  # one of each pair
        "kMessageThreads": THREADS,
        "kMessageBlocks": BLOCKS_PER_SM,
        "kSend": SEND,
        "kReceive": RECEIVE,
        "kStallOneIn": stall_one_in,
    }
    words = Layout(*WORD_FIELDS)
    return "".join(
        [constants_source(constants), offsets_source(words, words.names, "Region"), struct_source(MessageParams)]
    )
