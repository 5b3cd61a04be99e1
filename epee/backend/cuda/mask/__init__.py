"""Mode "mask" of collectives on CUDA tensors: a call that loses a rank succeeds over the remaining ranks."""
