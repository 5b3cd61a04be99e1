"""Links between the hosts of a group: who is where, frames, streams, sockets (`docs/hosts.md`; below `backend`)."""
