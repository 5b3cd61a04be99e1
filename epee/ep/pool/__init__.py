"""Buffers for callers that say no sizes beforehand, as drop-in layers must: made, and made larger, as calls need."""
