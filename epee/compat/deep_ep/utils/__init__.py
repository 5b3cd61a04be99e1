"""DeepEP's helpers: events, casts between bfloat16 and FP8; `envs`, `testing`, `refs`, `gate` for test scripts."""

from epee.compat.deep_ep.event import EventHandle, EventOverlap
from epee.compat.deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8

__all__ = ["EventHandle", "EventOverlap", "per_token_cast_back", "per_token_cast_to_fp8"]
