"""What a process group tells those who build on it about its part in the view of its job. Plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .protocol.messages import Member
from .runtime import Runtime


class GroupInView(NamedTuple):
    """A group's part in the view of its job: what a buffer on the group needs to know.

    Attributes:
        runtime: the control plane of this process.
        lane: id of the group.
        slots: of each rank in the job.
        raises: a loss is an error (mode "raise").
        on_stall: "error", "evict" or "wait".
        known: incarnation of each slot that has a part in the group.
        takes_part: whether a process that comes later has a part in the group.
        is_joiner: this process took a lost rank's place.
        job: to be retained as long as the buffer lives.
    """

    runtime: Runtime
    lane: int
    slots: tuple[int, ...]
    raises: bool
    on_stall: str
    known: dict[int, int]
    takes_part: Callable[[Member], bool]
    is_joiner: bool
    job: Any
