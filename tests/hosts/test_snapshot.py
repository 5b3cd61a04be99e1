"""All that there is of an outbox: a mirror that was blank, or behind, says afterwards what its readers may need."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from epee.engine.outbox import (
    CELL_WORDS,
    CHANNEL_SLOT_BYTES,
    CHANNEL_SLOT_WORDS,
    COMPLETES,
    CONSUMED,
    CONSUMED_TOO,
    FILLED,
    GAVE_UP,
    LIFE,
    LIFE_READY,
    NUM_CELLS,
    OFFSET,
    SLOT_BYTES,
    TAKEN_BACK,
    PeerRegions,
    outbox_layout,
    seal,
)
from epee.engine.replication.mirror import Mirror
from epee.engine.replication.snapshot import tell_all
from epee.link.frames import NO_WORD
from epee.memory.shared import HEADER_BYTES, SharedRegion

STAGING_BYTES = 1 << 16
SOURCE, READER = 0, 1


@pytest.fixture
def peer_regions() -> Iterator[PeerRegions]:
    """The source's memory, the memory of a reader, and a mirror of the source."""
    nbytes = outbox_layout(2, STAGING_BYTES).nbytes
    regions = [SharedRegion.create(nbytes, name, only_owner_writes=True) for name in ("outbox0", "outbox1")]
    found = PeerRegions(SOURCE, regions, STAGING_BYTES, 1, 2)
    yield found
    found.close()


class Told:
    """Applies writes to a mirror as a `LinkReader` does; checks for each tag that all before it is there."""

    def __init__(self, peer_regions: PeerRegions) -> None:
        self.region = SharedRegion.create(peer_regions.regions[0].nbytes, "mirror0", only_owner_writes=True)
        self.mirror = Mirror(SOURCE, self.region, peer_regions)
        self.num_bytes = 0
        self._peer_regions = peer_regions

    def write(self, offset: int, data: bytes, word: int, value: int, note: int) -> None:
        place = self.mirror.checked(offset, len(data), word)
        place[:] = data
        self.num_bytes += len(data)
        words = self.mirror.words
        if note > words[CONSUMED]:
            words[CONSUMED] = words[CONSUMED_TOO] = note
        if word != NO_WORD:
            words[word] = value
            cell = word - self._peer_regions.first_cell
            if 0 <= cell < NUM_CELLS * CELL_WORDS and not cell % CELL_WORDS and value:
                self.check_cell(word)

    def check_cell(self, cell: int) -> None:
        assert self.mirror.words[cell : cell + CELL_WORDS] == self._peer_regions.own[cell : cell + CELL_WORDS]
        start = (self._peer_regions.own[cell + OFFSET] & 0xFFFFFFFF) << 6
        if start >= self._peer_regions.ring.start:
            assert self._peer_regions.bytes_at(SOURCE, start, 4096) == bytes(self.mirror.bytes[start : start + 4096])

    def close(self) -> None:
        self.mirror.close()
        self.region.close()


def put_call(peer_regions: PeerRegions, seq: int, dice: random.Random, staged: bool) -> int:
    """Write a call's cell as `Operation.publish` does; return the index of its first word."""
    own, cell = peer_regions.own, peer_regions.first_cell + seq % NUM_CELLS * CELL_WORDS
    data = memoryview(peer_regions.regions[SOURCE].mapping)[HEADER_BYTES:]
    start = peer_regions.ring.start + 4096 * (seq % 32) if staged else 8 * (cell + 8)
    data[start : start + 4096 if staged else start + 1900] = dice.randbytes(4096 if staged else 1900)
    own[cell + 1], own[cell + 2] = dice.getrandbits(50), dice.getrandbits(50)
    own[cell + OFFSET] = seal(peer_regions.epoch_bits | seq, own[cell + 1], own[cell + 2], start)
    own[cell + FILLED] = dice.getrandbits(40)
    own[cell + GAVE_UP] = 0
    own[cell] = peer_regions.epoch_bits | seq
    return cell


@pytest.mark.parametrize("seed", range(8))
def test_a_mirror_says_afterwards_what_its_readers_need(peer_regions: PeerRegions, seed: int) -> None:
    dice = random.Random(seed)
    first = dice.randrange(1, 1000)
    cells = [
        put_call(peer_regions, seq, dice, dice.random() < 0.5)
        for seq in range(first, first + dice.randrange(1, NUM_CELLS))
    ]
    withdrawn = cells[0]
    peer_regions.own[withdrawn + GAVE_UP], peer_regions.own[withdrawn] = peer_regions.own[withdrawn], 0
    peer_regions.own[CONSUMED] = peer_regions.own[CONSUMED_TOO] = first
    peer_regions.words[READER][CONSUMED] = peer_regions.words[READER][CONSUMED_TOO] = first - 1
    peer_regions.own[LIFE] = LIFE_READY
    told = Told(peer_regions)
    tell_all(told.write, peer_regions, SOURCE, peer_regions.regions[SOURCE], (READER,))
    for cell in cells:
        told.check_cell(cell)
    assert told.mirror.words[LIFE] == LIFE_READY
    assert told.mirror.words[CONSUMED] == told.mirror.words[CONSUMED_TOO] == first
    told.close()


