"""epee."""
