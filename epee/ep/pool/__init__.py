"""Buffers for callers that give no sizes beforehand, as drop-in layers must: made, and made larger, as calls need."""
