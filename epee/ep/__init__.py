"""Expert parallelism: dispatch and combine.

Users find `Buffer`, `LatencyBuffer`, handles and results at `epee`. The other names are for the drop-in layers in
`epee.compat`, which import nothing below this module: they have other libraries' names and shapes, and no protocol of
their own. `BufferPool` makes the buffers that their calls need, and exchanges their sizes with the other ranks; `Need`,
`LatencyNeed` and `Wish` describe the needs of a call. Code outside of epee should not rely on these names.
"""

from __future__ import annotations

from ..gpu.event import current_stream, recorded_on, wait_on
from ..gpu.layout import count_layout, load_counter
from ..gpu.payload import PAYLOAD_DTYPES
from ..gpu.report import NoRoomError
from .buffer import Buffer
from .handle import Combined, CpuHandle, Dispatched, Handle, Payload
from .latency.buffer import LatencyBuffer
from .latency.types import LatencyCombined, LatencyDispatched, LatencyHandle
from .members.bootstrap import group_device, group_failures, group_of, hosts_of, timeout_of
from .plans import NO_FACTS, checked_topk
from .pool.maps import check_map, clipped_counts, dense_weights, map_of, most_experts, num_left_out, topk_of_map
from .pool.needs import LatencyNeed, Need, Wish, latency_bytes
from .pool.pool import BufferPool
from .pool.throughput import MemoryBytes, Room, memory_for
from .streams import CallStream, is_capturing
from .throughput.hosts.layout import network_bytes
from .throughput.order import CombineOrder
from .throughput.placement import check_topk_idx

__all__ = [
    "NO_FACTS",
    "PAYLOAD_DTYPES",
    "Buffer",
    "BufferPool",
    "CallStream",
    "CombineOrder",
    "Combined",
    "CpuHandle",
    "Dispatched",
    "Handle",
    "LatencyBuffer",
    "LatencyCombined",
    "LatencyDispatched",
    "LatencyHandle",
    "LatencyNeed",
    "MemoryBytes",
    "Need",
    "NoRoomError",
    "Payload",
    "Room",
    "Wish",
    "check_map",
    "check_topk_idx",
    "checked_topk",
    "clipped_counts",
    "count_layout",
    "current_stream",
    "dense_weights",
    "group_device",
    "group_failures",
    "group_of",
    "hosts_of",
    "is_capturing",
    "latency_bytes",
    "load_counter",
    "map_of",
    "memory_for",
    "most_experts",
    "network_bytes",
    "num_left_out",
    "recorded_on",
    "timeout_of",
    "topk_of_map",
    "wait_on",
]
