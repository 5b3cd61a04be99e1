"""Stand-ins for `deep_ep` and `mooncake`, in folders that `python -m epee.compat` puts at the head of PYTHONPATH.

Nothing is imported from this package: the folders are search paths, their packages have the other libraries' names.
"""
