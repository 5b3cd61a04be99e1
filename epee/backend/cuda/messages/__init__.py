"""Messages between two ranks' GPUs: `send`, `recv` and their kin on CUDA tensors of one host."""
