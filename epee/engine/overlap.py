"""Calls that depend on each other through memory: each behaves as if the calls before it had run first.

NCCL gives that by its stream. Here a call reads its input when it is published (a message: when it is posted), on the
thread that issues it, and earlier calls may still have to write there. So a call notes at issue which earlier calls of
its group are in its way (`before`), and begins when none of them is open:

    it reads what an earlier call writes         until that one has ended; if it has failed, so does this call,
                                                 because its input would be undefined
    it writes what an earlier call writes        until that one has ended
    it writes what an earlier message reads      until that one is in its channel
    a receive writes what a collective reads     until that one has ended: large calls read round by round, and a call
                                                 reads its input again when it is made again after a change of the view
    a message of the same channel and tag as one that is held back    until that one is posted

A collective that writes what an earlier collective reads need not be held back: results are written in the order of the
queue. Only open calls are compared, so a program whose calls block never compares anything. A waiting call is
planned again when it begins, because a plan may hold copies of its input (strided tensors, coalesced calls). So is a
call that was planned, before it had the lock, while another one ended.

A collective that is held back stands in the queue without a header; those behind it follow in order, as ever. A message
that is held back is in `Mailroom.held`, in neither end's state. A thread that drives a call first drives the calls in
its way (`foremost`), and examines failures there: so calls that wait for each other, across ranks, end by the timeout
of the first of them.

Memory is compared by elements where views are strided (`ranges.py`). Messages of one `batch_isend_irecv` are not
ordered against each other. Everything runs under the engine's lock. Only this process's own state is read and written
here. The error of a call names the calls that hold it back, or held it back, and a timeout also names the calls that it
holds back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..torch_private import works_of_batch
from .call import Edge, names_of
from .operation import CallsOfWork, Driven, Operation
from .outbox import PeerRegions, consumed_of
from .p2p.channel import Mailroom
from .p2p.message import ANY, Message
from .ranges import Spans, Written, meet, spans_of
from .tensors import carrier_of, source

Touched = tuple[Spans, Spans]  # memory that a call writes and memory that it reads


def _has_ended(call: Driven) -> bool:
    return call.done


def _is_in_group(message: Message) -> bool:
    return message.done or message.written


def _is_posted(message: Message) -> bool:
    return message.done or not message.before


def touched(call: Driven) -> Touched:
    """Return the memory that a call writes and reads.

    Measured once, so that a tensor may get other memory afterwards.
    """
    found: Touched | None = call.touched
    if found is None:
        writes, reads = call.tensors
        written = spans_of(writes)
        call.touched = found = (written, written if reads is writes else spans_of(reads))
    return found


class CallOrder:
    """The order of one group's open calls by the memory that they touch. The engine's lock is held.

    Args:
        peer_regions: of all ranks.
        queue: the group's open collectives.
        mail: its messages.
    """

    def __init__(self, peer_regions: PeerRegions, queue: deque[Operation], mail: Mailroom) -> None:
        self._peer_regions, self._queue, self._mail = peer_regions, queue, mail
        self._written = Written()  # what collectives of the queue write

    @property
    def _num_retired(self) -> int:
        """Calls up to this number have ended on this rank."""
        return consumed_of(self._peer_regions.own)

    def progress(self) -> tuple[int, list[Message]]:
        """Note the progress of the calls, without the lock, for `has_advanced`."""
        return self._num_retired, list(self._mail.unfinished)

    def has_advanced(self, seen: tuple[int, list[Message]]) -> bool:
        """Return whether a call has ended since `seen`: a plan made in between may hold copies from before that."""
        retired, messages = seen
        return self._num_retired != retired or any(message.done for message in messages)

    def add(self, op: Operation) -> None:
        """Note which open calls are in the way of a new collective."""
        writes, reads = touched(op)
        edges = []
        retired = self._num_retired
        for earlier in self._queue if self._may_meet(writes, reads, retired) else ():
            written, _ = touched(earlier)
            is_read = meet(written, reads)
            if is_read or meet(written, writes):
                edges.append(Edge(earlier, _has_ended, is_read))
        for message in self._open_messages():
            written, read = touched(message)
            is_read = meet(written, reads)
            if is_read or meet(written, writes):
                edges.append(Edge(message, _has_ended, is_read))
            elif meet(read, writes) and not message.written:
                edges.append(Edge(message, _is_in_group, False))
        self._written.add(writes, op.seq, retired)
        op.before = edges

    def _may_meet(self, writes: Spans, reads: Spans, retired: int) -> bool:
        """Return False when no collective of the queue writes there."""
        if not self._queue:
            return False
        if self._queue[0].touched is None:  # a call of another thread that blocks: its memory was not noted
            return True
        index = self._written
        return index.may_meet(writes, retired) or (reads is not writes and index.may_meet(reads, retired))

    def add_message(self, message: Message) -> None:
        """Note which open calls are in the way of a new message."""
        if not self._queue and not self._open_messages():
            if message.is_early:
                read_again(message)
            return
        writes, reads = touched(message)
        edges = []
        for op in self._queue:
            written, read = touched(op)
            is_read = meet(written, reads)
            if is_read or meet(written, writes) or meet(read, writes):
                edges.append(Edge(op, _has_ended, is_read))
        mates: Sequence[Driven] | None = None  # computed when a call is in the way
        for earlier in self._open_messages():
            if earlier.before and _share_turns(earlier, message):
                edges.append(Edge(earlier, _is_posted, False))
            if earlier.is_send and message.is_send:
                continue  # both read
            written, read = touched(earlier)
            is_read = meet(written, reads)
            is_written = is_read or meet(written, writes)
            if is_written or (meet(read, writes) and not earlier.written):
                mates = batch_mates() if mates is None else mates
                if not any(mate is earlier for mate in mates):
                    edges.append(Edge(earlier, _has_ended if is_written else _is_in_group, is_read))
        message.before = edges
        if message.is_early and not edges:
            read_again(message)

    def _open_messages(self) -> list[Message]:
        messages = self._mail.unfinished
        if not messages:
            return []
        found = list(messages)
        for message in found:
            if message.done:  # one that has failed
                messages.pop(message, None)
        return [message for message in found if not message.done]

    # ---- continuing

    def foremost(self, op: Driven) -> Driven:
        """Return the call to step so that `op` advances: itself, the head of its queue, or one in the way of that."""
        while True:
            if not isinstance(op, Message) and not self._queue[0].done:
                op = self._queue[0]
            if not op.before:
                return op
            edge = next((edge for edge in op.before if not edge.is_over(edge.call)), None)
            if edge is None:
                return op
            op = edge.call

    def held_by(self, call: Driven) -> str:
        """Return the names of the open calls that wait for `call`; "" where none does."""
        calls: list[Driven] = [*self._queue, *self._mail.held]
        return names_of([other for other in calls if any(edge.call is call for edge in other.before)])


def read_again(message: Message) -> None:
    """Read the input of a message that is posted now: an earlier call may have written it since it was made."""
    if message.is_send:
        tensor = message.tensors[1]
        message.array = source(tensor, carrier_of(tensor, "send: tensor"))


def _share_turns(earlier: Message, later: Message) -> bool:
    """Return whether the two could be taken for each other, so that their order counts."""
    return (
        earlier.is_send == later.is_send
        and earlier.user_tag == later.user_tag
        and (earlier.wanted == later.wanted or ANY in (earlier.wanted, later.wanted))
    )


def batch_mates() -> Sequence[Driven]:
    """Return the calls that the `batch_isend_irecv` which is on the stack, if one is, has made so far."""
    return [op for work in works_of_batch() if isinstance(work, CallsOfWork) for op in work.ops]
