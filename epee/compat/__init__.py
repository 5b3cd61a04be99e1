"""Other libraries' names over epee's own API. They only translate arguments.

`python -m epee.compat -- CMD ...` runs a command whose processes find epee under these names (`__main__.py`).
"""
