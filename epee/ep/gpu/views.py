"""How the ranks of a GPU buffer in throughput mode agree on who takes part.

`Views` decides in rounds by `latency_sync.Agreement`, on the cards and the table of `latency_birth.settle`; processes
are not replaced here, and the kernels' memory is no part of it. A rank enters a round when its GPU is idle, so behind a
decision no call of a member is in flight, and what it sets then (`Throughput.set_view`) meets no kernel.

A crash in a round leaves a hello without its rank, which the others' watches see, and nothing to repair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..control.bootstrap import Born
from ..control.messages import ControlPlane
from ..latency.birth import LatencyBorn, settle
from ..membership.table import Decision


class _NoMemory:
    """What the agreement is to map of a path whose processes are not replaced: nothing."""

    def renew(self) -> tuple[bytes, Any]:
        """Lend nothing."""
        return b"", None

    def attach(self, blob: bytes) -> Any:
        """Map nothing."""
        del blob

    def cleanse(self, rank: int) -> None:
        """Nothing of an old process stays, as none is replaced."""

    def use(self, rank: int, held: Any) -> None:
        """The kernels' memory stays."""

    def drop(self, held: Any) -> None:
        """Nothing is mapped."""

    def follow(self, rank: int, process: tuple[int, int]) -> None:
        """No rank gets another process."""


class Views:
    """Rounds of agreement of one buffer. Collective to make.

    Args:
        control: the host side of the buffer.
        born: its inboxes, and the watch on everybody's process.
        interrupt: called while waiting; raises to end the wait.
        deadline: `time.monotonic()` value for the others to come.

    Raises:
        ResourceError: no memory or descriptors, here.
        MismatchError: another rank could not; the same on all others.
    """

    def __init__(self, control: ControlPlane, born: Born, interrupt: Callable[[], None], deadline: float) -> None:
        start = LatencyBorn(born, None, None)
        self._kin, self._agreement, _ = settle(
            control.rank, control, start, _NoMemory(), interrupt, deadline, maps=False
        )

    @property
    def processes(self) -> dict[int, tuple[int, int]]:
        """The process (number, start time) of each other rank."""
        return {rank: process for rank, process in self._kin.processes.items() if rank != self._kin.rank}

    def sync(self, active: Sequence[bool], seq: int, deadline: float) -> Decision:
        """Take part in rounds until one has this rank. No call of this rank may be in flight.

        Args:
            active: whom this rank counts on; others are not waited for long.
            seq: the highest number of a call that this rank has used.
            deadline: `time.monotonic()` value.

        Raises:
            NoQuorumError: those who came are too few to decide, or the others decided without this rank.
            CommTimeoutError: the rank that decides does not get on.
        """
        return self._agreement.sync(active, seq, deadline)

    def close(self) -> None:
        """Unmap everything; idempotent."""
        self._kin.close()
