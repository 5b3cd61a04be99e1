"""Events, under the name that DeepEP has for their module."""

from epee.compat.deep_ep.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
