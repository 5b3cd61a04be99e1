"""The memory of a drop-in layer's low-latency calls: made at construction, cut into sections for each call.

Other libraries' buffers are given bytes at construction and sizes in each call. So memory of that many bytes is lent by
all ranks in the constructor, and a call of new sizes computes its offsets there without a message to the others: a rank
that dies before its first call is a death like any other, and a first call can be recorded in a CUDA graph.

There is one memory for GPUs and one for CPUs. If a call does not fit, a larger one replaces it: the ranks meet on the
CPU through the one that they have, so that none waits for a lost rank, and make it together. Without bytes the first
call makes memory. Either has room for more tokens than it needs (`num_tokens_made_for`), so it happens rarely. Handles
keep the memory of their calls, and memory that a CUDA graph has recorded stays until the end.

A process that replaces a lost rank joins the memory that the others have (`LatencyBuffer.awaited_bytes`), with its
first call, while they meet it before theirs (`meet_again`); then calls look for room, or all grow together.

**Refusals** are spoken in the memory of the call, as a dispatch, after the meeting that its call begins with. Peers
that grow do not dispatch: they give each other the number of calls that they have announced in the memory that they
have. A rank that has refused this call is one ahead there: those behind take part in the refused call, belated, and
raise, and the rank ahead meets them again in their next growth. Ranks that are further apart raise. A rank whose peers
do not come to that meeting within its timeout, because their call fits, refuses the call as well: they wait for it in
the memory that they have, and its next call must not be paired with this one. A crash in between is a death there.

**Steps** that the ranks of a group take together outside of calls: make further rooms, or meet again in those they have
(`Steps`). Under Mooncake's names a rank may make a second buffer while its peers call `update_ep_member` on their first
one: both are one step of the group. A rank that makes rooms cannot know which of the two its peers do, so each rank
writes the kind of its step into the group's store, and a rank that makes further rooms waits until it has read those of
others.

    step/N/R     the kind of rank R's step N: "make" or "again"
    step/next    the number of the next step, written by each rank before it meets the others in their memory (`sync`)

Each rank writes its own steps, once; all ranks write the same next number. Readers are ranks that make rooms on a group
where they have some, and a process that replaces a lost rank, when it has met the others, which make no step before its
first call. The numbers are the same on all ranks, as all take the steps in the same order. A crash leaves steps without
a key: a rank that waits for one skips ranks that the group's mask excludes, and ends by its timeout. Without a store
(its owner has died) rooms are made as if no rank met again.
"""

from __future__ import annotations

import functools
import logging
import struct
import time
import weakref
from typing import Any, TypeAlias, TypeGuard, cast

import torch
import torch.distributed as dist

from ...arrays import writing
from ...engine import BoundedStore
from ...errors import (
    CommTimeoutError,
    EpeeError,
    InvalidArgument,
    InvalidState,
    MismatchError,
    PeerError,
    RankFailedError,
    expected,
)
from ...gpu.payload import DoesNotFit
from ..config import MAX_LATENCY_TOKENS
from ..latency.buffer import LatencyBuffer
from ..members.bootstrap import refuse_to_make, timeout_of
from ..streams import is_capturing
from .needs import LatencyNeed, latency_bytes, num_tokens_made_for

_log = logging.getLogger(__name__)
_MAKE, _AGAIN = "make", "again"
_PREFIX = "epee/ep/step/"
_POLL_S = 0.002
_MEETING = struct.Struct("<?Q")  # before growth: whether this rank has refused a call there, the calls announced


