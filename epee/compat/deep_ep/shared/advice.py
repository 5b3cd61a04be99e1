"""Advice in error messages for programs that use DeepEP's names: alternatives to epee calls that these lack."""

from __future__ import annotations

from epee.errors import EpeeError

_OURS = ("sync()", "active_ranks")  # epee's calls to continue after a failure, which DeepEP's buffers do not have

NORMAL = (
    "DeepEP's buffers have no sync: when recover_ranks has replaced the lost rank, or on a new_group of who "
    "is left, all ranks make a new one"
)
LOW_LATENCY = (
    "DeepEP's low-latency calls have neither active_ranks nor sync: make the buffer with enable_shrink=True, which "
    "masks a rank that does not come, or a new one on all ranks"
)


def add_advice(error: EpeeError, advice: str) -> None:
    """Add `advice` to the text of an error that names calls which DeepEP's buffers do not have."""
    if any(name in str(error) for name in _OURS):
        error.args = (f"{error}. {advice}", *error.args[1:])
