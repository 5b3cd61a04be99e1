"""The methods of a group for its view beside torch's: its state, the return of lost ranks, growth.

They read the state that the group's own calls have derived from the view (`membership/group_membership.py`), so all
answers are those of this rank's last call, unless a method states otherwise. Nothing here writes to shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..engine import Engine, Place
from ..engine.entry import ENDED
from ..engine.limits import MAX_RANKS
from ..engine.membership.admission import Admission
from ..engine.outbox import leavers
from ..errors import EvictedError, InvalidArgument, InvalidState, RankFailedError, UnsupportedError, expected
from ..untraced import untraced_methods
from ..values import is_whole, seconds, shown
from ..view.group import GroupInView
from ..view.runtime import ANSWER_S
from .options import BackendOptions

if TYPE_CHECKING:
    from .cuda.half import DeviceHalf


@untraced_methods
class CallsOfView:
    """The part of a process group that reads its view, and changes it.

    A class that inherits from it has torch's calls (`allreduce`), and `_meet`, a call of all members.
    """

    options: BackendOptions
    allreduce: Any
    _engine: Engine
    _rank: int
    _counts_present: bool
    _place: Place | None  # in the group; None: this process works alone, until it joins one
    _on_device: DeviceHalf | None

    def _meet(self) -> None:
        raise NotImplementedError

    def _limit(self, timeout_s: float | None) -> float:
        """Return for how long a call of the view waits: the caller's timeout, else the group's."""
        return self._engine.timeout_s if timeout_s is None else seconds(timeout_s, "timeout_s")

    @property
    def epoch(self) -> int:
        """The epoch of the view in which the group runs."""
        return self._engine.members.epoch

    @property
    def shown_epoch(self) -> int:
        """The epoch of the newest view that this process shows: that of its calls, or of a loss that is shown at once.

        Losses are shown at once under Mooncake's names only (`BackendOptions.shows_at_once`).
        """
        return max(self._engine.members.epoch, self._engine.mask.epoch)

    @property
    def timeout_s(self) -> float:
        """The time that a call waits for silent ranks when it names no timeout, in seconds."""
        return self._engine.timeout_s

    @property
    def num_slots(self) -> int:
        """The number of ranks that the group counts in this rank's next call: the length of lists with one entry each.

        Lost ranks count. It changes between the same two calls on all ranks (`extend_group_size_to`), while
        `get_world_size()` keeps the value with which this process was started.
        """
        return self._engine.members.group_size

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, ascending; hosts by their lowest rank. Containers of one machine are hosts, too.

        A group on one host has one, with all ranks that the group counts (`num_slots`).
        """
        placement: tuple[tuple[int, ...], ...] = self._engine.peer_regions.exports.placement(self._engine.members)
        return placement

    def get_peer_state(self, ranks: Sequence[int]) -> list[bool]:
        """Return for each rank whether it takes part or is ready to (see `recover_ranks`). A collective call.

        All ranks get the same answer. A rank takes part if it took part in this call itself, so one that had died
        before is False; a rank is ready when every member knows of a process that waits for it.

        Args:
            ranks: 0 ... 63; ranks that never existed may ask to join, too.
        """
        _check_ranks(ranks, "get_peer_state")
        ready = self._engine.membership.admission.joining()
        state = torch.tensor([int(rank in ready) for rank in range(MAX_RANKS)], dtype=torch.int32, device="cpu")
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        options.asyncOp = False
        self.allreduce([state], options)
        present = self._engine.contributors  # of this call
        return [rank in present or bool(state[rank]) for rank in ranks]

    def get_num_synced_ranks(self) -> int:
        """Return how many ranks take part or are ready to, beyond the group's size as well. A collective call."""
        return sum(self.get_peer_state(range(MAX_RANKS)))

    def local_peer_state(self, ranks: Sequence[int]) -> list[bool]:
        """Return for each rank whether it takes part or is ready to, as far as this process knows; no collective call.

        False at once for a rank of whose death there is proof. True for a rank for which a process waits when all
        members know of it; programs that ask on all ranks, between calls, get it between the same two calls
        (`bootstrap/local_state.py`). Where a process waits no more, and is no member yet, the other members' agents are
        asked for their newest view, at most 2 s.

        Args:
            ranks: 0 ... 63.
        """
        _check_ranks(ranks, "local_peer_state")
        self._require_open()
        return self._engine.membership.local_state.states(ranks)

    def take_in(self, ranks: Sequence[int]) -> int:
        """Take in the processes that wait for those of `ranks` that are lost or never existed.

        Returns:
            A rank for which no process waits, and then nothing has been done; -1 when all take part.

        Raises:
            As `recover_ranks`.
        """
        self._require_open()
        membership = self._engine.membership
        wanted = membership.local_state.must_be_taken_in(ranks)
        here = {*membership.admission.waiting(), *membership.local_state.alive(membership.runtime.view())}
        for rank in wanted:
            if rank not in here:
                return rank
        if wanted:
            self.recover_ranks(wanted)
        return -1

    def _require_open(self) -> None:
        if self._engine.flags & ENDED:
            raise InvalidState("the process group was destroyed or aborted; it has no ranks any more")

    def in_view(self, num_ranks: int) -> GroupInView:
        """Return the group's part in the view of its job, for objects built on it."""
        return self._engine.membership.in_view(num_ranks)

    def waiting_ranks(self) -> tuple[int, ...]:
        """Return the ranks, lost or new, for which a process waits, as far as this rank knows; no communication."""
        return self._engine.membership.admission.waiting()

    def ready_ranks(self) -> set[int]:
        """Return the ranks that take part, and those for which a process waits or has just been taken in.

        As far as this rank knows; no communication. `get_peer_state` returns what all members know.
        """
        return {*self._engine.members.members, *self._engine.membership.admission.ready()}

    def recover_ranks(self, ranks: Sequence[int], timeout_s: float | None = None) -> None:
        """Take in the processes that wait for these ranks; the next call of this rank runs with them.

        Every member calls it at the same point between two calls, or only one: it suffices. Repeating it is harmless.
        `active_ranks` and `num_slots` show them after that call, on all old members alike. For ranks beyond the group's
        size use `extend_group_size_to`, after which they show before it: the call needs longer lists.

        Args:
            ranks: 0 ... 63; those that take part already are left alone.
            timeout_s: how long to wait for all of them; None: the group's timeout.
        Raises:
            CommTimeoutError: a process does not come, or the view did not change in time.
            InvalidState: this process works alone: it has joined no group yet (`join`).
        """
        _check_ranks(ranks, "recover_ranks")
        admission = self._admission()
        admission.recover(ranks, self._limit(timeout_s))
        if self._counts_present:
            self._engine.look(admission.show_joined)
            self._engine.mask.told = self._engine.mask.span

    def extend_group_size_to(self, size: int, timeout_s: float | None = None) -> None:
        """Let the group count `size` ranks from the next call on. All members call it at the same point.

        A larger group: takes in the processes that wait for the ranks beyond the present size, all of them. A smaller
        one: the ranks beyond must have left or died; where some still count, a barrier determines their state.
        Lost ranks below stay lost (`recover_ranks`).

        Args:
            size: 1 ... 64. The option `max_group_size` is no limit, it is the length of `active_ranks`.
            timeout_s: how long to wait for joiners; None: the group's timeout.
        Raises:
            InvalidArgument: ranks beyond `size` take part.
            RankFailedError: mode "raise", and a rank has been lost that no call had reported yet. The joiners are in;
                call it again.
            CommTimeoutError, InvalidState, UnsupportedError: as `recover_ranks`.
        """
        if not is_whole(size, 1, MAX_RANKS):
            raise InvalidArgument(
                f"extend_group_size_to: size must be a number from 1 to {MAX_RANKS}, got {shown(size)}"
            )
        self._limit(timeout_s)  # before anything is done
        beyond = self._beyond(size)
        if beyond:
            self._meet()  # they may have left: a call agrees on that, then all ranks see the same here
            beyond = self._beyond(size)
        if beyond:
            raise InvalidArgument(
                f"extend_group_size_to({size}): rank(s) {', '.join(map(str, beyond))} are members and must leave first"
            )
        present = self._engine.members.group_size
        if size == present and self._place is None:
            return
        admission = self._admission()
        admission.recover(range(present, size), self._limit(timeout_s))
        self._engine.look(admission.show_joined)
        while not admission.is_settled():  # a loss must be reported first, by a call among the previous members
            self._meet()
        self._engine.look(lambda: admission.set_size(size))
        self._engine.mask.told = self._engine.mask.span

    def put_out(self, ranks: Sequence[int], timeout_s: float | None = None) -> None:
        """Have ranks leave the group, this one too if it is named; they stay in the job, and may return (`join`).

        One member suffices, all may call it, also the ranks that leave. The next call of this rank runs without them,
        unless another rank has begun that call; those of the excluded ranks raise `EvictedError`. It is no loss: no
        call fails because of it. On return the other members know it, where their agents answer within 2 s.

        Args:
            ranks: 0 ... 63; those that take no part already are left alone.
            timeout_s: how long to wait for the members' agreement; None: the group's timeout.
        Raises:
            CommTimeoutError: the members do not agree in time.
            InvalidState: no rank would be left, or this process works alone.
            UnsupportedError: a group with `fault_mode="raise"`.
        """
        if self.options.fault_mode != "mask":
            raise UnsupportedError(
                'put_out needs fault_mode="mask"; with "raise" the rank itself calls destroy_process_group'
            )
        _check_ranks(ranks, "put_out")
        self._admission().put_out(ranks, self._limit(timeout_s))

    def last_contributors(self) -> tuple[int, ...]:
        """Return the ranks whose contributions are in the result of the last collective that ended here.

        Where that was one on the GPUs, this waits for it.
        """
        found = None if self._on_device is None else self._on_device.contributors()
        return self._engine.contributors if found is None else found

    def active_ranks(self) -> torch.Tensor:
        """Return an int32 tensor `[num_slots]`: 1 for a rank that takes part in this rank's next call.

        A death or a replacement changes it between the same two calls on every rank, with the epoch, so what a program
        derives from it (a new root, for example) is the same everywhere. A rank that has left the group shows at once.
        """
        engine = self._engine
        if engine.flags & ENDED:
            raise InvalidState("the process group was destroyed or aborted; it has no active ranks any more")
        for peer in leavers(engine.peer_regions):
            engine.mask[peer] = 0
        active = torch.tensor(engine.mask.first(engine.members.group_size), dtype=torch.int32, device="cpu")
        if self._on_device is not None:
            active[[rank for rank in self._on_device.lost() if rank < len(active)]] = 0
        return active

    def shown_ranks(self) -> torch.Tensor:
        """Return the tensor that shows which ranks take part, as `active_ranks` of the options, and is kept up to date.

        int32, as long as that is, or as the group now. It is the user's, if that is long enough, and not to be written.
        """
        self.active_ranks()  # a rank that has left shows at once
        self._engine.mask.told = self._engine.mask.span
        return self._engine.mask.live(self.num_slots)

    def put_out_lost(self, ranks: Sequence[int]) -> None:
        """Hide those of `ranks` that are lost, if the shown tensor keeps them (`BackendOptions.keeps_lost`)."""
        self._engine.mask.put_out(ranks)

    def memory_pool(self, nbytes: int) -> Any:
        """Return memory on this rank's GPU for tensors that large collectives read directly, without a copy.

        All members call it, as a collective; sizes may differ. A repeated call returns the existing pool; after a
        process has taken a lost rank, all call it again, and the joiner gets its own. What makes a
        call copy-free, how long memory lives, and what a failure leaves: `epee.backend.cuda.pool.MemoryPool`, which it
        returns: `pool.empty(4096, 7168, dtype=torch.bfloat16)`. Where a rank cannot map the pool of another one all
        get theirs, with a warning, and make calls as without pools; calling it again tries again.

        Args:
            nbytes: of this rank's pool, which does not grow. The first call's GPU is that of later calls.

        Raises:
            InvalidArgument: `nbytes` is below 1, or above those of the existing pool. UnsupportedError: the
                group's calls on CUDA tensors go through cpu memory, or it has `fault_mode="mask"`. ResourceError, on
                all alike: a rank has no such memory; may be tried again. Else as any collective.
        """
        if self._on_device is None:
            raise UnsupportedError("memory_pool: collectives on CUDA tensors of this group go through CPU memory")
        return self._on_device.memory_pool(nbytes)

    def _is_out(self, limit_s: float) -> bool:
        """Return whether this process was excluded from the group, as far as the members that answer know.

        Its own agent may be the last to learn of that, after the call that has excluded it has returned elsewhere. It
        waits for answers at most `limit_s`, and `ANSWER_S`.

        Raises:
            EvictedError: this process was put out of the job as well.
        """
        membership = self._engine.membership
        deadline = time.monotonic() + min(limit_s, ANSWER_S)
        while not self._engine.flags & ENDED and self._rank in membership.admission.present():
            epoch = membership.runtime.view().epoch
            membership.runtime.catch_up(deadline - time.monotonic())
            error = membership.runtime.error
            if isinstance(error, EvictedError):
                raise error
            if membership.runtime.view().epoch == epoch or time.monotonic() > deadline:
                return self._rank not in membership.admission.present()
        return True

    def _beyond(self, size: int) -> list[int]:
        return [rank for rank in self._engine.members.members if rank >= size]

    def _admission(self) -> Admission:
        if self._place is None:
            raise InvalidState("this process works alone: it has joined no group yet; call join first")
        return self._engine.membership.admission


