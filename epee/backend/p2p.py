"""Point-to-point messages: one lane per ordered pair of ranks, 256 slots of 64 KiB each.

The sender owns the lane (it lies in its outbox) and cuts a message into fragments of one to 16 neighbouring slots. Each
fragment has a header in the first of its slots: number of the message, user's tag, signature (dtype and count), sizes;
the slot's tag word comes last and carries the running number of the slot, so slots are read strictly in order.

The receiver answers in its own outbox: a count of the slots that it has freed, and per message a verdict (matched, or
refused because dtype or count differ, with what it expected). A send completes with its verdict, hence a mismatch is an
error on both sides and both live on. Like gloo's, a blocking send therefore returns when the receiver has posted the
matching receive: two ranks that both send first and receive afterwards need `isend` or `batch_isend_irecv`.

Order is per (source, tag): a receive takes the oldest message of its source that has its tag. Messages with other tags
that stand before it are moved to private memory. A message that fits its lane is copied out when it is complete,
straight from the slots; a longer one is collected in private memory first, so a receive that fails leaves the tensor
untouched. At most 256 messages of a pair wait for their verdict; further sends queue up at the sender.

A sender that dies in mid-message leaves a fragment without tag; what was complete before is still delivered.
"""

from __future__ import annotations

import numpy as np

from ..errors import MismatchError, ProtocolError
from .message import ANY, Incoming, Message, RecvLane, SendLane
from .operation import NO_ROOM, Block
from .outbox import (
    LANE_BYTES,
    LANE_SLOT_BYTES,
    LANE_SLOT_WORDS,
    NUM_LANE_SLOTS,
    NUM_VERDICTS,
    SLOT_BYTES,
    SLOT_KIND,
    SLOT_MESSAGE,
    SLOT_SIGNATURE,
    SLOT_TAG,
    SLOT_TOTAL_BYTES,
    SLOT_USER_TAG,
    VERDICT_WORDS,
    Outboxes,
)
from .signature import unpack
from .wake import publish_word

MAX_FRAGMENT_SLOTS = 16
DATA, CANCELLED = 0, 1
_BYTE = np.dtype(np.uint8)


