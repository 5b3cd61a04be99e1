"""Tests of `epee.link.proxy`."""
