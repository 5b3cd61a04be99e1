"""Multiprocessors for several buffers of one process: who is wide leaves room, and too many are refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from epee.ep.gpu.share import RESERVE, Share, width_beside
from epee.errors import ResourceError

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
