"""The checks of arguments, which return checked calls. Nothing has been sent yet when a rule here is broken.

Every message contains name, rule, value and remedy. Cheap checks only: shapes, dtypes and devices cost no pass over the
data; expert ids are checked as they are counted (`throughput/placement.py`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..arrays import refuse_fake, require_memory
from ..errors import InvalidArgument, StaleHandleError, UnsupportedError, expected
from ..gpu.payload import FP8, LAYOUTS, PAYLOAD_DTYPES
from ..values import is_whole, seconds, shown
from .config import FP8_MULTIPLE, MAX_CAPACITY, MAX_EXPERT_ALIGNMENT, MAX_SMS, BufferConfig
from .handle import CpuHandle, Handle
from .streams import RunOptions, is_capturing
from .throughput.order import RANKS_THEN_BIAS, CombineOrder, check_order, is_own_order, last_k
from .throughput.placement import SendPlan, check_topk_idx, plan_by_expert, plan_by_mask, plan_by_rank


def carries_gradient(rows: Any, weights: Any = None, bias: Any = None) -> bool:
    """Return whether a gradient is required of an argument of a call, in which it would end."""
    if not torch.is_grad_enabled():
        return False  # also in the forward of an autograd function, as of those of `epee.nn`
    try:
        found: bool = rows.requires_grad or (weights is not None and weights.requires_grad)
        return found or (bias is not None and bias.requires_grad)
    except expected(AttributeError):  # a pair, or no tensor at all
        pairs = [each if isinstance(each, tuple) else (each,) for each in (rows, weights, bias)]
        return any(getattr(part, "requires_grad", False) for pair in pairs for part in pair)


@functools.cache
def warn_of_gradients(call: str) -> None:
    """Warn that no gradient flows through `call`, once in a process; where warnings are errors, raises each time."""
    warnings.warn(
        f"{call} was given a tensor that requires grad, but no gradient flows through it; use epee.nn.dispatch and "
        "epee.nn.combine, or epee.nn.MoELayer, or call it under torch.no_grad()",
        stacklevel=5,  # this, the call's inner function, its profiling range, the call, its caller
    )


class PayloadRows(NamedTuple):
    """A payload as it is moved.

    Attributes:
        rows: on the CPU `[num_tokens, row_words]` int64, the bytes; on GPUs `[num_tokens, hidden]` as it was given.
        dtype: of the elements.
        scales: on the CPU `[num_tokens, scale_words]` int32, on GPUs as they were given; or None.
        scale_dtype: float32 or int32, None without scales.
    """

    rows: torch.Tensor
    dtype: torch.dtype
    scales: torch.Tensor | None = None
    scale_dtype: torch.dtype | None = None


class DispatchCall(NamedTuple):
    """A checked dispatch: fresh routing or a cached one (`handle`), never both.

    Attributes:
        plan: the rows to send by destination; None when cached, and on GPUs, where kernels compute it.
        mask: `[num_tokens, num_ranks]` bool, when it is the routing (contiguous on GPUs).
        topk_idx: `[num_tokens, num_topk]` int64; None when cached or without top-k routing.
        topk_weights: `[num_tokens, num_topk]` float32 or float64, contiguous, or None.
        memo: the path's cache for all calls that differ only in addresses, or None.
        capacity: rows that each rank keeps, None for all and when cached.
    """

    payload: PayloadRows
    layout: str
    expert_alignment: int
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    plan: SendPlan | None
    handle: Handle | None
    mask: torch.Tensor | None = None
    memo: dict[Any, Any] | None = None
    capacity: int | None = None


class CombineCall(NamedTuple):
    """A checked combine.

    Attributes:
        y: `[num_recv, hidden]`, contiguous.
        topk_weights: `[num_recv, num_topk]` (rank layout) or `[num_recv]` (expert layout), contiguous, or None.
        bias: up to two tensors `[num_tokens, hidden]`.
        out: `[num_tokens, hidden]` or None.
        order: of the additions.
        last_k: `[num_tokens, num_ranks]` int64, see `order.last_k`; rank layout by "last_k" only.
        memo: as in `DispatchCall`.
    """

    y: torch.Tensor
    handle: Handle
    topk_weights: torch.Tensor | None
    bias: tuple[torch.Tensor, ...]
    out: torch.Tensor | None
    order: CombineOrder = RANKS_THEN_BIAS
    last_k: torch.Tensor | None = None
    memo: dict[Any, Any] | None = None


def check_timeout(timeout: float | None, default: float) -> float:
    """Return the timeout in seconds; `InvalidArgument` unless it is a time as `seconds` takes it."""
    return default if timeout is None else seconds(timeout, "timeout")


def check_mask(config: BufferConfig, active_ranks: object) -> torch.Tensor | None:
    """Return a mask of ranks, `[num_ranks or more]` int32 on the buffer's device, or None."""
    if active_ranks is None:
        return None
    mask = check_tensor("active_ranks", active_ranks, (None,), (torch.int32,), config.device)
    if len(mask) < config.num_ranks:
        raise InvalidArgument(f"active_ranks must have an entry for each of {config.num_ranks} ranks, got {len(mask)}")
    if config.is_cuda and not mask.is_contiguous():  # kernels write into it, so a copy will not do
        raise InvalidArgument(f"active_ranks must be contiguous on a GPU, got strides {list(mask.stride())}")
    return mask


