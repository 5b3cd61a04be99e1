"""Multiprocessors for several buffers of one process: who is wide leaves room, and too many are refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from epee.errors import InvalidArgument, ResourceError
from epee.gpu.device import RESERVE, Share, width_beside
from epee.gpu.shapes import MAX_CHANNELS, MAX_CHUNK_BYTES, Limits, expert_shape, num_senders

SMS = 132


def test_buffer_alone_takes_the_whole_gpu() -> None:
    assert width_beside([], SMS) == SMS


def test_second_wide_buffer_leaves_the_reserve() -> None:
    assert width_beside([SMS], SMS) == SMS - RESERVE


def test_all_but_the_widest_always_fit_with_the_reserve() -> None:
    for asked in itertools.product([8, 24, 65, SMS], repeat=4):
        widths: list[int] = []
        for width in asked:
            try:
                widths.append(min(width, width_beside(widths, SMS)))
            except ResourceError:
                break
        assert sum(widths) - max(widths) + RESERVE <= SMS, widths


def test_too_many_buffers_are_refused_with_the_way_out() -> None:
    with pytest.raises(ResourceError, match="use fewer at once"):
        width_beside([SMS, SMS - RESERVE], SMS)


def test_only_buffers_on_other_streams_or_in_graphs_count() -> None:
    device = torch.device("cuda", 63)
    first, second = Share(device, SMS), Share(device, SMS)
    first.stream = 7
    first.widen(SMS)
    assert second.limit(7, False) == (SMS, True)
    assert second.limit(8, False) == (SMS - RESERVE, False)
    assert second.limit(7, True) == (SMS - RESERVE, False)  # a graph may be replayed on any stream
    first.in_graphs = True
    assert second.limit(7, False) == (SMS - RESERVE, False)
    first.leave()
    assert second.limit(8, False) == (SMS, True)


def test_a_wish_for_senders_is_cut_to_what_leaves_enough_expanders() -> None:
    for wanted, num_sms, num_ranks, warps in itertools.product(
        (1, 8, 24, 64, SMS), (2, 3, 40, 66, SMS - RESERVE, SMS), (1, 2, 8), (2, 8, 16)
    ):
        senders = num_senders(wanted, num_sms, num_ranks, warps)
        assert 1 <= senders <= min(wanted, num_sms - 1)
        assert senders * warps // 2 <= MAX_CHANNELS
        assert (num_sms - senders) * 32 * warps >= num_ranks * senders * warps // 2  # streams that a warp can watch
        more = senders + 1
        is_more_too_many = 64 * (num_sms - more) < num_ranks * more or more * warps // 2 > MAX_CHANNELS
        assert senders == wanted or more == num_sms or is_more_too_many
    with pytest.raises(InvalidArgument, match="needs 2 multiprocessors"):
        num_senders(8, 1, 2, 16)


def test_a_block_of_the_expert_layout_has_room_for_all_warps_and_for_zeros() -> None:
    for row_bytes, shared_bytes, num_stages in itertools.product(
        (16, 128, 7168, 12288, 14016, 14336, 16384, 28704, 65536), (24 << 10, 219 << 10), (2, 4)
    ):
        shape = expert_shape(row_bytes, SMS, Limits(SMS, shared_bytes), num_stages)
        warps = shape.block // 32
        assert shape.grid == SMS
        assert warps >= 2
        assert warps % 2 == 0
        assert shape.chunk_bytes % 16 == 0
        assert shape.chunk_bytes <= MAX_CHUNK_BYTES
        assert shape.shared_bytes == (warps * num_stages // 2 + 1) * shape.chunk_bytes <= shared_bytes
