"""The creation of a group, and the joining of a process."""
