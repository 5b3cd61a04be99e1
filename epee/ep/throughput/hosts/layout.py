"""The memory layout of records (`host_records.py`), and the rounds in which they travel: pure functions of sizes.

Tokens travel in chunks, `[k * length, (k + 1) * length)` in round k, so that every rank computes by itself in which
round a token arrives, and memory for two rounds is enough. A section holds the records of one round for one host:

    count   8 words, the first is the number of records
    meta    [count][words] int64: bits; then token, ids and weights as `throughput/rows.py` packs them (rank layout)
    rows    [count][row words] int64
    scales  [count][scale words] int32

A cached dispatch sends no bits, tokens and ids: the receivers have them in the handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ....engine.limits import MIN_STAGING_BYTES
from ....link.topology import Roles
from ....memory.layout import align_up
from ...config import MAX_TOPK, BufferConfig
from ..reduce import accumulator_dtype

CHUNK_TOKENS = 128  # of a record of 14 KiB this is 1.9 MB: enough for a network of 50 GB/s (docs/decisions.md)
CHUNK_BYTES = 2 << 20  # smaller records travel in longer chunks
SUM_BYTES = 4 << 20  # of the rows of one round that a rank lends to the ranks that sum them, or of their sums
MIN_SUMMED = 8  # tokens of a round, however many ranks there are
COUNT_BYTES = 64
NUM_STAGED = 4  # parts of `staging_bytes` that an engine's outbox has


@dataclass(frozen=True)
class Chunks:
    """The chunks of a call's tokens.

    Attributes:
        length: tokens of a round, the same on all ranks.
        count: of rounds, at least 1.
    """

    length: int
    count: int

    @classmethod
    def of(cls, length: int, num_tokens: Sequence[int]) -> Chunks:
        """Cut the tokens of all ranks."""
        return cls(length, max(1, -(-max(num_tokens) // length)))


class SectionLayout(NamedTuple):
    """The layout of a section.

    Attributes:
        meta_words: 8-byte words beside a row, bits included; 0 when nothing travels there.
        row_words: 8-byte words of a row.
        scale_words: 4-byte words of its scales.
    """

    meta_words: int
    row_words: int
    scale_words: int

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return 8 * (self.meta_words + self.row_words) + 4 * self.scale_words

    def nbytes(self, count: int) -> int:
        """Return the bytes of a section with so many records."""
        return COUNT_BYTES + count * self.record_bytes

    def room(self, count: int) -> int:
        """Return the bytes that are set aside for it."""
        return align_up(self.nbytes(count), 64)

    def meta_at(self, base: int) -> int:
        """Return the index, in 8-byte words, of the meta of the section at byte `base`."""
        return (base + COUNT_BYTES) // 8

    def rows_at(self, base: int, count: int) -> int:
        """Return the index, in 8-byte words, of its rows."""
        return self.meta_at(base) + count * self.meta_words

    def scales_at(self, base: int, count: int) -> int:
        """Return the index, in 4-byte words, of its scales."""
        return 2 * (self.rows_at(base, count) + count * self.row_words)


def _widest(config: BufferConfig) -> SectionLayout:
    """Return the layout of a section of the widest records."""
    return SectionLayout(1 + config.meta_words["rank"], config.row_words, config.scale_words)


def _wished_length(config: BufferConfig) -> int:
    record = _widest(config).record_bytes
    return min(config.max_tokens_per_rank, max(CHUNK_TOKENS, CHUNK_BYTES // record))


@lru_cache(maxsize=8)  # the same for all calls of a buffer
def dispatch_length(config: BufferConfig, num_hosts: int, staged: int) -> int:
    """Return the tokens of a round of a dispatch, whatever its payload.

    Args:
        config: of the buffer.
        num_hosts: that a rank sends to; there may be more of them than at creation.
        staged: bytes of a staging buffer.
    """
    fits = (staged // num_hosts // 64 * 64 - COUNT_BYTES) // _widest(config).record_bytes
    return max(1, min(_wished_length(config), fits))


class Parts:
    """The assignment of sums to ranks: a source sums on its own host, and its gateway sums on each other one.

    A host all of whose ranks are lost serves no source, and a lost source is not served.

    Args:
        roles: placement and membership of the ranks.

    Attributes:
        roles: as the argument.
        members: the ranks of the view, ascending.
        served: per member the sources that it serves, ascending.
        lent: per rank the sources that other ranks of its host serve, ascending.
    """

    def __init__(self, roles: Roles) -> None:
        topology, present = roles.topology, sorted(roles.present)
        self.roles, self.members = roles, tuple(present)
        self.served: dict[int, list[int]] = {rank: [] for rank in present}
        for source in present:
            for host in range(topology.num_hosts):
                server = source if host == topology.host_of[source] else roles.gateway(source, host)
                if server is not None:
                    self.served[server].append(source)
        self.lent = {rank: [source for source in present if source not in self.served[rank]] for rank in present}
        self.most_served = max(map(len, self.served.values()))
        self.most_lent = max(map(len, self.lent.values()))


def lent_dtype(layout: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the rows that a rank has for others: its caller's, or the sums of weighted ones."""
    return dtype if layout == "rank" else accumulator_dtype(dtype)


def combine_length(hidden: int, dtype: torch.dtype, parts: Parts) -> int:
    """Return the tokens of a round of a combine.

    Args:
        hidden: elements of a row.
        dtype: of lent rows.
        parts: the assignment of sums to ranks.
    """
    fits = SUM_BYTES // (hidden * dtype.itemsize * max(parts.most_lent, parts.most_served))
    return max(MIN_SUMMED, fits // MIN_SUMMED * MIN_SUMMED)


def staging_bytes(config: BufferConfig) -> int:
    """Return the bytes that an engine must stage for the calls of such a buffer (of which it has four).

    Two of them hold the two rounds of a call that are under way, the others those of the next call.
    """
    section, length = _widest(config), _wished_length(config)
    # shorter rounds suffice if the ranks come to be on more hosts
    dispatch = max(config.num_hosts * section.room(length), config.num_ranks * section.room(min(length, MIN_SUMMED)))
    row = config.hidden * accumulator_dtype(config.dtype).itemsize + config.num_topk * config.weight_dtype.itemsize
    # a round is cut by the narrowest rows that are lent; sums may be the widest, with weights beside
    cut = max(SUM_BYTES * row // (2 * config.hidden), MIN_SUMMED * config.num_ranks * row)
    sums = cut + 128 * config.num_ranks
    return align_up(max(dispatch, 2 * sums, MIN_STAGING_BYTES), 4096)


def network_bytes(num_ranks: int, num_hosts: int, num_tokens: int, hidden: int) -> int:
    """Return the bytes that a rank stages for calls of bfloat16 rows between hosts with equally many ranks.

    They are in its outbox, and in the mirror of one outbox of each other host. Address space, until rows travel.

    Args:
        num_ranks, num_hosts, hidden: sizes.
        num_tokens: most tokens of a rank.

    Raises:
        InvalidArgument: no buffer can be made for such sizes.
    """
    sizes = num_ranks, hidden, MAX_TOPK, num_tokens, torch.bfloat16
    config = BufferConfig(num_ranks, *sizes, num_hosts=num_hosts)
    config.check()
    return num_hosts * NUM_STAGED * staging_bytes(config)
