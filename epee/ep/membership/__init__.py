"""Who takes part in a buffer: the view of its ranks, losses, returns."""
