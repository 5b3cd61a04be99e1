"""Point-to-point messages, the state of their channels and of both ends; `channel.py` explains the protocol."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...errors import EpeeError, MismatchError, PeerError, expected
from ..call import EngineCall
from ..outbox import PeerRegions
from ..signature import unpack
from ..tensors import Array, Target

ANY = -1
DATA, CANCELLED = 0, 1  # kinds of fragments
CLAIMED, DECLINED, MATCHED, REFUSED = range(4)  # outcomes of a message; a verdict is one of the last three
BYTE = np.dtype(np.uint8)
STAYS_OPEN = (
    "the receiver stands still in the midst of taking the message, which stays open: it may still be delivered; "
    "the next send to this rank with this tag continues it"
)


class Message(EngineCall):
    """A send or a receive that a thread may wait for.

    Attributes:
        peer: the other rank; ANY for a receive from any source, until it is matched.
        number: running number of the message in its channel, from 1; 0 before it is known.
        array: the elements, flat; `nbytes` is their size.
        written: a send of which every fragment is in the channel.
        verdict: of a send whose call has raised: the outcome of the message, as soon as it is known.
        digest: of a send that is open (`SendChannel.open`): distinguishes its repetition from another message.
        is_known: of a send that is open: its caller was notified that it has been delivered.
        heir_of: of a send that has not begun: the open one that it may be the repetition of.
    """

    number = 0
    bytes_done = 0
    written = False
    verdict: int | None = None
    digest = b""
    is_known = False
    heir_of: Message | None = None
    is_early = False  # made while other calls were open, which may have ended before it was posted

    def __init__(
        self, is_send: bool, peer: int, user_tag: int, signature: int, data: Array, target: Target | None = None
    ) -> None:
        self.is_send = is_send
        self.peer = peer
        self.wanted = peer
        self.user_tag = user_tag
        self.signature = signature
        self.array = data
        self.nbytes = data.nbytes
        self.target = target or _NOWHERE

    @property
    def data(self) -> Array:
        """The elements as bytes."""
        return self.array.view(BYTE)

    @property
    def name(self) -> str:
        """The operation's name for messages."""
        return "send" if self.is_send else "recv"

    @property
    def seq(self) -> int:
        """The running number in the channel, 0 while unknown."""
        return self.number

    def fingerprint(self) -> bytes:
        """Return a digest that only a message of the same dtype, size and bytes has."""
        content: Any = self.data
        return hashlib.blake2b(content, digest_size=16, salt=self.signature.to_bytes(16, "little")).digest()

    def _position(self, peer_regions: PeerRegions) -> dict[str, object]:
        end = "dst_rank" if self.is_send else "src_rank"
        other = "any" if self.wanted == ANY else self.wanted
        return {"rank": peer_regions.rank, end: other, "tag": self.user_tag, "epoch": peer_regions.epoch}

    def label(self) -> str:
        """Name the message for the error of another call."""
        if self.wanted == ANY:
            return "recv from any rank"
        return f"{'send to' if self.is_send else 'recv from'} rank {self.wanted}"


_NOWHERE = Target(np.empty(0, BYTE))  # a send has nothing to finish


def mismatch(message: Message, peer_regions: PeerRegions, peer: int, here: int, there: int) -> MismatchError:
    """Return the error for a message whose two ends differ in dtype or size."""
    sizes = [f"{call.num_elements} elements of {call.dtype}" for call in (unpack(here), unpack(there))]
    return MismatchError(
        f"{message.describe(peer_regions)}: rank {peer_regions.rank} has {sizes[0]}, rank {peer} has {sizes[1]}; "
        "the tensor is untouched and later messages work; make sender and receiver agree"
    )


class Absence(NamedTuple):
    """The reason why nothing is sent to a rank or delivered from it: a view has begun without it."""

    epoch: int
    cause: str
    error: type[PeerError]
    is_final: bool  # it cannot write any more


class Books:
    """The common state of both ends of a channel: entries that survive an interrupt, open and ended messages.

    Attributes:
        entry: a change of the state that was begun: a function that may be run again, and its arguments.
    """

    def __init__(self, peer_regions: PeerRegions, finished: list[Message], unfinished: dict[Message, None]) -> None:
        self._peer_regions = peer_regions
        self._ended = finished
        self._open = unfinished
        self.entry: tuple[Callable[..., None], tuple[Any, ...]] | None = None

    def book(self, step: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Make an entry, noted before it is begun."""
        self.entry = (step, args)
        step(*args)
        self.entry = None

    def settle(self) -> None:
        """Finish the entry that an interrupt broke off."""
        if self.entry is not None:
            step, args = self.entry
            try:
                step(*args)
            except expected(EpeeError):  # another exception interrupts this step as well, which is to be finished still
                self.entry = None
                raise
            self.entry = None


class IncomingMessage:
    """An incoming message: bound to a receive, or waiting for one in private memory."""

    __slots__ = (
        "buffer",
        "bytes_seen",
        "cancelled",
        "discard",
        "fragments",
        "is_answered",
        "is_decided",
        "is_taken_back",
        "message",
        "number",
        "signature",
        "total",
        "user_tag",
    )

    def __init__(self, number: int, user_tag: int, signature: int, total: int) -> None:
        self.number = number
        self.user_tag = user_tag
        self.signature = signature
        self.total = total
        self.bytes_seen = 0
        self.fragments: list[tuple[int, int]] = []  # (offset in the source's outbox, bytes): still in the channel
        self.buffer: Array | None = None
        self.message: Message | None = None
        self.cancelled = False
        self.discard = False  # refused, or aborted: the rest of it is swallowed
        self.is_taken_back = False  # found out before it was given to a receive
        self.is_decided = False  # claimed, and not aborted before that: it is delivered or refused
        self.is_answered = False  # it had been delivered to a receive whose call raised then

    @property
    def complete(self) -> bool:
        """Return whether the message is complete: nothing more of it is to come."""
        return self.cancelled or self.bytes_seen == self.total


class SendChannel:
    """State of the channel to one peer."""

    __slots__ = ("first", "freed_seen", "next_message", "next_slot", "open", "queue", "waiting")

    def __init__(self, first: int = 1) -> None:
        self.queue: deque[Message] = deque()  # not yet completely written, oldest first
        self.waiting: dict[int, Message] = {}  # written, without verdict; aborted ones are done
        self.open: list[Message] = []  # their calls have raised, and they were delivered, or may be
        self.first = first  # number of the first message and of the first slot (see `channel.py`)
        self.next_message = first
        self.next_slot = first
        self.freed_seen = first - 1


class RecvChannel:
    """State of the channel from one peer."""

    __slots__ = ("current", "declined", "first", "next_message", "next_slot", "unexpected", "woken")

    def __init__(self, first: int = 1) -> None:
        self.first = first
        self.next_message = first
        self.next_slot = first
        self.woken = first - 1  # slots freed when the sender was last woken
        self.declined = 0  # the message that was last found to be aborted after its claim
        self.current: IncomingMessage | None = None
        self.unexpected: list[IncomingMessage] = []
