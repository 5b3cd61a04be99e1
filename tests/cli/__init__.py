"""Tests of `epee.cli`."""
