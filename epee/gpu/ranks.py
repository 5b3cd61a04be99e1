"""Limits of the number of ranks: what kernels serve, and the room for ranks in their memory and arguments."""

from __future__ import annotations

MAX_RANKS = 64  # in masks, views and counts
MAX_LOCAL = 16  # ranks of one NVLink domain: kernels store into the memory of these, and wait for them
_LEAST_ROOM = 8  # groups of up to so many ranks share the layouts of memory and arguments


def room_of(num_ranks: int) -> int:
    """Return for how many ranks arrays are made in a group of `num_ranks`: the next power of two, 8 at least.

    So arguments and words of small groups stay as short as they can be, and few layouts exist.
    """
    return max(_LEAST_ROOM, 1 << (num_ranks - 1).bit_length())