class Steps:
    """The steps of this process on one group of the backend "epee".

    Args:
        group: whose store and mask are used; kept by its users, not here.

    Attributes:
        newest: the `LatencyRooms` that were made last, None before the first.
        has_memory: rooms of this process have had memory that all ranks made; before that there are no steps.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: weakref.ref[Any] = weakref.ref(group)  # its mask and store are not of torch's class
        self._number = 0
        self.has_memory = False
        self.newest: weakref.ref[Any] | None = None

    def meet(self) -> None:
        """Write the next step's number for a process that joins in the `sync` that follows. Local."""
        self._write("next", str(self._number))

    def join(self) -> None:
        """Read the next step's number from the ranks that this process has met in their memory. Local."""
        group = self._group()
        try:
            if group is not None:
                with _store_of(group) as store:
                    self._number = int(store.find(_PREFIX + "next", 0.0) or self._number)
        except expected(RuntimeError, OSError) as error:
            _log.warning("the number of the next step is not known, the group's store is out of reach: %s", error)

    def meet_again(self) -> None:
        """Notify ranks that make rooms in this step that this one meets them in those that it has. Local."""
        self._write(self._key(self._number), _AGAIN)
        self._number += 1

    def is_met_again(self, timeout_s: float | None) -> bool:
        """Return whether a rank meets again in this step, in which this one makes rooms.

        Raises:
            CommTimeoutError: a rank takes no step.
        """
        group, number = self._group(), self._number
        self._number += 1
        if group is None or not self._write(self._key(number), _MAKE, timeout_s):
            return False
        limit_s = timeout_of(group) if timeout_s is None else timeout_s
        with _store_of(group, limit_s) as store:
            return self._await_step(group, store, number, limit_s)

    def _await_step(self, group: Any, store: BoundedStore, number: int, limit_s: float) -> bool:
        found: dict[int, str] = {group.rank(): _MAKE}
        while True:
            active = group.active_ranks().tolist()  # before the steps are read: a rank that has left by now has written
            try:
                for rank in set(range(len(active))) - found.keys():
                    step = store.find(_PREFIX + self._key(number, rank), 0.0)
                    found.update({} if step is None else {rank: step.decode()})
            except expected(RuntimeError, OSError) as error:
                _log.warning("the group's store is out of reach, rooms are made as if no rank met again: %s", error)
                return False
            if _AGAIN in found.values():
                return True
            missing = [rank for rank, is_in in enumerate(active) if is_in and rank not in found]
            if not missing:
                return False
            if time.monotonic() > store.deadline:
                raise CommTimeoutError(
                    f"rank {missing[0]} has made no further buffer on this group, nor called update_ep_member, within "
                    f"{limit_s:g} s; all ranks must take this step"
                )
            time.sleep(_POLL_S)

    def _key(self, number: int, rank: int | None = None) -> str:
        """Return the key of a rank's step, of this rank's by default, after the prefix."""
        group = self._group()
        return f"{number}/{rank if rank is not None or group is None else group.rank()}"

    def _write(self, key: str, value: str, limit_s: float | None = None) -> bool:
        """Write a key; False where there is no store."""
        group = self._group()
        if group is None:
            return False
        try:
            with _store_of(group, limit_s) as store:
                store.set(_PREFIX + key, value)
        except expected(RuntimeError, OSError) as error:
            _log.warning(
                "peers that make a buffer now cannot see this rank's step: the store is out of reach: %s", error
            )
            return False
        return True


def _store_of(group: Any, limit_s: float | None = None) -> BoundedStore:
    limit_s = timeout_of(group) if limit_s is None else limit_s
    return BoundedStore(group.get_group_store(), limit_s, group.rank(), "LatencyBuffer")


def steps_of(group: dist.ProcessGroup) -> Steps | None:
    """Return the steps of this process on a group; None where the backend is not "epee": then making memory meets."""
    if getattr(group, "in_view", None) is None:
        return None
    known = _steps()
    if group not in known:
        known[group] = Steps(group)
    return known[group]


@functools.cache
def _steps() -> weakref.WeakKeyDictionary[dist.ProcessGroup, Steps]:
    return weakref.WeakKeyDictionary()


# Most tokens and experts; the shapes of a row and of a token's ids. The latter are `torch.Size` in a lookup.
LatelyKey: TypeAlias = "tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]]"


