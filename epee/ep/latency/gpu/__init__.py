"""The CPU side of `LatencyBuffer` on GPUs."""
