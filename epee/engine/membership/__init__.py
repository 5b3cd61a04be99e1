"""Membership changes of a group: losses, returns, growth."""
