"""Buffers in and outside the modes of a thread, whichever is first; their arguments stay as they were."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import epee
import epee.nn
from tests.ep.latency_cases import BF16
from tests.harness import run_ranks

NUM_TOKENS, NUM_TOPK, HIDDEN = 6, 2, 512
SHAPE: dict[str, Any] = {"num_experts": 4, "num_topk": NUM_TOPK, "max_tokens_per_rank": 8, "hidden": HIDDEN}

Mode = Callable[[], Any]
INSIDE: Mode = torch.inference_mode
OUTSIDE: Mode = contextlib.nullcontext


def strided(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor with these values whose rows have a gap behind them."""
    wide = torch.zeros(len(values), values.shape[1] + 8, dtype=values.dtype)
    wide[:, : values.shape[1]] = values
    return wide[:, : values.shape[1]]


def routing(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    idx = torch.stack([torch.randperm(4, generator=generator)[:NUM_TOPK] for _ in range(NUM_TOKENS)])
    return idx, torch.full((NUM_TOKENS, NUM_TOPK), 0.5)


class Steps:
    """The calls of a step, which give every token back as it was, whatever the layout."""

    def __init__(self, buffer: Any, layout: str, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.buffer, self.layout, self.new = buffer, layout, new
        self.is_latency = isinstance(buffer, epee.LatencyBuffer)

    def inputs(self) -> list[torch.Tensor]:
        """Return x, topk_idx and topk_weights."""
        idx, weights = routing(self.buffer.rank)
        x = self.new(torch.full((NUM_TOKENS, HIDDEN), 3.0 + self.buffer.rank, dtype=BF16))
        return [x, self.new(idx), self.new(weights)]

    def empty_out(self) -> torch.Tensor:
        """Return a tensor for the result of a combine; a latency buffer's must be contiguous."""
        out = torch.zeros(NUM_TOKENS, HIDDEN, dtype=BF16)
        return out if self.is_latency else self.new(out)

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> Any:
        if self.is_latency:
            return self.buffer.dispatch(x, idx, weights)
        return self.buffer.dispatch(x, idx, weights, layout=self.layout)

    def combine(self, got: Any, out: torch.Tensor | None) -> torch.Tensor:
        found: torch.Tensor = self.buffer.combine(got.x, got.handle, out=out).x
        return found

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the combine gives: in the rank layout x times the ranks that a token went to."""
        if self.is_latency or self.layout == "expert":
            return x
        idx, _ = routing(self.buffer.rank)
        times = [len({int(expert) // 2 for expert in row}) for row in idx]
        return x * torch.tensor(times, dtype=x.dtype)[:, None]

    def run(self, modes: tuple[Mode, Mode, Mode], out_mode: Mode | None) -> None:
        """Make the inputs, dispatch and combine each in a mode; `out_mode`: that of a tensor for the result."""
        with modes[0]():
            given = self.inputs()
        out = None
        if out_mode is not None:
            with out_mode():
                out = self.empty_out()
        with modes[1]():
            got = self.dispatch(*given)
        with modes[2]():
            back = self.combine(got, out)
        assert out is None or back is out
        assert torch.equal(back, self.expected(given[0]))


def hooked(rank: int, num_ranks: int) -> None:
    """Sent in one mode, received in another one."""
    with make_buffer("latency", OUTSIDE) as buffer:
        steps = Steps(buffer, "latency", torch.clone)
        x, idx, weights = steps.inputs()
        for sent_in, received_in, out_mode in itertools.product((INSIDE, OUTSIDE), (INSIDE, OUTSIDE), (None, INSIDE)):
            out = None
            if out_mode is not None:
                with out_mode():
                    out = torch.zeros(NUM_TOKENS, HIDDEN, dtype=BF16)
            with sent_in():
                got = buffer.dispatch(x, idx, weights, return_hook=True)
            with received_in():
                got.hook()
            with sent_in():
                back = buffer.combine(got.x, got.handle, out=out, return_hook=True)
            with received_in():
                back.hook()
            assert torch.equal(back.x, x)


def test_a_hook_may_run_in_another_mode_than_its_call() -> None:
    run_ranks(hooked, 2)


def make_buffer(kind: str, first: Mode) -> Any:
    with first():
        if kind == "latency":
            return epee.LatencyBuffer(dist.group.WORLD, **SHAPE, timeout=20.0)
        return epee.Buffer(dist.group.WORLD, **SHAPE, timeout=20.0)


def all_modes(rank: int, num_ranks: int, kind: str, layout: str, first: bool) -> None:
    new = strided if layout == "strided" else torch.clone
    for made_in in (INSIDE, OUTSIDE):
        with make_buffer(kind, made_in) as buffer:
            steps = Steps(buffer, kind, new)
            order = (INSIDE, OUTSIDE) if first else (OUTSIDE, INSIDE)
            for modes in itertools.product(order, repeat=3):
                for out_mode in (None, *order):
                    steps.run(modes, out_mode)


@pytest.mark.parametrize("first", [True, False], ids=["first inside", "first outside"])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("kind", ["rank", "expert", "latency"])
def test_every_call_is_right_in_and_outside_inference_mode(kind: str, layout: str, first: bool) -> None:
    run_ranks(all_modes, 2, kind, layout, first)


def validated_first(rank: int, num_ranks: int, layout: str) -> None:
    buffer = epee.Buffer(dist.group.WORLD, **SHAPE, dtype=torch.float32, timeout=20.0, max_recv_rows=64)
    layer = epee.nn.MoELayer(HIDDEN, 16, 4, NUM_TOPK, buffer, layout=layout)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank))
    with torch.inference_mode():
        expected = layer(x)
    for _ in range(2):
        y = layer(x)
        assert torch.equal(y, expected)
        y.square().mean().backward()
        assert layer.router.grad is not None
    with torch.inference_mode():
        layer(x)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_a_layer_that_was_validated_in_inference_mode_trains(layout: str) -> None:
    run_ranks(validated_first, 2, layout)


def masked(rank: int, num_ranks: int) -> None:
    """Masks that calls and `sync` write, of the mode or not."""
    for made_in, used_in in itertools.product((INSIDE, OUTSIDE), repeat=2):
        with make_buffer("latency", used_in) as buffer:
            with made_in():
                mask = torch.zeros(num_ranks, dtype=torch.int32)
            with used_in():
                buffer.sync(torch.ones(num_ranks, dtype=torch.int32))
                mine = mask.numpy()  # the memory, whatever the mode
                mine[:] = 1
                agreed = buffer.sync(mask)
            assert agreed.tolist() == mask.tolist() == [1] * num_ranks


def test_a_mask_may_be_of_the_mode_or_not() -> None:
    run_ranks(masked, 2)


def state(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    version = None if tensor.is_inference() else tensor._version
    return (storage.resizable(), storage.nbytes(), tensor.data_ptr(), tensor.stride(), tensor.requires_grad, version)


@contextlib.contextmanager
def unchanged(tensors: list[torch.Tensor], told: str, written: tuple[int, ...] = ()) -> Iterator[None]:
    """See that all but the values of tensors is as before; those `written` may have another version."""
    before, num_before = [state(tensor) for tensor in tensors], [sys.getrefcount(tensor) for tensor in tensors]
    yield
    after = [state(tensor) for tensor in tensors]
    for at in written:
        after[at] = (*after[at][:-1], before[at][-1])
    assert after == before, told
    until = time.monotonic() + 10
    while [sys.getrefcount(tensor) for tensor in tensors] != num_before and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert [sys.getrefcount(tensor) for tensor in tensors] == num_before, told


def arguments(rank: int, num_ranks: int, kind: str, layout: str) -> None:
    new = strided if layout == "strided" else torch.clone
    with make_buffer(kind, OUTSIDE) as buffer:
        steps = Steps(buffer, kind, new)
        for _ in range(3):
            given = steps.inputs()
            with unchanged(given, "dispatch"):
                got = steps.dispatch(*given)
            out = [steps.empty_out(), got.x.clone()]
            with unchanged(out, "combine", written=(0,)):
                buffer.combine(out[1], got.handle, out=out[0])
            if kind == "rank":
                with unchanged(given, "cached dispatch"):
                    again = buffer.dispatch(given[0], handle=got.handle)
                del again
            for tensor in (*given, *out):
                tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() + 8)


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("kind", ["rank", "expert", "latency"])
def test_a_call_leaves_all_but_the_values_of_its_arguments(kind: str, layout: str) -> None:
    run_ranks(arguments, 2, kind, layout)


class Zeroing(TorchDispatchMode):
    """Lets every operator on tensors return zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return torch.zeros_like(out) if isinstance(out, torch.Tensor) else out


def under_modes(rank: int, num_ranks: int, kind: str) -> None:
    """Rank 0 makes its calls on real tensors under a mode whose operators give other memory; rank 1 is outside."""
    modes: list[Mode] = [lambda: FakeTensorMode(allow_non_fake_inputs=True), FakeTensorMode, Zeroing]
    with make_buffer(kind, OUTSIDE) as buffer:
        steps = Steps(buffer, kind, torch.clone)
        given = steps.inputs()
        out = steps.empty_out()
        for mode in modes if rank == 0 else [OUTSIDE] * len(modes):
            with mode():
                got = steps.dispatch(*given)
                back = buffer.combine(got.x, got.handle).x
                buffer.combine(got.x, got.handle, out=out)
            assert torch.equal(back, steps.expected(given[0]))
            assert torch.equal(out, back)


@pytest.mark.parametrize("kind", ["rank", "expert", "latency"])
def test_calls_on_real_tensors_are_right_under_a_dispatch_mode(kind: str) -> None:
    run_ranks(under_modes, 2, kind)


def fake_rows(rank: int, num_ranks: int, kind: str) -> str:
    with make_buffer(kind, OUTSIDE) as buffer:
        steps = Steps(buffer, kind, torch.clone)
        x, idx, weights = steps.inputs()
        if rank == 0:
            with FakeTensorMode():
                x = torch.ones(NUM_TOKENS, HIDDEN, dtype=BF16)
        try:
            steps.dispatch(x, idx, weights)
        except epee.EpeeError as exc:
            told = f"{type(exc).__name__}: {exc}"
        else:
            told = "no error"
        dist.barrier()
        return told


@pytest.mark.parametrize("kind", ["rank", "expert", "latency"])
def test_fake_rows_are_refused_on_all_ranks(kind: str) -> None:
    first, second = run_ranks(fake_rows, 2, kind)
    assert first.startswith("InvalidArgument: x: "), first
    assert second.startswith("MismatchError"), second
