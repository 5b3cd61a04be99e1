"""The two ends of the channels (see `channel.py`): fragments and verdicts, out of this rank's outbox and into it.

**Sending.** This rank alone writes a channel. A slot is written again when the receiver's count of freed slots has
passed it; the tag word is stored last, and only then does the state here advance, in one entry that may be run twice
(`_written`). A message whose call raises is aborted (`take_back`; the handshake is in `channel.py`). If that comes too
late, or cannot be decided yet, the message is kept as open, and the next send of its tag is its successor
(`_inherited`).

**Receiving.** Every header field is checked before it is used: numbers of messages run without a gap, sizes fit the
channel, the signature and the machine. A slot is freed last, after the data was copied and the verdict written, so that
each entry of the state (`_taken`, `_begun`, `_fragmented`, `_delivered`, `_adopted`, `_dropped`) may be run twice.
Before a message is delivered or refused it is claimed (`_claim`): its sender may be about to abort it. A message
received by a call that then raises is kept for the next receive (`put_back`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Container, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np

from ...errors import InvalidState, MismatchError, ProtocolError
from ...memory.signals import fence
from ..operation import Block
from ..outbox import (
    BELL,
    CHANNEL_BYTES,
    CHANNEL_SLOT_BYTES,
    CHANNEL_SLOT_WORDS,
    CLAIM,
    NUM_CHANNEL_SLOTS,
    NUM_VERDICTS,
    SLOT_MESSAGE,
    TAKEN_BACK,
    VERDICT_WORDS,
    PeerRegions,
    ring,
)
from ..signature import unpack
from ..tensors import CARRIERS, Array
from .message import (
    ANY,
    BYTE,
    CANCELLED,
    CLAIMED,
    DATA,
    DECLINED,
    MATCHED,
    REFUSED,
    Books,
    IncomingMessage,
    Message,
    RecvChannel,
    SendChannel,
    mismatch,
)

MAX_FRAGMENT_SLOTS = 16
_HEADER = struct.Struct("=6Q")  # SLOT_MESSAGE and what follows, in the order of `outbox.py`
_ITEM_BYTES = {carrier.code: carrier.dtype.itemsize for carrier in CARRIERS.values()}


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
        self._channels: dict[int, SendChannel] = {}
        self._verdicts = peer_regions.verdict_base[peer_regions.rank]  # the same in every outbox

    def post(self, message: Message) -> None:
        """Take a new send and write as much of it as there is room for."""
        channel = self._channels.get(message.peer)
        if channel is None:
            channel = self._channels[message.peer] = SendChannel(self._first)
        if channel.queue or channel.waiting or channel.open or not self._send_whole(message, channel):
            self._forget(message.peer, channel)
            inherited = [other.heir_of for other in channel.queue]
            of_tag = (old for old in channel.open if old.user_tag == message.user_tag and old not in inherited)
            message.heir_of = next(of_tag, None)
            channel.queue.append(message)
            self._push(message.peer, channel)

    def pending(self) -> list[Message]:
        """Return the sends that are not done."""
        return [
            m for channel in self._channels.values() for m in (*channel.queue, *channel.waiting.values()) if not m.done
        ]

    def involving(self, peer: int) -> list[Message]:
        """Return the sends to `peer` that are in the state, failed ones included."""
        channel = self._channels.get(peer)
        return [] if channel is None else [*channel.queue, *channel.waiting.values()]

    def take_back(self, message: Message) -> bool:
        """Prevent the delivery of a send that raises. True: the receiver has begun to take the message.

        Then its outcome is not known yet; ask again. A send that turns out to be delivered, or refused, is
        done after this. May be repeated.
        """
        channel = self._channels.get(message.peer)
        if channel is None or channel.waiting.get(message.number) is not message:
            return message.heir_of is not None  # else it is not written, and the receiver never delivers it
        peer_regions, number = self._peer_regions, message.number
        mark = (
            peer_regions.channel_base[message.peer] + (number - 1) % NUM_CHANNEL_SLOTS * CHANNEL_SLOT_WORDS + TAKEN_BACK
        )
        peer_regions.exports.publish(peer_regions, mark, number)  # with a fence
        return self._outcome(message.peer, channel, message) == CLAIMED

    def cancel(self, message: Message) -> None:
        """Take a failed send out of the state, and abort it at the receiver.

        One that is partly written stays at the head: `_push` ends it with a CANCELLED fragment as soon as there is a
        slot. One that is delivered all the same, or may be, is kept for its repetition.
        """
        channel = self._channels.get(message.peer)
        if channel is None:
            return
        if message in channel.queue:
            if message.number:
                self._push(message.peer, channel)
            else:
                channel.queue.remove(message)
                return
        if self.take_back(message) or message.verdict == MATCHED:
            self.keep(message)

    def keep(self, message: Message) -> None:
        """Note a send whose call raises although it is delivered, or may be: the next one of its tag continues it."""
        channel = self._channels.get(message.peer)
        if channel is None or message.number < channel.first or message in channel.open:
            return
        if message.error is None:
            message.verdict = MATCHED
        message.digest = message.fingerprint()
        channel.open.append(message)

    def is_open(self, message: Message) -> bool:
        """Return whether the next send of the tag continues this one."""
        channel = self._channels.get(message.peer)
        return channel is not None and message in channel.open

    def renew(self, peer: int, first: int) -> None:
        """Begin the channel at number `first`: another process has taken the rank of `peer`."""
        self._channels[peer] = SendChannel(first)

    def close(self) -> None:
        """Forget everything."""
        self._channels.clear()

    def step(self, message: Message) -> Block | None:
        """Advance a send; None when it is done, else the condition it waits for."""
        peer = message.peer
        channel = self._channels[peer]
        if channel.queue:
            self._push(peer, channel)
        if channel.waiting.get(message.number) is message:
            return self._verdict(peer, channel, message)
        if message.done:
            return None
        old = channel.queue[0].heir_of
        if old is not None:
            return Block(peer, self._verdict_index(old.number), old.number << 2 | DECLINED)
        if channel.waiting and channel.next_message - min(channel.waiting) >= NUM_VERDICTS:
            self._collect(peer, channel)
            oldest = min(channel.waiting, default=0)
            if oldest:
                return Block(peer, self._verdict_index(oldest), oldest << 2 | DECLINED)
        return Block(peer, self._verdicts, channel.freed_seen + 1)

    # ---- verdicts

    def _verdict_index(self, number: int) -> int:
        return self._verdicts + 8 + number % NUM_VERDICTS * VERDICT_WORDS

    def _verdict(self, peer: int, channel: SendChannel, message: Message) -> Block | None:
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
        channel.waiting.pop(number, None)
        return None

    def _outcome(self, peer: int, channel: SendChannel, message: Message) -> int:
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
        if verdict & 3 in (MATCHED, REFUSED) and self._verdict(peer, channel, message) is not None:
            return CLAIMED  # it is on its way from another host
        return verdict & 3

    def _words_behind(self, peer: int, indices: tuple[int, int], number: int) -> Mapping[int, int] | memoryview | None:
        """Return words of a rank as they are behind this rank's mark on a message; None: its host has not answered."""
        exports = self._peer_regions.exports
        if exports.is_here(peer):
            return self._peer_regions.words[peer]
        found: Mapping[int, int] | None = exports.looks.at(peer, indices, ("message", peer, number))
        return found

    def _forget(self, peer: int, channel: SendChannel) -> None:
        """Drop the oldest messages that were aborted and that the receiver has passed."""
        for message in list(channel.waiting.values()):
            if not message.done or self._verdict(peer, channel, message) is not None:
                return

    def _is_inherited(self, peer: int, channel: SendChannel, message: Message, old: Message) -> bool:
        """Return whether the outcome of `old` is known, and let its successor end or begin accordingly."""
        outcome = self._outcome(peer, channel, old)
        if outcome == CLAIMED:
            return False
        self.book(self._inherited, (channel, message, old, outcome == MATCHED))
        return True

    def _inherited(self, channel: SendChannel, message: Message, old: Message, is_delivered: bool) -> None:
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
        if old in channel.open:
            channel.open.remove(old)

    def _refused(self, message: Message, peer: int, expected: int) -> MismatchError:
        return mismatch(message, self._peer_regions, peer, message.signature, expected)

    def _collect(self, peer: int, channel: SendChannel) -> None:
        """Take all verdicts that have arrived: numbers may be used again only then."""
        for message in list(channel.waiting.values()):
            self._verdict(peer, channel, message)
        self._push(peer, channel)

    # ---- fragments

    def _send_whole(self, message: Message, channel: SendChannel) -> bool:
        """Send a message that fits one slot on an idle channel, the usual case, in one go. False: not that case."""
        channel.freed_seen = freed = max(self._peer_regions.words[message.peer][self._verdicts], channel.first - 1)
        nbytes = message.nbytes
        if nbytes > CHANNEL_SLOT_BYTES or not 0 <= channel.next_slot - 1 - freed < NUM_CHANNEL_SLOTS:
            return False
        self._write(message.peer, channel, message, nbytes, 1, DATA)
        return True

    def _push(self, peer: int, channel: SendChannel) -> None:
        """Write as many fragments of the queued messages as there are free slots."""
        while channel.queue:
            message = channel.queue[0]
            if message.heir_of is not None and not self._is_inherited(peer, channel, message, message.heir_of):
                return
            if not message.number and channel.waiting and channel.next_message - min(channel.waiting) >= NUM_VERDICTS:
                return
            while not message.written:
                if not self._push_fragment(peer, channel, message):
                    return
            channel.queue.popleft()

    def _push_fragment(self, peer: int, channel: SendChannel, message: Message) -> bool:
        """Write the next fragment; False when there is no free slot."""
        channel.freed_seen = freed = max(self._peer_regions.words[peer][self._verdicts], channel.first - 1)
        if freed >= channel.next_slot:
            raise ProtocolError(f"rank {peer} freed slot {freed}, only {channel.next_slot - 1} were sent")
        slots = min(
            NUM_CHANNEL_SLOTS - (channel.next_slot - 1 - freed),
            MAX_FRAGMENT_SLOTS,
            NUM_CHANNEL_SLOTS - (channel.next_slot - 1) % NUM_CHANNEL_SLOTS,
        )
        if slots <= 0:
            return False
        if message.error is not None:
            self._write(peer, channel, message, 0, 1, CANCELLED)
        else:
            nbytes = min(message.nbytes - message.bytes_done, slots * CHANNEL_SLOT_BYTES)
            self._write(peer, channel, message, nbytes, max(1, -(-nbytes // CHANNEL_SLOT_BYTES)), DATA)
        return True

    def _write(self, peer: int, channel: SendChannel, message: Message, nbytes: int, used: int, kind: int) -> None:
        peer_regions = self._peer_regions
        slot = (channel.next_slot - 1) % NUM_CHANNEL_SLOTS
        number = message.number or channel.next_message
        done, total = message.bytes_done, message.nbytes
        if nbytes == total:
            array = message.array
            place = (
                peer_regions.channel_data[peer] + slot * CHANNEL_SLOT_BYTES
            ) // array.itemsize  # slots suit every dtype
            peer_regions.views[array.dtype][peer_regions.rank][place : place + len(array)] = array
        elif nbytes:
            offset = peer_regions.channel_data[peer] + slot * CHANNEL_SLOT_BYTES
            peer_regions.views[BYTE][peer_regions.rank][offset : offset + nbytes] = message.data[done : done + nbytes]
        index = peer_regions.channel_base[peer] + slot * CHANNEL_SLOT_WORDS
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
        fragment = _Fragment(number, done + nbytes, nbytes, kind, index, channel.next_slot, used)
        self.entry = (self._written, (peer, channel, message, fragment))
        self._written(peer, channel, message, fragment)
        self.entry = None

    def _written(self, peer: int, channel: SendChannel, message: Message, fragment: _Fragment) -> None:
        """Publish a fragment and book it."""
        peer_regions = self._peer_regions
        number, bytes_done, _, kind, first_word, slot_number, used = fragment
        message.number = number
        message.bytes_done = bytes_done
        if bytes_done == message.nbytes and kind == DATA:
            channel.waiting[number] = message
            message.written = True
        elif kind == CANCELLED:
            message.written = True
        channel.next_message = number + 1
        tag = peer_regions.epoch_bits | slot_number
        peer_regions.exports.publish_fragment(peer_regions, first_word, tag, peer, slot_number, fragment.nbytes)
        channel.next_slot = slot_number + used
        if peer_regions.words[peer][BELL]:
            ring(peer_regions, peer)


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
        self._channels: dict[int, RecvChannel] = {}
        self._posted: list[Message] = []
        self._base = peer_regions.channel_base[
            peer_regions.rank
        ]  # of the channel to this rank; the same in every outbox
        self._marks = self._base + TAKEN_BACK
        self._data = peer_regions.channel_data[peer_regions.rank]

    def post(self, message: Message) -> None:
        """Take a new receive: it gets the oldest match in private memory, else the channels are read."""
        self._posted.append(message)
        for peer in self.sources() if message.wanted == ANY else (message.wanted,):
            channel = self._channels.get(peer)
            if channel is not None and channel.unexpected and self._adopt(peer, channel, message):
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
        for channel in self._channels.values():
            incoming = channel.current
            if incoming is not None and incoming.message is message:
                self._to_private(message.peer, channel, incoming)
                if incoming not in channel.unexpected:
                    channel.unexpected.append(incoming)
            for incoming in channel.unexpected:
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
        channel = self._channels.get(message.peer)
        known = [incoming.number for incoming in channel.unexpected] if channel is not None else []
        if channel is None or message.number < channel.first or message.number in known:
            return
        incoming = IncomingMessage(message.number, message.user_tag, message.signature, message.nbytes)
        incoming.buffer = message.data.copy()
        incoming.bytes_seen = message.nbytes
        incoming.is_decided = incoming.is_answered = True
        channel.unexpected.insert(0, incoming)

    def lose(self, peer: int) -> None:
        """Forget the messages of a rank that is excluded."""
        self._channels.pop(peer, None)

    def renew(self, peer: int, first: int) -> None:
        """Begin the channel at number `first`: another process has taken the rank of `peer`."""
        self._channels[peer] = RecvChannel(first)
        self._peer_regions.own[self._peer_regions.verdict_base[peer]] = first - 1

    def close(self) -> None:
        """Forget everything."""
        self._channels.clear()
        self._posted.clear()

    def step(self, message: Message) -> Block | None:
        """Advance a receive.

        None when it is done, else the condition it waits for: a slot, or (any source) the BELL word.
        """
        wanted = message.wanted
        if wanted != ANY:
            channel = self._channels.get(wanted)
            if channel is None:
                channel = self._channels[wanted] = RecvChannel(self._first)
            index = self._pull(wanted, channel)
            return None if message.done else Block(wanted, index, self._peer_regions.epoch_bits | channel.next_slot)
        self._peer_regions.own[BELL] = 1  # before the read, so that a sender either is seen here or sees it
        for peer in self._peer_regions.peers if not self._out else self.sources():
            self._pull(peer, self._channels.setdefault(peer, RecvChannel(self._first)))
            if message.done:
                return None
        return Block(self._peer_regions.rank, BELL, 2)

    # ---- reading

    def _pull(self, peer: int, channel: RecvChannel) -> int:
        """Read the fragments that have arrived from `peer`; return the index of the word of the next one."""
        peer_regions = self._peer_regions
        words = peer_regions.words[peer]
        while True:
            number = channel.next_slot
            index = self._base + (number - 1) % NUM_CHANNEL_SLOTS * CHANNEL_SLOT_WORDS
            if words[index] != peer_regions.epoch_bits | number or (channel.current is None and not self._posted):
                return index
            head = _HEADER.unpack_from(words, 8 * (index + SLOT_MESSAGE))
            if channel.current is None:
                if self._take_whole(peer, channel, *head):
                    continue
                if not self._begin(peer, channel, FragmentHeader(*head)):
                    return index
            self._fragment(peer, channel, FragmentHeader(*head))

    def _take_whole(
        self,
        peer: int,
        channel: RecvChannel,
        number: int,
        user_tag: int,
        signature: int,
        total: int,
        nbytes: int,
        kind: int,
    ) -> bool:
        """Take a message of one fragment that the oldest receive matches, the usual case, in one go.

        False: not that case.
        """
        message = self._posted[0]
        slot = (channel.next_slot - 1) % NUM_CHANNEL_SLOTS
        if (
            message.number
            or message.wanted not in (peer, ANY)
            or user_tag != message.user_tag
            or signature != message.signature
            or number != channel.next_message
            or nbytes != total
            or total != message.nbytes
            or total > (NUM_CHANNEL_SLOTS - slot) * CHANNEL_SLOT_BYTES
            or kind != DATA
        ):
            return False
        args = (peer, channel, message, number, channel.next_slot, self._data + slot * CHANNEL_SLOT_BYTES)
        self.entry = (self._taken, args)  # `book` without its call
        self._taken(*args)
        self.entry = None
        return True

    def _taken(
        self, peer: int, channel: RecvChannel, message: Message, number: int, slot_number: int, offset: int
    ) -> None:
        array, total = message.array, message.nbytes
        if not message.done and (message.number == number or self._claim(peer, channel, number)):
            message.peer, message.number = peer, number  # from here on it is decided
            if total:
                place = offset // array.itemsize  # slots are aligned for every dtype
                array[:] = self._peer_regions.views[array.dtype][peer][place : place + len(array)]
            message.target.finish()
            self._answer(peer, message, number, MATCHED)
        channel.next_message = number + 1
        channel.next_slot = slot_number + (1 if total <= CHANNEL_SLOT_BYTES else -(-total // CHANNEL_SLOT_BYTES))
        self._free(peer, channel)

    def _begin(self, peer: int, channel: RecvChannel, head: FragmentHeader) -> bool:
        """Start a message: bind it to the oldest receive that matches it, else to private memory.

        False, and nothing read, when no receive of this source is posted: the message stays in its channel.
        """
        candidates = [m for m in self._posted if m.wanted in (peer, ANY) and not m.number]
        if not candidates:
            return False
        if head.number != channel.next_message:
            raise ProtocolError(
                f"rank {peer} sent message {head.number} where {channel.next_message} follows; is its memory damaged?"
            )
        incoming = IncomingMessage(head.number, head.user_tag, head.signature, head.total)
        incoming.discard = incoming.is_taken_back = self._is_taken_back(peer, head.number)
        message = next((m for m in candidates if m.user_tag == head.user_tag), None)
        fits = message is not None and message.signature == head.signature and message.nbytes == head.total
        if message is None:
            _check_total(peer, head)
        if not incoming.discard and (message is None or (fits and head.total > CHANNEL_BYTES)):
            incoming.buffer = np.empty(head.total, BYTE)
        self.book(self._begun, (peer, channel, message, incoming))
        return True

    def _begun(self, peer: int, channel: RecvChannel, message: Message | None, incoming: IncomingMessage) -> None:
        if incoming.is_taken_back:
            self._decline(peer, incoming.number)
        elif message is not None:
            self._bind(peer, channel, message, incoming)
        elif incoming not in channel.unexpected:
            channel.unexpected.append(incoming)
        channel.next_message = incoming.number + 1
        channel.current = incoming

    def _bind(self, peer: int, channel: RecvChannel, message: Message, incoming: IncomingMessage) -> None:
        """Give `incoming` to `message`, or refuse it at once when they differ."""
        if message.signature == incoming.signature and message.nbytes == incoming.total:
            message.peer, message.number = peer, incoming.number
            incoming.message = message
            return
        if not incoming.is_answered:
            incoming.discard = True
            incoming.buffer = None
            if not incoming.is_decided and not self._claim(peer, channel, incoming.number):
                return  # the receive waits for the next one
            incoming.is_decided = True
        message.peer, message.number = peer, incoming.number
        message.fail(mismatch(message, self._peer_regions, peer, message.signature, incoming.signature))
        self._answer(peer, message, 0 if incoming.is_answered else incoming.number, REFUSED)

    def _fragment(self, peer: int, channel: RecvChannel, head: FragmentHeader) -> None:
        incoming = channel.current
        assert incoming is not None, "`_begin` has set it"
        slot = (channel.next_slot - 1) % NUM_CHANNEL_SLOTS
        used = max(1, -(-head.nbytes // CHANNEL_SLOT_BYTES))
        seen = incoming.bytes_seen + head.nbytes
        if (
            head.number != incoming.number
            or head.kind not in (DATA, CANCELLED)
            or used > NUM_CHANNEL_SLOTS - slot
            or seen > incoming.total
            or (not head.nbytes and incoming.total and head.kind == DATA)
        ):
            raise ProtocolError(
                f"fragment of {head.nbytes} bytes of message {head.number} from rank {peer} does not fit "
                f"message {incoming.number} of {incoming.total} bytes; is its memory damaged?"
            )
        offset = self._data + slot * CHANNEL_SLOT_BYTES
        if incoming.buffer is not None:
            incoming.buffer[incoming.bytes_seen : seen] = self._peer_regions.views[BYTE][peer][
                offset : offset + head.nbytes
            ]
        place = (offset, head.nbytes)
        self.book(self._fragmented, (peer, channel, incoming, channel.next_slot + used, seen, place, head.kind))

    def _fragmented(
        self,
        peer: int,
        channel: RecvChannel,
        incoming: IncomingMessage,
        next_slot: int,
        bytes_seen: int,
        place: tuple[int, int],
        kind: int,
    ) -> None:
        channel.next_slot = next_slot
        incoming.bytes_seen = bytes_seen
        incoming.cancelled = kind == CANCELLED
        if incoming.complete and channel.current is incoming:
            if incoming.buffer is None and not incoming.discard and place not in incoming.fragments:
                incoming.fragments.append(place)
            self._delivered(peer, channel, incoming)
        elif incoming.buffer is not None or incoming.discard:
            self._free(peer, channel)
        elif place not in incoming.fragments:
            incoming.fragments.append(place)

    def _delivered(self, peer: int, channel: RecvChannel, incoming: IncomingMessage) -> None:
        """Commit the channel's current message, which is complete, to its receive, if it has one.

        Its slots are free then.
        """
        message = incoming.message
        is_open = message is not None and not message.done
        if (
            message is not None
            and is_open
            and (incoming.cancelled or not self._commit(peer, channel, message, incoming))
        ):
            message.number, message.peer = 0, message.wanted  # it waits for the next message
        if (incoming.cancelled or message is not None) and incoming in channel.unexpected:
            channel.unexpected.remove(incoming)
        channel.current = None
        self._free(peer, channel)

    def _adopt(self, peer: int, channel: RecvChannel, message: Message) -> bool:
        """Find the oldest message in private memory that a new receive matches; True: it has found one.

        A message that was aborted meanwhile is dropped: its sender can have only so many without a verdict.
        """
        for incoming in list(channel.unexpected):
            if incoming.message is not None:
                continue
            if incoming.user_tag == message.user_tag:
                self.book(self._adopted, (peer, channel, message, incoming))
                if message.done or message.number:
                    return True
            elif incoming.complete and not incoming.is_answered and self._is_taken_back(peer, incoming.number):
                self.book(self._dropped, (peer, channel, incoming))
        return False

    def _dropped(self, peer: int, channel: RecvChannel, incoming: IncomingMessage) -> None:
        self._decline(peer, incoming.number)
        if incoming in channel.unexpected:
            channel.unexpected.remove(incoming)

    def _adopted(self, peer: int, channel: RecvChannel, message: Message, incoming: IncomingMessage) -> None:
        """Give a new receive a message that waits in private memory, completely arrived or not."""
        self._bind(peer, channel, message, incoming)
        if message.error is not None and incoming.is_answered:
            return  # it does not fit; its sender has finished with it, so it waits for a receive that fits
        is_ready = incoming.complete and not incoming.discard and not message.done
        if is_ready and not self._commit(peer, channel, message, incoming):
            message.number, message.peer = 0, message.wanted
        if (incoming.complete or incoming.discard) and incoming in channel.unexpected:
            channel.unexpected.remove(incoming)

    # ---- claims

    def _is_taken_back(self, peer: int, number: int) -> bool:
        return (
            self._peer_regions.words[peer][self._marks + (number - 1) % NUM_CHANNEL_SLOTS * CHANNEL_SLOT_WORDS]
            == number
        )

    def _claim(self, peer: int, channel: RecvChannel, number: int) -> bool:
        """Publish that a message is being taken, and check then. False: its sender has aborted it before."""
        if channel.declined != number:  # else run again; the sender may be using its mark for a later message already
            peer_regions = self._peer_regions
            peer_regions.own[peer_regions.verdict_base[peer] + CLAIM] = number
            fence()
            if peer_regions.words[peer][self._marks + (number - 1) % NUM_CHANNEL_SLOTS * CHANNEL_SLOT_WORDS] != number:
                return True
            channel.declined = number
        self._decline(peer, number)
        return False

    def _decline(self, peer: int, number: int) -> None:
        index = self._peer_regions.verdict_base[peer] + 8 + number % NUM_VERDICTS * VERDICT_WORDS
        self._peer_regions.exports.publish(self._peer_regions, index, number << 2 | DECLINED)

    # ---- results

    def _commit(self, peer: int, channel: RecvChannel, message: Message, incoming: IncomingMessage) -> bool:
        """Write the results of a receive; False, and nothing written, when the sender has aborted its message."""
        if not incoming.is_decided and not self._claim(peer, channel, incoming.number):
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

    def _free(self, peer: int, channel: RecvChannel) -> None:
        """Publish that the slots read so far may be written again.

        The sender sleeps on that when the channel is full.
        """
        peer_regions = self._peer_regions
        freed = channel.next_slot - 1
        if freed - channel.woken > NUM_CHANNEL_SLOTS // 4:
            peer_regions.exports.publish(peer_regions, peer_regions.verdict_base[peer], freed)
            channel.woken = freed
        else:
            peer_regions.own[peer_regions.verdict_base[peer]] = freed
            peer_regions.exports.later(peer_regions.verdict_base[peer])

    def _to_private(self, peer: int, channel: RecvChannel, incoming: IncomingMessage) -> None:
        """Move the fragments of a message out of the channel: its receive was aborted."""
        if incoming.buffer is None:
            buffer = np.empty(incoming.total, BYTE)
            self._gather(peer, incoming, buffer)
            incoming.buffer = buffer
            incoming.fragments = []
            self._free(peer, channel)


def _check_total(peer: int, head: FragmentHeader) -> None:
    """Check that a message without a receive fits in memory: it goes to private memory of the size in its header."""
    call = unpack(head.signature)
    item_bytes = _ITEM_BYTES.get(head.signature >> 6 & 63, 0)
    if call.op != "point_to_point" or head.total != call.num_elements * item_bytes or head.total > memory_bytes():
        raise ProtocolError(
            f"rank {peer} announced a message of {head.total} bytes for {call}; a message has as many bytes as its "
            f"elements and fits the machine's memory of {memory_bytes()} bytes; is the sender's memory damaged?"
        )
