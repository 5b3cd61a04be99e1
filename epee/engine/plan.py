"""The data movement of a collective, apart from its protocol: the parts in which data is put, merged and taken.

`Operation` (`operation.py`) runs a plan through its rounds; `arguments.py` makes one from the arguments of a call;
those that move data are in `backend/cuda/`. A plan holds no state of the protocol, so a call can be planned again for
other members.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from .call import EngineCall
from .outbox import CELL_PAYLOAD_BYTES, PeerRegions
from .signature import OP_CODE, REFUSED, pack
from .tensors import Array

Range = tuple[int, int]  # first byte, number of bytes


class Sink:
    """A destination of results: `array`, and the action `finish` once they are there. `tensors.Target` is one."""

    array: Array

    def __init__(self, array: Array) -> None:
        self.array = array

    def finish(self) -> None:
        """Move the results from `array` to the user's tensors."""


class Plan:
    """The data movement of a collective; subclasses are in `backend/cuda/`.

    Attributes:
        name: for messages.
        signature: see `signature.py`.
        detail: further word that must agree (shapes of a list); 0 when the signature says all.
        rounds: how many; the same on all ranks.
        round_bytes: distance of two rounds in every rank's staging block.
        merge_bytes: size of a rank's reduced share per round; 0 for calls without a second phase.
        put_bytes: size of this rank's block in its outbox; 0 when it only reads.
        read_bytes: size of the part of a peer's block that may be read, for the bounds check of its offset.
        num_halves: rounds that have room at the same time.
        preamble: words that follow the header in the cell, for `agree`; None when the signature says all.
        heeds_stalls: whether the group's policy for silent ranks applies; else the call ends with its time-out.
    """

    detail = 0
    rounds = 1
    round_bytes = 0
    merge_bytes = 0
    put_bytes = 0
    read_bytes = 0
    num_halves = 1
    heeds_stalls = True
    preamble: array[int] | None = None

    def __init__(self, name: str, signature: int) -> None:
        self.name = name
        self.signature = signature

    def put(self, peer_regions: PeerRegions, k: int, offset: int) -> None:
        """Write this rank's contribution of round `k` at byte `offset` of its outbox."""

    def merge(self, peer_regions: PeerRegions, k: int, offsets: list[int], offset: int) -> None:
        """Reduce this rank's share of round `k`, found at `offsets[rank]` of each outbox, into `offset` of its own."""

    def exports(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return which bytes of round `k`'s block these ranks read, counted from where `put` wrote it; all, if unsure.

        Args:
            readers: positions of the ranks of one host, ascending.
        """
        return ((0, self.round_bytes or self.put_bytes),)

    def exports_merged(self, peer_regions: PeerRegions, k: int, readers: Sequence[int]) -> Sequence[Range]:
        """Return the same for this rank's reduced share of round `k`."""
        return ((0, self.merge_bytes),)

    def take(self, peer_regions: PeerRegions, k: int, offsets: list[int]) -> None:
        """Read round `k` from `offsets[rank]` of each outbox (of the merged shares in two-phase calls)."""

    def agree(self, peer_regions: PeerRegions, offsets: list[int], cell: int, call: EngineCall) -> None:
        """Compare what the peers put beside their header; may set the number of rounds, raises `MismatchError`.

        Args:
            cell: index of the header's first word in each outbox.
            call: for messages.
        """

    def commit(self) -> None:
        """Finish: copy results back to strided tensors, private copies to their tensors."""

    def sinks(self) -> Sequence[Sink]:
        """Return the destinations of the results on this rank, the same number for every plan of the same call."""
        return ()

    def detach(self) -> None:
        """Detach from the user's tensors: from here on private copies of their contents are read and written."""

    def is_like(self, other: Plan) -> bool:
        """Return whether `other` plans the same call: the ranks would take one for the other."""
        mine = (self.signature, self.detail, self.preamble)
        return mine == (other.signature, other.detail, other.preamble)

    def deliver(self, results: Sequence[Sink]) -> None:
        """Write results that a plan of the same call has kept (`sinks`) to the destinations of this one."""
        for sink, kept in zip(self.sinks(), results, strict=True):
            sink.array[...] = kept.array
            sink.finish()


Make = Callable[[PeerRegions], Plan]  # plans a call over the members of these peer regions


class RefusedPlan(Plan):
    """The plan of a call that this rank refused: it sends the reason to the peers in that call."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, pack(REFUSED, root=OP_CODE.get(name, 0)))
        self.reason = reason.encode()[: CELL_PAYLOAD_BYTES - 8]
        self.put_bytes = CELL_PAYLOAD_BYTES
        self.detail = len(self.reason)

    def put(self, peer_regions: PeerRegions, k: int, offset: int) -> None:
        """Write the reason as text."""
        view = peer_regions.views[np.dtype(np.uint8)][peer_regions.rank]
        view[offset : offset + len(self.reason)] = np.frombuffer(self.reason, np.uint8)


def refused(name: str, exc: Exception) -> RefusedPlan:
    """Return the plan that reports a refused call to the peers."""
    return RefusedPlan(name, str(exc))
