"""The membership as used by a buffer's calls, for buffers whose members never change.

For buffers whose ranks die, are voted out and rejoin, `membership/epochs.py` derives from it for a `Buffer` on CPUs,
and `membership/synced.py` for a `LatencyBuffer` and for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...errors import InvalidState, PeerError


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


class Parties(NamedTuple):
    """The ranks with a part in a call.

    Attributes:
        ranks: the parties, ascending.
        gone: members of the epoch that have left it; the rows of parties among them are in their own inboxes.
    """

    ranks: tuple[int, ...]
    gone: frozenset[int]


class Membership:
    """The membership, as used by the calls of a buffer; this one is of the ranks it was made with, which never change.

    Args:
        inbox_bytes: of this rank's inbox.

    Attributes:
        forget: called when an epoch is over: drops what belonged to it.
        counts_entering: whether the others wait for a call of a rank that cannot enter its epoch; it must refuse it
            then.
        raises: whether a loss is an error.
        takes_replacements: whether a process that replaces a lost rank is admitted.
        inbox_bytes: of this rank's inbox.
        number: of the buffer, alike on all its ranks; 0: they have not agreed on one.
        has_shown: whether the ranks for which a call waits are published, so that `hide` has something to do.
        has_turned: whether the view has changed since it was queried for the last call, or is about to.
        must_turn: whether `turn` has something to do before the next call.
    """

    raises = True
    takes_replacements = False
    has_turned = must_turn = counts_entering = has_shown = False
    number = 0

    def __init__(self, inbox_bytes: int) -> None:
        self.inbox_bytes = inbox_bytes
        self.forget: Callable[[], None] = self.close

    def issue(self, seq: int, is_pull: bool, publish: Callable[[], None]) -> bool:
        """Make call `seq` by `publish`; False: the view changes, and the call must not be made before that is handled.

        Args:
            seq: its number.
            is_pull: it is a combine, which can continue without the lost ranks.
            publish: stores this rank's row into its own inbox.
        """
        publish()
        return True

    def gather(self, seq: int, note: Callable[[], None]) -> bool:
        """Record, by `note`, that all rows of call `seq` have been seen; False: the view changes."""
        return self.issue(seq, False, note)

    def withdraw(self) -> bool:
        """Record that the last call has failed on all ranks, as this one finds; False: the view changes."""
        return not self.has_turned

    def decide(self, op: str, seq: int, deadline: float) -> Parties:
        """Return the ranks with a part in a call during which the view has changed, and that ends at `deadline`."""
        raise InvalidState(f"{op}: the members of this buffer do not change")

    def check(self, src: int, is_data: bool) -> None:
        """Check for changes in a wait; raises what ends it."""

    def patience(self, deadline: float) -> float:
        """Return until when to wait after a change of the view."""
        return deadline

    def show(self, op: str, seq: int, ranks: list[int]) -> None:
        """Publish the ranks for which a call waits."""

    def hide(self) -> None:
        """Publish that no call waits."""

    def call_it(self, text: str) -> None:
        """Show the buffer's name in hang reports."""

    def insist(self, ranks: list[int], what: str, seq: int, deadline: float) -> bool:
        """At a timeout: apply the policy for silent ranks; return True while waiting longer may help.

        False: a timeout is an error, no rank is accused.
        """
        return False

    def await_end_of(self, rank: int, deadline: float) -> bool:
        """Wait until a rank has left the view; return False when it stays."""
        return False

    def unfinished(self, op: str) -> PeerError:
        """Return the error of a dispatch whose sources died during it; here never raised."""
        return PeerError(f"{op}: a rank has left", [])

    def turn(self, op: str, deadline: float) -> None:
        """Bring the buffer into the newest epoch."""

    def turn_to_refuse(self, op: str, deadline: float) -> PeerError | None:
        """As `turn`, for a call that this rank refuses; return the loss that fails it on all ranks, if one does."""
        self.turn(op, deadline)
        return None

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
