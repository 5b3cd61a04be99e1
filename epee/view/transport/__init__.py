"""Discovery of agents, and the connections between them."""
