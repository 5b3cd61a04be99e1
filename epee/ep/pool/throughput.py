"""The buffers of a drop-in layer's normal calls: memory made at construction, cut into sections for each call.

On GPUs one `Buffer` made from bytes (`Buffer.of_bytes`) serves calls of all sizes that fit: each gets a buffer over the
same memory (`Buffer.of_sizes`), without a message to other ranks. Sizes that bound a call are the largest that fit, if
the caller does not name them, so all ranks find the same. If a call does not fit, the memory grows: the ranks meet
through the buffer that they have, then make a larger one together, never while a CUDA graph is recorded; handles of the
old one stay valid, and it is freed with the last of them, or at the end if graphs have recorded its memory.

On CPUs memory is address space until it is used: a buffer is made at the first call of a shape, by all ranks, and anew
when a call needs more. Whether one must be made is decided from numbers that are equal on all ranks.

**Refusals** on CPUs are spoken in one room, that of the last call in a room that was not replaced, as a rank whose
arguments are wrong cannot know the room of its call. So a call in another room begins with a meeting there, which ends
if a rank refuses, and in which the ranks compare where they go. The first store of a rank in the other room comes after
it. A crash in the meeting is a death in the room of the meeting. Memory of a GPU is one for all shapes, so there
refusals reach every call.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import InvalidArgument, MismatchError, expected
from ...gpu.payload import DoesNotFit
from ...gpu.report import NoRoomError
from ...torch_private import MAX_CHECKS, MetadataCheck
from ..buffer import Buffer, DispatchLike
from ..config import CPU, MAX_TOPK, BufferConfig
from ..members.bootstrap import refuse as refuse_birth
from ..streams import is_capturing
from .needs import MOST_BLIND_TOKENS, Need, num_tokens_made_for

_log = logging.getLogger(__name__)
_WIDEST = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_NUM_SLOTS = 2  # results that may live at once; there is one slot more
_LOCAL_EXPERTS, _ALIGNMENT = 64, 128  # for whose padding there is room in expanded rows
_MOST_LIKES = 1024  # cached at most: callers may bring new shapes all the time
_LEAST_SLOT = 1 << 12  # bytes; with less, memory is made at the first call


class MemoryBytes(NamedTuple):
    """Bytes of GPU memory for normal calls.

    Attributes:
        slots: of all slots of the receive region.
        expert: of the rows that a combine of the expert layout pulls; 0: they are made by the first one.
    """

    slots: int = 0
    expert: int = 0


NO_MEMORY = MemoryBytes()


def memory_for(num_ranks: int, num_tokens: int, hidden: int, num_topk: int) -> MemoryBytes:
    """Return the memory of a pool for bfloat16 rows; for the expert layout as well if `num_topk` is not 0.

    Args:
        num_ranks, hidden: sizes.
        num_tokens: most tokens of a rank.
        num_topk: 0 if it is not known: there is room for any then.

    Returns:
        The bytes that a GPU needs; for sizes that kernels do not serve the bytes of the rows.
    """
    num_experts = num_ranks * _LOCAL_EXPERTS
    need = Need("both", num_experts, hidden, num_topk or 1, num_tokens, torch.bfloat16, CPU)
    rows = need.num_rows_of(num_ranks, num_tokens)
    sizes = num_experts, hidden, num_topk or MAX_TOPK, num_tokens, torch.bfloat16, _NUM_SLOTS
    config = BufferConfig(num_ranks, *sizes, max_recv_rows=rows)
    config.check()
    try:
        slots = (_NUM_SLOTS + 1) * Buffer.slot_bytes_for(config)
    except expected(InvalidArgument):
        return MemoryBytes((_NUM_SLOTS + 1) * num_ranks * num_tokens * 2 * hidden)
    return MemoryBytes(slots, 2 * Buffer.expert_slot_bytes_for(config, _ALIGNMENT) if num_topk else 0)


class Room:
    """The `Buffer` of calls of a shape.

    Args:
        core, num_tokens, itemsize: as the attributes.
        others: the rooms on CPUs of which it is one: it has memory of its own, and is closed when the room is no
            longer referenced. None: a room over the memory of a GPU.
        name: of a room on CPUs, equal on all ranks.

    Attributes:
        core: the buffer.
        num_tokens: that it has room for.
        itemsize: bytes of its widest element.
        is_apart: it has memory of its own.
        name: as given.
    """

    def __init__(
        self, core: Buffer, num_tokens: int, itemsize: int, others: ThroughputRooms | None = None, name: str = ""
    ) -> None:
        self.core = core
        self.num_tokens = num_tokens
        self.itemsize = itemsize
        self.is_apart = others is not None
        self.name = name
        self._others = None if others is None else weakref.ref(others)
        self._most_sms = core.max_num_sms
        if self.is_apart:
            closer = weakref.finalize(self, core.close)
            closer.atexit = False

    def fits(self, need: Need) -> bool:
        """Return whether a call that needs so much can be made here."""
        return need.num_tokens <= self.num_tokens and need.itemsize <= self.itemsize

    def enter(self) -> None:
        """Begin a call by a handle of this room. Collective on CPUs if the last call was in another room.

        Raises:
            MismatchError: a rank refused its call, or goes to another room.
        """
        others = None if self._others is None else self._others()
        if others is not None:
            others.move(self)

    def refuse(self, error: Exception) -> None:
        """Make the peers' call by a handle of this room fail at once because of `error`."""
        others = None if self._others is None else self._others()
        link = None if others is None else others.link
        (self.core if link is None else link).refuse(error)

    def num_sms(self, wanted: int) -> int | None:
        """Return the multiprocessors of a call that is asked to use `wanted`; 0 is the default.

        Anything that is no number is returned as it is: the call refuses it.
        """
        most = self._most_sms
        if type(wanted) is not int:
            return wanted
        return min(wanted, most) if wanted > 0 and most else None


