"""The reaction of a group to ranks that its calls wait for, and the type of error for a lost one.

While a call waits, its ranks are shown on this process's board, for hang reports, with the start time of the wait
(`show`). At a timeout the group's policy decides (`on_stall`): "error" ends the call, "wait" names the ranks in the log
and goes on waiting, "evict" accuses them, repeatedly, until the view has changed or the agents had time enough to find
out that they cannot agree (`insist`). An accusation carries the newest epoch that the accuser knows: one from before a
change is void. A view without a former member begins the time of the others anew: they may have waited for it
themselves, between hosts what they send went through it, and they may apply the view later than this process.

Callers: the thread of a call, an engine with its lock. A crash leaves the board as it was; its owner is dead then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from ..errors import PeerError, RankFailedError
from .process.board import GroupRow
from .protocol.messages import DEAD, EXITED, LEFT, PUT_OUT, STALLED, UNREACHABLE
from .runtime import Runtime

logger = logging.getLogger("epee")

ACCUSE_PAUSE_S = 0.2
RENEWED_S = 5.0  # longer than a busy machine keeps a process from its core
CAUSES = {
    DEAD: "its process has ended",
    EXITED: "its process has ended",
    LEFT: "has left the group (destroyed or aborted it)",
    STALLED: "was silent until the time-out and has been voted out",
    UNREACHABLE: "ran on a host that could not be reached any more",
    PUT_OUT: "has been put out (asked to go, or it did not come to sync)",
}


def kind_of_loss(causes: Iterable[str]) -> tuple[type[PeerError], str]:
    """Return the type of the error that reports losses, and their causes in words.

    `RankFailedError`, but `PeerError` where all have left in order.
    """
    found = set(causes)
    return PeerError if found == {LEFT} else RankFailedError, ", ".join(sorted({CAUSES[cause] for cause in found}))


class Awaited:
    """The awaited ranks of one group, and its policy for silent ones.

    Args:
        runtime: the control plane of this process.
        on_stall: "error", "evict" or "wait".
    """

    def __init__(self, runtime: Runtime, on_stall: str) -> None:
        self._runtime = runtime
        self._on_stall = on_stall
        self._group_id = 0
        self._row: GroupRow | None = None
        self._shown: tuple[str, int, int, int] | None = None
        self._accused_at = self._warned_at = 0.0

    def begin(self, group_id: int, row: GroupRow) -> None:
        """Report for group `group_id`, which has `row` of this process's board."""
        self._group_id, self._row = group_id, row

    def call_it(self, name: str) -> None:
        """Show the name of the group or buffer in hang reports."""
        if self._row is not None:
            self._row.call_it(name)

    def end(self) -> None:
        """Stop using the row."""
        self._row = None

    def show(self, name: str, seq: int, epoch: int, slots: Iterable[int]) -> None:
        """Show that call `seq` waits for `slots`; the time of the first such call counts as the start of the wait."""
        shown = (name, seq, epoch, sum(1 << slot for slot in set(slots)))
        if shown != self._shown and self._row is not None:
            self._shown = shown
            self._row.show(name.encode("ascii", "replace"), *shown[1:])

    def hide(self) -> None:
        """Show that no call waits."""
        if self._shown is not None and self._row is not None:
            self._shown = None
            self._row.idle()

    def insist(
        self,
        slots: Mapping[int, int],
        what: Callable[[], str],
        seq: int,
        epoch: int,
        deadline: float,
        limit_s: float = 1.0,
    ) -> bool:
        """Apply the policy for silent ranks at a timeout; True while waiting on may still help.

        Args:
            slots: rank -> slot of the silent ranks.
            what: returns the description of what waits for them.
            seq: of the call.
            epoch: the newest that this rank knows.
            deadline: `time.monotonic()` value that has passed.
            limit_s: time-out of the wait, and minimum time between two log messages about it. In a view that lost a
                member the ranks have as long again, at most `RENEWED_S`.
        """
        now = time.monotonic()
        if self._on_stall == "wait":
            if now - self._warned_at > limit_s:
                self._warned_at = now
                names = ", ".join(f"{rank} ({self._runtime.health(slot)})" for rank, slot in slots.items())
                logger.warning("%s: waits for rank(s) %s and goes on waiting (on_stall='wait')", what(), names)
            return True
        if self._on_stall != "evict":
            return False
        deadline = max(deadline, self._runtime.lost_at + min(limit_s, RENEWED_S))
        if now > deadline + self._runtime.settings.no_quorum_s:
            return False
        if now > deadline and now - self._accused_at > ACCUSE_PAUSE_S:
            self._accused_at = now
            for slot in slots.values():
                self._runtime.accuse(slot, self._group_id, seq, epoch)
        return True
