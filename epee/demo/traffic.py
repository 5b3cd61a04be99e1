"""How many bytes crossed each link, counted from the handles' row counts.

A link is an ordered pair of ranks. A dispatch carries `num_sent[d]` rows from this rank to rank d; the combine of the
same handle carries as many rows from rank d to this rank. A training step does both twice: forward, and backward with
gradients in place of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

FORMULA = (
    "bytes[s][d] = row_bytes * (dispatched[s][d] + dispatched[d][s]), row_bytes = hidden * bytes per element; "
    "dispatched[s][d] = rows that rank s sent to rank d in dispatches, one per (token, expert), summed over layers and "
    "steps (handle.num_sent), counted twice in training steps because the backward moves the same rows again; each "
    "dispatched row is answered by one row of a combine, which crosses the link the other way. Payload rows only: "
    "weights, ids and counts (below 4 % of it) are left out. The diagonal stays inside a rank. The counts of a process "
    "that was lost are lost with it."
)


class Traffic:
    """Counts the rows that this rank dispatched to each rank.

    Attributes:
        rows: `[num_ranks]` float64 (whole numbers), what this rank dispatched to each rank so far.
    """

    def __init__(self, num_ranks: int) -> None:
        self.rows = torch.zeros(num_ranks, dtype=torch.float64, device="cpu")

    def add(self, num_sent: Iterable[list[int]], *, backward: bool) -> None:
        """Count one forward of all layers; with `backward`, the backward that follows it too."""
        for per_rank in num_sent:
            self.rows += torch.tensor(per_rank, dtype=torch.float64, device="cpu") * (2 if backward else 1)


def bytes_per_link(dispatched: Tensor, row_bytes: int) -> Tensor:
    """Turn `[num_ranks, num_ranks]` dispatched rows into bytes from (row) to (column), by `FORMULA`."""
    return (dispatched + dispatched.T) * row_bytes
