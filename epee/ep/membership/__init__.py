"""The membership of a buffer: the view of its ranks, losses, rejoins."""
