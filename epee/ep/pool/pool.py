"""The buffers behind one object of a drop-in layer: made at the first call that needs them, and again, larger.

An epee buffer is told what travels; other libraries' buffers are told bytes, or nothing. So a pool makes a buffer at
the first call of a shape. Making one is collective and uses the process group; whether one must be made is decided
from numbers that are equal on all ranks, so either all ranks make it or none. Never while a CUDA graph is recorded.

A `Buffer` is made anew when a call needs more room (`Room`); the one that was replaced stays open as long as a handle
of it lives, then it is closed. A `LatencyBuffer` has exactly the sizes of its calls, and never grows.
"""

from __future__ import annotations

import logging
import weakref

import torch
import torch.distributed as dist

from ...errors import EpeeError, InvalidState
from ..base import SharedBuffer
from ..buffer import Buffer
from ..control.bootstrap import all_gather_bytes
from ..gpu.report import NoRoomError
from ..latency.buffer import LatencyBuffer
from ..streams import Lane, Lanes, RunOptions, is_capturing
from . import agreement
from .latency import LatencyRooms
from .needs import LatencyNeed, Need, Wish, num_tokens_made_for

_log = logging.getLogger(__name__)
_WIDEST = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class Room:
    """A `Buffer` that is closed when nobody refers to the room any more.

    Attributes:
        core: the buffer.
        num_tokens: that it has room for.
        itemsize: bytes of its widest element.
    """

    def __init__(self, core: Buffer, num_tokens: int, itemsize: int) -> None:
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
        most = self.core.max_num_sms
        return min(wanted, most) if wanted > 0 and most else None


