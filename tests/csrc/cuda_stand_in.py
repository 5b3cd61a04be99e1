"""Runs programs that are written for CUDA tensors on machines without a GPU: tensors on the CPU, kernels in emulation.

`installed` replaces, in the calling process, the parts of torch and of epee that a benchmark uses on a GPU:

    torch.cuda                    events by the CPU's clock, nothing to synchronize
    torch.profiler.profile        a list of the kernels that were launched
    device="cuda", .cuda()        CPU tensors, of the class `OnGpu` where a group of the backend "epee" is measured
    a GPU's platform              `EmulatedPlatform`: the kernels' own sources, built by g++
    dist.new_group("nccl")        gloo
    benchmarks.gpu.graph_of       a list of calls, which a replay makes again

`run_main` calls the `main` of a benchmark whose ranks are processes of the harness with these replacements.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from benchmarks import gpu
from epee.backend.cuda import meeting as collectives_meeting
from epee.ep import base
from epee.ep.pool import pool
from tests.backend.test_staging import OnGpu
from tests.csrc.emulated import EmulatedKernel, EmulatedPlatform
from tests.harness import run_ranks

SHARED_BYTES = 128 << 10
Constants = dict[str, dict[str, Any]]  # module -> constant -> value


class Event:
    """`torch.cuda.Event` by the CPU's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._at - self._at)


class Graph:
    """Calls that a replay makes again."""

    def __init__(self, call: Callable[[], Any], count: int) -> None:
        self._call, self._count = call, count

    def replay(self) -> None:
        for _ in range(self._count):
            self._call()


class Profile:
    """`torch.profiler.profile`: emulated kernels by name, with the times that they took."""

    def __init__(self, activities: Any = None) -> None:
        self._events: list[Any] = []

    def __enter__(self) -> Profile:
        launch, events = EmulatedKernel.__call__, self._events

        def timed(kernel: EmulatedKernel, *args: Any) -> None:
            start = time.perf_counter() * 1e6
            launch(kernel, *args)
            span = SimpleNamespace(start=start, end=time.perf_counter() * 1e6)
            kind = torch.autograd.DeviceType.CUDA
            events.append(SimpleNamespace(name=kernel._function.__name__, device_type=kind, time_range=span))

        self._patch = mock.patch.object(EmulatedKernel, "__call__", timed)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def events(self) -> list[Any]:
        return self._events

    def key_averages(self) -> list[Any]:
        found = []
        for name in dict.fromkeys(event.name for event in self._events):
            spans = [event.time_range for event in self._events if event.name == name]
            total = sum(span.end - span.start for span in spans)
            found.append(SimpleNamespace(key=name, device_time_total=total, count=len(spans)))
        return found


class Placement(TorchFunctionMode):
    """Gives CPU tensors to those who ask for CUDA tensors."""

    def __init__(self, kind: type[torch.Tensor]) -> None:
        super().__init__()
        self._kind = kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].as_subclass(self._kind)
        is_moved = _is_cuda(kwargs.get("device"))
        if is_moved:
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and any(map(_is_cuda, args[1:])):
            args, is_moved = tuple("cpu" if _is_cuda(arg) else arg for arg in args), True
        result = func(*args, **kwargs)
        return result.as_subclass(self._kind) if is_moved and isinstance(result, torch.Tensor) else result


class _Generator(torch.Generator):
    """A generator of the CPU, whatever device is asked for."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")


class _Ended(BaseException):
    """`os._exit(0)` was called."""


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


@contextlib.contextmanager
def installed(is_group: bool) -> Iterator[None]:
    """Replace what needs a GPU while the block runs.

    Args:
        is_group: calls of process groups are measured, which tell CUDA tensors by `is_cuda`.
    """

    def platform_of(device: Any = None) -> EmulatedPlatform:
        return EmulatedPlatform(3, shared_bytes=SHARED_BYTES)

    new_group = dist.new_group
    with contextlib.ExitStack() as ends:

        def put(place: Any, **values: Any) -> None:
            ends.enter_context(mock.patch.multiple(place, create=True, **values))

        properties = SimpleNamespace(multi_processor_count=3)
        nothing: Callable[..., None] = lambda *args: None  # noqa: E731
        put(torch.cuda, Event=Event, set_device=nothing, synchronize=nothing, _sleep=nothing)
        put(torch.cuda, get_device_name=lambda *_: "emulation", get_device_properties=lambda *_: properties)
        put(torch.cuda, get_device_capability=lambda *_: (9, 0), device_count=lambda: 8 if is_group else 0)
        put(torch.cuda.nccl, version=lambda: (0,))
        put(torch.profiler, profile=Profile)
        put(torch, Generator=_Generator)
        put(
            dist,
            new_group=lambda *args, backend=None: new_group(*args, backend="gloo" if backend == "nccl" else backend),
        )
        put(gpu, graph_of=Graph, platform_of=platform_of)
        put(base.SharedBuffer, _platform_of=staticmethod(platform_of))
        put(pool.BufferPool, is_gpu=lambda self, device: True)
        put(collectives_meeting, has_gpu=lambda: True, platform_of=platform_of)
        put(collectives_meeting, current_device=lambda: torch.device("cpu"))
        ends.enter_context(Placement(OnGpu if is_group else torch.Tensor))
        yield


def _end(status: int) -> None:
    if status:
        raise AssertionError("the rank has printed a traceback and ended")
    raise _Ended


def _rank(
    rank: int,
    num_ranks: int,
    module: str,
    name: str,
    constants: Constants,
    is_group: bool | None,
    args: tuple[Any, ...],
) -> None:
    """Call a rank's function of a benchmark."""
    with contextlib.ExitStack() as ends:
        if is_group is not None:
            ends.enter_context(installed(is_group))
        for place, values in constants.items():
            ends.enter_context(mock.patch.multiple(importlib.import_module(place), **values))
        ends.enter_context(mock.patch.object(os, "_exit", _end))
        with contextlib.suppress(_Ended):
            getattr(importlib.import_module(module), name)(rank, *args)


def spawn_with(constants: Constants, is_group: bool | None = None) -> Callable[..., None]:
    """Return what a benchmark calls to start its ranks: `spawn(function, args, num_ranks)`.

    Args:
        constants: values that the ranks give to constants of modules.
        is_group: as of `installed`, None for a benchmark that needs no GPU.
    """

    def spawn(function: Callable[..., None], args: tuple[Any, ...], num_ranks: int) -> None:
        call = function.__module__, function.__name__, constants, is_group, args
        run_ranks(_rank, num_ranks, *call, backend=None, timeout_s=200)

    return spawn


def run_main(
    module: str, arguments: list[str], constants: Constants, target: Path, is_group: bool = False
) -> dict[str, Any]:
    """Call `main` of a benchmark with arguments and `--json target`; return what it has written there.

    Args:
        constants, is_group: as of `spawn_with`.
    """
    with (
        installed(False),
        mock.patch.object(gpu, "spawn", spawn_with(constants, is_group)),
        mock.patch.object(sys, "argv", [module, *arguments, "--json", str(target)]),
    ):
        importlib.import_module(module).main()
    return dict(json.loads(target.read_text()))
