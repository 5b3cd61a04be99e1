"""`MoELayer` over GPU buffers, without a GPU: kernels built by g++, forward and backward against the dense layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.csrc.emulated import has_compiler
from tests.csrc.emulated_buffer import emulated
from tests.nn import test_layer
from tests.nn.cases import Case

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_float32_layer_equals_the_dense_layer(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = test_layer.run_ranks

    def run_ranks(function: Any, num_ranks: int, *args: Any) -> list[Any]:
        """Run ranks with buffers on the emulated GPU."""
        return plain(emulated, num_ranks, function, *args, timeout_s=200)

    monkeypatch.setattr(test_layer, "run_ranks", run_ranks)
    case = Case((40, 25), hidden=32, layout=layout, num_local_experts=4, num_topk=3, dtype=torch.float32)
    test_layer._check_against_dense(case, tolerance=1e-4)
