"""The calls of one group: their order, who drives them, how a wait and a call end."""
