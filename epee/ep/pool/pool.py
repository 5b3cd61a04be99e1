"""The buffers of one object of a drop-in layer, and the messages between the ranks of its calls.

An epee buffer is given the sizes of its calls; other libraries' buffers are given bytes, or nothing. So a pool makes
memory at construction, if the size is given, and finds or makes the buffer of each call: `throughput.py` those of
normal calls, `latency.py` those of low-latency ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from ...arrays import array_of
from ...errors import EpeeError, InvalidState, expected
from ...torch_private import metadata_check_of
from ..base import SharedBuffer
from ..handle import Payload
from ..latency.buffer import LatencyBuffer
from ..members.bootstrap import all_gather_bytes, hosts_of, refuse_to_make
from ..streams import CallStream, CallStreams, RunOptions
from . import agreement
from .latency import LatelyKey, LatencyRooms, current_gpu
from .needs import LatencyNeed, Need, Wish
from .throughput import NO_MEMORY, Like, MemoryBytes, Room, ThroughputRooms

_log = logging.getLogger(__name__)


class BufferPool:
    """The buffers of one object of a drop-in layer.

    Args:
        group: of the ranks.
        timeout: seconds that a call waits for a silent peer; None for epee's default.
        memory: for normal calls on the current GPU, made now; nothing without a GPU.
        latency_bytes: of memory for low-latency calls, made now.
        wide_partials: of normal calls on CPUs, as of `Buffer`.
        meets: another pool on the group, and `meet_again` of this one, are one step, as of `LatencyRooms`.

    Attributes:
        group: of the ranks.
        hosts: per host its ranks; found by a round over the group if the group does not know it, so making a pool is
            collective.
        recall, latest: return the cached way to make calls with a key, or with tensors of equal properties (`Like`), or
            None; see `ThroughputRooms`.

    Raises:
        UnsupportedError: memory on GPUs of several hosts.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: float | None = None,
        memory: MemoryBytes = NO_MEMORY,
        latency_bytes: int = 0,
        wide_partials: bool = False,
        meets: bool = False,
    ) -> None:
        self.group = group
        self.hosts = hosts_of(group)
        self._rooms = ThroughputRooms(group, timeout, memory, current_gpu(), wide_partials)
        self.recall: Callable[[object], Like | None] = self._rooms.recall
        self.latest: Callable[..., Like | None] = self._rooms.latest
        self._call_streams: dict[torch.device, CallStreams] = {}
        self._is_closed = False
        self._latency = LatencyRooms(group, timeout, latency_bytes, meets)

    @property
    def nbytes(self) -> int:
        """Bytes that the buffers in use map."""
        return sum(core.nbytes for core in self._cores())

    def room(self, need: Need) -> Room:
        """Return the room for a call. Collective when one must be made or grown, which all ranks find alike.

        Raises:
            InvalidState: the pool is closed.
            InvalidArgument: room must be made while a CUDA graph is recorded.
        """
        self._check_open()
        return self._rooms.find(need, self.is_gpu(need.device))

    def standing_room(self, need: Need) -> Room | None:
        """Return the room on a GPU in which calls of this shape are made without asking the ranks first.

        All ranks find alike whether there is one, as memory is made by all. If this rank's call does not fit, the
        others are notified in their call, which raises `NoRoomError` there: then all `agree`, and make more room.

        Args:
            need: of this rank's call alone.

        Returns:
            None: all ranks must `agree` first.
        """
        self._check_open()
        return self._rooms.standing(need)

    @property
    def stands(self) -> bool:
        """Whether there is memory on a GPU, so that calls there may be made without asking the ranks first. All ranks
        find the same.
        """
        return self._rooms.whole is not None

    def refuse_standing(self, error: Exception) -> None:
        """Make the peers' next call on the GPU, where the pool `stands`, fail at once because of `error`.

        A `NoRoomError` asks them to agree first: they raise it in that call, and all ranks then exchange their needs.
        """
        self._rooms.refuse_standing(error)

    def remember(
        self,
        key: object,
        room: Room,
        given: tuple[Payload, torch.Tensor, torch.Tensor],
        options: tuple[tuple[str, int], int | None, bool],
        extra: object,
        looks: tuple[object, tuple[object, ...]],
    ) -> None:
        """Cache how calls with this key are made, after one of them in a room that all ranks find without asking.

        Args:
            key: equal for calls for whose tensors `checked_topk` and whose options are equal.
            room: of the call.
            given: its x, topk_idx and topk_weights.
            options: its layout and expert_alignment, num_sms, and sync.
            extra: for the caller.
            looks: options and tensors by which `latest` is to find such calls.
        """
        dispatch = room.core.dispatches_like(*given, *options)
        if dispatch is not None:
            self._rooms.remember(key, Like(room, dispatch, extra, looks[0], metadata_check_of(*looks[1])))

    def latency_buffer(self, need: LatencyNeed, active_ranks: torch.Tensor | None = None) -> LatencyBuffer:
        """Return the buffer for a call. Collective when more memory must be made, and after `meet_again`.

        Args:
            need: of the call.
            active_ranks: the call's mask, `[num_ranks or more]` int32; after `meet_again` a rank that is no member is
                cleared in it.

        Raises:
            InvalidState: the pool is closed.
            InvalidArgument: more memory must be made while a CUDA graph is recorded, or when a rank is lost.
        """
        self._check_open()
        core = self._latency.buffer(need, active_ranks)
        if self.is_gpu(need.device):
            sizes = need.max_tokens, need.num_experts
            self._latency.lately[sizes, (need.hidden,), (need.num_topk,)] = core
        return core

    @property
    def lately(self) -> Mapping[LatelyKey, LatencyBuffer]:
        """The last result of `latency_buffer` for calls on GPUs of so many tokens at most and so many experts, of rows
        and of ids of such shapes, as long as it would return that again. It fits a call only if that equals an earlier
        one (`LatencyBuffer.again`).
        """
        return self._latency.lately

    def meet_again(self) -> None:
        """Make the next call of each latency buffer begin with the group's current members. Collective; handles end.

        On a group of the backend "epee" it begins with `sync`, which admits processes that replace lost ranks; on
        others with a new buffer. Ranks that are not agreed on there are cleared in that call's mask.
        """
        self._latency.meet_again()

    def agree(self, wish: Wish) -> list[Wish]:
        """Return what all ranks are about to dispatch, in rank order. Collective.

        Raises:
            MismatchError: the requests do not fit together, or a rank was refused; the same text on all others.
            InvalidArgument: `num_worst_tokens` is too small for some rank; the same text on all.
        """
        return agreement.conclude(self.share(agreement.pack_wish(wish)))

    def refuse_wish(self, error: Exception, is_gpu: bool = False) -> None:
        """Take part in the peers' `agree` as the rank whose arguments are wrong; `error` is what the caller raises.

        With tensors of a GPU and a room there, the peers do not ask, but call: in the room that was used last, as far
            as a rank knows that cannot compute its own call's shape.
        """
        if is_gpu and self._rooms.link is not None:
            self.refuse(error)
            return
        self._send_refusal(agreement.pack_refusal(self.group.size(), error))

    def refuse(self, error: Exception) -> None:
        """Make the peers' next call fail at once because of `error`, if there is a room for it."""
        link = self._rooms.link
        if link is not None and not self._is_closed:
            link.refuse(error)

    def refuse_first(self, error: Exception) -> None:
        """Do as `refuse`; without a room the peers are making one, and are notified there. Collective then."""
        if self._rooms.link is None and not self._is_closed:
            refuse_to_make(self.group, error)
        self.refuse(error)

    def refuse_latency(self, error: Exception, device: torch.device | None = None) -> None:
        """Make the peers' next low-latency call fail at once because of `error`. Collective after `meet_again`.

        Args:
            error: of this rank.
            device: of the refused call's tensors, as far as they are known.
        """
        if not self._is_closed:
            self._latency.refuse(error, device)

    def sum_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of `counts`, `[n]` integers, as `[n]` int64 on the CPU. Collective."""
        mine = counts.to("cpu", torch.int64).contiguous()
        parts = self.share(array_of(mine).tobytes())
        return sum((torch.frombuffer(bytearray(part), dtype=torch.int64) for part in parts), torch.zeros_like(mine))

    def most(self, *numbers: int) -> list[int]:
        """Return, position by position, the largest number (64 bits, not negative) of all ranks. Collective.

        Raises:
            MismatchError: a rank was refused; the same text on all others.
        """
        return agreement.most_of(self.share(agreement.pack_numbers(numbers, None)), len(numbers))

    def refuse_most(self, count: int, error: Exception) -> None:
        """Take part in the peers' `most` of `count` numbers as the rank whose arguments are wrong."""
        self._send_refusal(agreement.pack_numbers([0] * count, error))

    def barrier(self) -> bool:
        """Let the ranks meet on the current stream by one kernel; False if there is no room on a GPU. Collective.

        Memory is made by all ranks, so all find the same.
        """
        self._check_open()
        whole = self._rooms.whole
        if whole is None:
            return False
        whole.barrier()
        return True

    def cpu_barrier(self) -> None:
        """Let the ranks' CPU threads meet. Collective."""
        self.share(b"b")

    def share(self, data: bytes) -> list[bytes]:
        """Return the `data` of all ranks (equally long, not empty), in rank order. Collective."""
        self._check_open()
        link = self._rooms.link
        return all_gather_bytes(self.group, data) if link is None else link.all_gather_bytes(data)

    def check(self) -> None:
        """Raise errors on this rank's GPU since the last call."""
        for core in self._cores():
            core.check()

    def is_gpu(self, device: torch.device) -> bool:
        """Whether tensors of this device travel by GPU kernels."""
        return device.type == "cuda"

    def call_stream(self, device: torch.device, async_op: bool, previous_event: torch.cuda.Event | None) -> CallStream:
        """Return the stream on which a call with tensors of `device` runs, with all that its caller computes around it.

        Args:
            device: of the tensors.
            async_op: on `own_stream`, else on the current stream.
            previous_event: waited for first.
        """
        return self._call_streams_of(device).call_stream(RunOptions(async_op=async_op, previous_event=previous_event))

    def own_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of calls that are asked for an event."""
        return self._call_streams_of(device).own_stream()

    def close(self) -> None:
        """Close what is in use; a room that was replaced is closed with its last handle. Local, idempotent."""
        self._is_closed = True
        self._rooms.close()
        self._latency.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidState("the buffer is destroyed; make a new one")

    def _cores(self) -> list[SharedBuffer]:
        return [*self._rooms.wholes, *self._latency.wholes]

    def _call_streams_of(self, device: torch.device) -> CallStreams:
        call_streams = self._call_streams.get(device)
        return self._call_streams.setdefault(device, CallStreams(device)) if call_streams is None else call_streams

    def _send_refusal(self, record: bytes) -> None:
        try:
            self.share(record)
        except expected(EpeeError) as problem:
            _log.warning("could not tell the peers about a refused call: %s", problem)
