"""CUDA tensors on a group: staged through pinned cpu memory, if calls do not run on the GPUs (`backend/cuda`).

Data path: each tensor of a call that lies on a GPU gets a *twin*, a contiguous pinned tensor of the same shape. The
call then runs on the twins like any other, and its results are copied back. The twin of a sparse tensor is a sparse
CPU tensor, made in step 1 by a copy for which the cpu waits; results replace the entries of the caller's tensor.

Order, for one call:
1. On the caller's current stream: values are copied into the twins, and a mark is put behind the copies. The stream
   reaches the mark when everything before the call is done, so the values are those that the caller means.
2. The cpu waits for the mark (bounded by the group's timeout), then issues the call. This is the price of staging:
   a call, asynchronous ones too, is issued only when the GPU has reached it.
3. The call ends. Twins are copied back on the caller's current stream when the call was synchronous, else on a stream
   of epee's own that waits for the mark first. `Work.wait` makes the stream that is current *then* wait for that copy,
   as NCCL's does; `is_completed` is true when the copy is done; a future carries the copy's event to its user.

Twins are filled before every call, so entries that a call leaves untouched (rows of lost ranks, everything after an
error) keep their values. A twin's memory is not used again before the copies from and to it are done: torch's pinned
allocator remembers the streams, and the caller's tensors are noted on epee's stream (`record_stream`).

Calls on overlapping memory (`Staging`). Twins are memory of their own, so for GPUs the ranges (`ranges.py`) are
compared here, before the twins are filled: a call whose tensors meet memory that an earlier call of the group still has
to write waits on the cpu for the end of that one, and on its stream for the copy of the results. The inputs of a call
have been read when it is issued (step 2), so no call waits for readers.

A rank whose copies fail refuses its call: the peers get `MismatchError` with the reason, as for any other argument.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from ..arrays import plain_tensors, real_tensors, writing
from ..engine import Engine
from ..engine.call import not_run
from ..engine.entry import CLOSED
from ..engine.overlap import batch_mates
from ..engine.ranges import meet, spans_of
from ..engine.tensors import refuse_overlap, refuse_shared
from ..errors import AbortedError, CommTimeoutError, EpeeError, PeerError, UnsupportedError, context, expected, ignored
from ..untraced import untraced_methods
from .work import Ended, Work, is_loss

SPIN_S = 100e-6  # a GPU that is about done is met without sleeping
NAP_S = 50e-6


class Twin(NamedTuple):
    """A tensor of the caller and its copy in pinned memory."""

    tensor: torch.Tensor
    cpu: torch.Tensor


class Cuda:
    """The GPUs of this process, as staging uses them; the tests have another whose streams run when they please."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}

    def cpu_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return contiguous pinned memory of torch's caching allocator, uninitialised; of a sparse tensor a copy on the
        CPU.

        Raises:
            UnsupportedError: a CUDA graph is being recorded.
        """
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a collective on CUDA tensors needs the host, so a CUDA graph cannot record it; make the call outside"
            )
        if tensor.layout is not torch.strided:
            with torch.cuda.device(tensor.device), plain_tensors():
                return tensor.detach().cpu()
        with plain_tensors():  # another thread may write it, and copy it back
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Put a copy on the current stream of the GPU tensor among the two."""
        on_gpu = source if source.is_cuda else destination
        with torch.cuda.device(on_gpu.device), torch.no_grad(), writing(destination):
            destination.copy_(source, non_blocking=True)

    def marks(self, twins: Sequence[Twin]) -> list[Any]:
        """Return a mark, an event, behind the pending work on the current stream of each GPU of the tensors."""
        events = []
        for index in sorted({twin.tensor.device.index for twin in twins}):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(index))
            events.append((index, event))
        return events

    def here(self) -> list[Any]:
        """Return a mark behind the pending work on the current GPU's current stream; none if CUDA is not in use."""
        if not torch.cuda.is_initialized():
            return []
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("a barrier needs the host, so a CUDA graph cannot record it; make the call outside")
        event = torch.cuda.Event()
        event.record()
        return [(torch.cuda.current_device(), event)]

    def is_done(self, mark: Any) -> bool:
        """Return whether a stream has reached the mark."""
        return bool(mark[1].query())

    def copy_back(self, twins: Sequence[Twin], behind: Sequence[Any]) -> list[Any]:
        """Copy twins back on our own stream of each GPU, behind the marks; returns the marks behind the copies."""
        marks = []
        for index, event in behind:
            stream = self._stream(index)
            stream.wait_event(event)
            with torch.cuda.stream(stream), torch.no_grad():
                for twin in twins:
                    if twin.tensor.device.index == index:
                        with writing(twin.tensor), real_tensors():
                            twin.tensor.copy_(twin.cpu, non_blocking=True)
                        if twin.tensor.layout is torch.strided:  # others got memory of this stream
                            twin.tensor.record_stream(stream)
            done = torch.cuda.Event()
            done.record(stream)
            marks.append((index, done))
        return marks

    def join(self, marks: Sequence[Any]) -> None:
        """Make the current stream of each GPU wait for the marks."""
        for index, event in marks:
            torch.cuda.current_stream(index).wait_event(event)

    def future(self, twins: Sequence[Twin]) -> Any:
        """Return a future whose value may lie on the tensors' GPUs."""
        indices = sorted({twin.tensor.device.index for twin in twins})
        return torch.futures.Future(devices=[torch.device("cuda", index) for index in indices])

    def fulfil(self, future: Any, value: Any, marks: Sequence[Any]) -> None:
        """Complete a future with a value that is ready at the marks; our streams are current: it puts events there."""
        if not marks:
            future.set_result(value)
            return
        with torch.cuda.stream(self._stream(marks[0][0])):
            self.fulfil(future, value, marks[1:])

    def _stream(self, index: int) -> torch.cuda.Stream:
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams.setdefault(index, torch.cuda.Stream(index))
        return stream


