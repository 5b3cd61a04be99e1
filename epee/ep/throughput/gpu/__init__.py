"""The host side of throughput mode on GPUs: lent memory, launches, what they bring."""
