"""The calls of one group: their order, the threads that drive them, the end of a wait and of a call."""
