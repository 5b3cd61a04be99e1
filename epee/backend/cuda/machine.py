"""Launches of the collective kernels on one rank: memory, plans, order of streams. No groups, no checks of tensors.

Data path: `csrc/kernels/collective/call.cuh` and the heads of the kernel files. This module owns the lent region and,
in its `GpuDevice`, the words in cpu memory; it chooses the kernel of a call by size and launches it on the platform's
current stream: one kernel, in mode "mask" two for a large call. A call returns when they are queued. All ranks make the
same calls in the same order; a call on another stream than the last one runs after that. In a graph nothing but
launches is recorded: numbers, view and addresses of peers are read from memory.

Members: the memory of each is mapped (`admit`) and the words of a new start are written (`begin`) while no call is
unfinished on any member, and none begins before all have done so: `meeting.py` ensures that. Both are used when a group
begins, when it continues without a rank or with a new one, and when it continues after a lost call.

Kernels' reports are read by `reports`. A rank that has lost a call makes none until the next `begin`.

The platform is `ep.gpu.platform.CudaPlatform`, or the tests' emulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...errors import InvalidState, expected
from ...gpu.device import GpuDevice
from ...gpu.platform import LentRegion, Platform
from ...gpu.ranks import MAX_LOCAL, room_of
from ...jit.params import sized_kernels
from . import moves
from .mask.counts import NOBODY_ASKS, Count, CountWords
from .mask.moves import ONE_ROW
from .moves import MOVED, UNEVEN, Kind, Move
from .params import (
    COLLECTOR,
    DIRECT_KERNELS,
    EXCHANGE_THREADS,
    FACTS_BITS,
    KERNELS,
    MASKED_KERNELS,
    NUM_REMEMBERED,
    OP_NUMBERS,
    OWNER,
    SENDER,
    TILE_BYTES,
    TWO_SHOT_THREADS,
    CollectiveConfig,
    MaskedParams,
    MendParams,
    direct_threads,
    forms_of,
    kernel_head,
    mend_threads,
)
from .plan import CollectivePlan, Fitted
from .pool import MemoryPool

MOST_GROUPS = 8  # that share a GPU on streams of their own without starving each other
BESIDE = 2  # a call beside other groups' kernels takes this fraction of the GPU
UNEVEN_CHUNK_BYTES = 16 << 10  # of rows whose lengths only two ranks know
MIN_STAGE_BYTES = 512  # for each rank: four stages of 128 bytes


_NO_SIZES = (0,) * 9


def _roles_of(move: Move, rank: int) -> int:
    """Return the roles of a rank in a pipeline: at least one, and the same if some of the other ranks are dead."""
    others = ~(1 << rank)
    sends, owns = move.sources >> rank & 1 and move.takers & others, move.takers >> rank & 1
    roles = (SENDER if sends else 0) | (OWNER if owns else 0)
    return (roles | (COLLECTOR if owns and move.is_whole and move.takers & others else 0)) or OWNER


class Collectives:
    """The collectives of one rank with those of its peers.

    Args:
        platform: the GPU.
        config: sizes, equal on all ranks.
        kinds: (dtype, reduction) pairs whose kernels are loaded at construction, others at their first call.
        plan: a `CollectivePlan`.
        stall_one_in: for stress tests, as in `ep.gpu.params.kernel_head`.

    Attributes:
        device: reports, order of calls, notifications to kernels.
        timeout_s: of one wait of a kernel.
        most_sms: multiprocessors that the next calls take at most.
        told: mode "mask": a pinned word, a bit for each rank that kernels have left out since `begin`.
        shown: mode "mask": address and length of the program's mask on this GPU, or 0.
        fills_absent: mode "mask": output rows of ranks that take no part are filled with zeros.
        counts: mode "mask": words for the ranks in a call.
        pool: memory for tensors that peers read in place, if there is one.
        no_pools: why this rank neither reads pools nor lets its own be read; empty if it does.
    """

    def __init__(
        self,
        platform: Platform,
        config: CollectiveConfig,
        kinds: Sequence[Kind] = (),
        plan: CollectivePlan | None = None,
        stall_one_in: int = 0,
    ) -> None:
        config.check()
        self.config, self.platform = config, platform
        self.plan = plan or CollectivePlan()
        self.timeout_s = 10.0
        self.most_sms = platform.limits.num_sms
        self._stall_one_in = stall_one_in
        head = kernel_head(config.num_ranks, *MOVED, self.plan.pipeline, stall_one_in)
        self._forms = forms_of(config.num_ranks)
        files = MASKED_KERNELS if config.is_masked else KERNELS
        self._files = sized_kernels(files, room_of(config.num_ranks))  # kernel files that calls may need
        self.device = GpuDevice(platform, head, self._files)
        self.told = platform.mapped_words(1)
        self.shown, self.fills_absent = (0, 0), False
        self.counts = CountWords(platform)
        self._own = platform.create(config.region_layout.nbytes)
        self._kernels: dict[Kind, dict[str, Any]] = {}
        self._loaded: dict[Kind, set[str]] = {}  # loaded files by kind
        self._add(MOVED, self._files, self.device.kernels)
        for kind in kinds:
            self.load(kind)
        self._regions: list[LentRegion | None] = [None] * config.num_ranks
        self._regions[config.rank] = self._own
        self._vote = self._vote_here()
        self.pool: MemoryPool | None = None
        self.no_pools = ""
        self._pools: list[LentRegion | None] = [None] * config.num_ranks

    @property
    def blob(self) -> bytes:
        """Bytes with which other processes map this rank's memory."""
        return self._own.blob

    # --- calls

    def load(self, kind: Kind) -> Mapping[str, Any]:
        """Return the kernels of a reduction, loaded now if they were not; not while a graph is recorded.

        Raises:
            InvalidArgument: no kernel has it. InvalidState: a graph is being recorded.
        """
        kernels = self._kernels.get(kind)
        if kernels is None or not self._files.keys() <= self._loaded[kind]:
            head = kernel_head(self.config.num_ranks, *kind, self.plan.pipeline, self._stall_one_in)
            if self.platform.is_capturing():
                raise InvalidState(
                    f"the kernels of {kind[1]} of {kind[0]} are not loaded yet; make one such call before the graph is "
                    "recorded"
                )
            missing = {path: self._files[path] for path in self._files.keys() - self._loaded.get(kind, set())}
            self._add(kind, missing, self.platform.kernels(missing, head))
            kernels = self._kernels[kind]
        return kernels

    def _add(self, kind: Kind, paths: Iterable[str], kernels: Mapping[str, Any]) -> None:
        call = self.config.call(self._own.address, self.device.report.address, self.device.news.address)
        for kernel in kernels.values():
            args = kernel.args
            for masked in (args.again, args.vote) if isinstance(args, MendParams) else (args,):
                if isinstance(masked, MaskedParams):
                    masked.base.call, masked.kept_offset = call, self.config.region_layout.offset("kept")
                else:
                    masked.call = call
        self._kernels.setdefault(kind, {}).update(kernels)
        self._loaded.setdefault(kind, set()).update(paths)

    def run(self, move: Move, again: Move | None = None, count: Count | None = None) -> int:
        """Queue a call on the current stream; returns the stream.

        Args:
            move: the call.
            again: the same from memory for a copy of the row that it overwrites, needed if `is_tried`.
            count: mode "mask": word that receives the ranks in the result.

        Raises:
            InvalidState: closed, or kernels are not loaded while a graph is recorded. InvalidArgument: no such
                reduction.
            ResourceError: other buffers of this process leave too little of the GPU.
        """
        self.load(move.kind)
        stream, share = self.platform.stream(), self.device.share
        self.device.require_open()
        is_capturing = self.platform.is_capturing()
        if is_capturing:
            share.in_graphs = True
        else:
            share.stream = stream
            self.device.follow(stream)
        launches = self.fit(move, *share.limit(stream, is_capturing))
        self.fill(launches, move, again or move, count)
        for fitted in launches:
            fitted.kernel(fitted.grid, fitted.block, fitted.shared, stream, fitted.mode)
        return stream

    def is_tried(self, move: Move) -> bool:
        """Whether a call takes two kernels: a try, and a vote with the kernel that repeats it (`mask/tries.cuh`)."""
        return self.config.is_masked and not self.is_small(move)

    def _vote_here(self) -> Move:
        layout, own, num_ranks = self.config.region_layout, self._own.address, self.config.num_ranks
        first, nbytes = own + layout.offset("ballots"), layout["ballot"].nbytes
        ballots = [moves.Stretch(first + nbytes * rank, nbytes) for rank in range(num_ranks)]
        return moves.vote(num_ranks, moves.Stretch(own + layout.offset("ballot"), nbytes), ballots)

    def fit(self, move: Move, num_sms: int, is_alone: bool) -> list[Fitted]:
        """Choose the launches of a call, one or (`is_tried`) two; its kernels are loaded.

        Args:
            move: the call; in mode "mask" the only property of its rows that matters is whether this rank's is
                overwritten.
            num_sms: most multiprocessors.
            is_alone: no other kernels need room beside it.
        """
        launches = [self._fit(move, num_sms, is_alone)]
        if self.is_tried(move):
            launches.append(self._fit(move, num_sms, is_alone, is_again=True))
        return launches

    def _fit(self, move: Move, num_sms: int, is_alone: bool, is_again: bool = False) -> Fitted:
        """Choose one kernel and its launch; `is_again`: the kernel that repeats the call if needed."""
        plan, share = self.plan, self.device.share
        num_sms = min(num_sms, self.most_sms)
        if not is_alone:  # others need room, too, and more of them may start
            num_sms = min(num_sms, max(1, self.platform.limits.num_sms // MOST_GROUPS))
        per_sm = 1 if is_again else self._blocks_per_sm(num_sms)
        name, grid, block, sizes = self._shape(move, num_sms, per_sm)
        if is_again:
            name = name.replace("try", "mend").replace("saving", "reduced")
            block = mend_threads(plan.pipeline)
            sizes = (*sizes[:-2], 0, sizes[-1])  # no bulk copies: threads store
        mode, width = plan.launch, -(-grid // per_sm) if sizes is not _NO_SIZES else grid
        if mode == "early":
            if is_alone or 2 * width <= num_sms:
                width *= 2  # the next kernel's blocks run beside this one's
            else:
                mode = "plain"
        if share.width < width:
            share.widen(width)
        return Fitted(plan, name, self._kernels[move.kind][name], grid, block, sizes[-2], mode, sizes)

    def fill(self, launches: Sequence[Fitted], move: Move, again: Move, count: Count | None = None) -> None:
        """Write a call's own arguments; the rest as in `run`. The last kernel writes the ranks in the result."""
        told = NOBODY_ASKS if count is None else (count.address, count.stamp)
        if len(launches) == 1:
            self._fill(launches[0], move, told)
            return
        first, last = launches
        self._fill(first, move, saved=saved_at(move, again, self.config.rank))
        self._fill(last, again, told)
        self._fill(last, self._vote, at=self._forms.vote_at)

    def _fill(
        self, fitted: Fitted, move: Move, told: tuple[int, int] = NOBODY_ASKS, at: int = 0, saved: int = 0
    ) -> None:
        """Write the arguments of one kernel, those that begin `at` bytes after the first."""
        forms = self._forms
        forms.call.pack_into(
            fitted.kernel.args,
            at + forms.call_at,
            int(self.timeout_s * 1e9),
            move.signature,
            *move.in_bytes,
            *move.out_bytes,
            move.sources,
            move.takers,
            move.root,
            OP_NUMBERS[move.op],
            *move.inputs,
            *move.outputs,
            max(move.num_bytes, 0),
            *fitted.sizes,
        )
        if isinstance(fitted.kernel.args, (MaskedParams, MendParams)):
            (shown, num_shown), is_one_row = self.shown, int(move.op in ONE_ROW)
            masked = saved, self.told.address, shown, *told, num_shown, is_one_row, int(self.fills_absent), 0
            forms.masked.pack_into(fitted.kernel.args, at + forms.masked_at, *masked)

    def _shape(self, move: Move, num_sms: int, per_sm: int) -> tuple[str, int, int, tuple[int, ...]]:
        """Return the kernel of a call, its blocks, their threads, and the last words of its arguments."""
        plan, config, size = self.plan, self.config, move.num_bytes
        if move.op == "barrier" and not config.is_masked:
            return "collective_barrier", 1, 32, _NO_SIZES
        kind = "placed" if move.kind is MOVED else "reduced"
        if config.is_masked and self.is_small(move):
            return f"collective_masked_{kind}", *self._packets(size, EXCHANGE_THREADS, num_sms), _NO_SIZES
        if 0 <= size <= min(config.packet_bytes, plan.one_shot_bytes if move.is_whole else plan.exchange_bytes):
            return f"collective_exchange_{kind}", *self._packets(size, EXCHANGE_THREADS, num_sms), _NO_SIZES
        if move.is_whole and 0 <= size <= min(config.packet_bytes, plan.two_shot_bytes):
            return "collective_two_shot", *self._packets(size, TWO_SHOT_THREADS, num_sms), _NO_SIZES
        has_gather = move.is_whole
        if has_gather:
            kind = "reduced"
        roles = _roles_of(move, config.rank)
        is_both = has_gather and move.root < 0
        lanes = min(config.num_lanes, plan.lanes[is_both])
        num_roles = roles.bit_count()
        num_blocks = min(plan.width, num_sms) * per_sm
        grid = min(lanes, max(1, num_blocks // num_roles)) * num_roles
        chunk = min(config.chunk_bytes, UNEVEN_CHUNK_BYTES)
        if size != UNEVEN:
            parts = lanes * (max(1, move.takers.bit_count()) if has_gather else 1) * plan.min_chunks
            chunk = min(config.chunk_bytes, plan.chunk_bytes, max(1024, -(-size // parts)))
        vecs, direct = -(-chunk // 128) * 8, plan.direct_lanes[is_both]
        cut = max(1, config.chunk_bytes // (16 * vecs))  # a slot has room for this many chunks
        num_slots = cut * config.num_slots
        sizes = config.chunk_bytes // cut // 128 * 128, lanes, num_slots, vecs, int(has_gather), roles
        slots = num_slots * (config.num_ranks if move.sources.bit_count() == 1 else 1)
        if direct and self.lies_in_pool(move):
            threads = direct_threads(plan.pipeline, config.num_ranks)
            return f"collective_direct_{kind}", grid, threads, (*sizes, direct, 0, slots)
        stage = max(MIN_STAGE_BYTES * room_of(config.num_ranks), 2 * 16 * vecs) if plan.pushes(move, config.rank) else 0
        way = "try" if config.is_masked else "pipeline"
        if config.is_masked and move.kind is not MOVED and move.inputs[config.rank] == move.outputs[config.rank]:
            kind = "saving"
        return f"collective_{way}_{kind}", grid, plan.pipeline[0], (*sizes, 0, stage, slots)

    def _blocks_per_sm(self, num_sms: int) -> int:
        """Return how many blocks of a pipeline count as one multiprocessor.

        The hardware distributes blocks over all multiprocessors, one to each first. A kernel of others that wants
        another split of L1 and shared memory does not start beside a block, so a pipeline that must leave room must
        leave multiprocessors empty (measured on H100: with a block on each, an addition waited for the pipeline's end).
        """
        return self.plan.pipeline[1] if num_sms >= self.platform.limits.num_sms else 1

    def is_small(self, move: Move) -> bool:
        """Whether the rows of a call fit into packets; the same on all ranks."""
        return 0 <= move.num_bytes <= self.config.packet_bytes

    def lies_in_pool(self, move: Move) -> bool:
        """Whether the memory of this rank that peers read in a large call, if any, lies in its pool."""
        pool, me = self.pool, 1 << self.config.rank
        if pool is None or self.no_pools or self.config.is_masked:
            return False
        rows: list[tuple[int, int]] = []
        if move.sources & me:
            rows += zip(move.inputs, move.in_bytes, strict=True)
        if move.is_whole and move.takers & me:
            rows.append((move.outputs[self.config.rank], move.num_bytes))
        return all(nbytes == 0 or pool.holds(at, nbytes) for at, nbytes in rows)

    def _packets(self, nbytes: int, max_threads: int, num_sms: int) -> tuple[int, int]:
        tiles = max(1, -(-nbytes // TILE_BYTES))
        grid = min(-(-tiles // self.plan.warps), self.plan.max_blocks, num_sms)
        return grid, 32 * min(max_threads // 32, -(-tiles // grid))

    # --- members

    def lend(self, nbytes: int) -> None:
        """Create this rank's pool; peers can use it after the next `admit` and `begin` of all ranks.

        Raises:
            ResourceError, UnsupportedError: there is no such memory.
        """
        self.pool = MemoryPool(self.platform, nbytes)
        self._files = {**self._files, **sized_kernels(DIRECT_KERNELS, room_of(self.config.num_ranks))}

    def take_pool(self, smaller: Collectives) -> None:
        """Take over the pool of the machine of a smaller group, which tensors of the program lie in, if it has one."""
        if smaller.pool is not None:
            self.pool, smaller.pool = smaller.pool, None
            self._files = {**self._files, **sized_kernels(DIRECT_KERNELS, room_of(self.config.num_ranks))}

    def admit(self, blobs: Mapping[int, bytes], pools: Mapping[int, bytes] | None = None) -> None:
        """Map the memory lent by the members (rank -> its `blob`, and that of its pool) if it is not mapped; unmap
        others'.

        A pool that cannot be mapped is no error: this rank then reports in each call, until the next time, that its
        rows lie in no pool (`begin`), so all ranks make the call as without pools; `no_pools` has the reason.

        Raises:
            ProtocolError, AuthError, ResourceError, UnsupportedError: memory cannot be mapped; may be repeated.
        """
        others = [rank for rank in range(self.config.num_ranks) if rank != self.config.rank]
        for rank in others:
            self._map(self._regions, rank, blobs.get(rank, b""))
        self.no_pools = ""
        for rank in others:
            try:
                self._map(self._pools, rank, (pools or {}).get(rank, b""))
            except expected(RuntimeError, OSError) as exc:
                self.no_pools = f"rank {self.config.rank} cannot map the pool of rank {rank}: {exc}"

    def _map(self, regions: list[LentRegion | None], rank: int, blob: bytes) -> None:
        region = regions[rank]
        if region is not None and region.blob == blob:
            return
        if region is not None:
            region.close()
            regions[rank] = None
        if blob:
            regions[rank] = self.platform.attach(blob)

    def number(self) -> int:
        """Return the number of this rank's last call; waits for the GPU."""
        self.platform.synchronize()
        return int(self._words("tags").max())

    def begin(self, members: Sequence[int], number: int) -> None:
        """Let the next call be `number` + 1, of the members. All pass the same; `number` is above all calls made."""
        self.platform.synchronize()
        own = self.config.rank
        addresses = [0 if region is None else region.address for region in self._regions]
        self._set("peers", addresses)
        pools: list[LentRegion | MemoryPool | None] = [*self._pools]
        pools[own] = None if self.no_pools else self.pool  # used by kernels in graphs
        self._set("pools", [0 if pool is None else pool.address for pool in pools])
        self._set("pool_bytes", [0 if pool is None else pool.nbytes for pool in pools])
        self._words("view").fill_(sum(1 << rank for rank in {*members, own}))
        self._words("tags").fill_(number)
        for name in ("joined", "expected"):
            self._words(name).fill_(number << FACTS_BITS)
        for name in ("gone", "left", "failed", "news", "out", "settled", "got", "ballot", "ballots"):
            self._words(name).fill_(0)
        self.told.words[0] = 0
        self.platform.synchronize()
        self.device.take_reports()  # discards reports of earlier calls

    def _set(self, name: str, words: Sequence[int]) -> None:
        self._words(name)[: len(words)].copy_(torch.tensor(words, dtype=torch.int64, device="cpu"))

    def leave(self) -> None:
        """Notify the peers' kernels that this rank makes no more calls; none is unfinished. Waits for the GPU."""
        layout, own = self.config.region_layout, self.config.rank
        for rank, region in enumerate(self._regions):
            if region is not None and rank != own:
                word = region.lease(layout.offset("left") + 8 * own, 8, None)
                word.view(torch.int64).fill_(1)
        self.platform.synchronize()

    def contributors(self) -> int:
        """Return a bit for each rank in the result of the last call of mode "mask"; waits for the GPU.

        0: there is none since `begin`.
        """
        number = self.number()
        got = int(self._words("got")[number % NUM_REMEMBERED])
        return got & (1 << MAX_LOCAL) - 1 if got >> MAX_LOCAL == number else 0

    def behind(self) -> tuple[int, list[int]]:
        """Return the number of the call that this rank's kernels are in, and the members that have not begun it. Any
        thread.

        Reads on a stream of its own, as the kernels may wait for these ranks.
        """
        names = ("view", "tags", "joined")
        if self.platform.device.type != "cuda":
            view, tags, joined = (self._words(name).clone() for name in names)
        else:
            with torch.cuda.device(self.platform.device), torch.cuda.stream(torch.cuda.Stream()):
                view, tags, joined = (self._words(name).cpu() for name in names)
        number, room = int(tags.max()) + 1, room_of(self.config.num_ranks)
        begun = (joined >> FACTS_BITS).view(NUM_REMEMBERED, room).amax(0).tolist()
        others = (rank for rank in range(self.config.num_ranks) if rank != self.config.rank)
        return number, [rank for rank in others if int(view) >> rank & 1 and begun[rank] < number]

    def _words(self, name: str) -> torch.Tensor:
        layout = self.config.region_layout
        words: torch.Tensor = self._own.lease(layout.offset(name), layout[name].nbytes, None)
        return words.view(torch.int64)

    # --- state

    def close(self) -> None:
        """Release all memory. No kernel may be unfinished on this rank. Idempotent."""
        if not self.device.is_closed:
            self.device.close()
            for region in (*self._regions, *self._pools, self.pool):
                if region is not None:
                    region.close()


def saved_at(move: Move, again: Move, rank: int) -> int:
    """Return the address of a rank's row of `move` when `again` is made, if it is a different address, else 0."""
    return again.inputs[rank] if again.inputs[rank] != move.inputs[rank] else 0


def most_sms(machine: Collectives, is_async: bool) -> int:
    """Return the most multiprocessors of a call: an asynchronous one leaves room for work beside it."""
    num_sms = machine.platform.limits.num_sms
    return max(1, num_sms // BESIDE) if is_async else num_sms
