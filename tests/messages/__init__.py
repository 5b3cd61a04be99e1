"""Messages between CUDA tensors."""
