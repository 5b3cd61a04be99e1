"""How a group begins, and how a process joins one."""
