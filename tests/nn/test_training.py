"""`MoELayer` as training uses it: checkpointed and compiled it computes what it computes plain."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.harness import run_ranks

from .cases import Case
from .training import WAYS, steps


@pytest.mark.timeout(400)  # inductor's graphs take a compiler some seconds each, at load 12 over three minutes
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_checkpointing_and_compiling_change_nothing(layout: str) -> None:
    case = Case((33, 20), hidden=32, layout=layout, num_local_experts=3, num_topk=2)
    names = tuple(name for name in WAYS if "inductor" not in name or shutil.which("g++"))
    for found in run_ranks(steps, 2, case, names, timeout_s=380):
        for name in names:
            for want, got in zip(found["plain"], found[name], strict=True):
                assert want.keys() == got.keys()
                for key, value in want.items():
                    torch.testing.assert_close(got[key], value, rtol=1e-12, atol=1e-12, msg=f"{name} {key}")
