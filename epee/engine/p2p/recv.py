"""The receiving end of the channels: fragments in from the peers' outboxes, verdicts out (see `channel.py`).

Every header field is checked before it is used: numbers of messages run without a gap, sizes fit the channel, the
signature and the machine. A slot is freed last, after the data was copied and the verdict written, so that each entry
of the state (`_taken`, `_begun`, `_fragmented`, `_delivered`, `_adopted`, `_dropped`) may be run twice.

Before a message is delivered or refused it is claimed (`_claim`; the handshake is in `channel.py`): its sender may be
about to abort it. A message received by a call that then raises is kept for the next receive (`put_back`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Container
from functools import cache
from typing import NamedTuple

import numpy as np

from ...errors import ProtocolError
from ...memory.signals import fence
from ..operation import Block
from ..outbox import (
    BELL,
    CLAIM,
    LANE_BYTES,
    LANE_SLOT_BYTES,
    LANE_SLOT_WORDS,
    NUM_LANE_SLOTS,
    NUM_VERDICTS,
    SLOT_MESSAGE,
    TAKEN_BACK,
    VERDICT_WORDS,
    PeerRegions,
)
from ..signature import unpack
from ..tensors import CARRIERS, Array
from .message import (
    ANY,
    BYTE,
    CANCELLED,
    DATA,
    DECLINED,
    MATCHED,
    REFUSED,
    Books,
    IncomingMessage,
    Message,
    RecvLane,
    mismatch,
)

_HEADER = struct.Struct("=6Q")
_ITEM_BYTES = {carrier.code: carrier.dtype.itemsize for carrier in CARRIERS.values()}


class FragmentHeader(NamedTuple):
    """The header of a fragment, in the order of its words in the channel."""

    number: int
    user_tag: int
    signature: int
    total: int
    nbytes: int
    kind: int


@cache
def memory_bytes() -> int:
    """Return the size of this machine's memory: no tensor of a rank on it is larger."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Receiver(Books):
    """All channels that this rank reads, and the receives that wait for them."""

    def __init__(
        self,
        peer_regions: PeerRegions,
        books: tuple[list[Message], dict[Message, None]],
        first: int,
        out: Container[int],
    ) -> None:
        """Read the messages to this rank from all but those in `out`; channels begin at number `first`."""
        super().__init__(peer_regions, *books)
        self._first = first
        self._out = out
        self._lanes: dict[int, RecvLane] = {}
        self._posted: list[Message] = []
        self._base = peer_regions.lane_base[peer_regions.rank]  # of the channel to this rank; the same in every outbox
        self._marks = self._base + TAKEN_BACK
        self._data = peer_regions.lane_data[peer_regions.rank]

    def post(self, message: Message) -> None:
        """Take a new receive: it gets the oldest match in private memory, else the channels are read."""
        self._posted.append(message)
        for peer in self.sources() if message.wanted == ANY else (message.wanted,):
            lane = self._lanes.get(peer)
            if lane is not None and lane.unexpected and self._adopt(peer, lane, message):
                return
        self.step(message)

    def sources(self) -> list[int]:
        """Return the ranks from which messages are taken."""
        return [peer for peer in self._peer_regions.peers if peer not in self._out]

    def pending(self) -> list[Message]:
        """Return the receives that are not done."""
        return [message for message in self._posted if not message.done]

    def involving(self, peer: int) -> list[Message]:
        """Return the receives that wait for `peer` or take from it and are in the state, failed ones included."""
        return [message for message in self._posted if peer in (message.wanted, message.peer)]

    def cancel(self, message: Message) -> None:
        """Forget a failed receive; what has arrived of its message waits in private memory for the next one."""
        if message in self._posted:
            self._posted.remove(message)
        for lane in self._lanes.values():
            incoming = lane.current
            if incoming is not None and incoming.message is message:
                self._to_private(message.peer, lane, incoming)
                if incoming not in lane.unexpected:
                    lane.unexpected.append(incoming)
            for incoming in lane.unexpected:
                if incoming.message is message:
                    incoming.is_decided = incoming.is_answered
                    incoming.message = None
        if message.number:
            index = self._peer_regions.verdict_base[message.peer] + CLAIM
            if self._peer_regions.own[index] == message.number:
                self._peer_regions.own[index] = 0  # it is not taken now, and a later receive checks again
        if message.wanted == ANY:
            self._peer_regions.own[BELL] = 0

    def put_back(self, message: Message) -> None:
        """Keep the message of a receive whose call raises: the next receive that matches gets it, before all others."""
        lane = self._lanes.get(message.peer)
        known = [incoming.number for incoming in lane.unexpected] if lane is not None else []
        if lane is None or message.number < lane.first or message.number in known:
            return
        incoming = IncomingMessage(message.number, message.user_tag, message.signature, message.nbytes)
        incoming.buffer = message.data.copy()
        incoming.bytes_seen = message.nbytes
        incoming.is_decided = incoming.is_answered = True
        lane.unexpected.insert(0, incoming)

    def lose(self, peer: int) -> None:
        """Forget the messages of a rank that is excluded."""
        self._lanes.pop(peer, None)

    def renew(self, peer: int, first: int) -> None:
        """Begin the channel at number `first`: another process has taken the rank of `peer`."""
        self._lanes[peer] = RecvLane(first)
        self._peer_regions.own[self._peer_regions.verdict_base[peer]] = first - 1

    def close(self) -> None:
        """Forget everything."""
        self._lanes.clear()
        self._posted.clear()

    def step(self, message: Message) -> Block | None:
        """Advance a receive.

        None when it is done, else the condition it waits for: a slot, or (any source) the BELL word.
        """
        wanted = message.wanted
        if wanted != ANY:
            lane = self._lanes.get(wanted)
            if lane is None:
                lane = self._lanes[wanted] = RecvLane(self._first)
            index = self._pull(wanted, lane)
            return None if message.done else Block(wanted, index, self._peer_regions.epoch_bits | lane.next_slot)
        self._peer_regions.own[BELL] = 1  # before the read, so that a sender either is seen here or sees it
        for peer in self._peer_regions.peers if not self._out else self.sources():
            self._pull(peer, self._lanes.setdefault(peer, RecvLane(self._first)))
            if message.done:
                return None
        return Block(self._peer_regions.rank, BELL, 2)

    # ---- reading

    def _pull(self, peer: int, lane: RecvLane) -> int:
        """Read the fragments that have arrived from `peer`; return the index of the word of the next one."""
        peer_regions = self._peer_regions
        words = peer_regions.words[peer]
        while True:
            number = lane.next_slot
            index = self._base + (number - 1) % NUM_LANE_SLOTS * LANE_SLOT_WORDS
            if words[index] != peer_regions.epoch_bits | number or (lane.current is None and not self._posted):
                return index
            head = _HEADER.unpack_from(words, 8 * (index + SLOT_MESSAGE))
            if lane.current is None:
                if self._take_whole(peer, lane, *head):
                    continue
                if not self._begin(peer, lane, FragmentHeader(*head)):
                    return index
            self._fragment(peer, lane, FragmentHeader(*head))

    def _take_whole(
        self, peer: int, lane: RecvLane, number: int, user_tag: int, signature: int, total: int, nbytes: int, kind: int
    ) -> bool:
        """Take a message of one fragment that the oldest receive matches, the usual case, in one go.

        False: not that case.
        """
        message = self._posted[0]
        slot = (lane.next_slot - 1) % NUM_LANE_SLOTS
        if (
            message.number
            or message.wanted not in (peer, ANY)
            or user_tag != message.user_tag
            or signature != message.signature
            or number != lane.next_message
            or nbytes != total
            or total != message.nbytes
            or total > (NUM_LANE_SLOTS - slot) * LANE_SLOT_BYTES
            or kind != DATA
        ):
            return False
        args = (peer, lane, message, number, lane.next_slot, self._data + slot * LANE_SLOT_BYTES)
        self.entry = (self._taken, args)  # `book` without its call
        self._taken(*args)
        self.entry = None
        return True

    def _taken(self, peer: int, lane: RecvLane, message: Message, number: int, slot_number: int, offset: int) -> None:
        array, total = message.array, message.nbytes
        if not message.done and (message.number == number or self._claim(peer, lane, number)):
            message.peer, message.number = peer, number  # from here on it is decided
            if total:
                place = offset // array.itemsize  # slots are aligned for every dtype
                array[:] = self._peer_regions.views[array.dtype][peer][place : place + len(array)]
            message.target.finish()
            self._answer(peer, message, number, MATCHED)
        lane.next_message = number + 1
        lane.next_slot = slot_number + (1 if total <= LANE_SLOT_BYTES else -(-total // LANE_SLOT_BYTES))
        self._free(peer, lane)

    def _begin(self, peer: int, lane: RecvLane, head: FragmentHeader) -> bool:
        """Start a message: bind it to the oldest receive that matches it, else to private memory.

        False, and nothing read, when no receive of this source is posted: the message stays in its channel.
        """
        candidates = [m for m in self._posted if m.wanted in (peer, ANY) and not m.number]
        if not candidates:
            return False
        if head.number != lane.next_message:
            raise ProtocolError(
                f"rank {peer} sent message {head.number} where {lane.next_message} follows; is its memory damaged?"
            )
        incoming = IncomingMessage(head.number, head.user_tag, head.signature, head.total)
        incoming.discard = incoming.is_taken_back = self._is_taken_back(peer, head.number)
        message = next((m for m in candidates if m.user_tag == head.user_tag), None)
        fits = message is not None and message.signature == head.signature and message.nbytes == head.total
        if message is None:
            _check_total(peer, head)
        if not incoming.discard and (message is None or (fits and head.total > LANE_BYTES)):
            incoming.buffer = np.empty(head.total, BYTE)
        self.book(self._begun, (peer, lane, message, incoming))
        return True

    def _begun(self, peer: int, lane: RecvLane, message: Message | None, incoming: IncomingMessage) -> None:
        if incoming.is_taken_back:
            self._decline(peer, incoming.number)
        elif message is not None:
            self._bind(peer, lane, message, incoming)
        elif incoming not in lane.unexpected:
            lane.unexpected.append(incoming)
        lane.next_message = incoming.number + 1
        lane.current = incoming

    def _bind(self, peer: int, lane: RecvLane, message: Message, incoming: IncomingMessage) -> None:
        """Give `incoming` to `message`, or refuse it at once when they differ."""
        if message.signature == incoming.signature and message.nbytes == incoming.total:
            message.peer, message.number = peer, incoming.number
            incoming.message = message
            return
        if not incoming.is_answered:
            incoming.discard = True
            incoming.buffer = None
            if not incoming.is_decided and not self._claim(peer, lane, incoming.number):
                return  # the receive waits for the next one
            incoming.is_decided = True
        message.peer, message.number = peer, incoming.number
        message.fail(mismatch(message, self._peer_regions, peer, message.signature, incoming.signature))
        self._answer(peer, message, 0 if incoming.is_answered else incoming.number, REFUSED)

    def _fragment(self, peer: int, lane: RecvLane, head: FragmentHeader) -> None:
        incoming = lane.current
        assert incoming is not None, "`_begin` has set it"
        slot = (lane.next_slot - 1) % NUM_LANE_SLOTS
        used = max(1, -(-head.nbytes // LANE_SLOT_BYTES))
        seen = incoming.bytes_seen + head.nbytes
        if (
            head.number != incoming.number
            or head.kind not in (DATA, CANCELLED)
            or used > NUM_LANE_SLOTS - slot
            or seen > incoming.total
            or (not head.nbytes and incoming.total and head.kind == DATA)
        ):
            raise ProtocolError(
                f"fragment of {head.nbytes} bytes of message {head.number} from rank {peer} does not fit "
                f"message {incoming.number} of {incoming.total} bytes; is its memory damaged?"
            )
        offset = self._data + slot * LANE_SLOT_BYTES
        if incoming.buffer is not None:
            incoming.buffer[incoming.bytes_seen : seen] = self._peer_regions.views[BYTE][peer][
                offset : offset + head.nbytes
            ]
        place = (offset, head.nbytes)
        self.book(self._fragmented, (peer, lane, incoming, lane.next_slot + used, seen, place, head.kind))

    def _fragmented(
        self,
        peer: int,
        lane: RecvLane,
        incoming: IncomingMessage,
        next_slot: int,
        bytes_seen: int,
        place: tuple[int, int],
        kind: int,
    ) -> None:
        lane.next_slot = next_slot
        incoming.bytes_seen = bytes_seen
        incoming.cancelled = kind == CANCELLED
        if incoming.complete and lane.current is incoming:
            if incoming.buffer is None and not incoming.discard and place not in incoming.fragments:
                incoming.fragments.append(place)
            self._delivered(peer, lane, incoming)
        elif incoming.buffer is not None or incoming.discard:
            self._free(peer, lane)
        elif place not in incoming.fragments:
            incoming.fragments.append(place)

    def _delivered(self, peer: int, lane: RecvLane, incoming: IncomingMessage) -> None:
        """Commit the channel's current message, which is complete, to its receive, if it has one.

        Its slots are free then.
        """
        message = incoming.message
        is_open = message is not None and not message.done
        if message is not None and is_open and (incoming.cancelled or not self._commit(peer, lane, message, incoming)):
            message.number, message.peer = 0, message.wanted  # it waits for the next message
        if (incoming.cancelled or message is not None) and incoming in lane.unexpected:
            lane.unexpected.remove(incoming)
        lane.current = None
        self._free(peer, lane)

    def _adopt(self, peer: int, lane: RecvLane, message: Message) -> bool:
        """Find the oldest message in private memory that a new receive matches; True: it has found one.

        A message that was aborted meanwhile is dropped: its sender can have only so many without a verdict.
        """
        for incoming in list(lane.unexpected):
            if incoming.message is not None:
                continue
            if incoming.user_tag == message.user_tag:
                self.book(self._adopted, (peer, lane, message, incoming))
                if message.done or message.number:
                    return True
            elif incoming.complete and not incoming.is_answered and self._is_taken_back(peer, incoming.number):
                self.book(self._dropped, (peer, lane, incoming))
        return False

    def _dropped(self, peer: int, lane: RecvLane, incoming: IncomingMessage) -> None:
        self._decline(peer, incoming.number)
        if incoming in lane.unexpected:
            lane.unexpected.remove(incoming)

    def _adopted(self, peer: int, lane: RecvLane, message: Message, incoming: IncomingMessage) -> None:
        """Give a new receive a message that waits in private memory, completely arrived or not."""
        self._bind(peer, lane, message, incoming)
        if message.error is not None and incoming.is_answered:
            return  # it does not fit; its sender has finished with it, so it waits for a receive that fits
        is_ready = incoming.complete and not incoming.discard and not message.done
        if is_ready and not self._commit(peer, lane, message, incoming):
            message.number, message.peer = 0, message.wanted
        if (incoming.complete or incoming.discard) and incoming in lane.unexpected:
            lane.unexpected.remove(incoming)

    # ---- claims

    def _is_taken_back(self, peer: int, number: int) -> bool:
        return self._peer_regions.words[peer][self._marks + (number - 1) % NUM_LANE_SLOTS * LANE_SLOT_WORDS] == number

    def _claim(self, peer: int, lane: RecvLane, number: int) -> bool:
        """Publish that a message is being taken, and check then. False: its sender has aborted it before."""
        if lane.declined != number:  # else run again; the sender may be using its mark for a later message already
            peer_regions = self._peer_regions
            peer_regions.own[peer_regions.verdict_base[peer] + CLAIM] = number
            fence()
            if peer_regions.words[peer][self._marks + (number - 1) % NUM_LANE_SLOTS * LANE_SLOT_WORDS] != number:
                return True
            lane.declined = number
        self._decline(peer, number)
        return False

    def _decline(self, peer: int, number: int) -> None:
        index = self._peer_regions.verdict_base[peer] + 8 + number % NUM_VERDICTS * VERDICT_WORDS
        self._peer_regions.exports.publish(self._peer_regions, index, number << 2 | DECLINED)

    # ---- results

    def _commit(self, peer: int, lane: RecvLane, message: Message, incoming: IncomingMessage) -> bool:
        """Write the results of a receive; False, and nothing written, when the sender has aborted its message."""
        if not incoming.is_decided and not self._claim(peer, lane, incoming.number):
            return False
        incoming.is_decided = True
        if incoming.buffer is not None:
            message.data[:] = incoming.buffer
        else:
            self._gather(peer, incoming, message.data)
        message.target.finish()
        self._answer(peer, message, 0 if incoming.is_answered else incoming.number, MATCHED)
        return True

    def _gather(self, peer: int, incoming: IncomingMessage, out: Array) -> None:
        """Copy the fragments that lie in the channel, one behind the other."""
        data = self._peer_regions.views[BYTE][peer]
        done = 0
        for offset, nbytes in incoming.fragments:
            out[done : done + nbytes] = data[offset : offset + nbytes]
            done += nbytes

    def _answer(self, peer: int, message: Message, number: int, verdict: int) -> None:
        """Write the verdict that the sender waits for (number 0: it has got it long ago), and end the receive."""
        peer_regions = self._peer_regions
        if number:
            index = peer_regions.verdict_base[peer] + 8 + number % NUM_VERDICTS * VERDICT_WORDS
            if verdict == REFUSED:
                peer_regions.exports.publish(peer_regions, index + 1, message.signature)
            peer_regions.exports.publish(peer_regions, index, number << 2 | verdict)
        if message in self._posted:
            self._posted.remove(message)
        if message.wanted == ANY:
            peer_regions.own[BELL] = 0  # another one that waits sets it again at its next step
        message.done = True
        if message.on_done:
            self._ended.append(message)
        self._open.pop(message, None)

    def _free(self, peer: int, lane: RecvLane) -> None:
        """Publish that the slots read so far may be written again.

        The sender sleeps on that when the channel is full.
        """
        peer_regions = self._peer_regions
        freed = lane.next_slot - 1
        if freed - lane.woken > NUM_LANE_SLOTS // 4:
            peer_regions.exports.publish(peer_regions, peer_regions.verdict_base[peer], freed)
            lane.woken = freed
        else:
            peer_regions.own[peer_regions.verdict_base[peer]] = freed
            peer_regions.exports.later(peer_regions.verdict_base[peer])

    def _to_private(self, peer: int, lane: RecvLane, incoming: IncomingMessage) -> None:
        """Move the fragments of a message out of the channel: its receive was aborted."""
        if incoming.buffer is None:
            buffer = np.empty(incoming.total, BYTE)
            self._gather(peer, incoming, buffer)
            incoming.buffer = buffer
            incoming.fragments = []
            self._free(peer, lane)


def _check_total(peer: int, head: FragmentHeader) -> None:
    """Check that a message without a receive fits in memory: it goes to private memory of the size in its header."""
    call = unpack(head.signature)
    item_bytes = _ITEM_BYTES.get(head.signature >> 6 & 63, 0)
    if call.op != "point_to_point" or head.total != call.num_elements * item_bytes or head.total > memory_bytes():
        raise ProtocolError(
            f"rank {peer} announced a message of {head.total} bytes for {call}; a message has as many bytes as its "
            f"elements and fits the machine's memory of {memory_bytes()} bytes; is the sender's memory damaged?"
        )
