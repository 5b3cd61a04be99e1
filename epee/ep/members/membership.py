"""The membership as used by a buffer's calls; `members/member_sync.py` derives that of a buffer of one host from it."""

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
    """The membership, as used by the calls of a buffer; this one is of buffers over hosts, whose engine has it.

    Attributes:
        forget: called when an epoch is over: drops what belonged to it.
        counts_entering: whether the others wait for a call of a rank that cannot enter its epoch; it must refuse it
            then.
        raises: whether a loss is an error.
        takes_replacements: whether a process that replaces a lost rank is admitted.
        lent_bytes: of this rank's outbox, or the memory that it lends to an epoch.
        number: of the buffer, alike on all its ranks; 0: they have not agreed on one.
        has_shown: whether the ranks for which a call waits are published, so that `hide` has something to do.
        must_turn: whether `turn` has something to do before the next call.
    """

    raises = True
    takes_replacements = False
    must_turn = counts_entering = has_shown = False
    number = lent_bytes = 0
    forget: Callable[[], None]

    def hide(self) -> None:
        """Publish that no call waits."""

    def call_it(self, text: str) -> None:
        """Show the buffer's name in hang reports."""

    def turn(self, op: str, deadline: float) -> None:
        """Bring the buffer into the newest epoch."""

    def close(self) -> None:
        """Release all memory."""
