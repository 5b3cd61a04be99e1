"""The engine of a group as a protocol for its membership code, which the engine imports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sized
from typing import Any, Protocol

from ...errors import PeerError
from ...view.process.detector import DeathWatch
from ..entry import Entry
from ..operation import Operation
from ..outbox import Outboxes
from ..p2p.channel import Mailroom
from ..p2p.message import Absence, Message
from ..waiting import Waiting
from .sizes import Mask
from .unsettled import UnsettledCalls


class EngineOfLane(Protocol):
    """The members of an engine that the membership code uses."""

    entry: Entry
    waits: Waiting
    flags: int
    seq: int
    box: Outboxes
    members: Outboxes
    queue: deque[Operation]
    survival: Any  # the membership
    unsettled: UnsettledCalls
    untold: PeerError | None
    mask: Mask
    mail: Mailroom
    watch: DeathWatch

    @property
    def num_retired(self) -> int:
        """Calls up to this number have ended on this rank."""

    def look(self, step: Callable[[], None]) -> None:
        """Run `step` with the lock held, when all decisions are applied and the group is not frozen."""

    def retire(self, op: Message) -> None:
        """Schedule the listeners of an ended call."""

    def is_interrupt(self, exc: BaseException) -> bool:
        """Return whether an exception interrupts this thread, and is not the outcome of the call that it advances."""

    def raise_flag(self, bit: int) -> None:
        """Set a bit of `flags`, from any thread."""

    def lower_flag(self, bit: int, unless: Sized = ()) -> None:
        """Clear a bit of `flags`, from any thread; not where something is in `unless`, which was put there before."""

    def leave_out(self, rank: int, absence: Absence, is_told: bool) -> None:
        """End the messages of a rank without which a view has begun."""
