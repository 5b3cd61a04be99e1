"""From a latency kernel's report (numbers in pinned CPU memory) to an exception with the checked in words."""

from __future__ import annotations

from ....errors import (
    AbortedError,
    CommTimeoutError,
    EpeeError,
    InvalidArgument,
    MismatchError,
    ProtocolError,
    context,
)
from ....gpu.params import OP_NAMES
from ....gpu.report import ABORTED, BAD_COUNT, BAD_EXPERT, MISMATCH, REFUSED, TIMEOUT, take_oldest
from ....memory.signals import untag
from .params import KIND_BITS

_KINDS = {
    "dispatch": ("bfloat16", "FP8", "FP8 with round_scale", "FP8 with use_ue8m0"),
    "combine": (
        "bfloat16 partials",
        "float32 partials",
        "bfloat16 partials and topk_weights",
        "float32 partials and topk_weights",
    ),
}


def take_report(words: memoryview, rank: int) -> EpeeError | None:
    """Return the oldest unread report as an exception and mark it as read; None when there is none."""
    report = take_oldest(words)
    if report is None:
        return None
    code, tag, op, peer, expected, got, where = report
    name, seq = OP_NAMES.get(op, f"op {op}"), untag(tag)[1]
    return _describe(code, name, context(name, rank=rank, peer=peer, seq=seq), peer, (expected, got, where))


def _describe(code: int, op: str, head: str, peer: int, checked: tuple[int, int, int]) -> EpeeError:
    expected, got, where = checked
    if code == BAD_EXPERT:
        value = got - (1 << 64) if got >> 63 else got
        return InvalidArgument(
            f"{head}: topk_idx must hold expert ids below num_experts or -1 for none, got {value} at token {expected}, "
            f"k {where}; it was taken as -1"
        )
    if code == MISMATCH:
        mine, other = _kinds(op, expected, got)
        return MismatchError(
            f"{head}: ranks disagree about the call: this rank has {mine}, rank {peer} has {other}; its part was left "
            "out, all ranks must make the same calls"
        )
    if code == REFUSED:
        return MismatchError(f"{head}: rank {peer} refused the call, so its part was left out; see the error there")
    if code == TIMEOUT:
        silent = [rank for rank in range(64) if got >> rank & 1]
        return CommTimeoutError(
            f"{head}: rank {', '.join(map(str, silent))} was silent too long, so its part was left out; pass "
            "active_ranks= to continue without it, raise timeout_us= if it is only slow",
            silent,
            has_job=True,
        )
    if code == ABORTED:
        return AbortedError(f"{head}: the call was aborted")
    what = "a count" if code == BAD_COUNT else f"something (code {code})"
    return ProtocolError(f"{head}: rank {peer} sent {what} that cannot be right: {got}, limit {expected}")


def _kinds(op: str, *words: int) -> list[str]:
    """Return the descriptions of a call by two ranks, with their sizes (as a number) if those differ."""
    names, codes = _KINDS.get(op, ()), [word >> KIND_BITS for word in words]
    kinds = [word & (1 << KIND_BITS) - 1 for word in words]
    told = [names[kind] if kind < len(names) else f"kind {kind}" for kind in kinds]
    return told if codes[0] == codes[1] else [f"{name} of sizes {code}" for name, code in zip(told, codes, strict=True)]
