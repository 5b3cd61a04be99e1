"""Dispatch and combine as autograd functions: each one's backward is the other.

Data path:
    dispatch forward    tokens and weights are sent to the experts' ranks.
    dispatch backward   one combine: gradient rows are sent back and summed per token (weights of one: the row was
                        copied, not scaled), the weights' gradients are sent back in the same call.
    combine forward     expert rows are sent back; the expert layout multiplies each by its weight on arrival.
    combine backward    one cached dispatch: the gradient of each token is sent to the rows that were summed into it.
                        In the expert layout `grad_y = w * g` and `grad_w = <g, y>` are computed on the expert's rank,
                        and `grad_w` flows on through dispatch's `topk_weights`.

Protocol: a backward is a collective call like a forward. Every rank must run it, in the same order; the calls depend on
the arguments of the forward only, never on the tensors of a rank that require gradients, so ranks cannot disagree. A
rank without tokens takes part with empty tensors: its loss must depend on them all the same (a sum over nothing does).
If a rank fails in between, its peers raise the buffer's own error, in forward and backward alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import InvalidArgument
from ..untraced import untraced

if TYPE_CHECKING:
    from ..ep.buffer import Buffer
    from ..ep.handle import Dispatched, Handle

Bias = Tensor | tuple[Tensor, Tensor] | None


@untraced
def dispatch(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None = None,
    *,
    layout: str = "expert",
    expert_alignment: int = 1,
    capacity: int | None = None,
    timeout: float | None = None,
) -> Dispatched:
    """Send each token to the ranks that own its experts; differentiable in `x` and `topk_weights`.

    Args:
        buffer: the buffer of this rank; all its ranks make the same call.
        x: `[num_tokens, hidden]` bfloat16, float16, float32 or float64. FP8 pairs have no gradient: use the buffer.
        topk_idx: `[num_tokens, num_topk]` int64; -1 means no expert.
        topk_weights: `[num_tokens, num_topk]` float32 (float64 is allowed with float64 tokens), or None.
        layout: "expert" (rows grouped by local expert, ready for a grouped product) or "rank".
        expert_alignment: each expert's block is padded to a multiple of this many rows.
        capacity: rank layout only, equal on all ranks: the most rows that a rank receives. Rows beyond it are dropped:
            they add nothing to the combined sum, and no gradient flows through them.
        timeout: seconds to wait for a silent peer, in the forward and in the backward; None uses the buffer's.

    Returns:
        The result of `Buffer.dispatch`; its `x` and `topk_weights` carry gradients.

    Raises:
        EpeeError: the errors of `Buffer.dispatch`; those of `Buffer.combine` from `backward()`.
    """
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"x must be a tensor, got {type(x).__name__}; an FP8 pair goes through Buffer.dispatch")
    x_out, weights_out, dispatched = _Dispatch.apply(
        x, topk_weights, buffer, topk_idx, layout, expert_alignment, capacity, timeout
    )
    return dispatched.with_values(x_out, weights_out)


@untraced
def combine(
    buffer: Buffer,
    y: Tensor,
    dispatched: Dispatched,
    *,
    bias: Bias = None,
    timeout: float | None = None,
) -> Tensor:
    """Send the experts' rows back and sum them per token; differentiable in `y`, the weights and `bias`.

    Args:
        buffer: the buffer that dispatched.
        y: the experts' results, row for row as `dispatched.x`. In the expert layout epee multiplies them by
            `dispatched.topk_weights`; in the rank layout the caller has weighted and summed its local experts. It is
            kept for the backward, so it must not be changed before that. Take ordinary memory: `combine_input` gives a
            slot, which would stay in use until then, and torch has no gradient for operations with `out=`.
        dispatched: the result of `epee.nn.dispatch`.
        bias: one tensor or a pair of `[num_tokens, hidden]`, added to the sum.
        timeout: seconds to wait for a silent peer, in the forward and in the backward; None uses the buffer's.

    Returns:
        `[num_tokens, hidden]` in `y`'s dtype, one row per token of this rank.

    Raises:
        EpeeError: the errors of `Buffer.combine`; those of `Buffer.dispatch` from `backward()`.
    """
    first, second = bias if isinstance(bias, tuple) else (bias, None)
    result: Tensor = _Combine.apply(y, dispatched.topk_weights, first, second, buffer, dispatched.handle, timeout)
    return result


class _Dispatch(torch.autograd.Function):
    """Forward: `Buffer.dispatch`. Backward: one `Buffer.combine`."""

    @staticmethod
    def forward(  # the signature is torch's: one positional argument per input
        ctx: Any,
        x: Tensor,
        topk_weights: Tensor | None,
        buffer: Buffer,
        topk_idx: Tensor,
        layout: str,
        expert_alignment: int,
        capacity: int | None,
        timeout: float | None,
    ) -> tuple[Tensor, Tensor | None, Dispatched]:
        """Dispatch, and keep the handle and the indices of local weights for the backward."""
        dispatched = buffer.dispatch(
            x,
            topk_idx,
            topk_weights,
            layout=layout,
            expert_alignment=expert_alignment,
            capacity=capacity,
            timeout=timeout,
        )
        ctx.buffer, ctx.handle, ctx.timeout = buffer, dispatched.handle, timeout
        ctx.local_idx = dispatched.handle.recv_topk_idx  # rank layout only: a row's k whose expert is local
        ctx.has_weights = topk_weights is not None
        if not ctx.has_weights and dispatched.topk_weights is not None:
            ctx.mark_non_differentiable(dispatched.topk_weights)
        assert isinstance(dispatched.x, Tensor)  # a pair has no gradient and was refused
        return dispatched.x, dispatched.topk_weights, dispatched

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        """Return the gradients of `x`, `[num_tokens, hidden]`, and of `topk_weights`; one combine, unweighted."""
        weights = None
        if ctx.has_weights:
            assert grad_weights is not None  # torch passes zeros if nothing used the output
            weights = grad_weights.contiguous()
            if ctx.local_idx is not None:
                # A weight that is not local was replaced by a constant 0 here: no gradient passes through it.
                weights = weights.masked_fill(ctx.local_idx < 0, 0.0)
        combined = ctx.buffer.combine(
            grad_x.contiguous(), ctx.handle.unweighted(), topk_weights=weights, timeout=ctx.timeout
        )
        return combined.x, combined.topk_weights, None, None, None, None, None, None


class _Combine(torch.autograd.Function):
    """Forward: `Buffer.combine`. Backward: one cached `Buffer.dispatch` of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        topk_weights: Tensor | None,
        bias: Tensor | None,
        second_bias: Tensor | None,
        buffer: Buffer,
        handle: Handle,
        timeout: float | None,
    ) -> Tensor:
        """Combine; in the expert layout keep the rows and their weights, whose products were summed."""
        both = tuple(tensor for tensor in (bias, second_bias) if tensor is not None)
        combined = buffer.combine(
            y, handle, bias=(both if len(both) == 2 else both[0]) if both else None, timeout=timeout
        )
        ctx.buffer, ctx.handle, ctx.timeout = buffer, handle, timeout
        ctx.bias_dtypes = [tensor.dtype for tensor in both]
        if handle.layout == "expert":
            ctx.save_for_backward(y, topk_weights)
        return combined.x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `y`, of the weights (expert layout) and of the biases; one cached dispatch."""
        rows = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle.unweighted(), timeout=ctx.timeout).x
        if ctx.handle.layout == "expert":
            y, topk_weights = ctx.saved_tensors
            grad_y, grad_weights = _expert_gradients(rows, y, topk_weights, ctx.handle)
        else:
            grad_y, grad_weights = rows, None
        biases = [grad.to(dtype) for dtype in ctx.bias_dtypes] + [None] * (2 - len(ctx.bias_dtypes))
        return grad_y, grad_weights, *biases, None, None, None


def _expert_gradients(rows: Tensor, y: Tensor, topk_weights: Tensor, handle: Handle) -> tuple[Tensor, Tensor]:
    """Return `grad_y` (like `y`) and `grad_w` `[num_recv]` (like the weights) from the gradient rows.

    Products are taken in the weights' precision (float32, or float64), as the forward does. Padding rows of `y` may
    hold anything, also NaN: nothing was summed from them, so their gradients are zero whatever they hold.
    """
    precision = torch.promote_types(topk_weights.dtype, y.dtype)
    wide = rows.to(precision)
    grad_y = (wide * topk_weights.to(precision)[:, None]).to(y.dtype)
    grad_weights = (wide * y.to(precision)).sum(-1).to(topk_weights.dtype)
    return grad_y, grad_weights.masked_fill(handle.src_rank < 0, 0.0)
