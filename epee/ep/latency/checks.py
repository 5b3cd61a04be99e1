"""The checks of a `LatencyBuffer`'s arguments, which return checked calls; nothing has been sent yet at a refusal.

Shapes, dtypes and devices cost no pass over the data; expert ids are read once on the CPU (GPU kernels check them
themselves). The properties of a call without data and addresses are its cache entry, which `plans.py` stores for calls
on GPUs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...errors import InvalidArgument, InvalidState, StaleHandleError
from ...values import MAX_US, is_whole, shown
from ..checks import check_mask, check_rows, check_run, check_tensor, check_timeout, overlap
from ..config import CPU, BufferConfig
from ..streams import RunOptions
from ..throughput.placement import check_topk_idx
from .types import (
    QUANTISATION_NAMES,
    SCALE_BLOCK,
    CallSizes,
    CheckedLatencyCombine,
    CheckedLatencyDispatch,
    LatencyCombineCall,
    LatencyDispatchCall,
    LatencyHandle,
    Quantisation,
)

_PARTIAL_DTYPES = (torch.bfloat16, torch.float32)
_AT_ONCE = RunOptions()


class GivenToDispatch(NamedTuple):
    """The tensors of a dispatch as they came, whatever they are."""

    x: object
    topk_idx: object
    topk_weights: object
    active_ranks: object


class DispatchFlags(NamedTuple):
    """The flags of a dispatch as they came."""

    return_hook: object
    use_fp8: object
    round_scale: object
    use_ue8m0: object


class GivenToCombine(NamedTuple):
    """The tensors of a combine as they came, and the type of its partials."""

    y: object
    topk_weights: object
    out: object
    active_ranks: object
    partial_dtype: object


def check_wait(timeout_us: object, timeout: float | None, default_s: float) -> float:
    """Return for how many seconds a phase waits for a silent peer."""
    if timeout_us is None:
        return check_timeout(timeout, default_s)
    if timeout is not None:
        raise InvalidArgument("timeout and timeout_us say the same; give one of them")
    if not is_whole(timeout_us, 1, MAX_US):
        raise InvalidArgument(
            f"timeout_us must be an int of 1 ... {MAX_US} or None for the buffer's, got {shown(timeout_us)}"
        )
    assert isinstance(timeout_us, int)
    return timeout_us / 1e6


def check_run_options(num_sms: object, async_op: object, previous_event: object) -> RunOptions:
    """Check how a call runs; `previous_event` is checked where it is waited for."""
    if num_sms is None and async_op is False and previous_event is None:
        return _AT_ONCE
    return check_run(RunOptions(num_sms, async_op, previous_event))  # type: ignore[arg-type]  # checked there


def _check_hook_wish(return_hook: object, async_op: bool) -> bool:
    if not isinstance(return_hook, bool):
        raise InvalidArgument(f"return_hook must be True or False, got {shown(return_hook)}")
    if return_hook and async_op:
        raise InvalidArgument("return_hook and async_op exclude each other: a hook runs where it is called; drop one")
    return return_hook


def check_quantisation(config: BufferConfig, use_fp8: object, round_scale: object, use_ue8m0: object) -> Quantisation:
    """Check how rows are sent."""
    how = Quantisation(use_fp8, round_scale, use_ue8m0)  # type: ignore[arg-type]  # checked next
    for name, value in zip(QUANTISATION_NAMES, how, strict=True):
        if not isinstance(value, bool):
            raise InvalidArgument(f"{name} must be True or False, got {shown(value)}")
    if how.round_scale and not how.use_fp8:
        raise InvalidArgument("round_scale needs use_fp8=True: there are no scales otherwise")
    if how.use_ue8m0 and not how.round_scale:
        raise InvalidArgument("use_ue8m0 needs use_fp8=True and round_scale=True: an exponent holds powers of two only")
    multiple = 4 * SCALE_BLOCK if how.use_ue8m0 else SCALE_BLOCK
    if how.use_fp8 and config.hidden % multiple:
        raise InvalidArgument(f"these scales need hidden to be a multiple of {multiple}, got {config.hidden}; pad rows")
    return how


def check_latency_dispatch(
    sizes: CallSizes, given: GivenToDispatch, flags: DispatchFlags, async_op: bool, timeout_s: float
) -> LatencyDispatchCall:
    """Check the arguments of a dispatch; flags and timeout may still be of any type, but `async_op` is a bool."""
    config = sizes.config
    return_hook = _check_hook_wish(flags.return_hook, async_op)
    mask = check_mask(config, given.active_ranks)
    how = check_quantisation(config, flags.use_fp8, flags.round_scale, flags.use_ue8m0)
    rows = check_tensor("x", given.x, (None, config.hidden), (torch.bfloat16,), config.device)
    num_tokens = len(rows)
    if num_tokens > config.max_tokens_per_rank:
        raise InvalidArgument(
            f"x must have at most max_tokens_per_rank={config.max_tokens_per_rank} rows, got {num_tokens}; "
            "split the batch or make a larger buffer"
        )
    shape = (num_tokens, config.num_topk)
    idx = check_tensor("topk_idx", given.topk_idx, shape, (torch.int64,), config.device).contiguous()
    weights = None
    if given.topk_weights is not None:
        weights = check_tensor("topk_weights", given.topk_weights, shape, (torch.float32,), config.device).contiguous()
    if config.device == CPU:
        check_topk_idx(idx, config.num_experts)
    if config.is_cuda:
        check_rows("x", rows)
    checked = CheckedLatencyDispatch(sizes, num_tokens, how, mask is None, return_hook)
    return LatencyDispatchCall(checked, rows, idx, weights, mask, timeout_s)


def check_latency_handle(handle: object, buffer_id: int, epoch: int) -> LatencyHandle:
    """Return `handle` if it belongs to this buffer and epoch."""
    if not isinstance(handle, LatencyHandle):
        raise InvalidArgument(f"handle must be the .handle of a LatencyBuffer's dispatch, got {type(handle).__name__}")
    if handle.buffer_id != buffer_id:
        raise StaleHandleError(
            "handle was made by another buffer, or by one of another process, or before this one was closed; dispatch "
            "again with this buffer"
        )
    if handle.epoch != epoch:
        raise StaleHandleError(f"handle is of epoch {handle.epoch}, the buffer is in epoch {epoch}; dispatch again")
    return handle


def check_hook(of_epoch: int, epoch: int) -> None:
    """Raise unless a hook is of a call of the buffer's epoch."""
    if of_epoch != epoch:
        raise StaleHandleError(
            f"this hook is of a call of epoch {of_epoch}, the buffer is in epoch {epoch}; repeat the step"
        )


