"""The job of the ranks of a buffer, as a buffer sees it. Nothing here waits or changes state."""

from __future__ import annotations

from typing import Any

from ..view.founding import GroupHandle
from ..view.group import GroupInView, in_no_view
from ..view.protocol.messages import Member
from ..view.transport.wire import parse_endpoint


def job_handle_of(group: Any, num_ranks: int) -> GroupInView:
    """Return the job handle of a group; `NO_VIEW` for groups of other backends than "epee"."""
    found: GroupInView = getattr(group, "in_view", in_no_view)(num_ranks)
    return found


def job_handle_at(place: GroupHandle, fault_mode: str, on_stall: str) -> GroupInView:
    """Return the job handle of a buffer on a group of another backend, which no process can join.

    Args:
        place: found by the group's ranks.
        fault_mode, on_stall: policies of the buffer.
    """
    job_handle = place.job_handle
    return GroupInView(
        job_handle.job.runtime,
        job_handle.group_id,
        tuple(job_handle.slots),
        fault_mode == "raise",
        on_stall,
        dict(zip(job_handle.slots, place.incarnations, strict=True)),
        lambda _: False,
        False,
        False,
        job_handle.job,
    )


def process_of(member: Member) -> tuple[int, int]:
    """Return the pid and start time of a member's process."""
    endpoint = parse_endpoint(member.endpoint)
    return endpoint.pid, endpoint.start_time
