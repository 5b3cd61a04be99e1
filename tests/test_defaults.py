"""No tensor of epee's takes its device or dtype from torch's defaults: by the sources, and while calls run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

import epee
from epee.backend.group import ProcessGroup
from tests import defaults
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "epee").rglob("*.py"))
# torch's own list of what `torch.set_default_device` changes, as it is in the torch that is installed here
CONSTRUCTORS = {function.__name__ for function in _device_constructors()} | {"Generator"}
# What has no `dtype`, or takes it from the defaults whatever one says.
WITHOUT_DTYPE = {"Generator"}
LEGACY = {name for name in vars(torch) if name.endswith("Tensor")}  # torch.Tensor(3), torch.FloatTensor(3)


def owner_of(node: ast.expr) -> str:
    return ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""


def is_module_with_parameters(node: ast.expr) -> bool:
    """True for `nn.Linear` and whatever else of torch.nn makes tensors of a device and a dtype."""
    if not isinstance(node, ast.Attribute) or owner_of(node) not in ("nn", "torch.nn"):
        return False
    kind = getattr(torch.nn, node.attr, None)
    return inspect.isclass(kind) and {"device", "dtype"} <= set(inspect.signature(kind).parameters)


def offences(source: str) -> Iterator[str]:
    """Yield what a module makes under torch's defaults, or may."""
    tree = ast.parse(source)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from (f"{node.lineno}: import of {one.name}" for one in node.names if one.name in CONSTRUCTORS)
        elif (
            isinstance(node, ast.Attribute) and owner_of(node) == "torch" and node.attr in CONSTRUCTORS - WITHOUT_DTYPE
        ):
            if id(node) not in called:
                yield f"{node.lineno}: {ast.unparse(node)} under another name"
        elif isinstance(node, ast.Call):
            given = {keyword.arg for keyword in node.keywords}
            function = node.func
            assert isinstance(function, ast.expr)
            name = function.attr if isinstance(function, ast.Attribute) else ""
            wanted: set[str] = set()
            if (owner_of(function) == "torch" and name in CONSTRUCTORS) or is_module_with_parameters(function):
                wanted = {"device"} if name in WITHOUT_DTYPE else {"device", "dtype"}
            if owner_of(function) == "torch" and name in LEGACY:
                yield f"{node.lineno}: torch.{name} takes the default dtype"
            if wanted - given:
                yield f"{node.lineno}: {ast.unparse(node)[:100]} says no {' and no '.join(sorted(wanted - given))}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_tensor_says_its_device_and_dtype(path: Path) -> None:
    assert not list(offences(path.read_text()))


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ('torch.empty(3, dtype=torch.int32, device="cpu")', 0),
        ("torch.zeros_like(x)", 0),  # as x is
        ("x.new_zeros(3)", 0),
        ("numpy.empty(3)", 0),
        ('torch.Generator(device="cpu")', 0),
        ("torch.empty(3)", 1),
        ('torch.tensor(1, device="cpu")', 1),
        ("torch.arange(3, dtype=torch.int64)", 1),
        ("empty = torch.empty", 1),
        ("from torch import zeros", 1),
        ("torch.Tensor(3)", 1),
        ("nn.Linear(3, 4)", 1),
        ('nn.Linear(3, 4, device="cpu", dtype=torch.float32)', 0),
        ("nn.Parameter(x)", 0),
    ],
)
def test_the_check_of_the_sources_finds_what_it_shall(source: str, number: int) -> None:
    assert len(list(offences(source))) == number


def poisoned_calls(rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    defaults.install()
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x)
    buffer = epee.Buffer(None, num_experts=num_ranks, num_topk=1, max_tokens_per_rank=4, hidden=8)
    topk_idx = torch.tensor([[0], [num_ranks - 1], [-1]])
    there = buffer.dispatch(torch.full((3, 8), rank + 1.0, dtype=torch.bfloat16), topk_idx)
    back = buffer.combine(there.x, there.handle).x
    buffer.close()
    assert ProcessGroup.allreduce in defaults._wrappers.values()
    assert torch.zeros(2).device.type == "cpu", "between calls the defaults are the usual ones"
    assert torch.zeros(2).dtype is torch.float32
    return x, there.handle.src_rank, back


def test_calls_are_right_whatever_the_defaults_are() -> None:
    for rank, (x, src_rank, back) in enumerate(run_ranks(poisoned_calls, 2, backend="epee")):
        assert x.tolist() == [3.0] * 3
        assert src_rank.tolist() == [0, 1]
        assert back[:, 0].tolist() == [rank + 1.0, rank + 1.0, 0.0]


def test_the_wrapper_spoils_what_is_made_under_the_defaults() -> None:
    made = defaults.poisoned(lambda: torch.empty(3))()
    assert made.is_meta
    assert made.dtype is torch.float64
    with pytest.raises(ZeroDivisionError):
        defaults.poisoned(lambda: 1 // 0)()
    assert torch.empty(3).device.type == "cpu"
    assert torch.empty(3).dtype is torch.float32


def test_every_public_call_is_wrapped() -> None:
    run_ranks(all_wrapped, 1, backend=None)


def all_wrapped(rank: int, num_ranks: int) -> None:
    defaults.install()
    for name in epee.__all__:
        value = getattr(epee, name)
        if inspect.isclass(value) and not issubclass(value, BaseException):
            methods = [one for key, one in vars(value).items() if inspect.isfunction(one) and not key.startswith("__")]
            assert all(method in defaults._wrappers.values() for method in methods), name
    assert epee.nn.dispatch in defaults._wrappers.values()
    assert epee.nn.MoELayer.forward in defaults._wrappers.values()
    for number, reason in enumerate(defaults.NOT_RUN.values()):
        assert reason, number
