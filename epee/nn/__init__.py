"""Differentiable dispatch and combine, and a Mixture-of-Experts layer made of them."""

from .dense import DenseMoELayer
from .functional import combine, dispatch
from .layer import MoELayer
from .router import Routing, route

__all__ = ["DenseMoELayer", "MoELayer", "Routing", "combine", "dispatch", "route"]
