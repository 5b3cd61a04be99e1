"""Calls between hosts in one process: emulated kernels of all ranks, a thread each, and the proxies' own machines.

The wire is a thread that runs the chunk machines of the package (`ProxyPeer`) over copies between the ranks' memory,
some of which it holds back for a while. What arrives is compared with `epee.reference` bit for bit.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from epee import reference
from epee.gpu.experts import expert_table
from epee.gpu.hosts import (
    HOST_KERNELS,
    PageAddresses,
    begin_epoch,
    hosts_head,
    layout_shared_bytes,
    make_routes,
    meta_bytes,
    move_shared_bytes,
    row_nbytes,
    state_layout,
)
from epee.gpu.params import MAX_EXPERTS, NEWS_WORDS, NUM_REPORTS, REPORT_WORDS, control_layout
from epee.gpu.ranks import room_of
from epee.jit.params import sized_kernels
from epee.link.proxy.chunks import ChunkRun
from epee.link.proxy.peer import ProxyPeer
from epee.link.proxy.rank import shape_for
from epee.link.proxy.words import ABORT, KINDS, island_topology, parse_chunk_word
from epee.reference import Received, Routed
from tests.csrc.emulated import build, entries_of
from tests.csrc.throughput_cases import permutation, renamed


@dataclass(frozen=True)
class HostsCase:
    """Dispatches and combines of all ranks.

    Attributes:
        islands: the ranks of each.
        num_tokens: per rank.
        num_biases: of each combine.
        num_scales: 0 for rows of bfloat16; else FP8 rows, each with so many scales.
        num_slots, chunk_records: of the streams.
        routing: "random" (a tenth of the ids is -1), "one host" (all experts of the last island), "nowhere",
            "all ranks" (an expert of each), "skewed" (first tokens to the next host, last ones to the host behind it).
        num_calls: of each kind, one after the other.
        grid, warps: blocks, and warps of each moving role.
        piece_bytes: in which rows pass through the stages.
        first: number of the epoch's first chunks.
        stall_one_in: one in so many warps stands still at the places of `common/stall.cuh`.
        timeout_s: of one wait.
        is_permuted: experts are anywhere, as many at each rank, not in contiguous blocks.
    """

    islands: tuple[tuple[int, ...], ...]
    num_tokens: tuple[int, ...]
    num_slots: int = 2
    chunk_records: int = 4
    routing: str = "random"
    num_calls: int = 2
    grid: int = 2
    warps: int = 1
    num_local_experts: int = 3
    num_topk: int = 3
    hidden: int = 64
    piece_bytes: int = 1 << 20
    has_weights: bool = True
    num_scales: int = 0
    num_biases: int = 0
    first: int = 0
    stall_one_in: int = 0
    timeout_s: float = 20.0
    is_permuted: bool = False
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        """One per entry of `num_tokens`."""
        return len(self.num_tokens)

    @property
    def num_experts(self) -> int:
        """Of all ranks."""
        return self.num_ranks * self.num_local_experts

    @property
    def row_bytes(self) -> int:
        """Of a row of a dispatch."""
        return self.hidden if self.num_scales else 2 * self.hidden

    @property
    def host_of(self) -> list[int]:
        """By rank."""
        return list(island_topology(0, self.islands).host_of)

    @property
    def max_tokens(self) -> int:
        """Of a rank."""
        return max(*self.num_tokens, 1)

    @property
    def experts(self) -> torch.Tensor:
        """The table by which kernels map an expert to its rank."""
        table = expert_table(torch.device("cpu"), MAX_EXPERTS)
        if self.is_permuted:
            table[: self.num_experts] = permutation(self.num_experts)
        return table

    def placed(self, inputs: Sequence[Routed]) -> list[Routed]:
        """Return what all ranks send, with ids by which a contiguous map finds the same experts."""
        table = self.experts.long()
        return [replace(given, topk_idx=renamed(given.topk_idx, table)) for given in inputs]

    def inputs(self, call: int) -> list[Routed]:
        """Return what all ranks send in a call."""
        gen = torch.Generator().manual_seed(1000 * self.seed + call)
        inputs = []
        for num_tokens in self.num_tokens:
            x = torch.randn(num_tokens, self.hidden, generator=gen).to(torch.bfloat16)
            idx = torch.rand(num_tokens, self.num_experts, generator=gen).topk(self.num_topk, dim=1)[1]
            if self.routing == "random":
                idx[torch.rand(idx.shape, generator=gen) < 0.1] = -1
            elif self.routing == "nowhere":
                idx.fill_(-1)
            elif self.routing == "one host":
                ranks = torch.tensor(island_topology(0, self.islands).hosts[-1])
                idx = ranks[idx // self.num_local_experts % len(ranks)] * self.num_local_experts + idx % 3
            elif self.routing == "all ranks":
                idx = torch.arange(self.num_ranks).repeat(num_tokens, 1) * self.num_local_experts
            elif self.routing == "skewed":
                ahead = 1 + (torch.arange(num_tokens) >= num_tokens // 2).long()
                both = (torch.arange(num_tokens) % 7 == 3).long()
                targets = torch.stack([ahead, torch.where(both == 1, 3 - ahead, ahead)], 1)
                idx = (len(inputs) + targets) % self.num_ranks * self.num_local_experts
            weights = torch.randn(num_tokens, idx.shape[1], generator=gen) if self.has_weights else None
            scales = torch.randn(
                self.num_scales, num_tokens, generator=gen
            ).t()  # columns lie together, as GEMMs like it
            pair = x.to(torch.float8_e4m3fn), scales
            inputs.append(Routed(pair if self.num_scales else x, idx, weights))
        return inputs

    def biases(self) -> list[list[torch.Tensor]]:
        """Return what each rank adds to its sums."""
        gen = torch.Generator().manual_seed(2000 + self.seed)
        shapes = [(count, self.hidden) for count in self.num_tokens for _ in range(self.num_biases)]
        made = [torch.randn(shape, generator=gen).to(torch.bfloat16) for shape in shapes]
        return [made[rank * self.num_biases :][: self.num_biases] for rank in range(self.num_ranks)]


class CopyWire:
    """A `ChunkTransport` from one rank to another: copies, each held back for some turns.

    Attributes:
        forge: takes kind, chunk word and address of the bytes that have come, and returns the word to announce.
        kinds: of streams whose chunks do not arrive.
    """

    def __init__(self, world: HostsWorld, source: int, target: int) -> None:
        self.world, self.source, self.target = world, source, target
        self.queue: deque[Callable[[], None]] = deque()
        self.forge: Callable[[int, int, int], int] = lambda kind, word, address: word
        self.kinds: tuple[int, ...] = ()
        self.num_done = dict.fromkeys(KINDS, 0)

    def send(self, kind: int, run: ChunkRun) -> None:
        if kind in self.kinds:
            return
        for i, word in enumerate(run.words()):
            self.queue.append(lambda slot=run.slot + i, word=word: self._copy(kind, slot, word))  # type: ignore[misc]

    def num_read(self, kind: int) -> int:
        count, self.num_done[kind] = self.num_done[kind], 0
        return count

    def credit(self, kind: int, taken: int) -> None:
        self.queue.append(lambda: self.world.peers[self.target, self.source].hear_credit(kind, taken))

    def step(self, dice: random.Random) -> bool:
        """Let the oldest thing arrive, or not yet."""
        if not self.queue or dice.random() < self.world.held_back:
            return False
        self.queue.popleft()()
        return True

    def _copy(self, kind: int, slot: int, word: int) -> None:
        here, there = self.world.ranks[self.source], self.world.ranks[self.target]
        receiver = self.world.peers[self.target, self.source].receiver(kind)
        nbytes = parse_chunk_word(word, here.shape.size(kind)).nbytes
        receiver.admit(slot, nbytes)
        at = here.shape.out_offset(here.partners.index(self.target)) + here.shape.base(kind)
        to = there.shape.in_offset(there.partners.index(self.source)) + there.shape.base(kind)
        offset = slot * here.shape.size(kind)
        ctypes.memmove(there.staging.data_ptr() + to + offset, here.staging.data_ptr() + at + offset, nbytes)
        forged = self.forge(kind, word, there.staging.data_ptr() + to + offset)
        receiver.arrive(word, nbytes)
        if forged != word:
            there.words[there.shape.stream_words(there.partners.index(self.source), kind)[2] + slot] = forged
        self.num_done[kind] += 1


class HostsRank:
    """The memory and kernels of one rank; kernels of a GPU are loaded by a subclass."""

    NUM_RESULTS = 3  # slots

    def __init__(self, case: HostsCase, rank: int, device: str = "cpu") -> None:
        self.case, self.rank, self.device = case, rank, torch.device(device)
        self.view = island_topology(rank, case.islands)
        self.partners, self.position = self.view.partners(), self.view.here.index(rank)
        self.num_local = len(self.view.here)
        self.meta = meta_bytes(max(map(len, case.islands)), case.num_topk, case.num_scales)
        record = max(2 * case.hidden, case.row_bytes + self.meta)
        row = row_nbytes(case.num_ranks, len(case.islands), case.num_experts)
        self.shape = shape_for(rank, case.islands, case.num_slots, case.chunk_records * record, row)
        self.page = self._host_words(self.shape.num_words)
        self.words = memoryview(self.page.numpy().data).cast("B").cast("Q")
        self.staging = torch.full((max(16, self.shape.staging_bytes),), 0xA5, dtype=torch.uint8, device=device)
        self.control = torch.zeros(control_layout(self.num_local).nbytes, dtype=torch.uint8, device=device)
        view = control_layout(self.num_local).offset("view")
        self.control[view : view + 8].view(torch.int64).fill_((1 << self.num_local) - 1)
        self.state = torch.zeros(state_layout().nbytes, dtype=torch.uint8, device=device)
        begin_epoch(self.state, case.first)
        self.reports = self._host_words(NUM_REPORTS * REPORT_WORDS)
        self.abort, self.exchanged = self._host_words(NEWS_WORDS), self._host_words(1)
        self.max_rows = case.num_ranks * case.max_tokens
        rows = self.max_rows
        self.offsets = [2 * case.hidden * rows]
        for width in (8 * case.num_topk, 4 * case.num_topk, 4 * case.num_scales):
            self.offsets.append(self.offsets[-1] + width * rows // 16 * 16 + 16)
        self.slot_bytes = -(-(self.offsets[-1] + 8 * rows) // 256) * 256
        self.slots = torch.empty(self.NUM_RESULTS, self.slot_bytes, dtype=torch.uint8, device=device)
        self.now = rank  # the slot in use: each rank has another one, and another one in each call
        self.mailbox = self._host_words(8 + case.num_local_experts)
        self.out = torch.empty(case.num_tokens[rank], case.hidden, dtype=torch.bfloat16, device=device)
        self.keep: dict[str, torch.Tensor] = {}
        self.experts = case.experts.to(device)
        self.kernels: dict[str, Any] = {}

    def _host_words(self, count: int) -> torch.Tensor:
        is_pinned = self.device.type != "cpu"
        return torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=is_pinned)

    def load(self, ranks: Sequence[HostsRank]) -> None:
        """Build kernels and their arguments; `ranks`: all."""
        here = [ranks[peer] for peer in self.view.here]
        self.set_routes(self.routes_among(here))
        for path, params in sized_kernels(HOST_KERNELS, room_of(self.num_local)).items():
            library = build(path, hosts_head(self.num_local, self.case.stall_one_in), entries_of(params))
            for name, kind in params.items():
                self.kernels[name] = getattr(library, f"launch_{name}"), kind()
                self.fill(self.kernels[name][1], here)

    def routes_among(self, here: Sequence[HostsRank]) -> Any:
        """Return its routes; `here`: the ranks of its island."""
        pages = [PageAddresses(each.shape, each.page.data_ptr(), each.staging.data_ptr()) for each in here]
        return make_routes(self.rank, self.case.islands, pages, self.case.first)

    def set_routes(self, routes: Any) -> None:
        """Copy routes to where kernels read them."""
        self.routes = torch.frombuffer(bytearray(routes), dtype=torch.uint8).to(self.device)

    def fill(self, args: Any, here: Sequence[HostsRank]) -> None:
        case, host = self.case, args.host
        chunks = case.num_ranks * -(-case.max_tokens // case.chunk_records)
        tokens, room = case.num_tokens[self.rank], case.max_tokens
        for name, count in (
            ("expert_of", tokens * case.num_topk),
            ("rank_places", tokens * case.num_ranks),
            ("host_records", tokens * len(case.islands)),
            ("record_tokens", len(case.islands) * room),
            ("counts", case.num_ranks**2),
            ("records", case.num_ranks * len(case.islands)),
            ("row_base", (case.num_ranks + 1) * self.num_local),
            ("served_places", max(1, len(self.view.sources())) * room * self.num_local),
            ("pull_order", chunks),
            ("info", 5 + case.num_local_experts),
        ):
            if name not in self.keep:
                self.keep[name] = torch.full((count + 4,), -77, dtype=torch.int32, device=self.device)
            part = self.keep[name]
            setattr(host, name, part.data_ptr())
        host.routes, host.host, host.experts = self.routes.data_ptr(), self.view.host, self.experts.data_ptr()
        host.num_ranks, host.num_hosts, host.num_tokens = case.num_ranks, len(case.islands), tokens
        host.num_topk, host.num_experts, host.max_tokens = case.num_topk, case.num_experts, room
        host.chunk_records, host.num_slots = case.chunk_records, case.num_slots
        call = host.call
        call.rank, call.op, call.timeout_ns = self.position, 1, int(case.timeout_s * 1e9)
        call.report, call.abort, call.exchanged = (
            part.data_ptr() for part in (self.reports, self.abort, self.exchanged)
        )
        for position, peer in enumerate(here):
            call.control[position], host.state[position] = peer.control.data_ptr(), peer.state.data_ptr()
            if hasattr(args, "slots"):
                args.slots[position] = peer.slots.data_ptr()
        for name, value in (
            ("max_recv_rows", self.max_rows),
            ("max_rows", self.max_rows),
            ("num_grants", self.NUM_RESULTS),
            ("num_slots", self.NUM_RESULTS),
            ("slot_bytes", self.slot_bytes),
            ("signature", 77),
            ("mailbox", self.mailbox.data_ptr()),
            ("row_bytes", case.row_bytes if hasattr(args, "num_scales") else 2 * case.hidden),
            ("num_scales", case.num_scales),
            ("piece_bytes", case.piece_bytes),
            ("meta_bytes", self.meta),
            ("max_island", max(map(len, case.islands))),
            ("num_pack_warps", case.warps),
            ("num_pull_warps", case.warps),
            ("num_sum_warps", case.warps),
            ("x_stride", case.row_bytes),
            ("out", self.out.data_ptr()),
        ):
            if hasattr(args, name):
                setattr(args, name, value)
        if hasattr(args, "topk_idx_offset"):
            args.topk_idx_offset, args.weights_offset, args.scales_offset, args.src_token_offset = self.offsets

    def launch(self, name: str, grid: int, threads: int, shared_bytes: int) -> None:
        function, args = self.kernels[name]
        function(grid, threads, ctypes.c_size_t(shared_bytes), ctypes.byref(args))

    @property
    def slot(self) -> torch.Tensor:
        """The bytes of the slot in use."""
        return self.slots[self.now % self.NUM_RESULTS]

    def _take_slot(self) -> None:
        self.now += 1
        self.kernels["layout_hosts"][1].grant = self.now % self.NUM_RESULTS
        self.kernels["combine_hosts_bf16"][1].slot = self.now % self.NUM_RESULTS

    def dispatch(self, given: Routed) -> None:
        """Run both kernels."""
        self._take_slot()
        self.slot.fill_(0xEE)
        self.lay_out(given)
        self.move(given)

    def lay_out(self, given: Routed) -> None:
        """Run the first kernel."""
        case = self.case
        assert given.topk_idx is not None
        self.kernels["layout_hosts"][1].topk_idx = given.topk_idx.data_ptr()
        hosts = len(case.islands)
        self.launch("layout_hosts", 1, 64, layout_shared_bytes(64, case.num_ranks, hosts, case.num_experts))

    def move(self, given: Routed) -> None:
        """Run the second kernel."""
        case = self.case
        args = self.kernels["dispatch_hosts"][1]
        values, scales = given.x if isinstance(given.x, tuple) else (given.x, None)
        args.x = values.data_ptr()
        if scales is not None:
            args.scales, (args.scale_row_stride, args.scale_column_stride) = scales.data_ptr(), scales.stride()
        args.has_weights = given.topk_weights is not None
        args.topk_weights = given.topk_weights.data_ptr() if given.topk_weights is not None else 0
        stage = min(case.piece_bytes, case.row_bytes) + self.meta
        flows = len(case.islands) + len(self.view.elsewhere)
        shared = move_shared_bytes(flows, case.num_slots, 2 * case.warps, stage)
        self.launch("dispatch_hosts", case.grid, 32 * (2 * case.warps + 2), shared)

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """Return the sums of a combine."""
        self._take_slot()
        self.slot[: y.nbytes].copy_(y.contiguous().view(torch.uint8).reshape(-1))
        args, biases = self.kernels["combine_hosts_bf16"][1], self.case.biases()[self.rank]
        args.bias_0, args.bias_1 = (*(bias.data_ptr() for bias in biases), 0, 0)[:2]
        self.out.fill_(float("nan"))
        self.add_up()
        return self.out.clone()

    def add_up(self) -> None:
        """Run the kernel of a combine, whose rows are in the slot."""
        case = self.case
        flows = len(self.view.sources()) + len(case.islands)
        shared = move_shared_bytes(flows, case.num_slots, case.warps, min(case.piece_bytes, 2 * case.hidden))
        self.launch("combine_hosts_bf16", case.grid, 32 * (2 * case.warps + 2), shared)

    def check(self, want: Received) -> None:
        """Compare what has arrived."""
        case, count, rows = self.case, len(want.src_rank), self.max_rows
        assert not self.reports.any(), self.reports.view(NUM_REPORTS, -1)
        info = self.keep["info"]
        assert info[2] == count
        assert info[5 : 5 + case.num_local_experts].tolist() == want.num_tokens_per_expert
        values, scales = want.x if isinstance(want.x, tuple) else (want.x, None)
        assert torch.equal(self.slot[: values.nbytes], values.contiguous().view(torch.uint8).reshape(-1))
        mailbox = self.mailbox.view(torch.int32)
        assert mailbox[0] == 1
        assert mailbox[2] == info[2]
        assert torch.equal(mailbox[5 : 5 + case.num_local_experts], info[5 : 5 + case.num_local_experts].cpu())
        self.mailbox.zero_()
        ends = [*self.offsets, self.offsets[-1] + 8 * rows]
        fields = [self.slot[begin:end] for begin, end in pairwise(ends)]
        assert torch.equal(fields[0].view(torch.int64)[: rows * case.num_topk].view(rows, -1)[:count], want.topk_idx)
        if want.topk_weights is not None:
            weights = fields[1].view(torch.float32)[: rows * case.num_topk].view(rows, -1)[:count]
            assert torch.equal(weights, want.topk_weights)
        if scales is not None:
            assert torch.equal(fields[2].view(torch.float32)[: rows * case.num_scales].view(rows, -1)[:count], scales)
        assert torch.equal(fields[3].view(torch.int64)[:count], want.src_token)
        assert (self.slot[case.row_bytes * count : self.offsets[0]] == 0xEE).all()  # nothing behind the last row

    def rows(self, count: int) -> torch.Tensor:
        """The first received rows."""
        size = 2 * self.case.hidden * count
        return self.slot[:size].view(torch.bfloat16).view(count, self.case.hidden)


class HostsWorld:
    """All ranks, and the wire between their proxies."""

    def __init__(self, case: HostsCase, held_back: float = 0.3) -> None:
        self.case, self.held_back = case, held_back
        self.ranks = [HostsRank(case, rank) for rank in range(case.num_ranks)]
        for rank in self.ranks:
            rank.load(self.ranks)
        self.wires: dict[tuple[int, int], CopyWire] = {}
        self.peers: dict[tuple[int, int], ProxyPeer] = {}
        for rank in self.ranks:
            for index, partner in enumerate(rank.partners):
                ends = rank.rank, partner
                self.wires[ends] = CopyWire(self, *ends)
                readers = range(rank.num_local)
                self.peers[ends] = ProxyPeer(rank.words, rank.shape, index, 0, case.first, readers, rank.position)
        self.errors: list[BaseException] = []
        self.is_over = False

    def abort(self) -> None:
        """End all kernels."""
        for rank in self.ranks:
            rank.words[ABORT] = 3
            rank.abort[0] = 1

    def again(self) -> None:
        """Prepare for another `run`."""
        self.is_over = False

    def run(self, calls: Callable[[HostsRank], None]) -> None:
        """Run something on all ranks, while the wire moves chunks; raises the first error."""
        wire = threading.Thread(target=self._guarded, args=(self._carry,))
        threads = [threading.Thread(target=self._guarded, args=(calls, rank)) for rank in self.ranks]
        for thread in (wire, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        self.is_over = True
        wire.join()
        if self.errors:
            raise self.errors[0]

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except BaseException as exc:  # noqa: BLE001 - raised in `run`
            self.errors.append(exc)
            self.abort()

    def _carry(self) -> None:
        dice = random.Random(self.case.seed)
        pause = threading.Event()
        while not self.is_over:
            has_moved = False
            for ends, peer in self.peers.items():
                has_moved |= peer.turn(self.wires[ends])
                has_moved |= self.wires[ends].step(dice)
            if not has_moved:
                pause.wait(0.0002)


def run_case(case: HostsCase) -> HostsWorld:
    """Run the calls of a case and compare all that arrives."""
    inputs = [case.inputs(call) for call in range(case.num_calls)]
    placed = [case.placed(given) for given in inputs]
    received = [reference.dispatch(given, case.num_experts, layout="rank") for given in placed]
    gen = torch.Generator().manual_seed(case.seed)
    y = [
        [torch.randn(len(there.src_rank), case.hidden, generator=gen).to(torch.bfloat16) for there in each]
        for each in received
    ]
    sums = [
        reference.combine_by_host(*each, case.host_of, bias=case.biases())
        for each in zip(placed, received, y, strict=True)
    ]
    world = HostsWorld(case)

    def calls(rank: HostsRank) -> None:
        for call in range(case.num_calls):
            rank.dispatch(inputs[call][rank.rank])
            rank.check(received[call][rank.rank])
            for _ in range(1 + call % 2):  # a handle serves more than one combine
                out = rank.combine(y[call][rank.rank])
                assert not rank.reports.any(), rank.reports.view(NUM_REPORTS, -1)
                assert torch.equal(out.view(torch.int16), sums[call][rank.rank].view(torch.int16))

    world.run(calls)
    return world
