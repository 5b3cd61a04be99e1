"""`epee demo`: a small byte-level Mixture-of-Experts language model, trained over local processes through epee.

`run.py` is the whole story in the parent, `rank.py` the one in each rank; how to train with epee is in `train.py`, how
to go on without a lost rank in `survive.py`.
"""
