"""Diagnosis of a hanging job, `epee doctor --pid PID`: the state of each rank of the job of one process.

Data path: `view/report.py` reads the boards of all ranks of the job, from outside; nothing is sent, so ranks may be
stopped or hold the GIL. A wait of a group or a buffer that has slept writes its call to the board (`view/awaited.py`);
a rank without a line computes, or is between two calls.

Boards are those of one host. For a group over several hosts `engine/replication/report.py` gives the progress of each
rank, for other hosts' ranks as far as this host has been notified; the ranks behind follow from that.

This module only reads. A line that a rank is writing at the same time may be incomplete; the report is for people.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..engine.replication.report import Progress, look_at_groups
from ..errors import ResourceError
from ..view.report import JobReport, RankReport, look_at_job

_MEANING = {
    "busy": "its Python code stands still: something holds the GIL (a compile, a long call into C)",
    "stopped": "SIGSTOP or a debugger; `kill -CONT` lets it go on",
    "frozen": "it gets no processor: a frozen cgroup, or a machine that swaps",
    "dead": "its process has ended",
    "unknown": "its board cannot be read",
}
_MEANING_OVER_HOSTS = {
    "stopped": _MEANING["stopped"],
    "dead": _MEANING["dead"],
    "elsewhere": "it runs on another host, look there",
    "unknown": "the process of this host that hears of it has ended",
}
_LIMITS = "run this on each host: it sees the processes of its own"
Group = Sequence[Progress]


def look(pid: int) -> JobReport:
    """Return the state of the ranks of the job of process `pid`; takes about three seconds.

    Raises:
        ResourceError: the process does not exist, is another user's, or is no rank.
        ProtocolError: its board is damaged.
    """
    return look_at_job(pid)


def look_everywhere(pid: int) -> tuple[JobReport | None, list[Group]]:
    """Return the state of the ranks of process `pid`'s job, and of its groups over several hosts.

    Raises:
        as `look`; a process that has such groups needs no job.
    """
    groups: list[Group] = list(look_at_groups(pid))
    try:
        return look(pid), groups
    except ResourceError:
        if not groups:
            raise
        return None, groups


def suspects(report: JobReport) -> list[str]:
    """Return a line for each rank that others wait for, or that cannot run, with the reason, lowest rank first."""
    waited = {slot for rank in report.ranks for row in rank.rows if row.op for slot in row.waits_for}
    lines = []
    for rank in report.ranks:
        if rank.health in _MEANING:
            lines.append(f"rank {rank.slot} is {rank.health}: {_MEANING[rank.health]}")
        elif rank.slot in waited and rank.health == "elsewhere":
            lines.append(f"rank {rank.slot} is waited for: {_MEANING_OVER_HOSTS[rank.health]}")
        elif rank.slot in waited:
            lines.append(f"rank {rank.slot} is waited for and runs: {_doing(rank)}")
    crossed = _in_different_calls(report.ranks)
    if crossed:
        lines.append(
            f"ranks {', '.join(map(str, crossed))} are in different calls and wait for each other: make all ranks call "
            "in the same order"
        )
    return lines


def _in_different_calls(ranks: Sequence[RankReport]) -> list[int]:
    """Return the ranks that wait, each in one call, for a rank that waits for them in another one, ascending.

    Ranks that wait for each other in the same call are not among them: its messages may be on their way.
    """
    waits: dict[tuple[int, int], set[tuple[int, int]]] = {}  # (rank, rank that it waits for): calls
    for rank in ranks:
        for row in rank.rows:
            for slot in row.waits_for if row.op else ():
                waits.setdefault((rank.slot, slot), set()).add((row.group_id, row.seq))
    return sorted(
        {rank for rank, peer in waits if waits[rank, peer].isdisjoint(waits.get((peer, rank), waits[rank, peer]))}
    )


def _doing(rank: RankReport) -> str:
    """Return the activity of a rank that others wait for, as far as its board shows it."""
    calls = [f"{row.op} seq {row.seq}{f' of {row.name}' if row.name else ''}" for row in rank.rows if row.op]
    where = f"; `py-spy dump --pid {rank.pid}` shows where" if rank.pid else ""
    return f"it is in {', '.join(calls)} itself" if calls else f"it computes, or waits elsewhere{where}"


def suspects_over_hosts(group: Group) -> list[str]:
    """Return a line for each rank of a group over several hosts that cannot run, or has not made a call that others are
    in, lowest rank first."""
    newest = max((rank for rank in group if rank.op), key=lambda rank: rank.num_ended, default=None)
    done = newest.num_ended if newest is not None else -1
    waiting = ", ".join(str(rank.rank) for rank in group if rank.op and rank.num_ended == done)
    lines = []
    for rank in group:
        if newest is not None and rank.num_made <= done and rank.health != "left":
            why = _MEANING_OVER_HOSTS.get(rank.health, "it computes, or waits elsewhere")
            if rank.health == "elsewhere":
                why = _heard_through(rank, group, done) or why
            lines.append(f"rank {rank.rank} has not made {newest.op} seq {done + 1}, for which {waiting} wait: {why}")
        elif rank.health in _MEANING_OVER_HOSTS and rank.health != "elsewhere":
            lines.append(f"rank {rank.rank} is {rank.health}: {_MEANING_OVER_HOSTS[rank.health]}")
    return lines


def _heard_through(rank: Progress, group: Group, done: int) -> str:
    """Return why this host is not notified of a rank elsewhere: its gateway here does not run; else ""."""
    gateways = [one for one in group if one.pid and one.pid == rank.gateway]
    standing = [one.rank for one in gateways if one.num_made <= done or one.health == "stopped"]
    return f"or it has, and this host hears of it through rank {standing[0]}, which stands still" if standing else ""


def _text_over_hosts(group: Group) -> str:
    lines = [f"a group over several hosts, {len(group)} ranks, as this host knows them; {_LIMITS}"]
    for rank in group:
        process = f" (process {rank.pid})" if rank.pid else ""
        more = f" and {rank.num_made - rank.num_ended - 1} more" if rank.num_made > rank.num_ended + 1 else ""
        call = f", in {rank.op} seq {rank.num_ended + 1}{more}" if rank.op else ""
        done = f"{rank.num_ended} calls ended" if rank.num_ended >= 0 else "how far it was is not known"
        lines.append(f"rank {rank.rank}{process}: {rank.health}, {done}{call}")
    return "\n".join([*lines, "", *(suspects_over_hosts(group) or ["nobody is behind"])])


def all_as_text(report: JobReport | None, groups: Sequence[Group]) -> str:
    """Return both reports for people."""
    parts = [] if report is None else [as_text(report)]
    return "\n\n".join([*parts, *map(_text_over_hosts, groups)])


def all_as_json(report: JobReport | None, groups: Sequence[Group]) -> str:
    """Return both reports as one JSON object."""
    told: dict[str, Any] = {} if report is None else json.loads(as_json(report))
    if groups:
        told["groups_over_hosts"] = [
            {"ranks": [rank._asdict() for rank in group], "suspects": suspects_over_hosts(group)} for group in groups
        ]
    return json.dumps(told, indent=2)


def as_text(report: JobReport) -> str:
    """Return the report for people: a line per rank, one per waiting call, then the ranks that are behind."""
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
                    "name": row.name,
                    "group_id": row.group_id,
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
