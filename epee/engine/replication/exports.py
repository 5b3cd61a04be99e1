"""The export of a rank's outbox to the other hosts: the same stores in the same order, as frames to its gateways.

The position of a word determines its readers: a channel or a verdict belongs to one rank, so it goes to that rank's
host, or to none if that is this one; all other words go to every host. Bytes go where a plan says that they are read
(`Plan.exports`), once per host, before the word that announces them. Data that the network has not taken yet lies in
the outbox itself; it stays unchanged, since a cell, a slot or a part of staging memory is written again only when all
its readers have published that they have finished with it, which they do after receiving it.

Receivers: on each other host the gateway there that has asked (`links.py`); stores before that are part of the answer
to its question (`snapshot.py`). A gateway whose link has ended, or that has lost its role, gets nothing more. `route`
and `unroute` change that between two words of the engine: a store goes to all previous gateways, or is part of the
answer, or both, which changes nothing. The answer has no bytes whose word is not stored yet; if a gateway is routed
between the two, the bytes are sent once more before the word (`_prepared`).

This rank's progress (CONSUMED) is on every frame. If a rank sends nothing for some milliseconds, the thread of the
links sends it (`tell_progress`): others may wait for room.

Calls come under the engine's lock, `tell_progress` from the thread. A call that is interrupted by an exception and run
again sends the same again, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...link.frames import END, MAX_PIECES, NO_WORD
from ...link.poller import Links
from ...link.topology import Topology
from ...memory.shared import HEADER_BYTES
from ..outbox import (
    CELL_WORDS,
    CHANNEL_SLOT_BYTES,
    CHANNEL_WORDS,
    CONSUMED,
    DRAINED,
    FILLED,
    FINAL,
    GAVE_UP,
    MERGED,
    NO_EXPORTS,
    NUM_CELLS,
    NUM_CHANNEL_SLOTS,
    SLOT_MESSAGE,
    SOURCE_WORDS,
    TAKEN_BACK,
    PeerRegions,
    has_left,
    publish_word,
)
from ..plan import Plan
from .remote_reads import Answers, RemoteReads
from .routes import Routes

ABANDON_S = 5.0
_NOTHING = (0, b"")
_NO_PIECES: dict[int, bytes] = {}
_TINY_BYTES = 256  # of a call's values in the cell
_PIECE_BYTES = 1024  # shorter data goes out with the word that announces it
_UNTOLD_CALLS = NUM_CELLS // 4  # after so many calls this rank's progress is sent to peers at once


class Exports:
    """The sender of one rank's stores to the other hosts of its group.

    Args:
        topology: the host of each rank.
        peer_regions: the peer regions of all ranks, mirrors among them.
        links: to the partners.
        answers: of the partners, by rank.

    Attributes:
        spans: whether ranks of other hosts may take part.
        routes: the placement of the ranks, and the gateways that receive.
        looks: remote reads from other hosts.
    """

    spans = True

    def __init__(
        self, topology: Topology, peer_regions: PeerRegions, links: Links, answers: dict[int, Answers]
    ) -> None:
        self.links = links
        self.routes = Routes(topology)
        self.looks = RemoteReads(links, self.routes, answers)
        self._peer_regions = peer_regions
        self._answers = answers
        self._bytes = memoryview(peer_regions.regions[peer_regions.rank].mapping)[HEADER_BYTES:]
        self._told: dict[int, int] = {}  # by gateway: this rank's progress, as it knows
        self._held: dict[int, dict[int, bytes]] = {}  # by gateway, offset: bytes that go out with the next word
        self._late: dict[int, dict[int, None]] = {}  # by gateway: words that were stored and not sent yet
        # the gateways with which bytes were sent whose word is to come, and how to send them again
        self._prepared: tuple[dict[int, int], Callable[..., None], tuple[Any, ...]] | None = None
        self._verdicts, self._channels = peer_regions.verdict_base[0], peer_regions.channel_base[0]
        self.on_close: Callable[[], object] = int  # further resources to release
        self.is_receiving: Callable[[], bool] = bool  # whether mirrors that this rank keeps may still change

    @property
    def pump(self) -> Callable[[], bool]:
        """Moves the bytes that can be moved now; returns whether any were."""
        return self.links.pump

    @property
    def rest(self) -> Callable[[], object]:
        """Leaves the sockets to the thread of the links."""
        return self.links.rest

    @property
    def let_go(self) -> Callable[[], object]:
        """Releases the lock of the links if an exception has left it with this thread."""
        return self.links.let_go

    def new_looks(self, first: int) -> RemoteReads:
        """Return remote reads for another caller, which does not hold the engine's lock; they count from `first`."""
        return RemoteReads(self.links, self.routes, self._answers, first)

    # ---- receivers

    def is_here(self, rank: int) -> bool:
        """Return whether a rank shares this rank's host."""
        return self.routes.topology.is_here(rank)

    def placement(self, outboxes: PeerRegions) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each host that has any."""
        return self.routes.topology.placement

    def move(self, topology: Topology) -> None:
        """Apply the placement of ranks from now on. The engine's lock is held."""
        with self.links.lock:
            self.routes.topology = topology

    def route(self, host: int, gateway: int) -> None:
        """Send to a host from now on through this gateway, which has just received the present state.

        The links' lock is held.
        """
        self._told[gateway] = 0
        self.routes.add(host, gateway)

    def unroute(self, gateway: int) -> None:
        """Send nothing more to a gateway. The links' lock is held."""
        self.routes.remove(gateway)
        self._late.pop(gateway, None)
        self.looks.forget(gateway)

    # ---- words

    def publish(self, outboxes: PeerRegions, index: int, value: int) -> None:
        """Store `value` in word `index` of this rank's outbox, send it, and wake the waiters of this host."""
        outboxes.own[index] = value
        self.word(index, value)
        publish_word(outboxes, index, outboxes.own[index])  # a signal handler may have ended the group meanwhile

    def publish_call(self, outboxes: PeerRegions, cell: int, tag: int, plan: Plan, base: int) -> None:
        """Publish a call: its header in the cell at word `cell`, its first block at byte `base`, and the tag."""
        self.call(outboxes, plan, cell, base)
        outboxes.own[cell] = tag
        self.word(cell, tag)
        publish_word(outboxes, cell, outboxes.own[cell])

    def publish_block(self, outboxes: PeerRegions, index: int, value: int, plan: Plan, k: int, offset: int) -> None:
        """Publish the block of round `k`, which lies at byte `offset`, with its counter."""
        if plan.put_bytes:
            self._drop_held()
            for gateway, readers in self._readers(outboxes):
                self._send(gateway, offset, plan.exports(outboxes, k, readers))
        self.publish(outboxes, index, value)

    def publish_share(self, outboxes: PeerRegions, index: int, value: int, plan: Plan, k: int, offset: int) -> None:
        """Publish this rank's reduced share of round `k`, which lies at byte `offset`, with its counter."""
        self._drop_held()
        for gateway, readers in self._readers(outboxes):
            self._send(gateway, offset, plan.exports_merged(outboxes, k, readers))
        self.publish(outboxes, index, value)

    def publish_fragment(
        self, outboxes: PeerRegions, index: int, value: int, peer: int, slot_number: int, nbytes: int
    ) -> None:
        """Publish a fragment for `peer` in a slot of its channel, whose words begin at `index`."""
        start = outboxes.channel_data[peer] + (slot_number - 1) % NUM_CHANNEL_SLOTS * CHANNEL_SLOT_BYTES
        self.fragment(peer, start, nbytes, index + SLOT_MESSAGE, index + TAKEN_BACK)
        self.publish(outboxes, index, value)

    def word(self, index: int, value: int) -> None:
        """Send that word `index` of this rank's outbox has `value`, behind everything sent before."""
        while self._prepared is not None:
            (gateways, again, args), self._prepared = self._prepared, None
            if gateways is not self.routes.gateways:  # one received the present state before the word was stored
                again(self, *args)
        if index < self._verdicts:
            for gateway in self.routes.gateways.values():
                (self._write_late if gateway in self._late else self._tell)(gateway, index, value)
            return
        base, size = (self._channels, CHANNEL_WORDS) if index >= self._channels else (self._verdicts, SOURCE_WORDS)
        reader = self.routes.gateway_of((index - base) // size)
        if reader is not None:
            (self._write_late if reader in self._late else self._tell)(reader, index, value)

    def later(self, index: int) -> None:
        """Send word `index` of this rank's outbox, which one rank reads, with the next word that goes to its host."""
        reader = self.routes.gateway_of((index - self._verdicts) // SOURCE_WORDS)
        if reader is not None:
            with self.links.lock:  # the thread of the links sends them, too
                self._late.setdefault(reader, {})[index] = None

    def _write_late(self, gateway: int, index: int, value: int) -> None:
        """Send a word behind those that were stored and not sent yet."""
        with self.links.lock:  # the thread sends them, too: no older value may come behind a newer one
            for late in self._late.get(gateway, ()):
                self._hold(gateway, 8 * late, 8)
            self._tell(gateway, index, value)
            self._late.pop(gateway, None)

    def _tell(self, gateway: int, index: int, value: int) -> None:
        """Send a word, and the bytes held for it, in one frame."""
        pieces = self._held.get(gateway, _NO_PIECES)
        note = self._told[gateway] = self._peer_regions.own[CONSUMED]
        if len(pieces) > 1:
            self.links.write_pieces(gateway, list(pieces.items()), index, value, note)
        else:
            offset, data = next(iter(pieces.items()), _NOTHING)
            self.links.write(gateway, offset, data, index, value, note)
        if pieces:
            self._held[gateway] = {}

    def _drop_held(self) -> None:
        """Drop bytes that an exception has left without their word: they are sent again, or never published.

        Else they would go out behind newer bytes of the same range.
        """
        self._prepared = None
        for gateway, pieces in self._held.items():
            if pieces:
                self._held[gateway] = {}

    def _hold(self, gateway: int, offset: int, nbytes: int) -> None:
        """Keep a copy of bytes of the outbox for the next word.

        Bytes held already are sent before they become too many.
        """
        if len(self._held.get(gateway, ())) >= MAX_PIECES:
            self._tell(gateway, NO_WORD, 0)
        self._held.setdefault(gateway, {})[offset] = bytes(self._bytes[offset : offset + nbytes])

    # ---- bytes

    def call(self, peer_regions: PeerRegions, plan: Plan, cell: int, base: int) -> None:
        """Send the header of a call in the cell at word `cell`, and its first block at byte `base`; the tag follows.

        `peer_regions`: the peer regions with which the call runs.
        """
        self._drop_held()
        self._prepared = self.routes.gateways, Exports.call, (peer_regions, plan, cell, base)
        first, end = 8 * (cell + 1), 8 * (cell + 8)
        if plan.preamble is not None:
            end += 8 * len(plan.preamble)
        last = base + plan.put_bytes
        if not plan.put_bytes or end <= last <= end + _TINY_BYTES:  # selecting the readers is not worth it
            header = bytes(self._bytes[first : max(end, last)])  # a copy: its counters advance before it is sent
            for gateway in self.routes.gateways.values():
                self._held.setdefault(gateway, {})[first] = header
            return
        is_inside = first < base < 8 * (cell + CELL_WORDS)
        for gateway, readers in self._readers(peer_regions):
            ranges = plan.exports(peer_regions, 0, readers)
            last = end
            if is_inside:
                last = max([end, *(base + start + nbytes for start, nbytes in ranges)])
            else:
                self._send(gateway, base, ranges)
            self._hold(gateway, first, last - first)

    def _readers(self, peer_regions: PeerRegions) -> list[tuple[int, tuple[int, ...]]]:
        """Return the gateways of the hosts in `peer_regions`, and the positions for which each of them receives."""
        gateways = self.routes.gateways
        return [(gateways[host], positions) for host, positions in peer_regions.sites.items() if host in gateways]

    def call_again(self, peer_regions: PeerRegions, plan: Plan, cell: int, base: int, has_counts: bool) -> None:
        """Send a call that is published once more, its counts as well: an exception may have come before it was sent.

        The data that the counts announce has been sent before they were stored.
        """
        own = self._peer_regions.own
        self.call(peer_regions, plan, cell, base)
        for word in (FILLED, MERGED, DRAINED) if has_counts else ():
            self.word(cell + word, own[cell + word])
        self.word(cell, own[cell])

    def fragment(self, peer: int, offset: int, nbytes: int, first_word: int, end_word: int) -> None:
        """Send a fragment for `peer`: its bytes and the words of its slot; the slot's tag follows."""
        if self.routes.topology.is_here(peer):
            return
        self._drop_held()
        self._prepared = self.routes.gateways, Exports.fragment, (peer, offset, nbytes, first_word, end_word)
        gateway = self.routes.gateway_of(peer)
        if gateway is not None:
            self._send(gateway, offset, ((0, nbytes),))
            self._hold(gateway, 8 * first_word, 8 * (end_word - first_word))

    def _send(self, gateway: int, base: int, ranges: Any) -> None:
        note = self._peer_regions.own[CONSUMED]
        for start, nbytes in ranges:
            first = base + start
            if 0 < nbytes <= _PIECE_BYTES:
                self._hold(gateway, first, nbytes)
            elif nbytes:
                self.links.write(gateway, first, self._bytes[first : first + nbytes], NO_WORD, 0, note)

    # ---- progress

    def consumed(self, seq: int) -> None:
        """Note that this rank has ended call `seq`."""
        for gateway in self.routes.gateways.values():
            if seq - self._told[gateway] >= _UNTOLD_CALLS:
                self.tell_progress()
                return

    def _tell_late(self, gateway: int, note: int) -> None:
        with self.links.lock:
            for index in self._late.pop(gateway, {}):
                value = bytes(self._bytes[8 * index : 8 * index + 8])
                self.links.write(gateway, 8 * index, value, NO_WORD, 0, note)

    def tell_progress(self) -> None:
        """Send this rank's progress to the hosts that do not know it yet."""
        own = self._peer_regions.own
        for gateway in list(self._late):
            self._tell_late(gateway, own[CONSUMED])
            self.links.flush(gateway)
        consumed = own[CONSUMED]
        for gateway in self.routes.gateways.values():
            if self._told[gateway] < consumed:
                self._told[gateway] = consumed
                self.links.write(gateway, 0, b"", NO_WORD, 0, consumed)

    # ---- the end

    def tell_ends(self, seq: int) -> None:
        """Send how the last calls have ended here, up to call `seq`: for ranks that ask after this rank has left."""
        peer_regions, own = self._peer_regions, self._peer_regions.own
        for number in range(max(peer_regions.least_consumed(), seq - NUM_CELLS) + 1, seq + 1):
            mark = peer_regions.first_cell + number % NUM_CELLS * CELL_WORDS + GAVE_UP
            self.word(mark, own[mark])

    def say_goodbye(self) -> None:
        """Send that nothing more comes from this rank, behind everything it has sent."""
        for gateway in self.routes.gateways.values():
            self.links.say(gateway, END, self._peer_regions.rank, FINAL)

    def end(self, outboxes: PeerRegions) -> None:
        """Leave the memory to the thread of the links, for as long as others of this host receive through this rank."""
        self.links.end(lambda: not self._is_needed(), self._close)

    def abandon(self) -> None:
        """End the links at once: the group was not made."""
        self.links.end(lambda: True, int)
        self.links.join(ABANDON_S)

    def _close(self) -> None:
        self._prepared = None
        self._peer_regions.exports = (
            NO_EXPORTS  # else the two would keep each other, and the mappings, until a collection
        )
        self.on_close()
        self.on_close, self.is_receiving = int, bool  # they refer to objects that refer to this one
        self._bytes.release()
        self._peer_regions.close()

    def _is_needed(self) -> bool:
        """Return whether ranks of this host may still receive through this one."""
        peer_regions = self._peer_regions
        others = [
            rank
            for rank in self.routes.topology.here
            if rank != peer_regions.rank and not has_left(peer_regions.words[rank])
        ]
        return bool(others) and self.is_receiving()