def test_what_readers_are_through_with_is_not_told(peer_regions: PeerRegions) -> None:
    dice = random.Random(1)
    cells = [put_call(peer_regions, seq, dice, seq % 2 == 0) for seq in range(1, 21)]
    peer_regions.words[READER][CONSUMED] = peer_regions.words[READER][CONSUMED_TOO] = 20
    told = Told(peer_regions)
    tell_all(told.write, peer_regions, SOURCE, peer_regions.regions[SOURCE], (READER,))
    assert all(told.mirror.words[cell] == 0 for cell in cells)
    assert told.num_bytes < 10_000
    told.close()


def test_a_call_that_was_given_up_before_its_header_is_told(peer_regions: PeerRegions) -> None:
    """Between the mark and the end of the old tag somebody may ask: the mark is not told to them again."""
    dice, own = random.Random(3), peer_regions.own
    old = put_call(peer_regions, 5, dice, False)
    peer_regions.words[READER][CONSUMED] = peer_regions.words[READER][CONSUMED_TOO] = 5 + NUM_CELLS - 1
    own[old + GAVE_UP] = peer_regions.epoch_bits | 5 + NUM_CELLS
    done = put_call(peer_regions, 6, dice, False)
    own[done + GAVE_UP] = COMPLETES
    told = Told(peer_regions)
    tell_all(told.write, peer_regions, SOURCE, peer_regions.regions[SOURCE], (READER,))
    assert told.mirror.words[old + GAVE_UP] == peer_regions.epoch_bits | 5 + NUM_CELLS
    assert told.mirror.words[done] == 0
    told.close()


def test_messages_that_are_not_freed_and_marks_of_those_taken_back_are_told(peer_regions: PeerRegions) -> None:
    own, dice = peer_regions.own, random.Random(2)
    data = memoryview(peer_regions.regions[SOURCE].mapping)[HEADER_BYTES:]
    number, sent = 1, []
    for nbytes in (10, 3 * CHANNEL_SLOT_BYTES, 0, 500):
        slot = number - 1
        index = peer_regions.channel_base[READER] + slot * CHANNEL_SLOT_WORDS
        start = peer_regions.channel_data[READER] + slot * CHANNEL_SLOT_BYTES
        data[start : start + nbytes] = dice.randbytes(nbytes)
        own[index + SLOT_BYTES] = nbytes
        own[index] = peer_regions.epoch_bits | number
        sent.append((index, start, nbytes, number))
        number += max(1, nbytes // CHANNEL_SLOT_BYTES)
    own[peer_regions.channel_base[READER] + TAKEN_BACK] = 4
    peer_regions.words[READER][peer_regions.verdict_base[SOURCE]] = 1  # the first one is freed
    told = Told(peer_regions)
    tell_all(told.write, peer_regions, SOURCE, peer_regions.regions[SOURCE], (READER,))
    words = told.mirror.words
    assert words[sent[0][0]] == 0
    for index, start, nbytes, tag in sent[1:]:
        assert words[index] == peer_regions.epoch_bits | tag
        assert words[index + SLOT_BYTES] == nbytes
        assert bytes(told.mirror.bytes[start : start + nbytes]) == bytes(data[start : start + nbytes])
    assert words[peer_regions.channel_base[READER] + TAKEN_BACK] == 4
    told.close()


def test_a_damaged_message_header_ends_what_is_told_of_its_lane(peer_regions: PeerRegions) -> None:
    index = peer_regions.channel_base[READER]
    peer_regions.own[index + SLOT_BYTES] = 1 << 40
    peer_regions.own[index] = peer_regions.epoch_bits | 1
    told = Told(peer_regions)
    tell_all(told.write, peer_regions, SOURCE, peer_regions.regions[SOURCE], (READER,))
    assert told.mirror.words[index] == 0
    told.close()


def test_only_pages_that_were_written_are_told(peer_regions: PeerRegions) -> None:
    region, page = peer_regions.regions[SOURCE], 4096
    data = memoryview(region.mapping)[HEADER_BYTES:]
    start = peer_regions.ring.start
    data[start + 10 * page] = 1
    peer = SharedRegion.attach(region.blob, is_writable=False)
    for found in (region.written(start, 40 * page), peer.written(start, 40 * page)):
        assert sum(nbytes for _, nbytes in found) <= 2 * page
        assert any(first <= start + 10 * page < first + nbytes for first, nbytes in found)
    peer.close()
