"""The agreement of the members of a view on the next one: pure, without clocks, threads or sockets."""
