"""The engine of a group as a protocol, for the modules that the engine calls and that therefore cannot import it.

Each of them (`express`, `overlap`, `stall`, `progress`, `interrupts`, `ending` in `engine/`) does one part
of the engine's work on its state.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from ..view.process.detector import DeathWatch
from .entry import Entry
from .membership.epochs import Survival
from .membership.sizes import Mask
from .membership.unsettled import UnsettledCalls
from .operation import Block, Driven, Operation
from .outbox import Outboxes
from .p2p.channel import Mailroom
from .p2p.message import Message
from .ranges import Written
from .waiting import Waiting


class Background(Protocol):
    """The background thread of a group (`engine/progress.py`)."""

    def is_current(self) -> bool:
        """True on the thread itself."""

    def stop(self) -> None:
        """End the thread and wait for it."""


class EngineFace(Protocol):
    """The part of the engine that those modules use; `engine.Engine` documents the members."""

    box: Outboxes
    has_failed: bool
    flags: int
    timeout_s: float
    entry: Entry
    waits: Waiting
    members: Outboxes
    contributors: tuple[int, ...]
    seq: int
    queue: deque[Operation]
    messages: dict[Message, None]
    mail: Mailroom
    written: Written
    mask: Mask
    watch: DeathWatch
    survival: Survival | None
    unclaimed: list[Operation]
    unsettled: UnsettledCalls
    broken: tuple[BaseException, Driven | None] | None
    repair: Any
    ended_by: str

    @property
    def helper(self) -> Background:
        """The thread for calls that no thread waits for."""

    @property
    def num_retired(self) -> int:
        """Calls up to this number have ended on this rank."""

    def raise_flag(self, bit: int) -> None:
        """Set a bit of `flags`, from any thread."""

    def is_interrupt(self, exc: BaseException) -> bool:
        """Return whether an exception interrupts this thread, and is not the outcome of the call that it moves."""

    def advance(self, op: Driven) -> Block | None:
        """Return whether an exception interrupts this thread, and is not the outcome of the call that it advances."""

    def drive(self, op: Driven, until: float | None = None) -> None:
        """Step `op` and the calls before it until it is done."""

    def retire(self, op: Driven) -> None:
        """Schedule the listeners of an ended call."""

    def retire_heads(self) -> None:
        """Take finished calls off the queue."""
