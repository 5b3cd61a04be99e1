"""The memory that a rank of a `LatencyBuffer` over several hosts lays into its outbox, and how a call cuts it.

The fields are in the outbox of the buffer's engine (`PeerRegions.extra`), so each rank writes its own only, its host
maps it for reading, and gateways on other hosts keep mirrors. `wire.py` documents what is written when, and what orders
it.

    freed    [num_slots]            the last call whose messages this rank has read, or aborted
    cut      [num_ranks]            up to which call this rank excludes a peer
    waiting  [1]                    its last wait: call, until when, for how long, its ordinal number
    ends     [num_slots]            call that it has begun, how it ended (`latency/aborts.py`), for which lost ranks
    early    [num_slots]            tag of a combine whose weights have been written
    laid     [num_slots]            tag of a combine whose header and `parts` can be read by the own host
    counts   [num_slots][source]    rows in `parts`
    half     [num_slots]            the message: tag, header, reason of a refusal; then, in a dispatch, the records, in
             a combine the sums: an entry for each position of the reading host, then rows
    weights  [num_slots]            of the records, sent ahead of a combine
    parts    [num_slots][source]    sums of this rank's rows, for its own host alone

`half` and `weights` are different for each host: the outbox holds those for the own host, a mirror those for the
mirror's. Pages that are never touched cost nothing.

A section has as many bytes as on one host (`latency/region.py`), so calls of the same sizes fit as there, in memory for
several sizes as well. `half` has as many as sums for all ranks of a host need.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ....memory.layout import Field, Layout, align_up
from ....memory.shared import SharedRegion
from ...config import BufferConfig
from ..aborts import LINE_WORDS
from ..region import HEAD_WORDS, RegionWords, SectionCut, section_bytes
from ..rows import Floats, WireRows

_LINE = 8
HEAD_BYTES = align_up(8 * HEAD_WORDS, 64)
ENTRY_WORDS = 3  # of the sums for one rank: whose rows are in them (a bit per rank), first row, number of rows
Bytes = npt.NDArray[np.uint8]


def latency_layout(config: BufferConfig) -> Layout:
    """Return the fields of a rank; all ranks have agreed on the config."""
    slots, num_ranks = config.num_slots, config.num_ranks
    positions = num_ranks  # of a host: all may come to be on one, as lost ones are replaced
    section = section_bytes(config)
    half = HEAD_BYTES + align_up(8 * ENTRY_WORDS * positions, 64) + positions * section
    return Layout(
        Field("freed", torch.int64, (slots, _LINE)),
        Field("cut", torch.int64, (num_ranks, 1)),
        Field("waiting", torch.int64, (_LINE,)),
        Field("ends", torch.int64, (slots, LINE_WORDS)),
        Field("early", torch.int64, (slots, _LINE)),
        Field("laid", torch.int64, (slots, _LINE)),
        Field("counts", torch.int64, (slots, num_ranks)),
        Field("half", torch.int64, (slots, half // 8)),
        Field("weights", torch.uint8, (slots, section), align_bytes=4096),
        Field("parts", torch.uint8, (slots, num_ranks, section), align_bytes=4096),
    )


class HostsFields(RegionWords):
    """Views of the fields of one rank: of its outbox, or of a mirror of it.

    Args:
        region: of the engine, which closes it.
        layout: of all ranks.
        base: byte at which the fields begin.
    """

    def __init__(self, region: SharedRegion, layout: Layout, base: int) -> None:
        super().__init__(region, layout, base)
        self.base = base
        self._bytes: Bytes = region.array(np.dtype(np.uint8), base + layout.nbytes)[base:]

    def at(self, name: str, *index: int) -> int:
        """As `RegionWords.at`; the tag of a message is its first word."""
        return super().at("half" if name == "head" else name, *index)

    def half(self, slot: int, nbytes: int) -> Bytes:
        """Return the part of a message after its tag: header, and `nbytes` of rows."""
        first = 8 * self.at("half", slot)
        return self.part(first + 8, HEAD_BYTES - 8 + nbytes)

    def section(self, name: str, *index: int) -> tuple[int, int]:
        """Return the first byte of a section ("weights" or "parts"), and how many it has."""
        field = self._layout[name]
        flat = 0
        for position, extent in zip(index, field.shape, strict=False):
            flat = flat * extent + position
        return self._layout.offset(name) + flat * field.shape[-1], field.shape[-1]

    def part(self, first: int, nbytes: int) -> Bytes:
        """Return bytes of the fields; writes into those of another rank fault."""
        found = self._bytes[first : first + nbytes]
        found.flags.writeable = True  # torch warns of read-only memory; a peer's memory is never written
        return found

    def close(self) -> None:
        """Drop the views; idempotent."""
        self.__dict__.pop("_bytes", None)
        super().close()


def blank_half(nbytes: int) -> Bytes:
    """Return memory of this process like that of `HostsFields.half`."""
    return np.empty(HEAD_BYTES + nbytes, dtype=np.uint8)[8:]


class RecordFields(NamedTuple):
    """The layout of a dispatch's records after a header: meta (token, ids, weights), rows, scales.

    Attributes:
        num_records: how many.
        num_topk: of the call.
        row_bytes: of a row.
        num_scales: 4-byte words beside a row.
    """

    num_records: int
    num_topk: int
    row_bytes: int
    num_scales: int

    @property
    def rows_at(self) -> int:
        """First byte of the rows."""
        return align_up(4 * self.num_records * (1 + 2 * self.num_topk), 16)

    @property
    def scales_at(self) -> int:
        """First byte of the scales."""
        return self.rows_at + self.num_records * self.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return align_up(self.scales_at + 4 * self.num_records * self.num_scales, 8)

    def meta(self, half: Bytes) -> npt.NDArray[np.int32]:
        """Return `[num_records, 1 + 2 num_topk]` of the part after a tag."""
        width = 1 + 2 * self.num_topk
        return _behind(half, 0, 4 * self.num_records * width).view(np.int32).reshape(self.num_records, width)

    def rows(self, half: Bytes, dtype: torch.dtype, scales: torch.dtype | None) -> WireRows:
        """Return rows and scales of it."""
        raw = torch.from_numpy(_behind(half, self.rows_at, self.num_records * self.row_bytes))
        data = raw.view(dtype).view(self.num_records, self.row_bytes // dtype.itemsize)
        if scales is None:
            return WireRows(data, None)
        raw = torch.from_numpy(_behind(half, self.scales_at, 4 * self.num_records * self.num_scales))
        return WireRows(data, raw.view(scales).view(self.num_records, self.num_scales))


class Sums(NamedTuple):
    """The layout of a combine's sums after a header: an entry for each position of the reading host, then all rows.

    Attributes:
        positions: of the reading host.
        row_bytes: of a row.
    """

    positions: int
    row_bytes: int

    def nbytes(self, num_rows: int) -> int:
        """Return the bytes of all, with so many rows."""
        return self._rows_at + num_rows * self.row_bytes

    @property
    def _rows_at(self) -> int:
        return align_up(8 * ENTRY_WORDS * self.positions, 64)

    def entries(self, half: Bytes) -> npt.NDArray[np.uint64]:
        """Return `[positions, ENTRY_WORDS]` of the part after a tag."""
        return _behind(half, 0, 8 * ENTRY_WORDS * self.positions).view(np.uint64).reshape(self.positions, ENTRY_WORDS)

    def rows(self, half: Bytes, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of it."""
        raw = _behind(half, self._rows_at + first * self.row_bytes, count * self.row_bytes)
        return torch.from_numpy(raw).view(dtype).view(count, self.row_bytes // dtype.itemsize)


def weights_of(raw: Bytes, count: int, cut: SectionCut) -> Floats:
    """Return `[count, num_topk]` float32 of the bytes of weights."""
    num_topk = cut.config.num_topk
    return raw[: 4 * count * num_topk].view(np.float32).reshape(count, num_topk)


def _behind(half: Bytes, first: int, nbytes: int) -> Bytes:
    return half[HEAD_BYTES - 8 + first : HEAD_BYTES - 8 + first + nbytes]
