"""What an error says to programs that use DeepEP's names: what there is to do without the calls that it names."""

from __future__ import annotations

from epee.errors import EpeeError

_OURS = ("sync()", "active_ranks")  # epee's ways to go on, which DeepEP's buffers have not

NORMAL = (
    "DeepEP's buffers have no sync: when recover_ranks has taken in who took the lost place, or on a new_group of who "
    "is left, all ranks make a new one"
)
LOW_LATENCY = (
    "DeepEP's low-latency calls have neither active_ranks nor sync: make the buffer with enable_shrink=True, which "
    "masks a rank that does not come, or a new one on all ranks"
)


def add_advice(error: EpeeError, advice: str) -> None:
    """Add `advice` to the text of an error that names what DeepEP's buffers have not."""
    if any(name in str(error) for name in _OURS):
        error.args = (f"{error}. {advice}", *error.args[1:])