def check_run(run: RunOptions) -> RunOptions:
    """Return how a call runs; `previous_event` is checked where it is waited for."""
    num_sms = run.num_sms
    if num_sms is None and type(run.async_op) is bool and type(run.sync) is bool:
        return run
    if num_sms is not None and not is_whole(num_sms, 1, MAX_SMS):
        raise InvalidArgument(f"num_sms must be an int 1 ... {MAX_SMS} or None, got {shown(num_sms)}")
    for name, value in (("async_op", run.async_op), ("sync", run.sync)):
        if not isinstance(value, bool):
            raise InvalidArgument(f"{name} must be True or False, got {shown(value)}")
    return run


def check_handle(handle: object, buffer_id: int, epoch: int) -> Handle:
    """Return `handle` if it belongs to this buffer and epoch."""
    if not isinstance(handle, Handle):
        raise InvalidArgument(f"handle must be the .handle of a dispatch, got {type(handle).__name__}")
    if handle.buffer_id != buffer_id:
        raise StaleHandleError(
            "handle was made by another buffer, or by one of another process, or before this one was closed; dispatch "
            "again with this buffer"
        )
    if handle.epoch != epoch:
        raise StaleHandleError(f"handle is of epoch {handle.epoch}, the buffer is in epoch {epoch}; dispatch again")
    return handle


