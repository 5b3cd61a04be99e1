"""The transport of a `LatencyBuffer`'s rows on CPUs between ranks that share memory: each rank pushes."""
