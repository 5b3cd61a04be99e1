"""Detection of the torch call that a message belongs to: a blocking one, an asynchronous one, or a batch.

torch makes the messages of a `batch_isend_irecv` one by one, and reports neither its begin nor its end; nor does it
report to a group whether it will wait at once. Both can be read from the stack: first at the depth of the last batch,
then frame by frame. A call of a group's methods without torch's functions makes an asynchronous message.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ....errors import expected

_TORCH = "torch."  # tensor subclasses call back through other modules
_C10D = "torch.distributed.distributed_c10d"
_MAX_DEPTH = 24
_SEND, _RECV, _BATCH = (inspect.unwrap(call).__code__ for call in (dist.send, dist.recv, dist.batch_isend_irecv))


class MessageCaller(NamedTuple):
    """The caller of a message.

    Attributes:
        is_blocking: it is waited for at once.
        frame: of torch's function that makes the batch that it belongs to; identifies the batch.
        depth: of that frame, from the caller of `caller`.
        operations: of the batch that it belongs to, else empty.
        position: among those.
    """

    is_blocking: bool = False
    frame: Any = None
    operations: Sequence[Any] = ()
    position: int = 0
    depth: int = 0


_BLOCKING, _ALONE = MessageCaller(True), MessageCaller()
_usual = [0]  # depth of the last batch's frame


def is_below(frame: Any, depth: int) -> bool:
    """Whether a frame is at this depth on the stack, counted from the caller."""
    try:
        return sys._getframe(1 + depth) is frame
    except expected(ValueError):  # the stack is not so deep
        return False


def caller(tensor: torch.Tensor) -> MessageCaller:
    """Return the caller that makes a message of a tensor, found on the stack."""
    try:
        found = _of_batch(sys._getframe(1 + _usual[0]), _usual[0])
    except expected(ValueError):
        found = None
    if found is not None and found.operations[found.position].tensor is tensor:
        return found
    frame: Any = sys._getframe(1)
    is_torchs = False
    for depth in range(_MAX_DEPTH):
        if frame is None:
            break
        code = frame.f_code
        if code is _SEND or code is _RECV:
            return _BLOCKING
        if code is _BATCH:
            _usual[0] = depth
            return _of_batch(frame, depth) or _ALONE
        module = frame.f_globals.get("__name__", "")
        if module == _C10D:
            is_torchs = True
        elif is_torchs and not module.startswith(_TORCH):
            break
        frame = frame.f_back
    return _ALONE


def _of_batch(frame: Any, depth: int) -> MessageCaller | None:
    """Return the message made next by the batch of `frame`. Other versions of torch are not recognised: their messages
    are made one by one, on streams of their own."""
    if frame.f_code is not _BATCH:
        return None
    found = frame.f_locals
    if "reqs" not in found or "p2p_op_list" not in found:
        return None
    operations, position = found["p2p_op_list"], len(found["reqs"])
    return MessageCaller(False, frame, operations, position, depth) if position < len(operations) else None
