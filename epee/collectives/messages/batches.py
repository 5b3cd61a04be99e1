"""Which call of torch's a message belongs to: a blocking one, an asynchronous one, or a batch of them.

torch makes the messages of a `batch_isend_irecv` one by one, and says neither when it begins nor when it ends; nor does
it tell a group whether it will wait at once. Both stand on the stack, so this looks there. Who calls a group's methods
without torch's functions has made an asynchronous message.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

_TORCH = "torch."  # tensors of classes of their own come back through other modules
_C10D = "torch.distributed.distributed_c10d"
_MAX_DEPTH = 24


class MessageCaller(NamedTuple):
    """Who makes a message.

    Attributes:
        is_blocking: it is waited for at once.
        operations: of the batch that it belongs to, else empty.
        position: among those.
    """

    is_blocking: bool = False
    operations: Sequence[Any] = ()
    position: int = 0


def caller() -> MessageCaller:
    """Look at the stack."""
    frame: Any = sys._getframe(1)
    is_below = False
    for _ in range(_MAX_DEPTH):
        if frame is None:
            break
        module = frame.f_globals.get("__name__", "")
        if module == _C10D:
            is_below = True
            name = frame.f_code.co_name
            if name in ("send", "recv"):
                return MessageCaller(True)
            if name == "batch_isend_irecv":
                found = frame.f_locals
                if "reqs" not in found or "p2p_op_list" not in found:
                    return MessageCaller()  # another torch: its messages go one by one, on streams of their own
                return MessageCaller(False, found["p2p_op_list"], len(found["reqs"]))
        elif is_below and not module.startswith(_TORCH):
            break
        frame = frame.f_back
    return MessageCaller()
