"""The CPU side of `Buffer` on GPUs: lent memory, launches, results."""
