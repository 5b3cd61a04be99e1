"""Calls between hosts on GPUs: the memory, handles and launches that differ from those of one host.

Data path of a dispatch: `layout_hosts` counts, sends its row of counts to all ranks and awaits theirs; `dispatch_hosts`
moves rows, those of this island from GPU to GPU, others by the proxies (`csrc/kernels/hosts`). A combine is one kernel.
Both kinds use slots of the `Machine`, whose memory the ranks of an island (here: of a host) lend to each other.

    who            writes                                       orders it
    own kernels    rows into slots of the island, chunks into   words in control and state blocks; `posted`
                   own staging
    proxies        chunks into the staging of their partners    `arrived`, `freed` on pages (`link/proxy/words.py`)
    this CPU       arguments, before a launch                   the launch
    kernels        reports, mailbox, `exchanged`                release to the system; the CPU polls

A dispatch by a handle is made anew with the handle's experts: its rows are counted again, and have the places that they
had. Results of full capacity (`sync=False`) get their -1 behind the last row by operations of torch behind the kernels.

A crash leaves what the kernels' sources say: chunks that are not announced. A call that fails after it may have posted
a chunk ends the streams, and with them the buffer: its next calls fail on all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ....errors import UnsupportedError
from ....gpu.hosts import (
    HOST_KERNELS,
    INFO_COUNTS,
    INFO_ROWS,
    MAX_WORKERS,
    begin_epoch,
    hosts_head,
    layout_shared_bytes,
    meta_bytes,
    move_shared_bytes,
    row_nbytes,
    state_layout,
)
from ....gpu.hosts_report import describe
from ....gpu.island import Island, Secret, StreamSizes
from ....gpu.lent import AllGather
from ....gpu.platform import Platform
from ....gpu.shapes import BULK_BYTES, LaunchShape, Limits, ThroughputConfig, chunk_of
from ....memory.fresh import allocator
from ....memory.layout import align_up
from ..gpu_handle import CudaHandle
from .combine import Brought, CheckedCombine
from .dispatch import DispatchPlan, Expanded, Part, Payload, signature_of
from .machine import Machine
from .shape import Shape
from .types import ThroughputHandle

CHUNK_RECORDS = 128
SLOTS_OF_TWO, SLOTS_OF_MORE = 8, 4  # of a stream, for two hosts and for more
DISPATCH_WARPS = MAX_WORKERS // 2, MAX_WORKERS // 2  # packers, and those of the other role
COMBINE_WARPS = 2, MAX_WORKERS - 2
_LEAST_PIECE = 1024  # bytes: fewer warps rather than smaller pieces of a row
_HANDLE = "expert_of rank_places host_records record_tokens counts records row_base served_places pull_order info"


class HostsMachine(Machine):
    """The parts of a rank's GPU side of a buffer over hosts. Ranks are counted in its island where memory is lent.

    Args:
        platform, config: as of `Machine`; `config` has the islands.
        all_gather: returns the bytes of all ranks of the job.
        secret, address, timeout_s, interrupt: as of `Island`.

    Attributes:
        island: proxies and routes.
    """

    kernels = HOST_KERNELS
    describe = staticmethod(describe)

    def __init__(
        self,
        platform: Platform,
        config: ThroughputConfig,
        all_gather: AllGather,
        secret: Secret,
        address: str,
        timeout_s: float,
        interrupt: Any,
    ) -> None:
        def gather_here(data: bytes) -> list[bytes]:
            """Return the bytes of the ranks of this island."""
            told = all_gather(data)
            return [told[rank] for rank in config.island]

        super().__init__(platform, config, gather_here)
        self.max_island, num_hosts = max(map(len, config.islands)), len(config.islands)
        self._state = self._lending.meet(None, state_layout().nbytes, gather_here).regions
        begin_epoch(self._state[config.position].lease(0, state_layout().nbytes, None), 0)
        platform.synchronize()
        record = 2 * config.hidden + meta_bytes(self.max_island, config.num_topk)
        self.streams = StreamSizes(
            SLOTS_OF_TWO if num_hosts == 2 else SLOTS_OF_MORE,
            min(CHUNK_RECORDS, config.max_tokens) * record,
            row_nbytes(config.num_ranks, num_hosts, config.num_experts),
        )
        rest = config.islands, self.streams, secret, address, all_gather, timeout_s, interrupt
        try:
            self.island = Island(platform, config.rank, *rest)
        except BaseException:
            self.close()
            raise
        for kernel in self.device.kernels.values():
            self._set_hosts(kernel.args)

    def _head(self) -> str:
        return hosts_head(len(self.config.island), self.platform.limits.stall_one_in)

    def _set_hosts(self, args: Any) -> None:
        """Fill in what no call between hosts changes."""
        config, host = self.config, args.host
        for position, region in enumerate(self._state):
            host.state[position] = region.address
        host.routes, host.host = self.island.routes.data_ptr(), self.island.topology.host
        host.experts = self.experts.data_ptr()
        host.num_ranks, host.num_hosts = config.num_ranks, len(config.islands)
        host.max_tokens, host.num_slots = config.max_tokens, self.streams.num_slots
        if hasattr(args, "slots"):
            for position, region in enumerate(self.slots):
                args.slots[position] = region.address
            args.slot_bytes = config.slot_bytes

    def launch_written(self, stage: Any, stream: int, is_first: bool = False) -> None:
        """As `Machine.launch_written`; wakes the proxy."""
        if is_first:
            self.island.wake()
        super().launch_written(stage, stream, is_first)

    def _news(self) -> list[int]:
        here = [rank for position, rank in enumerate(self.config.island) if self.device.is_marked(position)]
        return sorted([*here, *self.island.lost()])

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory, and of the CPU's memory through which rows go to other hosts."""
        return self._lending.nbytes + self.island.proxy.staging.mapped_bytes + self.island.proxy.page.mapped_bytes

    def close(self) -> None:
        """As `Machine.close`; ends the proxy. No kernel of this rank runs."""
        super().close()
        island = getattr(self, "island", None)  # its construction may have failed
        if island is not None:
            island.close()


