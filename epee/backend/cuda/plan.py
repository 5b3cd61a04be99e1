"""The sizes that decide how calls are made: kernel, number of blocks, memory. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .moves import Move
from .params import CollectiveConfig


@dataclass(frozen=True)
class CollectivePlan:
    """The thresholds that choose a call's kernel and blocks; all but `max_blocks`, `width`, `bulk_bytes` are equal on
    all ranks.

    Attributes:
        one_shot_bytes: largest row of an all_reduce or broadcast that crosses once.
        two_shot_bytes: largest row of these that crosses in packets.
        exchange_bytes: largest row of the others that crosses in packets.
        max_blocks: of kernels that send packets.
        warps: least number of warps in a block of those, if there is work for more.
        lanes: of a pipeline whose ranks have up to two roles, and three, if the memory has as many.
        width: most multiprocessors that a pipeline takes.
        chunk_bytes: of a pipeline's calls, if a slot has room for as much; fewer if each lane would have less than
            `min_chunks`.
        direct_lanes: of calls whose rows lie in pools, and of reductions among them that all ranks get, at most `2 *
            MAX_LANES`; 0: there are no such calls.
        bulk_bytes: least bytes that a rank sends in a call, except a broadcast, from which on it pushes them into slots
            with the copy engines of its multiprocessors; below, and in a broadcast, its threads store them. Ranks need
            not agree on it: a reader of slots finds the same chunks, flags and order in both cases (`slots.cuh`).
        pipeline: threads of a pipeline's block, two warps of which only wait, and its blocks on a multiprocessor.
        launch: mode of launches if the GPU has room, as in `jit.kernel.Kernel`.
    """

    one_shot_bytes: int = 128 << 10
    two_shot_bytes: int = 1 << 20
    exchange_bytes: int = 1 << 20
    max_blocks: int = 128
    warps: int = 1
    lanes: tuple[int, int] = (132, 88)
    width: int = 132
    chunk_bytes: int = 32 << 10
    min_chunks: int = 2
    direct_lanes: tuple[int, int] = (132, 264)
    bulk_bytes: int = 32 << 20
    pipeline: tuple[int, int] = (384, 2)
    launch: str = "early"

    def pushes(self, move: Move, rank: int) -> bool:
        """Whether a rank sends by bulk copies in a call that goes through slots."""
        if move.is_whole and move.root >= 0:
            return False
        sent = sum(move.in_bytes) - move.in_bytes[rank]
        if move.is_whole:  # a share for each
            sent //= move.takers.bit_count()
        return sent >= self.bulk_bytes


class Fitted(NamedTuple):
    """The launch of a call: its plan, kernel, blocks, their threads and bytes, mode, and the last arguments."""

    plan: CollectivePlan
    name: str
    kernel: Any
    grid: int
    block: int
    shared: int
    mode: str
    sizes: tuple[int, ...]


def plan_of(num_sharing: int, num_sms: int) -> CollectivePlan:
    """Return the plan for a GPU that `num_sharing` ranks use at once, which must leave each other room."""
    if num_sharing == 1:
        return CollectivePlan(width=num_sms)
    part = max(1, num_sms // (4 * num_sharing))
    return CollectivePlan(max_blocks=part, width=part, launch="plain")


def config_of(rank: int, num_ranks: int, staging_bytes: int, is_masked: bool = False) -> CollectiveConfig:
    """Return sizes for which large calls of each direction take at most about twice `staging_bytes`."""
    chunk = 32 << 10 if num_ranks <= 4 else 16 << 10
    lanes = max(2, min(132, 2 * staging_bytes // (2 * num_ranks * chunk)))
    packets = min(1 << 20, max(64 << 10, staging_bytes // 16))
    return CollectiveConfig(
        rank, num_ranks, packet_bytes=packets, num_lanes=lanes, chunk_bytes=chunk, is_masked=is_masked
    )
