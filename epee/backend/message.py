"""Point-to-point messages and the state of their lanes; `p2p.py` moves them and explains the protocol."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np

from ..errors import context
from .outbox import Outboxes
from .tensors import Array, Target

ANY = -1
_BYTE = np.dtype(np.uint8)


class Message:
    """A send or a receive that somebody may wait for.

    Attributes:
        peer: the other rank; ANY for a receive from any source, until it is matched.
        number: running number of the message in its lane, from 1; 0 before it is known.
    """

    number = 0
    bytes_done = 0
    done = False
    error: BaseException | None = None
    on_done: Any = None
    patience = 0
    num_waiters = 0
    started = deadline = 0.0

    def __init__(
        self, is_send: bool, peer: int, user_tag: int, signature: int, data: Array, target: Target | None = None
    ) -> None:
        self.is_send = is_send
        self.peer = peer
        self.wanted = peer
        self.user_tag = user_tag
        self.signature = signature
        self.data = data.view(_BYTE)
        self.target = target

    @property
    def name(self) -> str:
        """The operation's name for messages."""
        return "send" if self.is_send else "recv"

    @property
    def seq(self) -> int:
        """The running number in the lane, 0 while unknown."""
        return self.number

    def fail(self, error: BaseException) -> None:
        """End it with `error`; the tensor stays untouched."""
        if not self.done:
            self.error = error
            self.done = True

    def start_clock(self) -> float:
        """Return the present time (the deadline was set when the message was posted)."""
        return time.monotonic()

    def depends_on(self, box: Outboxes) -> set[int]:
        """Return the ranks without which it cannot complete."""
        return {self.peer} if self.peer != ANY else set(box.peers)

    def describe(self, box: Outboxes, **facts: object) -> str:
        """Name the call and its place for a message."""
        other: object = "any" if self.wanted == ANY else self.wanted
        ends = {"dst_rank": other} if self.is_send else {"src_rank": other}
        return context(self.name, rank=box.rank, **ends, tag=self.user_tag, epoch=box.epoch, **facts)


class Incoming:
    """A message on its way in: bound to a receive, or waiting for one in private memory."""

    __slots__ = (
        "buffer",
        "bytes_seen",
        "cancelled",
        "discard",
        "fragments",
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
        self.fragments: list[tuple[int, int]] = []  # (offset in the source's outbox, bytes): still in the lane
        self.buffer: Array | None = None
        self.message: Message | None = None
        self.cancelled = False
        self.discard = False  # refused: the rest of it is swallowed

    @property
    def complete(self) -> bool:
        return self.cancelled or self.bytes_seen == self.total


class SendLane:
    """State of the lane to one peer."""

    __slots__ = ("freed_seen", "next_message", "next_slot", "queue", "waiting")

    def __init__(self) -> None:
        self.queue: deque[Message] = deque()  # not yet completely written, oldest first
        self.waiting: dict[int, Message] = {}  # written, without verdict
        self.next_message = 1
        self.next_slot = 1
        self.freed_seen = 0


class RecvLane:
    """State of the lane from one peer."""

    __slots__ = ("current", "next_slot", "unexpected", "woken")

    def __init__(self) -> None:
        self.next_slot = 1
        self.woken = 0  # slots freed when the sender was last woken
        self.current: Incoming | None = None
        self.unexpected: list[Incoming] = []
