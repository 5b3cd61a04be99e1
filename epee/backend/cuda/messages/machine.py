"""Launches of the message kernels on one rank: memory, the split of a batch into channels, the words of pairs. No
groups.

Data path: `csrc/kernels/message/batch.cuh`. This module owns the lent region and, in its `GpuDevice`, the words in cpu
memory. A call returns when its kernel is queued. Kernels of the same pair and direction must run one after the other:
the caller orders the streams (`streams.py`). A graph records nothing but launches: counts and the addresses of peers
are read from memory.

A pair of ranks exists from `connect` on, with all words zero; `reset` clears it, while nothing of the pair is
unfinished on either rank (`pairs.py` ensures that).

Ranks may join: the words of pairs have room for all ranks of an NVLink domain, and for a rank beyond those of the
beginning this one lends a ring of its own (`lend_ring`).

The platform is `ep.gpu.platform.CudaPlatform`, or the tests' emulation.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ....errors import ProtocolError, UnsupportedError
from ....gpu.device import GpuDevice
from ....gpu.platform import LentRegion, MappedWords, Platform
from ....gpu.ranks import MAX_LOCAL
from .params import KERNELS, MAX_CHANNELS, OP_WORDS, OPS_INSIDE, THREADS, MessageConfig, MessageParams, kernel_head

ANY = -1


class Parcel(NamedTuple):
    """A send or a receive of contiguous GPU memory.

    Attributes:
        peer: the other rank, `ANY` of a receive from any source.
        dtype: its number, which both ends must have.
    """

    is_send: bool
    peer: int
    at: int
    nbytes: int
    tag: int
    dtype: int


class Queued(NamedTuple):
    """A launch.

    Attributes:
        more: its operations beyond the first ones, kept alive until it has ended.
        source: the word of the rank that a receive from any source has found; likewise.
        ticket: its number, 0 in a graph; see `Messages.is_lost`.
    """

    more: MappedWords | None
    source: MappedWords | None
    ticket: int


_WORDS, _BLOCKS, _TIME = struct.Struct("=QqQQ"), struct.Struct("=i"), struct.Struct("=QQ")
_WORDS_AT, _BLOCKS_AT, _TIME_AT = (getattr(MessageParams, name).offset for name in ("ops", "blocks", "timeout_ns"))


class MessagePlan(NamedTuple):
    """The numbers of blocks that kernels take; a rank's own, peers may have others. The first two in this order.

    Attributes:
        alone: of a message on the caller's stream.
        beside: of one on a stream of its own, beside which others may run.
        batch: of all channels of a batch together; each has one at least.
    """

    alone: int
    beside: int
    batch: int


def plan_of(num_ranks: int, num_sharing: int) -> MessagePlan:
    """Return the plan for a GPU that `num_sharing` ranks use.

    All that may wait at the same time (a stream for each peer and direction, one of batches, the caller's) takes 256
    resident blocks, of which an H100 has 264.
    """
    part = max(1, num_sharing)
    return MessagePlan(
        _power_below(64 // part), _power_below(max(1, 32 // max(1, num_ranks - 1)) // part), max(1, 128 // part)
    )


def _power_below(count: int) -> int:
    """Return the largest power of two up to `count`, at least 1, so that lanes are distributed evenly."""
    return 1 << (max(1, count).bit_length() - 1)


class ReadyBatch:
    """The launch of batches that differ in addresses only.

    Args:
        machine: whose batches they are.
        kernel: with its own arguments, complete except for addresses.
        grid: blocks.
        places: index of each parcel's address among the operations' words.
    """

    def __init__(self, machine: Messages, kernel: Any, grid: int, places: Sequence[int]) -> None:
        self._machine, self._kernel, self._grid, self._places = machine, kernel, grid, places
        self._ops = kernel.args.ops  # the words themselves
        self.plan = machine.plan

    def launch(self, addresses: Sequence[int], stream: int) -> Queued:
        """Queue a batch with these addresses of its parcels, in their order; no graph is recorded."""
        ops, machine = self._ops, self._machine
        for place, at in zip(self._places, addresses, strict=True):
            ops[place] = at
        ticket = machine.ticket = machine.ticket + 1
        _TIME.pack_into(self._kernel.args, _TIME_AT, int(machine.timeout_s * 1e9), ticket)
        self._kernel(self._grid, machine.threads, 0, stream)
        return Queued(None, None, ticket)


class Messages:
    """The messages of one rank with its peers.

    Args:
        platform: the GPU.
        config: sizes, but for the number of ranks equal on all of them.
        plan: a `MessagePlan`.
        stall_one_in: for stress tests, as in `ep.gpu.params.kernel_head`.

    Attributes:
        device: reports, notifications to kernels.
        timeout_s: of one wait of a kernel.
        skips_dead: a receive from any source continues without the dead.
        ticket: number of the last launch that no graph has recorded.
    """

    def __init__(
        self, platform: Platform, config: MessageConfig, plan: MessagePlan | None = None, stall_one_in: int = 0
    ) -> None:
        config.check()
        self.config, self.platform = config, platform
        self.plan = plan or plan_of(config.num_ranks, 1)
        self.threads = THREADS
        self.timeout_s = 10.0
        self.skips_dead = False
        self.device = GpuDevice(platform, kernel_head(stall_one_in), KERNELS, num_reports=MAX_LOCAL)
        self._own = platform.create(config.region_layout.nbytes)
        self._side = torch.cuda.Stream(platform.device) if platform.device.type == "cuda" else None
        self._regions: list[LentRegion | None] = [None] * MAX_LOCAL
        self._rings_here: dict[int, LentRegion] = {}  # of ranks that have joined later
        self._rings_there: dict[int, LentRegion] = {}  # this rank's, where it has joined later
        self._singles: dict[tuple[int, bool], Any] = {}
        self._failed = platform.mapped_words(MAX_CHANNELS)
        self._lost: dict[int, list[range]] = {}  # tickets, by pair and direction, of losses followed by a meeting
        self.ticket = 0
        for kernel in self.device.kernels.values():
            args = kernel.args
            args.own, args.report, args.abort = self._own.address, self.device.report.address, self.device.news.address
            args.failed = self._failed.address
            args.rank, args.num_ranks = config.rank, config.num_ranks
            args.num_lanes, args.num_slots = config.num_lanes, config.num_slots
            args.slot_bytes, args.lane_bytes = config.slot_bytes, config.lane_bytes
        self._store("rings_here", 0, [self._ring_in(self._own, rank) for rank in range(config.num_ranks)])

    @property
    def blob(self) -> bytes:
        """Bytes with which other processes map this rank's memory."""
        return self._own.blob

    def _ring_in(self, region: LentRegion, source: int) -> int:
        return region.address + self.config.region_layout.offset("rings") + source * self.config.ring_bytes

    # --- calls

    def run(self, parcels: Sequence[Parcel], stream: int, is_beside: bool) -> Queued:
        """Queue sends and receives as one kernel, which makes all of them concurrently.

        Args:
            parcels: those of one pair and direction in the order in which they are matched; none from any source.
            stream: raw.
            is_beside: other messages may be unfinished on other streams.
        """
        if len(parcels) == 1:
            return self.run_one(parcels[0], stream, is_beside)
        self.device.require_open()
        kernel = self.device.kernels["message_batch"]
        more, grid, _ = self._fill(kernel.args, parcels, is_beside)
        ticket = self._number(kernel.args)
        kernel(grid, self.threads, 0, stream)
        return Queued(more, None, ticket)

    def ready(self, parcels: Sequence[Parcel], is_beside: bool) -> ReadyBatch:
        """Return a launcher of batches that differ from this one in addresses only, `OPS_INSIDE` parcels at most."""
        kernel = self.device.kernels["message_batch"].bind()
        _, grid, places = self._fill(kernel.args, parcels, is_beside)
        return ReadyBatch(self, kernel, grid, places)

    def _fill(self, args: Any, parcels: Sequence[Parcel], is_beside: bool) -> tuple[MappedWords | None, int, list[int]]:
        """Write a batch into arguments; returns memory to keep, the blocks, the index of each parcel's address."""
        channels: dict[int, list[int]] = {}
        for number, parcel in enumerate(parcels):
            channels.setdefault(parcel.peer << 1 | parcel.is_send, []).append(number)
        ordered = [number for channel in channels.values() for number in channel]
        more = self._write(args, [parcels[number] for number in ordered])
        begin = 0
        for number, (channel, ops) in enumerate(channels.items()):
            args.channels[number], args.begins[number] = channel, begin
            begin += len(ops)
        args.begins[len(channels)] = begin
        limit = self.plan.batch // len(channels)
        if len(channels) == 1:
            limit = min(limit, self.plan.beside if is_beside else self.plan.alone)
        lanes = max(self.config.lanes_of(parcel.nbytes) for parcel in parcels)
        args.num_channels, args.blocks = len(channels), min(_power_below(limit), lanes)
        places = [0] * len(parcels)
        for place, number in enumerate(ordered):
            places[number] = OP_WORDS * place
        return more, args.blocks * len(channels), places

    def _number(self, args: Any) -> int:
        """Assign a launch its ticket; returns it."""
        ticket = self.next_ticket()
        _TIME.pack_into(args, _TIME_AT, int(self.timeout_s * 1e9), ticket)
        return ticket

    def next_ticket(self) -> int:
        """Return the number of the next launch; 0 while a graph is recorded, as it may run many times."""
        if self.platform.is_capturing():
            return 0
        self.ticket += 1
        return self.ticket

    def run_one(self, parcel: Parcel, stream: int, is_beside: bool) -> Queued:
        """Queue one message; its pair and direction have their own launcher, in which little has to be written."""
        is_send, peer, *words = parcel
        if self.device.is_closed:
            self.device.require_open()
        single = self._singles.get((peer, is_send))
        if single is None:
            single = self._singles[peer, is_send] = self.device.kernels["message_batch"].bind()
            single.args.channels[0], single.args.num_channels = peer << 1 | is_send, 1
            single.args.begins[0], single.args.begins[1] = 0, 1
        lanes, most = -(-parcel.nbytes // self.config.lane_bytes) or 1, self.plan[is_beside]
        blocks = min(lanes, most, self.config.num_lanes)
        _WORDS.pack_into(single.args, _WORDS_AT, *words)
        _BLOCKS.pack_into(single.args, _BLOCKS_AT, blocks)
        ticket = 0
        if not self.platform.is_capturing():  # as `next_ticket`
            ticket = self.ticket = self.ticket + 1
        _TIME.pack_into(single.args, _TIME_AT, int(self.timeout_s * 1e9), ticket)
        single(blocks, self.threads, 0, stream)
        return Queued(None, None, ticket)

    def receive_any(self, parcel: Parcel, stream: int) -> Queued:
        """Queue a receive from any source; `Queued.source` gets 1 + the rank."""
        self.device.require_open()
        kernel = self.device.kernels["message_from_any"]
        source = self.platform.mapped_words(1)
        self._write(kernel.args, [parcel])
        kernel.args.source, kernel.args.skips_dead = source.address, self.skips_dead
        ticket = self._number(kernel.args)
        kernel(1, self.threads, 0, stream)
        return Queued(None, source, ticket)

    def _write(self, args: Any, parcels: Sequence[Parcel]) -> MappedWords | None:
        more = None
        if len(parcels) > OPS_INSIDE:
            more = self.platform.mapped_words(OP_WORDS * (len(parcels) - OPS_INSIDE))
        args.more = 0 if more is None else more.address
        for number, parcel in enumerate(parcels):
            words: Any = args.ops
            at = OP_WORDS * number
            if number >= OPS_INSIDE:
                assert more is not None
                words, at = more.words, at - OP_WORDS * OPS_INSIDE
            words[at], words[at + 1], words[at + 2], words[at + 3] = parcel.at, parcel.nbytes, parcel.tag, parcel.dtype
        return more

    # --- pairs

    def lend_ring(self, source: int) -> bytes:
        """Return the bytes with which a rank maps its ring here, all zero; empty if that lies in this rank's region.

        Raises:
            ResourceError: no memory or descriptor is left. UnsupportedError: there is no room for so high a rank.
        """
        if source < self.config.num_ranks:
            return b""
        if source >= MAX_LOCAL:
            raise UnsupportedError(f"messages from GPU to GPU have ranks 0 ... {MAX_LOCAL - 1}, got rank {source}")
        ring = self._rings_here.get(source)
        if ring is None:
            ring = self._rings_here[source] = self.platform.create(self.config.ring_bytes)
            self._store("rings_here", source, [ring.address])
        return ring.blob

    def connect(self, rank: int, blob: bytes, ring_blob: bytes = b"") -> None:
        """Map the memory of a rank, this one included (whose blob is not read), and allow messages to it.

        Args:
            rank: the peer.
            blob: as its `blob`.
            ring_blob: what its `lend_ring` has returned for this rank.

        Raises:
            ProtocolError, AuthError, ResourceError, UnsupportedError: it cannot be mapped; may be repeated.
        """
        if self._regions[rank] is None:
            self._regions[rank] = self._own if rank == self.config.rank else self.platform.attach(blob)
        region = self._regions[rank]
        assert region is not None
        at, end = self._ring_in(region, self.config.rank), region.address + region.nbytes
        if ring_blob:
            if rank not in self._rings_there:
                self._rings_there[rank] = self.platform.attach(ring_blob)
            ring = self._rings_there[rank]
            at, end = ring.address, ring.address + ring.nbytes
        if at + self.config.ring_bytes > end:
            raise ProtocolError(
                f"rank {rank} lends no room for messages of rank {self.config.rank}: {self.config.ring_bytes} bytes "
                f"from {at:#x} on would end behind {end:#x}; report this as a bug of epee"
            )
        for name in ("lost", "reported"):  # by a launch since the last process of the rank was disconnected
            self._store(name, rank, [0])
        self._store("rings_there", rank, [at])
        self._store("peers", rank, [region.address])
        args = self.device.kernels["message_from_any"].args
        args.num_ranks = max(args.num_ranks, rank + 1)

    def disconnect(self, rank: int) -> None:
        """Unmap a rank's memory; nothing of the pair is unfinished here."""
        self._store("peers", rank, [0])
        self.reset(rank)
        ring = self._rings_there.pop(rank, None)
        if ring is not None:
            ring.close()
        region, self._regions[rank] = self._regions[rank], None
        if region is not None and region is not self._own:
            region.close()

    def reset(self, rank: int) -> None:
        """Clear a pair; nothing of it is unfinished on either end."""
        for channel in (rank << 1, rank << 1 | 1):
            first = self._failed.words[channel]
            if first:
                self._lost.setdefault(channel, []).append(range(first, self.ticket + 1))
                self._failed.words[channel] = 0
        for name in ("flags", "credits", "gone", "sent", "taken", "lost", "reported"):
            field = self.config.region_layout[name]
            self._store(name, rank, [0] * (field.nbytes // 8 // field.shape[0]))

    def _store(self, name: str, row: int, words: Sequence[int]) -> None:
        """Write a row of words; waits for nothing else, as kernels of other pairs may wait for their peers.

        By a copy: a first kernel of torch's would have to be loaded, which may wait for all running work.
        """
        layout = self.config.region_layout
        at: torch.Tensor = self._own.lease(layout.offset(name) + 8 * len(words) * row, 8 * len(words), None)
        values = torch.tensor(words, dtype=torch.int64, device="cpu")
        if self._side is None:
            at.view(torch.int64).copy_(values)
            return
        with torch.cuda.stream(self._side):
            at.view(torch.int64).copy_(values)
        self._side.synchronize()

    # --- state

    def is_lost(self, peer: int, is_send: bool, ticket: int) -> bool:
        """Whether messages of a pair and direction in a launch, which has ended, were lost.

        Those of one pair and direction in a batch are lost together. Losses of launches in graphs are not recorded:
        False.
        """
        channel = peer << 1 | is_send
        first = self._failed.words[channel]
        if not ticket:
            return False
        return bool(first and first <= ticket) or any(ticket in lost for lost in self._lost.get(channel, ()))

    def close(self) -> None:
        """Release all memory. No kernel may be unfinished on this rank. Idempotent."""
        if not self.device.is_closed:
            self.device.close()
            peers = [region for region in self._regions if region is not None and region is not self._own]
            for region in (*peers, *self._rings_here.values(), *self._rings_there.values()):
                region.close()
            self._own.close()
