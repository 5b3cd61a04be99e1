"""A simulator of proxies: kernels, processes of proxies and a network take steps in a random order.

The proxies run the package's own machines (`ProxyPeer`) over a simulated transport. A step of a proxy is one turn; each
word that it loads or stores may let kernels and the network take steps in between. A chunk has two parts, which are
filled, sent, stored and read in steps of their own, so that a word which comes too early is seen.

Checked: every reader finds in every chunk what its sender has put there, in order, each once; and all of it comes to an
end within a bounded number of steps.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from epee.errors import ProtocolError
from epee.link.proxy.chunks import ChunkRun
from epee.link.proxy.peer import ProxyPeer
from epee.link.proxy.words import CHUNKS, KINDS, ProxyShape, chunk_word, island_topology, parse_chunk_word
from epee.link.topology import Topology

NUM_PARTS = 2
SLOT_BYTES, ROW_BYTES = 4096, 256
NESTED = 0.1  # how often an access to a word lets others take a step


class Violation(AssertionError):
    """A reader has found something else than its sender has sent, or a proxy has refused what was right."""


class Crash(Exception):
    """A process has died between two accesses to words."""


class SharedWords:
    """64-bit words, each access to which may let others take a step."""

    def __init__(self, words: memoryview, step: Callable[[], object]) -> None:
        self._words, self._step = words, step

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return SharedWords(self._words[at], self._step)
        self._step()
        return self._words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self._step()
        self._words[at] = value
        self._step()


class Wire:
    """One direction of a connection: what was given to it, and what has left and not arrived yet."""

    def __init__(self, world: World, source: int, target: int, process: int) -> None:
        self.world, self.source, self.target, self.process = world, source, target, process
        self.given: deque[tuple[int, int, int]] = deque()  # kind, slot, chunk word; its bytes are still in the slot
        self.sent: deque[tuple[Any, ...]] = deque()
        self.num_read = dict.fromkeys(KINDS, 0)
        self.stored = 0  # parts of the chunk that arrives

    def read(self) -> bool:
        """Take the bytes of the oldest chunk out of its slot."""
        if not self.given:
            return False
        kind, slot, word = self.given.popleft()
        parts = self.world.slots[self.source, "out", self.target, kind, slot]
        self.sent.extend(("part", kind, slot, i, parts[i]) for i in range(NUM_PARTS))
        self.sent.append(("word", kind, word))
        self.num_read[kind] += 1
        return True

    def deliver(self) -> bool:
        """Let the oldest thing arrive at the other end."""
        if not self.sent:
            return False
        what, kind, *rest = self.sent.popleft()
        peer = self.world.peers[self.target, self.source, self.process]
        if what == "credit":
            peer.hear_credit(kind, rest[0])
        elif what == "part":
            slot, i, content = rest
            peer.receiver(kind).admit(slot, self.world.size_of(kind))
            self.world.slots[self.target, "in", self.source, kind, slot][i] = content
        else:
            word = rest[0]
            peer.receiver(kind).arrive(word, parse_chunk_word(word, SLOT_BYTES).nbytes)
        return True


class SimTransport:
    """A `ChunkTransport` over a wire."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def send(self, kind: int, run: ChunkRun) -> None:
        for i, word in enumerate(run.words()):
            self.wire.given.append((kind, run.slot + i, word))

    def num_read(self, kind: int) -> int:
        count, self.wire.num_read[kind] = self.wire.num_read[kind], 0
        return count

    def credit(self, kind: int, taken: int) -> None:
        self.wire.sent.append(("credit", kind, taken))


@dataclass(eq=False)
class Writer:
    """A kernel that fills the slots of one stream."""

    world: World
    rank: int
    partner: int
    kind: int
    words: tuple[Any, ...]
    next: int
    end: int
    parts: int = 0

    def step(self) -> bool:
        shape = self.world.shapes[self.rank]
        posted, freed, num_slots = self.words[0], self.words[1], shape.slots(self.kind)
        if self.next == self.end:
            return False
        slot = self.next % num_slots
        if self.next >= self.world.first + num_slots and freed[slot] != self.next - num_slots + 1:
            return False
        if self.parts < NUM_PARTS:
            parts = self.world.slots[self.rank, "out", self.partner, self.kind, slot]
            parts[self.parts] = (self.rank, self.partner, self.kind, self.next, self.parts, self.world.epoch)
            self.parts += 1
            return True
        nbytes = self.world.nbytes_of(self.kind, self.next)
        posted[slot] = chunk_word(self.next, nbytes, self.world.is_for_one(self.kind, self.next))
        self.next, self.parts = self.next + 1, 0
        return True


