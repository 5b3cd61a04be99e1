"""Who is in the group, and who is known to be dead."""