def check_latency_combine(
    sizes: CallSizes, handle: LatencyHandle, given: GivenToCombine, return_hook: object, async_op: bool,
    timeout_s: float,
) -> LatencyCombineCall:  # fmt: skip
    """Check the arguments of a combine of a checked handle, as `check_latency_dispatch`."""
    config = sizes.config
    is_split = _check_hook_wish(return_hook, async_op)
    mask = check_mask(config, given.active_ranks)
    if not handle.is_received:
        raise InvalidState("the handle's dispatch has not been received; call its hook first")
    shape = (config.num_local_experts, config.num_ranks * config.max_tokens_per_rank, config.hidden)
    rows = check_tensor("y", given.y, shape, (torch.bfloat16,), config.device)
    if not rows.is_contiguous():
        raise InvalidArgument(f"y must be contiguous, got strides {list(rows.stride())}; call .contiguous()")
    weights = None
    if given.topk_weights is not None:
        shape_of_weights = (handle.num_tokens, config.num_topk)
        weights = check_tensor("topk_weights", given.topk_weights, shape_of_weights, (torch.float32,), config.device)
        weights = weights.contiguous()
    partial_dtype = given.partial_dtype or torch.bfloat16
    if partial_dtype not in _PARTIAL_DTYPES:
        raise InvalidArgument(f"partial_dtype must be torch.bfloat16 or torch.float32, got {shown(partial_dtype)}")
    out = None
    if given.out is not None:
        out = check_tensor("out", given.out, (handle.num_tokens, config.hidden), (torch.bfloat16,), config.device)
        if not out.is_contiguous():
            raise InvalidArgument(f"out must be contiguous, got strides {list(out.stride())}; give a .clone()")
        for name, other in (("y", rows), ("topk_weights", weights)):
            if other is not None and overlap(out, other):
                raise InvalidArgument(f"out must not share memory with {name}, which is read while out is written")
    assert isinstance(partial_dtype, torch.dtype)
    checked = CheckedLatencyCombine(sizes, handle.num_tokens, partial_dtype, mask is None, is_split)
    return LatencyCombineCall(checked, handle, rows, weights, out, mask, timeout_s)
