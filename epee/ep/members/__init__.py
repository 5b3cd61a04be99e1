"""The ranks of a buffer: how they make it and join it, exchange the rows of its calls, and agree on its members."""