@dataclass(eq=False)
class Reader:
    """A kernel of rank `reader` that takes what has arrived from `source` at rank `owner` of its island."""

    world: World
    reader: int
    owner: int
    source: int
    kind: int
    words: tuple[Any, ...]
    position: int
    next: int
    end: int
    seen: list[Any] = field(default_factory=list)

    def step(self) -> bool:
        while self.next < self.end and self.world.is_for_one(self.kind, self.next) and self.reader != self.owner:
            self.next += 1
        if self.next == self.end:
            return False
        arrived, taken = self.words[2], self.words[3]
        shape = self.world.shapes[self.owner]
        slot = self.next % shape.slots(self.kind)
        if not self.seen:
            word = arrived[slot]
            chunk, nbytes, _ = parse_chunk_word(word, SLOT_BYTES)
            if chunk != self.next:
                return False
            if nbytes != self.world.nbytes_of(self.kind, chunk):
                raise Violation(f"rank {self.reader} found {nbytes} bytes of chunk {chunk}")
            self.seen.append(word)
            return True
        if len(self.seen) <= NUM_PARTS:
            i = len(self.seen) - 1
            found = self.world.slots[self.owner, "in", self.source, self.kind, slot][i]
            if found != (self.source, self.owner, self.kind, self.next, i, self.world.epoch):
                raise Violation(f"rank {self.reader} found {found} as part {i} of chunk {self.next}")
            self.seen.append(found)
            return True
        taken[slot * shape.num_readers + self.position] = self.next + 1
        self.next, self.seen = self.next + 1, []
        return True


