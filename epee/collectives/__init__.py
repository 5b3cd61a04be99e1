"""Collectives of the GPUs of one host: kernels' arguments and memory, and the thin driver that launches them."""
