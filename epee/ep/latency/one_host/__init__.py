"""How the rows of a `LatencyBuffer` on CPUs move between ranks that share memory: each pushes."""
