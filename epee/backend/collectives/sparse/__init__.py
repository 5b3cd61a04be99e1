"""Collectives on sparse tensors."""
