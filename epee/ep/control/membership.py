"""Who takes part in a buffer's calls: what the calls ask, and the answers where nobody can come or go.

Where ranks die, are voted out and come back, `membership/epochs.py` has the answers for a `Buffer` on CPUs, and
`membership/synced.py` for a `LatencyBuffer` and for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from ...errors import InvalidState, PeerError


class Agreed(NamedTuple):
    """What a `sync` ended with. All who take part return this.

    Attributes:
        epoch: its number.
        ranks: who takes part from then on.
        used: no call of theirs has used a higher number.
        is_fresh: somebody was not in what was agreed before.
    """

    epoch: int
    ranks: tuple[int, ...]
    used: int = 0
    is_fresh: bool = True


class Parties(NamedTuple):
    """Who has a part in a call.

    Attributes:
        ranks: the parties, ascending.
        gone: those of the epoch that are in it no more; the rows of parties among them stand in their own inboxes.
    """

    ranks: tuple[int, ...]
    gone: frozenset[int]


class Membership(Protocol):
    """What the calls of a buffer ask.

    Attributes:
        forget: called when an epoch is over: drops what belonged to it.
    """

    forget: Callable[[], None]

    @property
    def counts_entering(self) -> bool:
        """Whether the others wait for a call of a rank that cannot enter its epoch; it must refuse it then."""

    @property
    def raises(self) -> bool:
        """Whether a loss is an error."""

    @property
    def takes_replacements(self) -> bool:
        """Whether a process that takes a lost rank's place comes in."""

    @property
    def inbox_bytes(self) -> int:
        """Bytes of this rank's inbox."""

    @property
    def has_turned(self) -> bool:
        """Whether the view has changed since the last call was asked about, or is about to."""

    @property
    def must_turn(self) -> bool:
        """Whether `turn` has something to do before the next call."""

    def issue(self, seq: int, is_pull: bool, publish: Callable[[], None]) -> bool:
        """Make call `seq` by `publish`; False: the view changes, and it must not be made before that is looked at.

        Args:
            seq: its number.
            is_pull: it is a combine, which can do without who is lost.
            publish: stores this rank's row into its own inbox.
        """

    def gather(self, seq: int, note: Callable[[], None]) -> bool:
        """Note, by `note`, that all rows of call `seq` have been seen; False: the view changes."""

    def withdraw(self) -> bool:
        """Note that the last call has failed on all ranks, as this one finds; False: the view changes."""

    def decide(self, op: str, seq: int, deadline: float) -> Parties:
        """Say which ranks have a part in a call that the view has changed under, and that ends at `deadline`."""

    def check(self, src: int, is_data: bool) -> None:
        """Look around in a wait; raises what ends it."""

    def patience(self, deadline: float) -> float:
        """Return until when to wait after a change of the view."""

    def show(self, op: str, seq: int, ranks: list[int]) -> None:
        """Show for whom a call waits."""

    def hide(self) -> None:
        """Show that no call waits."""

    def insist(self, ranks: list[int], what: str, seq: int, deadline: float) -> bool:
        """At a time-out: do what the policy is with silent ranks; True while waiting on may help."""

    def await_end_of(self, rank: int, deadline: float) -> bool:
        """Wait until a rank is gone from the view; False when it stays."""

    def unfinished(self, op: str) -> PeerError:
        """Return the error of a dispatch whose sources died in the midst of it."""

    def turn(self, op: str, deadline: float) -> None:
        """Bring the buffer into the newest epoch."""

    def turn_to_refuse(self, op: str, deadline: float) -> PeerError | None:
        """Turn for a call that this rank refuses; return the loss that fails it everywhere, if one does."""

    def agree(self, counted: int, deadline: float, used: int = 0) -> Agreed:
        """Agree on who takes part, and return that.

        Args:
            counted: bits of the ranks that this one counts on.
            deadline: `time.monotonic()` value.
            used: the last number that calls of this rank have used, where numbers go on.
        """

    def note_agreed(self, agreed: Agreed) -> None:
        """Take note that the caller of `agree` has what it returned."""

    def close(self) -> None:
        """Let go of all memory."""


class FixedMembership:
    """The ranks that the buffer was made with, for ever.

    Args:
        inbox_bytes: of this rank's inbox.
    """

    raises = True
    takes_replacements = False
    has_turned = must_turn = counts_entering = False

    def __init__(self, inbox_bytes: int) -> None:
        self.inbox_bytes = inbox_bytes
        self.forget: Callable[[], None] = self.close

    def issue(self, seq: int, is_pull: bool, publish: Callable[[], None]) -> bool:
        """Do it, and return True: nothing changes."""
        publish()
        return True

    def gather(self, seq: int, note: Callable[[], None]) -> bool:
        """Do it, and return True."""
        note()
        return True

    def withdraw(self) -> bool:
        """Return True."""
        return True

    def decide(self, op: str, seq: int, deadline: float) -> Parties:
        """Raise: there is nothing to decide."""
        raise InvalidState(f"{op}: the members of this buffer do not change")

    def check(self, src: int, is_data: bool) -> None:
        """Do nothing."""

    def patience(self, deadline: float) -> float:
        """Return the deadline."""
        return deadline

    def show(self, op: str, seq: int, ranks: list[int]) -> None:
        """Do nothing: there is no board."""

    def hide(self) -> None:
        """Do nothing."""

    def insist(self, ranks: list[int], what: str, seq: int, deadline: float) -> bool:
        """Return False: a time-out is an error."""
        return False

    def await_end_of(self, rank: int, deadline: float) -> bool:
        """Return False: nobody leaves."""
        return False

    def unfinished(self, op: str) -> PeerError:
        """Return an error; nobody asks, since nobody is gone."""
        return PeerError(f"{op}: a rank is gone", [])

    def turn(self, op: str, deadline: float) -> None:
        """Do nothing."""

    def turn_to_refuse(self, op: str, deadline: float) -> PeerError | None:
        """Return None: nobody is lost."""
        return None

    def agree(self, counted: int, deadline: float, used: int = 0) -> Agreed:
        """Return this rank, the only one that there is."""
        return Agreed(0, (0,))

    def note_agreed(self, agreed: Agreed) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
