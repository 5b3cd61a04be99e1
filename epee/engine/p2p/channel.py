"""Point-to-point messages: one channel per ordered pair of ranks, 256 slots of 64 KiB each.

The sender owns the channel (it lies in its outbox) and cuts a message into fragments of one to 16 neighbouring slots.
Each fragment has a header in the first of its slots: number of the message, user's tag, signature (dtype and count),
sizes; the slot's tag word comes last and carries the running number of the slot, so slots are read strictly in order.

The receiver answers in its own outbox: a count of the slots that it has freed, and per message a verdict (matched, or
refused because dtype or count differ, with the expected values). A send completes with its verdict, hence a mismatch is
an error on both sides and both continue. As in gloo, a blocking send therefore returns when the receiver has posted the
matching receive: two ranks that both send first and receive afterwards need `isend` or `batch_isend_irecv`.

Order is per (source, tag): a receive takes the oldest message of its source that has its tag. Messages with other tags
before it are moved to private memory. A message that fits its channel is copied out when it is complete, straight from
the slots; a longer one is collected in private memory first, so a receive that fails leaves the tensor untouched. At
most 256 messages of a pair wait for their verdict; further sends queue up at the sender.

When a process takes the rank of a lost one, the channels of its pairs begin anew in the same memory, at numbers above
all that were used before (`first_number`), so leftovers of the old process or its partners cannot be mistaken for new.

A send that raises was not delivered, and one that is delivered does not raise. A sender that aborts a message which is
written stores its number in TAKEN_BACK, and then reads the receiver's claim and, after that, verdict; a receiver that
takes a message stores its number in CLAIM, and then reads TAKEN_BACK. Each has a fence between, so one sees the other:

    neither            the receiver will find the mark, whenever it comes: it stores DECLINED and continues with the
    next a claim only       it may have read before the mark was there. The sender waits for the verdict, for GRACE_S at
                       most (`engine/waiting.py`), else the message stays open, and the error says so
    MATCHED, REFUSED   it was too late: the send ends with that

The next send of the tag continues an open message: it is sent only if the receiver has not delivered that. A receive
that fails after its claim stores 0 there: it does not deliver, and a later receive of the message checks again. An
exception from a signal handler is raised in any case, so there a message that is delivered is open as well, and a
received message is kept for the next receive. `tests/backend/test_p2p_model.py` goes through all orders of these steps.

A sender that dies inside a message leaves a fragment without tag. A view that begins without a rank ends its channels:
messages that it has sent and no receive has taken are never delivered, even if it still writes (`Mailroom.lose`).

An exception from a signal handler can come between any two lines. Every change of the state is therefore one entry: a
function that may be run twice, noted before it runs; `settle` runs again the entry that was noted and not finished.

`Mailroom` is the front, `ends.py` has the two ends of a channel, `message.py` their state.
"""

from __future__ import annotations

from ...errors import PeerError
from ..operation import Block
from ..outbox import PeerRegions
from .ends import Receiver, Sender
from .message import ANY, MATCHED, STAYS_OPEN, Absence, Message


def first_number(epoch: int) -> int:
    """Return the first number of the channels of a process that joined in `epoch`; initial members begin at 1."""
    return (epoch << 41) + 1  # above the bits of (epoch of the creation, number) in a tag


