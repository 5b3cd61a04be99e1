"""Other libraries' names over epee's own API. Thin: no logic of their own beyond translating arguments."""
