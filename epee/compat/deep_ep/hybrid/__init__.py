"""HybridEP's interface (DeepEP's branch `hybrid-ep`), under its name there: `deep_ep.hybrid_ep_buffer`."""

from epee.compat.deep_ep.hybrid.buffer import HybridEPBuffer, indices_to_map

__all__ = ["HybridEPBuffer", "indices_to_map"]
