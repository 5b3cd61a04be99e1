"""The engine of a group as those modules see it that it calls itself, and that therefore cannot import it.

`overlap`, `stall`, `progress` and `interrupts` in `engine/` each do one part of the engine's work on its state.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from ..view.process.detector import DeathWatch
from .engine.operation import Block, Driven, Operation
from .membership.epochs import Survival
from .membership.sizes import Mask
from .membership.unsettled import UnsettledCalls
from .outbox import Outboxes
from .p2p.channel import Mailroom
from .p2p.message import Message
from .ranges import Written


class EngineFace(Protocol):
    """What those modules use; `engine.Engine` and its bases say what each of it is."""

    box: Outboxes
    members: Outboxes
    flags: int
    seq: int
    queue: deque[Operation]
    messages: list[Message]
    mail: Mailroom
    written: Written
    mask: Mask
    watch: DeathWatch
    survival: Survival | None
    unsettled: UnsettledCalls

    @property
    def num_retired(self) -> int:
        """Calls up to this number have ended on this rank."""

    def enter_if_free(self, patient: bool) -> bool:
        """Take the lock when no thread is inside a call (or, if `patient`, leaves within a moment)."""

    def leave(self) -> None:
        """Give the lock back."""

    def leave_wholly(self) -> None:
        """Give the lock back, however often an interrupt made this thread take it."""

    def hold(self) -> None:
        """Own the lock after an interrupt, as the frames of the call expect."""

    def widen(self) -> None:
        """Give this thread back the core that it may have left for a moment."""

    def sleep_on(self, block: Block) -> None:
        """Sleep on a word with the lock given back."""

    def advance(self, op: Driven) -> Block | None:
        """Move `op` one step; None when something ended."""

    def disown(self, op: Operation, exc: BaseException) -> None:
        """End a call whose caller gets `exc` instead, or leave it unclaimed."""

    def retire(self, op: Driven) -> None:
        """Have the listeners of an ended call told."""

    def retire_heads(self) -> None:
        """Take finished calls off the queue."""

    def left(self) -> list[int]:
        """Return the peers that have left the group."""
