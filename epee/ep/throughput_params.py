"""The numbers and structs that the throughput kernels share with the host: control block, arguments, constants.

Each `ctypes.Structure` is the only definition of its kernel's arguments; `jit.params` writes the C++ side. What the
fields mean stands here, what the kernels do with them in `csrc/kernels/throughput_*.cuh`.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from ..jit.params import constants_source, offsets_source, struct_source
from ..memory.layout import Field, Layout

MAX_RANKS = 8
MAX_EXPERTS = 1024
MAX_CHANNELS = 1056  # 132 SMs with 8 sending warps each
MAX_BLOCKS = 256  # of one kernel; a flag each
MAX_STAGED_CHUNKS = 16384
STAGED_ROWS = 4  # rows that a copying block announces at once
MAX_LAYOUT_BLOCKS = 32
NUM_REPORTS = 8
REPORT_WORDS = 8
COUNTS_HEADER_WORDS = 8
COUNTS_ROW_WORDS = COUNTS_HEADER_WORDS + MAX_EXPERTS + MAX_RANKS
# Words of the numbers that a dispatch reports (device and pinned host): 0-1 flag, then these.
RECV_INFO_ROWS, RECV_INFO_EXPANDED, RECV_INFO_COUNTS = 2, 3, 4
GRID_TIMEOUT_NS = 2_000_000_000  # the blocks of one GPU wait for each other no longer than this

_PTR = ctypes.c_uint64
_INT = ctypes.c_int32
_RANKS = ctypes.c_uint64 * MAX_RANKS

OP_NAMES = {1: "dispatch", 2: "combine", 3: "barrier"}
OP_DISPATCH, OP_COMBINE, OP_BARRIER = 1, 2, 3


class Call(ctypes.Structure):
    """What every kernel gets first.

    `control`: control blocks of all ranks as this GPU addresses them; `report`, `abort`: pinned host memory;
    `timeout_ns`: of one wait; `rank`, `op`: who runs what, for reports.
    """

    _fields_ = (
        ("control", _RANKS),
        ("report", _PTR),
        ("abort", _PTR),
        ("timeout_ns", ctypes.c_uint64),
        ("rank", _INT),
        ("op", _INT),
    )


class LayoutParams(ctypes.Structure):
    """Arguments of `throughput_layout`.

    In: `topk_idx` int64 [num_tokens, num_topk] or 0, `token_in_rank` bool [num_tokens, num_ranks] or 0,
    `topk_weights` float32 or 0. Out, the handle's: `send_prefix` int32 [num_tokens, num_ranks], `expert_of` int32 and
    `weights_of` float32 [num_tokens, num_topk], `ordinals` int32 (expert layout, else 0), `count_matrix` int32
    [num_ranks, num_experts + num_ranks], `row_base` int32 [num_experts + num_ranks], `recv_info`. `mailbox` is pinned
    host memory or 0.
    """

    _fields_ = (
        ("call", Call),
        ("topk_idx", _PTR),
        ("token_in_rank", _PTR),
        ("topk_weights", _PTR),
        ("send_prefix", _PTR),
        ("expert_of", _PTR),
        ("weights_of", _PTR),
        ("ordinals", _PTR),
        ("count_matrix", _PTR),
        ("row_base", _PTR),
        ("recv_info", _PTR),
        ("mailbox", _PTR),
        ("signature", ctypes.c_uint64),
        ("num_tokens", _INT),
        ("num_topk", _INT),
        ("num_experts", _INT),
        ("num_local_experts", _INT),
        ("lanes_per_token", _INT),
        ("expert_alignment", _INT),
        ("max_tokens", _INT),
        ("max_recv_rows", _INT),
        ("max_expanded_rows", _INT),
        ("grant", _INT),
        ("num_slots", _INT),
        ("num_channels", _INT),
        ("num_blocks", _INT),
        ("kept_per_warp", _INT),
        ("do_count", _INT),
        ("refused", _INT),
    )


class DispatchParams(ctypes.Structure):
    """Arguments of `throughput_dispatch_*`. Strides of `x` in bytes, of `scales` in 4-byte elements."""

    _fields_ = (
        ("call", Call),
        ("slots", _RANKS),
        ("slot_bytes", ctypes.c_uint64),
        ("topk_idx_offset", ctypes.c_uint64),
        ("weights_offset", ctypes.c_uint64),
        ("scales_offset", ctypes.c_uint64),
        ("src_token_offset", ctypes.c_uint64),
        ("x", _PTR),
        ("x_stride", ctypes.c_int64),
        ("scales", _PTR),
        ("scale_row_stride", ctypes.c_int64),
        ("scale_column_stride", ctypes.c_int64),
        ("send_prefix", _PTR),
        ("expert_of", _PTR),
        ("weights_of", _PTR),
        ("ordinals", _PTR),
        ("count_matrix", _PTR),
        ("row_base", _PTR),
        ("recv_info", _PTR),
        ("out_x", _PTR),
        ("out_scales", _PTR),
        ("out_weights", _PTR),
        ("out_src_rank", _PTR),
        ("out_src_token", _PTR),
        ("out_src_k", _PTR),
        ("num_tokens", _INT),
        ("num_topk", _INT),
        ("num_experts", _INT),
        ("num_local_experts", _INT),
        ("row_bytes", _INT),
        ("chunk_bytes", _INT),
        ("num_scales", _INT),
        ("max_recv_rows", _INT),
        ("max_expanded_rows", _INT),
        ("expert_alignment", _INT),
        ("fill_tail", _INT),
        ("num_sender_blocks", _INT),
    )


class CombineParams(ctypes.Structure):
    """Arguments of `throughput_combine_*`."""

    _fields_ = (
        ("call", Call),
        ("slots", _RANKS),
        ("slot_bytes", ctypes.c_uint64),
        ("weights_offset", ctypes.c_uint64),
        ("send_prefix", _PTR),
        ("expert_of", _PTR),
        ("weights_of", _PTR),
        ("ordinals", _PTR),
        ("count_matrix", _PTR),
        ("row_base", _PTR),
        ("y", _PTR),
        ("bias_0", _PTR),
        ("bias_1", _PTR),
        ("out", _PTR),
        ("out_weights", _PTR),
        ("signature", ctypes.c_uint64),
        ("num_tokens", _INT),
        ("num_topk", _INT),
        ("num_experts", _INT),
        ("num_local_experts", _INT),
        ("row_bytes", _INT),
        ("chunk_bytes", _INT),
        ("num_stages", _INT),
        ("max_entries", _INT),
        ("max_rows", _INT),
        ("num_slots", _INT),
        ("slot", _INT),
        ("refused", _INT),
        ("num_pull_blocks", _INT),
        ("num_copy_blocks", _INT),
        ("num_copy_warps", _INT),
        ("is_bias_f32", _INT),
    )


class BarrierParams(ctypes.Structure):
    """Arguments of `barrier`."""

    _fields_ = (("call", Call),)


_U64, _I32 = torch.int64, torch.int32
_CONTROL_FIELDS = (
    Field("counts", _U64, (2, MAX_RANKS, COUNTS_ROW_WORDS), 128),
    Field("dispatch_done", _U64, (MAX_RANKS, MAX_BLOCKS), 128),
    Field("combine_ready", _U64, (MAX_RANKS,), 128),
    Field("combine_done", _U64, (MAX_RANKS, MAX_BLOCKS), 128),
    Field("barrier", _U64, (MAX_RANKS,), 128),
    Field("streams", _U64, (MAX_RANKS, MAX_CHANNELS, 2), 128),
    Field("staged", _U64, (MAX_RANKS, MAX_STAGED_CHUNKS), 128),
    Field("seq", _U64, (1,), 128),
    Field("failed", _U64, (1,), 128),
    Field("reported", _U64, (1,), 128),
    Field("grid", _I32, (1,), 128),
    Field("gate", _U64, (1,), 128),
    Field("grants", _I32, (3, MAX_RANKS), 128),
    Field("next_token", _I32, (1,), 128),
    Field("scratch", _I32, (MAX_LAYOUT_BLOCKS, COUNTS_ROW_WORDS), 128),
)
CONTROL_LAYOUT = Layout(*_CONTROL_FIELDS)


@functools.cache
def kernel_head(num_ranks: int, reducer_warps: int) -> str:
    """Return the generated C++ in front of every throughput kernel, for `num_ranks` ranks."""
    constants = {
        "kNumRanks": num_ranks,
        "kMaxRanks": MAX_RANKS,
        "kMaxChannels": MAX_CHANNELS,
        "kMaxBlocks": MAX_BLOCKS,
        "kMaxLayoutBlocks": MAX_LAYOUT_BLOCKS,
        "kMaxStagedChunks": MAX_STAGED_CHUNKS,
        "kStagedRows": STAGED_ROWS,
        "kNumReports": NUM_REPORTS,
        "kCountsHeaderWords": COUNTS_HEADER_WORDS,
        "kCountsRowWords": COUNTS_ROW_WORDS,
        "kRecvInfoRows": RECV_INFO_ROWS,
        "kRecvInfoExpanded": RECV_INFO_EXPANDED,
        "kRecvInfoCounts": RECV_INFO_COUNTS,
        "kReducerWarps": reducer_warps,
        "kReducerThreads": 32 * reducer_warps,
        "kGridTimeoutNs": GRID_TIMEOUT_NS,
    }
    structs = (Call, LayoutParams, DispatchParams, CombineParams, BarrierParams)
    names = [field.name for field in _CONTROL_FIELDS]
    return "".join(
        [
            constants_source(constants),
            offsets_source(CONTROL_LAYOUT, names, "Control"),
            *(struct_source(struct) for struct in structs),
        ]
    )


# Kernel file -> its entry points and their params.
KERNELS: dict[str, dict[str, type[ctypes.Structure]]] = {
    "kernels/throughput_layout.cuh": {"throughput_layout": LayoutParams},
    "kernels/throughput_dispatch.cuh": {
        "throughput_dispatch_2": DispatchParams,
        "throughput_dispatch_4": DispatchParams,
    },
    "kernels/throughput_expert.cuh": {"throughput_dispatch_expert": DispatchParams},
    "kernels/throughput_combine.cuh": {
        f"throughput_combine_{layout}_{dtype}": CombineParams
        for layout in ("rank", "expert")
        for dtype in ("bf16", "f16", "f32")
    },
    "kernels/barrier.cuh": {"barrier": BarrierParams},
}
