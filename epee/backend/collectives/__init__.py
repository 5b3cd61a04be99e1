"""The plans of the collectives for `operation.py`. They contain layouts and arithmetic, and no waiting."""