@dataclass(frozen=True)
class HostsSpace:
    """Element offsets of the parts of a handle in its one int32 tensor.

    `send_prefix` is what kernels between hosts call `rank_places`, `recv_info` their `info`: names of one host's.
    """

    expert_of: int
    send_prefix: int
    host_records: int
    record_tokens: int
    counts: int
    records: int
    row_base: int
    served_places: int
    pull_order: int
    recv_info: int
    total: int

    @property
    def recv_slots(self) -> int:
        """(token, k) pairs of each local expert: a part of `recv_info`."""
        return self.recv_info + INFO_COUNTS

    @cached_property
    def read_at(self) -> tuple[int, ...]:
        """Byte offsets of the parts in the order of `HostCall`, of which `HandleForm` knows as many as one host has."""
        return tuple(4 * getattr(self, name) for name in list(self.__dataclass_fields__)[:7])

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offsets of all parts, as `HostCall` has them."""
        return tuple(4 * getattr(self, name) for name in self.__dataclass_fields__ if name != "total")


def space_of(machine: HostsMachine, num_tokens: int, chunk_records: int) -> HostsSpace:
    """Lay out the handle of a dispatch of `num_tokens` tokens, in chunks of so many records."""
    config, topology = machine.config, machine.island.topology
    num_ranks, num_hosts, num_local = config.num_ranks, len(config.islands), len(config.island)
    sizes = (
        num_tokens * config.num_topk,
        num_tokens * num_ranks,
        num_tokens * num_hosts,
        num_hosts * config.max_tokens,
        num_ranks * num_ranks,
        num_ranks * num_hosts,
        (num_ranks + 1) * num_local,
        max(1, len(topology.sources())) * config.max_tokens * num_local,
        len(topology.elsewhere) * -(-config.max_tokens // chunk_records),
        INFO_COUNTS + config.num_local_experts,
    )
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + align_up(size, 4))
    return HostsSpace(*offsets)


def _handle_writer(args: Any) -> Any:
    """Return a function that writes the addresses of a handle's parts into the arguments of a kernel."""
    first = type(args).host.offset + getattr(type(args.host), _HANDLE.split()[0]).offset
    form, words = struct.Struct(f"={len(_HANDLE.split())}Q"), memoryview(args).cast("B")

    def write(core: ThroughputHandle) -> None:
        """Write those of this handle."""
        base = core.words.data_ptr()
        form.pack_into(words, first, *(base + offset for offset in core.space.offsets))  # type: ignore[attr-defined]

    return write


