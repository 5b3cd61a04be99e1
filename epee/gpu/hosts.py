"""The numbers and structs that the kernels of calls between hosts share with the cpu: arguments, state, routes.

The protocol is described in `csrc/kernels/hosts/words.cuh`; words of the page and slots in `link/proxy/words.py`. The
kernels use control blocks and common arguments of one host's throughput kernels (`params.py`): there a *rank* is the
position in the island, here a rank of all.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidArgument
from ..jit.params import PerRank, RankSized, constants_source, offsets_source, sized, struct_source
from ..link.proxy.words import (
    ABORT,
    CALL_BITS,
    CALL_SHIFT,
    CHUNKS,
    FOR_ONE,
    LINE_WORDS,
    LOST,
    ROW_SLOTS,
    ROWS,
    SIZE_BITS,
    UNIT_BYTES,
    WORD_BYTES,
    ProxyShape,
    island_topology,
)
from ..link.topology import Topology
from ..memory.layout import Field, Layout, align_up
from .params import MAX_EXPERTS, Call, kernel_head
from .ranks import MAX_LOCAL, MAX_RANKS, room_of

MAX_HOSTS = 16
MAX_OUTLETS = 32  # one for each thread of a warp
MAX_INLETS = 128
MAX_OUT_WORDS, MAX_IN_WORDS = 512, 2048  # slots of all outlets (or hosts: a dispatch counts by these), of all inlets
ROW_HEAD_WORDS = 4
ROW_ROOM = ROW_HEAD_WORDS + MAX_RANKS + MAX_HOSTS + MAX_EXPERTS
MAX_WORKERS = 10  # warps of a block that move rows; two more count and watch, so that a thread has 168 registers
PULL_RECORDS = 4  # adjacent records that a warp takes from a chunk at once
SUM_VECTORS = 7  # of 16 bytes, that a thread of a summing warp loads from a row at once
PULL_CHUNK_BITS = 26  # of `pull_order`, below the index of a source, which is less than `MAX_RANKS`
WATCH_ENDS_EVERY = 16  # reads of the proxy's progress for one of its end
BROKEN_STREAMS_CODE = 10  # as refusal: a call has failed after it had posted chunks
GAVE_UP_ROOMS = 8  # a rank whose calls fail waits for nobody: it may be so many calls ahead before its word is replaced
# Words of a handle's `info`: state, number of the view, rows, chunks to pull, number of the dispatch (that of its row,
# the same on all hosts), counts of local experts.
INFO_STATE, INFO_VIEW, INFO_ROWS, INFO_CHUNKS, INFO_CALL, INFO_COUNTS = range(6)

_WORD, _INT = ctypes.c_uint64, ctypes.c_int32


def _fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class Outlet(ctypes.Structure):
    """Addresses of the slots to send from to one partner, rank `rank`, and of their words; of chunks, then of rows.

    `inlet`: of the same partner.
    """

    _fields_ = (*_fields(_WORD, "data posted freed rows rows_posted rows_freed"), *_fields(_INT, "rank inlet"))


class Inlet(ctypes.Structure):
    """Addresses of the slots in which chunks of rank `rank` arrive, on the page of a rank of the island, and of words.

    `taken` are this rank's: one for each slot, as many words apart as the island has ranks. `lost` is the word of the
    first process, `partner` the bit in it; `position` that of the page's rank.
    """

    _fields_ = (
        *_fields(_WORD, "data arrived taken rows rows_arrived rows_taken lost"),
        *_fields(_INT, "rank partner position is_unused"),
    )


class HostRoutes(ctypes.Structure):
    """The placement and the streams, as a rank sees them; in device memory, so that graphs go on with another proxy.

    `first`: of the epoch's chunks and rows. `aborts`: words of the island's pages. `host_of`, `position`: by rank;
    `rank_at` by host and position, -1 for none. `gateway_outlet`: by host, -1 for the own one. `sources`: ranks of
    other hosts, ascending; `source_inlet`: by rank, where its records come. `served`: the sources whose gateway this
    rank is; `served_outlet` their outlets, `served_idx` their index by rank, -1 for others. `return_inlet`: by position
    and host, where the partial sums for that rank come.
    """

    _fields_ = (
        *_fields(_WORD, "first slot_bytes row_bytes"),
        ("outlets", Outlet * MAX_OUTLETS),
        ("inlets", Inlet * MAX_INLETS),
        ("aborts", _WORD * MAX_LOCAL),
        *_fields(_INT, "num_outlets num_inlets num_processes num_sources num_served is_unused"),
        ("host_of", _INT * MAX_RANKS),
        ("position", _INT * MAX_RANKS),
        ("rank_at", _INT * (MAX_HOSTS * MAX_LOCAL)),
        ("gateway_outlet", _INT * MAX_HOSTS),
        ("sources", _INT * MAX_RANKS),
        ("source_inlet", _INT * MAX_RANKS),
        ("served", _INT * MAX_OUTLETS),
        ("served_outlet", _INT * MAX_OUTLETS),
        ("served_idx", _INT * MAX_RANKS),
        ("return_inlet", _INT * (MAX_LOCAL * MAX_HOSTS)),
    )


class HostCall(RankSized):
    """First argument of every kernel.

    `state`: state blocks of the island's ranks as this GPU addresses them; `routes`: of `HostRoutes`; `experts`: the
    table of `experts.py`. The handle, all int32: `expert_of` [num_tokens, num_topk], physical experts; `rank_places`
    [num_tokens, num_ranks]: place among this rank's tokens for a rank, `host_records` [num_tokens, num_hosts]: number
    of the record for a host, -1 for none; `record_tokens` [num_hosts, max_tokens]; `counts` [num_ranks, num_ranks],
    `records` [num_ranks, num_hosts]: tokens by source; `row_base` [num_ranks + 1, ranks of the island]: where a
    source's rows begin there; `served_places` [served sources, max_tokens, ranks of the island]: places of the records
    that came to this gateway; `pull_order`: chunks, index of the source above `PULL_CHUNK_BITS` bits of chunk; `info`.
    `host`: this rank's.
    """

    members = (
        ("call", Call),
        ("state", PerRank(ctypes.c_uint64)),
        *_fields(_WORD, "routes experts expert_of rank_places host_records record_tokens counts records row_base"),
        *_fields(_WORD, "served_places pull_order info"),
        *_fields(_INT, "num_ranks num_hosts host num_tokens num_topk num_experts max_tokens chunk_records num_slots"),
        ("is_unused", _INT),
    )


class HostLayoutParams(RankSized):
    """Arguments of `layout_hosts`: one block.

    `topk_idx` int64 [num_tokens, num_topk]; `signature`: what all ranks agree on; `refused`: 0, or why this rank cannot
    make the call. `known_info`: of the handle of a dispatch that is made again, or 0; `mailbox`: pinned cpu memory that
    receives `info`, its state last, or 0; `grant`: the slot for the result, of `num_grants`. Dynamic shared memory:
    `layout_shared_bytes`.
    """

    members = (
        ("host", HostCall),
        *_fields(_WORD, "topk_idx known_info mailbox"),
        *_fields(_INT, "signature refused max_recv_rows grant num_grants is_unused"),
    )


class HostDispatchParams(RankSized):
    """Arguments of `dispatch_hosts`.

    `x`: rows, `x_stride` bytes apart; `topk_weights` float32 [num_tokens, num_topk], with `has_weights`; `scales`: of 4
    bytes, [num_tokens, num_scales], strides in such. `slots`: those of each rank of the island, `slot_bytes` each: rows
    of `row_bytes` at the start, other fields at the offsets. `max_island`: ranks of the largest island, from which
    `meta_bytes` follows. A row passes in pieces of `piece_bytes`, a multiple of
    16. Dynamic shared memory: `move_shared_bytes`.
    """

    members = (
        ("host", HostCall),
        *_fields(_WORD, "x topk_weights scales"),
        ("slots", PerRank(ctypes.c_uint64)),
        *_fields(_WORD, "slot_bytes topk_idx_offset weights_offset scales_offset src_token_offset"),
        *_fields(ctypes.c_int64, "x_stride scale_row_stride scale_column_stride"),
        *_fields(
            _INT, "row_bytes piece_bytes meta_bytes max_island num_pack_warps num_pull_warps has_weights num_scales"
        ),
    )


class HostCombineParams(RankSized):
    """Arguments of `combine_hosts_bf16`.

    `slots`: `num_slots` of each rank of the island, `slot_bytes` each, with up to `max_rows` rows; this rank's are in
    `slot`. `out`: [num_tokens, hidden], like `bias_0` and, where there is that one, `bias_1` (0: none). `refused`: 0,
    or why this rank cannot make the call: this breaks the streams. Islands of one rank need stages, in pieces of
    `piece_bytes`, for their packing warps.
    """

    members = (
        ("host", HostCall),
        ("slots", PerRank(ctypes.c_uint64)),
        *_fields(_WORD, "slot_bytes out bias_0 bias_1"),
        *_fields(_INT, "row_bytes piece_bytes max_rows num_pack_warps num_sum_warps slot num_slots refused"),
    )


def row_nbytes(num_ranks: int, num_hosts: int, num_experts: int) -> int:
    """Return the bytes of a row of counts."""
    return align_up(4 * (ROW_HEAD_WORDS + num_ranks + num_hosts + num_experts), UNIT_BYTES)


def meta_bytes(max_island: int, num_topk: int, num_scales: int = 0) -> int:
    """Return the bytes behind the row in a record: token, places, expert ids, weights, scales."""
    return align_up(4 * (1 + max_island + 2 * num_topk + num_scales), UNIT_BYTES)


def move_shared_bytes(num_flows: int, num_slots: int, num_staged_warps: int, stage_bytes: int) -> int:
    """Return the dynamic shared memory of a kernel that moves rows: `Progress` in `flows.cuh`, and two stages a warp.

    Args:
        num_flows: of the call, out and in. Dispatch: hosts, and ranks of other hosts. Combine: served sources, and
        hosts.
        num_slots: of a stream.
        num_staged_warps: warps that move rows by bulk copies.
        stage_bytes: a piece of a row, and what is behind it.
    """
    return align_up(num_flows * (32 + 12 * num_slots) + 4, 128) + 2 * num_staged_warps * stage_bytes


def layout_shared_bytes(num_threads: int, num_ranks: int, num_hosts: int, num_experts: int) -> int:
    """Return the dynamic shared memory of `layout_hosts`."""
    return 4 * ((num_threads // 32 + 1) * (num_ranks + num_hosts) + num_experts + 1)


@functools.cache
def state_layout() -> Layout:
    """Return the fields of a rank's state block: zeros at first, then numbers as `first_state` gives them."""
    words, ints = torch.int64, torch.int32
    return Layout(
        Field("rows", ints, (2, ROW_ROOM), 128),
        Field("row_ready", words, (2, MAX_LOCAL), 128),
        Field("combine_ready", words, (MAX_LOCAL,), 128),
        Field("gave_up", words, (GAVE_UP_ROOMS, MAX_LOCAL), 128),
        Field("next_row", words, (1,), 128),
        Field("next_out", words, (MAX_OUTLETS,)),
        Field("next_in", words, (MAX_INLETS,)),
        Field("broken", words, (1,)),
        Field("watched", words, (1,), 128),
        Field("ended", words, (1,), 128),
        Field("num_ended", ints, (1,), 128),
        Field("next_unit", ints, (1,), 128),
        Field("cursors", ints, (MAX_OUTLETS,), 128),
        Field("out_done", ints, (MAX_OUT_WORDS,), 128),
        Field("in_done", ints, (MAX_IN_WORDS,), 128),
        Field("copies", words, (MAX_OUT_WORDS + MAX_IN_WORDS,), 128),
    )


