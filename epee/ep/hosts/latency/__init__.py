"""`LatencyBuffer` over several hosts: one record per token and host, read where it lies by every rank of the host."""
