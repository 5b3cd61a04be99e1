"""What a process group tells those who build on it about its part in the view of its job. Plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidArgument
from ..values import shown
from .protocol.messages import Member
from .runtime import Runtime

FAULT_MODES = ("raise", "mask")
STALL_POLICIES = ("error", "evict", "wait")


def check_policy(fault_mode: str | None, on_stall: str | None, has_mask: bool = False) -> tuple[str, str]:
    """Return what happens at a loss, and to who is silent, with the defaults filled in.

    Args:
        fault_mode: "raise" (the default): a loss is an error; "mask": calls go on without the lost.
        on_stall: "error": a time-out is an error; "evict": who is silent is voted out; "wait". By default "evict" in
            mode "mask", "error" in mode "raise".
        has_mask: the caller has a mask of active ranks, so the mode is "mask".

    Raises:
        InvalidArgument: one of them is something else.
    """
    if fault_mode is not None and fault_mode not in FAULT_MODES:
        raise InvalidArgument(f"fault_mode must be one of {FAULT_MODES}, got {shown(fault_mode)}")
    if on_stall is not None and on_stall not in STALL_POLICIES:
        raise InvalidArgument(f"on_stall must be one of {STALL_POLICIES}, got {shown(on_stall)}")
    mode = "mask" if has_mask else fault_mode or "raise"
    return mode, on_stall or ("evict" if mode == "mask" else "error")


@dataclass(frozen=True)
class GroupInView:
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
        is_open: processes can take lost ranks' places.
        job: to be retained as long as the buffer lives.
        spans: the group runs over several hosts, or began so.
    """

    runtime: Runtime
    lane: int
    slots: tuple[int, ...]
    raises: bool
    on_stall: str
    known: dict[int, int]
    takes_part: Callable[[Member], bool]
    is_joiner: bool
    is_open: bool
    job: Any
    spans: bool = False
