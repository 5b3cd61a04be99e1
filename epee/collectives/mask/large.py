"""Calls of mode "mask" with rows above packet size: their result stands when the ranks' hosts have agreed on it.

No rank keeps such a row where others find it, so a kernel that loses a rank cannot end the call over those who are
left. Instead nothing of the caller's is written before it is sure. One call:

1. Each output has a scratch of its own, with the caller's values; pipelines move the rows into it.
2. The host waits until the GPU has done that: kernels' waits are bounded.
3. The hosts meet (one call of the engine, which itself runs over those who are left): each tells whether its part went
   well. All of those who are left say the same, so all go on alike:
   all well     the scratch is copied to the outputs, on the caller's stream. Ranks that died meanwhile counted.
   else         where somebody has been lost or voted out, the ranks meet anew, without it, and begin at 1 again, from
                inputs that nobody has touched. Where nobody has, and the call was silent or another one, it is an error
                on all, and outputs are as they were.

A crash before a rank has told in 3: the others find it lost, and begin again or, if all of theirs went well, end with
its row. A crash behind that: they have ended. A rank that makes another call than the others meets them in theirs, at
the latest when its own is lost (`half.py`): both sides see that the other is elsewhere.

The host waits, so an asynchronous call is done when it returns, and no graph can record one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ...errors import AbortedError, CommTimeoutError, EpeeError, MismatchError, RankFailedError
from ..calls import Prepared
from ..machine import Collectives
from ..meeting import MeetingRow
from ..report import error_of
from .moves import has_places

NAP_S = 50e-6
GRACE_S = 10.0  # beyond the kernels' own time-outs
TOLD = 2  # the phase of a row by which a rank tells how its call went
_TRIES = 16  # each loses somebody
_OTHER = "another call"
_UNTOUCHED = "outputs are as they were"


class MeetingHalf(Protocol):
    """What is asked of the group's half."""

    def queue(self, machine: Collectives, call: Prepared) -> int:
        """Put a call on the current stream; returns the stream."""

    def exchange(self, row: MeetingRow) -> tuple[int, dict[int, MeetingRow]]:
        """Give a row to all members; returns the epoch, and theirs."""

    def own_row(self) -> MeetingRow:
        """Return a row in which all is well."""

    def lose(self) -> None:
        """Note that a call was lost: the hosts meet before the next one."""

    def renew(self) -> None:
        """Have the hosts meet before the next call."""

    def meet_again(self, method: str) -> Collectives | None:
        """Meet the members; returns the machine, None where host memory is the way now."""

    def met(self) -> dict[int, int]:
        """Return the members of the last meeting, with the numbers of their processes."""

    def is_closed(self) -> bool:
        """Whether the group has ended."""

    def timeout_s(self) -> float:
        """Return the time-out of a call."""


def run_large(
    half: MeetingHalf, machine: Collectives, method: str, make: Callable[[], Prepared], fills: bool
) -> Prepared | None:
    """Make a call to its end; returns it, its results are on the way into the outputs. None: host memory is the way.

    Args:
        half: the group's.
        machine: of it.
        method: of the group, for errors.
        make: prepares the call, with outputs of its own.
        fills: places of ranks that take no part are filled with zeros.
    Raises:
        CommTimeoutError, MismatchError, RankFailedError: as a call on CPU tensors; outputs are as they were.
    """
    for _ in range(_TRIES):
        call = make()
        if fills and all(map(has_places, call.moves)):
            call.clear()
        machine.timeout_s = half.timeout_s()
        _await(half, machine, half.queue(machine, call), method)
        if _agree(half, machine, method):
            call.copy_back()
            return call
        again = half.meet_again(method)
        if again is None:
            return None
        machine = again
        lost = [move.root for move in call.moves if move.root >= 0 and move.root not in half.met()]
        if lost:
            raise RankFailedError(f"{method}: the root, rank {lost[0]}, is lost; {_UNTOUCHED}", lost[:1], method, 0)
    raise CommTimeoutError(f"{method}: the call was lost {_TRIES} times, each time with another rank; {_UNTOUCHED}")


def _await(half: MeetingHalf, machine: Collectives, stream: int, method: str) -> None:
    """Let the host wait for the GPU."""
    mark, started = machine.platform.mark(stream), time.monotonic()
    while not machine.platform.is_done(mark):
        if half.is_closed():
            raise AbortedError(f"{method}: the process group was closed during the call")
        if time.monotonic() - started > 2 * half.timeout_s() + GRACE_S:
            half.lose()
            raise CommTimeoutError(f"{method}: this rank's GPU has not ended the call within twice the time-out")
        time.sleep(NAP_S)


def _agree(half: MeetingHalf, machine: Collectives, method: str) -> bool:
    """Hear how the call went elsewhere; True: well for all, False: to be made again without those who are lost."""
    rank, reports = machine.config.rank, machine.reports()
    own = error_of(reports[0], rank, _UNTOUCHED) if reports else None
    if own is not None:
        half.lose()
    reason = "" if own is None else f"{_OTHER if isinstance(own, MismatchError) else 'lost'}: {own}"
    try:
        _, rows = half.exchange(half.own_row()._replace(is_ok=own is None, reason=reason, phase=TOLD))
    except EpeeError:
        half.lose()
        raise
    before = half.met()
    told = {peer: row for peer, row in rows.items() if row.pid == before.get(peer)}
    if set(told) != set(before):
        half.renew()  # the view is to follow before the next call, or the next try
    if all(row.is_ok and row.phase == TOLD for row in told.values()):
        return True
    half.lose()
    for peer, row in told.items():
        if row.phase != TOLD or row.reason.startswith(_OTHER):
            other = MismatchError(
                f"{method}: ranks disagree: rank {peer} makes another call, or was told so; {_UNTOUCHED}"
            )
            raise own if isinstance(own, MismatchError) else other
    if len(told) < len(before):
        return False
    lost = next(peer for peer, row in told.items() if not row.is_ok)
    raise own or CommTimeoutError(
        f"{method}: rank {lost} has lost the call ({told[lost].reason}); {_UNTOUCHED}", [lost]
    )
