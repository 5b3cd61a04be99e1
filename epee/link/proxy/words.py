"""The words in shared memory by which kernels, a rank and its proxy know each other's progress, and where they lie.

A *partner* is a rank of another island with which this rank exchanges chunks; there is one stream in each direction, of
two kinds: *chunks* of up to 128 records in `num_slots` slots, and *rows* (the counts of a call) in `ROW_SLOTS` slots.
Slots to send from and slots to receive in lie in the staging; the words lie in the *page*. The rank makes both, its
proxy and the ranks of its island map them.

    word                    value                 written by                           read by
    posted[slot]            chunk word            kernel of this rank: slot is full    proxy
    freed[slot]             chunk + 1             proxy: the bytes have been read      kernel of this rank
    arrived[slot]           chunk word            proxy: all bytes have been stored    kernels of the island
    taken[slot][reader]     chunk + 1             kernel of one rank of the island     proxy
    ABORT                   reason, 0: none       rank or proxy, once                  all
    SERVING, LOST, ASLEEP   see below             one process of the proxy             rank, kernels of the island

A chunk word holds the number of the chunk plus 1, the number of its bytes and flags (`chunk_word`). Numbers count from
the first one of an epoch on and grow for its life; each word is compared with the one number that is due, so what an
earlier epoch has left is never taken for a newer chunk. A proxy has up to `MAX_PROCESSES` processes: process i of n
serves the chunks whose number is i modulo n, which always lie in the same slots, so every word has one writer.

Order: a writer stores its data before its word. x86-64 keeps stores in order, kernels release their words to the
system, and a reader that has seen the word reads the data behind it. A slot to send from is filled for chunk c when
`freed` says c - num_slots + 1; a slot to receive in is written for c when all of its readers have taken c - num_slots,
which the receiving proxy reports as credit.

A crash between two steps leaves a word that does not announce the data before it: bytes in a slot that is never sent,
never read, or never freed. Nobody uses such a slot until the next epoch. Its words are equal to none that this epoch
expects: each epoch begins with a number above all numbers of the epochs before it.

Pure: sizes and offsets, no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import InvalidArgument, ProtocolError
from ...values import is_whole
from ..topology import Topology

NUMBER_BITS, SIZE_BITS = 40, 24
UNIT_BYTES = 16  # chunks have a multiple of it: kernels copy no less; the bits below are flags
FOR_ONE = 1  # flag: the rank that owns the page is the only reader (partial sums of a combine)
CALL_SHIFT, CALL_BITS = 1, 2  # flags with which kernels compare a chunk's call with theirs; the proxy passes them on
MAX_CHUNK_BYTES = (1 << SIZE_BITS) - UNIT_BYTES
MAX_NUMBER = (1 << NUMBER_BITS) - 1  # more than a year of 30,000 chunks a second
CHUNKS, ROWS = KINDS = (0, 1)
ROW_SLOTS = 2  # a rank is at most one call ahead of any other
MAX_SLOTS, MAX_PARTNERS, MAX_READERS, MAX_PROCESSES = 64, 63, 16, 16
WORD_BYTES, LINE_WORDS = 8, 8  # words of different writers lie in different cache lines
# The words of one process; all of them have line 0
ABORT = 0
SERVING, LOST, ASLEEP = range(3)  # epoch + 1 once all partners are met; bits of partners; 1 while it sleeps
REASONS = ("", "the rank has ended its proxy", "a process of the proxy has ended", "the proxy has failed")
BY_RANK, PROCESS_ENDED, PROXY_FAILED = range(1, 4)


class ChunkWord(NamedTuple):
    """The parts of a chunk word: number of the chunk, bytes, whether the owner of the page is the only reader."""

    chunk: int
    nbytes: int
    is_for_one: bool = False


def chunk_word(chunk: int, nbytes: int, is_for_one: bool = False) -> int:
    """Return the word that announces a chunk: number + 1, bytes (a multiple of `UNIT_BYTES`), flags."""
    assert nbytes % UNIT_BYTES == 0 <= nbytes <= MAX_CHUNK_BYTES
    assert 0 <= chunk < MAX_NUMBER
    return (chunk + 1) << SIZE_BITS | nbytes | (FOR_ONE if is_for_one else 0)


def parse_chunk_word(word: int, slot_bytes: int) -> ChunkWord:
    """Return the parts of a chunk word; `ProtocolError` if it names more bytes than a slot has, or unknown flags."""
    low = word & ((1 << SIZE_BITS) - 1)
    flags, nbytes = low % UNIT_BYTES, low - low % UNIT_BYTES
    if flags >> CALL_SHIFT + CALL_BITS or nbytes > slot_bytes:
        raise ProtocolError(f"the word {word:#x} announces {nbytes} bytes with flags {flags}; a slot has {slot_bytes}")
    return ChunkWord((word >> SIZE_BITS) - 1, nbytes, bool(flags))


def island_topology(rank: int, islands: Sequence[Sequence[int]]) -> Topology:
    """Return the topology of ranks whose GPUs map each other in groups.

    Args:
        rank: this one.
        islands: the ranks of each island, ascending; together all ranks 0 ... n - 1, each once.

    Raises:
        InvalidArgument: they are not.
    """
    island_of = {peer: number for number, island in enumerate(islands) for peer in island}
    num_ranks = sum(map(len, islands))
    is_ascending = all(list(island) == sorted(island) and len(island) for island in islands)
    if sorted(island_of) != list(range(num_ranks)) or rank not in island_of or not is_ascending:
        raise InvalidArgument(
            f"islands must hold each rank once, ascending, rank {rank} among them, got {list(map(list, islands))}"
        )
    return Topology(rank, [str(island_of[peer]) for peer in range(num_ranks)])


@dataclass(frozen=True)
class ProxyShape:
    """The sizes on which both ends of a stream, the kernels and the rank agree; equal on all ranks but for the first
    two.

    Attributes:
        num_partners: ranks of other islands that this one has streams with.
        num_readers: ranks of this island.
        num_slots: slots of each stream of chunks, a multiple of `num_processes`.
        slot_bytes: size of one, a multiple of `UNIT_BYTES`.
        row_bytes: size of a slot for rows, a multiple of `UNIT_BYTES`.
        num_processes: processes of the proxy, each with one connection to each partner.

    Raises:
        InvalidArgument: a number breaks its rule.
    """

    num_partners: int
    num_readers: int
    num_slots: int
    slot_bytes: int
    row_bytes: int
    num_processes: int = 1

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_partners", 0, MAX_PARTNERS),
            ("num_readers", 1, MAX_READERS),
            ("num_slots", 1, MAX_SLOTS),
            ("slot_bytes", UNIT_BYTES, MAX_CHUNK_BYTES),
            ("row_bytes", UNIT_BYTES, MAX_CHUNK_BYTES),
            ("num_processes", 1, MAX_PROCESSES),
        ):
            if not is_whole(getattr(self, name), low, high):
                raise InvalidArgument(f"{name} must be a number from {low} to {high}, got {getattr(self, name)!r}")
        if self.slot_bytes % UNIT_BYTES or self.row_bytes % UNIT_BYTES:
            sizes = f"{self.slot_bytes} and {self.row_bytes}"
            raise InvalidArgument(f"slot_bytes and row_bytes must be multiples of {UNIT_BYTES}, got {sizes}; round up")
        if self.num_slots % self.num_processes:
            raise InvalidArgument(
                f"num_slots must be a multiple of num_processes, got {self.num_slots} and {self.num_processes}; "
                "each process has slots of its own"
            )

    def slots(self, kind: int) -> int:
        """Return the number of slots of a stream of this kind."""
        return self.num_slots if kind == CHUNKS else ROW_SLOTS

    def size(self, kind: int) -> int:
        """Return the bytes of a slot of a stream of this kind."""
        return self.slot_bytes if kind == CHUNKS else self.row_bytes

    def base(self, kind: int) -> int:
        """Return the byte offset of the slots of this kind among those of one partner and direction."""
        return 0 if kind == CHUNKS else self.num_slots * self.slot_bytes

    @property
    def area_bytes(self) -> int:
        """Bytes of the slots of one partner and direction."""
        return self.base(ROWS) + ROW_SLOTS * self.row_bytes

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging: the areas to send from, by partner, then those to receive in."""
        return 2 * self.num_partners * self.area_bytes

    def out_offset(self, partner: int) -> int:
        """Return the byte offset in the staging of the area from which a partner (by index) is sent to."""
        return partner * self.area_bytes

    def in_offset(self, partner: int) -> int:
        """Return the byte offset in the staging of the area in which a partner's chunks arrive."""
        return (self.num_partners + partner) * self.area_bytes

    # ---- the page

    def process_words(self, process: int) -> int:
        """Return the index of the first word of a process: SERVING, LOST, ASLEEP."""
        return LINE_WORDS * (1 + process)

    def stream_words(self, partner: int, kind: int) -> tuple[int, int, int, int]:
        """Return the indices of `posted`, `freed`, `arrived` and `taken` of a stream; the last by slot, then reader."""
        first = LINE_WORDS * (1 + self.num_processes) + partner * self._partner_words
        first += self._kind_words(CHUNKS) if kind == ROWS else 0
        column = _lines(self.slots(kind))
        return first, first + column, first + 2 * column, first + 3 * column

    def _kind_words(self, kind: int) -> int:
        return 3 * _lines(self.slots(kind)) + _lines(self.slots(kind) * self.num_readers)

    @property
    def _partner_words(self) -> int:
        return sum(map(self._kind_words, KINDS))

    @property
    def num_words(self) -> int:
        """Words of the page."""
        return LINE_WORDS * (1 + self.num_processes) + self.num_partners * self._partner_words


def _lines(count: int) -> int:
    return -(-count // LINE_WORDS) * LINE_WORDS