class BufferPool:
    """The buffers of one object of a drop-in layer.

    Args:
        group: of the ranks.
        timeout: seconds that a call waits for a silent peer; None for epee's default.
        latency_bytes: of memory for low-latency calls, made now.

    Attributes:
        group: of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None = None, latency_bytes: int = 0) -> None:
        self.group = group
        self._timeout = timeout
        self._rooms: dict[tuple[object, ...], Room] = {}
        self._last: Room | None = None
        self._lanes: dict[torch.device, Lanes] = {}
        self._is_closed = False
        self._latency = LatencyRooms(group, timeout, latency_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes that the buffers in use map."""
        return sum(core.nbytes for core in self._cores())

    def room(self, need: Need) -> Room:
        """Return the room for a call. Collective when one must be made or grown, which all ranks find alike.

        Raises:
            InvalidState: the pool is closed, or room must be made while a CUDA graph is recorded.
        """
        self._check_open()
        room = self._find(need)
        self._join_others(room)
        return room

    def standing_room(self, need: Need) -> Room | None:
        """Return the room in which calls of this shape are made without asking the ranks first.

        All ranks find alike whether there is one, as rooms are made by all. Where this rank's call does not fit, the
        others are told so in their call, which raises `NoRoomError` there: then all `agree`, and make more room.

        Args:
            need: of this rank's call alone.

        Returns:
            None: all ranks must `agree` first.
        """
        self._check_open()
        room = self._rooms.get(_key(need))
        if room is None:
            return None
        if not room.fits(need):
            room.core.refuse(NoRoomError("a rank has more tokens than the buffer has room for"))
            return None
        self._last = room
        self._join_others(room)
        return room

    def latency_buffer(self, need: LatencyNeed, active_ranks: torch.Tensor | None = None) -> LatencyBuffer:
        """Return the buffer for a call. Collective when more memory must be made, and behind `meet_again`.

        Args:
            need: of the call.
            active_ranks: the call's mask, `[num_ranks or more]` int32; behind `meet_again` who does not come is taken
                out of it.

        Raises:
            InvalidState: the pool is closed.
            InvalidArgument: more memory must be made while a CUDA graph is recorded, or when a rank is lost.
        """
        self._check_open()
        return self._latency.buffer(need, active_ranks)

    def meet_again(self) -> None:
        """Let the next call of each latency buffer begin with who is in the group then. All ranks call it; handles end.

        On a group of the backend "epee" it begins with `sync`, which takes in those who took the places of lost ranks;
        on others with a new buffer. Whom the ranks do not agree on there is taken out of that call's mask.
        """
        self._latency.meet_again()

    def agree(self, wish: Wish) -> list[Wish]:
        """Return what all ranks are about to dispatch, in rank order. Collective.

        Raises:
            MismatchError: the wishes do not fit together, or a rank was refused; the same text on all others.
            InvalidArgument: `num_worst_tokens` is too small for some rank; the same text on all.
        """
        return agreement.conclude(self._share(agreement.pack_wish(wish)))

    def refuse_wish(self, error: Exception, is_gpu: bool = False) -> None:
        """Take part in the peers' `agree` as the rank whose arguments are wrong; `error` is what the caller raises.

        With tensors of a GPU and a room there, the peers do not ask, but call: in the room that was used last, or so
        it seems to a rank that cannot tell its own call's shape.
        """
        if is_gpu and self._last is not None:
            self.refuse(error)
            return
        try:
            self._share(agreement.pack_refusal(self.group.size(), error))
        except EpeeError as problem:
            _log.warning("could not tell the peers about a refused call: %s", problem)

    def refuse(self, error: Exception) -> None:
        """Let the peers' next call fail at once because of `error`, where there is a room to tell them through."""
        if self._last is not None and not self._is_closed:
            self._last.core.refuse(error)

    def sum_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of `counts`, `[n]` integers, as `[n]` int64 on the CPU. Collective."""
        mine = counts.to("cpu", torch.int64).contiguous()
        parts = self._share(mine.numpy().tobytes())
        return sum((torch.frombuffer(bytearray(part), dtype=torch.int64) for part in parts), torch.zeros_like(mine))

    def barrier(self) -> bool:
        """Let the ranks meet on the current stream by one kernel; False where there is no room on a GPU. Collective.

        All rooms are made by all ranks, so all find the same one.
        """
        self._check_open()
        room = next((room for room in self._rooms.values() if room.core.config.is_cuda), None)
        if room is None:
            return False
        self._join_others(room)
        room.core.barrier()
        return True

    def host_barrier(self) -> None:
        """Let the ranks' host threads meet. Collective."""
        self._share(b"b")

    def check(self) -> None:
        """Raise what has gone wrong on this rank's GPU since the last call."""
        for core in self._cores():
            core.check()

    def is_gpu(self, device: torch.device) -> bool:
        """Whether tensors of this device travel by GPU kernels."""
        return device.type == "cuda"

    def lane(self, device: torch.device, async_op: bool, previous_event: torch.cuda.Event | None) -> Lane:
        """Return where a call with tensors of `device` runs, with all that its caller computes around it.

        Args:
            device: of the tensors.
            async_op: on `own_stream`, else on the current stream.
            previous_event: waited for first.
        """
        return self._lanes_of(device).lane(RunOptions(async_op=async_op, previous_event=previous_event))

    def own_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of calls that are asked for an event."""
        return self._lanes_of(device).own_stream()

    def close(self) -> None:
        """Close what is in use; a room that was replaced is closed with its last handle. Local, idempotent."""
        self._is_closed = True
        for core in self._cores():
            core.close()
        self._rooms.clear()
        self._latency.close()
        self._last = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidState("the buffer is destroyed; make a new one")

    def _cores(self) -> list[SharedBuffer]:
        return [*(room.core for room in self._rooms.values()), *self._latency.wholes]

    def _lanes_of(self, device: torch.device) -> Lanes:
        return self._lanes.setdefault(device, Lanes(device))

    def _join_others(self, room: Room) -> None:
        """Let a call in `room` run behind those in others: the calls of one pool's rooms run one after another."""
        for other in self._rooms.values() if len(self._rooms) > 1 else ():
            if other is not room:
                other.core.join()

    def _find(self, need: Need) -> Room:
        key = _key(need)
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
        self._last = self._rooms[key] = Room(self._make(need, num_tokens, itemsize), num_tokens, itemsize)
        return self._last

    def _make(self, need: Need, num_tokens: int, itemsize: int) -> Buffer:
        return Buffer(
            self.group,
            num_experts=need.num_experts,
            hidden=need.hidden,
            num_topk=need.num_topk,
            max_tokens_per_rank=num_tokens,
            dtype=_WIDEST[itemsize],
            device=None if need.device.type == "cpu" else need.device,
            max_recv_rows=need.num_rows_of(self.group.size(), num_tokens),
            timeout=self._timeout,
        )

    def _share(self, data: bytes) -> list[bytes]:
        """Return everybody's `data` (equally long, not empty), in rank order. Collective."""
        self._check_open()
        if self._last is None:
            return all_gather_bytes(self.group, data)
        return self._last.core.all_gather_bytes(data)


def _key(need: Need) -> tuple[object, ...]:
    """Return what calls in one room have in common."""
    return need.layout, need.num_experts, need.hidden, need.num_topk, need.device, need.num_rows
