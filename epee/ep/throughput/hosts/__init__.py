"""Buffers whose ranks run on several hosts: a token crosses the network once for each host that it goes to."""