def begin_epoch(state: torch.Tensor, first: int) -> None:
    """Set the numbers of a state block, uint8, to those of an epoch; no kernel of the island may run."""
    layout = state_layout()
    for name, value in (("next_row", first), ("next_out", first), ("next_in", first), ("broken", 0)):
        field = layout[name]
        state[layout.offset(name) : layout.offset(name) + field.nbytes].view(field.dtype).fill_(value)


@functools.cache
def hosts_head(num_local: int, stall_one_in: int = 0) -> str:
    """Return the generated C++ in front of the kernels, for islands of `num_local` ranks."""
    constants = {
        "kMaxLocal": MAX_LOCAL,
        "kMaxHosts": MAX_HOSTS,
        "kMaxOutWords": MAX_OUT_WORDS,
        "kMaxWorkers": MAX_WORKERS,
        "kMoveThreads": 32 * (MAX_WORKERS + 2),
        "kPullRecords": PULL_RECORDS,
        "kSumVectors": SUM_VECTORS,
        "kPullChunkBits": PULL_CHUNK_BITS,
        "kLineWords": LINE_WORDS,
        "kWatchEndsEvery": WATCH_ENDS_EVERY,
        "kChunkSizeBits": SIZE_BITS,
        "kForOne": FOR_ONE,
        "kCallShift": CALL_SHIFT,
        "kCallBits": CALL_BITS,
        "kRefusalBytes": UNIT_BYTES,
        "kGaveUpRooms": GAVE_UP_ROOMS,
        "kRowSlots": ROW_SLOTS,
        "kRowRoom": ROW_ROOM,
        "kBrokenStreamsCode": BROKEN_STREAMS_CODE,
        "kInfoState": INFO_STATE,
        "kInfoView": INFO_VIEW,
        "kInfoRows": INFO_ROWS,
        "kInfoChunks": INFO_CHUNKS,
        "kInfoCall": INFO_CALL,
        "kInfoCounts": INFO_COUNTS,
    }
    structs = (Outlet, Inlet, HostRoutes, HostCall, HostLayoutParams, HostDispatchParams, HostCombineParams)
    layout = state_layout()
    return "".join(
        [
            kernel_head(num_local, 1, stall_one_in),
            constants_source(constants),
            offsets_source(layout, layout.names, "State"),
            *(struct_source(sized(struct, room_of(num_local))) for struct in structs),
        ]
    )


