"""Messages between two ranks' GPUs: `send`, `recv` and their variants on CUDA tensors of one host."""
