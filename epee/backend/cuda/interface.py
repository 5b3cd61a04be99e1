"""The parts of the CUDA backend that the backend needs before a group has a GPU: types, marks, one exchange.

`meet` is the exchange: a call of the group's engine like any other, with its own name, so that a rank that makes
another call gets an error that names both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ...engine import Engine
from ...engine.outbox import PeerRegions
from ...engine.plan import Sink
from ...engine.signature import OP_CODE, pack
from ..collectives.copying import Spread

NOT_SERVED = object()
MEETING = "device_meeting"


class Policy(NamedTuple):
    """The options of a group that matter on the device.

    Attributes:
        is_masked: a call that loses a rank succeeds over the remaining ranks.
        counts_present: as in `BackendOptions`.
        waits: a call waits for a living rank for as long as that takes (`on_stall="wait"`).
    """

    is_masked: bool = False
    counts_present: bool = False
    waits: bool = False


# Modes in which no kernel waits for a decision about a living rank.
MODES = ("raise/error", "raise/wait", "mask/error", "mask/evict", "mask/wait")


def is_on_gpu(args: Any) -> bool:
    """Return whether the first tensor among the arguments of a call lies on a GPU; gathers may begin with none."""
    for arg in args:
        while isinstance(arg, (list, tuple)) and arg:
            arg = arg[0]
        if isinstance(arg, torch.Tensor):
            return bool(arg.is_cuda)
    return False


def meet(engine: Engine, row: bytes) -> tuple[PeerRegions, dict[int, bytes]]:
    """Send `row`, of the same length on all ranks, to all members; return theirs by rank, and the peer regions used.

    Raises:
        As any collective.
    """
    mine = np.frombuffer(row, np.uint8)
    places: dict[int, Any] = {}

    def plan(peer_regions: PeerRegions) -> Spread:
        """Plan it over these members."""
        places.clear()
        places.update({position: Sink(np.empty(len(mine), np.uint8)) for position in range(peer_regions.num_ranks)})
        return Spread(MEETING, pack(OP_CODE[MEETING], count=len(mine)), mine, True, places, peer_regions)

    peer_regions = engine.run(plan).peer_regions
    return peer_regions, {rank: places[position].array.tobytes() for position, rank in enumerate(peer_regions.members)}
