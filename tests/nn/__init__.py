"""Tests of `epee.nn`."""
