"""The two paths of `LatencyBuffer`: padded output per expert, a send and a receive phase, lost ranks excluded."""
