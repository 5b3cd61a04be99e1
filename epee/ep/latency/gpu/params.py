"""The numbers and structs that the latency kernels share with the CPU side: arguments and constants.

Each `ctypes.Structure` is the only definition of its kernel's arguments; `jit.params` writes the C++ side. The fields
are documented here, their use by the kernels in `csrc/kernels/latency/*.cuh`. The values that follow from sizes are in
`shapes.py`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ....gpu.params import MAX_EXPERTS, NUM_REPORTS
from ....gpu.ranks import MAX_LOCAL, room_of
from ....jit.params import constants_source, struct_source

MAX_TOKENS = 1024
MAX_TOPK = 32
MAX_HIDDEN = 16384
MAX_WARPS = 16
SCALE_BLOCK = 128
PACKET_BYTES, PACKET_WORDS = 16, 3  # three words of a record and a mark
COMBINE_WARPS = 8
COMBINE_FLAGS = 4  # of a partial that goes as a row: blocks that send a part of it
PARTIAL_SHARES = 3  # blocks that sum a partial that goes in packets
PACKET_SHARES = 20  # warps that expand a record in packets
PACKET_TOKENS = 32  # up to so many tokens of a rank cross in packets
HEAD_TOKEN_BITS = 11  # of a head; two flags and the kind follow
KIND_BITS = 3  # of the kind; the code of the call's sizes follows
assert 1 << HEAD_TOKEN_BITS > MAX_TOKENS
SEND_HALF, RECEIVE_HALF = 1, 2
BOTH_HALVES = SEND_HALF | RECEIVE_HALF
OP_DISPATCH, OP_COMBINE = 1, 2
SCALES_FLOAT, SCALES_POWER, SCALES_UE8M0 = range(3)

# Words that differ from call to call. They follow each other in the arguments, so that one `struct.pack_into` writes
# them all; the rest stays for all calls of a kind and size (`plan.py`).
CALL_WORDS = "timeout_ns ahead advance mask waits"
HANDLE_PARTS = "got recv_rows recv_weights recv_info sent_to"
DISPATCH_PARTS = f"{HANDLE_PARTS} counts ranges src_token own_ids own_weights"
DISPATCH_POINTERS = (
    "x topk_idx topk_weights out_x out_scales stats "
    "out_got recv_rows recv_weights recv_info sent_to out_counts out_ranges out_src_token own_ids own_weights"
)
COMBINE_POINTERS = "y topk_weights out out_got handle_got recv_rows recv_weights recv_info sent_to"

_PTR, _WORD, _INT, _LONG = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64


def _fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class LatencyCall(ctypes.Structure):
    """The arguments of every kernel; its last words (`CALL_WORDS`) are followed by the pointers of the call.

    `own`: this rank's region; `mask`: int32 [num_ranks] on the device; `report`, `abort`, `lost`: pinned memory
    (`abort` as in `common/wait.cuh`); `waits`: int64 [num_ranks], microseconds until the receive phase had the message
    of each rank, or 0; offsets into the region; `timeout_ns`: of the call's waits; `halves`: the phases that this
    launch runs; `is_strict`: a missing source is an error and stays in the mask; `ahead`: calls sent before the one to
    receive and not received yet; `advance`: how many calls in a row are received with this one.
    """

    _fields_ = (
        *_fields(_PTR, "own report abort lost"),
        *_fields(_WORD, "peers_offset tags_offset heard_offset end_offset reported_offset news_offset max_in_flight"),
        *_fields(_INT, "rank op halves is_strict"),
        *_fields(_WORD, CALL_WORDS),
    )


class LatencyPlaces(ctypes.Structure):
    """The offsets of an operation's words and records in every rank's region; strides in bytes.

    `*_section`: from a source's part of an area to the next one's, in words (`head_section`, `flag_section`) or bytes.
    """

    _fields_ = (
        *_fields(_WORD, "heads_offset flags_offset rows_offset packets_offset"),
        *_fields(_LONG, "head_section flag_section rows_section packets_section"),
        *_fields(_INT, "row_stride packet_stride head_words num_slots max_tokens packet_tokens"),
    )


class LatencyDispatchParams(ctypes.Structure):
    """Arguments of `dispatch_latency_*`; T is `max_tokens`, L the local experts.

    In: `x` bfloat16 [num_tokens, hidden], rows `x_stride` bytes apart; `topk_idx` int64 and `topk_weights` float32 (or
    0 for ones) [num_tokens, num_topk]; `experts`: the table of `gpu/experts.py`. Out: `out_x` [L, ranks * T, row];
    `out_scales` [L, scale_words, ranks * T]; `out_counts` int32 [L]; `out_ranges` int64 [L, ranks]; `out_src_token`
    int32 [L, ranks * T]; `out_got` bool [ranks]; `stats` int32 [L] to which counts are added, or 0. The handle:
    `recv_rows` int32 and `recv_weights` float32 [ranks, T, num_topk], `recv_info` int32 [ranks, 1 + token_words]
    (tokens of the rank, and which of them came), `sent_to` int32 [1 + num_tokens] (bits of the ranks in the call, and
    of each token's), `own_ids` int32 and `own_weights` float32 [num_tokens, num_topk] (what this rank sent, physical
    experts).
    """

    _fields_ = (
        ("at", LatencyPlaces),
        ("call", LatencyCall),
        *_fields(_PTR, DISPATCH_POINTERS),
        ("experts", _PTR),
        ("x_stride", _LONG),
        *_fields(_INT, "num_tokens num_topk num_experts num_local_experts owner_factor hidden token_words"),
        *_fields(_INT, "meta_words row_words scale_words scale_kind kind refused"),
    )


class LatencyCombineParams(ctypes.Structure):
    """Arguments of `combine_latency_*`.

    In: `y` bfloat16 [num_rows, hidden], rows `y_stride` bytes apart; `topk_weights` float32 [num_tokens, num_topk] when
    `has_weights`; the handle. Out: `out` bfloat16 [num_tokens, hidden], `out_got` bool
    [ranks].
    """

    _fields_ = (
        ("at", LatencyPlaces),
        ("call", LatencyCall),
        *_fields(_PTR, COMBINE_POINTERS),
        ("weights_offset", _WORD),
        *_fields(_LONG, "weights_section y_stride"),
        *_fields(_INT, "num_tokens num_topk hidden token_words num_rows has_weights kind refused"),
    )


# Kernel file -> its entry points and their params.
KERNELS: dict[str, dict[str, type[ctypes.Structure]]] = {
    "kernels/latency/dispatch.cuh": {
        "dispatch_latency_fp8": LatencyDispatchParams,
        "dispatch_latency_bf16": LatencyDispatchParams,
    },
    "kernels/latency/combine.cuh": {
        "combine_latency_bf16": LatencyCombineParams,
        "combine_latency_f32": LatencyCombineParams,
    },
}


@functools.cache
def kernel_head(num_ranks: int, stall_one_in: int = 0) -> str:
    """Return the generated C++ in front of every latency kernel; `stall_one_in` as in `ep.gpu.params`."""
    constants = {
        "kNumRanks": num_ranks,
        "kMaxRanks": room_of(num_ranks),
        "kMaxLocal": MAX_LOCAL,
        "kMaxExperts": MAX_EXPERTS,
        "kMaxWarps": MAX_WARPS,
        "kNumReports": NUM_REPORTS,
        "kStallOneIn": stall_one_in,
        "kPacketWarps": PACKET_SHARES,
        "kFlagsOfToken": COMBINE_FLAGS,
        "kHeadTokenBits": HEAD_TOKEN_BITS,
    }
    structs = (LatencyCall, LatencyPlaces, LatencyDispatchParams, LatencyCombineParams)
    return "".join([constants_source(constants), *(struct_source(struct) for struct in structs)])
