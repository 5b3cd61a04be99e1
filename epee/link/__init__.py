"""Links between the hosts of a group: topology, frames, streams, sockets (`docs/hosts.md`; below `backend`)."""
