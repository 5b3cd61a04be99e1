"""The whole state of a rank's outbox, as writes for a mirror of it: the answer to a FETCH.

The answer covers one's own outbox (for a new gateway, after a connection was reset) or that of a lost rank of this
host, which its successor maps. While it is read, the rank itself may continue writing (its own), or no process writes
(a dead one's). So announcing words are loaded before the data that they announce and sent behind it: first the headers
of all cells and channels, then the announced data; sent the other way round. Data that the reading host has finished
with is left out: calls up to the last that all its ranks have consumed, message slots that they have freed. It may be
written anew meanwhile.

Staged payloads are sent from the first that is still needed up to the end of the staging area, as far as there are
pages: the words of a cell do not contain the length of a block. Bytes of pages are handed out as they lie there, not
copied: bytes that are written anew before the network has taken them are read by no rank.

The thread of the links is the caller.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...link.frames import NO_WORD
from ...memory.shared import HEADER_BYTES, SharedRegion
from ...memory.signals import SEQ_BITS
from ..outbox import (
    CELL_WORDS,
    CHANNEL_SLOT_BYTES,
    CHANNEL_SLOT_WORDS,
    COMPLETES,
    GAVE_UP,
    LIFE,
    NUM_CELLS,
    NUM_CHANNEL_SLOTS,
    OFFSET,
    SLOT_BYTES,
    SLOT_MESSAGE,
    SOURCE_WORDS,
    TAG,
    TAKEN_BACK,
    VIEW,
    PeerRegions,
    consumed_of,
    unsealed,
)
from ..p2p.channel import first_number

Write = Callable[[int, Any, int, int, int], object]  # (offset, data, word, value, note), as `Links.write`
_SEQ = (1 << SEQ_BITS) - 1
_HEADER_WORDS = 8


class _Slot(NamedTuple):
    """A fragment of a message that is not freed: the number of its first word, its words, and where its bytes are."""

    at: int
    words: list[int]
    start: int
    nbytes: int


def tell_all(
    write: Write,
    peer_regions: PeerRegions,
    source: int,
    region: SharedRegion,
    readers: Sequence[int],
    joined: Mapping[int, int] | None = None,
) -> None:
    """Send all of `source`'s outbox, mapped as `region`, that ranks of one host may need.

    Args:
        peer_regions: peer regions of all ranks, for the layout and for the readers' progress.
        readers: the ranks of that host.
        joined: the epoch of each rank that joined after the group was created.
    """
    words = region.words(0, len(peer_regions.own))
    data = memoryview(region.mapping)[HEADER_BYTES:]
    try:
        consumed = consumed_of(words)
        least = min(consumed_of(peer_regions.words[reader]) for reader in readers)
        cells = list(_cells(words, peer_regions.first_cell, least))
        slots = [slot for reader in readers for slot in _slots(words, peer_regions, source, reader, joined or {})]
        small = [bytes(data[8 * (cell + _HEADER_WORDS) : 8 * (cell + CELL_WORDS)]) for cell, _ in cells]
        starts = [unsealed(header[OFFSET]) for _, header in cells]
        end = peer_regions.ring.start + peer_regions.ring.nbytes
        low = min((start for start in starts if peer_regions.ring.start <= start < end), default=end)
        for start, nbytes in region.written(low, end - low) if low < end else ():
            write(start, data[start : start + nbytes], NO_WORD, 0, 0)
        for (cell, header), payload in zip(cells, small, strict=True):
            write(8 * (cell + _HEADER_WORDS), payload, NO_WORD, 0, 0)
            write(8 * (cell + 1), _packed(header[1:]), cell, header[TAG], 0)
        for reader in readers:
            _tell_marks(write, words, peer_regions.channel_base[reader])
            first = peer_regions.verdict_base[reader]
            write(8 * first, bytes(data[8 * first : 8 * (first + SOURCE_WORDS)]), NO_WORD, 0, 0)
        for slot in slots:
            write(slot.start, data[slot.start : slot.start + slot.nbytes], NO_WORD, 0, 0)
            first = slot.at + SLOT_MESSAGE
            write(8 * first, _packed(slot.words[SLOT_MESSAGE:TAKEN_BACK]), slot.at, slot.words[0], 0)
        write(0, b"", VIEW, words[VIEW], 0)
        write(0, b"", LIFE, words[LIFE], consumed)
    finally:
        words.release()


def _packed(words: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(words)}Q", *words)


def _cells(words: memoryview, first: int, least: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the cells of calls above `least`, also of those aborted before they had a tag: first word, and header."""
    for cell in range(first, first + NUM_CELLS * CELL_WORDS, CELL_WORDS):
        header = words[cell : cell + _HEADER_WORDS].tolist()
        tag, mark = header[TAG], header[GAVE_UP]
        is_given_up = mark not in (0, COMPLETES) and (not tag or mark & _SEQ > least)
        if tag & _SEQ > least or is_given_up:
            yield cell, header


def _slots(
    words: memoryview, peer_regions: PeerRegions, source: int, reader: int, joined: Mapping[int, int]
) -> Iterator[_Slot]:
    """Yield the fragments for `reader` that it has not freed, as far as is known, in order."""
    came = max(joined.get(source, 0), joined.get(reader, 0))
    number = max(peer_regions.words[reader][peer_regions.verdict_base[source]] + 1, first_number(came) if came else 1)
    while True:
        slot = (number - 1) % NUM_CHANNEL_SLOTS
        index = peer_regions.channel_base[reader] + slot * CHANNEL_SLOT_WORDS
        header = words[index : index + CHANNEL_SLOT_WORDS].tolist()
        used = max(1, -(-header[SLOT_BYTES] // CHANNEL_SLOT_BYTES))
        if header[0] != peer_regions.epoch_bits | number or used > NUM_CHANNEL_SLOTS - slot:
            return
        yield _Slot(index, header, peer_regions.channel_data[reader] + slot * CHANNEL_SLOT_BYTES, header[SLOT_BYTES])
        number += used


def _tell_marks(write: Write, words: memoryview, channel: int) -> None:
    """Send which messages of a channel were aborted."""
    for index in range(channel + TAKEN_BACK, channel + NUM_CHANNEL_SLOTS * CHANNEL_SLOT_WORDS, CHANNEL_SLOT_WORDS):
        if words[index]:
            write(0, b"", index, words[index], 0)
