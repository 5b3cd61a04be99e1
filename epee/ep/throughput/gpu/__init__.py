"""The host side of `Buffer` on GPUs: lent memory, launches, what they bring."""
