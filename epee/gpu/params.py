"""The numbers and structs that the throughput kernels share with the cpu: control block, arguments, constants.

Each `ctypes.Structure` is the only definition of its kernel's arguments; `jit.params` writes the C++ side. The fields
are explained here, their use by the kernels in `csrc/kernels/throughput/*.cuh`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from ..jit.params import PerRank, RankSized, constants_source, offsets_source, sized, struct_source
from ..memory.layout import Field, Layout
from .ranks import MAX_RANKS, room_of

MAX_EXPERTS = 1024
MAX_CHANNELS = 1056  # 132 SMs with 8 sending warps each
MAX_BLOCKS = 256  # of one kernel; each has a flag
MAX_STAGED_CHUNKS = 16384
STAGED_ROWS = 4  # rows that a copying block announces at once
MAX_LAYOUT_BLOCKS = 32
MAX_FEW_TOKENS = 512  # tokens of a rank in the one-kernel dispatch
MAX_FEW_WARPS = 16
NUM_REPORTS = 8
NEWS_WORDS = 3  # in cpu memory: abort, dead ranks, and the word of waiting kernels (`csrc/common/wait.cuh`)
COPIED_WORDS = 4  # of those that a GPU has in its own memory
REMEMBERED_CALLS = 8  # calls of a peer whose words are kept while it makes later ones
REPORT_WORDS = 8
COUNTS_HEADER_WORDS = 8
HAUNTED_WORDS = 2  # a bit for each slot
SOME_HAUNTED = 1 << 32  # above the number of the view: any of those bits is set
COUNTS_ROW_WORDS = COUNTS_HEADER_WORDS + MAX_EXPERTS + MAX_RANKS
# Words of the numbers that a dispatch reports: 0 state, 1 good and 2 failed; 1 number of the view (device only); these,
# of which the number of the call is reported to the device only.
RECV_INFO_ROWS, RECV_INFO_EXPANDED, RECV_INFO_CALL, RECV_INFO_COUNTS = 2, 3, 4, 5
COMBINE_FACT_BITS = 9  # of a combine's signature; the number of the dispatch that made the handle has the other 7
GRID_TIMEOUT_NS = 2_000_000_000  # the blocks of one GPU wait at most this long for each other
# The end of a call waits this much longer than a timeout for its own blocks: other programs' kernels may occupy their
# multiprocessors.
OWN_BLOCKS_TIMEOUT_NS = 60_000_000_000

_PTR = ctypes.c_uint64
_INT = ctypes.c_int32
_RANKS = PerRank(ctypes.c_uint64)

OP_NAMES = {1: "dispatch", 2: "combine", 3: "barrier"}
OP_DISPATCH, OP_COMBINE, OP_BARRIER = 1, 2, 3


_WORD = ctypes.c_uint64
# The parts of a handle: `send_prefix` int32 [num_tokens, num_ranks], `expert_of` int32 (physical experts, as in
# `csrc/common/experts.cuh`) and `weights_of` float32 [num_tokens, num_topk], `ordinals` int32 likewise (expert layout,
# else 0), `count_matrix` int32 [num_ranks, num_experts + num_ranks], `row_base` int32 [num_experts + num_ranks],
# `recv_info` int32, and after it, each aligned to 16 bytes, `slot_ends`, `recv_slots` int32 [num_local_experts],
# `token_ends`, `source_tokens` int32 [num_ranks], `num_dropped` int32 [1]. They are adjacent in every struct, in this
# order, so that the cpu sets them with one copy.
_HANDLE_NAMES = ("send_prefix", "expert_of", "weights_of", "ordinals", "count_matrix", "row_base", "recv_info")
_HANDLE = tuple((name, _PTR) for name in _HANDLE_NAMES)
HANDLE_BYTES = 8 * len(_HANDLE)
_COUNTS = tuple((name, _INT) for name in ("num_tokens", "num_topk", "num_experts", "num_local_experts"))


def _fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class Call(RankSized):
    """First argument of every kernel; its last two words begin those that each call writes (`stage.call_words`).

    `control`: control blocks of all ranks as this GPU addresses them; `report`, `abort`, `exchanged`: pinned cpu memory
    (`abort` as in `common/wait.cuh`); `ordinal`: number of the call on the cpu, which `exchanged` receives when all
    ranks have joined the call (0 in graphs); `timeout_ns`: of one wait; `rank`, `op`: rank and operation, for reports.
    """

    members = (
        ("control", _RANKS),
        *_fields(_PTR, "report abort exchanged"),
        *_fields(_INT, "rank op"),
        *_fields(_WORD, "ordinal timeout_ns"),
    )


class LayoutParams(RankSized):
    """Arguments of `layout_throughput`.

    In: `topk_idx` int64 [num_tokens, num_topk] or 0, `token_in_rank` bool [num_tokens, num_ranks] or 0, `topk_weights`
    float32 or 0; `experts`: the table of `experts.py`; `shape`: `signature.shape_signature`. Out: the handle; `mailbox`
    is pinned cpu memory or 0. `capacity` is the caller's or 0; `max_recv_rows` here and below, and `max_rows` of a
    combine, is the room or the capacity, whichever is less.
    """

    members = (
        ("call", Call),
        *_fields(_PTR, "topk_idx token_in_rank topk_weights"),
        *_HANDLE,
        ("mailbox", _PTR),
        *_fields(_INT, "grant refused"),
        *_fields(_WORD, "signature experts"),
        *_COUNTS,
        *_fields(_INT, "lanes_per_token expert_alignment max_tokens max_recv_rows max_expanded_rows"),
        *_fields(_INT, "num_slots num_channels num_blocks kept_per_warp do_count capacity shape"),
    )


class DispatchParams(RankSized):
    """Arguments of `dispatch_throughput_*`. Strides of `x` in bytes, of `scales` in 4-byte elements."""

    members = (
        ("call", Call),
        *_fields(_PTR, "x scales"),
        *_HANDLE,
        ("slots", _RANKS),
        *_fields(_WORD, "slot_bytes topk_idx_offset weights_offset scales_offset src_token_offset"),
        *_fields(ctypes.c_int64, "x_stride scale_row_stride scale_column_stride"),
        *_fields(_PTR, "out_x out_scales out_weights out_src_rank out_src_token out_src_k"),
        *_COUNTS,
        *_fields(_INT, "row_bytes chunk_bytes num_scales max_recv_rows max_expanded_rows expert_alignment"),
        *_fields(_INT, "fill_tail num_sender_blocks"),
    )


class FewParams(RankSized):
    """Arguments of `dispatch_throughput_few`: those of both kernels that it replaces."""

    members = (("layout", LayoutParams), ("payload", DispatchParams), ("num_move_warps", _INT))


class CombineParams(RankSized):
    """Arguments of `combine_throughput_*`."""

    members = (
        ("call", Call),
        *_HANDLE,
        *_fields(_PTR, "y bias_0 bias_1 out out_weights"),
        *_fields(_INT, "slot refused"),
        ("slots", _RANKS),
        *_fields(_WORD, "slot_bytes weights_offset"),
        ("signature", _WORD),
        *_COUNTS,
        *_fields(_INT, "row_bytes chunk_bytes num_stages max_entries max_rows num_slots"),
        *_fields(_INT, "num_pull_blocks num_copy_blocks num_copy_warps is_bias_f32"),
    )


class OrderParams(RankSized):
    """Arguments of `combine_throughput_order`."""

    members = (
        ("call", Call),
        *_HANDLE,
        *_fields(_PTR, "y bias_0 bias_1 out"),
        ("slots", _RANKS),
        ("slot_bytes", _WORD),
        *_COUNTS,
        *_fields(_INT, "row_bytes max_rows num_slots payload by bias_first round_partials is_expert is_bias_f32"),
    )


class BarrierParams(RankSized):
    """Arguments of `barrier`."""

    members = (("call", Call),)


_U64, _I32 = torch.int64, torch.int32


@functools.cache
def control_layout(num_ranks: int) -> Layout:
    """Return the fields of a rank's control block in a buffer of `num_ranks` ranks."""
    room = room_of(num_ranks)
    return Layout(
        Field("counts", _U64, (2, room, COUNTS_ROW_WORDS), 128),
        Field("dispatch_done", _U64, (room, MAX_BLOCKS), 128),
        Field("combine_ready", _U64, (REMEMBERED_CALLS, room), 128),
        Field("combine_done", _U64, (room, MAX_BLOCKS), 128),
        Field("combine_failed", _U64, (REMEMBERED_CALLS, room), 128),
        Field("barrier", _U64, (room,), 128),
        Field("streams", _U64, (room, MAX_CHANNELS, 2), 128),
        Field("staged", _U64, (room, MAX_STAGED_CHUNKS), 128),
        Field("view", _U64, (2,), 128),
        Field("news", _U64, (COPIED_WORDS,), 128),
        Field("haunted", _U64, (HAUNTED_WORDS,), 128),
        Field("seq", _U64, (1,), 128),
        Field("failed", _U64, (2,), 128),
        Field("exchanged", _U64, (1,), 128),
        Field("reported", _U64, (1,), 128),
        Field("grid", _I32, (1,), 128),
        Field("gate", _U64, (1,), 128),
        Field("grants", _I32, (3, room), 128),
        Field("next_token", _I32, (1,), 128),
        Field("scratch", _I32, (MAX_LAYOUT_BLOCKS, COUNTS_ROW_WORDS), 128),
    )


