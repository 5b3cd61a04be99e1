"""Hang reports: the state of every rank of a job, read from outside, without help of the ranks.

Data path: the board of one process is found through its pid (`/proc/PID/fd`); the view on it names all others and their
boards and heartbeats. Nothing is sent and no process has to answer, so it works on ranks that are stopped or hold the
GIL. Only the user who owns the ranks may read them.

Writers and readers: each rank writes its own board; the caller reads it, and rows may change during the read: this is
for people.
"""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

from ..errors import EpeeError, ResourceError
from ..memory.claim import has_ended
from .process.board import PERIOD_S, BeatView, BoardView, Row, read_board_of
from .process.machine import own_host_key
from .process.peers import process_state
from .protocol.messages import Decision, Member
from .transport.wire import parse_endpoint


class RankReport(NamedTuple):
    """The known state of one rank.

    Attributes:
        slot: its rank number.
        incarnation: of the process in it.
        pid: its process, 0 if its endpoint cannot be read, or it runs on another host than the asked process.
        health: "running", "busy", "stopped", "frozen", "dead" or "unknown"; "elsewhere" on another host.
        epoch: the view that it knows; 0 if its board cannot be read.
        rows: its groups; `op` is empty between calls.
    """

    slot: int
    incarnation: int
    pid: int
    health: str
    epoch: int
    rows: tuple[Row, ...]


class JobReport(NamedTuple):
    """All ranks of the view that the asked process knows; `now_s` is the reference time of the rows' `since_s`."""

    decision: Decision
    ranks: tuple[RankReport, ...]
    now_s: float

    def __str__(self) -> str:
        return format_report(self)


def look_at_job(pid: int, look_s: float = 2.5) -> JobReport:
    """Return the activities of the ranks of the job of process `pid`.

    Args:
        pid: any rank of the job, of this user.
        look_s: how long to watch whether heartbeats and agent threads advance.
    Raises:
        ResourceError: the process does not exist, is another user's or no rank.
        ProtocolError: its board is damaged.
    """
    state = read_board_of(pid)
    decision = state.decided if state is not None else Decision(0, ())
    host = next((member.host for member in decision.members if _pid_of(member) == pid), own_host_key())
    watches = [_Watch(member, member.host == host) for member in decision.members]
    if watches:
        time.sleep(max(look_s, 3 * PERIOD_S))
    now = time.monotonic()
    return JobReport(decision, tuple(watch.finish() for watch in watches), now)


def _pid_of(member: Member) -> int:
    """Return the process of a member, 0 if its endpoint cannot be read."""
    with contextlib.suppress(EpeeError):
        return parse_endpoint(member.endpoint).pid
    return 0


class _Watch:
    """One rank between two reads."""

    def __init__(self, member: Member, is_here: bool) -> None:
        """`is_here`: it runs on the host of the caller; ranks of other hosts cannot be read."""
        self._member = member
        self._board: BoardView | None = None
        self._beat: BeatView | None = None
        self._pid = self._start_time = 0
        self._is_here = is_here
        with contextlib.suppress(EpeeError):  # it is dead, or its data is invalid: the report says so
            if not is_here:
                raise ResourceError("its board is on another host")
            endpoint = parse_endpoint(member.endpoint)
            self._pid, self._start_time = endpoint.pid, endpoint.start_time
            self._board = BoardView.attach(endpoint.board)
            self._beat = BeatView(endpoint.beat)
        self._before = self._counters()

    def _counters(self) -> tuple[int, int]:
        if self._board is None or self._beat is None:
            return 0, 0
        return self._beat.count, self._board.turns

    def finish(self) -> RankReport:
        """Read a second time and release the mappings."""
        rows = tuple(self._board.rows()) if self._board is not None else ()
        epoch = self._board.epoch if self._board is not None else 0
        slot, incarnation = self._member[:2]
        report = RankReport(slot, incarnation, self._pid, self._health(), epoch, rows)
        for view in (self._board, self._beat):
            if view is not None:
                view.close()
        return report

    def _health(self) -> str:
        if not self._pid:
            return "unknown" if self._is_here else "elsewhere"
        state = process_state(self._pid)
        if has_ended(self._pid, self._start_time) or state in "XZ":
            return "dead"
        if state in "Tt":
            return "stopped"
        if self._board is None or self._beat is None:
            return "unknown"
        beat, turns = self._counters()
        if beat and beat == self._before[0]:
            return "frozen"
        return "busy" if turns == self._before[1] else "running"


def format_report(report: JobReport) -> str:
    """Return the report as text, one line per rank and per call that runs."""
    slots = ", ".join(str(member.slot) for member in report.decision.members) or "none"
    lines = [f"epoch {report.decision.epoch}, ranks {slots}"]
    for rank in report.ranks:
        process = f" (process {rank.pid}, epoch {rank.epoch})" if rank.pid else ""
        lines.append(f"rank {rank.slot}{process}: {rank.health}")
        for row in rank.rows:
            if row.op:
                waits = f", waits for {', '.join(map(str, row.waits_for))}" if row.waits_for else ""
                since = max(0.0, report.now_s - row.since_s)
                name = row.name or f"group {row.group_id}"
                lines.append(f"  {name}: {row.op} seq {row.seq} epoch {row.epoch}{waits} since {since:.1f} s")
    return "\n".join(lines)
