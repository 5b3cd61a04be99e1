"""Why does a job hang? `epee doctor --pid PID`: what each rank of the job of one process is doing.

Data path: `view/report.py` reads the boards of all ranks of the job, from outside; nothing is sent, so ranks may be
stopped or hold the GIL. A wait of the backend that has slept writes its call to the board
(`backend/membership/epochs.py`); a rank without a line computes, is between two calls, or waits in a `Buffer`, which
has no line of its own.

Who writes, who reads: this module only reads. What a rank writes meanwhile may be half a line; it is for people.
"""

from __future__ import annotations

import json

from ..view.report import JobReport, RankReport, look_at_job

_MEANING = {
    "busy": "its Python code stands still: something holds the GIL (a compile, a long call into C)",
    "stopped": "SIGSTOP or a debugger; `kill -CONT` lets it go on",
    "frozen": "it gets no processor: a frozen cgroup, or a machine that swaps",
    "dead": "its process has ended",
    "unknown": "its board cannot be read",
}


def look(pid: int) -> JobReport:
    """Return what the ranks of the job of process `pid` are doing; takes about three seconds.

    Raises:
        ResourceError: the process does not exist, is another user's, or is no rank.
        ProtocolError: its board is damaged.
    """
    return look_at_job(pid)


def suspects(report: JobReport) -> list[str]:
    """Return a line for each rank that others wait for, or that cannot run, and why, lowest rank first."""
    waited = {slot for rank in report.ranks for row in rank.rows if row.op for slot in row.waits_for}
    lines = []
    for rank in report.ranks:
        if rank.health in _MEANING:
            lines.append(f"rank {rank.slot} is {rank.health}: {_MEANING[rank.health]}")
        elif rank.slot in waited:
            lines.append(f"rank {rank.slot} is waited for and runs: {_doing(rank)}")
    return lines


def _doing(rank: RankReport) -> str:
    """What a rank does that others wait for, as far as its board tells."""
    calls = [f"{row.op} seq {row.seq}" for row in rank.rows if row.op]
    return f"it is in {', '.join(calls)} itself" if calls else "it computes, or waits elsewhere"


def as_text(report: JobReport) -> str:
    """Return the report for people: a line per rank, one per call that waits, then who is behind it."""
    found = suspects(report)
    return "\n".join([str(report), "", *(found or ["nobody waits for long"])])


def as_json(report: JobReport) -> str:
    """Return the report as one JSON object."""
    ranks = [
        {
            "rank": rank.slot,
            "incarnation": rank.incarnation,
            "pid": rank.pid,
            "health": rank.health,
            "epoch": rank.epoch,
            "calls": [
                {
                    "lane": row.lane,
                    "op": row.op,
                    "seq": row.seq,
                    "epoch": row.epoch,
                    "waits_for": list(row.waits_for),
                    "waits_s": round(max(0.0, report.now_s - row.since_s), 3),
                }
                for row in rank.rows
                if row.op
            ],
        }
        for rank in report.ranks
    ]
    return json.dumps({"epoch": report.decision.epoch, "ranks": ranks, "suspects": suspects(report)}, indent=2)
