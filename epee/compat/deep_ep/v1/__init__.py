"""Implementation of the calls of V1's `Buffer`."""