@functools.cache
def kernel_head(num_ranks: int, reducer_warps: int, stall_one_in: int = 0) -> str:
    """Return the generated C++ in front of every throughput kernel, for `num_ranks` ranks.

    With `stall_one_in`, for stress tests, one in that many warps pauses for a while at each critical point.
    """
    constants = {
        "kNumRanks": num_ranks,
        "kMaxRanks": room_of(num_ranks),
        "kMaxExperts": MAX_EXPERTS,
        "kMaxChannels": MAX_CHANNELS,
        "kMaxBlocks": MAX_BLOCKS,
        "kMaxLayoutBlocks": MAX_LAYOUT_BLOCKS,
        "kMaxStagedChunks": MAX_STAGED_CHUNKS,
        "kStagedRows": STAGED_ROWS,
        "kNumReports": NUM_REPORTS,
        "kRememberedCalls": REMEMBERED_CALLS,
        "kCountsHeaderWords": COUNTS_HEADER_WORDS,
        "kCountsRowWords": COUNTS_ROW_WORDS,
        "kRecvInfoRows": RECV_INFO_ROWS,
        "kRecvInfoExpanded": RECV_INFO_EXPANDED,
        "kRecvInfoCall": RECV_INFO_CALL,
        "kRecvInfoCounts": RECV_INFO_COUNTS,
        "kCombineFactBits": COMBINE_FACT_BITS,
        "kSomeHaunted": SOME_HAUNTED,
        "kReducerWarps": reducer_warps,
        "kReducerThreads": 32 * reducer_warps,
        "kGridTimeoutNs": GRID_TIMEOUT_NS,
        "kOwnBlocksTimeoutNs": OWN_BLOCKS_TIMEOUT_NS,
        "kMaxFewTokens": MAX_FEW_TOKENS,
        "kMaxFewWarps": MAX_FEW_WARPS,
        "kStallOneIn": stall_one_in,
    }
    structs = (Call, LayoutParams, DispatchParams, FewParams, CombineParams, OrderParams, BarrierParams)
    layout = control_layout(num_ranks)
    return "".join(
        [
            constants_source(constants),
            offsets_source(layout, layout.names, "Control"),
            *(struct_source(sized(struct, room_of(num_ranks))) for struct in structs),
        ]
    )


FEW_KERNEL = "dispatch_throughput_few"
# Kernel file -> its entry points (see `jit.params.kernel_symbol`) and their params.
KERNELS: dict[str, dict[str, type[ctypes.Structure]]] = {
    "kernels/throughput/layout.cuh": {"layout_throughput": LayoutParams},
    "kernels/throughput/dispatch.cuh": {
        "dispatch_throughput_2": DispatchParams,
        "dispatch_throughput_4": DispatchParams,
    },
    "kernels/throughput/few.cuh": {FEW_KERNEL: FewParams},
    "kernels/throughput/expert.cuh": {
        "dispatch_throughput_expert_2": DispatchParams,
        "dispatch_throughput_expert_4": DispatchParams,
    },
    "kernels/throughput/combine.cuh": {
        f"combine_throughput_{layout}_{dtype}": CombineParams
        for layout in ("rank", "expert")
        for dtype in ("bf16", "f16", "f32")
    },
    "kernels/throughput/order.cuh": {
        "combine_throughput_order": OrderParams,
        "combine_throughput_order_end": BarrierParams,
    },
    "kernels/barrier.cuh": {"barrier": BarrierParams},
}
