"""Kernels in Python: they fill slots, store words and read what arrives as those of a GPU would, and check it."""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from epee.link.proxy.rank import Proxy, shape_for
from epee.link.proxy.setup import ProxyEndpoint
from epee.link.proxy.words import CHUNKS, KINDS, ROWS, ProxyShape, chunk_word, parse_chunk_word
from epee.memory.claim import process_start_time
from epee.memory.shared import HEADER_BYTES, SharedRegion
from epee.view.transport.auth import Token

BOUND_S = 40.0
SLOT_BYTES, ROW_BYTES = 1_851_392, 1408  # 128 records of 7168 BF16 elements; the counts of 256 experts


class KernelTimeout(AssertionError):
    """A kernel has waited too long."""


def content(source: int, target: int, kind: int, chunk: int, nbytes: int) -> bytes:
    """Return the bytes of a chunk: equal at both ends, different for each chunk."""
    seed = hashlib.blake2b(f"{source} {target} {kind} {chunk}".encode(), digest_size=64).digest()
    return (seed * (nbytes // 64 + 1))[:nbytes]


def size_of(kind: int, chunk: int, shape: ProxyShape) -> int:
    """Return the bytes of a chunk: nothing, little, or up to a whole slot."""
    size = shape.size(kind)
    return size if chunk % 3 else size // 16 * (chunk % 4) // 4 * 16


class Streams:
    """The kernels of one rank: a writer and a reader of every stream of its own page.

    Args:
        proxy: of the rank; its words and staging are used as kernels use them.
        num_chunks: of every stream of chunks, a third as many rows.
        first: number of the first of the epoch.
        wakes: they wake the proxy, as the CPU does before a launch; kernels cannot.
        positions: of the ranks of the island that are played; by default all.
        partners: indices of those that are sent to; by default all.
    """

    def __init__(
        self,
        proxy: Proxy,
        num_chunks: int,
        first: int = 0,
        wakes: bool = True,
        positions: Sequence[int] | None = None,
        partners: Sequence[int] | None = None,
    ) -> None:
        self.proxy, self.shape, self.first, self.wakes = proxy, proxy.shape, first, wakes
        self.memory = memoryview(proxy.staging.mapping)[HEADER_BYTES:]
        self.ends = {CHUNKS: first + num_chunks, ROWS: first + num_chunks // 3}
        streams = [each for each in _streams(proxy.partners) if partners is None or each[0] in partners]
        self.sent = dict.fromkeys(streams, first)
        self.received = dict.fromkeys(streams, first)
        self.positions = range(self.shape.num_readers) if positions is None else positions

    def step(self) -> bool:
        """Write or read what can be; return whether that was anything."""
        has_moved = False
        for partner, kind in self.sent:
            has_moved |= self._write(partner, kind) | self._read(partner, kind)
        return has_moved

    def _write(self, partner: int, kind: int) -> bool:
        words, shape, chunk = self.proxy.words, self.shape, self.sent[partner, kind]
        posted, freed, _, _ = shape.stream_words(partner, kind)
        count = shape.slots(kind)
        slot = chunk % count
        if chunk == self.ends[kind] or (chunk >= self.first + count and words[freed + slot] != chunk - count + 1):
            return False
        nbytes, at = size_of(kind, chunk, shape), shape.out_offset(partner) + shape.base(kind) + slot * shape.size(kind)
        target = self.proxy.partners[partner]
        self.memory[at : at + nbytes] = content(self.proxy.rank, target, kind, chunk, nbytes)
        words[posted + slot] = chunk_word(chunk, nbytes)
        if self.wakes:
            self.proxy.wake()
        self.sent[partner, kind] = chunk + 1
        return True

    def _read(self, partner: int, kind: int) -> bool:
        words, shape, chunk = self.proxy.words, self.shape, self.received[partner, kind]
        ends = self.proxy.partners[partner], self.proxy.rank
        if chunk == self.ends[kind] or not read_chunk(words, self.memory, shape, partner, kind, chunk, ends):
            return False
        taken, slot = shape.stream_words(partner, kind)[3], chunk % shape.slots(kind)
        for position in self.positions:
            words[taken + slot * shape.num_readers + position] = chunk + 1
        if self.wakes:
            self.proxy.wake()
        self.received[partner, kind] = chunk + 1
        return True

    @property
    def is_done(self) -> bool:
        """True when all has been received, and all that was sent is out of its slots."""
        for (partner, kind), sent in self.sent.items():
            freed = self.shape.stream_words(partner, kind)[1]
            last, count = self.ends[kind] - 1, self.shape.slots(kind)
            is_out = last < self.first or self.proxy.words[freed + last % count] == last + 1
            if sent != self.ends[kind] or self.received[partner, kind] != self.ends[kind] or not is_out:
                return False
        return True


def run_all(streams: Sequence[Streams], stop: Callable[[], bool] = lambda: False, bound_s: float = BOUND_S) -> None:
    """Let the kernels of several ranks of this process run until all is done."""
    deadline = time.monotonic() + bound_s
    while not all(each.is_done for each in streams) and not stop():
        if not sum(each.step() for each in streams):
            time.sleep(0.0002)
            for each in streams:
                each.proxy.check()
        if time.monotonic() > deadline:
            raise KernelTimeout([(each.proxy.rank, each.sent, each.received) for each in streams])


def me() -> tuple[int, int]:
    """Return this process as `island` names it."""
    return os.getpid(), process_start_time(os.getpid())


def proxies(
    islands: Sequence[Sequence[int]], num_slots: int = 4, num_processes: int = 1, engine: str = "tcp", **sizes: int
) -> list[Proxy]:
    """Return a proxy for every rank, all of this process."""
    ranks = sorted(rank for island in islands for rank in island)
    made: list[Proxy] = []
    try:
        for rank in ranks:
            slot, row = sizes.get("slot_bytes", SLOT_BYTES), sizes.get("row_bytes", ROW_BYTES)
            shape = shape_for(rank, islands, num_slots, slot, row, num_processes)
            island = [me()] * shape.num_readers
            made.append(Proxy(rank, islands, island, shape, address="127.0.0.1", engine=engine))
    except BaseException:
        for proxy in made:
            proxy.close()
        raise
    return made


def meet_all(
    made: Sequence[Proxy],
    epoch: int = 0,
    first: int = 0,
    timeout_s: float = 20.0,
    tokens: Sequence[Token] | None = None,
) -> None:
    """Connect all proxies of this process with their partners: each in a thread, as each waits for the others."""
    job, tokens = secrets.token_bytes(16), tokens or [Token(secrets.token_bytes(32))] * len(made)
    offers: dict[int, tuple[ProxyEndpoint, ...]] = {proxy.rank: proxy.offer() for proxy in made}
    errors: list[BaseException] = []

    def meet(proxy: Proxy, token: Token) -> None:
        endpoints = {rank: offers[rank] for rank in proxy.partners if rank in offers}
        try:
            proxy.meet(epoch, first, endpoints, token, job, timeout_s)
        except BaseException as exc:  # noqa: BLE001 - raised below
            errors.append(exc)

    threads = [threading.Thread(target=meet, args=each) for each in zip(made, tokens, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Neighbour:
    """The readers of one rank on the page of another rank of its island, which it has mapped.

    Args:
        rank, partners: of the page.
        shape: of the page.
        blobs: of page and staging.
        position: of the reader.
        num_chunks: as of `Streams`.
    """

    def __init__(
        self,
        rank: int,
        partners: Sequence[int],
        shape: ProxyShape,
        blobs: Sequence[bytes],
        position: int,
        num_chunks: int,
    ) -> None:
        self.rank, self.partners, self.shape, self.position = rank, partners, shape, position
        self.regions = [SharedRegion.attach(blob) for blob in blobs]
        self.words = self.regions[0].words(0, shape.num_words)
        self.memory = memoryview(self.regions[1].mapping)[HEADER_BYTES:]
        self.left = {
            (i, kind): [0, num_chunks if kind == CHUNKS else num_chunks // 3] for i, kind in _streams(partners)
        }

    def step(self) -> bool:
        """Read what has arrived."""
        has_moved = False
        for (partner, kind), (chunk, end) in self.left.items():
            source = self.partners[partner]
            if chunk < end and read_chunk(
                self.words, self.memory, self.shape, partner, kind, chunk, (source, self.rank)
            ):
                taken = self.shape.stream_words(partner, kind)[3]
                slot = chunk % self.shape.slots(kind)
                self.words[taken + slot * self.shape.num_readers + self.position] = chunk + 1
                self.left[partner, kind][0] += 1
                has_moved = True
        return has_moved

    @property
    def is_done(self) -> bool:
        """True when all has been read."""
        return all(chunk == end for chunk, end in self.left.values())


def _streams(partners: Sequence[int]) -> list[tuple[int, int]]:
    return [(i, kind) for i in range(len(partners)) for kind in KINDS]


def read_chunk(
    words: memoryview,
    memory: memoryview,
    shape: ProxyShape,
    partner: int,
    kind: int,
    chunk: int,
    ends: tuple[int, int],
) -> bool:
    """Check the bytes of a chunk from rank `ends[0]` to `ends[1]`, if it has arrived; return whether it has."""
    arrived = shape.stream_words(partner, kind)[2]
    slot = chunk % shape.slots(kind)
    found, nbytes, _ = parse_chunk_word(words[arrived + slot], shape.size(kind))
    if found != chunk:
        return False
    at = shape.in_offset(partner) + shape.base(kind) + slot * shape.size(kind)
    assert nbytes == size_of(kind, chunk, shape)
    assert memory[at : at + nbytes] == content(*ends, kind, chunk, nbytes)
    return True
