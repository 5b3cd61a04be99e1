"""The epee buffers behind one DeepEP buffer.

A DeepEP buffer is told bytes, or nothing; an epee `Buffer` is told what travels. So it is made at the first call, and
again, larger, when a call needs more room. Making one is collective and uses the process group; whether one must be
made is decided from numbers that are equal on all ranks, so either all ranks make it or none. Never while a CUDA graph
is recorded.

A buffer that was replaced stays open as long as a handle of it lives, then it is closed.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

from epee.compat.deep_ep.event import is_capturing
from epee.ep.bootstrap import all_gather_bytes
from epee.ep.buffer import Buffer as Core
from epee.errors import InvalidState

_WIDEST = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_LEAST_TOKENS = 128


def num_tokens_made_for(num_tokens: int) -> int:
    """Return the tokens that room is made for when so many are needed: a power of two, so that growth is rare."""
    return max(_LEAST_TOKENS, 1 << max(0, num_tokens - 1).bit_length())


@dataclass(frozen=True)
class Need:
    """What a call needs; equal on all ranks.

    Attributes:
        layout: "rank" or "expert".
        num_experts: over all ranks.
        hidden: elements of a row.
        num_topk: columns of `topk_idx`.
        num_tokens: most tokens of a rank.
        itemsize: bytes of an element that travels, there or back: 2, 4 or 8.
        device: of the tensors.
    """

    layout: str
    num_experts: int
    hidden: int
    num_topk: int
    num_tokens: int
    itemsize: int
    device: torch.device


class Room:
    """An epee buffer that is closed when nobody refers to the room any more.

    Attributes:
        core: the buffer.
        num_tokens: that it has room for.
        itemsize: bytes of its widest element.
    """

    def __init__(self, core: Core, num_tokens: int, itemsize: int) -> None:
        self.core = core
        self.num_tokens = num_tokens
        self.itemsize = itemsize
        self._closer = weakref.finalize(self, core.close)
        self._closer.atexit = False

    def fits(self, need: Need) -> bool:
        """Tell whether a call that needs so much can be made here."""
        return need.num_tokens <= self.num_tokens and need.itemsize <= self.itemsize


class Rooms:
    """The rooms of one DeepEP buffer.

    Args:
        group: of the ranks.
        timeout: seconds that a call waits for a silent peer; None for epee's default.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None = None) -> None:
        self.group = group
        self._timeout = timeout
        self._rooms: dict[tuple[object, ...], Room] = {}
        self._last: Room | None = None
        self._is_closed = False

    @property
    def nbytes(self) -> int:
        """Bytes that the rooms in use map."""
        return sum(room.core.nbytes for room in self._rooms.values())

    def room(self, need: Need) -> Room:
        """Return the room for a call. Collective when one must be made or grown, which all ranks find alike."""
        self.check_open()
        key = (need.layout, need.num_experts, need.hidden, need.num_topk, need.device)
        old = self._rooms.get(key)
        if old is not None and old.fits(need):
            return old
        if is_capturing():
            raise InvalidState(
                "this buffer must grow, which it cannot while a CUDA graph is recorded; "
                "make one call of this shape first"
            )
        num_tokens = num_tokens_made_for(need.num_tokens)
        itemsize = need.itemsize
        if old is not None:
            num_tokens, itemsize = max(num_tokens, old.num_tokens), max(itemsize, old.itemsize)
        num_ranks = self.group.size()
        per_token = min(need.num_topk, need.num_experts // num_ranks) if need.layout == "expert" else 1
        core = Core(
            self.group,
            num_experts=need.num_experts,
            hidden=need.hidden,
            num_topk=need.num_topk,
            max_tokens_per_rank=num_tokens,
            dtype=_WIDEST[itemsize],
            device=None if need.device.type == "cpu" else need.device,
            max_recv_rows=num_ranks * num_tokens * per_token,
            timeout=self._timeout,
        )
        self._last = self._rooms[key] = Room(core, num_tokens, itemsize)
        return self._last

    def share(self, data: bytes) -> list[bytes]:
        """Return everybody's `data` (equally long, not empty), in rank order. Collective."""
        self.check_open()
        if self._last is None:
            return all_gather_bytes(self.group, data)
        return self._last.core.all_gather_bytes(data)

    def refuse(self, error: Exception) -> None:
        """Let the peers' next call fail at once because of `error`, where there is a room to tell them through."""
        if self._last is not None and not self._is_closed:
            self._last.core.refuse(error)

    def check_open(self) -> None:
        """Raise `InvalidState` after `close`."""
        if self._is_closed:
            raise InvalidState("the buffer is destroyed; make a new one")

    def close(self) -> None:
        """Close the rooms in use; one that was replaced is closed with its last handle. Local, idempotent."""
        self._is_closed = True
        for room in self._rooms.values():
            room.core.close()
        self._rooms.clear()
        self._last = None
