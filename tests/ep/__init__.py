"""Tests of `epee.ep`."""
