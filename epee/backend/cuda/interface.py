"""Collectives on CUDA tensors that run on the GPUs: what the backend asks of them, and what it gives.

They stand above the backend (`epee.backend.cuda`), which only knows this. `register` says who makes them; without that,
and for a group or a call that they do not serve, CUDA tensors go through host memory (`staging.py`). Which of the two
a call takes follows from what is equal on all ranks: the group's options, its size, its hosts, and the call.

Whoever serves them meets the other ranks' hosts at times (`meet`): a call of the group like any other, with a name of
its own, so that who makes another call is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..collectives.copying import Spread
from ..collectives.plan import Sink
from ..collectives.signature import OP_CODE, pack
from ..engine.engine import Engine
from ..options import BackendOptions
from ..outbox import Outboxes

NOT_SERVED = object()
MEETING = "device_meeting"


class DeviceCalls(Protocol):
    """The calls of one group on CUDA tensors."""

    def run(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a call of the group by the name of its method, or return `NOT_SERVED`, which all ranks get alike."""

    def contributors(self) -> tuple[int, ...] | None:
        """Return who is in the result of the last call, None if the engine made that; waits for the GPU."""

    def lost(self) -> tuple[int, ...]:
        """Return ranks that calls here have left out, and that the group's view may not have taken over yet."""

    def memory_pool(self, nbytes: int) -> Any:
        """Return memory of this rank that its peers have mapped; all members call it."""

    def close(self, is_aborted: bool) -> None:
        """End; kernels that wait for peers are ended at once if `is_aborted`. Idempotent."""


class Policy(NamedTuple):
    """What of a group's options matters on the device.

    Attributes:
        is_masked: a call that loses a rank succeeds over those who are left.
        counts_present: as in `BackendOptions`.
    """

    is_masked: bool = False
    counts_present: bool = False


Maker = Callable[[Engine, int, int, Policy], DeviceCalls | None]
MODES = ("raise/error", "mask/error", "mask/evict")  # a kernel waits for no decision about a rank that lives
MAX_RANKS = 8
_makers: list[Maker] = []


def register(maker: Maker) -> None:
    """Let `maker(engine, rank, staging_bytes, policy)` make the calls of groups on CUDA tensors; idempotent."""
    if maker not in _makers:
        _makers.append(maker)


def make(engine: Engine, rank: int, size: int, options: BackendOptions) -> DeviceCalls | None:
    """Return the calls of a group, None where its CUDA tensors go through host memory; opens nothing."""
    # not by the size: who comes into a group that has grown must meet the others, to hear that it is too large
    is_served = options.mode in MODES and size > 0 and engine.box.exports is None
    policy = Policy(options.fault_mode == "mask", options.counts_present)
    return _makers[0](engine, rank, engine.box.staging_bytes, policy) if _makers and is_served else None


def is_on_gpu(args: Any) -> bool:
    """Return whether the first tensor among the arguments of a call lies on a GPU; gathers may begin with none."""
    for arg in args:
        while isinstance(arg, (list, tuple)) and arg:
            arg = arg[0]
        if isinstance(arg, torch.Tensor):
            return bool(arg.is_cuda)
    return False


def meet(engine: Engine, row: bytes) -> tuple[Outboxes, dict[int, bytes]]:
    """Give `row`, as long on all ranks, to all members, and return theirs by rank, and the outboxes it ran with.

    Raises:
        As any collective.
    """
    mine = np.frombuffer(row, np.uint8)
    places: dict[int, Any] = {}

    def plan(box: Outboxes) -> Spread:
        """Plan it over these members."""
        places.clear()
        places.update({position: Sink(np.empty(len(mine), np.uint8)) for position in range(box.num_ranks)})
        return Spread(MEETING, pack(OP_CODE[MEETING], count=len(mine)), mine, True, places, box)

    box = engine.run(plan).box
    return box, {rank: places[position].array.tobytes() for position, rank in enumerate(box.members)}
