"""What each collective moves: plans for `operation.py`. They know layouts and arithmetic, nothing about waiting."""
