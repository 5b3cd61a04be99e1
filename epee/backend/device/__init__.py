"""Collectives on CUDA tensors that run on the GPUs, as far as the backend knows of them."""
