"""What the tests of replacements in running buffers over hosts share: steps that are compared bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import epee
from tests.hosts.joins import hear, joiner, member, say, sums
from tests.hosts.survival_steps import check_bits
from tests.loopback import settle
from tests.survive.buffer_rounds import make_buffer, make_step


def begin(group: Any, timeout: float = 20.0) -> epee.Buffer:
    """Make the buffer, its memory poisoned."""
    os.environ["EPEE_POISON"] = "1"
    return make_buffer(group, timeout)


def arrive(
    index: int, folder: str, placement: Sequence[int], turns: Sequence[tuple[int, int]], mode: str = "mask"
) -> tuple[int, int, list[int], Any]:
    """Come into the group: a member at once, a process beyond the ranks when the rank that it replaces is lost.

    Args:
        turns: (victim, host of its replacement), in order; process `len(placement) + i` is the replacement of turn i.

    Returns:
        the rank, the turn that it came with (-1: a member), where the ranks are by then, the group.
    """
    num_ranks = len(placement)
    turn = max(-1, index - num_ranks)
    rank, where = index if turn < 0 else turns[turn][0], list(placement)
    for victim, host in turns[: turn + 1]:
        where[victim] = host
    settle(where[rank])
    if turn < 0:
        return rank, turn, where, member(rank, num_ranks, folder, mode)
    hear(folder, f"lost{turn}")
    group = joiner(rank, num_ranks, folder, mode)
    sums(group, range(num_ranks))
    return rank, turn, where, group


def check_all(buffer: epee.Buffer, where: Sequence[int], step: int) -> None:
    """Make steps of both layouts, with FP8 and without, and one whose bits are looked at; everybody is in them."""
    for number, layout in enumerate(("rank", "expert", "rank", "expert")):
        assert make_step(buffer, step + number, layout, is_fp8=number > 1)[2] == (1,) * buffer.num_ranks
    assert check_bits(buffer, tuple(where), wide=False) == [1] * buffer.num_ranks


def end(folder: str, rank: int, ranks: Iterable[int]) -> None:
    """Wait until these ranks are through: who closes a buffer is gone for those that are in a call."""
    say(folder, f"through-{rank}")
    for peer in ranks:
        hear(folder, f"through-{peer}")