HOST_KERNELS: dict[str, dict[str, type[ctypes.Structure]]] = {
    "kernels/hosts/layout.cuh": {"layout_hosts": HostLayoutParams},
    "kernels/hosts/dispatch.cuh": {"dispatch_hosts": HostDispatchParams},
    "kernels/hosts/combine.cuh": {"combine_hosts_bf16": HostCombineParams},
}


@dataclass(frozen=True)
class PageAddresses:
    """The memory of one rank of the island and its proxy, as this GPU addresses it.

    Attributes:
        shape: of its proxy.
        page, staging: addresses.
    """

    shape: ProxyShape
    page: int
    staging: int


def make_routes(rank: int, islands: Sequence[Sequence[int]], pages: Sequence[PageAddresses], first: int) -> HostRoutes:
    """Return the routes of a rank.

    Args:
        rank: this one.
        islands: the ranks of each, ascending.
        pages: of the ranks of its island, by position.
        first: number of the epoch's first chunk and row.

    Raises:
        InvalidArgument: there are more ranks, hosts or streams than kernels have room for.
    """
    here = island_topology(rank, islands)
    routes = HostRoutes(first=first, slot_bytes=pages[0].shape.slot_bytes, row_bytes=pages[0].shape.row_bytes)
    views = [island_topology(peer, islands) for peer in here.here]
    num_inlets = sum(len(view.partners()) for view in views)
    num_slots = pages[0].shape.num_slots
    for name, count, most in (
        ("ranks", len(here.host_of), MAX_RANKS),
        ("islands", here.num_hosts, min(MAX_HOSTS, MAX_OUT_WORDS // num_slots)),
        ("ranks of an island", max(map(len, here.hosts)), MAX_LOCAL),
        ("partners of a rank", len(here.partners()), min(MAX_OUTLETS, MAX_OUT_WORDS // num_slots)),
        ("partners of an island", num_inlets, min(MAX_INLETS, MAX_IN_WORDS // num_slots)),
    ):
        if count > most:
            raise InvalidArgument(f"kernels serve at most {most} {name} (with {num_slots} slots), got {count}")
    _fill_topology(routes, here)
    routes.source_inlet[:], routes.return_inlet[:] = [-1] * MAX_RANKS, [-1] * (MAX_LOCAL * MAX_HOSTS)
    own = pages[here.here.index(rank)]
    routes.num_processes, routes.num_outlets, routes.num_inlets = own.shape.num_processes, len(here.partners()), 0
    for index, partner in enumerate(here.partners()):
        routes.outlets[index] = _outlet(own, index, partner)
    for position, (page, view) in enumerate(zip(pages, views, strict=True)):
        routes.aborts[position] = page.page + WORD_BYTES * ABORT
        gateways = {peer: host for host, peer in view.gateways().items()}
        for index, partner in enumerate(view.partners()):
            routes.inlets[routes.num_inlets] = _inlet(page, index, partner, here.here.index(rank))
            routes.inlets[routes.num_inlets].position = position
            if page is own:
                routes.outlets[index].inlet = routes.num_inlets
            if partner in view.sources():
                routes.source_inlet[partner] = routes.num_inlets
            if partner in gateways:
                routes.return_inlet[position * MAX_HOSTS + gateways[partner]] = routes.num_inlets
            routes.num_inlets += 1
    return routes


def _fill_topology(routes: HostRoutes, here: Topology) -> None:
    partners = here.partners()
    for host, ranks in enumerate(here.hosts):
        for position in range(MAX_LOCAL):
            routes.rank_at[host * MAX_LOCAL + position] = ranks[position] if position < len(ranks) else -1
        for position, peer in enumerate(ranks):
            routes.host_of[peer], routes.position[peer] = host, position
        gateway = here.gateways().get(host)
        routes.gateway_outlet[host] = -1 if gateway is None else partners.index(gateway)
    routes.served_idx[:] = [-1] * MAX_RANKS
    routes.num_sources, routes.num_served = len(here.elsewhere), len(here.sources())
    for index, peer in enumerate(here.elsewhere):
        routes.sources[index] = peer
    for index, peer in enumerate(here.sources()):
        routes.served[index], routes.served_outlet[index], routes.served_idx[peer] = peer, partners.index(peer), index


def _outlet(own: PageAddresses, index: int, partner: int) -> Outlet:
    shape, data = own.shape, own.staging + own.shape.out_offset(index)
    at = [[own.page + WORD_BYTES * word for word in shape.stream_words(index, kind)] for kind in (CHUNKS, ROWS)]
    return Outlet(
        data=data + shape.base(CHUNKS),
        posted=at[0][0],
        freed=at[0][1],
        rows=data + shape.base(ROWS),
        rows_posted=at[1][0],
        rows_freed=at[1][1],
        rank=partner,
    )


def _inlet(page: PageAddresses, index: int, partner: int, reader: int) -> Inlet:
    shape, data = page.shape, page.staging + page.shape.in_offset(index)
    at = [[page.page + WORD_BYTES * word for word in shape.stream_words(index, kind)] for kind in (CHUNKS, ROWS)]
    return Inlet(
        data=data + shape.base(CHUNKS),
        arrived=at[0][2],
        taken=at[0][3] + WORD_BYTES * reader,
        rows=data + shape.base(ROWS),
        rows_arrived=at[1][2],
        rows_taken=at[1][3] + WORD_BYTES * reader,
        lost=page.page + WORD_BYTES * (shape.process_words(0) + LOST),
        rank=partner,
        partner=index,
    )
