"""What a rank tells another host: in which frames, and that nothing older follows something newer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from epee.backend.collectives.copying import Spread
from epee.engine.outbox import CHANNEL_SLOT_WORDS, SLOT_MESSAGE, TAKEN_BACK, PeerRegions, outbox_layout
from epee.engine.replication.exports import Exports
from epee.link.frames import NO_WORD
from epee.link.topology import Topology
from epee.memory.shared import HEADER_BYTES, SharedRegion

STAGING_BYTES = 1 << 16


class Told:
    """Takes what is told as `Links` does, and keeps it: (pieces, word, value), bytes as they were then."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.frames: list[tuple[list[tuple[int, bytes]], int, int]] = []

    def write(self, peer: int, offset: int, data: Any, word: int, value: int, note: int) -> None:
        self.frames.append(([(offset, bytes(data))], word, value))

    def write_pieces(self, peer: int, pieces: list[tuple[int, bytes]], word: int, value: int, note: int) -> None:
        self.frames.append((pieces, word, value))


@pytest.fixture
def group() -> Iterator[tuple[PeerRegions, Exports, Told]]:
    """Rank 0 of two ranks on two hosts, and what it tells the other."""
    nbytes = outbox_layout(2, STAGING_BYTES).nbytes
    regions = [SharedRegion.create(nbytes, name, only_owner_writes=True) for name in ("outbox0", "mirror1")]
    peer_regions = PeerRegions(0, regions, STAGING_BYTES, 1, 2)
    told = Told()
    exports = Exports(Topology(0, ["here", "there"]), peer_regions, told, {})
    exports.route(1, 1)
    yield peer_regions, exports, told
    exports._bytes.release()
    peer_regions.close()


def tell(peer_regions: PeerRegions, exports: Exports, data: bytes, value: int = 0) -> None:
    """Put a message for rank 1 into its first slot and tell it; `value` 0: an exception comes before its word."""
    slot, place = peer_regions.channel_base[1], peer_regions.channel_data[1]
    start = HEADER_BYTES + place
    memoryview(peer_regions.regions[0].mapping)[start : start + len(data)] = data
    exports.fragment(1, place, len(data), slot + SLOT_MESSAGE, slot + TAKEN_BACK)
    if value:
        exports.word(slot, value)


def test_a_short_message_is_one_frame_with_its_header_and_what_waited(group: tuple[PeerRegions, Exports, Told]) -> None:
    peer_regions, exports, told = group
    freed = peer_regions.verdict_base[1]
    peer_regions.own[freed] = 9
    exports.later(freed)
    tell(peer_regions, exports, b"a message", 77)
    ((pieces, word, value),) = told.frames
    assert (word, value) == (peer_regions.channel_base[1], 77)
    assert dict(pieces)[peer_regions.channel_data[1]] == b"a message"
    assert dict(pieces)[8 * freed] == (9).to_bytes(8, "little")
    assert len(pieces) == 3
    exports.word(peer_regions.channel_base[1] + CHANNEL_SLOT_WORDS, 78)
    assert told.frames[1] == ([(0, b"")], peer_regions.channel_base[1] + CHANNEL_SLOT_WORDS, 78), (
        "nothing is told twice"
    )


@pytest.fixture
def three() -> Iterator[tuple[PeerRegions, Exports, Told]]:
    """Rank 0 and the two ranks of another host, of which rank 1 is its gateway there."""
    nbytes = outbox_layout(3, STAGING_BYTES).nbytes
    names = ("outbox0", "mirror1", "mirror2")
    regions = [SharedRegion.create(nbytes, name, only_owner_writes=True) for name in names]
    peer_regions = PeerRegions(0, regions, STAGING_BYTES, 1, 3)
    peer_regions.place((0, 1, 1))
    told = Told()
    exports = Exports(Topology(0, ["here", "there", "there"]), peer_regions, told, {})
    exports.route(1, 1)
    yield peer_regions, exports, told
    exports._bytes.release()
    peer_regions.close()


def move_route(exports: Exports, told: Told) -> None:
    """Have another gateway now, which was told all that there was."""
    exports.unroute(1)
    told.frames.clear()
    exports.route(1, 2)


def memory_of(told: Told) -> dict[int, int]:
    """Return what was told byte by byte."""
    return {offset + i: byte for pieces, _, _ in told.frames for offset, data in pieces for i, byte in enumerate(data)}


@pytest.mark.parametrize("nbytes", [10, 3000])
def test_a_gateway_that_comes_between_a_message_and_its_word_gets_both(
    three: tuple[PeerRegions, Exports, Told], nbytes: int
) -> None:
    peer_regions, exports, told = three
    tell(peer_regions, exports, b"m" * nbytes)
    move_route(exports, told)
    exports.word(peer_regions.channel_base[1], 77)
    assert told.frames[-1][1:] == (peer_regions.channel_base[1], 77)
    found, place, header = (
        memory_of(told),
        peer_regions.channel_data[1],
        8 * (peer_regions.channel_base[1] + SLOT_MESSAGE),
    )
    assert bytes(found[place + i] for i in range(nbytes)) == b"m" * nbytes
    assert header in found
    told.frames.clear()
    exports.word(peer_regions.channel_base[1] + CHANNEL_SLOT_WORDS, 78)
    assert memory_of(told) == {}, "nothing is told twice"


@pytest.mark.parametrize("count", [5, 5000])
def test_a_gateway_that_comes_between_a_call_and_its_tag_gets_both(
    three: tuple[PeerRegions, Exports, Told], count: int
) -> None:
    peer_regions, exports, told = three
    cell, data = peer_regions.first_cell, np.arange(count, dtype=np.uint8)
    plan = Spread("all_gather", 7, data, True, {}, peer_regions)
    base = 8 * (cell + 8) if count == 5 else peer_regions.ring.start
    plan.put(peer_regions, 0, base)
    peer_regions.own[cell + 1] = plan.signature
    exports.call(peer_regions, plan, cell, base)
    move_route(exports, told)
    exports.word(cell, 77)
    assert told.frames[-1][1:] == (cell, 77)
    found = memory_of(told)
    assert bytes(found[base + i] for i in range(count)) == data.tobytes()
    assert found[8 * (cell + 1)] == plan.signature


def test_what_an_exception_left_does_not_follow_newer_bytes(group: tuple[PeerRegions, Exports, Told]) -> None:
    peer_regions, exports, told = group
    tell(peer_regions, exports, b"old")
    tell(peer_regions, exports, b"new" * 1000, 77)
    memory: dict[int, bytes] = {}
    for pieces, _, _ in told.frames:
        for offset, data in pieces:
            memory[offset] = data
    assert memory[peer_regions.channel_data[1]] == b"new" * 1000
    assert [word for _, word, _ in told.frames] == [NO_WORD, peer_regions.channel_base[1]]