class Mailroom:
    """All channels of a rank. Every method runs under the engine's lock.

    Attributes:
        finished: messages that have ended and have a listener; the engine takes them.
        unfinished: messages that the engine has noted as open; one that ends is taken out, so that its tensors are
            released. Some that have failed stay until the engine checks.
        held: messages that are not posted yet, because earlier calls are in their way (`overlap.py`), oldest first.
        ends: the receiving and the sending end, indexed by `Message.is_send`. Both have `post` (take a new message and
            move it as far as it goes) and `step` (move one that is not done).
        out: the ranks that are not in the newest view, and why.
    """

    def __init__(self, peer_regions: PeerRegions, first: int = 1) -> None:
        self._peer_regions = peer_regions
        self.finished: list[Message] = []
        self.held: list[Message] = []
        self.unfinished: dict[Message, None] = {}  # in the order of issue
        books = self.finished, self.unfinished
        self._sender = Sender(peer_regions, books, first)
        self.out: dict[int, Absence] = {}
        self._receiver = Receiver(peer_regions, books, first, self.out)
        self.ends = (self._receiver, self._sender)

    def step(self, message: Message) -> Block | None:
        """Advance `message`; None when it is done, else the condition it waits for."""
        return None if message.done else self.ends[message.is_send].step(message)

    def pending(self) -> list[Message]:
        """Return the messages that are not done."""
        held = [message for message in self.held if not message.done]
        return self._sender.pending() + self._receiver.pending() + held

    def let_go(self, message: Message) -> None:
        """Post a message that was held back. After an interrupt inside it `settle` finds its progress."""
        if not message.done:
            self.ends[message.is_send].post(message)
        message.let_begin()
        self.held.remove(message)

    def involving(self, peer: int) -> list[Message]:
        """Return the messages to and from `peer` that are in the state, failed ones included."""
        held = [message for message in self.held if message.wanted == peer]
        return self._sender.involving(peer) + self._receiver.involving(peer) + held

    def awaited(self, message: Message) -> set[int]:
        """Return the ranks without which a message cannot complete."""
        return {message.peer} if message.peer != ANY else set(self._receiver.sources())

    def absence(self, message: Message) -> PeerError | None:
        """Return the error of a message that cannot complete because of a rank that is not in the view.

        None: it can.
        """
        is_any = message.wanted == ANY
        if self._receiver.sources() if is_any else message.wanted not in self.out:
            return None
        names = sorted(self.out) if is_any else [message.wanted]
        last = max((self.out[name] for name in names), key=lambda absence: absence.epoch)
        told = message.describe(self._peer_regions, peer=", ".join(map(str, names)))
        return last.error(
            f"{told}: {last.cause}; not in the view since epoch {last.epoch}: nothing of it is delivered any more",
            names,
            message.name,
            message.seq,
            last.epoch,
            last.cause,
        )

    def lose(self, rank: int, absence: Absence, is_told: bool) -> None:
        """Fail the messages that a view without `rank` ends; may be repeated.

        A receive from any source goes on without it; if the loss is to be reported (`is_told`) it fails as well.
        """
        self.out[rank] = absence
        for message in self.pending():
            error = self.absence(message)
            if error is None and message.wanted == ANY and is_told:
                told = message.describe(self._peer_regions, peer=rank)
                text = f"{told}: {absence.cause}; the receive is cancelled; post it again for the other ranks"
                error = absence.error(text, [rank], message.name, message.seq, absence.epoch, absence.cause)
            if error is not None:
                message.fail(error)
                self.cancel(message)
            elif message.wanted == ANY and message.peer == rank:
                message.number, message.peer = 0, ANY  # it had begun to take a message of this rank
        self._receiver.lose(rank)

    def take_back(self, message: Message) -> bool:
        """Prevent the delivery of a message that is about to fail. True: not known yet, the other end is taking it.

        It may turn out to be done.
        """
        return message.is_send and self._sender.take_back(message)

    def break_off(self, message: Message, exc: BaseException) -> None:
        """End a message whose call `exc` leaves: no thread can wait for it again. May be repeated."""
        if message.done and message.error is None:
            if message.is_send:
                self._sender.keep(message)
            else:
                self._receiver.put_back(message)
        else:
            message.fail(exc)
            self.cancel(message)
        message.is_known = message.verdict == MATCHED

    def state_of(self, message: Message) -> str:
        """Return the note for a caller that gets an exception from the call of a message.

        "" when it is as if never made.
        """
        if not message.is_send or not self._sender.is_open(message):
            return ""
        if message.is_known:
            return "the message has been delivered; the same send again completes at once"
        return STAYS_OPEN

    def cancel(self, message: Message) -> None:
        """Take a failed message out of the state, so that its channel continues."""
        self._sender.entry = self._receiver.entry = None  # what was begun for it has failed
        if message in self.held:
            self.held.remove(message)
        if message.is_send:
            self._sender.cancel(message)
        else:
            self._receiver.cancel(message)

    def renew(self, peer: int, first: int) -> None:
        """Begin the channels of `peer` anew for another process; messages with the old one must have been ended."""
        self.out.pop(peer, None)
        self._sender.renew(peer, first)
        self._receiver.renew(peer, first)

    def settle(self) -> None:
        """After an interrupt: finish the entry that was being made."""
        self._sender.settle()
        self._receiver.settle()
        for message in list(self.held):
            is_posted = message in self.ends[message.is_send].pending()
            if message.number or message.done or (is_posted and message.is_send):
                message.let_begin()
                self.held.remove(message)
            elif is_posted:  # it may not have checked the messages that have arrived: it is posted again
                self._receiver.cancel(message)

    def close(self) -> None:
        """Forget everything; the engine has ended the messages."""
        self.held.clear()
        self._sender.close()
        self._receiver.close()
