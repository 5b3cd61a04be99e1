"""Other libraries' names over epee's own API. Thin: no logic of their own beyond translating arguments.

`python -m epee.compat -- CMD ...` runs a command whose processes find epee under these names (`__main__.py`).
"""