def check_tensor(
    name: str,
    value: object,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> torch.Tensor:
    """Return `value`, detached if it needs a gradient.

    Raises:
        InvalidArgument: it is no dense tensor on `device` of one of `dtypes` and of `shape` (None: any extent).
    """
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(f"{name} must be a tensor {_wanted(shape, dtypes)}, got {type(value).__name__}")
    if type(value) is not torch.Tensor:
        refuse_fake(value, name)
    if value.device != device:
        where, remedy = ("the CPU", ".cpu()") if device.type == "cpu" else (str(device), f'.to("{device}")')
        raise InvalidArgument(f"{name} must be on {where} like this buffer, got {value.device}; call {remedy}")
    if value.layout != torch.strided or value.is_conj() or value.is_neg():
        raise InvalidArgument(f"{name} must be a plain dense tensor, got {value.layout}; call .to_dense() first")
    got = value.shape
    if value.dtype not in dtypes:
        raise InvalidArgument(
            f"{name} must be {_wanted(shape, dtypes)}, got {value.dtype} {list(got)}; call .to({dtypes[0]})"
        )
    if got != shape and not _fits(got, shape):
        raise InvalidArgument(
            f"{name} must be {_wanted(shape, dtypes)}, got {value.dtype} {list(got)}; {_misfit(name, got, shape)}"
        )
    return value.detach() if value.requires_grad else value


def _fits(got: torch.Size, shape: tuple[int | None, ...]) -> bool:
    if len(got) != len(shape):
        return False
    for extent, want in zip(got, shape, strict=True):  # noqa: SIM110 - a generator costs more than the comparison
        if want is not None and want != extent:
            return False
    return True


def _misfit(name: str, got: torch.Size, shape: tuple[int | None, ...]) -> str:
    """Return what is wrong with an extent, and for well-known arguments where the right one comes from."""
    if len(got) != len(shape):
        return f"pass {len(shape)} dimensions"
    pairs = zip(got, shape, strict=True)
    axis, want = next((axis, want) for axis, (is_, want) in enumerate(pairs) if want is not None and is_ != want)
    named = {("y", 2, 0): " as the dispatch's x", ("topk_idx", 2, 0): " as x", ("topk_idx", 2, 1): " (num_topk)"}
    what = ("rows", "columns")[axis] if len(shape) == 2 else f"in dimension {axis}"
    return f"needs {want} {what}{named.get((name, len(shape), axis), '')}"


def _wanted(shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> str:
    extents = ", ".join("*" if extent is None else str(extent) for extent in shape)
    return f"{' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)} [{extents}]"


def check_payload(x: object, config: BufferConfig) -> PayloadRows:
    """Return the payload's bytes in rows; a tensor or an FP8 pair (values, scales)."""
    if isinstance(x, (tuple, list)):
        return _check_fp8(x, config)
    value = check_tensor("x", x, (None, config.hidden), PAYLOAD_DTYPES, config.device)
    if value.dtype.itemsize > config.dtype.itemsize:
        raise InvalidArgument(
            f"x must be no wider than the buffer's dtype {config.dtype}, got {value.dtype}; make the buffer with "
            f"dtype={value.dtype}, or x (and its MoELayer) in {config.dtype}"
        )
    if value.shape[0] > config.max_tokens_per_rank:
        raise _too_many_tokens("x", value.shape[0], config)
    return PayloadRows(check_rows("x", value) if config.is_cuda else _rows(_in_memory("x", value)), value.dtype)


def _in_memory(name: str, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements lie in memory of its own; a copy of a wrapper's around others.

    Raises:
        InvalidArgument: its storage was freed.
    """
    if values.data_ptr() or not values.numel():
        return values
    if type(values) in (torch.Tensor, torch.nn.Parameter):
        require_memory(values, name)
    copy = torch.empty(values.shape, dtype=values.dtype, device="cpu")
    copy.copy_(values)  # what that returns may be a wrapper again
    return copy


def _rows(values: torch.Tensor) -> torch.Tensor:
    """Return a 2-D tensor's bytes as rows of 8-byte words; a copy where torch could not view it so.

    That is: with gaps, off an 8-byte border, or with odd strides that torch calls contiguous (empty or one row).
    """
    num_tokens, hidden = values.shape
    is_dense = values.stride() == (hidden, 1)
    # torch's view looks at the offset, numpy's copies at the address; of a storage off the border one can be even
    is_plain = is_dense and values.storage_offset() * values.itemsize % 8 == 0 and values.data_ptr() % 8 == 0
    dense = values if is_plain else torch.empty(num_tokens, hidden, dtype=values.dtype, device="cpu").copy_(values)
    return dense.view(torch.int64)


def check_rows(name: str, values: torch.Tensor) -> torch.Tensor:
    """Return a matrix that GPU kernels can move row by row: in 16-byte pieces, straight from its memory.

    Raises:
        InvalidArgument: its rows have gaps, or do not begin at multiples of 16 bytes.
    """
    if values.numel():
        (num_rows, num_columns), (row_step, step) = values.shape, values.stride()
        has_gaps = step != 1 and num_columns > 1
        if has_gaps or (row_step * values.itemsize % 16 and num_rows > 1) or values.data_ptr() % 16:
            raise InvalidArgument(
                f"{name} must have rows without gaps that begin at multiples of 16 bytes, as the GPU copies them in "
                f"one piece; got strides {list(values.stride())} at an address that is {values.data_ptr() % 16} "
                "modulo 16; call .contiguous(), or .clone() on a slice"
            )
    return values


def _check_whole(name: str, value: torch.Tensor, config: BufferConfig) -> torch.Tensor:
    """Return a matrix of the combine; GPU kernels take it only as one piece of memory."""
    if config.is_cuda and value.numel() and (not value.is_contiguous() or value.data_ptr() % 16):
        raise InvalidArgument(
            f"{name} must be contiguous and begin at a multiple of 16 bytes on GPUs, got strides "
            f"{list(value.stride())}; call .contiguous(), or .clone() on a slice"
        )
    return value


def _check_fp8(pair: tuple[object, ...] | list[object], config: BufferConfig) -> PayloadRows:
    if len(pair) != 2:
        raise InvalidArgument(f"x must be a tensor or a pair (float8_e4m3fn values, scales), got {len(pair)} items")
    if config.hidden % FP8_MULTIPLE:
        raise InvalidArgument(
            f"an FP8 pair needs hidden to be a multiple of {FP8_MULTIPLE}, got {config.hidden}; pad rows"
        )
    values = check_tensor("x[0]", pair[0], (None, config.hidden), (FP8,), config.device)
    num_tokens = values.shape[0]
    if num_tokens > config.max_tokens_per_rank:
        raise _too_many_tokens("x[0]", num_tokens, config)
    scales = check_tensor("x[1]", pair[1], (num_tokens, None), (torch.float32, torch.int32), config.device)
    if not 1 <= scales.shape[1] <= config.scale_words:  # their meaning is between the caller and the experts
        raise InvalidArgument(
            f"x[1] must have 1 ... {config.scale_words} 4-byte scales for each row of hidden {config.hidden}, "
            f"got {scales.dtype} {list(scales.shape)}"
        )
    if config.is_cuda:
        return PayloadRows(check_rows("x[0]", values), FP8, scales, scales.dtype)
    rows, scales = _rows(_in_memory("x[0]", values)), _in_memory("x[1]", scales)
    return PayloadRows(rows, FP8, scales.contiguous().view(torch.int32), scales.dtype)


def _too_many_tokens(name: str, num_tokens: int, config: BufferConfig) -> InvalidArgument:
    return InvalidArgument(
        f"{name} must have at most max_tokens_per_rank={config.max_tokens_per_rank} rows, got {num_tokens}; "
        "split the batch or make a larger buffer"
    )


class GivenRouting(NamedTuple):
    """The routing of a dispatch, as given by its caller: exactly one is not None, beside the capacity.

    See `Buffer.dispatch`.
    """

    topk_idx: object
    is_token_in_rank: object
    handle: Handle | None
    capacity: object = None


def check_dispatch(
    config: BufferConfig,
    x: object,
    routing: GivenRouting,
    others: tuple[Any, Any, Any],
    members: Sequence[int] | None = None,
) -> DispatchCall:
    """Check the arguments of a dispatch and plan it: to `members` only, if a view excludes ranks (CPU).

    `others` are topk_weights, layout and expert_alignment.
    """
    payload = check_payload(x, config)
    topk_weights, layout, expert_alignment = others
    topk_idx, is_token_in_rank, handle, capacity = routing
    if (topk_idx is None) + (is_token_in_rank is None) + (handle is None) != 2:
        names = ("topk_idx", "is_token_in_rank", "handle")
        given = [name for name, value in zip(names, routing[:3], strict=True) if value is not None]
        raise InvalidArgument(
            f"dispatch needs exactly one of topk_idx, is_token_in_rank and handle, got {', '.join(given) or 'none'}"
        )
    if layout not in LAYOUTS:
        raise InvalidArgument(
            f"layout must be 'rank' or 'expert', got {shown(layout)}; 'expert' groups the rows by expert"
        )
    if not is_whole(expert_alignment, 1, MAX_EXPERT_ALIGNMENT):
        raise InvalidArgument(
            f"expert_alignment must be an int 1 ... {MAX_EXPERT_ALIGNMENT}, got {shown(expert_alignment)}"
        )
    most = None if capacity is None else _check_capacity(capacity, handle, layout)
    if handle is not None:
        return _check_cached(config, payload, topk_weights, handle)
    if is_token_in_rank is not None:
        call = _check_routing_mask(config, payload, is_token_in_rank, topk_weights, layout, members)
        return call if most is None else call._replace(capacity=most)
    shape = (payload.rows.shape[0], config.num_topk)
    idx = check_tensor("topk_idx", topk_idx, shape, (torch.int64,), config.device).contiguous()
    weights = _check_weights(topk_weights, shape, payload.dtype, config)
    if config.is_cuda:  # kernels read the ids and plan: reading them here would make the CPU wait
        return DispatchCall(payload, layout, expert_alignment, idx, weights, None, None, capacity=most)
    sent = idx if members is None else _among(idx, members, config)
    plan = plan_by_rank(sent, config) if layout == "rank" else plan_by_expert(sent, config)
    return DispatchCall(payload, layout, expert_alignment, idx, weights, plan, None, capacity=most)


def _among(topk_idx: torch.Tensor, members: Sequence[int], config: BufferConfig) -> torch.Tensor:
    """Return expert ids with -1 for those whose rank is not a member; raises as `check_topk_idx`."""
    check_topk_idx(topk_idx, config.num_experts)
    is_there = torch.zeros(config.num_ranks + 1, dtype=torch.bool, device="cpu")
    is_there[list(members)] = True
    return torch.where(is_there[topk_idx.div(config.num_local_experts, rounding_mode="floor")], topk_idx, -1)


def _check_capacity(capacity: object, handle: Handle | None, layout: str) -> int:
    """Return the rows that each rank keeps."""
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
        raise InvalidArgument(f"capacity must be an int of at least 1 or None, got {shown(capacity)}")
    if handle is not None:
        raise InvalidArgument(
            f"capacity must be None with a handle, which already fixes the rows, got {shown(capacity)}"
        )
    if layout != "rank":
        raise UnsupportedError(
            "capacity serves layout='rank' only: which rows of an expert are dropped would need a second exchange "
            "between the ranks"
        )
    return min(capacity, MAX_CAPACITY)


def _check_cached(config: BufferConfig, payload: PayloadRows, topk_weights: object, handle: Handle) -> DispatchCall:
    num_tokens = payload.rows.shape[0]
    if num_tokens != handle.num_tokens:
        raise InvalidArgument(f"x must have the {handle.num_tokens} rows of the handle's dispatch, got {num_tokens}")
    if topk_weights is not None and not handle.with_topk:
        raise InvalidArgument("topk_weights need a handle that was routed by topk_idx, got one by is_token_in_rank")
    weights = _check_weights(topk_weights, (num_tokens, config.num_topk), payload.dtype, config)
    return DispatchCall(payload, handle.layout, handle.expert_alignment, None, weights, None, handle)


def _check_routing_mask(
    config: BufferConfig,
    payload: PayloadRows,
    mask: object,
    topk_weights: object,
    layout: str,
    members: Sequence[int] | None,
) -> DispatchCall:
    if layout != "rank":
        raise InvalidArgument("is_token_in_rank routes the rank layout only; give topk_idx for layout='expert'")
    if topk_weights is not None:
        raise InvalidArgument("topk_weights need topk_idx; is_token_in_rank does not say which expert a weight is for")
    shape = (payload.rows.shape[0], config.num_ranks)
    member = check_tensor("is_token_in_rank", mask, shape, (torch.bool,), config.device)
    if config.is_cuda:
        return DispatchCall(payload, layout, 1, None, None, None, None, member.contiguous())
    sent = member
    if members is not None:
        sent = torch.zeros_like(member)
        sent[:, list(members)] = member[:, list(members)]
    return DispatchCall(payload, layout, 1, None, None, plan_by_mask(sent, config), None, member)


def _check_weights(
    weights: object, shape: tuple[int, ...], dtype: torch.dtype, config: BufferConfig
) -> torch.Tensor | None:
    if weights is None:
        return None
    dtypes = (torch.float32, torch.float64) if dtype == torch.float64 else (torch.float32,)
    return check_tensor("topk_weights", weights, shape, dtypes, config.device).contiguous()


def _rows_to_combine(y: object, handle: Handle) -> int:
    """Return how many rows `y` must have: those of the result; of one without CPU sync that is the maximum.

    Then the caller may have cut it to the rows that came, whose number the CPU reads here: it waits for the GPU.

    Raises:
        InvalidArgument: fewer rows than came.
    """
    most = handle.num_recv
    if handle.is_exact or not isinstance(y, torch.Tensor) or y.dim() != 2 or len(y) >= most or is_capturing():
        return most
    if len(y) < handle.num_read_rows:
        raise InvalidArgument(
            f"y must have the {handle.num_read_rows} rows that the dispatch received (at most {most}), got {len(y)}; "
            "pass a result for every received row"
        )
    return len(y)


def check_combine(
    config: BufferConfig, y: object, handle: Handle, others: tuple[Any, Any, Any], members: Sequence[int] | None = None
) -> CombineCall:
    """Check the arguments of a combine; `members` if a view excludes ranks (CPU).

    `others` are topk_weights, bias and out.
    """
    topk_weights, bias, out = others
    num_rows = _rows_to_combine(y, handle)
    rows = check_tensor("y", y, (num_rows, config.hidden), PAYLOAD_DTYPES, config.device)
    if rows.dtype.itemsize > config.dtype.itemsize:
        raise InvalidArgument(
            f"y must be no wider than the buffer's dtype {config.dtype}, got {rows.dtype}; call .to({config.dtype})"
        )
    if topk_weights is not None and not handle.with_topk:
        raise InvalidArgument("topk_weights need a handle that was routed by topk_idx, got one by is_token_in_rank")
    per_row = (config.num_topk,) if handle.layout == "rank" else ()
    weights = _check_weights(topk_weights, (num_rows, *per_row), rows.dtype, config)
    shape = (handle.num_tokens, config.hidden)
    biases = () if bias is None else tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
    if len(biases) > 2:
        raise InvalidArgument(f"bias must be one tensor or a pair, got {len(biases)} tensors; add them first")
    kinds = (rows.dtype,) if rows.dtype == torch.float32 else (rows.dtype, torch.float32)
    biases = tuple(
        [_check_whole("bias", check_tensor("bias", item, shape, kinds, config.device), config) for item in biases]
    )
    target = None if out is None else check_tensor("out", out, shape, (rows.dtype,), config.device)
    if target is not None:
        _check_out(target, rows, weights)
        _check_whole("out", target, config)
        # out is written while biases are still to be read
        biases = tuple(item.clone() if overlap(target, item) else item for item in biases)
    wanted = check_order(handle.order, handle.layout)
    lanes = None
    if handle.layout == "rank" and wanted.by == "last_k":
        lanes = _check_lanes(config, handle, wanted, members)
    # on GPUs the use of an order must not depend on arguments that only this rank has
    if is_own_order(wanted, config.num_ranks, 2 if config.is_cuda else len(biases)):
        wanted = RANKS_THEN_BIAS
    _check_whole("y", rows, config)
    return CombineCall(rows.contiguous(), handle, weights, biases, target, wanted, lanes)


def _check_lanes(
    config: BufferConfig, handle: Handle, order: CombineOrder, members: Sequence[int] | None
) -> torch.Tensor | None:
    """Return `last_k` of the order's routing, which must name the ranks that the handle's rows went to.

    A GPU's handle keeps the routing of its dispatch, which is used there; the order's is not read.
    """
    if not isinstance(handle, CpuHandle):
        if not handle.with_topk:
            raise InvalidArgument('an order by "last_k" needs a handle that was routed by topk_idx')
        return None
    if order.topk_idx is None:
        raise InvalidArgument('an order by "last_k" needs topk_idx in the rank layout: give that of the dispatch')
    shape = (handle.num_tokens, config.num_topk)
    topk_idx = check_tensor("order.topk_idx", order.topk_idx, shape, (torch.int64,), config.device)
    check_topk_idx(topk_idx, config.num_experts)
    topk_idx = topk_idx if members is None else _among(topk_idx, members, config)
    lanes = last_k(topk_idx, config.num_ranks, config.num_local_experts)
    if handle.dropped is not None:
        lanes = lanes.masked_fill(handle.dropped, -1)
    sent = torch.zeros(lanes.shape, dtype=torch.bool, device="cpu")
    for segment in handle.placement.segments:
        sent[handle.plan.tokens[segment.first : segment.first + segment.num_rows], segment.dst_rank] = True
    if not torch.equal(sent, lanes >= 0):
        token = int((sent != (lanes >= 0)).any(1).nonzero()[0])
        raise InvalidArgument(
            f"order.topk_idx must be the routing of the handle's dispatch, but token {token} went to other ranks"
        )
    return lanes


def _check_out(out: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None) -> None:
    if not out.is_contiguous() and _overlaps_itself(out):
        raise InvalidArgument("out must not overlap itself (expanded?), got strides that do; give a .clone()")
    for name, other in (("y", y), ("topk_weights", weights)):
        if other is not None and overlap(out, other):
            raise InvalidArgument(f"out must not share memory with {name}, which is read while out is written")


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether the spans of memory of two tensors overlap."""
    start, other_start = first.data_ptr(), second.data_ptr()
    end, other_end = start + _span_bytes(first), other_start + _span_bytes(second)
    return start < other_end and other_start < end and start < end and other_start < other_end


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last; 0 for an empty one."""
    count = tensor.numel()
    if count == 0 or tensor.is_contiguous():
        return count * tensor.itemsize
    reach = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.itemsize


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements may share memory: sufficient for rows and columns of a 2-D tensor."""
    steps = sorted(
        (abs(step), extent) for step, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1
    )
    reach = 1
    for step, extent in steps:
        if step < reach:
            return True
        reach = step * (extent - 1) + reach
    return False
