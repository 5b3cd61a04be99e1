"""`epee demo`: a small byte-level Mixture-of-Experts language model, trained over local processes through epee.

`run.py` is the whole story in the parent; `rank.py` the whole story in each rank.
"""
