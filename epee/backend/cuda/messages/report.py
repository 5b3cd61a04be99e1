"""Conversion of the message kernels' reports (numbers in pinned cpu memory) to exceptions with readable messages."""

from __future__ import annotations

import torch

from ....engine.tensors import CARRIERS
from ....errors import (
    AbortedError,
    CommTimeoutError,
    EpeeError,
    MismatchError,
    ProtocolError,
    RankFailedError,
    context,
)
from ....gpu.report import ABORTED, MISMATCH, PEER_DEAD, PEER_GAVE_UP, TIMEOUT, KernelReport
from .params import OPS

_WAITS = {1: "a message", 2: "the rest of a message", 3: "room in the ring", 4: "a message"}
_TAG, _BYTES, _DTYPE = 5, 6, 7
_ANEW = "the pair works again when both ranks have met, at the next message between them"
_DTYPES = {carrier.code: str(dtype).removeprefix("torch.") for dtype, carrier in CARRIERS.items()}


def error_of(report: KernelReport, rank: int) -> EpeeError:
    """Return a report as an exception."""
    code, _, op, peer, expected, got, where = report
    name = OPS[op - 1] if 1 <= op <= len(OPS) else f"op {op}"
    ends = {"dst_rank": peer} if name == "send" else {"src_rank": peer if peer < 1 << 63 else "any"}
    head = context(name, rank=rank, **ends, **({} if code == MISMATCH else {"tag": expected}))
    peers = [] if peer >= 1 << 63 else [peer]
    what = _WAITS.get(where, f"wait {where}")
    if code == MISMATCH:
        return MismatchError(
            f"{head}: rank {rank} has {_fact(where, expected)}, rank {peer} has {_fact(where, got)}; on GPUs a receive "
            f"takes its source's next message, whatever its tag; make sender and receiver agree; {_ANEW}"
        )
    if code == TIMEOUT and not peers:
        return CommTimeoutError(f"{head}: no message with this tag from any rank within the time-out", has_job=True)
    if code == TIMEOUT:
        return CommTimeoutError(f"{head}: {what} of rank {peer} did not arrive within the time-out; {_ANEW}", peers)
    if code == PEER_DEAD:
        return failed(report, rank, peer)
    if code == PEER_GAVE_UP:
        text = f"{head}: rank {peer} has given up a message between the two; this one is lost, too; {_ANEW}"
        return CommTimeoutError(text, peers, has_job=True)
    if code == ABORTED:
        return AbortedError(f"{head}: the message was aborted, waiting for {what}")
    return ProtocolError(f"{head}: the kernel reports code {code} about {what}")


def failed(report: KernelReport, rank: int, peer: int) -> RankFailedError:
    """Return the error of a message to or from rank `peer`, which has died."""
    name = OPS[report.op - 1] if 1 <= report.op <= len(OPS) else "message"
    return RankFailedError(
        f"{context(name, rank=rank, peer=peer, tag=report.expected)}: rank {peer} is dead (its process ended); the "
        "message is lost, as is what the tensor held",
        [peer],
        name,
        0,
        cause="process ended",
    )


def _fact(where: int, value: int) -> str:
    if where == _TAG:
        return f"tag {value}"
    if where == _BYTES:
        return f"{value} bytes"
    return f"dtype {_DTYPES.get(value, value)}" if where == _DTYPE else f"{value}"


def number_of(dtype: torch.dtype) -> int:
    """Return the number by which kernels know a dtype."""
    return CARRIERS[dtype].code