class LatencyRooms:
    """The `LatencyBuffer`s of one pool.

    Args:
        group: of the ranks.
        timeout: seconds that a call waits for a silent peer; None for epee's default.
        nbytes: of memory to be made now; too few for any call are as 0: the first call makes it.
        meets: making further rooms on a group, and `meet_again` on existing ones, are one step (see the module): if a
            rank takes it the second way, all continue in the memory that they have.

    Attributes:
        lately: buffers of calls on GPUs, by `LatelyKey`, for cached calls: a user of one of them must not need more
            than that. Emptied whenever the next call may need anything else.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None, nbytes: int, meets: bool = False) -> None:
        self._steps = steps_of(group) if meets else None
        self._group = group
        self._timeout = timeout
        self._whole: dict[str, LatencyBuffer] = {}  # with memory of their own, by type of device
        self._kept: list[LatencyBuffer] = []  # whose memory graphs have recorded
        self._cores: dict[LatencyNeed, LatencyBuffer] = {}
        self._apart: set[LatencyBuffer] = set()  # whose ranks meet before their next call
        self._unmasked: torch.Tensor | None = None  # members that a refused call has met, for the next call's mask
        self._refused: set[LatencyBuffer] = set()  # in whose memory this rank has refused a call
        self.lately: dict[LatelyKey, LatencyBuffer] = {}
        self._wanted = nbytes if nbytes >= _least_bytes(group.size()) else 0  # still to be made
        device = current_gpu()
        if self._steps is not None and self._adopt(self._steps):
            return
        if self._wanted and not LatencyBuffer.awaited_bytes(group, device, self._wanted):
            self._make(self._wanted, device)

    @property
    def wholes(self) -> list[LatencyBuffer]:
        """The buffers with memory of their own."""
        return [*self._whole.values(), *self._kept]

    def buffer(self, need: LatencyNeed, active_ranks: torch.Tensor | None = None) -> LatencyBuffer:
        """Return the buffer for a call; see `BufferPool.latency_buffer`."""
        if self._apart:
            self._meet(self._whole.get(need.device.type))
        agreed, self._unmasked = self._unmasked, None
        # otherwise a GPU would wait until the timeout for ranks that are no members
        if agreed is not None and _is_mask(active_ranks, len(agreed)):
            with writing(active_ranks):
                active_ranks[: len(agreed)] *= agreed.to(active_ranks.device)
        core = self._cores.get(need)
        if core is None:
            core = self._cores[need] = self._find(need)
        return core

    def _adopt(self, steps: Steps) -> bool:
        """Take over the memory of this process's newest rooms on the group if a peer meets again in it.

        Raises:
            InvalidState: a peer does, and this process no longer has those rooms.
        """
        before, steps.newest = steps.newest, weakref.ref(self)
        if not steps.has_memory or not steps.is_met_again(self._timeout):
            return False
        older = None if before is None else before()
        if older is None:
            raise InvalidState(
                "a peer has called update_ep_member on its buffer, and this rank has dropped the one that belongs to "
                "it; keep it until the new one is made, or make new ones on all ranks"
            )
        wholes = older._in_group()
        self._whole.update(wholes)
        self._apart.update(wholes.values())
        if wholes:
            self._wanted = 0
        return bool(wholes)

    def _in_group(self) -> dict[str, LatencyBuffer]:
        """Return the memory that replacements of lost ranks join, by type of device."""
        return {kind: whole for kind, whole in self._whole.items() if whole.takes_replacements}

    def refuse(self, error: Exception, device: torch.device | None = None) -> None:
        """Make the peers' next call fail at once because of `error`; see `BufferPool.refuse_latency`.

        Without memory they make it in that call.
        """
        wholes = list(self._whole.values())
        if not wholes:
            refuse_to_make(self._group, error)
            return
        whole = wholes[-1] if device is None else self._whole.get(device.type, wholes[-1])
        try:
            self._meet(whole)
        except expected(EpeeError) as problem:
            _log.warning("could not tell the peers about a refused call: %s", problem)
            return
        self._refuse_in(whole, error)

    def meet_again(self) -> None:
        """Make the next call begin with the current members of the group; see `BufferPool.meet_again`."""
        self.lately.clear()
        if self._steps is not None and self._steps.has_memory:
            self._steps.meet_again()
        for kind, whole in list(self._whole.items()):
            if whole.takes_replacements:
                self._apart.add(whole)
            else:
                self._wanted = max(self._wanted, whole.config.room_bytes)
                self._replace(kind)

    def close(self) -> None:
        """Free all memory. Local, idempotent."""
        for whole in self.wholes:
            whole.close()
        for part in (self._whole, self._kept, self._cores, self._apart, self._refused, self.lately):
            part.clear()

    def _refuse_in(self, whole: LatencyBuffer, error: Exception) -> None:
        self._refused.add(whole)
        whole.refuse(error)

    def _meet(self, whole: LatencyBuffer | None) -> None:
        if whole is None or whole not in self._apart:
            return
        if self._steps is not None:
            self._steps.meet()
        self._unmasked = whole.sync()
        self._apart.discard(whole)

    def _find(self, need: LatencyNeed) -> LatencyBuffer:
        whole = self._whole.get(need.device.type) or self._make_first(need)
        try:
            if whole.config.device != need.device:
                raise InvalidArgument(
                    f"x must be on {whole.config.device}, where this buffer has its memory, got {need.device}; call "
                    "torch.cuda.set_device before the buffer is made"
                )
            return _cut(whole, need)
        except DoesNotFit as error:
            return _cut(self._grow(need, whole, error), need)
        except expected(InvalidArgument) as error:
            self._refuse_in(whole, error)  # concerns this rank's sizes alone, as far as it knows
            raise

    def _make_first(self, need: LatencyNeed) -> LatencyBuffer:
        """Make memory, or join that of the others. Collective."""
        device = None if need.device.type == "cpu" else need.device
        needed = self._wanted or _bytes_for(need, self._group.size())
        self._require_no_graph(need, needed)
        awaited = LatencyBuffer.awaited_bytes(self._group, device, needed)
        made = self._make(awaited or needed, device)
        if awaited and self._steps is not None:
            self._steps.join()
        return made

    def _grow(self, need: LatencyNeed, whole: LatencyBuffer, reason: DoesNotFit) -> LatencyBuffer:
        """Replace `whole` by larger memory. Collective."""
        needed = max(_bytes_for(need, self._group.size()), whole.config.room_bytes)
        self._require_no_graph(need, needed)
        try:
            self._meet_to_grow(whole)  # all are here, or none begins
        except expected(RankFailedError, PeerError, CommTimeoutError) as error:
            refusal = InvalidArgument(
                f"{reason}; it cannot be made when a rank is lost, or does not come because it refused this call"
            )
            self._refuse_in(whole, refusal)  # ranks whose call fits wait for this one's part there
            raise refusal from error
        _log.info("%s: %d bytes are made", reason, needed)
        return self._make(needed, None if need.device.type == "cpu" else need.device)

    def _meet_to_grow(self, whole: LatencyBuffer) -> None:
        """Let the ranks meet before they replace `whole`. Collective.

        Raises:
            MismatchError: another rank has refused this call, or the ranks are out of step since a refusal.
        """
        while True:
            mine = whole.num_announced
            rows = whole.all_gather_bytes(_MEETING.pack(whole in self._refused, mine))
            met = {rank: _MEETING.unpack(row) for rank, row in enumerate(rows) if row}
            ahead = max(number for _, number in met.values())
            refusing = [rank for rank, (has_refused, number) in met.items() if has_refused and number == ahead]
            least = min(number for _, number in met.values())
            if not refusing or least == ahead:
                return
            if ahead - least > 1:
                raise MismatchError(
                    f"since rank {refusing[0]} refused a call, the ranks are {ahead - least} low-latency calls apart; "
                    "make a new buffer on all ranks"
                )
            if mine < ahead:
                error = MismatchError(f"dispatch: rank {refusing[0]} refused its call, so no rank made it")
                whole.refuse(error)  # in the place of the refused call; the others' part in it is over
                raise error

    def _require_no_graph(self, need: LatencyNeed, needed: int) -> None:
        if is_capturing():
            raise InvalidArgument(
                f"low-latency calls of {need.max_tokens} tokens of hidden {need.hidden} need {needed} bytes of memory, "
                "which cannot be made while a CUDA graph is recorded; make the buffer with as many "
                "(get_low_latency_rdma_size_hint), or one call of these sizes before"
            )

    def _make(self, nbytes: int, device: torch.device | None) -> LatencyBuffer:
        made = LatencyBuffer.of_bytes(self._group, nbytes, device=device, timeout=self._timeout)
        _log.info("memory for low-latency calls: %d bytes on %s", made.nbytes, made.config.device)
        kind = made.config.device.type
        if kind in self._whole:
            self._replace(kind)
        self._whole[kind] = made
        self._wanted = 0
        if self._steps is not None and made.takes_replacements:
            self._steps.has_memory = True
        return made

    def _replace(self, kind: str) -> None:
        """Release memory: it is freed with the last handle of its calls."""
        whole = self._whole.pop(kind)
        self.lately.clear()
        self._apart.discard(whole)
        self._refused.discard(whole)
        self._cores = {need: core for need, core in self._cores.items() if core.whole is not whole}
        if whole.is_recorded:
            self._kept.append(whole)


def current_gpu() -> torch.device | None:
    """Return the device of memory made before any tensor is given: the current GPU, None for the CPU without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _cut(whole: LatencyBuffer, need: LatencyNeed) -> LatencyBuffer:
    return whole.of_sizes(
        num_experts=need.num_experts,
        hidden=need.hidden,
        num_topk=need.num_topk,
        max_tokens_per_rank=need.max_tokens,
    )


def _bytes_for(need: LatencyNeed, num_ranks: int) -> int:
    """Return the bytes that are made for calls of such sizes, and of more tokens."""
    num_tokens = max(need.max_tokens, min(num_tokens_made_for(need.max_tokens), MAX_LATENCY_TOKENS))
    return latency_bytes(num_ranks, num_tokens, need.hidden, need.num_experts, need.num_topk)


def _least_bytes(num_ranks: int) -> int:
    """Return the bytes of a call of one small token."""
    return latency_bytes(num_ranks, 1, 8, num_ranks, 1)


def _is_mask(given: object, num_ranks: int) -> TypeGuard[torch.Tensor]:
    """Whether this can be a call's mask; any other value is refused by the call."""
    is_flat = isinstance(given, torch.Tensor) and given.dtype == torch.int32 and given.dim() == 1
    return is_flat and len(cast(torch.Tensor, given)) >= num_ranks
