"""What this machine can do for epee and what not: `epee doctor`.

Checks are plain functions that try something and return a `Finding` (`finding.py`): about versions and the machine
(`machine.py`), about what processes may share (`sharing.py`, with real children), about what buffers need and hold
(`buffers.py`), about what groups over several hosts would use (`hosts/network.py`), about settings (`settings.py`),
and about GPUs (`gpu.py`, in a process of its own, because a driver may hang or crash). `report.py` runs them all.
Nothing is changed and nothing is left behind; every check is bounded in time, and none throws.

Other things are `hang.py`: what the ranks of a running job are doing (`epee doctor --pid`), and `hosts/reach.py`:
whether another host is reached (`epee doctor --listen` there, `--peer` here).
"""
