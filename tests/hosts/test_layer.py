"""`MoELayer` over several hosts computes what one dense layer computes: outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest

from tests.nn import test_layer
from tests.nn.cases import Case

from . import run_on_loopbacks

PLACEMENT = (0, 0, 1, 1)


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_layer_over_hosts_equals_the_dense_layer(layout: str) -> None:
    """Float64, so sums by host differ from those of one process by their order alone."""

    def start(function: Any, num_ranks: int, *args: Any) -> list[Any]:
        return run_on_loopbacks(function, PLACEMENT[:num_ranks], *args)

    case = Case((13, 0, 8, 5), hidden=16, layout=layout, num_local_experts=3, num_topk=3)
    test_layer._check_against_dense(case, tolerance=1e-12, run=start)
