"""How the members of a view agree on the next one: pure, without clocks, threads or sockets."""
