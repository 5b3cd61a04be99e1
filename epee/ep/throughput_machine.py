"""What a rank's end of a GPU buffer is made of: kernels, lent memory, reports, and the order of calls.

Memory map of a rank: a control block (`throughput_params.CONTROL_LAYOUT`), a receive region of `num_slots + 1` slots
(the last is the landing place for results that are copied out and for rows that combine copies in), and, once the
expert layout has been combined, a region for its rows. All of it is lent to all ranks; who writes what is said at the
kernels.

Every call of a buffer carries the next tag, so calls run one after another. Calls from another stream than the last
one wait for whatever is queued there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CommTimeoutError, InvalidArgument, InvalidState, ResourceError
from .throughput_params import (
    CONTROL_LAYOUT,
    KERNELS,
    NUM_REPORTS,
    OP_BARRIER,
    OP_COMBINE,
    OP_DISPATCH,
    REPORT_WORDS,
    kernel_head,
)
from .throughput_plan import Shape, ThroughputConfig
from .throughput_platform import Launcher, Platform, Region
from .throughput_report import take_report
from .throughput_slots import SlotPool
from .throughput_types import ThroughputHandle

DEFAULT_SMS = 24
NUM_MAILBOXES = 16
HOST_GRACE_S = 10.0  # how much longer than the kernels the host waits for them
AllGather = Callable[[bytes], Sequence[bytes]]


@dataclass(eq=False)
class Taken:
    """A slot and the streams that may read it; gives the slot back when its tensor dies. A graph keeps its slot."""

    pool: SlotPool
    slot: int
    streams: list[int]
    is_graphs: bool

    def __call__(self) -> None:
        if not self.is_graphs:
            self.pool.give_back(self.slot, self.streams)


class Machine:
    """Kernels and memory of one rank; see `Throughput` for the arguments.

    Attributes:
        nbytes: GPU memory of this rank.
        slots: the receive regions of all ranks.
    """

    def __init__(self, platform: Platform, config: ThroughputConfig, all_gather: AllGather) -> None:
        config.check()
        self.config = config
        self.platform = platform
        self.nbytes = 0
        self.is_closed = False
        self._all_gather = all_gather
        self._kernels: dict[str, Launcher] = {}
        head = kernel_head(config.num_ranks, platform.limits.max_warps)
        for path, params in KERNELS.items():
            self._kernels.update(platform.kernels(path, head, params))
        self._regions: list[Region] = []
        self._control = self._share(CONTROL_LAYOUT.nbytes)
        self.slots = self._share((config.num_slots + 1) * config.slot_bytes)
        self._expert: list[Region] | None = None
        self._report = platform.host_words(NUM_REPORTS * REPORT_WORDS)
        self._abort = platform.host_words(1)
        self._mailbox_words = -(-config.info_words // 2)
        self._mailboxes = platform.host_words(NUM_MAILBOXES * self._mailbox_words)
        self._next_mailbox = 0
        self.pool = SlotPool(platform, config.num_slots)
        self._last_stream: int | None = None
        for name, kernel in self._kernels.items():
            self._set_constants(name, kernel.args)

    def kernel(self, name: str, timeout_s: float) -> Launcher:
        """Return a kernel, its waits bounded by `timeout_s`."""
        kernel = self._kernels[name]
        kernel.args.call.timeout_ns = int(timeout_s * 1e9)
        return kernel

    def launch(self, kernel: Launcher, grid: int, shape: Shape, stream: int, mode: str = "plain") -> None:
        """Launch behind everything that this buffer has launched before."""
        if self._last_stream != stream and not self.platform.is_capturing():
            if self._last_stream is not None:
                self.platform.wait(self.platform.mark(self._last_stream))
            self._last_stream = stream
        kernel(grid, shape.block, shape.shared_bytes, stream, mode)

    def begin(self) -> int:
        """Start a call: raise what earlier ones have left behind, return the current stream."""
        if self.is_closed:
            raise InvalidState("the buffer is closed; make a new one")
        if not self.platform.is_capturing():
            self.check()
        return self.platform.stream()

    def check(self) -> None:
        """Raise what a kernel has reported since the last look; costs a few loads of host memory."""
        error = take_report(self._report.words)
        if error is not None:
            raise error

    def abort(self) -> None:
        """End every wait of the kernels in flight, from any thread."""
        self._abort.words[0] = 1

    def num_sms(self, wanted: int | None) -> int:
        """Return how many multiprocessors a call uses."""
        available = self.platform.limits.num_sms
        if wanted is None:
            return max(1, min(DEFAULT_SMS, available - 1))
        if not 1 <= wanted <= available:
            raise InvalidArgument(f"num_sms must be 1 ... {available}, got {wanted}")
        return wanted

    def set_handle(self, args: Any, handle: ThroughputHandle) -> None:
        """Point a kernel at the parts of a handle."""
        base, space = handle.words.data_ptr(), handle.space
        args.send_prefix, args.expert_of = base + 4 * space.send_prefix, base + 4 * space.expert_of
        args.weights_of = base + 4 * space.weights_of if handle.has_weights else 0
        args.ordinals = base + 4 * space.ordinals if handle.is_expert else 0
        args.count_matrix, args.row_base = base + 4 * space.count_matrix, base + 4 * space.row_base

    # --- memory ---------------------------------------------------------------------------------------------------

    def expert_regions(self) -> list[Region]:
        """Return the regions from which expert-layout rows are pulled. Collective at its first use."""
        if self._expert is None:
            if self.platform.is_capturing():
                raise InvalidState("the first expert-layout combine must run before a graph is recorded")
            self._expert = self._share(self.config.expert_layout.nbytes)
        return self._expert

    def take(self, stream: int) -> Taken | None:
        """Take a slot for a result, or None when there is none free; a graph must have one."""
        is_capturing = self.platform.is_capturing()
        slot = self.pool.take(stream, for_graph=is_capturing)
        if slot is None:
            if is_capturing:
                raise ResourceError("no slot is free for this graph to own; make the buffer with a larger num_slots")
            return None
        return Taken(self.pool, slot, [stream], is_capturing)

    def lease(self, taken: Taken) -> torch.Tensor:
        """Return the bytes of a slot; it goes back to the pool when the last view has died."""
        config = self.config
        return self.slots[config.rank].lease(taken.slot * config.slot_bytes, config.slot_bytes, taken)

    def close(self) -> None:
        """Give up all memory; tensors over it keep what they use. Idempotent."""
        self.is_closed = True
        for region in self._regions:
            region.close()

    def _share(self, nbytes: int) -> list[Region]:
        """Allocate a region, give it to all ranks and attach theirs. Collective."""
        own = self.platform.create(nbytes)
        self.nbytes += own.nbytes
        blobs = self._all_gather(own.blob)
        regions = [own if rank == self.config.rank else self.platform.attach(blob) for rank, blob in enumerate(blobs)]
        for rank, region in enumerate(regions):
            if region.nbytes != own.nbytes:
                raise InvalidArgument(
                    f"rank {rank} lends {region.nbytes} bytes, this rank {own.nbytes}; "
                    "all ranks must make the buffer with the same sizes"
                )
        self._regions += regions
        self._all_gather(b"attached")  # nobody may leave before everybody has copied its descriptors
        return regions

    def _set_constants(self, name: str, args: Any) -> None:
        """Fill in what no call changes."""
        config = self.config
        call = args.call
        for rank, region in enumerate(self._control):
            call.control[rank] = region.address
        call.report, call.abort, call.rank = self._report.address, self._abort.address, config.rank
        call.op = OP_BARRIER if name == "barrier" else OP_COMBINE if "combine" in name else OP_DISPATCH
        if name == "barrier":
            return
        args.num_topk, args.num_experts = config.num_topk, config.num_experts
        args.num_local_experts = config.num_local_experts
        if "layout" in name:
            args.num_slots, args.max_tokens = config.num_slots + 1, config.max_tokens
            args.lanes_per_token, args.max_recv_rows = config.lanes_per_token, config.max_recv_rows
        if "dispatch" in name:
            layout = config.slot_layout
            for rank, region in enumerate(self.slots):
                args.slots[rank] = region.address
            args.slot_bytes, args.max_recv_rows = config.slot_bytes, config.max_recv_rows
            args.topk_idx_offset, args.weights_offset = layout.offset("topk_idx"), layout.offset("topk_weights")
            args.scales_offset, args.src_token_offset = layout.offset("scales"), layout.offset("src_token")

    # --- the host's wait ------------------------------------------------------------------------------------------

    def open_mailbox(self) -> int:
        """Return a cleared mailbox: the index of its first word."""
        at = self._next_mailbox * self._mailbox_words
        self._next_mailbox = (self._next_mailbox + 1) % NUM_MAILBOXES
        self._mailboxes.words[at] = 0
        return at

    def mailbox_address(self, mailbox: int) -> int:
        """Return where kernels write to a mailbox."""
        return self._mailboxes.address + 8 * mailbox

    def wait_mailbox(self, mailbox: int, timeout_s: float) -> list[int] | None:
        """Wait for a kernel's answer: its 32-bit words, or None when the call has failed."""
        words = self._mailboxes.words
        deadline = 0.0
        while not words[mailbox]:
            for _ in range(1000):
                if words[mailbox]:
                    break
            else:
                now = time.monotonic()
                deadline = deadline or now + timeout_s + HOST_GRACE_S
                if now > deadline:
                    raise CommTimeoutError(f"dispatch: the GPU gave no answer for {timeout_s + HOST_GRACE_S:.1f} s")
        if words[mailbox] != 1:
            return None
        return list(words[mailbox : mailbox + self._mailbox_words].cast("B").cast("i"))
