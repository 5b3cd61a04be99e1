"""The handle of a low-latency dispatch over several hosts: that of CPU tensors, and the records that rows came in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...throughput.placement import Ints
from ..cpu import CpuLatencyHandle


class ArrivedIds(NamedTuple):
    """The records of one source on this host.

    Attributes:
        owners: `[records, num_topk]` int64: ranks of their experts, -1 for none.
        mine: indices of those that this rank has.
    """

    owners: Ints
    mine: Ints

    @property
    def num_records(self) -> int:
        """Number of the records."""
        return len(self.owners)

    def of(self, rank: int) -> Ints:
        """Return the indices of those that a rank has."""
        return np.flatnonzero((self.owners == rank).any(1))


@dataclass(eq=False)
class HostsLatencyHandle(CpuLatencyHandle):
    """The handle of CPU tensors over several hosts.

    Attributes:
        records: for each host the tokens that went there, ascending.
        came: the records received from each rank; None if there are none.
    """

    records: list[Ints] = field(default_factory=list)
    came: list[ArrivedIds | None] = field(default_factory=list)
