"""Latency mode: padded output per expert, a send and a receive half, lost ranks left out."""
