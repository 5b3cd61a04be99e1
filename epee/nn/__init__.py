"""Differentiable dispatch and combine, and a Mixture-of-Experts layer made of them."""

from .dense import DenseMoELayer
from .functional import combine, dispatch
from .layer import MoELayer
from .parallel import expert_parameters, mark_experts, sync_gradients
from .router import Routing, route

__all__ = [
    "DenseMoELayer",
    "MoELayer",
    "Routing",
    "combine",
    "dispatch",
    "expert_parameters",
    "mark_experts",
    "route",
    "sync_gradients",
]
