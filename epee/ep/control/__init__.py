"""What the ranks of a buffer tell each other as hosts."""
