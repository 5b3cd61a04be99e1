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
from epee.ep.buffer import Buffer as Core
from epee.ep.control.bootstrap import all_gather_bytes
from epee.ep.streams import Lanes
from epee.errors import InvalidState

_WIDEST = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_LEAST_TOKENS = 128
BALANCED_SHARES = 2  # rows of an expanded room on a GPU, in rows that a rank gets when experts are equally busy


def num_tokens_made_for(num_tokens: int) -> int:
    """Return the tokens that room is made for when so many are needed: a power of two, so that growth is rare."""
    return max(_LEAST_TOKENS, 1 << max(0, num_tokens - 1).bit_length())


@dataclass(frozen=True)
class Need:
    """What a call needs; equal on all ranks.

    Attributes:
        layout: "rank", "expert", or "both".
        num_experts: over all ranks.
        hidden: elements of a row.
        num_topk: columns of `topk_idx`.
        num_tokens: most tokens of a rank.
        itemsize: bytes of an element that travels, there or back: 2, 4 or 8.
        device: of the tensors.
        num_rows: of a result of the rank layout that is returned in full capacity; 0 when that must not be exact.
    """

    layout: str
    num_experts: int
    hidden: int
    num_topk: int
    num_tokens: int
    itemsize: int
    device: torch.device
    num_rows: int = 0


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

    def num_sms(self, wanted: int) -> int | None:
        """Return the multiprocessors of a call that is asked to use `wanted`; 0 is the default."""
        return min(wanted, self.core.max_num_sms) if wanted > 0 and self.core.max_num_sms else None


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
        self._lanes: dict[torch.device, Lanes] = {}
        self._is_closed = False

    @property
    def nbytes(self) -> int:
        """Bytes that the rooms in use map."""
        return sum(room.core.nbytes for room in self._rooms.values())

    def room(self, need: Need) -> Room:
        """Return the room for a call. Collective when one must be made or grown, which all ranks find alike."""
        self.check_open()
        room = self._find(need)
        self._join_others(room)
        return room

    def _join_others(self, room: Room) -> None:
        """Let a call in `room` run behind those in others: the calls of one DeepEP buffer run one after another."""
        for other in self._rooms.values():
            if other is not room:
                other.core.join()

    def _find(self, need: Need) -> Room:
        key = (need.layout, need.num_experts, need.hidden, need.num_topk, need.device, need.num_rows)
        old = self._rooms.get(key)
        if old is not None and old.fits(need):
            return old
        if is_capturing():
            raise InvalidState(
                "this buffer must grow, which it cannot while a CUDA graph is recorded; "
                "make one call of this shape first"
            )
        num_tokens = need.num_tokens if need.num_rows else num_tokens_made_for(need.num_tokens)
        itemsize = need.itemsize
        if old is not None:
            num_tokens, itemsize = max(num_tokens, old.num_tokens), max(itemsize, old.itemsize)
        core = Core(
            self.group,
            num_experts=need.num_experts,
            hidden=need.hidden,
            num_topk=need.num_topk,
            max_tokens_per_rank=num_tokens,
            dtype=_WIDEST[itemsize],
            device=None if need.device.type == "cpu" else need.device,
            max_recv_rows=self._num_rows(need, num_tokens),
            timeout=self._timeout,
        )
        self._last = self._rooms[key] = Room(core, num_tokens, itemsize)
        return self._last

    def _num_rows(self, need: Need, num_tokens: int) -> int:
        """Return the rows that a room holds: the worst case, but on GPUs not more than twice a balanced share.

        On the CPU rows that nobody sends cost nothing. On a GPU they are memory, and an expanded worst case would be
        many times what a call brings; a routing that needs more is an error on all ranks.
        """
        num_ranks = self.group.size()
        if need.layout == "rank":
            return need.num_rows or num_ranks * num_tokens
        worst = num_ranks * num_tokens * min(need.num_topk, need.num_experts // num_ranks)
        if need.layout == "expert":
            return worst
        return max(num_ranks * num_tokens, min(worst, BALANCED_SHARES * need.num_topk * num_tokens))

    def is_gpu(self, device: torch.device) -> bool:
        """Whether tensors of this device travel by GPU kernels."""
        return device.type == "cuda"

    def lanes(self, device: torch.device) -> Lanes:
        """Return the streams of calls with tensors of a device."""
        return self._lanes.setdefault(device, Lanes(device))

    def barrier(self) -> bool:
        """Let the ranks meet on the current stream by one kernel; False where there is no room on a GPU. Collective.

        All rooms are made by all ranks, so all find the same one.
        """
        self.check_open()
        room = next((room for room in self._rooms.values() if room.core.config.is_cuda), None)
        if room is None:
            return False
        self._join_others(room)
        room.core.barrier()
        return True

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

    def check(self) -> None:
        """Raise what has gone wrong on this rank's GPU since the last call."""
        for room in self._rooms.values():
            room.core.check()

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
