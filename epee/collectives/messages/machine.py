"""Launches the message kernels on one rank: memory, the cut of a batch into channels, the words of pairs. No groups.

Data path: `csrc/kernels/message/batch.cuh`. This module owns the lent region and, in its `GpuDevice`, the words of the
host. A call returns when its kernel is queued. Kernels of the same pair and direction must run one after the other: who
uses this orders the streams (`streams.py`). A graph records nothing but launches: counts and the addresses of peers are
read from memory.

A pair of ranks exists from `connect` on, with all words zero; `reset` makes it anew, while nothing of the pair is in
flight on either of them (`pairs.py` sees to that).

The platform is `ep.gpu.platform.CudaPlatform`, or the tests' emulation.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...ep.gpu.device import GpuDevice
from ...ep.gpu.platform import HostWords, LentRegion, Platform
from ...ep.gpu.report import KernelReport
from .params import KERNELS, OP_WORDS, OPS_INSIDE, THREADS, MessageConfig, MessageParams, kernel_head

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
    """What must live until a kernel has ended: its operations beyond the first ones, the word of its source."""

    more: HostWords | None
    source: HostWords | None


NOTHING = Queued(None, None)
_WORDS, _BLOCKS, _TIME = struct.Struct("=QqQQ"), struct.Struct("=i"), struct.Struct("=Q")
_WORDS_AT, _BLOCKS_AT, _TIME_AT = (getattr(MessageParams, name).offset for name in ("ops", "blocks", "timeout_ns"))


class MessagePlan(NamedTuple):
    """How many blocks kernels take; a rank's own, peers may have others. The first two in this order.

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
    places for blocks, of which an H100 has 264.
    """
    part = max(1, num_sharing)
    return MessagePlan(
        _power_below(64 // part), _power_below(max(1, 32 // max(1, num_ranks - 1)) // part), max(1, 128 // part)
    )


def _power_below(count: int) -> int:
    """Return the largest power of two up to `count`, so that lanes are dealt out evenly; 1 at least."""
    return 1 << (max(1, count).bit_length() - 1)


class Messages:
    """The messages of one rank with its peers.

    Args:
        platform: the GPU.
        config: sizes, equal on all ranks.
        plan: see there.
        stall_one_in: for stress tests, as in `ep.gpu.params.kernel_head`.

    Attributes:
        device: reports, news for kernels.
        timeout_s: of one wait of a kernel.
    """

    def __init__(
        self, platform: Platform, config: MessageConfig, plan: MessagePlan | None = None, stall_one_in: int = 0
    ) -> None:
        config.check()
        self.config, self.platform = config, platform
        self.plan = plan or plan_of(config.num_ranks, 1)
        self.threads = THREADS
        self.timeout_s = 10.0
        self.device = GpuDevice(platform, kernel_head(stall_one_in), KERNELS)
        self._own = platform.create(config.region_layout.nbytes)
        self._side = torch.cuda.Stream(platform.device) if platform.device.type == "cuda" else None
        self._regions: list[LentRegion | None] = [None] * config.num_ranks
        self._singles: dict[tuple[int, bool], Any] = {}
        for kernel in self.device.kernels.values():
            args = kernel.args
            args.own, args.report, args.abort = self._own.address, self.device.report.address, self.device.news.address
            args.rings_offset = config.region_layout.offset("rings")
            args.rank, args.num_ranks = config.rank, config.num_ranks
            args.num_lanes, args.num_slots = config.num_lanes, config.num_slots
            args.slot_bytes, args.lane_bytes = config.slot_bytes, config.lane_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory of this rank."""
        return self._own.nbytes

    @property
    def blob(self) -> bytes:
        """By which other processes map this rank's memory."""
        return self._own.blob

    # --- calls

    def run(self, parcels: Sequence[Parcel], stream: int, is_beside: bool) -> Queued:
        """Queue sends and receives as one kernel, all of which go on at the same time.

        Args:
            parcels: those of one pair and direction in the order in which they are matched; none from any source.
            stream: raw.
            is_beside: other messages may be on their way on other streams.
        """
        if len(parcels) == 1:
            self.run_one(parcels[0], stream, is_beside)
            return NOTHING
        self.device.require_open()
        channels: dict[int, list[Parcel]] = {}
        for parcel in parcels:
            channels.setdefault(parcel.peer << 1 | parcel.is_send, []).append(parcel)
        kernel = self.device.kernels["message_batch"]
        args = kernel.args
        ordered = [parcel for channel in channels.values() for parcel in channel]
        more = self._write(args, ordered)
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
        kernel(args.blocks * len(channels), self.threads, 0, stream)
        return Queued(more, None)

    def run_one(self, parcel: Parcel, stream: int, is_beside: bool) -> None:
        """Queue one message; its pair and direction have a launcher of their own, where little has to be written."""
        is_send, peer, *words = parcel
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
        _TIME.pack_into(single.args, _TIME_AT, int(self.timeout_s * 1e9))
        single(blocks, self.threads, 0, stream)

    def receive_any(self, parcel: Parcel, stream: int) -> Queued:
        """Queue a receive from any source; `Queued.source` gets 1 + the rank."""
        self.device.require_open()
        kernel = self.device.kernels["message_from_any"]
        source = self.platform.host_words(1)
        self._write(kernel.args, [parcel])
        kernel.args.source = source.address
        kernel(1, self.threads, 0, stream)
        return Queued(None, source)

    def _write(self, args: Any, parcels: Sequence[Parcel]) -> HostWords | None:
        args.timeout_ns = int(self.timeout_s * 1e9)
        more = None
        if len(parcels) > OPS_INSIDE:
            more = self.platform.host_words(OP_WORDS * (len(parcels) - OPS_INSIDE))
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

    def connect(self, rank: int, blob: bytes) -> None:
        """Map the memory of a rank, this one included (whose blob is not looked at), and let messages go there.

        Raises:
            ProtocolError, AuthError, ResourceError, UnsupportedError: it cannot be mapped; may be repeated.
        """
        if self._regions[rank] is None:
            self._regions[rank] = self._own if rank == self.config.rank else self.platform.attach(blob)
        region = self._regions[rank]
        assert region is not None
        self._store("peers", rank, [region.address])

    def disconnect(self, rank: int) -> None:
        """Forget a rank's memory; nothing of the pair is in flight here."""
        self._store("peers", rank, [0])
        self.reset(rank)
        region, self._regions[rank] = self._regions[rank], None
        if region is not None and region is not self._own:
            region.close()

    def reset(self, rank: int) -> None:
        """Begin a pair anew; nothing of it is in flight on either end."""
        for name in ("flags", "credits", "gone", "sent", "taken", "lost", "reported"):
            field = self.config.region_layout[name]
            self._store(name, rank, [0] * (field.nbytes // 8 // field.shape[0]))

    def _store(self, name: str, row: int, words: Sequence[int]) -> None:
        """Write a row of words; waits for nothing but that, as kernels of other pairs may wait for their peers.

        By a copy: a first kernel of torch's would be loaded, which may wait for all that runs.
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

    def reports(self) -> list[KernelReport]:
        """Return what kernels have reported since the last look, the oldest first."""
        return self.device.take_reports()

    def close(self) -> None:
        """Give up all memory. No kernel may be in flight on this rank. Idempotent."""
        if not self.device.is_closed:
            self.device.close()
            for region in self._regions:
                if region is not None and region is not self._own:
                    region.close()
            self._own.close()
