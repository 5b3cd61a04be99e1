"""The host side of latency mode on GPUs."""
