"""The sending end of the channels: fragments into this rank's outbox, verdicts out of the peers' (see `channel.py`).

This rank alone writes a channel. A slot is written again when the receiver's count of freed slots has passed it; the
tag word is stored last, and only then does the state here advance, in one entry that may be run twice (`_written`).

A message whose call raises is aborted (`take_back`; the handshake is in `channel.py`). If that comes too late, or
cannot be decided yet, the message is kept as open, and the next send of its tag is its successor (`_inherited`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from ...errors import InvalidState, MismatchError, ProtocolError
from ..operation import Block
from ..outbox import (
    BELL,
    CLAIM,
    LANE_SLOT_BYTES,
    LANE_SLOT_WORDS,
    NUM_LANE_SLOTS,
    NUM_VERDICTS,
    SLOT_MESSAGE,
    TAKEN_BACK,
    VERDICT_WORDS,
    PeerRegions,
    ring,
)
from .message import (
    BYTE,
    CANCELLED,
    CLAIMED,
    DATA,
    DECLINED,
    MATCHED,
    REFUSED,
    Books,
    Message,
    SendLane,
    mismatch,
)

MAX_FRAGMENT_SLOTS = 16
_HEADER = struct.Struct("=6Q")  # SLOT_MESSAGE and what follows, in the order of `outbox.py`


class _Fragment(NamedTuple):
    """A part of a message that is in the outbox and is not published yet.

    Attributes:
        number: of the message in its channel.
        bytes_done: of the message, with this fragment.
        nbytes: of the fragment.
        kind: DATA or CANCELLED.
        first_word: of the outbox.
        slot_number: of its first slot, counted from the channel's beginning.
        used: slots.
    """

    number: int
    bytes_done: int
    nbytes: int
    kind: int
    first_word: int
    slot_number: int
    used: int


class Sender(Books):
    """All channels that this rank writes."""

    def __init__(self, peer_regions: PeerRegions, books: tuple[list[Message], dict[Message, None]], first: int) -> None:
        super().__init__(peer_regions, *books)
        self._first = first
        self._lanes: dict[int, SendLane] = {}
        self._verdicts = peer_regions.verdict_base[peer_regions.rank]  # the same in every outbox

    def post(self, message: Message) -> None:
        """Take a new send and write as much of it as there is room for."""
        lane = self._lanes.get(message.peer)
        if lane is None:
            lane = self._lanes[message.peer] = SendLane(self._first)
        if lane.queue or lane.waiting or lane.open or not self._send_whole(message, lane):
            self._forget(message.peer, lane)
            inherited = [other.heir_of for other in lane.queue]
            of_tag = (old for old in lane.open if old.user_tag == message.user_tag and old not in inherited)
            message.heir_of = next(of_tag, None)
            lane.queue.append(message)
            self._push(message.peer, lane)

    def pending(self) -> list[Message]:
        """Return the sends that are not done."""
        return [m for lane in self._lanes.values() for m in (*lane.queue, *lane.waiting.values()) if not m.done]

    def involving(self, peer: int) -> list[Message]:
        """Return the sends to `peer` that are in the state, failed ones included."""
        lane = self._lanes.get(peer)
        return [] if lane is None else [*lane.queue, *lane.waiting.values()]

    def take_back(self, message: Message) -> bool:
        """Prevent the delivery of a send that raises. True: the receiver has begun to take the message.

        Then its outcome is not known yet; ask again. A send that turns out to be delivered, or refused, is
        done after this. May be repeated.
        """
        lane = self._lanes.get(message.peer)
        if lane is None or lane.waiting.get(message.number) is not message:
            return message.heir_of is not None  # else it is not written, and the receiver never delivers it
        peer_regions, number = self._peer_regions, message.number
        mark = peer_regions.lane_base[message.peer] + (number - 1) % NUM_LANE_SLOTS * LANE_SLOT_WORDS + TAKEN_BACK
        peer_regions.exports.publish(peer_regions, mark, number)  # with a fence
        return self._outcome(message.peer, lane, message) == CLAIMED

    def cancel(self, message: Message) -> None:
        """Take a failed send out of the state, and abort it at the receiver.

        One that is partly written stays at the head: `_push` ends it with a CANCELLED fragment as soon as there is a
        slot. One that is delivered all the same, or may be, is kept for its repetition.
        """
        lane = self._lanes.get(message.peer)
        if lane is None:
            return
        if message in lane.queue:
            if message.number:
                self._push(message.peer, lane)
            else:
                lane.queue.remove(message)
                return
        if self.take_back(message) or message.verdict == MATCHED:
            self.keep(message)

    def keep(self, message: Message) -> None:
        """Note a send whose call raises although it is delivered, or may be: the next one of its tag continues it."""
        lane = self._lanes.get(message.peer)
        if lane is None or message.number < lane.first or message in lane.open:
            return
        if message.error is None:
            message.verdict = MATCHED
        message.digest = message.fingerprint()
        lane.open.append(message)

    def is_open(self, message: Message) -> bool:
        """Return whether the next send of the tag continues this one."""
        lane = self._lanes.get(message.peer)
        return lane is not None and message in lane.open

    def renew(self, peer: int, first: int) -> None:
        """Begin the channel at number `first`: another process has taken the rank of `peer`."""
        self._lanes[peer] = SendLane(first)

    def close(self) -> None:
        """Forget everything."""
        self._lanes.clear()

    def step(self, message: Message) -> Block | None:
        """Advance a send; None when it is done, else the condition it waits for."""
        peer = message.peer
        lane = self._lanes[peer]
        if lane.queue:
            self._push(peer, lane)
        if lane.waiting.get(message.number) is message:
            return self._verdict(peer, lane, message)
        if message.done:
            return None
        old = lane.queue[0].heir_of
        if old is not None:
            return Block(peer, self._verdict_index(old.number), old.number << 2 | DECLINED)
        if lane.waiting and lane.next_message - min(lane.waiting) >= NUM_VERDICTS:
            self._collect(peer, lane)
            oldest = min(lane.waiting, default=0)
            if oldest:
                return Block(peer, self._verdict_index(oldest), oldest << 2 | DECLINED)
        return Block(peer, self._verdicts, lane.freed_seen + 1)

    # ---- verdicts

    def _verdict_index(self, number: int) -> int:
        return self._verdicts + 8 + number % NUM_VERDICTS * VERDICT_WORDS

    def _verdict(self, peer: int, lane: SendLane, message: Message) -> Block | None:
        number = message.number
        index = self._verdicts + 8 + number % NUM_VERDICTS * VERDICT_WORDS
        words = self._peer_regions.words[peer]
        wanted = number << 2 | MATCHED
        verdict = words[index]
        was_done = message.done
        if verdict != wanted:
            if verdict >> 2 > number:
                raise ProtocolError(f"rank {peer} answered message {verdict >> 2} where {number} waits; is it damaged?")
            if verdict < wanted and (verdict != number << 2 | DECLINED or not was_done):
                return Block(peer, index, wanted)
            if verdict > wanted:
                message.fail(self._refused(message, peer, words[index + 1]))
        if was_done:
            message.verdict = verdict & 3
        else:
            message.done = True
            if message.on_done:
                self._ended.append(message)
            self._open.pop(message, None)
        lane.waiting.pop(number, None)
        return None

    def _outcome(self, peer: int, lane: SendLane, message: Message) -> int:
        """Return the outcome of an aborted message; CLAIMED: not known yet."""
        if message.verdict is not None:
            return message.verdict
        number = message.number
        claim, answer = self._verdicts + CLAIM, self._verdict_index(number)
        words = self._words_behind(peer, (claim, answer), number)
        if words is None:
            return CLAIMED
        claimed = words[claim]  # first: a receiver that claims another message has answered this one
        verdict = words[answer]
        if verdict >> 2 != number:
            return CLAIMED if claimed == number else DECLINED  # as soon as the receiver comes to it
        if verdict & 3 in (MATCHED, REFUSED) and self._verdict(peer, lane, message) is not None:
            return CLAIMED  # it is on its way from another host
        return verdict & 3

    def _words_behind(self, peer: int, indices: tuple[int, int], number: int) -> Mapping[int, int] | memoryview | None:
        """Return words of a rank as they are behind this rank's mark on a message; None: its host has not answered."""
        exports = self._peer_regions.exports
        if exports.is_here(peer):
            return self._peer_regions.words[peer]
        found: Mapping[int, int] | None = exports.looks.at(peer, indices, ("message", peer, number))
        return found

    def _forget(self, peer: int, lane: SendLane) -> None:
        """Drop the oldest messages that were aborted and that the receiver has passed."""
        for message in list(lane.waiting.values()):
            if not message.done or self._verdict(peer, lane, message) is not None:
                return

    def _is_inherited(self, peer: int, lane: SendLane, message: Message, old: Message) -> bool:
        """Return whether the outcome of `old` is known, and let its successor end or begin accordingly."""
        outcome = self._outcome(peer, lane, old)
        if outcome == CLAIMED:
            return False
        self.book(self._inherited, (lane, message, old, outcome == MATCHED))
        return True

    def _inherited(self, lane: SendLane, message: Message, old: Message, is_delivered: bool) -> None:
        """End the repetition of a message that has been delivered; any other is sent as a message of its own."""
        is_same = message.fingerprint() == old.digest
        if is_delivered and not is_same and not old.is_known:
            message.fail(
                InvalidState(
                    f"{message.describe(self._peer_regions)}: the message of this tag before it, "
                    "whose send raised, has been "
                    "delivered after all; this one is another and was not sent; send it again if it shall follow"
                )
            )
        if is_delivered and (is_same or not old.is_known):
            message.number = old.number
            message.written = message.done = True
            if message.on_done and message not in self._ended:
                self._ended.append(message)
            self._open.pop(message, None)
        message.heir_of = None
        if old in lane.open:
            lane.open.remove(old)

    def _refused(self, message: Message, peer: int, expected: int) -> MismatchError:
        return mismatch(message, self._peer_regions, peer, message.signature, expected)

    def _collect(self, peer: int, lane: SendLane) -> None:
        """Take all verdicts that have arrived: numbers may be used again only then."""
        for message in list(lane.waiting.values()):
            self._verdict(peer, lane, message)
        self._push(peer, lane)

    # ---- fragments

    def _send_whole(self, message: Message, lane: SendLane) -> bool:
        """Send a message that fits one slot on an idle channel, the usual case, in one go. False: not that case."""
        lane.freed_seen = freed = max(self._peer_regions.words[message.peer][self._verdicts], lane.first - 1)
        nbytes = message.nbytes
        if nbytes > LANE_SLOT_BYTES or not 0 <= lane.next_slot - 1 - freed < NUM_LANE_SLOTS:
            return False
        self._write(message.peer, lane, message, nbytes, 1, DATA)
        return True

    def _push(self, peer: int, lane: SendLane) -> None:
        """Write as many fragments of the queued messages as there are free slots."""
        while lane.queue:
            message = lane.queue[0]
            if message.heir_of is not None and not self._is_inherited(peer, lane, message, message.heir_of):
                return
            if not message.number and lane.waiting and lane.next_message - min(lane.waiting) >= NUM_VERDICTS:
                return
            while not message.written:
                if not self._push_fragment(peer, lane, message):
                    return
            lane.queue.popleft()

    def _push_fragment(self, peer: int, lane: SendLane, message: Message) -> bool:
        """Write the next fragment; False when there is no free slot."""
        lane.freed_seen = freed = max(self._peer_regions.words[peer][self._verdicts], lane.first - 1)
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
        peer_regions = self._peer_regions
        slot = (lane.next_slot - 1) % NUM_LANE_SLOTS
        number = message.number or lane.next_message
        done, total = message.bytes_done, message.nbytes
        if nbytes == total:
            array = message.array
            place = (peer_regions.lane_data[peer] + slot * LANE_SLOT_BYTES) // array.itemsize  # slots suit every dtype
            peer_regions.views[array.dtype][peer_regions.rank][place : place + len(array)] = array
        elif nbytes:
            offset = peer_regions.lane_data[peer] + slot * LANE_SLOT_BYTES
            peer_regions.views[BYTE][peer_regions.rank][offset : offset + nbytes] = message.data[done : done + nbytes]
        index = peer_regions.lane_base[peer] + slot * LANE_SLOT_WORDS
        _HEADER.pack_into(
            peer_regions.own,
            8 * (index + SLOT_MESSAGE),
            number,
            message.user_tag,
            message.signature,
            total,
            nbytes,
            kind,
        )
        fragment = _Fragment(number, done + nbytes, nbytes, kind, index, lane.next_slot, used)
        self.entry = (self._written, (peer, lane, message, fragment))
        self._written(peer, lane, message, fragment)
        self.entry = None

    def _written(self, peer: int, lane: SendLane, message: Message, fragment: _Fragment) -> None:
        """Publish a fragment and book it."""
        peer_regions = self._peer_regions
        number, bytes_done, _, kind, first_word, slot_number, used = fragment
        message.number = number
        message.bytes_done = bytes_done
        if bytes_done == message.nbytes and kind == DATA:
            lane.waiting[number] = message
            message.written = True
        elif kind == CANCELLED:
            message.written = True
        lane.next_message = number + 1
        tag = peer_regions.epoch_bits | slot_number
        peer_regions.exports.publish_fragment(peer_regions, first_word, tag, peer, slot_number, fragment.nbytes)
        lane.next_slot = slot_number + used
        if peer_regions.words[peer][BELL]:
            ring(peer_regions, peer)
