"""Bytes per link follow from row counts."""

from __future__ import annotations

import torch

from epee.demo.run import links
from epee.demo.train import bytes_per_link


def test_each_dispatched_row_is_answered_the_other_way() -> None:
    dispatched = torch.tensor([[5.0, 3.0], [2.0, 7.0]], dtype=torch.float64)
    assert bytes_per_link(dispatched, 10) == [[400, 200], [200, 560]]


def test_links_are_named_one_by_one_or_summed_up() -> None:
    assert links([[9e6, 1e6], [2e6, 9e6]]) == "0→1 1.0 MB  1→0 2.0 MB"
    assert links([[9e6]]) == "nothing between ranks: there is one"
    many = [[0.0 if src == dst else 1e6 for dst in range(8)] for src in range(8)]
    many[3][4] = 5e6
    assert links(many) == "60.0 MB over 56 links, most 3→4 5.0 MB"
