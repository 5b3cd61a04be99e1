"""What a group says about its view, how lost ranks come back and how it grows: what is behind the group's own methods.

They read what the group's own calls have made of the view (`membership/epochs.py`), so all answers are those of this
rank's last call, except where a method says otherwise. Nothing here writes to shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InvalidArgument, InvalidState, RankFailedError
from ..view.group import GroupInView
from .engine.ending import leavers
from .engine.engine import Engine
from .engine.entry import ENDED
from .membership.admission import Admission
from .options import MAX_RANKS

Hosts = tuple[tuple[int, ...], ...]


class ViewCalls:
    """The part of a process group that asks about its view, and changes it."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self._engine = engine
        self._rank = rank
        self._exports = engine.box.exports

    def hosts(self) -> Hosts:
        """Return per host its ranks; all in one where the group shares memory."""
        if self._exports is None:
            return (tuple(range(self._engine.members.group_size)),)
        placement: Hosts = self._exports.topology.placement
        return placement

    def peer_state(self, ranks: Sequence[int], all_reduce: Callable[[list[torch.Tensor], Any], Any]) -> list[bool]:
        """Return for each rank whether it takes part, or every member has heard that it is ready to; `all_reduce`s."""
        _check_ranks(ranks, "get_peer_state")
        known = self.ready()
        state = torch.tensor([int(rank in known) for rank in range(MAX_RANKS)], dtype=torch.int32, device="cpu")
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        options.asyncOp = False
        all_reduce([state], options)
        return [bool(state[rank]) for rank in ranks]

    def in_view(self, num_ranks: int) -> GroupInView | None:
        """Return the group's part in the view of its job; None for a group of one rank."""
        survival = self._engine.survival
        return None if survival is None else survival.in_view(num_ranks)

    def waiting(self) -> tuple[int, ...]:
        """Return the ranks, lost or new, for which a process waits, as far as this rank has heard."""
        survival = self._engine.survival
        return () if survival is None else survival.admission.waiting()

    def ready(self) -> set[int]:
        """Return the ranks that take part, and those for which a process waits or has just been taken in."""
        survival = self._engine.survival
        return {*self._engine.members.members, *(() if survival is None else survival.admission.ready())}

    def recover(self, ranks: Sequence[int], timeout_s: float | None, shows: bool = False) -> None:
        """Take in the processes that wait for these ranks; `shows`: before the next call, where that is theirs."""
        _check_ranks(ranks, "recover_ranks")
        admission = self._admission()
        admission.recover(ranks, self._engine.timeout_s if timeout_s is None else timeout_s)
        if shows:
            self._engine.look(admission.show_joined)

    def put_out(self, ranks: Sequence[int], timeout_s: float | None) -> None:
        """Have members leave the group and stay in the job."""
        _check_ranks(ranks, "put_out")
        self._admission().put_out(ranks, self._engine.timeout_s if timeout_s is None else timeout_s)

    def is_out(self) -> bool:
        """Return whether this process was put out of the group."""
        survival = self._engine.survival
        if survival is None or self._engine.flags & ENDED:
            return True
        return self._rank not in survival.admission.present()

    def extend_to(self, size: int, timeout_s: float | None, meet: Callable[[], None]) -> None:
        """Let the group count `size` ranks from the next call on; `meet` is a call of all members."""
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_RANKS:
            raise InvalidArgument(f"extend_group_size_to: size must be a number from 1 to {MAX_RANKS}, got {size!r}")
        beyond = self._beyond(size)
        if beyond:
            meet()  # they may have left: that is agreed on by a call, then all ranks see the same here
            beyond = self._beyond(size)
        if beyond:
            raise InvalidArgument(
                f"extend_group_size_to({size}): rank(s) {', '.join(map(str, beyond))} take part; they must leave first"
            )
        present = self._engine.members.group_size
        if size == present and self._engine.survival is None:
            return
        admission = self._admission()
        admission.recover(range(present, size), self._engine.timeout_s if timeout_s is None else timeout_s)
        self._engine.look(admission.show_joined)
        while not admission.is_settled():  # a loss must be reported first, by a call among those who were there
            meet()
        self._engine.look(lambda: admission.set_size(size))

    def _beyond(self, size: int) -> list[int]:
        return [rank for rank in self._engine.members.members if rank >= size]

    def _admission(self) -> Admission:
        if self._engine.survival is None:
            raise InvalidState("a group that was born with one rank takes nobody in; start with two ranks or more")
        return self._engine.survival.admission

    def check_peer(self, peer: int, name: str) -> None:
        """Check the other rank of a message.

        Raises:
            InvalidArgument: it is no other rank of the group.
            RankFailedError: it is not in the view, and has not been since this process came.
        """
        box = self._engine.box
        if 0 <= peer < box.num_ranks and peer != self._rank and not box.blanks:
            return  # what nearly every message finds
        if peer >= box.num_ranks or peer in box.blanks:
            self._engine.look(lambda: None)  # it may have come just now
        size, epoch = max(box.num_ranks, self._engine.members.group_size), self._engine.members.epoch
        if peer == self._rank or not 0 <= peer < size:
            raise InvalidArgument(
                f"{name}: the peer must be another rank of the group (size {size}, this is rank {self._rank}), got "
                f"{peer}"
            )
        if peer >= box.num_ranks or peer in box.blanks:
            raise RankFailedError(
                f"{name}: rank {peer} is not in the view (epoch {epoch}); it was lost or has not come yet",
                [peer],
                name,
                0,
                epoch,
                "not in the view",
            )

    def active_ranks(self) -> torch.Tensor:
        """Return 1 for each rank that takes part in this rank's next call, 0 for the others."""
        engine = self._engine
        if engine.flags & ENDED:
            raise InvalidState("the process group was destroyed or aborted; it has no active ranks any more")
        for peer in leavers(engine.box):
            engine.mask[peer] = 0
        return torch.tensor(engine.mask.first(engine.members.group_size), dtype=torch.int32, device="cpu")


def _check_ranks(ranks: Sequence[int], name: str) -> None:
    for rank in ranks:
        if not 0 <= rank < MAX_RANKS:
            raise InvalidArgument(f"{name}: ranks must lie in 0 ... {MAX_RANKS - 1}, got {rank}")
