"""Tests of `epee.backend`."""
