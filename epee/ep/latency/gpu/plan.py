"""The common part of calls of the latency kernels of one kind and size, computed once.

Data path: none. A plan has launchers of its own (`Launcher.bind`), one for each choice of phases, whose arguments hold
everything that stays: sizes, offsets, options. A call allocates the plan's tensors, writes the words that vary
(`params.CALL_WORDS` and the pointers after them) with one `struct.pack_into`, and launches. A launch, or a graph that
records it, takes a copy of the arguments, so the next call may write others.

Called on the thread of a call, with the buffer's lock. A plan depends on no view and no stream, and holds no memory of
a call; it is valid as long as its core.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ....gpu.platform import Launcher, Platform
from ....memory.fresh import Allocate, allocator
from .params import (
    BOTH_HALVES,
    CALL_WORDS,
    COMBINE_POINTERS,
    DISPATCH_PARTS,
    DISPATCH_POINTERS,
    HANDLE_PARTS,
    OP_COMBINE,
    OP_DISPATCH,
    SCALE_BLOCK,
    SEND_HALF,
    LatencyCombineParams,
    LatencyDispatchParams,
)
from .shapes import LatencyConfig, LatencyHandleSpace, Launch, combine_launch, dispatch_launch, handle_space
from .types import CoreOptions

FP8 = torch.float8_e4m3fn
LaunchOf = Callable[[int, int], Launch]  # (phases, multiprocessors it may take at most) -> sizes
_POINTERS = {LatencyDispatchParams: DISPATCH_POINTERS, LatencyCombineParams: COMBINE_POINTERS}


class ReadyKernel:
    """A kernel with the phases that it runs; all is set but the words of a call.

    Args:
        kernel: launched with a copy of its arguments.
        halves: the phases that it runs.
        constants: further arguments that stay, by name.
        is_strict: a missing source is an error.
        launch_of: returns the sizes of the launch.
        num_sms: of the GPU.

    Attributes:
        fits_at: `Share.num_changes` and the raw stream for which `fit` was called last, None if for a graph: while they
            are the same, its sizes are.
        width: how many multiprocessors a launch takes at once.
    """

    def __init__(
        self,
        kernel: Launcher,
        halves: int,
        constants: Mapping[str, int],
        is_strict: bool,
        launch_of: LaunchOf,
        num_sms: int,
    ) -> None:
        self._kernel = kernel.bind()
        self._args = self._kernel.args
        for name, value in constants.items():
            setattr(self._args, name, value)
        self._args.call.halves, self._args.call.is_strict = halves, int(is_strict)
        params = type(self._args)
        words = (*CALL_WORDS.split(), *_POINTERS[params].split())
        self._at = params.call.offset + type(self._args.call).timeout_ns.offset
        self._pack = struct.Struct(f"={len(words)}Q").pack_into
        self._launch_of, self._halves, self._num_sms = launch_of, halves, num_sms
        self.fits_at: tuple[int, int] | None = None
        self._fitted = 0, False
        self._shape, self._mode, self.width = Launch(0, 0, 0), "plain", 0

    def fit(self, max_sms: int, is_alone: bool) -> int:
        """Choose sizes and mode for a launch that may take so many multiprocessors; return how many it takes at once.

        Raises:
            As `launch_of`.
        """
        self.fits_at = None  # an interrupt in here makes the next call fit again
        if (max_sms, is_alone) != self._fitted:
            self._fitted = 0, False
            self._shape = self._launch_of(self._halves, max_sms)
            grid = self._shape.grid
            self._mode, self.width = "plain", grid
            if is_alone or 2 * grid <= self._num_sms:
                self._mode, self.width = "early", 2 * grid  # the next kernel's blocks start beside these
            self._fitted = max_sms, is_alone
        return self.width

    def launch(self, stream: int, timeout_ns: int, turn: tuple[int, int], pointers: tuple[int, ...]) -> None:
        """Launch on a raw stream. `fit` comes before.

        Args:
            stream: a raw handle.
            timeout_ns: bound of the waits.
            turn: calls sent before this one and not received, calls received with it.
            pointers: the mask, the waiting times, then those of the call, in the order of the arguments.
        """
        words: tuple[Any, ...] = (self._args, self._at, timeout_ns)
        words = words + turn + pointers  # half the cost of unpacking them into the call
        self._pack(*words)
        grid, block, shared_bytes = self._shape
        self._kernel(grid, block, shared_bytes, stream, self._mode)


class CallPlan:
    """The launches of calls that differ in words only.

    Args:
        op: of the calls.
        is_split: their phases are launched separately.
        timeout_s: bound of the waits of calls that name none.
        ready_for: makes the launch of some phases.

    Attributes:
        made: the launches of some phases that were needed before (`ready`), by these phases.
    """

    def __init__(self, op: int, is_split: bool, timeout_s: float, ready_for: Callable[[int], ReadyKernel]) -> None:
        self.op, self.is_split, self.timeout_ns = op, is_split, int(timeout_s * 1e9)
        self._ready_for = ready_for
        self.made: list[ReadyKernel | None] = [None] * (BOTH_HALVES + 1)

    def ready(self, halves: int) -> ReadyKernel:
        """Return the launch of the phases `halves`, made when it is first needed."""
        ready = self.made[halves]
        if ready is None:
            ready = self.made[halves] = self._ready_for(halves)
        return ready


@dataclass(frozen=True, eq=False)
class LatencyDispatchPlan:
    """A dispatch of so many tokens with these options.

    Attributes:
        config: sizes of the call.
        calls: its launches.
        num_tokens: of this rank.
        new_x, new_scales, new_words: allocate the results; no scales without FP8.
        new_counts: allocates the counts, for callers that read them at once: it takes half the time of a view.
        space: of the small results.
        offsets: in bytes, of the values that the kernel writes into `words` (`params.DISPATCH_PARTS`).
        waits: the offset of the waiting times.
    """

    config: LatencyConfig
    calls: CallPlan
    num_tokens: int
    new_x: Allocate
    new_scales: Allocate | None
    new_words: Allocate
    new_counts: Allocate
    space: LatencyHandleSpace
    offsets: Sequence[int]
    waits: int


@dataclass(frozen=True, eq=False)
class LatencyCombinePlan:
    """A combine of so many tokens with these options.

    Attributes:
        calls: its launches.
        num_tokens: of this rank.
        new_out, new_words: allocate the results.
        offsets: in bytes, of the values that the kernel reads in the words of the dispatch (`params.HANDLE_PARTS`).
        got: the offset, in bytes, of `got` in `words`, after the waiting times.
    """

    calls: CallPlan
    num_tokens: int
    new_out: Allocate
    new_words: Allocate
    offsets: Sequence[int]
    got: int


class Planner:
    """Makes the plans of one core.

    Args:
        platform: the GPU.
        config: of the core.
        kernels: by name; their arguments hold what stays for all calls once the core is made.
    """

    def __init__(self, platform: Platform, config: LatencyConfig, kernels: Mapping[str, Launcher]) -> None:
        self._config, self._kernels, self._limits, self._device = config, kernels, platform.limits, platform.device

    def dispatch(self, num_tokens: int, x_stride: int, options: CoreOptions) -> LatencyDispatchPlan:
        """Prepare dispatches of so many tokens, whose rows lie `x_stride` bytes apart.

        Raises:
            InvalidArgument: the kernel cannot do it.
        """
        config, limits = self._config, self._limits
        dispatch_launch(config, num_tokens, SEND_HALF, 1, limits)  # refused now, before the call is visible to any peer
        shape, space = (config.num_local_experts, config.capacity, config.hidden), handle_space(config, num_tokens)
        dtype, scales, num_scales = torch.bfloat16, None, 0
        if options.use_fp8:
            num_scales = config.hidden // (4 * SCALE_BLOCK if options.use_ue8m0 else SCALE_BLOCK)
            kind = torch.int32 if options.use_ue8m0 else torch.float32
            strides = (num_scales * config.capacity, 1, config.capacity)
            dtype, scales = FP8, self._allocate(kind, (*shape[:2], num_scales), strides)
        constants = {
            "x_stride": x_stride,
            "num_tokens": num_tokens,
            "kind": config.kind_of(options.kind),
            "scale_kind": options.scale_kind,
            "row_words": config.hidden * dtype.itemsize // 4,
            "scale_words": num_scales,
        }
        name = "dispatch_latency_fp8" if options.use_fp8 else "dispatch_latency_bf16"
        return LatencyDispatchPlan(
            config,
            self._calls(OP_DISPATCH, name, options, constants, partial(dispatch_launch, config, num_tokens)),
            num_tokens,
            self._allocate(dtype, shape),
            scales,
            self._allocate(torch.int32, (space.total,)),
            self._allocate(torch.int32, (config.num_local_experts,)),
            space,
            _offsets(space, DISPATCH_PARTS),
            4 * space.waits,
        )

    def combine(
        self, num_tokens: int, options: CoreOptions, is_wide: bool = False, has_weights: bool = False
    ) -> LatencyCombinePlan:
        """Prepare combines of so many tokens.

        Args:
            num_tokens: of the dispatches.
            options: how; those of quantisation are not read.
            is_wide: partials cross as float32 (on all ranks or none).
            has_weights: they bring weights (on all or none).
        """
        config = self._config
        constants = {
            "y_stride": 2 * config.hidden,
            "has_weights": int(has_weights),
            "num_tokens": num_tokens,
            "kind": config.kind_of(int(is_wide) | 2 * int(has_weights)),
        }
        name = "combine_latency_f32" if is_wide else "combine_latency_bf16"
        num_ranks = config.num_ranks
        return LatencyCombinePlan(
            self._calls(OP_COMBINE, name, options, constants, partial(combine_launch, config, num_tokens)),
            num_tokens,
            self._allocate(torch.bfloat16, (num_tokens, config.hidden)),
            self._allocate(torch.int64, (num_ranks + -(-num_ranks // 8),)),
            _offsets(handle_space(config, num_tokens), HANDLE_PARTS),
            8 * num_ranks,
        )

    def _calls(
        self, op: int, name: str, options: CoreOptions, constants: dict[str, int], launch_of: Callable[..., Launch]
    ) -> CallPlan:
        kernel, limits = self._kernels[name], self._limits

        def ready_for(halves: int) -> ReadyKernel:
            """Make the launch of some phases."""
            return ReadyKernel(
                kernel,
                halves,
                constants,
                options.is_strict,
                lambda halves, max_sms: launch_of(halves, max_sms, limits),
                limits.num_sms,
            )

        return CallPlan(op, options.return_hook, options.timeout_s, ready_for)

    def refusal(self, op: int) -> CallPlan:
        """Prepare to take part in a call only to refuse it."""
        name = "dispatch_latency_bf16" if op == OP_DISPATCH else "combine_latency_bf16"
        sizes = dispatch_launch if op == OP_DISPATCH else combine_launch
        one_block = lambda *how: sizes(self._config, 0, *how)._replace(grid=1)  # noqa: E731
        return self._calls(op, name, CoreOptions(), {"num_tokens": 0, "refused": 1}, one_block)

    def _allocate(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Allocate:
        """Return what allocates such tensors, uninitialised."""
        return allocator(shape, dtype, self._device, strides)


def _offsets(space: LatencyHandleSpace, parts: str) -> tuple[int, ...]:
    """Return the offsets of parts of the small results, in bytes."""
    return tuple(4 * int(getattr(space, part)) for part in parts.split())
