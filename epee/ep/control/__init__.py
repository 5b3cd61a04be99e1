"""The messages between the CPU sides of a buffer's ranks."""
