"""`deep_ep.utils.testing`: times of calls and of kernels, in the form that DeepEP's test scripts use."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

_L2_BYTES = 256 << 20  # more than any GPU's L2


def flush_l2_cache(enabled: bool = True) -> None:
    """Overwrite the GPU's L2 with zeros of other memory; nothing without a GPU."""
    if enabled and torch.cuda.is_available():
        torch.empty(_L2_BYTES // 4, dtype=torch.int32, device="cuda").zero_()


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Return the average, shortest and longest time of `fn` in seconds, the first of `num_tests` excluded.

    On a GPU by events, with `post_fn` outside of the time; else by the cpu's clock.
    """
    for _ in range(num_warmups):
        fn()
    times = []
    for _ in range(num_tests):
        flush_l2_cache(flush_l2)
        times.append(_timed(fn))
        if post_fn is not None:
            post_fn()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = [each() for each in times][1:]
    return sum(seconds) / len(seconds), min(seconds), max(seconds)


def _timed(fn: Callable[[], Any]) -> Callable[[], float]:
    """Run `fn` once; the returned function gives its time, when the GPU is done."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        fn()
        took = time.perf_counter() - began
        return lambda: took
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    fn()
    last.record()
    return lambda: first.elapsed_time(last) / 1e3


class empty_suppress:
    """Suppresses nothing."""

    def __enter__(self) -> empty_suppress:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class suppress_stdout_stderr:
    """Suppresses the output to the descriptors 1 and 2, and by Python, while the block runs."""

    def __enter__(self) -> suppress_stdout_stderr:
        self._ends = contextlib.ExitStack()
        nowhere = self._ends.enter_context(open(os.devnull, "w"))
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            kept = os.dup(number)
            self._ends.callback(os.close, kept)
            self._ends.callback(os.dup2, kept, number)
            os.dup2(nowhere.fileno(), number)
        self._ends.enter_context(contextlib.redirect_stdout(nowhere))
        self._ends.enter_context(contextlib.redirect_stderr(nowhere))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.close()


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Return the average time in seconds of each kernel whose name contains a given one, 0 for none; by the profiler.

    epee's kernels are called `epee::dispatch_...`, `epee::combine_...`, `epee::layout_...`.

    Args:
        fn: is run once, then `num_tests` times under the profiler.
        kernel_names: one name gives one time, a tuple as many.
        suppress_kineto_output: write nothing meanwhile.
        trace_path: file of the trace, None for none.
        flush_l2: before each run.
        barrier_comm_profiling: run a barrier before each run, by `barrier` if it is given.
        num_kernels_per_period: kernels of a name in a run; with more than 1 each time is a list, by their order.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    fn()
    with suppress_stdout_stderr() if suppress_kineto_output else contextlib.nullcontext():
        profiler = _profiled(fn, num_tests, flush_l2, barrier_comm_profiling, barrier)
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    found = []
    for name in names:
        times = list(_times_of(profiler, name))
        steps = [times[at::num_kernels_per_period] for at in range(num_kernels_per_period)]
        means = [sum(each) / len(each) if each else 0.0 for each in steps]
        found.append(means if num_kernels_per_period > 1 else means[0])
    return found[0] if isinstance(kernel_names, str) else found


def _profiled(
    fn: Callable[[], Any], num_tests: int, flush_l2: bool, meets: bool, barrier: Callable[[], Any] | None
) -> torch.profiler.profile:
    has_gpu = torch.cuda.is_available()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if has_gpu else kinds.CPU]) as profiler:
        for _ in range(num_tests):
            flush_l2_cache(flush_l2)
            if meets:
                (barrier or dist.barrier)()
            fn()
        if has_gpu:
            torch.cuda.synchronize()
    return profiler


def _times_of(profiler: torch.profiler.profile, name: str) -> Iterator[float]:
    """Yield the seconds of the events of a name, in their order."""
    events = [event for event in profiler.events() or [] if name in event.name]
    for event in sorted(events, key=lambda event: event.time_range.start):
        yield event.time_range.elapsed_us() / 1e6
