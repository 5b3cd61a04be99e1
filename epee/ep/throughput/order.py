"""The orders in which a combine adds up: epee's own, and those of other libraries whose bits must be matched.

Sums of floating-point numbers depend on their order, so every order is spelled out here and has its oracle
(`reference/`). All orders add in float32 (float64 for float64 rows) and round to the payload's dtype at the end. An
order is a local matter: each rank sums the rows of its own tokens, and the peers need not know how.

    by        the values added to the accumulator, one after another
    "rank"    one value per destination rank, ranks ascending
    "last_k"  one value per destination rank, by the last k of the token whose expert is there
    "k"       expert layout: one row per k, ascending, from any rank

A rank's value is its row (rank layout), or the sum, from -0.0 and by k ascending, of its weighted rows (expert layout).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import InvalidArgument

ORDERS = ("rank", "last_k", "k")


@dataclass(frozen=True, eq=False)
class CombineOrder:
    """The order in which a combine adds up one token.

    Attributes:
        by: one of the orders in the module's docstring.
        bias_first: start from the sum of the biases instead of nothing, and add none at the end.
        round_partials: expert layout: round each rank's sum to the payload's dtype before it is added.
        topk_idx: `[num_tokens, num_topk]` int64, the routing of the dispatch; the rank layout needs it for "last_k",
            because its handles do not keep it.
    """

    by: str = "rank"
    bias_first: bool = False
    round_partials: bool = False
    topk_idx: torch.Tensor | None = None


RANKS_THEN_BIAS = CombineOrder()  # epee's own


def check_order(order: object, layout: str) -> CombineOrder:
    """Return `order`, None meaning epee's own.

    Raises:
        InvalidArgument: it is no order, or not one of this layout.
    """
    if order is None:
        return RANKS_THEN_BIAS
    if not isinstance(order, CombineOrder) or order.by not in ORDERS:
        raise InvalidArgument(f"order must be None or a CombineOrder by one of {', '.join(ORDERS)}, got {order!r}")
    if layout == "rank" and (order.by == "k" or order.round_partials):
        raise InvalidArgument(
            'order by "k" and round_partials need the expert layout: in the rank layout each rank has summed already'
        )
    return order


def is_own_order(order: CombineOrder, num_ranks: int, num_bias: int) -> bool:
    """Return whether `order` gives the bits of epee's own, which is faster: then nothing has to be reordered."""
    if order.round_partials or order.by == "k" or (num_bias and order.bias_first):
        return False
    return order.by == "rank" or num_ranks <= 2  # a + b is b + a


def last_k(topk_idx: torch.Tensor, num_ranks: int, num_local_experts: int) -> torch.Tensor:
    """Return `[num_tokens, num_ranks]` int64: the last k whose expert lives on the rank, -1 for none."""
    num_tokens, num_topk = topk_idx.shape
    last = topk_idx.new_full((num_tokens, num_ranks + 1), -1)
    column = topk_idx.div(num_local_experts, rounding_mode="floor").remainder_(num_ranks + 1)  # -1: the extra column
    for k in range(num_topk):
        last.scatter_(1, column[:, k : k + 1], k)
    return last[:, :num_ranks]