class Like:
    """The cached way to make calls without asking the ranks, from an earlier equal call; see `BufferPool.recall`.

    Args:
        room: of the call.
        dispatch: makes such a dispatch (`Buffer.dispatches_like`).
        extra: the data that the caller needs for such calls.
        options: of the calls.
        looks: compares tensors with theirs; None if nothing can.

    Attributes:
        As the arguments.
    """

    __slots__ = ("dispatch", "extra", "looks", "options", "room")

    def __init__(
        self, room: Room, dispatch: DispatchLike, extra: Any, options: object, looks: MetadataCheck | None
    ) -> None:
        self.room, self.dispatch, self.extra, self.options, self.looks = room, dispatch, extra, options, looks


class ThroughputRooms:
    """The buffers of one pool's normal calls.

    Args:
        group: of the ranks.
        timeout: seconds that a call waits for a silent peer; None for epee's default.
        memory: to be made now.
        device: of the memory; None: none is made.
        wide_partials: as of `Buffer`, on CPUs.

    Attributes:
        link: the buffer through which the ranks' CPU threads meet, and are notified of refusals: the one used last.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: float | None,
        memory: MemoryBytes,
        device: torch.device | None,
        wide_partials: bool = False,
    ) -> None:
        self._group = group
        self._wide_partials = wide_partials
        self._timeout = timeout
        self._memory = memory
        self.whole: Buffer | None = None
        self._cut: dict[tuple[object, ...], Room] = {}
        self._made: dict[tuple[object, ...], Room] = {}
        self.link: Buffer | None = None
        self._last: Room | None = None  # on CPUs that was used last, of those that are not replaced
        self._kept: list[Buffer] = []  # whose memory graphs have recorded
        self._likes: dict[object, Like] = {}  # over the current memory
        self._lately: list[Like] = []  # the last few of them with `looks`, the newest first
        if device is not None and memory.slots >= (_NUM_SLOTS + 1) * _LEAST_SLOT:
            self._make_whole(memory, device)

    @property
    def wholes(self) -> list[Buffer]:
        """The buffers in use that have memory of their own."""
        whole = [] if self.whole is None else [self.whole]
        return [*whole, *self._kept, *(room.core for room in self._made.values())]

    def find(self, need: Need, is_gpu: bool) -> Room:
        """Return the room for a call; see `BufferPool.room`."""
        room = self._cut_for(need) if is_gpu else self._made.get(_key(need))
        if room is None or not room.fits(need):
            room = self._grow(need) if is_gpu else self._make(need, room)
        self.move(room)
        return room

    def move(self, room: Room) -> None:
        """Make `room` that of the next call. Collective on CPUs if the last call was in another one."""
        if room.is_apart and room is not self._last:
            self._meet(room.name)
        self._note(room)

    def standing(self, need: Need) -> Room | None:
        """Return the room of calls that are made without asking; see `BufferPool.standing_room`."""
        if self.whole is None:
            return None
        self.link = self.whole  # through which all will agree, if they must
        room = self._cut_for(need)
        if room is None or not room.fits(need):
            self.refuse_standing(NoRoomError("a rank has more tokens than the buffer has room for"))
            return None
        self._note(room)
        return room

    def refuse_standing(self, error: Exception) -> None:
        """Make the peers' next call in the memory that there is fail because of `error`; all will agree through it."""
        assert self.whole is not None
        self.link = self.whole
        self.whole.refuse(error)

    def recall(self, key: object) -> Like | None:
        """Return how calls with this key are made, while the room of the cached one serves them.

        The memory is unchanged since then; the call itself finds any other change.
        """
        like = self._likes.get(key)
        if like is not None:
            if like.looks is not None:
                self._lately = [like, *(other for other in self._lately if other is not like)][:MAX_CHECKS]
            self._note(like.room)
        return like

    def latest(self, options: object, *tensors: Any) -> Like | None:
        """Return a recent result of `recall` for equal options and tensors of equal properties; quicker than a key.

        Args:
            options, tensors: as they were stored.
        """
        like: Any
        for like in self._lately:
            if like.options == options and like.looks(*tensors):
                self.link = like.room.core
                if len(self._made) > 1:
                    self._note(like.room)
                found: Like = like
                return found
        return None

    def remember(self, key: object, like: Like) -> None:
        """Cache how calls with this key are made, while the memory serves."""
        if len(self._likes) >= _MOST_LIKES:
            self._likes.clear()
            self._lately.clear()
        self._likes[key] = like

    def close(self) -> None:
        """Close the buffers in use; replaced ones are closed with their last handle. Local, idempotent."""
        for whole in self.wholes:
            whole.close()
        self.whole = self.link = self._last = None
        self._cut.clear()
        self._likes.clear()
        self._lately.clear()
        self._made.clear()
        self._kept.clear()

    def _note(self, room: Room) -> None:
        """Make a call in `room` run after those in others: the calls of one pool run one after another."""
        if not room.is_apart:
            self.link = room.core
        elif any(room is made for made in self._made.values()):  # one that was replaced ends with its last handle
            self.link, self._last = room.core, room
        for other in self._made.values() if len(self._made) > 1 else ():
            if other is not room:
                other.core.join()

    # -- GPUs

    def _cut_for(self, need: Need) -> Room | None:
        """Return the room of a shape over the current memory; None if there is none, or nothing fits.

        Raises:
            InvalidArgument: the kernels do not serve such sizes, or the tensors are elsewhere; the peers are notified.
        """
        if self.whole is None:
            return None
        key = (*_key(need), need.itemsize)
        room = self._cut.get(key)
        if room is None:
            try:
                room = self._make_cut(need, self.whole)
            except DoesNotFit as error:
                _log.debug("%s", error)
                return None
            except expected(InvalidArgument) as error:
                self.whole.refuse(error)
                raise
            self._cut[key] = room
        return room

    def _make_cut(self, need: Need, whole: Buffer) -> Room:
        if whole.config.device != need.device:
            raise InvalidArgument(
                f"x must be on {whole.config.device}, where this buffer has its memory, got {need.device}; call "
                "torch.cuda.set_device before the buffer is made"
            )
        num_tokens = need.num_tokens if need.num_rows else self._most_tokens(need, whole)
        core = whole.of_sizes(
            num_experts=need.num_experts,
            hidden=need.hidden,
            num_topk=need.num_topk,
            max_tokens_per_rank=num_tokens,
            dtype=_WIDEST[need.itemsize],
            max_recv_rows=need.num_rows_of(self._group.size(), num_tokens),
        )
        return Room(core, num_tokens, need.itemsize)

    def _most_tokens(self, need: Need, whole: Buffer) -> int:
        """Return how many tokens of each rank a slot has room for, at least 1."""
        least, most = 1, MOST_BLIND_TOKENS
        while least < most:
            middle = (least + most + 1) // 2
            if whole.fits(self._config(need, middle)):
                least = middle
            else:
                most = middle - 1
        return least

    def _config(self, need: Need, num_tokens: int) -> BufferConfig:
        num_ranks = self._group.size()
        sizes = need.num_experts, need.hidden, need.num_topk, num_tokens, _WIDEST[need.itemsize], _NUM_SLOTS
        return BufferConfig(num_ranks, *sizes, max_recv_rows=need.num_rows_of(num_ranks, num_tokens))

    def _grow(self, need: Need) -> Room:
        """Make memory in which such a call fits. Collective."""
        num_tokens = need.num_tokens if need.num_rows else num_tokens_made_for(need.num_tokens)
        config = self._config(need, num_tokens)
        try:
            slots = (_NUM_SLOTS + 1) * Buffer.slot_bytes_for(config)
        except expected(InvalidArgument) as error:
            if self.whole is None:  # the others are making memory, or get the same error
                refuse_birth(self._group, config, error)
            raise
        lends_expert = need.layout != "rank" and self._memory.expert > 0
        expert = 2 * Buffer.expert_slot_bytes_for(config, _ALIGNMENT) if lends_expert else 0
        have = 0 if self.whole is None else self.whole.nbytes
        told = (
            f"calls of {num_tokens} tokens of hidden {need.hidden} need {slots} bytes of memory, this buffer has {have}"
        )
        if is_capturing():
            raise InvalidArgument(
                f"{told}, and none can be made while a CUDA graph is recorded; make the buffer with as many, or one "
                "call of these sizes before"
            )
        if self.whole is not None:
            _log.info("%s: more is made", told)
            self.whole.all_gather_bytes(b"grow")  # all are here, or none begins
        self._make_whole(MemoryBytes(max(slots, self._memory.slots), max(expert, self._memory.expert)), need.device)
        room = self._cut_for(need)
        assert room is not None, told
        return room

    def _make_whole(self, memory: MemoryBytes, device: torch.device) -> None:
        made = Buffer.of_bytes(
            self._group, memory.slots, memory.expert, device=device, num_slots=_NUM_SLOTS, timeout=self._timeout
        )
        _log.info("memory for dispatch and combine: %d bytes on %s", made.nbytes, device)
        if self.whole is not None and self.whole.is_recorded:
            self._kept.append(self.whole)
        self.whole = self.link = made
        self._memory = memory
        self._cut.clear()
        self._likes.clear()
        self._lately.clear()

    # -- CPUs

    def _meet(self, name: str) -> None:
        """Let the ranks leave the room of the last call together, for the one that all of them name."""
        if self._last is None:
            return
        data = hashlib.blake2b(name.encode(), digest_size=16).digest()
        for rank, theirs in enumerate(self._last.core.all_gather_bytes(data)):
            if theirs not in (b"", data):
                raise MismatchError(
                    f"this rank's call needs the room of {name}, that of rank {rank} another one; all ranks must make "
                    "the same calls in the same order"
                )

    def _make(self, need: Need, old: Room | None) -> Room:
        if is_capturing():
            raise InvalidArgument(
                "this buffer must grow, which it cannot while a CUDA graph is recorded; make one call of this shape "
                "before"
            )
        num_tokens, itemsize = num_tokens_made_for(need.num_tokens), need.itemsize
        if old is not None:
            num_tokens, itemsize = max(num_tokens, old.num_tokens), max(itemsize, old.itemsize)
        name = f"{_key(need)} {num_tokens} {itemsize}"
        self._meet(f"new {name}")  # a rank that makes another call is noticed here, not in the group
        core = Buffer(
            self._group,
            num_experts=need.num_experts,
            hidden=need.hidden,
            num_topk=need.num_topk,
            max_tokens_per_rank=num_tokens,
            dtype=_WIDEST[itemsize],
            device=None if need.device.type == "cpu" else need.device,
            max_recv_rows=need.num_rows_of(self._group.size(), num_tokens),
            timeout=self._timeout,
            wide_partials=self._wide_partials,
        )
        self._last = room = self._made[_key(need)] = Room(core, num_tokens, itemsize, self, name)
        return room


def _key(need: Need) -> tuple[object, ...]:
    """Return what calls in one room have in common."""
    return need.layout, need.num_experts, need.hidden, need.num_topk, need.device, need.num_rows
