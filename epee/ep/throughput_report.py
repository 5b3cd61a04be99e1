"""From a kernel's report (numbers in pinned host memory) to an exception with the facts in words."""

from __future__ import annotations

from ..errors import (
    AbortedError,
    CommTimeoutError,
    EpeeError,
    InvalidArgument,
    MismatchError,
    ProtocolError,
    context,
)
from ..memory.signals import untag
from .throughput_params import NUM_REPORTS, OP_NAMES, REPORT_WORDS

TIMEOUT, ABORTED, MISMATCH, REFUSED, OVERFLOW, BAD_COUNT, BAD_EXPERT, BAD_ROW = range(1, 9)
# Why a rank's call was refused; the code travels, the words stay at home.
REFUSED_INVALID_ARGUMENT = 1
_REFUSALS = {REFUSED_INVALID_ARGUMENT: "an argument was invalid", BAD_EXPERT: "topk_idx holds a bad expert id"}
_WAITS = {
    0: "its counts",
    1: "its rows",
    2: "more of its rows",
    3: "its expert output",
    4: "a copied row",
    5: "the end of its reading",
    6: "its arrival",
    9: "a load of this GPU",
}


def take_report(words: memoryview) -> EpeeError | None:
    """Return the oldest unread report as an exception and mark it as read; None when there is none."""
    pending = [i for i in range(NUM_REPORTS) if words[i * REPORT_WORDS]]
    if not pending:
        return None
    at = min(pending, key=lambda i: words[i * REPORT_WORDS + 1]) * REPORT_WORDS
    code, tag, op, peer, expected, got, where = words[at : at + 7]
    words[at] = 0
    return _describe(code, tag, OP_NAMES.get(op, f"op {op}"), _signed(peer), (expected, _signed(got), where))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _describe(code: int, tag: int, op: str, peer: int, facts: tuple[int, int, int]) -> EpeeError:
    expected, got, where = facts
    seq = untag(tag)[1]
    head = context(op, peer=peer, seq=seq)
    if code == TIMEOUT:
        waited = _WAITS.get(where, f"wait {where}")
        seen = f"expected call {untag(expected)[1]}, got {untag(got)[1]}"
        return CommTimeoutError(f"{head}: rank {peer} was silent too long while waiting for {waited} ({seen})", [peer])
    if code == ABORTED:
        return AbortedError(f"{head}: the call was aborted while waiting for rank {peer}")
    if code == MISMATCH:
        return MismatchError(
            f"{head}: rank {peer} makes another call or passes other layout, dtype, hidden, top-k or handle; "
            "all ranks must agree"
        )
    if code == REFUSED:
        reason = _REFUSALS.get(got, f"code {got}")
        return MismatchError(f"{head}: rank {peer} refused the call, {reason}; see the error there")
    if code == OVERFLOW:
        layout = "expert" if where else "rank"
        return InvalidArgument(
            f"{head}: rank {peer} would receive {got} rows, its {layout} layout holds {expected}; "
            f"make the buffer with max_recv_rows={got} or more, or dispatch fewer tokens"
        )
    if code == BAD_EXPERT:
        return InvalidArgument(
            f"{head}: topk_idx must hold expert ids below num_experts or -1 for none, "
            f"got {got} at token {expected}, k {where}"
        )
    what = "a count" if code == BAD_COUNT else "a row number"
    return ProtocolError(f"{head}: rank {peer} sent {what} that cannot be right: {got}, limit {expected}")
