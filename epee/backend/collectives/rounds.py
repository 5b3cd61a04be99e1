"""The division of a call into rounds.

Small: one round. Up to two staging buffers: rounds of CHUNK_BYTES with room for all of them, taken when everything has
arrived. Larger: two halves in turn, results in a private copy until the end (the price: as much memory as the results).
"""

from __future__ import annotations

from typing import NamedTuple

from ...engine.outbox import ALIGN_BYTES
from ...engine.plan import Plan
from ...memory.layout import align_up

CHUNK_BYTES = 2 << 20


class Rounds(NamedTuple):
    """`num_rounds` rounds of `length` elements (the last may be shorter), `halves` of them with room at once.

    `private` says that results must be collected apart until the end.
    """

    num_rounds: int
    length: int
    halves: int

    @property
    def private(self) -> bool:
        """True when rounds reuse the staging memory."""
        return self.halves < self.num_rounds


def cut(length: int, bytes_per_element: int, staging_bytes: int) -> Rounds:
    """Return the rounds of a call in which every rank puts `length` elements of `bytes_per_element`.

    For a call with a segment per rank, an element is one element of every segment.
    """
    chunk = min(CHUNK_BYTES, staging_bytes)
    total = length * bytes_per_element
    if total <= chunk:
        return Rounds(1, max(length, 1), 1)
    per_round = max(1, chunk // bytes_per_element)
    if per_round >= ALIGN_BYTES:
        per_round -= per_round % ALIGN_BYTES  # elements: any item size then keeps cache lines whole
    count = -(-length // per_round)
    halves = count if count * per_round * bytes_per_element <= 2 * staging_bytes else 2
    return Rounds(count, per_round, halves)


def lay_out(plan: Plan, rounds: Rounds, round_bytes: int, merge_bytes: int, puts: bool) -> None:
    """Write the geometry into `plan`; `puts` says whether this rank contributes a block."""
    plan.rounds = rounds.num_rounds
    plan.num_halves = rounds.halves
    plan.round_bytes = align_up(round_bytes, ALIGN_BYTES)
    plan.merge_bytes = align_up(merge_bytes, ALIGN_BYTES)
    plan.read_bytes = rounds.halves * (plan.round_bytes + plan.merge_bytes)
    plan.put_bytes = plan.read_bytes if puts else 0
