"""The oracle: the expected results of dispatch and combine, in plain torch from all ranks' inputs, without
communication.

It is independent of `epee/ep` and imports nothing of epee, so that an error in one cannot be hidden by the other.
Clear, slow, and exact: `dispatch` gives the rows bit for bit, `combine` follows the defined order of additions.
"""

from .exchange import Received, Routed, combine, combine_weights, dispatch, lost_weight, tokens_per_expert
from .two_level import combine_by_host, combine_weights_by_host

__all__ = [
    "Received",
    "Routed",
    "combine",
    "combine_by_host",
    "combine_weights",
    "combine_weights_by_host",
    "dispatch",
    "lost_weight",
    "tokens_per_expert",
]
