"""V2's two size estimates: the bytes of a buffer, and the SMs of a dispatch."""

from __future__ import annotations

import math

from epee.compat.deep_ep.shared.layout import align_up
from epee.ep import MemoryBytes, memory_for

_ALIGN = 2 << 20
NVLINK_GBS = 430.0  # of one H200, by DeepEP's estimate (0.9 of the nominal rate)
_LEAST_SMS = 4
_SMS_WITHOUT_OVERLAP = 64
_MARGIN = 1.25


def buffer_bytes(num_ranks: int, num_max_tokens_per_rank: int, hidden: int, num_topk: int) -> int:
    """Return the bytes of a rank for bfloat16 rows, expanded ones where `num_topk` is known, a multiple of 2 MiB."""
    return align_up(sum(memory_for(num_ranks, num_max_tokens_per_rank, hidden, num_topk)), _ALIGN)


def memory_of(num_bytes: int, num_ranks: int, num_max_tokens_per_rank: int, hidden: int, num_topk: int) -> MemoryBytes:
    """Return the memory allocated by a buffer's constructor: for its sizes, or else all bytes for the rank layout.

    Parts that exceed the bytes are not allocated: first rows of the expert layout, which its first combine then
    allocates.
    """
    if not (num_max_tokens_per_rank and hidden):
        return MemoryBytes(num_bytes)
    wanted = memory_for(num_ranks, num_max_tokens_per_rank, hidden, num_topk)
    slots = min(wanted.slots, num_bytes)
    return MemoryBytes(slots, wanted.expert if slots + wanted.expert <= num_bytes else 0)


def theoretical_num_sms(
    num_ranks: int,
    num_experts: int,
    num_topk: int,
    nvlink_gbs: float,
    sm_gbs: tuple[float, float],
    is_overlapped: bool,
) -> int:
    """Return the SMs that keep the links busy, by DeepEP's model of a balanced routing on one host.

    A token is sent to `R * (1 - C(E - E/R, K) / C(E, K))` of R ranks on average. For each byte received, an SM reads
    the inverse of that and writes one; (R - 1) / R of it crosses a link. 25 % margin, even, at least 4.

    Args:
        num_ranks, num_experts, num_topk: R, E, K.
        nvlink_gbs: GB/s of a GPU's links, 0 for an H200's.
        sm_gbs: GB/s that one SM reads and writes.
        is_overlapped: whether other kernels need SMs meanwhile.
    """
    traffic = 1 - 1 / num_ranks
    if traffic == 0:
        return _LEAST_SMS
    elsewhere = math.comb(num_experts - num_experts // num_ranks, num_topk) / math.comb(num_experts, num_topk)
    ranks_per_token = num_ranks * (1 - elsewhere)
    received_gbs = (nvlink_gbs or NVLINK_GBS) / traffic
    read_gbs, write_gbs = sm_gbs
    sms = max(received_gbs / ranks_per_token / read_gbs, received_gbs / write_gbs) * _MARGIN
    even = align_up(max(_LEAST_SMS, math.ceil(sms)), 2)
    return even if is_overlapped else max(_SMS_WITHOUT_OVERLAP, even)
