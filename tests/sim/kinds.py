"""What the calls of a run move, and what their results must be: functions of the seed, the same at all processes.

Calls: kind 0 reduces in one round, 1 in three rounds and two phases through two halves, 2 is an all-to-all, 3 a
barrier. In runs of seeds from PULL_SEEDS on there are calls that can do without who is lost, as a buffer's combine
(AMONG in `protocol/outcome.py`). From ROOT_SEEDS on many have a root (`roots.py`): the program chooses it among those
that it is shown before the call, and where it is lost before the call is whole, the call ends in the first epoch
without it, for everybody (`CallOutcome._move` in `engine/membership/call_outcome.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from .plan import HOST_SEEDS, ROOT_SEEDS

PULL_SEEDS = 1 << 30
PRIME = (1 << 61) - 1


class Kind(NamedTuple):
    """What a call moves."""

    rounds: int
    is_two_phase: bool
    is_pairwise: bool
    has_payload: bool
    is_pull: bool = False
    root: str = ""  # what a root does, if there is one: it alone puts, or it alone takes


ONE_ROUND, TWO_PHASES = Kind(1, False, False, True), Kind(3, True, False, True)
PAIRWISE, BARRIER = Kind(1, False, True, True), Kind(1, False, False, False)
PULL = Kind(1, False, True, True, True)
KINDS = (ONE_ROUND, TWO_PHASES, PAIRWISE, BARRIER)
PUTS, TAKES = "puts", "takes"
BROADCAST, GATHER, REDUCE = (ONE_ROUND._replace(root=PUTS), *(k._replace(root=TAKES) for k in (ONE_ROUND, TWO_PHASES)))
ROOT_KINDS = (BROADCAST, REDUCE, GATHER, BROADCAST, ONE_ROUND, REDUCE, GATHER, TWO_PHASES)


def kind_of(seed: int, seq: int) -> Kind:
    """Return the kind of a call: a function of the seed, the same at all ranks."""
    if is_pull(seed, seq):
        return PULL
    if seed >= ROOT_SEEDS:
        return ROOT_KINDS[(seed * 7 + seq * 13 + (seed ^ seq) // 3) % len(ROOT_KINDS)]
    return KINDS[(seed * 7 + seq * 13 + (seed ^ seq) // 3) % 4]


def is_pull(seed: int, seq: int) -> bool:
    """Return whether a call can do without who is lost."""
    return PULL_SEEDS <= seed < HOST_SEEDS and (seed + seq) % 3 < 2


def root_of(seed: int, seq: int, shown: tuple[int, ...]) -> int:
    """Return the root that a program chooses of those that it is shown: the lowest, or one after the other."""
    return shown[(seed + seq) % len(shown) if seed // 8 % 2 else 0]


def value(slot: int, incarnation: int, seq: int, k: int, dst: int) -> int:
    """Return what a process contributes to round `k` of a call, for `dst` in pairwise calls (0 else)."""
    return ((((slot * 1009 + incarnation) * 1013 + seq) * 1019 + k) * 1021 + dst + 1) * 2654435761 % PRIME


def expected_result(seed: int, seq: int, slot: int, contributors: dict[int, int], root: int = -1) -> int:
    """Return the digest of the result of call `seq` at `slot` over contributors slot -> incarnation."""
    kind = kind_of(seed, seq)
    total = 1
    if not kind.has_payload or (kind.root == TAKES and slot != root):
        return total
    if kind.root == PUTS:
        contributors = {root: contributors.get(root, 0)}
    for k in range(kind.rounds):
        dst = slot if kind.is_pairwise else 0
        words = {src: value(src, inc, seq, k, dst) for src, inc in contributors.items()}
        if kind.is_pairwise:
            total += sum((2 * word + 1) * (src + 3) for src, word in words.items())
        elif kind.is_two_phase:
            total += sum(sum(2 * word + 1 for word in words.values()) * (dst + 3) for dst in contributors)
        else:
            total += sum(2 * word + 1 for word in words.values())
    return total % PRIME or 1