class World:
    """Proxies of all ranks of some islands, with kernels that send `num_chunks` chunks in every stream.

    Args:
        seed: of all choices.
        islands: the ranks of each.
        num_slots, num_processes: of the shape.
        num_chunks: of each stream of chunks; a third as many rows.
        first: number of the first chunk of the epoch.
        dead: this rank takes nothing and has no streams; its island's proxies hear of it after a while.
        has_ones: some runs of chunks are for one reader.
    """

    def __init__(
        self,
        seed: int,
        islands: Sequence[Sequence[int]] = ((0,), (1,)),
        num_slots: int = 4,
        num_processes: int = 1,
        num_chunks: int = 40,
        first: int = 0,
        dead: int = -1,
        has_ones: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.has_ones, self.dead, self.islands, self.num_chunks = has_ones, dead, islands, num_chunks
        self.shapes: dict[int, ProxyShape] = {}
        self.slots: dict[tuple[Any, ...], list[Any]] = {}
        self._topologies = {rank: island_topology(rank, islands) for island in islands for rank in island}
        self._words: dict[int, SharedWords] = {}
        for rank, topology in self._topologies.items():
            partners = topology.partners()
            shape = ProxyShape(len(partners), len(topology.here), num_slots, SLOT_BYTES, ROW_BYTES, num_processes)
            self.shapes[rank] = shape
            page = memoryview(bytearray(8 * shape.num_words)).cast("Q")
            self._words[rank] = SharedWords(page, self._others)
            for partner, kind, way in itertools.product(partners, KINDS, ("out", "in")):
                for slot in range(shape.slots(kind)):
                    self.slots[rank, way, partner, kind, slot] = [None] * NUM_PARTS
        self.epoch = -1
        self.begin(first)

    def begin(self, first: int) -> None:
        """Begin an epoch in the memory of the one before: new connections, machines and kernels."""
        self.first, self.epoch = first, self.epoch + 1
        self.peers: dict[tuple[int, int, int], ProxyPeer] = {}
        self.wires: list[Wire] = []
        self.turns: list[tuple[tuple[int, int], Callable[[], bool]]] = []
        self.kernels: list[Writer | Reader] = []
        self._busy: list[Any] = []  # processes and kernels that are in a step
        self._crash: tuple[Any, int] | None = None  # which process dies, after how many accesses to words
        for rank, topology in self._topologies.items():
            for index, partner in enumerate(topology.partners()):
                self._add_pair(rank, partner, index, self._words[rank], topology, self.num_chunks)
        self.readers = [kernel for kernel in self.kernels if isinstance(kernel, Reader)]

    def _add_pair(
        self, rank: int, partner: int, index: int, words: SharedWords, topology: Topology, num_chunks: int
    ) -> None:
        shape, readers = self.shapes[rank], topology.here
        for kind in KINDS:
            at, count = shape.stream_words(index, kind), shape.slots(kind)
            parts = (*(words[i : i + count] for i in at[:3]), words[at[3] : at[3] + count * shape.num_readers])
            end = self.first + (num_chunks if kind == CHUNKS else num_chunks // 3)
            if self.dead in (rank, partner):
                continue
            self.kernels.append(Writer(self, rank, partner, kind, parts, self.first, end))
            for position, reader in enumerate(readers):
                if reader != self.dead:
                    self.kernels.append(Reader(self, reader, rank, partner, kind, parts, position, self.first, end))
        for process in range(shape.num_processes):
            own = readers.index(rank)
            peer = ProxyPeer(words, shape, index, process, self.first, range(len(readers)), own)
            wire = Wire(self, rank, partner, process)
            transport = SimTransport(wire)
            self.peers[rank, partner, process] = peer
            self.wires.append(wire)
            self.turns.append(((rank, process), functools.partial(peer.turn, transport)))

    def is_for_one(self, kind: int, chunk: int) -> bool:
        """Return whether the owner of the page alone takes a chunk: some chunks in runs, as those of a combine."""
        return self.has_ones and kind == CHUNKS and chunk // 7 % 2 == 1

    def nbytes_of(self, kind: int, chunk: int) -> int:
        return 16 * (chunk // 3 % 5) if kind == CHUNKS else ROW_BYTES

    def size_of(self, kind: int) -> int:
        return SLOT_BYTES if kind == CHUNKS else ROW_BYTES

    def _others(self) -> None:
        """Let a kernel or the network take a step while a proxy is in a turn, or the proxy die."""
        if self._crash is not None and self._busy and self._busy[-1] == self._crash[0]:
            self._crash = self._crash[0], self._crash[1] - 1
            if not self._crash[1]:
                raise Crash
        if self._busy and len(self._busy) < 4 and self.random.random() < NESTED:
            self._step()

    def _step(self) -> bool:
        kind = self.random.random()
        if kind < 0.3:
            return bool(self.turns) and self._as(*self.random.choice(self.turns))
        if kind < 0.6:
            kernel = self.random.choice(self.kernels)
            return self._as(kernel, kernel.step)
        wire = self.random.choice(self.wires)
        return wire.read() if kind < 0.75 else self._as((wire.target, wire.process), wire.deliver)

    def _as(self, actor: Any, step: Callable[[], bool]) -> bool:
        """Let an actor take a step, unless it is in one."""
        if actor in self._busy:
            return False
        self._busy.append(actor)
        try:
            return step()
        except Crash:
            self._end_process(actor)
            return True
        finally:
            self._busy.remove(actor)

    def crash(self, rank: int, process: int, num_accesses: int, num_steps: int) -> None:
        """Let a process die after some accesses to words, and go on for some steps; checks what `run` checks."""
        self._crash = (rank, process), num_accesses
        for _ in range(num_steps):
            self._step()

    def _end_process(self, actor: Any) -> None:
        """End the connections of a process: what it has sent may arrive, or a part of that."""
        for wire in list(self.wires):
            if wire.process == actor[1] and actor[0] in (wire.source, wire.target):
                wire.given.clear()
                while wire.sent and self.random.random() < 0.8:
                    wire.sent.pop()
                if wire.target == actor[0]:
                    wire.sent.clear()
        for key in [key for key in self.peers if key[2] == actor[1] and actor[0] in key[:2]]:
            turn = self.peers[key].turn
            self.turns = [each for each in self.turns if each[1].func != turn]  # type: ignore[attr-defined]

    def run(self, max_steps: int = 60_000) -> int:
        """Take steps until every reader has everything; return their number."""
        for count in range(max_steps):
            if count % 50 == 0 and all(each.next == each.end for each in self.readers):
                return count
            if self.dead >= 0 and count == 2000:
                self._drop_dead()
            try:
                self._step()
            except ProtocolError as exc:
                raise Violation(f"refused: {exc}") from exc
        raise Violation(f"not at the end after {max_steps} steps")

    def _drop_dead(self) -> None:
        for (rank, _, _), peer in self.peers.items():
            island = island_topology(rank, self.islands).here
            if self.dead in island and rank != self.dead:
                peer.drop_reader(island.index(self.dead))
