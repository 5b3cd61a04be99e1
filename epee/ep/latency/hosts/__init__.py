"""`LatencyBuffer` over several hosts: one record per token and host, read in place by every rank of the host."""