def move_shape(
    row_bytes: int,
    behind: int,
    num_flows: int,
    num_slots: int,
    warps: tuple[int, int],
    num_staged_roles: int,
    grid: int,
    limits: Limits,
) -> tuple[LaunchShape, tuple[int, int]]:
    """Return the launch of a kernel that moves rows, in pieces of `chunk_bytes`, and its warps of each role.

    Args:
        row_bytes, behind: of a row, and of what is behind it in a record.
        num_flows, num_slots: of the call, of a stream.
        warps: of each role, at most.
        num_staged_roles: of these, the first ones, whose warps move rows by bulk copies.
        grid: blocks.
        limits: of the GPU.
    """
    fixed = move_shared_bytes(num_flows, num_slots, 0, 0)
    counts = [min(count, limits.max_warps) for count in warps]
    while True:
        staged = sum(counts[:num_staged_roles])
        room = (limits.shared_bytes - fixed) // (2 * staged) - behind
        if staged == num_staged_roles or room >= min(row_bytes, _LEAST_PIECE):
            break
        counts = [max(1, count - 1) for count in counts]
    piece = chunk_of(row_bytes, max(BULK_BYTES, room // BULK_BYTES * BULK_BYTES))
    shared_bytes = move_shared_bytes(num_flows, num_slots, staged, min(piece, row_bytes) + behind)
    return LaunchShape(grid, 32 * (sum(counts) + 2), shared_bytes, piece, 2), (counts[0], counts[1])


class HostsDispatchPlan(DispatchPlan):
    """The launches of dispatches between hosts with equal checked; as a `DispatchPlan`.

    Args:
        shape: of the calls, on a `HostsMachine`.
        checked: of the calls.
    """

    _shape: Shape

    def _space(self, config: ThroughputConfig, num_tokens: int) -> HostsSpace:
        machine, checked = self._shape.machine, self.checked
        assert isinstance(machine, HostsMachine)
        self._behind = meta_bytes(machine.max_island, config.num_topk, checked.num_scales)
        self._chunk_records = machine.streams.slot_bytes // (checked.row_bytes + self._behind)
        assert self._chunk_records >= 1, checked
        return space_of(machine, num_tokens, self._chunk_records)

    def _set_stages(self) -> None:
        shape, checked, machine, config = self._shape, self.checked, self._shape.machine, self._shape.config
        assert isinstance(machine, HostsMachine)
        limits, topology, num_hosts = machine.platform.limits, machine.island.topology, len(config.islands)
        threads = 32 * min(16, limits.max_warps)
        shared_bytes = layout_shared_bytes(threads, config.num_ranks, num_hosts, config.num_experts)
        self._first = shape.stage("layout_hosts", LaunchShape(1, threads, shared_bytes, 0, 0))
        flows, slots = num_hosts + len(topology.elsewhere), machine.streams.num_slots
        grid = machine.num_sms(checked.num_sms)
        launch, warps = move_shape(checked.row_bytes, self._behind, flows, slots, DISPATCH_WARPS, 2, grid, limits)
        self._move = self._payload = shape.stage("dispatch_hosts", launch)
        layout, move = self._first.args, self._move.args
        for part in (layout, move):
            part.host.num_tokens, part.host.chunk_records = checked.num_tokens, self._chunk_records
        layout.signature, layout.num_grants = signature_of(checked), config.num_slots + 1
        layout.max_recv_rows = self.most_rows
        offsets = shape.offsets
        move.topk_idx_offset, move.weights_offset = offsets["topk_idx"], offsets["topk_weights"]
        move.scales_offset, move.src_token_offset = offsets["scales"], offsets["src_token"]
        move.x_stride, move.num_scales = checked.row_stride, checked.num_scales
        if checked.num_scales:
            move.scale_row_stride, move.scale_column_stride = checked.scale_strides
        move.row_bytes, move.piece_bytes, move.meta_bytes = checked.row_bytes, launch.chunk_bytes, self._behind
        move.max_island, move.has_weights = machine.max_island, int(checked.has_weights)
        move.num_pack_warps, move.num_pull_warps = warps
        self._write_handles = [_handle_writer(part) for part in (layout, move)]

    def _launch(
        self,
        payload: Payload,
        handle: ThroughputHandle,
        route: torch.Tensor | None,
        part: Part,
        expanded: Expanded | None,
        timeout_s: float,
        stream: int,
    ) -> None:
        """As `DispatchPlan._launch`; a call by a handle is counted anew, with the handle's experts."""
        machine, layout, move = self._shape.machine, self._first.args, self._move.args
        (x, scales, weights), (slot, mailbox, refused), checked = payload, part, self.checked
        core, known = handle, 0
        if not (self._is_fresh or refused):
            known = handle.recv_info.data_ptr()
            route = handle.part("expert_of", checked.num_tokens * self.num_topk).to(torch.int64)
            core = self.new_handle(0)
        for write in self._write_handles:
            write(core)
        number = 0 if machine.is_capturing else machine.num_calls + 1
        for stage in (self._first, self._move):
            stage.call.ordinal, stage.call.timeout_ns = number, int(timeout_s * 1e9)
        layout.topk_idx = 0 if route is None else route.data_ptr()
        layout.known_info, layout.mailbox, layout.grant, layout.refused = known, mailbox, slot, refused
        move.x, move.scales = x.data_ptr(), 0 if scales is None else scales.data_ptr()
        move.topk_weights = 0 if weights is None else weights.data_ptr()
        machine.launch_written(self._first, stream, is_first=True)
        machine.launch_written(self._move, stream)
        if not (checked.is_exact or refused) and self._has_ids:
            self._fill_tail(core, slot)

    @property
    def _has_ids(self) -> bool:
        return self._fields.topk_idx is not None

    def _fill_tail(self, core: ThroughputHandle, slot: int) -> None:
        """Write -1 for the experts of rows behind the last one."""
        machine, config = self._shape.machine, self._shape.config
        at, nbytes = slot * config.slot_bytes + self._shape.offsets["topk_idx"], 8 * self.most_rows * self.num_topk
        ids = machine.slots[config.position].lease(at, nbytes, None).view(torch.int64).view(-1, self.num_topk)
        rows = torch.arange(self.most_rows, dtype=torch.int32, device=ids.device)
        ids.masked_fill_((rows >= core.recv_info[INFO_ROWS])[:, None], -1)

    def _wait_counts(self, handle: ThroughputHandle, mailbox: int, timeout_s: float) -> None:
        super()._wait_counts(handle, mailbox, timeout_s)
        counts, alignment = handle.num_tokens_per_expert, self.checked.expert_alignment
        assert counts is not None
        handle.num_tokens_per_expert = [align_up(count, alignment) for count in counts]


class HostsCombinePlan:
    """The launches of combines between hosts with equal checked; as a `CombinePlan`.

    Args:
        shape: of the calls, on a `HostsMachine`.
        checked: of the calls.
    """

    new_weights = None

    def __init__(self, shape: Shape, checked: CheckedCombine) -> None:
        machine, config = shape.machine, shape.config
        assert isinstance(machine, HostsMachine)
        self._machine, self.max_sms, self._checked = machine, machine.max_sms, checked
        self.new_out = allocator((checked.num_tokens, config.hidden), checked.dtype, machine.platform.device)
        row_bytes, topology = config.hidden * checked.dtype.itemsize, machine.island.topology
        flows, slots = len(topology.sources()) + len(config.islands), machine.streams.num_slots
        grid, limits = machine.num_sms(checked.num_sms), machine.platform.limits
        wanted = COMBINE_WARPS if len(config.island) == 1 else DISPATCH_WARPS  # packers of others sum as well
        launch, warps = move_shape(row_bytes, 0, flows, slots, wanted, 1, grid, limits)
        self._stage = shape.stage("combine_hosts_bf16", launch)
        a = self._stage.args
        a.host.num_tokens = checked.num_tokens
        a.host.chunk_records = self._chunk_records = machine.streams.slot_bytes // row_bytes
        a.row_bytes, a.piece_bytes = row_bytes, launch.chunk_bytes
        a.max_rows, a.num_slots = config.max_recv_rows, config.num_slots + 1
        a.num_pack_warps, a.num_sum_warps = warps
        self._write_handle = _handle_writer(a)

    def start(
        self,
        brought: Brought,
        handle: ThroughputHandle,
        slot: int,
        out: torch.Tensor,
        out_weights: torch.Tensor | None,
        timeout_s: float,
        stream: int,
    ) -> None:
        """Launch a combine of rows that lie in `slot` or are copied there, into `out`."""
        machine, (y, _, bias) = self._machine, brought
        if self._checked.is_copied:
            config = machine.config
            to = machine.slots[config.position].address + slot * config.slot_bytes
            machine.platform.copy(to, y.data_ptr(), y.nbytes, stream)
        self._launch(handle, slot, 0, timeout_s, stream, out, bias)

    def refuse(self, code: int, timeout_s: float, stream: int) -> None:
        """Take part only to report to the peers why this rank has no combine. The buffer serves no call after it."""
        machine = self._machine
        space = space_of(machine, 0, self._chunk_records)
        words = torch.zeros(space.total, dtype=torch.int32, device=machine.platform.device)
        handle = ThroughputHandle(0, "rank", 1, 0, space, words, True, False)  # type: ignore[arg-type]
        self._launch(handle, 0, code, timeout_s, stream)

    def _launch(
        self,
        handle: ThroughputHandle,
        slot: int,
        refused: int,
        timeout_s: float,
        stream: int,
        out: torch.Tensor | None = None,
        bias: Sequence[torch.Tensor] = (),
    ) -> None:
        machine, a, call = self._machine, self._stage.args, self._stage.call
        self._write_handle(handle)
        call.ordinal = 0 if machine.is_capturing else machine.num_calls + 1
        call.timeout_ns = int(timeout_s * 1e9)
        a.out = 0 if out is None else out.data_ptr()
        a.bias_0 = bias[0].data_ptr() if bias else 0
        a.bias_1 = bias[1].data_ptr() if len(bias) > 1 else 0
        a.slot, a.refused = slot, refused
        machine.launch_written(self._stage, stream, is_first=True)


class HostsHandle(CudaHandle):
    """The handle of a dispatch between hosts."""

    @property
    def _tokens(self) -> torch.Tensor:
        count = self.num_ranks
        return self.core.part("counts", count * count).view(count, count)

    @property
    def _counts(self) -> torch.Tensor:
        """`[num_local_experts]` int32: pairs of each local expert, rounded up."""
        counts, alignment = self.recv_slots, self.expert_alignment
        return counts if alignment == 1 else (counts + (alignment - 1)) // alignment * alignment

    @property
    def recv_counts(self) -> torch.Tensor:
        """As `CudaHandle.recv_counts`."""
        info = self.core.recv_info
        return torch.cat([info[INFO_ROWS : INFO_ROWS + 1], self._counts])

    @property
    def slot_ends(self) -> torch.Tensor:
        """As `CudaHandle.slot_ends`."""
        return self._counts.cumsum(0, dtype=torch.int32)

    @property
    def token_ends(self) -> torch.Tensor:
        """As `CudaHandle.token_ends`."""
        return self._tokens[:, self.rank].cumsum(0, dtype=torch.int32)

    @property
    def source_tokens(self) -> torch.Tensor:
        """Raise: no kernel keeps them."""
        raise UnsupportedError("source_tokens of a dispatch over several hosts on GPUs is not kept; gather len(x)")
