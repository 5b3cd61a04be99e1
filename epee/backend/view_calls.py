"""What a group says about its view, and how lost ranks come back: epee's own methods of the process group.

They read what the group's own calls have made of the view (`survival.py`), so all answers are those of this rank's last
call, except where a method says otherwise. Nothing here writes to shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InvalidArgument, InvalidState
from .engine import Engine
from .entry import ENDED


class ViewCalls:
    """Part of `group.ProcessGroup`."""

    _engine: Engine
    _num_ranks: int
    allreduce: Any

    @property
    def epoch(self) -> int:
        """The epoch of the view in which the group runs."""
        return self._engine.members.epoch

    def get_peer_state(self, ranks: Sequence[int]) -> list[bool]:
        """Return for each rank whether it takes part or is ready to (see `recover_ranks`). A collective call.

        All ranks get the same answer: a rank counts as ready when every member has heard of it.
        """
        state = torch.zeros(self._num_ranks, dtype=torch.int32)
        for rank in range(self._num_ranks):
            state[rank] = int(rank in self._engine.members.members or rank in self.waiting_ranks())
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        options.asyncOp = False
        self.allreduce([state], options)
        return [bool(state[rank]) for rank in ranks]

    def waiting_ranks(self) -> tuple[int, ...]:
        """Return the lost ranks in whose place a process waits, as far as this rank has heard; no communication."""
        survival = self._engine.survival
        return () if survival is None else survival.waiting()

    def recover_ranks(self, ranks: Sequence[int], timeout_s: float | None = None) -> None:
        """Take in the processes that wait to replace lost ranks; the next call of this rank runs with them.

        Every member calls it at the same point between two calls, or only one: it suffices. Repeating it is harmless.

        Args:
            ranks: of the group; those that take part already are left alone.
            timeout_s: how long to wait for the new view; None: the group's time-out.
        Raises:
            CommTimeoutError: a process does not come, or the view did not change in time.
        """
        if self._engine.survival is None:
            raise InvalidState("a group of one rank has nobody to recover")
        for rank in ranks:
            if not 0 <= rank < self._num_ranks:
                raise InvalidArgument(f"recover_ranks: ranks must lie in 0 ... {self._num_ranks - 1}, got {rank}")
        self._engine.survival.recover(ranks, self._engine.timeout_s if timeout_s is None else timeout_s)

    def last_contributors(self) -> tuple[int, ...]:
        """Return the ranks whose contributions are in the result of the last collective that ended here."""
        return self._engine.contributors

    def active_ranks(self) -> torch.Tensor:
        """Return an int32 tensor `[num_ranks]`: 1 for a rank that takes part in this rank's next call.

        A death or a replacement changes it between the same two calls on every rank, with the epoch, so what a program
        derives from it (a new root, say) is the same everywhere. A rank that has left the group shows at once.
        """
        engine = self._engine
        if engine.flags & ENDED:
            raise InvalidState("the process group was destroyed or aborted; it has no active ranks any more")
        for peer in engine.left():
            engine.mask[peer] = 0
        return torch.tensor(engine.mask[: self._num_ranks].tolist(), dtype=torch.int32)
