"""Calls in and outside the modes that a thread of torch can have: inference mode, FakeTensorMode, dispatch modes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import run_ranks

from . import every_call
from .cases import same


class Recorded(TorchDispatchMode):
    """Sees every operator; a call must not give it any that writes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Zeroing(TorchDispatchMode):
    """Lets every operator on tensors return zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return torch.zeros_like(out) if isinstance(out, torch.Tensor) else out


class Refusing(TorchFunctionMode):
    """Lets no arithmetic through."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("add", "copy_", "view", "div_", "from_numpy"):
            raise RuntimeError("no arithmetic here")
        return func(*args, **(kwargs or {}))


PLACES = ("inside", "outside", "waited outside", "waited inside", "completed by the helper thread")


def run_at(place: str, call: every_call.Call, mode: Callable[[], Any]) -> None:
    """Make a call in and outside a mode."""
    if place == "inside":
        with mode():
            call.start(False)
    elif place == "outside":
        call.start(False)
    elif place == "waited outside":
        with mode():
            works = call.start(True)
        for work in works:
            work.wait()
    elif place == "waited inside":
        works = call.start(True)
        with mode():
            for work in works:
                work.wait()
    else:
        with mode():
            works = call.start(True)
            until = time.monotonic() + 30
            while not all(_is_over(work) for work in works) and time.monotonic() < until:
                time.sleep(0.002)
        for work in works:
            work.wait()


def _is_over(work: Any) -> bool:
    if isinstance(work, torch.futures.Future):
        return work.done()
    return all(part.is_completed() for part in getattr(work, "works", [work]))


def in_inference_mode(rank: int, num_ranks: int, layout: str, is_inside: bool) -> None:
    new = every_call.LAYOUTS[layout]
    for place in PLACES:
        for name, make in every_call.CASES.items():
            with torch.inference_mode(is_inside):  # the tensors are of the mode, or not
                call = make(rank, num_ranks, new)
            run_at(place, call, torch.inference_mode)
            for got, expected in zip(call.written, call.expected, strict=True):
                same(got, expected, f"{name}, {place}")


@pytest.mark.parametrize("is_inside", [True, False], ids=["inference tensors", "others"])
@pytest.mark.parametrize("layout", every_call.LAYOUTS)
def test_every_call_is_right_in_and_outside_inference_mode(layout: str, is_inside: bool) -> None:
    run_ranks(in_inference_mode, 2, layout, is_inside, backend="epee")


def in_mode(rank: int, num_ranks: int, layout: str, kind: str) -> None:
    """Rank 0 is in the mode, the other one is not."""
    modes: dict[str, Callable[[], Any]] = {
        "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
        "fake, strict": FakeTensorMode,
        "recorded": Recorded,
        "zeroing": Zeroing,
        "refusing": Refusing,
    }
    mode = modes[kind] if rank == 0 else contextlib.nullcontext
    new = every_call.LAYOUTS[layout]
    for place in PLACES:
        for name, make in every_call.CASES.items():
            if name in ("gather", "scatter", "all_gather of lists"):
                continue  # torch itself makes tensors there, of the mode
            call = make(rank, num_ranks, new)
            run_at(place, call, mode)
            for got, expected in zip(call.written, call.expected, strict=True):
                same(got, expected, f"{name}, {place}")


@pytest.mark.parametrize("kind", ["fake", "fake, strict", "recorded", "zeroing", "refusing"])
@pytest.mark.parametrize("layout", every_call.LAYOUTS)
def test_calls_on_real_tensors_are_right_under_other_modes(layout: str, kind: str) -> None:
    run_ranks(in_mode, 2, layout, kind, backend="epee")


def fake(rank: int, num_ranks: int) -> str:
    x = torch.ones(4)
    if rank == 0:
        with FakeTensorMode():
            x = torch.ones(4)
    try:
        dist.all_reduce(x)
    except Exception as exc:  # noqa: BLE001 - looked at by the test
        told = f"{type(exc).__name__}: {exc}"
    else:
        told = "no error"
    dist.barrier()
    return told


def test_a_fake_tensor_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(fake, 2, backend="epee")
    assert first.startswith("InvalidArgument"), first
    assert "fake" in first, first
    assert second.startswith("MismatchError"), second
