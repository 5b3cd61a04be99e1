"""Messages between two ranks."""
