"""Copies of rows to their final offset (`throughput/rows.py`): small ones, and those divided among threads."""

from __future__ import annotations

import numpy as np
import pytest

from epee.ep.throughput.placement import Segment
from epee.ep.throughput.rows import THREADED_BYTES, write_rows

NUM_ROWS = 48


@pytest.mark.parametrize("row_bytes", [8, THREADED_BYTES // NUM_ROWS + 8 & -8], ids=["small", "threaded"])
@pytest.mark.parametrize("by_index", [True, False])
def test_rows_of_a_segment_come_to_their_offset_and_no_others(row_bytes: int, by_index: bool) -> None:
    random = np.random.default_rng(0)
    source = random.integers(-(1 << 62), 1 << 62, (2 * NUM_ROWS, row_bytes // 8))
    index = random.integers(0, len(source), NUM_ROWS + 7)
    memory = np.zeros((NUM_ROWS + 2, row_bytes // 8), dtype=np.int64)
    segment = Segment(dst_rank=0, first=3, num_rows=NUM_ROWS, dst_row=1)
    write_rows(source, index if by_index else None, segment, memory[1:-1])
    assert (memory[1:-1] == (source[index[3 : 3 + NUM_ROWS]] if by_index else source[3 : 3 + NUM_ROWS])).all()
    assert not memory[0].any()
    assert not memory[-1].any()
