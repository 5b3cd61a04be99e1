"""Collectives on CUDA tensors, the device half of groups."""
