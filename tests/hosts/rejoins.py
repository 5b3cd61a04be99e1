"""What the tests of replacements in running buffers over hosts share: steps that are compared bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import epee
from tests.hosts.joins import hear, say
from tests.hosts.survival_steps import check_bits
from tests.survive.buffer_rounds import make_buffer, make_step


def begin(group: Any, timeout: float = 20.0) -> epee.Buffer:
    """Make the buffer, its memory poisoned."""
    os.environ["EPEE_POISON"] = "1"
    return make_buffer(group, timeout)


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
