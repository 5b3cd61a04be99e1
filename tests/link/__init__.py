"""Tests of `epee.link`."""
