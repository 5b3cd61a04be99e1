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

When a process takes the place of a lost one, the lanes of its pairs begin anew in the same memory, at numbers above
all that were used before (`first_number`), so nothing that the old process or its partners left can be mistaken.

A sender that dies in mid-message leaves a fragment without tag; what was complete before is still delivered.

An exception from a signal handler can come between any two lines. Every change of the books is therefore one entry: a
function that may be run twice, noted before it runs; `settle` runs again what was noted and not finished.

`Mailroom` is the front, `sending.py` and `receiving.py` the two ends of a lane, `message.py` their state.
"""

from __future__ import annotations

from .message import Message
from .operation import Block
from .outbox import Outboxes
from .receiving import Receiver
from .sending import Sender


def first_number(epoch: int) -> int:
    """Return the first number of the lanes of a process that joined in `epoch`; founders begin at 1."""
    return (epoch << 41) + 1  # above the bits of (epoch of the birth, number) in a tag


class Mailroom:
    """All lanes of a rank. Every method runs under the engine's lock.

    Attributes:
        finished: messages that have ended while somebody listens; the engine takes them.
        ends: the receiving and the sending end, indexed by `Message.is_send`. Both have `post` (take a new message and
            move it as far as it goes) and `step` (move one that is not done).
    """

    def __init__(self, box: Outboxes, first: int = 1) -> None:
        self.finished: list[Message] = []
        self._sender = Sender(box, self.finished, first)
        self._receiver = Receiver(box, self.finished, first)
        self.ends = (self._receiver, self._sender)

    def step(self, message: Message) -> Block | None:
        """Move `message`; None when it is done, else what it waits for."""
        return None if message.done else self.ends[message.is_send].step(message)

    def pending(self) -> list[Message]:
        """Return the messages that are not done."""
        return self._sender.pending() + self._receiver.pending()

    def cancel(self, message: Message) -> None:
        """Take a failed message out of the books, so that its lane goes on."""
        self._sender.entry = self._receiver.entry = None  # what was begun for it has failed
        if message.is_send:
            self._sender.cancel(message)
        else:
            self._receiver.cancel(message)

    def renew(self, peer: int, first: int) -> None:
        """Another process has taken the place of `peer`; what was under way with the old one must have been ended."""
        self._sender.renew(peer, first)
        self._receiver.renew(peer, first)

    def settle(self) -> None:
        """After an interrupt: finish the entry that was being made in the books."""
        self._sender.settle()
        self._receiver.settle()

    def close(self) -> None:
        """Forget everything; the engine has ended the messages."""
        self._sender.close()
        self._receiver.close()