def check_peer(engine: Engine, rank: int, peer: int, name: str) -> None:
    """Check the other rank of a message of `rank`.

    Raises:
        InvalidArgument: it is no other rank of the group.
        RankFailedError: it is not in the view, and has not been since this process came.
    """
    peer_regions = engine.peer_regions
    if 0 <= peer < peer_regions.num_ranks and peer != rank and not peer_regions.blanks:
        return  # the case of nearly every message
    if peer >= peer_regions.num_ranks or peer in peer_regions.blanks:
        engine.look(lambda: None)  # it may have joined just now
    size, epoch = max(peer_regions.num_ranks, engine.members.group_size), engine.members.epoch
    if peer == rank or not 0 <= peer < size:
        raise InvalidArgument(
            f"{name}: the peer must be another rank of the group (size {size}, this is rank {rank}), got {peer}"
        )
    if peer >= peer_regions.num_ranks or peer in peer_regions.blanks:
        raise RankFailedError(
            f"{name}: rank {peer} is not in the view (epoch {epoch}): it has failed, left or not joined yet",
            [peer],
            name,
            0,
            epoch,
            "not in the view",
        )


def _check_ranks(ranks: Sequence[int], name: str) -> None:
    try:
        numbers = list(ranks)
    except expected(TypeError):
        raise InvalidArgument(f"{name}: ranks must be a list of numbers, got {shown(ranks)}") from None
    for rank in numbers:
        if not is_whole(rank, 0, MAX_RANKS - 1):
            raise InvalidArgument(f"{name}: ranks must lie in 0 ... {MAX_RANKS - 1}, got {shown(rank)}")
