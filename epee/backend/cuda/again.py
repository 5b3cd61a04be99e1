"""Fast path for a group's calls on CUDA tensors that match an earlier call: cache key, addresses, a launch.

Almost all calls of a model match an earlier one: the same method, dtypes, sizes and options. The results of the checks
(`calls.py`) and of the choice of a kernel (`machine.py`) are cached as a plan with its own launcher, whose arguments
hold everything that does not change; a call writes its addresses and launches. A cache key holds all that the checks
read except addresses; what depends on those (whether input and output overlap) is checked in each call.

Any other difference (another stream or GPU, a graph, a report, other buffers on the GPU, other arguments) gives None
before anything has happened: the call then takes the ordinary path, which checks and makes it, or raises. The ordinary
path passes what was made to `remember` if it was one move of the tensors as given: one kernel, or the two of a large
call of mode "mask", with memory for a copy of an in-place sum. A plan is made when a key comes for the second time, as
it costs more than it saves once. At most `MAX_PLANS` are kept, then the cache starts empty.

Called by the thread of a call, with the lock of the group's CUDA backend.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...errors import expected
from ...gpu.ranks import room_of
from ...torch_private import current_index
from ..collectives.arguments import reduce_code
from .machine import Collectives
from .mask.counts import Count
from .moves import MOVED, Move
from .params import forms_of
from .plan import Fitted

MAX_PLANS = 512
NO_KEY = (AttributeError, TypeError, ValueError, RuntimeError)  # raised for arguments that are no tensors, or unusual
_STRIDED, _SUM = torch.strided, dist.ReduceOp.SUM
_Found = tuple["ReadyCall", tuple[int, ...], torch.Tensor]  # of the call: its addresses, the tensor that it writes


class ReadyCall:
    """The launches of calls that differ in addresses only.

    Args:
        machine: that made one of them.
        move: the move of that call.
        most_sms: multiprocessors that they take.
    """

    def __init__(self, machine: Collectives, move: Move, most_sms: int) -> None:
        self._machine, self._move, self._share = machine, move, machine.device.share
        self._most_sms = most_sms
        self._rank, self._num_ranks = machine.config.rank, machine.config.num_ranks
        self._is_tried, self._is_sum = machine.is_tried(move), move.kind != MOVED
        num_ranks = self._num_ranks
        room, self._forms = 8 * (room_of(num_ranks) - num_ranks), forms_of(num_ranks)
        self._pack = struct.Struct(f"={num_ranks}Q{room}x{num_ranks}Q").pack_into
        self._at = self._forms.inputs_at
        self._launches: list[Fitted] = []
        self._answer: tuple[int, bool] | None = None
        self._timeout_s = -1.0
        self._kernels: dict[str, Any] = {}

    def launch(
        self, stream: int, timeout_s: float, addresses: tuple[int, ...], written: torch.Tensor, count: Count | None
    ) -> bool:
        """Launch on a raw stream, that of the last launch; False, without any effect, if that is not possible.

        Args:
            stream: a raw handle.
            timeout_s: of the call's waits.
            addresses: of this rank's inputs for all ranks, then of its outputs.
            written: the tensor that this rank's output lies in, alone if it may be summed in place.
            count: as in `Collectives.run`.
        """
        answer = self._share.still(stream)
        launches = self._launches
        is_as_before = answer is self._answer and timeout_s == self._timeout_s
        if not launches or not is_as_before or launches[0].plan is not self._machine.plan:
            if answer is None:
                return False
            launches = self._fit(answer, timeout_s)
        copy = None  # kept alive until the call is queued
        if self._is_tried:
            again, own, place = addresses, addresses[self._rank], 0
            if self._is_sum and own == addresses[self._num_ranks + self._rank]:
                try:
                    copy = torch.empty_like(written)
                except expected(RuntimeError):  # no memory: peers must be notified
                    return False
                place = copy.data_ptr()
                again = tuple([place if at == own else at for at in addresses[: self._num_ranks]])
                again += addresses[self._num_ranks :]
            self._pack(launches[1].kernel.args, self._at, *again)
            launches[0].kernel.args.saved = place
        if count is not None:
            forms = self._forms
            forms.counted.pack_into(launches[-1].kernel.args, forms.counted_at, count.address, count.stamp)
        self._pack(launches[0].kernel.args, self._at, *addresses)
        for _, _, kernel, grid, block, shared, mode, _ in launches:
            kernel(grid, block, shared, stream, mode)
        return True

    def _fit(self, answer: tuple[int, bool], timeout_s: float) -> list[Fitted]:
        machine = self._machine
        self._launches = []  # an interrupt after this line makes the next call start anew
        machine.timeout_s, machine.most_sms = timeout_s, self._most_sms
        launches = [fitted._replace(kernel=self._own(fitted)) for fitted in machine.fit(self._move, *answer)]
        machine.fill(launches, self._move, self._move)
        self._launches, self._answer, self._timeout_s = launches, answer, timeout_s
        return launches

    def _own(self, fitted: Fitted) -> Any:
        """Return this call's own launcher of a kernel."""
        kernel = self._kernels.get(fitted.name)
        if kernel is None:
            kernel = self._kernels[fitted.name] = fitted.kernel.bind()
        return kernel


