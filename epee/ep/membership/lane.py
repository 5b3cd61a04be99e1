"""A buffer as a group in a view: its members, its memory, its `sync`, its end. Common to all modes.

`epochs.py` defines what a change of the view means to calls of a `Buffer` on CPUs, `synced.py` to all others.

Called on the thread of a call; `close` also on any thread that drops the buffer, at any moment: so it waits for no
rank, and what it cannot do there is done by `retire`, between two calls of any buffer. A crash leaves memory that the
system frees.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from ...errors import CommTimeoutError
from ..config import BufferConfig
from ..control.inbox import Exchange
from ..control.membership import Agreed, Membership
from .birth import Begun
from .inboxes import Inboxes
from .sync import Sync

_closed: deque[tuple[int, Begun]] = deque()  # of this process, not yet removed from the control plane


class BufferLane(Membership):
    """The part of a buffer's membership that all modes share.

    Args:
        config: of the buffer.
        rank: this rank.
        begun: the buffer's part in its group.
        exchange: of the buffer; brought from epoch to epoch by the subclass.
        timeout_s: of the buffer's calls.
        interrupt: called while waiting; raises to end the wait.
        nbytes: of the memory that a rank lends for an epoch.

    Attributes:
        forget: called when an epoch is over: drops what belonged to it.
    """

    def __init__(
        self,
        config: BufferConfig,
        rank: int,
        begun: Begun,
        exchange: Exchange,
        timeout_s: float,
        interrupt: Callable[[], None],
        nbytes: int,
    ) -> None:
        self.roster = begun.roster
        self.forget = _nothing
        self._config = config
        self._rank = rank
        self._begun = begun
        self._number = begun.number
        self._line = begun.line
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._interrupt = interrupt
        self._entered: dict[int, int] = {}  # ranks of this rank's epoch, and since when they take part
        look = self._look_between_calls
        self._inboxes = Inboxes(config, rank, begun.number, begun.roster, begun.line, look, nbytes)
        self._op = ""  # of the call under way, for hang reports
        self._has_shown = False
        # agreements up to this epoch have been returned, or did not concern this rank
        self._agreed = begun.roster.view.epoch
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def raises(self) -> bool:  # type: ignore[override]
        """Whether a loss is an error."""
        return self.roster.seat.raises

    @property
    def takes_replacements(self) -> bool:  # type: ignore[override]
        """Whether a process that replaces a lost rank is admitted."""
        return self.roster.seat.is_open and self._config.takes_replacements

    @property
    def identity(self) -> tuple[int, int]:
        """Number of the buffer among those of its group, and its group id in the view; the same on all its ranks."""
        return self._number, self.roster.lane

    @property
    def first(self) -> int:
        """If all ranks have made it together: an epoch that they all know of, the same on all; else 0."""
        return self._begun.first

    def is_told(self, take_back: Callable[[], None]) -> None:
        """Record that a notice of the buffer is published to the group; `close` calls `take_back`."""
        self._begun.take_back = take_back

    @property
    def inbox_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the memory that this rank lends."""
        return 0 if self._inboxes.own is None else self._inboxes.own.mapped_bytes

    @property
    def must_turn(self) -> bool:  # type: ignore[override]
        """Whether the buffer has to be brought into another epoch before its next call."""
        raise NotImplementedError

    @property
    def is_in_place(self) -> bool:
        """Whether this rank's next call is the one after its last, in the same epoch, as far as is known."""
        return not self.must_turn

    def close(self) -> None:
        """Release all memory and leave the registry; idempotent. `retire` follows."""
        if self._is_closed or os.getpid() != self._pid:
            return  # in a forked child all of it is the parent's
        self._is_closed = True
        self._begun.line.mark_closed(
            self._exchange.is_dropped
        )  # before the rest: a joiner must not take the buffer for open
        _closed.append((self._pid, self._begun))
        self._inboxes.close()
        del self._begun, self._line  # a closed buffer that is still referenced maps nothing

    # ---- during waits

    def _check(self) -> None:
        """Raise why this rank's calls cannot succeed."""
        self.roster.check()
        self.roster.require_part(self._rank)

    def show(self, op: str, seq: int, ranks: list[int]) -> None:
        """Publish to the peers, and hang reports, for which ranks a call waits; repeated, because old entries
        expire.
        """
        self.roster.show(op, seq, ranks)
        self._line.blame(ranks)
        self._has_shown = True

    def hide(self) -> None:
        """Publish that no call waits; costs nothing if none has."""
        if self._has_shown:
            self._has_shown = False
            self.roster.hide()
            self._line.blame(())

    def _look_between_calls(self, rank: int, what: str, started: float, deadline: float) -> None:
        """Check for changes while a rank keeps this one from entering an epoch; raises what ends the wait."""
        raise NotImplementedError

    # ---- sync

    def agree(self, counted: int, deadline: float, used: int = 0) -> Agreed:
        """Agree with the others on the members (`sync.py`); call `note_agreed` once the caller has the result."""

        def look(silent: list[int]) -> None:
            """Check for changes while `silent` are awaited: raises what ends the wait, publishes the awaited ranks."""
            self._interrupt()
            self.roster.check()
            self.show("sync", self._exchange.seq + 1, silent)

        def is_elsewhere(rank: int) -> bool:
            """Return whether a member waits in its next call, so that it does not come to this one."""
            in_epoch = self.is_in_place and rank in self._exchange.members
            return in_epoch and self._exchange.waits_in_next(rank)

        sync = Sync(self._rank, self.roster, self._line, self._inboxes, self._entered, is_elsewhere, look)
        try:
            return sync.agree(counted, used, max(self._agreed, self._exchange.epoch), deadline)
        finally:
            self.hide()

    def note_agreed(self, agreed: Agreed) -> None:
        """Record that the caller of `agree` has its result, and that the next sync is another one."""
        self._agreed = agreed.epoch


def retire() -> None:
    """End the part of all closed buffers in the control plane. Between calls only: it talks to the agent thread."""
    while _closed:
        pid, begun = _closed.popleft()
        if pid == os.getpid():
            begun.close()


def silent(told: str, rank: int) -> CommTimeoutError:
    """Return the error of a wait for a rank that has become too long."""
    return CommTimeoutError(
        f"{told}; others may have completed this call, so do not make the step again; raise timeout= if the peer is "
        "only slow",
        [rank],
    )


def _nothing() -> None:
    pass
