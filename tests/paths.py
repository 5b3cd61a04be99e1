"""The files and functions of `epee` that one call enters, counted in two ranks on this machine.

`python -m tests.paths CASE` starts two ranks and prints the counts of rank 0. A case is a group of calls: `cpu` and
`hosts` (buffers and collectives on CPU tensors, one host and two), `cuda` (both buffers on emulated kernels) and `kill`
(an all_reduce in which the other rank is killed, with the frames of all threads).

A function counts when it is entered between the start and the end of the call. Of a call that can be repeated the
smallest count of several repetitions is reported: a slow machine adds steps (a wait that sleeps, a socket that is full)
that belong to the machine. Code lines are the lines of `epee/` that hold neither blanks nor comments nor docstrings.
"""

from __future__ import annotations

import ast
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tokenize
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = f"{ROOT / 'epee'}{os.sep}"
REPETITIONS = 3
SMALL_REPETITIONS = 50  # a small call takes its shortest way where the other rank came first
TIMEOUT_S = 150.0
CASES = ("cpu", "hosts", "cuda", "kill")
R = TypeVar("R")


class Trace:
    """The functions of the package that are entered while the context is open, in this thread or in all of them."""

    def __init__(self, *, all_threads: bool = False) -> None:
        self.functions: set[tuple[str, int, str]] = set()
        self._all_threads = all_threads

    def __enter__(self) -> Trace:
        global _recording
        if self._all_threads:
            _recording = self
        sys.setprofile(self.record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _recording
        sys.setprofile(None)
        _recording = None

    def record(self, frame: FrameType, event: str, arg: object) -> None:
        """Note a function of the package (a profile function of `sys`)."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.functions.add((code.co_filename.removeprefix(PACKAGE), code.co_firstlineno, code.co_name))

    @property
    def files(self) -> set[str]:
        """The files that hold the functions."""
        return {file for file, _, _ in self.functions}


_recording: Trace | None = None  # the trace that other threads record into


def _record_elsewhere(frame: FrameType, event: str, arg: object) -> None:
    """Profile function of all threads that start after it was installed."""
    if _recording is not None:
        _recording.record(frame, event, arg)


def traced(name: str, call: Callable[[], R], warmup: int = 2, repetitions: int = REPETITIONS) -> R:
    """Repeat a call, print its smallest counts on rank 0, and return its last result."""
    result: R | None = None
    for _ in range(warmup):
        result = None
        result = call()
    traces = []
    for _ in range(repetitions):
        result = None
        with Trace() as trace:
            result = call()
        traces.append(trace)
    report(name, min(traces, key=lambda trace: len(trace.functions)))
    assert result is not None
    return result


def report(name: str, trace: Trace) -> None:
    """Print the counts of one call, if this is rank 0."""
    if os.environ["RANK"] == "0":
        print(json.dumps({"call": name, "files": sorted(trace.files), "functions": len(trace.functions)}), flush=True)


def _on_cpu(case: str) -> None:
    """Calls on CPU tensors, on one host or two."""
    import torch
    import torch.distributed as dist

    import epee

    x = torch.randn(32, 64, dtype=torch.bfloat16)
    weights, idx = torch.rand(32, 8).softmax(-1).topk(2)
    with epee.Buffer(num_experts=8, hidden=64, num_topk=2, max_tokens_per_rank=32) as buffer:
        times = SMALL_REPETITIONS
        sent = traced(f"dispatch {case}", lambda: buffer.dispatch(x, idx, weights, layout="expert"), repetitions=times)
        again = [buffer.dispatch(x, idx, weights, layout="expert") for _ in range(times - 1)]
        handles = iter([sent, *again])

        def combine() -> object:
            result = next(handles)
            return buffer.combine(result.x, result.handle)

        traced(f"combine {case}", combine, warmup=0, repetitions=times)
    small, large = torch.ones(4), torch.ones(4 << 20)
    traced(f"all_reduce 16 B {case}", lambda: dist.all_reduce(small) or small, repetitions=SMALL_REPETITIONS)
    traced(f"all_reduce 16 MiB {case}", lambda: dist.all_reduce(large) or large)


def _on_gpu() -> None:
    """First and repeated calls of both buffers on emulated kernels."""
    import torch

    import epee
    from tests.csrc.emulated import EmulatedPlatform

    class Emulated(epee.Buffer):
        """A buffer whose kernels are emulated."""

        _platform_of = staticmethod(lambda device: EmulatedPlatform())

    class EmulatedLatency(epee.LatencyBuffer):
        """A low-latency buffer whose kernels are emulated."""

        _platform_of = staticmethod(lambda device: EmulatedPlatform(shared_bytes=64 << 10))

    long = 60.0
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    weights, idx = torch.rand(32, 8).softmax(-1).topk(2)
    with Emulated(num_experts=8, hidden=64, num_topk=2, max_tokens_per_rank=32, device="cuda") as buffer:
        for name, warmup in (("first", 0), ("repeated", 2)):
            dispatch = partial(buffer.dispatch, x, idx, weights, layout="expert", timeout=long)
            result = traced(f"dispatch cuda, {name}", dispatch, warmup, 1)
            traced(f"combine cuda, {name}", partial(buffer.combine, result.x, result.handle, timeout=long), 0, 1)
            del result
    rows = torch.randn(6, 512, dtype=torch.bfloat16)
    weights, idx = torch.rand(6, 8).softmax(-1).topk(2)
    with EmulatedLatency(num_experts=8, hidden=512, num_topk=2, max_tokens_per_rank=6, device="cuda") as latency:
        for name, warmup in (("first", 0), ("repeated", 2)):
            dispatch = partial(latency.dispatch, rows, idx, topk_weights=weights, timeout=long)
            received = traced(f"latency dispatch cuda, {name}", dispatch, warmup, 1)
            y = torch.zeros(received.x.shape, dtype=torch.bfloat16)
            traced(f"latency combine cuda, {name}", partial(latency.combine, y, received.handle, timeout=long), 0, 1)


def _kill() -> None:
    """An all_reduce whose peer is killed in the meantime; the agent's thread counts as well."""
    import torch
    import torch.distributed as dist

    import epee

    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    if os.environ["RANK"] == "1":
        time.sleep(0.5)  # the other rank waits inside its call by then
        os.kill(os.getpid(), signal.SIGKILL)
    with Trace(all_threads=True) as trace:
        try:
            dist.all_reduce(torch.ones(1))
        except epee.RankFailedError:
            pass
        else:
            raise AssertionError("the death of the other rank was not reported")
    report("all_reduce, peer killed", trace)
    os._exit(0)


def run_rank(case: str) -> None:
    """Run a case in this process, one of two ranks."""
    threading.setprofile(_record_elsewhere)
    import torch
    import torch.distributed as dist

    import epee

    torch.set_num_threads(1)
    options = epee.BackendOptions(fault_mode="raise", op_timeout=60)
    dist.init_process_group("epee", pg_options=options)
    if case == "kill":
        _kill()
    elif case == "cuda":
        _on_gpu()
    else:
        _on_cpu(case)
    dist.barrier()
    dist.destroy_process_group()


def measure(case: str) -> dict[str, tuple[set[str], int]]:
    """Start two ranks and return the files and the number of functions of each call.

    Raises:
        RuntimeError: a rank failed, with what it printed.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is this process's: no rank serves one
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    ranks = []
    for rank in range(2):
        host = {"EPEE_TEST": "1", "EPEE_HOST_KEY": f"host{rank}"} if case == "hosts" else {}
        command = [sys.executable, "-m", "tests.paths", case]
        own = {**env, **host, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, env=own, cwd=ROOT, stdout=pipe, stderr=pipe, text=True))
    try:
        printed = [process.communicate(timeout=TIMEOUT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    expected = [0, -signal.SIGKILL if case == "kill" else 0]
    codes = [process.returncode for process in ranks]
    if codes != expected:
        raise RuntimeError(f"ranks of {case} ended with {codes}, expected {expected}: {printed}")
    rows = [json.loads(line) for line in printed[0][0].splitlines() if line.startswith("{")]
    return {row["call"]: (set(row["files"]), row["functions"]) for row in rows}


def code_lines(text: str) -> int:
    """Return the number of lines of a Python source that hold code: no blank, comment or docstring."""
    lines: set[int] = set()
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
            if first is not None:
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def package_code_lines() -> int:
    """Return the number of code lines of the whole package."""
    return sum(code_lines(path.read_text()) for path in Path(PACKAGE).rglob("*.py"))


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(sys.argv[1])
    else:
        for wanted in sys.argv[1:] or CASES:
            for call, (files, functions) in measure(wanted).items():
                print(f"{call:32} {len(files):3} files {functions:4} functions   {' '.join(sorted(files))}")
        print(f"code lines of epee/: {package_code_lines()}")
