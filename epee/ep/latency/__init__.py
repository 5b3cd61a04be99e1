"""The two paths of `LatencyBuffer`: padded output per expert, a send and a receive half, lost ranks left out."""
