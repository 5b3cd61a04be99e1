"""`epee demo`: a small byte-level Mixture-of-Experts language model, trained over local processes through epee.

`run.py` is the program of the parent, `rank.py` that of each rank; `train.py` shows how to train with epee,
`survive.py` how to continue without a lost rank.
"""
