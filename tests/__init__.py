"""Tests of epee; the tree mirrors `epee/`."""