_device = Cuda()


def await_marks(marks: Sequence[Any], engine: Engine, name: str) -> None:
    """Let the cpu wait until streams have reached the marks, at most for the group's timeout."""
    started = time.monotonic()
    for mark in marks:
        while not _device.is_done(mark):
            elapsed = time.monotonic() - started
            if engine.flags & CLOSED:
                raise AbortedError(f"{name}: the process group was closed while the GPU was at work before it")
            if elapsed > engine.timeout_s:
                facts = context(name, rank=engine.peer_regions.rank, seq=engine.seq, elapsed_s=elapsed)
                told = f"{facts}: this rank's GPU has not come to the call within the group's time-out"
                raise CommTimeoutError(told, has_job=True)
            if elapsed > SPIN_S:
                time.sleep(NAP_S)


class Staged:
    """The twins of one call."""

    def __init__(self, name: str, args: Sequence[Any], is_read: bool, is_written: bool) -> None:
        self._twins: dict[int, Twin] = {}
        self._lock = threading.Lock()
        self._back: list[Any] | None = None
        self._broken: RuntimeError | None = None
        first = list(_tensors_of(args[0])) if is_written else []
        dense = [tensor for tensor in first if tensor.layout is torch.strided]
        for tensor in dense:
            refuse_overlap(tensor, f"{name}: output")
        refuse_shared(dense, f"{name}: outputs")
        self.args = [self._replace(arg) for arg in args]
        self.written = [self._twins[id(tensor)] for tensor in first if id(tensor) in self._twins]
        twins = list(self._twins.values())
        self._is_read = is_read
        for twin in twins if is_read else ():
            if twin.tensor.layout is torch.strided:
                _device.copy(twin.cpu, twin.tensor)
        self.marks = _device.marks(twins)

    def _replace(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            if not arg.is_cuda:
                return arg
            if id(arg) not in self._twins:
                plain = arg.detach() if arg.layout is torch.strided else arg  # entries of a detached one are its own
                self._twins[id(arg)] = Twin(plain, _device.cpu_like(plain))
            return self._twins[id(arg)].cpu
        if isinstance(arg, (list, tuple)):
            return [self._replace(item) for item in arg]
        return arg

    def await_values(self, engine: Engine, name: str) -> None:
        """Let the cpu wait until the twins hold the caller's values."""
        if self._is_read:
            await_marks(self.marks, engine, name)

    def copy_now(self) -> None:
        """Put the results on the current stream."""
        for twin in self.written:
            _device.copy(twin.tensor, twin.cpu)

    def copy_back(self) -> list[Any]:
        """Have the results copied on our own streams, once; returns the marks behind the copies."""
        with self._lock:
            if self._broken is not None:
                raise self._broken
            if self._back is None:
                try:
                    self._back = _device.copy_back(self.written, self.marks)
                except expected(RuntimeError) as exc:  # CUDA's message; another thread may report it
                    self._broken = exc
                    raise
            return self._back

    def futures_device(self) -> Any:
        """Return a future that may hold this call's tensors."""
        return _device.future(list(self._twins.values()))


@untraced_methods
class StagedWork(Work):
    """An asynchronous call on twins. Its results are copied back when it ends, also when no thread asks for them.

    It is a `Work`, to torch and to the engine (`overlap.batch_mates`): the same call, whose end is later.
    """

    def __init__(self, work: Work, staged: Staged, outputs: Any) -> None:
        super().__init__(work.engine, work.ops, outputs)
        self._staged = staged
        self.engine.listen(self.ops[-1], self._copy_back)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the call as `Work.wait`; the current streams then wait for the copy of its results."""
        try:
            self._drive(timeout)
        except expected(PeerError) as exc:
            if self.engine.reports_losses and is_loss(exc) and super().is_completed():
                return True
            raise
        _device.join(self._staged.copy_back())
        return True

    def is_completed(self) -> bool:
        """True when the call has ended and its results, if it ended well, are in the caller's tensors."""
        if not super().is_completed():
            return False
        return not super().is_success() or all(map(_device.is_done, self._staged.copy_back()))

    def is_success(self) -> bool:
        """True when it has ended well."""
        return super().is_success() and self.is_completed()

    def settle_in(self, result: Result) -> None:
        """Note in `result` when the call has ended and where its copies are."""

        def settle(op: Any) -> None:
            """Copy the results back and note that the call has ended."""
            if op.error is None:
                with ignored(RuntimeError):  # the waiter gets the error
                    result.marks = self._staged.copy_back()
            result.work = None

        self.engine.listen(self.ops[-1], settle)

    def let_end(self, told: str, is_read: bool) -> None:
        """Wait for its end and make the current streams wait for its results, for a call on the same memory."""
        try:
            self.engine.wait(self.ops[-1], None)
        except expected(EpeeError) as exc:
            if self.ops[-1].error is None:
                raise  # it continues: the wait for it was ended
            if is_read:
                raise not_run(told, exc) from exc
            return
        _device.join(self._staged.copy_back())

    def get_future(self) -> Any:
        """Return a future of the output tensors; a user of its value waits on its streams, not on the cpu."""
        if self._future is None:
            if self.engine.helper.is_current():
                with ignored(EpeeError):  # the future raises it
                    self._drive(None)
            ended = self._staged.futures_device()
            self._future = ended.then(self._value)
            self.engine.listen(self.ops[-1], lambda op: self._fulfil(ended))
        return self._future

    def _copy_back(self, op: Any) -> None:
        if op.error is None:
            with ignored(RuntimeError):  # the waiter gets the error
                self._staged.copy_back()

    def _fulfil(self, future: Any) -> None:
        marks: list[Any] = []
        if super().is_success():
            with ignored(RuntimeError):  # `_value` raises it
                marks = self._staged.copy_back()
        _device.fulfil(future, self._outputs if marks else None, marks)

    def _value(self, ended: Any) -> Any:
        if super().exception() is None:
            self._staged.copy_back()  # raises the error of the copies
        return super()._value(ended)


class Result:
    """The memory that a staged call writes. It keeps the call only until that has ended, and no tensor afterwards.

    Attributes:
        work: the call, while it is in progress.
        marks: behind the copies of its results, from then on.
    """

    def __init__(self, staged: Staged, work: StagedWork | None) -> None:
        self.spans = spans_of([twin.tensor for twin in staged.written])
        self.work = work
        self.marks: list[Any] = [] if work is not None else _device.marks(staged.written)

    def is_settled(self) -> bool:
        """True when nothing of the call is under way any more, however it has ended."""
        return self.work is None and all(map(_device.is_done, self.marks))


class Staging:
    """Runs the calls of one group on twins; knows which results may not have reached the caller's tensors yet."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._results: list[Result] = []

    def run(self, name: str, method: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a call (`method` of the group) on twins; it writes the first of its arguments.

        Raises:
            AbortedError, CommTimeoutError: the GPU did not reach the call.
            InvalidArgument: the written memory overlaps itself. Else as the call does.
        """
        engine = self._engine
        roots = [opts.rootRank for opts in (*args, *kwargs.values()) if hasattr(opts, "rootRank")]
        is_root = roots == [engine.peer_regions.rank]
        is_written = {"send": False, "broadcast": not is_root, "reduce": is_root}.get(name, True)
        try:
            self._let_end(_tensors_of(args), context(name, rank=engine.peer_regions.rank), name != "recv")
            staged = Staged(name, args, name != "recv", is_written)
            staged.await_values(engine, name)
        except expected(Exception) as exc:
            if name not in ("send", "recv"):
                engine.refuse(name, exc)
            if engine.reports_losses and isinstance(exc, PeerError) and is_loss(exc):
                return Ended(engine, exc)  # as if the call had met the loss itself
            raise
        work = method(*staged.args, **kwargs)
        if isinstance(work, Work):
            work = StagedWork(work, staged, args[0])
            self._add(staged, work)
            return work
        if isinstance(work, Ended):
            return work
        staged.copy_now()
        self._add(staged, None)
        return work

    def await_stream(self, name: str) -> None:
        """Let the cpu wait until the current stream of the current GPU has done its present work.

        Raises:
            AbortedError, CommTimeoutError: the GPU did not reach it; the call is refused on all ranks.
        """
        try:
            await_marks(_device.here(), self._engine, name)
        except expected(Exception) as exc:
            self._engine.refuse(name, exc)
            raise

    def _add(self, staged: Staged, work: StagedWork | None) -> None:
        """Note the memory that a call writes: `work` if it is asynchronous, else copies are on current streams."""
        if not staged.written:
            return
        result = Result(staged, work)
        self._results.append(result)
        if work is not None:
            work.settle_in(result)

    def _let_end(self, tensors: Any, told: str, is_read: bool) -> None:
        """Wait until no call will write to `tensors` any more; current streams wait for copies that are in progress.

        Raises:
            EpeeError: a call has failed that was to write the input of the new one, with its error.
        """
        self._results = [result for result in self._results if not result.is_settled()]
        if not self._results:
            return
        spans, mates = spans_of(tensors), batch_mates()
        for result in self._results:
            if not meet(result.spans, spans):
                continue
            work = result.work
            if work is None:
                _device.join(result.marks)
            elif not any(op in mates for op in work.ops):
                work.let_end(told, is_read)


def _tensors_of(arg: Any) -> list[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        return [arg]
    if isinstance(arg, (list, tuple)):
        return [tensor for item in arg for tensor in _tensors_of(item)]
    return []
