"""Calls that torch.compile does not trace into: functions, methods, and a group's calls within a compiled function."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from epee import torch_private as module
from epee.untraced import untraced, untraced_methods
from tests.harness import run_ranks

NUM_FUNCTIONS = 12  # more than the compiler would compile one code object for


def _untraceable(x: torch.Tensor) -> torch.Tensor:
    """Do what the compiler fails at: read foreign memory by numpy."""
    assert not torch.compiler.is_compiling()
    factor = int(np.frombuffer(np.int64(2).tobytes(), dtype=np.int64).reshape(1, -1)[0, 0])
    return x * factor


class _Doubler:
    """Has a public method, which is left alone, and a private one, which is not there for others."""

    def double(self, x: torch.Tensor) -> torch.Tensor:
        """Return x * 2."""
        return self._double(x)

    twice = double

    def _double(self, x: torch.Tensor) -> torch.Tensor:
        return _untraceable(x)


def _in_many_functions(rank: int, num_ranks: int, has_marks: bool) -> list[str]:
    if not has_marks:
        module._compiler = None
    doubler = untraced_methods(_Doubler)()
    assert hasattr(_Doubler.double, "__wrapped__") is not has_marks
    functions = [untraced(lambda x, k=k: _untraceable(x) + k) for k in range(NUM_FUNCTIONS)]

    def everything(x: torch.Tensor) -> torch.Tensor:
        for function in functions:
            x = function(torch.sin(x))
        return doubler.double(x) + 1

    compiled = torch.compile(everything, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        for seed in range(3):
            x = torch.full((3 + seed,), 0.1)
            torch.testing.assert_close(compiled(x), everything(x))
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("has_marks", [True, False])
def test_compiled_functions_call_what_is_not_traced(has_marks: bool) -> None:
    # in a process of its own: the compiler's hooks into garbage collection swallow exceptions of signal handlers
    (told,) = run_ranks(_in_many_functions, 1, has_marks, timeout_s=100)
    assert not [text for text in told if "limit" in text]


@pytest.mark.parametrize("has_marks", [True, False])
def test_names_and_private_methods_stay(has_marks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_marks:
        monkeypatch.setattr(module, "_compiler", None)
    for name in ("double", "twice"):
        monkeypatch.setattr(_Doubler, name, _Doubler.double)  # taken back at the end
    untraced_methods(_Doubler)
    assert _Doubler.double.__name__ == "double"
    assert _Doubler.double.__doc__ == "Return x * 2."
    assert _Doubler.twice is _Doubler.double
    assert not hasattr(_Doubler._double, "__wrapped__")
    assert not hasattr(_Doubler._double, "_torchdynamo_disable")


ONE_CALL = """
import sys, torch, torch.distributed as dist, epee
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
found = "torch._dynamo" in sys.modules
with epee.Buffer(dist.group.WORLD, num_experts=2, hidden=8, num_topk=1, max_tokens_per_rank=4) as buffer:
    buffer.dispatch(torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64))
print(found, "torch._dynamo" in sys.modules)
"""


def test_calls_do_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", ONE_CALL], capture_output=True, text=True, timeout=100)
    assert done.stdout.split()[:2] in (["False", "False"], ["True", "True"]), done


def _group_calls(rank: int, num_ranks: int) -> list[float]:
    """Calls of a group between graphs, blocking and not, and messages."""
    other = 1 - rank

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        torch._dynamo.graph_break()
        work: Any = dist.all_reduce(y, async_op=True)
        work.wait()
        dist.barrier()
        got = torch.empty_like(y)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, y, other), dist.P2POp(dist.irecv, got, other)]):
            work.wait()
        return got + 1

    compiled = torch.compile(step, backend="aot_eager")
    return [compiled(torch.ones(4) * (rank + seed)).sum().item() for seed in range(3)]


@pytest.mark.timeout(120)
def test_a_groups_calls_within_a_compiled_function() -> None:
    want = [4 * ((2 * seed + 1) * 4.0 + 1) for seed in range(3)]
    assert run_ranks(_group_calls, 2, backend="epee", timeout_s=100) == [want, want]
