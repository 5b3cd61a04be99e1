"""Tests of `epee.memory`."""
