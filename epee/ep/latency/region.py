"""The memory that a rank lends to a `LatencyBuffer` on CPUs: its fields, and how a call of some sizes cuts a section.

`one_host/path.py` documents the writers and the order. The words have fixed offsets. The payload of (slot, source), a
section, has the same length in each call of the buffer's life and holds no words that any rank waits for, so calls of
different sizes share it: each cuts it its own way (`SectionCut`), and only its source writes it, whatever the sizes.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch

from ...arrays import array_of, plain_tensors
from ...errors import InvalidArgument
from ...gpu.payload import DoesNotFit
from ...memory.layout import Field, Layout
from ...memory.shared import SharedRegion
from ..config import BufferConfig, sizes_code
from .aborts import LINE_WORDS

REASON_BYTES = 240
NUM_HEAD_FIELDS = 8
HEAD_WORDS = 1 + NUM_HEAD_FIELDS + REASON_BYTES // 8  # the tag, the header, a refusal's reason
_LINE = 8  # words: one cache line per writer
_ALIGN = 64


class SectionCut:
    """The division of a section for calls of some sizes.

    Args:
        config: the sizes.
    """

    def __init__(self, config: BufferConfig) -> None:
        tokens, num_topk = config.max_tokens_per_rank, config.num_topk
        self.config = config
        self.layout = Layout(
            Field("meta", torch.int32, (tokens, 1 + 2 * num_topk)),
            Field("weights", torch.float32, (tokens, num_topk)),
            Field("rows", torch.uint8, (tokens * config.hidden * 4,)),  # a partial in float32 is the widest row
        )
        self.rows_at = self.layout.offset("rows")
        self.scales_at = self.rows_at + tokens * config.hidden

    @cached_property
    def code(self) -> int:
        """The code of the sizes that ranks compare."""
        config = self.config
        return sizes_code(config.num_experts, config.hidden, config.num_topk, config.max_tokens_per_rank)


class CutFields(NamedTuple):
    """A region's sections, cut: `meta` int32 and `weights` float32, `[num_slots, num_ranks, max_tokens, width]`."""

    meta: Any
    weights: Any


def region_layout(config: BufferConfig) -> Layout:
    """Return the fields of a rank's region, with room for its config's sizes or for all that fit its bytes."""
    return _layout(config, section_bytes(config))


def section_bytes(config: BufferConfig) -> int:
    """Return the bytes of a section: those of the config's sizes, or as many as fit its bytes.

    Raises:
        InvalidArgument: its bytes are too few.
    """
    if not config.room_bytes:
        return SectionCut(config).layout.nbytes
    sections = config.num_slots * config.num_ranks
    length = (config.room_bytes - _layout(config, 0).nbytes) // sections // _ALIGN * _ALIGN
    if length < _ALIGN:
        raise InvalidArgument(f"{config.room_bytes} bytes are too few for a LatencyBuffer of {config.num_ranks} ranks")
    return length


def checked_cut(config: BufferConfig, length: int, nbytes: int) -> SectionCut:
    """Return how calls of some sizes cut sections of `length` bytes, of a memory of `nbytes`.

    Raises:
        DoesNotFit: they are too small.
    """
    cut = SectionCut(config)
    if cut.layout.nbytes > length:
        raise DoesNotFit(
            f"calls of {config.max_tokens_per_rank} tokens of hidden {config.hidden} with top-{config.num_topk} "
            f"need {room_bytes(config)} bytes of memory, the buffer has {nbytes}; make it with more"
        )
    return cut


def room_bytes(config: BufferConfig) -> int:
    """Return how much memory serves calls of such sizes, where it serves others, too."""
    return _layout(config, SectionCut(config).layout.nbytes).nbytes


def _layout(config: BufferConfig, length: int) -> Layout:
    num_slots, num_ranks = config.num_slots, config.num_ranks
    sections = (num_slots, num_ranks)
    head_words = -(-HEAD_WORDS // _LINE) * _LINE
    return Layout(
        Field("freed", torch.int64, (num_slots, _LINE)),
        Field("cut", torch.int64, (num_ranks, _LINE)),
        Field("waiting", torch.int64, (_LINE,)),
        Field("ends", torch.int64, (num_slots, LINE_WORDS)),
        Field("head", torch.int64, (*sections, head_words)),
        Field("early", torch.int64, (*sections, _LINE)),
        Field("payload", torch.uint8, (*sections, length)),
    )


class RegionWords:
    """The words of one rank's region.

    Args:
        region: the memory that a rank lends; the code that maps it closes it.
        layout: of all regions.
        base: byte at which the fields begin.
    """

    def __init__(self, region: SharedRegion, layout: Layout, base: int = 0) -> None:
        self.address = region.address + base
        self._layout = layout
        self.words = region.words(base, layout.nbytes // 8)

    def at(self, name: str, *index: int) -> int:
        """Return the word index of a field's row (`[slot]`, `[source]` or `[slot][source]`)."""
        field = self._layout[name]
        flat = 0
        for position, extent in zip(index, field.shape, strict=False):
            flat = flat * extent + position
        width = field.shape[-1]
        return self._layout.offset(name) // 8 + flat * width

    def close(self) -> None:
        """Drop the views; idempotent."""
        self.words.release()


class RegionFields(RegionWords):
    """Views of the fields of one rank's region; arguments as there."""

    def __init__(self, region: SharedRegion, layout: Layout, base: int = 0) -> None:
        super().__init__(region, layout, base)
        with plain_tensors():
            self._payload = layout.tensor(region, "payload", base)
        self._cuts: dict[SectionCut, CutFields] = {}

    def cut(self, cut: SectionCut) -> CutFields:
        """Return the sections as calls of some sizes see them."""
        fields = self._cuts.get(cut)
        if fields is None:
            fields = self._cuts[cut] = CutFields(self._part(cut, "meta"), self._part(cut, "weights"))
        return fields

    def _part(self, cut: SectionCut, name: str) -> Any:
        field, first = cut.layout[name], cut.layout.offset(name)
        part = self._payload[:, :, first : first + field.nbytes].view(field.dtype)
        return array_of(part.unflatten(2, field.shape))

    def rows(self, slot: int, src: int, num_rows: int, width: int, dtype: torch.dtype, first: int) -> torch.Tensor:
        """Return `[num_rows, width]` of what a section holds from byte `first` on."""
        raw = self._payload[slot, src]
        return raw[first : first + num_rows * width * dtype.itemsize].view(dtype).view(num_rows, width)

    def poison(self, slot: int) -> None:
        """Fill a slot's payloads with 0xFF, so that rows never written read as NaN."""
        self._payload[slot].fill_(0xFF)

    def close(self) -> None:
        """Drop the views; idempotent."""
        self._cuts.clear()
        self.__dict__.pop("_payload", None)
        super().close()
