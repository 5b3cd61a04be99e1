"""What stands behind the calls of V1's `Buffer`."""
