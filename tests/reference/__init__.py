"""Tests of `epee.reference`."""