class KnownCalls:
    """The cached calls of one group.

    Args:
        machine: of the group.
        most_sms: multiprocessors that a call takes at most.
    """

    def __init__(self, machine: Collectives, most_sms: int) -> None:
        device, config = machine.platform.device, machine.config
        self._most_sms = most_sms
        self._machine, self._device = machine, machine.device
        self._rank, self._num_ranks = config.rank, config.num_ranks
        self._index = device.index if device.type == "cuda" else -1
        self._current: Callable[[], int] = current_index if device.type == "cuda" else lambda: -1
        self._plans: dict[Hashable, ReadyCall | None] = {}
        self._missed: Hashable = None
        self._methods: dict[str, Callable[..., _Found | None]] = {
            "allreduce": self._all_reduce,
            "broadcast": self._broadcast,
            "all_gather_single": self._all_gather,
            "reduce_scatter_single": self._reduce_scatter,
            "all_to_all_single": self._all_to_all,
        }

    def run(self, method: str, args: Sequence[Any], timeout_s: float, count: Count | None = None) -> int | None:
        """Make a call if its cache key has a plan; returns its stream, or None, without any effect.

        Args:
            method, args: of the group, without keywords.
            timeout_s: of the call's waits.
            count: as in `Collectives.run`; always, or never.
        """
        self._missed = None
        find = self._methods.get(method)
        stream = self._device.quiet_stream()
        if find is None or stream is None or self._current() != self._index:
            return None
        try:
            found = find(*args)
        except expected(*NO_KEY):
            return None
        if found is None:
            return None
        ready, addresses, written = found
        return stream if ready.launch(stream, timeout_s, addresses, written, count) else None

    def skip(self) -> None:
        """Note that a call is made without `run`: it is not the last one that `run` found no plan for."""
        self._missed = None

    def remember(self, move: Move) -> None:
        """Note the only move of the call for which `run` has just returned None; it uses the tensors as given."""
        key, self._missed = self._missed, None
        if key is None:
            return
        if key in self._plans:
            self._plans[key] = ReadyCall(self._machine, move, self._most_sms)
            return
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = None

    def _ready(self, key: Hashable) -> ReadyCall | None:
        ready = self._plans.get(key)
        if ready is None:
            self._missed = key
        return ready

    # ---- one function per method: as in `calls.py`

    def _all_reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> _Found | None:
        (x,) = tensors
        op = opts.reduceOp
        code = 0 if op == _SUM else reduce_code(op)
        if x.layout is not _STRIDED or not x.is_contiguous() or x.is_neg():
            return None
        ready = self._ready(("all_reduce", type(x), x.dtype, x.numel(), x.get_device(), code, self._is_in_pool(x)))
        return None if ready is None else (ready, (x.data_ptr(),) * (2 * self._num_ranks), x)

    def _broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> _Found | None:
        (x,) = tensors
        if x.layout is not _STRIDED or not x.is_contiguous() or x.is_neg():
            return None
        key = "broadcast", type(x), x.dtype, x.numel(), x.get_device(), opts.rootRank, self._is_in_pool(x)
        ready = self._ready(key)
        return None if ready is None else (ready, (x.data_ptr(),) * (2 * self._num_ranks), x)

    def _all_gather(self, output: torch.Tensor, x: torch.Tensor, opts: Any) -> _Found | None:
        ready = self._pair("all_gather", output, x, 0)
        if ready is None:
            return None
        at, out, size, num_ranks = x.data_ptr(), output.data_ptr(), x.nbytes, self._num_ranks
        if at != out + self._rank * size and at < out + num_ranks * size and out < at + size:
            return None
        return ready, (at,) * num_ranks + tuple(range(out, out + num_ranks * size, size)), output

    def _reduce_scatter(self, output: torch.Tensor, x: torch.Tensor, opts: Any) -> _Found | None:
        op = opts.reduceOp
        at, out, size, num_ranks = x.data_ptr(), output.data_ptr(), output.nbytes, self._num_ranks
        is_in_place = out == at + self._rank * size
        ready = self._pair("reduce_scatter", output, x, (0 if op == _SUM else reduce_code(op), is_in_place))
        if ready is None:
            return None
        if not is_in_place and out < at + num_ranks * size and at < out + size:
            return None
        return ready, tuple(range(at, at + num_ranks * size, size)) + (out,) * num_ranks, output

    def _all_to_all(
        self, output: torch.Tensor, x: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any
    ) -> _Found | None:
        ready = None if output_splits or input_splits else self._pair("all_to_all", output, x, x.shape[0])
        if ready is None:
            return None
        at, out, whole = x.data_ptr(), output.data_ptr(), x.nbytes
        if at < out + whole and out < at + whole:
            return None
        size = whole // self._num_ranks
        return ready, tuple(range(at, at + whole, size)) + tuple(range(out, out + whole, size)), output

    def _pair(self, op: str, output: torch.Tensor, x: torch.Tensor, more: Hashable) -> ReadyCall | None:
        """Return the plan for an input and an output of some elements each."""
        if x.layout is not _STRIDED or not x.is_contiguous() or x.is_neg() or not x.numel():
            return None
        if output.layout is not _STRIDED or not output.is_contiguous() or output.is_neg() or not output.numel():
            return None
        key = op, type(x), type(output), x.dtype, output.dtype, x.numel(), output.numel()
        return self._ready((*key, x.get_device(), output.get_device(), more, self._is_in_pool(x)))

    def _is_in_pool(self, x: torch.Tensor) -> bool:
        """Whether the memory that peers would read lies in the pool, on which the kernel's arguments depend."""
        pool = self._machine.pool
        return pool is not None and pool.holds(x.data_ptr(), x.nbytes)
