"""The host side of `LatencyBuffer` on GPUs."""