class Mailroom:
    """All lanes of a rank. Every method runs under the engine's lock."""

    def __init__(self, box: Outboxes) -> None:
        self._box = box
        self._send: dict[int, SendLane] = {}
        self._recv: dict[int, RecvLane] = {}
        self._posted: list[Message] = []
        self.finished: list[Message] = []  # ended, and somebody listens; the engine takes them

    def post(self, message: Message) -> None:
        """Take a new message and move it as far as it goes."""
        if message.is_send:
            lane = self._send.get(message.peer)
            if lane is None:
                lane = self._send[message.peer] = SendLane()
            if not lane.queue and not lane.waiting and self._send_whole(message, lane):
                return
            lane.queue.append(message)
            self._push(message.peer, lane)
        else:
            self._posted.append(message)
            self._match_unexpected(message)

    def step(self, message: Message) -> Block | None:
        """Move `message`; None when it is done, else what it waits for."""
        if message.done:
            return None
        return self._step_send(message) if message.is_send else self._step_recv(message)

    def pending(self) -> list[Message]:
        """Return the messages that are not done."""
        out = [m for lane in self._send.values() for m in (*lane.queue, *lane.waiting.values()) if not m.done]
        return out + [m for m in self._posted if not m.done]

    def has_work(self) -> bool:
        """True while a message is not done."""
        return bool(self.pending())

    def close(self) -> None:
        """Forget everything; the engine has ended the messages."""
        self._send.clear()
        self._recv.clear()
        self._posted.clear()

    def cancel(self, message: Message) -> None:
        """Take a failed message out of the books, so that its lane goes on."""
        if not message.is_send:
            if message in self._posted:
                self._posted.remove(message)
            for lane in self._recv.values():
                incoming = lane.current
                if incoming is not None and incoming.message is message:
                    self._to_private(lane, incoming)
                    incoming.message = None
                    if incoming not in lane.unexpected:
                        lane.unexpected.append(incoming)
            return
        lane_out = self._send[message.peer]
        if message in lane_out.queue and not message.number:
            lane_out.queue.remove(message)
        # a message that is partly written stays at the head: `_push` ends it with a CANCELLED fragment. One that is
        # written and waits for its verdict stays deliverable.

    # ---- send

    def _send_whole(self, message: Message, lane: SendLane) -> bool:
        """The usual case in one go: one slot is enough and nothing is under way on the lane. False: not that case."""
        box, peer = self._box, message.peer
        lane.freed_seen = freed = box.words[peer][box.verdict_base[box.rank]]
        nbytes = len(message.data)
        if nbytes > LANE_SLOT_BYTES or not 0 <= lane.next_slot - 1 - freed < NUM_LANE_SLOTS:
            return False
        message.number = number = lane.next_message
        lane.next_message = number + 1
        lane.waiting[number] = message
        self._write(peer, lane, message, nbytes, 1, DATA)
        message.bytes_done = nbytes
        return True

    def _step_send(self, message: Message) -> Block | None:
        box, peer = self._box, message.peer
        lane = self._send[peer]
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
                return Block(peer, self._verdict_index(peer, oldest), oldest << 1)
        return Block(peer, box.verdict_base[box.rank], lane.freed_seen + 1)

    def _verdict_index(self, peer: int, number: int) -> int:
        return self._box.verdict_base[self._box.rank] + 8 + number % NUM_VERDICTS * VERDICT_WORDS

    def _verdict(self, peer: int, lane: SendLane, message: Message) -> Block | None:
        index = self._verdict_index(peer, message.number)
        words = self._box.words[peer]
        verdict = words[index]
        if verdict >> 1 != message.number:
            return Block(peer, index, message.number << 1)
        del lane.waiting[message.number]
        if verdict & 1:
            message.fail(self._mismatch(message, peer, message.signature, words[index + 1]))
        self._finish(message)
        return None

    def _finish(self, message: Message) -> None:
        message.done = True
        if message.on_done:
            self.finished.append(message)

    def _collect(self, peer: int, lane: SendLane) -> None:
        """Take all verdicts that have arrived: numbers may be used again only then."""
        for message in list(lane.waiting.values()):
            self._verdict(peer, lane, message)
        self._push(peer, lane)

    def _push(self, peer: int, lane: SendLane) -> None:
        """Write as many fragments of the queued messages as there are free slots."""
        box = self._box
        while lane.queue:
            message = lane.queue[0]
            if not message.number:
                if lane.waiting and lane.next_message - min(lane.waiting) >= NUM_VERDICTS:
                    return
                message.number = lane.next_message
                lane.next_message += 1
            freed = box.words[peer][box.verdict_base[box.rank]]
            if freed >= lane.next_slot:
                raise ProtocolError(f"rank {peer} freed slot {freed}, only {lane.next_slot - 1} were sent")
            lane.freed_seen = freed
            room = NUM_LANE_SLOTS - (lane.next_slot - 1 - freed)
            if message.error is not None:
                if not room:
                    return
                self._write(peer, lane, message, 0, 1, CANCELLED)
                lane.queue.popleft()
                continue
            total = len(message.data)
            while message.bytes_done < total or not total:
                slot = (lane.next_slot - 1) % NUM_LANE_SLOTS
                slots = min(room, MAX_FRAGMENT_SLOTS, NUM_LANE_SLOTS - slot)
                if slots <= 0:
                    return
                nbytes = min(total - message.bytes_done, slots * LANE_SLOT_BYTES)
                used = max(1, -(-nbytes // LANE_SLOT_BYTES))
                self._write(peer, lane, message, nbytes, used, DATA)
                room -= used
                message.bytes_done += nbytes
                if not total:
                    break
            lane.queue.popleft()
            lane.waiting[message.number] = message

    def _write(self, peer: int, lane: SendLane, message: Message, nbytes: int, used: int, kind: int) -> None:
        box = self._box
        number = lane.next_slot
        slot = (number - 1) % NUM_LANE_SLOTS
        if nbytes:
            offset = box.lane_data[peer] + slot * LANE_SLOT_BYTES
            done = message.bytes_done
            box.views(_BYTE)[box.rank][offset : offset + nbytes] = message.data[done : done + nbytes]
        index = box.lane_base[peer] + slot * LANE_SLOT_WORDS
        own = box.own
        own[index + SLOT_MESSAGE] = message.number
        own[index + SLOT_USER_TAG] = message.user_tag
        own[index + SLOT_SIGNATURE] = message.signature
        own[index + SLOT_TOTAL_BYTES] = len(message.data)
        own[index + SLOT_BYTES] = nbytes
        own[index + SLOT_KIND] = kind
        lane.next_slot = number + used
        publish_word(box, index + SLOT_TAG, box.epoch_bits | number)

    # ---- receive

    def _step_recv(self, message: Message) -> Block | None:
        if message.wanted != ANY:
            self._pull(message.wanted)
            if message.done:
                return None
            lane = self._recv[message.wanted]
            tag = self._box.epoch_bits | lane.next_slot
            return Block(message.wanted, self._slot_index(message.wanted, lane), tag)
        for peer in self._box.peers:
            self._pull(peer)
            if message.done:
                return None
        return NO_ROOM

    def _slot_index(self, peer: int, lane: RecvLane) -> int:
        return self._box.lane_base[self._box.rank] + (lane.next_slot - 1) % NUM_LANE_SLOTS * LANE_SLOT_WORDS

    def _pull(self, peer: int) -> None:
        """Read the fragments that have arrived from `peer`."""
        lane = self._recv.get(peer)
        if lane is None:
            lane = self._recv[peer] = RecvLane()
        box = self._box
        words = box.words[peer]
        base = box.lane_base[box.rank]
        while True:
            number = lane.next_slot
            index = base + (number - 1) % NUM_LANE_SLOTS * LANE_SLOT_WORDS
            if words[index] != box.epoch_bits | number:
                return
            incoming = lane.current
            if incoming is None and words[index + SLOT_BYTES] == words[index + SLOT_TOTAL_BYTES]:
                if not self._posted:
                    return
                if self._take_whole(peer, lane, index):
                    if not self._posted:
                        return
                    continue
            if incoming is None:
                incoming = lane.current = self._begin(peer, lane, index)
                if incoming is None:
                    return
            self._fragment(peer, lane, incoming, index)
            if incoming.complete:
                lane.current = None
                self._deliver(peer, lane, incoming)

    def _take_whole(self, peer: int, lane: RecvLane, index: int) -> bool:
        """The usual case in one go: a message of one fragment that the oldest receive wants. False: not that case."""
        message = self._posted[0]
        words = self._box.words[peer]
        total = words[index + SLOT_TOTAL_BYTES]
        slot = (lane.next_slot - 1) % NUM_LANE_SLOTS
        if (
            message.number
            or message.wanted not in (peer, ANY)
            or words[index + SLOT_USER_TAG] != message.user_tag
            or words[index + SLOT_SIGNATURE] != message.signature
            or total != len(message.data)
            or total > (NUM_LANE_SLOTS - slot) * LANE_SLOT_BYTES
            or words[index + SLOT_KIND] != DATA
        ):
            return False
        if total:
            offset = self._box.lane_data[self._box.rank] + slot * LANE_SLOT_BYTES
            message.data[:] = self._box.views(_BYTE)[peer][offset : offset + total]
        if message.target is not None:
            message.target.finish()
        message.peer = peer
        message.number = words[index + SLOT_MESSAGE]
        lane.next_slot += max(1, -(-total // LANE_SLOT_BYTES))
        self._free(peer, lane)
        self._posted.pop(0)
        self._answer(peer, message, message.number, refused=0)
        return True

    def _begin(self, peer: int, lane: RecvLane, index: int) -> Incoming | None:
        """Read the head of a message and bind it to the oldest receive that wants it.

        None, and nothing read, when no receive of this source is posted: the message stays in its lane.
        """
        words = self._box.words[peer]
        user_tag = words[index + SLOT_USER_TAG]
        candidates = [m for m in self._posted if m.wanted in (peer, ANY) and m.peer in (peer, ANY) and not m.number]
        if not candidates:
            return None
        incoming = Incoming(
            words[index + SLOT_MESSAGE], user_tag, words[index + SLOT_SIGNATURE], words[index + SLOT_TOTAL_BYTES]
        )
        for message in candidates:
            if message.user_tag == user_tag:
                self._bind(peer, message, incoming)
                break
        if incoming.discard:
            return incoming
        if incoming.message is None:
            self._check_total(peer, incoming)
            incoming.buffer = np.empty(incoming.total, _BYTE)
            lane.unexpected.append(incoming)
        elif incoming.total > LANE_BYTES:
            self._check_total(peer, incoming)
            incoming.buffer = np.empty(incoming.total, _BYTE)
        return incoming

    def _check_total(self, peer: int, incoming: Incoming) -> None:
        call = unpack(incoming.signature)
        if incoming.total > call.num_elements * 16:
            raise ProtocolError(f"rank {peer} announced {incoming.total} bytes for {call}; is its memory damaged?")

    def _bind(self, peer: int, message: Message, incoming: Incoming) -> None:
        """Give `incoming` to `message`, or refuse it at once when they differ."""
        message.peer = peer
        message.number = incoming.number
        if message.signature == incoming.signature and len(message.data) == incoming.total:
            incoming.message = message
            return
        incoming.discard = True
        incoming.buffer = None
        message.fail(self._mismatch(message, peer, message.signature, incoming.signature))
        self._answer(peer, message, incoming.number, refused=1)

    def _answer(self, peer: int, message: Message, number: int, refused: int) -> None:
        """Write the verdict that the sender waits for, and end the receive."""
        index = self._box.verdict_base[peer] + 8 + number % NUM_VERDICTS * VERDICT_WORDS
        self._box.own[index + 1] = message.signature
        publish_word(self._box, index, number << 1 | refused)
        if message in self._posted:
            self._posted.remove(message)
        self._finish(message)

    def _fragment(self, peer: int, lane: RecvLane, incoming: Incoming, index: int) -> None:
        box, words = self._box, self._box.words[peer]
        nbytes = words[index + SLOT_BYTES]
        used = max(1, -(-nbytes // LANE_SLOT_BYTES))
        slot = (lane.next_slot - 1) % NUM_LANE_SLOTS
        if words[index + SLOT_KIND] == CANCELLED:
            incoming.cancelled = True
        elif (
            words[index + SLOT_MESSAGE] != incoming.number
            or used > NUM_LANE_SLOTS - slot
            or incoming.bytes_seen + nbytes > incoming.total
        ):
            raise ProtocolError(
                f"fragment of {nbytes} bytes of message {words[index + SLOT_MESSAGE]} from rank {peer} does not fit "
                f"message {incoming.number} of {incoming.total} bytes"
            )
        offset = box.lane_data[box.rank] + slot * LANE_SLOT_BYTES
        lane.next_slot += used
        if incoming.buffer is not None:
            data = box.views(_BYTE)[peer][offset : offset + nbytes]
            incoming.buffer[incoming.bytes_seen : incoming.bytes_seen + nbytes] = data
            incoming.bytes_seen += nbytes
            self._free(peer, lane)
            return
        incoming.bytes_seen += nbytes
        if incoming.discard:
            self._free(peer, lane)
        else:
            incoming.fragments.append((offset, nbytes))

    def _free(self, peer: int, lane: RecvLane) -> None:
        """Say that the slots read so far may be written again; the sender sleeps on that when the lane is full."""
        box = self._box
        freed = lane.next_slot - 1
        if freed - lane.woken > NUM_LANE_SLOTS // 4:
            lane.woken = freed
            publish_word(box, box.verdict_base[peer], freed)
        else:
            box.own[box.verdict_base[peer]] = freed

    def _to_private(self, lane: RecvLane, incoming: Incoming) -> None:
        """Move what has arrived of a message out of the lane: its receive was given up."""
        if incoming.buffer is not None or incoming.message is None:
            return
        peer = incoming.message.peer
        data = self._box.views(_BYTE)[peer]
        incoming.buffer = np.empty(incoming.total, _BYTE)
        done = 0
        for offset, nbytes in incoming.fragments:
            incoming.buffer[done : done + nbytes] = data[offset : offset + nbytes]
            done += nbytes
        incoming.fragments = []
        self._free(peer, lane)

    def _deliver(self, peer: int, lane: RecvLane, incoming: Incoming) -> None:
        """The lane's current message is complete: commit it to its receive, if it has one; its slots are free then."""
        message = incoming.message
        if message is not None and not incoming.cancelled:
            self._commit(peer, message, incoming)
        elif incoming.cancelled and message is not None:  # the sender gave up: the receive waits for the next message
            message.number = 0
            message.peer = message.wanted
        if (incoming.cancelled or message is not None) and incoming in lane.unexpected:
            lane.unexpected.remove(incoming)
        self._free(peer, lane)
        if message is not None and not incoming.cancelled:
            self._answer(peer, message, incoming.number, refused=0)

    def _commit(self, peer: int, message: Message, incoming: Incoming) -> None:
        if incoming.buffer is not None:
            message.data[:] = incoming.buffer
        else:
            data = self._box.views(_BYTE)[peer]
            done = 0
            for offset, nbytes in incoming.fragments:
                message.data[done : done + nbytes] = data[offset : offset + nbytes]
                done += nbytes
        if message.target is not None:
            message.target.finish()

    def _match_unexpected(self, message: Message) -> None:
        """Bind a new receive to the oldest message in private memory that it wants, else look into the lanes."""
        sources = self._box.peers if message.wanted == ANY else (message.wanted,)
        for peer in sources:
            lane = self._recv.get(peer)
            if lane is None:
                continue
            for incoming in lane.unexpected:
                if incoming.user_tag == message.user_tag and incoming.message is None:
                    self._bind(peer, message, incoming)
                    if incoming.discard or incoming.complete:
                        lane.unexpected.remove(incoming)
                    if incoming.complete and not incoming.discard:
                        self._commit(peer, message, incoming)
                        self._answer(peer, message, incoming.number, refused=0)
                    return
        self._step_recv(message)

    def _mismatch(self, message: Message, peer: int, here: int, there: int) -> MismatchError:
        return MismatchError(
            f"{message.describe(self._box)}: rank {self._box.rank} has {_size(here)}, rank {peer} has {_size(there)}; "
            "the tensor is untouched and the lane works on; make sender and receiver agree"
        )


def _size(signature: int) -> str:
    call = unpack(signature)
    return f"{call.num_elements} elements of {call.dtype}"
