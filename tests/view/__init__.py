"""Tests of `epee.view`."""
