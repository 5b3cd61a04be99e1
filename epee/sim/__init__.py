"""A seeded simulator that drives the real agents, and the checker of histories. Nothing at run time needs it."""
