"""The sending end of the lanes: fragments into this rank's outbox, verdicts out of the peers' (protocol: `p2p.py`).

Writer of a lane: this rank only. A slot is written again when the receiver's count of freed slots has passed it; the
tag word is stored last, and only then do the books here move on, in one entry that may be run twice (`_written`).
"""

from __future__ import annotations

import struct

from ..errors import MismatchError, ProtocolError
from .message import BYTE, CANCELLED, DATA, Books, Message, SendLane, mismatch
from .operation import Block
from .outbox import (
    BELL,
    LANE_SLOT_BYTES,
    LANE_SLOT_WORDS,
    NUM_LANE_SLOTS,
    NUM_VERDICTS,
    SLOT_MESSAGE,
    VERDICT_WORDS,
    Outboxes,
)
from .wake import publish_word, ring

MAX_FRAGMENT_SLOTS = 16
_HEADER = struct.Struct("=6Q")  # SLOT_MESSAGE and what follows, in the order of `outbox.py`


class Sender(Books):
    """All lanes that this rank writes."""

    def __init__(self, box: Outboxes, finished: list[Message], first: int) -> None:
        super().__init__(box, finished)
        self._first = first
        self._lanes: dict[int, SendLane] = {}
        self._verdicts = box.verdict_base[box.rank]  # the same in every outbox

    def post(self, message: Message) -> None:
        """Take a new send and write as much of it as there is room for."""
        lane = self._lanes.get(message.peer)
        if lane is None:
            lane = self._lanes[message.peer] = SendLane(self._first)
        if lane.queue or lane.waiting or not self._send_whole(message, lane):
            lane.queue.append(message)
            self._push(message.peer, lane)

    def pending(self) -> list[Message]:
        """Return the sends that are not done."""
        return [m for lane in self._lanes.values() for m in (*lane.queue, *lane.waiting.values()) if not m.done]

    def cancel(self, message: Message) -> None:
        """Forget a failed send that has not begun.

        One that is partly written stays at the head: `_push` ends it with a CANCELLED fragment as soon as there is a
        slot. One that is written and waits for its verdict stays deliverable.
        """
        lane = self._lanes.get(message.peer)
        if lane is None or message not in lane.queue:
            return
        if message.number:
            self._push(message.peer, lane)
        else:
            lane.queue.remove(message)

    def renew(self, peer: int, first: int) -> None:
        """Another process has taken the place of `peer`: its lane begins at number `first`."""
        self._lanes[peer] = SendLane(first)

    def close(self) -> None:
        """Forget everything."""
        self._lanes.clear()

    def step(self, message: Message) -> Block | None:
        """Move a send; None when it is done, else what it waits for."""
        peer = message.peer
        lane = self._lanes[peer]
        if lane.queue:
            self._push(peer, lane)
        if lane.waiting.get(message.number) is message:
            return self._verdict(peer, lane, message)
        if message.done:
            return None
        if lane.waiting and lane.next_message - min(lane.waiting) >= NUM_VERDICTS:
            self._collect(peer, lane)
            oldest = min(lane.waiting, default=0)
            if oldest:
                return Block(peer, self._verdict_index(oldest), oldest << 1)
        return Block(peer, self._verdicts, lane.freed_seen + 1)

    # ---- verdicts

    def _verdict_index(self, number: int) -> int:
        return self._verdicts + 8 + number % NUM_VERDICTS * VERDICT_WORDS

    def _verdict(self, peer: int, lane: SendLane, message: Message) -> Block | None:
        number = message.number
        index = self._verdicts + 8 + number % NUM_VERDICTS * VERDICT_WORDS
        words = self._box.words[peer]
        verdict = words[index]
        if verdict >> 1 != number:
            return Block(peer, index, number << 1)
        if verdict & 1:
            message.fail(self._refused(message, peer, words[index + 1]))
        message.done = True
        if message.on_done:
            self._ended.append(message)
        lane.waiting.pop(number, None)
        return None

    def _refused(self, message: Message, peer: int, expected: int) -> MismatchError:
        return mismatch(message, self._box, peer, message.signature, expected)

    def _collect(self, peer: int, lane: SendLane) -> None:
        """Take all verdicts that have arrived: numbers may be used again only then."""
        for message in list(lane.waiting.values()):
            self._verdict(peer, lane, message)
        self._push(peer, lane)

    # ---- fragments

    def _send_whole(self, message: Message, lane: SendLane) -> bool:
        """The usual case in one go: one slot is enough and nothing is under way on the lane. False: not that case."""
        lane.freed_seen = freed = max(self._box.words[message.peer][self._verdicts], lane.first - 1)
        nbytes = message.nbytes
        if nbytes > LANE_SLOT_BYTES or not 0 <= lane.next_slot - 1 - freed < NUM_LANE_SLOTS:
            return False
        self._write(message.peer, lane, message, nbytes, 1, DATA)
        return True

    def _push(self, peer: int, lane: SendLane) -> None:
        """Write as many fragments of the queued messages as there are free slots."""
        while lane.queue:
            message = lane.queue[0]
            if not message.number and lane.waiting and lane.next_message - min(lane.waiting) >= NUM_VERDICTS:
                return
            while not message.written:
                if not self._push_fragment(peer, lane, message):
                    return
            lane.queue.popleft()

    def _push_fragment(self, peer: int, lane: SendLane, message: Message) -> bool:
        """Write the next fragment; False when there is no free slot."""
        lane.freed_seen = freed = max(self._box.words[peer][self._verdicts], lane.first - 1)
        if freed >= lane.next_slot:
            raise ProtocolError(f"rank {peer} freed slot {freed}, only {lane.next_slot - 1} were sent")
        slots = min(
            NUM_LANE_SLOTS - (lane.next_slot - 1 - freed),
            MAX_FRAGMENT_SLOTS,
            NUM_LANE_SLOTS - (lane.next_slot - 1) % NUM_LANE_SLOTS,
        )
        if slots <= 0:
            return False
        if message.error is not None:
            self._write(peer, lane, message, 0, 1, CANCELLED)
        else:
            nbytes = min(message.nbytes - message.bytes_done, slots * LANE_SLOT_BYTES)
            self._write(peer, lane, message, nbytes, max(1, -(-nbytes // LANE_SLOT_BYTES)), DATA)
        return True

    def _write(self, peer: int, lane: SendLane, message: Message, nbytes: int, used: int, kind: int) -> None:
        box = self._box
        slot = (lane.next_slot - 1) % NUM_LANE_SLOTS
        number = message.number or lane.next_message
        done, total = message.bytes_done, message.nbytes
        if nbytes == total:
            array = message.array
            place = (box.lane_data[peer] + slot * LANE_SLOT_BYTES) // array.itemsize  # slots suit every dtype
            box.views(array.dtype)[box.rank][place : place + len(array)] = array
        elif nbytes:
            offset = box.lane_data[peer] + slot * LANE_SLOT_BYTES
            box.views(BYTE)[box.rank][offset : offset + nbytes] = message.data[done : done + nbytes]
        index = box.lane_base[peer] + slot * LANE_SLOT_WORDS
        _HEADER.pack_into(
            box.own, 8 * (index + SLOT_MESSAGE), number, message.user_tag, message.signature, total, nbytes, kind
        )
        args = (peer, lane, message, index, lane.next_slot, used, number, done + nbytes, kind)
        self.entry = (self._written, args)
        self._written(*args)
        self.entry = None

    def _written(
        self,
        peer: int,
        lane: SendLane,
        message: Message,
        index: int,
        slot_number: int,
        used: int,
        number: int,
        bytes_done: int,
        kind: int,
    ) -> None:
        """Publish a fragment and book it."""
        box = self._box
        message.number = number
        message.bytes_done = bytes_done
        if bytes_done == message.nbytes and kind == DATA:
            lane.waiting[number] = message
            message.written = True
        elif kind == CANCELLED:
            message.written = True
        lane.next_message = number + 1
        publish_word(box, index, box.epoch_bits | slot_number)
        lane.next_slot = slot_number + used
        if box.words[peer][BELL]:
            ring(box, peer)
