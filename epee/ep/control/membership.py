"""The membership as used by a buffer's calls, for buffers whose members never change.

For buffers whose ranks die, are voted out and rejoin, `hosts/member_sync.py` derives from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Agreed(NamedTuple):
    """The result of a `sync`. All members return this.

    Attributes:
        epoch: its number.
        ranks: the members from then on.
        used: the highest number that their calls have used.
        is_fresh: a member was not in the previous agreement.
    """

    epoch: int
    ranks: tuple[int, ...]
    used: int = 0
    is_fresh: bool = True


class Membership:
    """The membership, as used by the calls of a buffer; this one is of the ranks it was made with, which never change.

    Args:
        lent_bytes: of this rank's outbox, or the memory that it lends to an epoch.

    Attributes:
        forget: called when an epoch is over: drops what belonged to it.
        counts_entering: whether the others wait for a call of a rank that cannot enter its epoch; it must refuse it
            then.
        raises: whether a loss is an error.
        takes_replacements: whether a process that replaces a lost rank is admitted.
        lent_bytes: as the argument.
        number: of the buffer, alike on all its ranks; 0: they have not agreed on one.
        has_shown: whether the ranks for which a call waits are published, so that `hide` has something to do.
        must_turn: whether `turn` has something to do before the next call.
    """

    raises = True
    takes_replacements = False
    must_turn = counts_entering = has_shown = False
    number = 0

    def __init__(self, lent_bytes: int) -> None:
        self.lent_bytes = lent_bytes
        self.forget: Callable[[], None] = self.close

    def check(self, src: int) -> None:
        """Check for changes in a wait; raises what ends it."""

    def show(self, op: str, seq: int, ranks: list[int]) -> None:
        """Publish the ranks for which a call waits."""

    def hide(self) -> None:
        """Publish that no call waits."""

    def call_it(self, text: str) -> None:
        """Show the buffer's name in hang reports."""

    def await_end_of(self, rank: int, deadline: float) -> bool:
        """Wait until a rank has left the view; return False when it stays."""
        return False

    def turn(self, op: str, deadline: float) -> None:
        """Bring the buffer into the newest epoch."""

    def agree(self, counted: int, deadline: float, used: int = 0) -> Agreed:
        """Agree on the members, and return the agreement; the only rank of a group is the only member.

        Args:
            counted: bits of the ranks that this one counts on.
            deadline: `time.monotonic()` value.
            used: the last number that calls of this rank have used, if numbers continue.
        """
        return Agreed(0, (0,))

    def sync(self, counted: int, used: int, deadline: float) -> Agreed:
        """As `agree`; where a `sync` is a step of its own, this rank has entered the epoch as well on return."""
        return self.agree(counted, deadline, used)

    def note_agreed(self, agreed: Agreed) -> None:
        """Record that the caller of `agree` has its result."""

    def close(self) -> None:
        """Release all memory."""
