"""The part of a process group in the view of its job, for the code that builds on the group. Plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from ..errors import InvalidArgument
from ..values import shown
from .protocol.messages import Member
from .runtime import Runtime

FAULT_MODES = ("raise", "mask")
STALL_POLICIES = ("error", "evict", "wait")


def check_policy(fault_mode: str | None, on_stall: str | None, has_mask: bool = False) -> tuple[str, str]:
    """Return the policies for losses and for silent ranks, with the defaults filled in.

    Args:
        fault_mode: "raise" (the default): a loss is an error; "mask": calls go on without the lost ranks.
        on_stall: "error": a timeout is an error; "evict": silent ranks are evicted; "wait". By default "evict" in mode
        "mask", "error" in mode "raise".
        has_mask: the caller has a mask of active ranks, so the mode is "mask".

    Raises:
        InvalidArgument: one of them is something else.
    """
    if fault_mode is not None and fault_mode not in FAULT_MODES:
        raise InvalidArgument(f"fault_mode must be one of {FAULT_MODES}, got {shown(fault_mode)}")
    if on_stall is not None and on_stall not in STALL_POLICIES:
        raise InvalidArgument(
            f"on_stall must be one of {STALL_POLICIES}, got {shown(on_stall)}; None lets the mode choose"
        )
    mode = "mask" if has_mask else fault_mode or "raise"
    return mode, on_stall or ("evict" if mode == "mask" else "error")


@dataclass(frozen=True)
class GroupInView:
    """A group's part in the view of its job, as a buffer on the group needs it.

    Attributes:
        runtime: the control plane of this process.
        group_id: id of the group.
        slots: of each rank in the job.
        raises: a loss is an error (mode "raise").
        on_stall: "error", "evict" or "wait".
        known: incarnation of each slot that has a part in the group.
        takes_part: whether a process that joins later has a part in the group.
        is_joiner: this process replaced a lost rank.
        is_open: processes can replace lost ranks.
        job: to be retained as long as the buffer lives.
        spans: the group runs over several hosts, or began so.
    """

    runtime: Runtime
    group_id: int
    slots: tuple[int, ...]
    raises: bool
    on_stall: str
    known: dict[int, int]
    takes_part: Callable[[Member], bool]
    is_joiner: bool
    is_open: bool
    job: Any
    spans: bool = False


# of a group that is in no view: one of another backend; it has no slots, and no process joins it
NO_VIEW = GroupInView(cast(Any, None), 0, (), True, "error", {}, lambda _: False, False, False, None)


def in_no_view(num_ranks: int) -> GroupInView:
    """Return the part of a group that is in no view."""
    return NO_VIEW
